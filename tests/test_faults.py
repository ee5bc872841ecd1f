"""What fault injection found, each fault on its own, and a short run of every kind of ``tests.faults``."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import pipeline.pack
import pipeline.publish
from pipeline.memo import read_note, write_note
from pipeline.pack import Settings, pack
from pipeline.publish import hold
from pipeline.shards import DatasetError, PackedDataset, publish
from pipeline.source import open_source, read_block
from tests.chatml import write_tokenizer
from tests.chats import small_chats, write_parquet
from tests.packed import make_packed, random_rows
from tests.scene import ROOT, Scene, content, make_scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """150 chats in two blocks."""
    return make_scene(tmp_path_factory.mktemp("scene"), num_chats=150, num_blocks=2)


def test_a_few_faults_of_every_kind_leave_no_dataset_or_a_whole_one_and_the_rerun_gives_the_same_bytes() -> None:
    kinds = ["kill", "steps", "disk", "two", "flips", "cache"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--short", "--only", *kinds],
        capture_output=True, text=True, cwd=ROOT, timeout=1800,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in lines] == kinds
    assert all(re.search(r"\b[1-9]\d* (kills|ended|steps|files|pairs|bit|flips|skipped)", x) for x in lines)


def interrupted(scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of a run that was stopped just before its manifest."""
    settings = scene.settings(name)

    def stop(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.publish.Run, "finish", stop)
        with pytest.raises(OSError, match="stopped here"):
            pack(settings)
    return settings


@pytest.mark.parametrize(
    ("pattern", "old", "new"),
    [
        ("*/block-*.json", b'"num_chats": 75', b'"num_chats": 74'),
        ("*/block-*.json", b'"detail": "1 control', b'"detail": "3 control'),
        ("runs/*/shard-*.json", b'"targets": ', b'"targets": 1'),
        ("runs/*/shard-*.json", b'"rows"', b'"rowr"'),
        ("digests.json", b'"xxh3_128"', b'"xxh3_129"'),
    ],
)
def test_a_damaged_note_in_the_cache_is_not_believed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pattern: str, old: bytes, new: bytes
) -> None:
    pack(scene.settings(tmp_path.name))
    settings = interrupted(scene, f"{tmp_path.name}-damaged", monkeypatch)
    file = sorted(settings.cache_dir.glob(pattern))[0]
    data = file.read_bytes()
    assert old in data
    file.chmod(0o644)
    file.write_bytes(data.replace(old, new))
    pack(settings)
    assert content(settings.out) == content(scene.settings(tmp_path.name).out)


def test_a_note_is_read_back_and_any_changed_byte_makes_it_none(tmp_path: Path) -> None:
    path, body = tmp_path / "note.json", {"a": [1, "é", None], "b": {"c": 2**40}}
    write_note(path, body)
    assert read_note(path) == body
    data = path.read_bytes()
    path.chmod(0o644)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert read_note(path) is None
    for junk in (b"", b"[]", b"{}", b"[" * 5000, json.dumps({"body": [], "xxh3_128": ""}).encode()):
        path.write_bytes(junk)
        assert read_note(path) is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_found_and_named_and_never_waited_for(tmp_path: Path, make: Any) -> None:
    dataset = make_packed(tmp_path / "d", random_rows(num_rows=3, max_tokens=8, vocab_size=9), max_tokens=8)
    lines = dataset / "rejects.jsonl"
    assert lines.stat().st_size == 0
    lines.unlink()
    make(lines)
    with pytest.raises(DatasetError, match=r"rejects\.jsonl: expected a file of 0 bytes, found no regular file"):
        PackedDataset.open(dataset)


def test_a_jsonl_file_that_became_shorter_while_it_was_read_is_an_error_and_no_row_is_made_up(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"messages": []}\n' * 3)
    more: dict[str, Any] = {"revision": None, "messages_column": "messages", "tools_column": None, "limit": None}
    blocks = open_source(str(path), split="train", cache_dir=tmp_path / "cache", **more).blocks()
    path.write_text('{"messages": []}\n' * 2)
    with pytest.raises(ValueError, match=r"train\.jsonl: shorter than it was"):
        list(read_block(blocks[0]))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_source_replaced_after_its_digest_was_taken_is_an_error_and_its_rows_are_in_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def write(path: Path, number: int) -> Path:
        chats = small_chats(20, seed=number)
        if kind == "parquet":
            return write_parquet(path, chats)
        path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        return path

    source, other, real = write(tmp_path / f"x.{kind}", 0), write(tmp_path / f"y.{kind}", 1), pipeline.pack.open_source
    settings = Settings(source=str(source), tokenizer=str(write_tokenizer(tmp_path / "tok")), max_tokens=256,
                        out=tmp_path / "out", cache_dir=tmp_path / "cache", workers=1)  # fmt: skip

    def replaced(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        other.replace(source)
        return found

    monkeypatch.setattr(pipeline.pack, "open_source", replaced)
    with pytest.raises(ValueError, match=rf"x\.{kind}: written anew since its digest was taken"):
        pack(settings)
    assert not settings.out.exists()
    assert not [*settings.cache_dir.glob("*/block-*")]


def test_an_error_of_a_full_disk_names_the_file_that_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/shard-00000\.arrow'"):
        publish(tmp_path / "shard-00000.arrow", b"x")


def test_a_finished_dataset_is_no_error_where_only_the_note_about_it_does_not_fit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = scene.settings(tmp_path.name)
    monkeypatch.setattr(pipeline.publish.Run, "_note_drift", full)
    pack(settings)
    assert not [*(settings.cache_dir / "runs").iterdir()]


def test_who_waited_for_a_folder_that_the_other_run_removed_holds_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    real, waits, seen = fcntl.flock, threading.Event(), []

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            waits.set()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)

    def second() -> None:
        with hold(folder, wait=True, what="out"):
            (folder / "x").write_text("y")
            seen.append(folder.stat().st_ino)

    with hold(folder, wait=False, what="out"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(300)  # the other holds nothing yet; leaving removes the empty folder that it waits for
    thread.join(300)
    assert seen == [folder.stat().st_ino]
    assert [path.name for path in folder.iterdir()] == ["x"]
