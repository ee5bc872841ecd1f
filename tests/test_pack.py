"""Packing from end to end: accounts, identity of bytes, interruptions, reuse, refusals."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import pipeline.pack
import pipeline.publish
import pipeline.shards
from pipeline.manifest import DatasetError, Manifest
from pipeline.pack import Settings, pack
from pipeline.publish import hold
from pipeline.render import MismatchError
from pipeline.shards import PackedDataset, verify_hashes
from pipeline.verify import verify_semantics
from tests.chatml import write_tokenizer
from tests.chats import small_chats, write_parquet


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Settings over 60 small chats; keywords replace them."""
    source = write_parquet(tmp_path / "in" / "train.parquet", small_chats(60))
    tokenizer = write_tokenizer(tmp_path / "tok")

    def settings(**changes: Any) -> Settings:
        base = {"source": str(source), "tokenizer": str(tokenizer), "max_tokens": 256, "out": tmp_path / "out",
                "cache_dir": tmp_path / "cache", "workers": 1}  # fmt: skip
        return Settings(**(base | changes))

    return settings


def content(out: Path) -> dict[str, Any]:
    """Every file's bytes; of the manifest what is the same for every run."""
    files: dict[str, Any] = {
        p.relative_to(out).as_posix(): p.read_bytes()
        for p in out.rglob("*")
        if p.is_file() and p.name != "manifest.json"
    }
    body = json.loads((out / "manifest.json").read_bytes())
    return files | {"manifest": {k: v for k, v in body.items() if k not in ("created", "checksum")}}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.pack", *args]


def arguments(settings: Settings, *changes: str) -> list[str]:
    """A command line; what ``changes`` sets is left to them."""
    names = ("source", "tokenizer", "out", "cache_dir", "max_tokens", "workers")
    given = {f"--{name.replace('_', '-')}": str(getattr(settings, name)) for name in names}
    return [part for flag, value in given.items() if flag not in changes for part in (flag, value)] + [*changes]


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
@pytest.mark.parametrize("max_tokens", [64, 255, 8193])
def test_every_policy_gives_a_dataset_that_verifies_and_accounts_for_every_token(
    make: Any, overflow: Any, max_tokens: int
) -> None:
    settings = make(overflow=overflow, max_tokens=max_tokens)
    totals = pack(settings).totals
    dataset = PackedDataset.open(settings.out)
    verify_hashes(dataset)
    verify_semantics(dataset)
    assert totals["chats_read"] == 60 == totals["documents"] + sum(totals["rejected"].values())
    assert totals["tokens_rendered"] == totals["tokens"] + totals["tokens_cut"] + totals["tokens_rejected"]
    assert totals["rows"] * max_tokens == totals["tokens"] + totals["padding"]


def test_overflow_error_stops_and_leaves_no_dataset(make: Any) -> None:
    with pytest.raises(ValueError, match="raise --max-tokens"):
        pack(make(overflow="error", max_tokens=64))
    assert not (make().out).exists()


def test_parquet_jsonl_and_a_folder_of_both_hold_the_same_rows(make: Any, tmp_path: Path) -> None:
    lines = tmp_path / "lines" / "train_sft-1.jsonl"
    lines.parent.mkdir()
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in small_chats(60)))
    pack(make())
    for name, source in (("a", lines), ("b", lines.parent)):
        pack(make(source=str(source), out=tmp_path / name))
        shard = "shard-00000.arrow"
        rows = zip(PackedDataset.open(tmp_path / name), PackedDataset.open(tmp_path / "out"), strict=True)
        assert all((a.input_ids == b.input_ids).all() for a, b in rows), shard


