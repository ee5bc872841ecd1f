"""Folders that get their name when they are finished: neighbours, other processes, failures and full disks."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.folders import publish_folder, start_folder


def write(final: Path, text: str) -> None:
    temporary = start_folder(final)
    (temporary / "file").write_text(text)
    publish_folder(temporary, final)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("other", ["lora-4b", "new-4b", "4b-lora"])
def test_a_folder_being_written_beside_one_of_a_similar_name_is_left_alone(tmp_path: Path, other: str) -> None:
    temporary = start_folder(tmp_path / other)
    (temporary / "file").write_text("theirs")
    write(tmp_path / "4b", "ours")
    publish_folder(temporary, tmp_path / other)
    assert (tmp_path / other / "file").read_text() == "theirs"
    assert names(tmp_path) == sorted(["4b", other])


HOLD = """
import sys
from pathlib import Path
from trainer.folders import start_folder
(start_folder(Path(sys.argv[1])) / "file").write_text("theirs")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_has_ended_and_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="out: another process is writing it"):
            start_folder(tmp_path / "out")
        assert (tmp_path / ".tmp-new-out" / "file").read_text() == "theirs"
        process.send_signal(signal.SIGKILL)
        process.wait()
    (tmp_path / ".tmp-new-out" / "inner").mkdir()
    assert names(start_folder(tmp_path / "out")) == []


@pytest.mark.parametrize("how", ["published", "begun again"])
def test_a_folder_that_its_holder_lets_go_while_we_ask_for_it_is_not_emptied(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = start_folder(tmp_path / "out")
    (temporary / "file").write_text("theirs")

    def let_go_just_before(*_: object) -> None:
        temporary.rename(tmp_path / "out")
        if how == "begun again":
            temporary.mkdir()  # by a third process

    monkeypatch.setattr(fcntl, "flock", let_go_just_before)
    with pytest.raises(ValueError, match="another process is writing it"):
        start_folder(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "theirs"


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(9, os.strerror(9))

    monkeypatch.setattr(fcntl, "flock", refuse)
    write(tmp_path / "out", "whole")
    assert names(tmp_path) == ["out"]


def open_below(folder: Path) -> list[str]:
    """What this process holds open there, removed or not; other tests' descriptors may be closed at any moment."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(entry.readlink()))
    return sorted(name.removesuffix(" (deleted)") for name in found if name.startswith(f"{folder.resolve()}/"))


def test_writing_again_in_one_process_leaks_no_descriptor(tmp_path: Path) -> None:
    write(tmp_path / "out", "0")
    before = open_below(tmp_path)
    for _ in range(3):
        start_folder(tmp_path / "out")
        write(tmp_path / "out", "1")
    assert open_below(tmp_path) == before


@pytest.mark.parametrize("error", [OSError(5, "EIO"), KeyboardInterrupt()])
def test_a_failure_between_the_renames_leaves_the_former_folder(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", "former")

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(type(error)):
            write(tmp_path / "out", "later")
    assert (tmp_path / "out" / "file").read_text() == "former"
    assert names(tmp_path) == ["out"]
    write(tmp_path / "out", "later")
    assert (tmp_path / "out" / "file").read_text() == "later"
    assert names(tmp_path) == ["out"]


def test_a_kill_between_the_renames_does_not_cost_the_former_folder(tmp_path: Path) -> None:
    write(tmp_path / "out", "former")
    (start_folder(tmp_path / "out") / "file").write_text("later")
    (tmp_path / "out").rename(tmp_path / ".tmp-old-out")
    temporary = start_folder(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "former"
    assert names(temporary) == []
    publish_folder(temporary, tmp_path / "out")
    assert names(tmp_path) == ["out"]
