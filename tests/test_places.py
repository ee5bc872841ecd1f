"""Folders that cannot be written to: refused before the source is read, and explained when they fail later."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pipeline.pack
from pipeline.manifest import MANIFEST
from pipeline.pack import Settings, pack
from pipeline.places import check_place, explained
from tests.chatml import write_tokenizer
from tests.chats import small_chats, write_parquet


@pytest.fixture
def given(tmp_path: Path) -> dict[str, str]:
    """A command line over 60 small chats."""
    return {
        "--source": str(write_parquet(tmp_path / "in" / "train.parquet", small_chats(60))),
        "--tokenizer": str(write_tokenizer(tmp_path / "tok")),
        "--out": str(tmp_path / "out"),
        "--cache-dir": str(tmp_path / "cache"),
        "--max-tokens": "256",
        "--workers": "1",
    }


def words(given: dict[str, str]) -> list[str]:
    return [word for option in given.items() for word in option]


@pytest.mark.parametrize("flag", ["--out", "--cache-dir"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file", "this is a file"),
        ("file/x/y", "/file is a file"),
        ("nowhere", "this is a link to nothing"),
        ("loop/x", "symbolic links"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_that_cannot_serve_is_refused_by_its_flag_before_the_source_is_read(
    given: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    more: list[str],
    place: str,
    reason: str,
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    where = str(tmp_path / place)
    monkeypatch.setattr(pipeline.pack, "open_source", lambda *_, **__: pytest.fail("the source is read"))
    monkeypatch.setattr(sys, "argv", ["pack", *words(given | {flag: where}), *more])
    before = sorted(tmp_path.rglob("*"))
    assert pipeline.pack.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flag} {where}: ")
    assert reason in error
    assert "choose another folder" in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_system_that_takes_no_folder_is_found_out_by_trying() -> None:
    with pytest.raises(ValueError, match=r"--out /proc/x/y: this cannot be made in /proc \(.*\); choose another"):
        check_place("--out", Path("/proc/x/y"), write=True)


@pytest.mark.parametrize("there", [True, False])
def test_a_place_without_the_right_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, there: bool
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    folder = tmp_path if there else tmp_path / "a" / "b"
    with pytest.raises(ValueError, match=r"--out .*: this cannot be .*\(Permission denied\); choose another folder"):
        check_place("--out", folder, write=True)
    check_place("--out", folder, write=False)


def test_a_finished_dataset_is_recognised_where_nothing_can_be_written(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {name[2:].replace("-", "_"): value for name, value in given.items()}
    settings |= {"out": Path(given["--out"]), "cache_dir": Path(given["--cache-dir"]), "max_tokens": 256, "workers": 1}
    made = pack(Settings(**settings))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert pack(Settings(**settings)).dataset_id == made.dataset_id


def test_a_file_that_may_not_grow_is_named_with_its_flag_and_the_same_command_goes_on(given: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pipeline.pack", *words(given | {"--max-tokens": "65536"})]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024, resource.RLIM_INFINITY))

    stopped = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert stopped.returncode == 2
    error = stopped.stderr.splitlines()[-1]
    assert error.startswith(f"error: --out {given['--out']}: {given['--out']}/shard-00000.arrow: File too large. ")
    assert "ulimit -f" in error
    assert "the same command goes on" in error
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert (Path(given["--out"]) / MANIFEST).exists()


def test_every_error_of_the_system_says_where_why_and_what_next(tmp_path: Path) -> None:
    places = {"--out": str(tmp_path / "out"), "--cache-dir": str(tmp_path / "cache")}
    for number, advice in ((errno.ENOSPC, "Make room"), (errno.EACCES, "Give"), (errno.EIO, "Put that right")):
        said = explained(OSError(number, os.strerror(number), str(tmp_path / "cache" / "a")), places)
        assert said.startswith(f"--cache-dir {tmp_path}/cache: {tmp_path}/cache/a: {os.strerror(number)}. {advice}")
        assert "Errno" not in said
    assert explained(OSError("in words"), places) == "in words"
    assert explained(OSError(errno.ENOSPC, "full"), places) == "full. Make room; the same command goes on from here."
    assert explained(OSError(errno.EIO, "bad", "/elsewhere"), places).startswith("/elsewhere: bad. ")


def test_a_file_that_was_opened_by_its_number_is_explained_too() -> None:
    assert explained(FileExistsError(errno.EEXIST, "File exists", 3), {"--out": "x"}).startswith("File exists. ")