def test_any_number_of_workers_gives_the_same_bytes(make: Any, tmp_path: Path) -> None:
    pack(make(max_tokens=64, overflow="split"))
    for workers in (2, 3):
        out = tmp_path / f"out{workers}"
        pack(make(max_tokens=64, overflow="split", out=out, cache_dir=tmp_path / f"c{workers}", workers=workers))
        assert content(out) == content(tmp_path / "out")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_at_any_call_leaves_no_manifest_and_the_rerun_gives_the_same_bytes(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pack(make(out=tmp_path / "right"))
    real, num_failures = getattr(os, call), 0
    for n in range(200):
        settings, left = make(out=tmp_path / f"o{n}", cache_dir=tmp_path / f"c{n}"), [n]

        def fail(*args: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            try:
                pack(settings)
                break
            except OSError:
                num_failures += 1
        if (settings.out / "manifest.json").exists():  # only what follows its rename failed
            verify_hashes(PackedDataset.open(settings.out))
        assert not [*settings.out.rglob(".*.tmp"), *settings.cache_dir.rglob(".*.tmp")]
        pack(settings)
        assert content(settings.out) == content(tmp_path / "right")
    assert num_failures > 8


def test_kill_9_at_any_moment_leaves_no_manifest_and_the_last_run_gives_the_same_bytes(
    make: Any, tmp_path: Path
) -> None:
    pack(make(out=tmp_path / "right", cache_dir=tmp_path / "other"))
    settings = make(workers=2)
    for delay in (0.4, 0.7, 0.9, 1.1):
        process = subprocess.Popen(command(*arguments(settings)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        time.sleep(delay)
        process.kill()
        process.communicate()
        if (settings.out / "manifest.json").exists():
            verify_hashes(PackedDataset.open(settings.out))
    pack(settings)
    assert content(settings.out) == content(tmp_path / "right")


def test_a_rerun_keeps_completed_shards(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make(max_tokens=64)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.publish.Run, "finish", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            pack(settings)
    before = {p.name: p.stat().st_ino for p in settings.out.glob("shard-*")}
    pack(settings)
    assert before
    assert before == {p.name: p.stat().st_ino for p in settings.out.glob("shard-*")}


def test_encoded_blocks_serve_any_row_length_seed_and_overflow(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(make())
    monkeypatch.setattr(pipeline.pack, "encode_block", lambda *_: pytest.fail("encoded again"))
    for i, changes in enumerate([{"max_tokens": 100}, {"seed": 5}, {"overflow": "split"}]):
        pack(make(out=tmp_path / str(i), **changes))


def test_a_finished_dataset_is_recognised_without_heavy_imports_and_nothing_is_written(make: Any) -> None:
    settings = make()
    pack(settings)
    before = {p: p.stat().st_mtime_ns for p in settings.out.rglob("*")}
    program = (
        "import sys; from pipeline.pack import main; assert main() == 0; "
        "assert not {'torch', 'transformers', 'datasets', 'polars'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments(settings)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert before == {p: p.stat().st_mtime_ns for p in settings.out.rglob("*")}


def test_another_recipe_is_refused_and_the_differing_fields_named(make: Any) -> None:
    pack(make())
    with pytest.raises(DatasetError, match=r"pack\.seed: 0 -> 1"):
        pack(make(seed=1))


def test_the_same_data_elsewhere_is_the_same_dataset_and_a_changed_file_is_not(make: Any, tmp_path: Path) -> None:
    first = pack(make())
    copy = tmp_path / "elsewhere" / "train.parquet"
    copy.parent.mkdir()
    copy.write_bytes(Path(make().source).read_bytes())
    moved = pack(make(source=str(copy), out=tmp_path / "o2", cache_dir=tmp_path / "c2"))
    assert (moved.fingerprint, moved.dataset_id) == (first.fingerprint, first.dataset_id)
    prints = {first.fingerprint}
    for i, (name, more) in enumerate([("chat_template.jinja", "{##}"), ("tokenizer.json", " ")]):
        tokenizer = write_tokenizer(tmp_path / f"tok{i}")
        (tokenizer / name).write_text(more + (tokenizer / name).read_text())
        prints.add(pack(make(tokenizer=str(tokenizer), out=tmp_path / f"t{i}")).fingerprint)
    prints.add(pack(make(limit=59, out=tmp_path / "limit")).fingerprint)
    assert len(prints) == 4


def test_rehash_finds_a_source_that_changed_behind_the_same_size_time_and_inode(make: Any, tmp_path: Path) -> None:
    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in small_chats(60)))
    first = pack(make(source=str(lines)))
    stat, text = lines.stat(), lines.read_text()
    with lines.open("r+") as file:
        file.write(text.replace("star", "moon"))
    os.utime(lines, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert [lines.stat().st_size, lines.stat().st_ino] == [stat.st_size, stat.st_ino]
    assert pack(make(source=str(lines))).fingerprint == first.fingerprint  # remembered: the file is not read
    with pytest.raises(DatasetError, match=r"asked for\):\n  source\[0\]\.files\[0\]\.sha256: '\w+' -> '\w+'\nChoose"):
        pack(make(source=str(lines), rehash=True))
    other = pack(make(source=str(lines), out=tmp_path / "other"))  # what rehash found is remembered in turn
    assert other.fingerprint != first.fingerprint
    assert other.dataset_id != first.dataset_id


def test_a_changed_source_is_refused_for_the_same_folder_and_the_differing_fields_named(
    make: Any, tmp_path: Path
) -> None:
    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in small_chats(60)))
    first = pack(make(source=str(lines)))
    before = content(make().out)
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in small_chats(61)))
    with pytest.raises(DatasetError, match=r"another recipe[^$]*files\[0\]\.bytes[^$]*files\[0\]\.sha256"):
        pack(make(source=str(lines)))
    assert content(make().out) == before
    assert pack(make(source=str(lines), out=tmp_path / "other")).fingerprint != first.fingerprint


def refused_by(server: socket.socket, command: list[str], *, hangs: bool, **more: Any) -> str:
    """What a command says on stderr that cannot reach its hub, 30 seconds after it has asked there at the latest."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **more)
    with contextlib.ExitStack() as connections:
        if hangs:  # how long a slow machine takes to start the command is not its waiting
            server.settimeout(300)
            connections.enter_context(server.accept()[0])
        asked = time.monotonic()
        error = process.communicate(timeout=300)[1]
        assert not hangs or time.monotonic() - asked < 30
    assert process.returncode == 2, error
    return error


def test_without_arguments_and_a_network_pack_says_within_30_seconds_what_it_could_not_reach(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)  # connections open and nobody answers: the slowest way to have no network
        hub = f"http://127.0.0.1:{server.getsockname()[1]}"
        root = Path(__file__).resolve().parent.parent
        env = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(root)}
        error = refused_by(server, command(), hangs=True, env=env, cwd=tmp_path)
    assert "HuggingFaceH4/ultrachat_200k" in error
    assert "--source data/sample --tokenizer data/sample" in error
    assert "Traceback" not in error
    assert not (tmp_path / "data" / "packed").exists()


def test_foreign_files_are_refused_and_kept(make: Any) -> None:
    settings = make()
    settings.out.mkdir()
    (settings.out / "shard-notes.txt").write_text("mine")
    with pytest.raises(DatasetError, match="not empty"):
        pack(settings)
    assert (settings.out / "shard-notes.txt").read_text() == "mine"


def test_what_another_recipe_left_unfinished_is_replaced(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.publish.Run, "finish", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            pack(make(max_tokens=64))
    pack(make(max_tokens=128))
    verify_hashes(PackedDataset.open(make().out))


def test_a_second_run_on_one_folder_is_refused(make: Any) -> None:
    with hold(make().out, wait=False, what="out"), pytest.raises(DatasetError, match="another run"):
        pack(make())


def test_too_little_disk_is_said_before_anything_is_written(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(pipeline.publish.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"need about \d{1,3}(,\d{3})* bytes, 10 are free; make room"):
        pack(make())
    assert not make().out.exists()


def test_a_mismatch_falls_back_to_the_references_for_good(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(make(out=tmp_path / "right", cache_dir=tmp_path / "other"))
    real = pipeline.pack.encode_block

    def differs(encoder: Any, *args: Any) -> Any:
        if encoder._fast:
            raise MismatchError("a fast path differs")
        return real(encoder, *args)

    monkeypatch.setattr(pipeline.pack, "encode_block", differs)
    pack(make())
    assert "without fast paths" in capsys.readouterr().err
    assert content(make().out) == content(tmp_path / "right")


def test_other_content_of_the_same_recipe_is_warned_of(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    settings = make()
    manifest: Manifest = pack(settings)
    memo = settings.cache_dir / "made" / manifest.fingerprint[:32]
    memo.unlink()
    memo.write_text(json.dumps({"dataset_id": "x", "versions": {"pyarrow": "1"}}))
    for path in sorted(settings.out.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    pack(settings)
    assert "pyarrow: '1' ->" in capsys.readouterr().err


NEVER_DONE = """
import sys, time
import pipeline.publish
from pipeline.pack import main
pipeline.publish.Run.finish = lambda *_: [time.sleep(0.05) for _ in range(18_000)]  # Ctrl-C comes before the end
sys.exit(main())
"""


def test_ctrl_c_exits_130_and_leaves_nothing_half_written(make: Any, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "big.parquet", small_chats(6000), rows_in_group=500)
    settings = make(source=str(source), workers=2)
    process = subprocess.Popen(
        [sys.executable, "-c", NEVER_DONE, *arguments(settings)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell hands down "ignore"
    )
    deadline = time.monotonic() + 300
    while not settings.out.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert not (settings.out / "manifest.json").exists()
    assert not [*settings.out.rglob(".*.tmp"), *settings.cache_dir.rglob(".*.tmp")]


@pytest.mark.parametrize("what", ["source", "tokenizer"])
@pytest.mark.parametrize("hangs", [True, False])
def test_without_a_network_one_error_names_the_local_options(
    make: Any, tmp_path: Path, what: str, *, hangs: bool
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if hangs:
            server.listen(64)
        settings = make(**{what: "owner/name"})
        env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        error = refused_by(server, command(*arguments(settings)), hangs=hangs, env=env)
    assert "data/sample" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--seed", "-1"], "--seed -1"),
        (["--max-tokens", "1"], "--max-tokens 1"),
        (["--workers", "0"], "--workers 0"),
        (["--template-kwargs", "["], "--template-kwargs ["),
        (["--template-kwargs", '{"messages": []}'], "messages cannot be set"),
        (["--source", "/missing.parquet", "--template-kwargs", '{"tools": 1}'], "tools cannot be set"),
        (["--source", "/missing.parquet"], "--source /missing.parquet"),
        (["--limit", "0"], "--limit 0"),
        (["--max-tokens", "3000000000"], "--max-tokens 3000000000"),
        (["--revision", "abc"], "--revision abc"),
        (["--cache-dir", "here", "--out", "here"], "--out here: --cache-dir here"),
        (["--cache-dir", "here/cache", "--out", "here"], "--out here: --cache-dir here/cache"),
    ],
)
def test_bad_settings_exit_2_with_one_line(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: list[str], words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["pack", *arguments(make(), *changes)])
    monkeypatch.chdir(make().out.parent)
    assert pipeline.pack.main() == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not Path("here").exists()


def test_a_variable_that_the_template_never_reads_is_told_in_every_run(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for dry_run in (True, False, False):
        run = pipeline.pack.dry_run if dry_run else pack
        run(make(template_kwargs='{"moood": 1}', dry_run=dry_run))
        lines = [line for line in capsys.readouterr().err.splitlines() if "never reads" in line]
        assert len(lines) == 1
        assert re.match(r"warning: --template-kwargs: .* moood \(.*tok/chat_template\.jinja\)", lines[0])


def test_the_summary_names_rows_fill_rejects_and_seconds(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pack(make())
    text = capsys.readouterr().out
    assert all(f"{word} " in text for word in ("rows", "fill", "rejected", "seconds"))
