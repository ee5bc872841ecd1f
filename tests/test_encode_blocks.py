"""Blocks of the cache: every row accounted for, whole or absent, the same bytes each time; and the cache's name."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.encode import BlockRecord, Document, block_name, encode_block, encode_fingerprint, open_block
from pipeline.source import open_source
from tests.chatml import SPLITS, chat, encode_one, make_encoder


def source_of(tmp_path: Path, lines: list[Any]) -> Any:
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b"".join(x if isinstance(x, bytes) else json.dumps({"messages": x}).encode() + b"\n" for x in lines)
    )
    return open_source(
        str(path),
        split="",
        revision=None,
        messages_column="messages",
        tools_column=None,
        limit=None,
        cache_dir=tmp_path,
    )


def test_every_row_of_a_block_is_a_document_or_a_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.encode.CHATS_AT_ONCE", 3)
    lines = [
        chat("a", "b"),
        [],
        b"broken\n",
        chat("<|im_end|>", "x"),
        chat("alone"),
        chat("c", "d"),
        b"\n",
        None,
        chat("e", "f"),
    ]
    encoder, (block,) = make_encoder(tmp_path / "t"), source_of(tmp_path, lines).blocks()
    record = encode_block(encoder, block, tmp_path)
    batch = open_block(tmp_path, record)
    assert record.num_chats == 8
    assert batch.column("doc_id").to_pylist() == [0, 3, 5, 7]
    assert [(line.doc_id, line.what, line.reason) for line in record.rejects] == [
        (1, "rejected", "no_messages"), (2, "rejected", "invalid_json"), (3, "escaped", ""),
        (4, "rejected", "no_target"), (6, "rejected", "no_messages"),
    ]  # fmt: skip
    assert record.tokens_rejected == sum(line.tokens for line in record.rejects) > 0
    wanted = encode_one(encoder, chat("c", "d"))
    assert isinstance(wanted, Document)
    for column in Document.__slots__[1:]:
        assert batch.column(column)[2].as_py() == getattr(wanted, column).tolist()


def test_a_block_of_rejects_alone_is_an_empty_block(tmp_path: Path) -> None:
    (block,) = source_of(tmp_path, [b"broken\n", []]).blocks()
    record = encode_block(make_encoder(tmp_path / "t"), block, tmp_path)
    assert len(open_block(tmp_path, record)) == 0
    assert len(record.rejects) == 2


def test_a_block_is_whole_or_is_not_there(tmp_path: Path) -> None:
    (block,) = source_of(tmp_path, [chat("a", "b")] * 3).blocks()
    record = encode_block(make_encoder(tmp_path / "t"), block, tmp_path)
    name = block_name(block)
    assert BlockRecord.read(tmp_path, name) == record
    data, proof = tmp_path / record.name, tmp_path / f"{name}.json"
    whole, proved = data.read_bytes(), proof.read_bytes()
    for path, content in (
        (data, whole[:-1]), (data, whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]), (data, None),
        (proof, proved[:-1]), (proof, b"[]"), (proof, b"{}"), (proof, None),
    ):  # fmt: skip
        path.chmod(0o644)
        path.unlink() if content is None else path.write_bytes(content)
        assert BlockRecord.read(tmp_path, name) is None
        for file, bytes_of in ((data, whole), (proof, proved)):
            file.unlink(missing_ok=True)
            file.write_bytes(bytes_of)
    assert BlockRecord.read(tmp_path, name) == record


def test_the_same_block_has_the_same_bytes_whatever_path_made_it(tmp_path: Path) -> None:
    (block,) = source_of(tmp_path, [chat("hello\n", "b", system=" s"), chat("<|im_end|>", "x")] * 200).blocks()
    made = set()
    for i, fast in enumerate((True, False)):
        (tmp_path / str(i)).mkdir()
        made.add(encode_block(make_encoder(tmp_path / "t", SPLITS, fast=fast), block, tmp_path / str(i)))
    assert len(made) == 1


# The cache's name


def recipe(**changes: Any) -> dict[str, Any]:
    """A recipe; changes by path, as in source__split."""
    out: dict[str, Any] = {
        "source": [{"id": None, "revision": None, "split": "train", "files": [{"name": "a", "bytes": 1, "sha256": "x"}],
                    "messages_column": "messages", "tools_column": None, "limit": None}],
        "tokenizer": {"model": None, "tokenizer_sha256": "t", "template_sha256": "u", "template_kwargs": {}},
        "encode": {"version": 1, "targets": "assistant"}, "pack": {"max_tokens": 8192},
    }  # fmt: skip
    for path, value in changes.items():
        room, name = path.split("__")
        (out[room][0] if room == "source" else out[room])[name] = value
    return out


@pytest.mark.parametrize(
    "changes",
    [{"pack__max_tokens": 5}, {"source__limit": 5}, {"tokenizer__model": "owner/name"},
     {"source__files": [{"name": "b", "bytes": 1, "sha256": "x"}]},
     {"source__id": "owner/name", "source__revision": "c"}],
)  # fmt: skip
def test_the_cache_is_reused_where_nothing_relevant_changed(changes: dict[str, Any]) -> None:
    assert encode_fingerprint(recipe(**changes)) == encode_fingerprint(recipe())


@pytest.mark.parametrize(
    "changes",
    [{"encode__targets": "all"}, {"encode__version": 2}, {"tokenizer__tokenizer_sha256": "v"},
     {"tokenizer__template_sha256": "v"}, {"tokenizer__template_kwargs": {"enable_thinking": False}},
     {"source__split": "test"}, {"source__messages_column": "chat"}, {"source__tools_column": "tools"},
     {"source__files": [{"name": "a", "bytes": 1, "sha256": "y"}]}, {"source__files": []}],
)  # fmt: skip
def test_the_cache_is_another_where_something_relevant_changed(changes: dict[str, Any]) -> None:
    assert encode_fingerprint(recipe(**changes)) != encode_fingerprint(recipe())


@pytest.mark.parametrize("files", [[], [{"name": "a", "bytes": 1, "sha256": None}]])
def test_hub_data_without_digests_is_told_apart_by_id_and_revision(files: list[Any]) -> None:
    made = {
        encode_fingerprint(recipe(source__id=id_, source__revision=revision, source__files=files))
        for id_, revision in (("a/b", "1"), ("a/b", "2"), ("a/c", "1"))
    }
    assert len(made) == 3


def test_a_file_without_a_digest_is_told_apart_by_its_name() -> None:
    files = [[{"name": name, "bytes": 1, "sha256": None}] for name in "ab"]
    one, two = (encode_fingerprint(recipe(source__id="a/b", source__revision="1", source__files=f)) for f in files)
    assert one != two
