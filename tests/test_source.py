"""Sources: which files, which rows under which numbers, what cannot be read and why, digests, the hub."""

import json
import os
import re
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import rows
from pipeline.hub import hub_identity, prepare_with_datasets
from pipeline.rows import drop_nulls
from pipeline.source import Conversation, Reject, Source, digest_files, open_source, read_block
from tests.chatml import chat

CHAT = chat("hello", "hi")


def opened(spec: Path | str, cache: Path | None = None, **more: Any) -> Source:
    arguments: dict[str, Any] = {
        "split": "train", "revision": None, "messages_column": "messages", "tools_column": None, "limit": None,
        "cache_dir": cache or Path(spec).parent / "cache",
    }  # fmt: skip
    return open_source(str(spec), **(arguments | more))


def read(source: Source) -> list[Conversation | Reject]:
    return [row for block in source.blocks() for row in read_block(block)]


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines))
    return path


def write_parquet(path: Path, num_rows: int, *, row_group_size: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"messages": [chat(f"question {i}", "hi") for i in range(num_rows)]})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


# Files


@pytest.mark.parametrize("split", ["train", "train_sft"])
def test_a_folder_gives_the_files_of_the_split_in_order(tmp_path: Path, split: str) -> None:
    for name in ("train.jsonl", "train-2.jsonl", "sub/train-1.jsonl", "test.jsonl", "train_sft.jsonl", "mytrain.jsonl"):
        write_jsonl(tmp_path / "data" / name, [{"messages": CHAT}])
    (tmp_path / "data" / "train-folder.parquet").mkdir()
    source = opened(tmp_path / "data", split=split)
    wanted = ["sub/train-1.jsonl", "train-2.jsonl", "train.jsonl"] if split == "train" else ["train_sft.jsonl"]
    assert [file["name"] for file in source.recipe["files"]] == wanted
    assert source.recipe["split"] == split


def test_a_file_needs_no_split_and_the_folder_it_lies_in_is_not_recorded(tmp_path: Path) -> None:
    one = opened(write_jsonl(tmp_path / "a" / "x.jsonl", [{"messages": CHAT}]), split="train")
    two = opened(write_jsonl(tmp_path / "b" / "x.jsonl", [{"messages": CHAT}]), split="test")
    assert one.recipe == two.recipe
    assert one.recipe["split"] is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing.parquet", "no such file or folder"),
        (lambda folder: folder, "no .parquet or .jsonl file"),
        (lambda folder: write_jsonl(folder / "x.json", []), "expected a .parquet or .jsonl"),
        (lambda folder: write_jsonl(folder / "test.jsonl", [{}]).parent, "--split train: no file .* found test.jsonl"),
        (lambda folder: write_jsonl(folder / "x.parquet", [{}]), "not a readable parquet file"),
        (lambda folder: write_jsonl(folder / "x.parquet", []), "not a readable parquet file"),
    ],
)
def test_a_source_that_cannot_be_used_is_an_error_that_says_what_was_found(
    tmp_path: Path, make: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        opened(make(tmp_path))


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["train-0.parquet", "train-1.parquet"], "Pass --split train, or"),
        (
            ["train.parquet", "test-0-of-1.parquet", "a b.parquet"],
            "Pass --split 'a b' or --split test or --split train,",
        ),
        (["-x.parquet"], "Name one file as --source"),
    ],
)
def test_a_split_that_is_not_there_is_an_error_that_says_which_to_pass(
    tmp_path: Path, names: list[str], advice: str
) -> None:
    for name in names:
        write_parquet(tmp_path / "d" / name, 1)
    with pytest.raises(ValueError, match=f"--split train_sft: no file .* found .*{advice}"):
        opened(tmp_path / "d", split="train_sft")
    for split in re.findall(r"--split ('a b'|\w+)", advice):
        assert opened(tmp_path / "d", split=split.strip("'")).paths


def test_a_missing_column_is_an_error_that_lists_those_found(tmp_path: Path) -> None:
    parquet = write_parquet(tmp_path / "x.parquet", 1)
    jsonl = write_jsonl(tmp_path / "x.jsonl", [{"messages": CHAT, "id": 1}, b"broken\n"])
    for path, columns in ((parquet, "messages"), (jsonl, "id, messages")):
        advice = "Pass the one that holds the chats, as --messages-column NAME; each must be a list of {role, content}"
        with pytest.raises(ValueError, match=rf"--messages-column chats: .*It has: {columns}\. {re.escape(advice)}"):
            opened(path, messages_column="chats")
        there = f"--tools-column functions: no such column. There are: {columns}. Pass one of them"
        with pytest.raises(ValueError, match=there):
            opened(path, tools_column="functions")


def test_a_column_missing_from_a_later_file_is_found_at_once_and_names_that_file(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d" / "train-1.parquet", 1)
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "d" / "train-2.parquet")
    with pytest.raises(ValueError, match=r"train-2\.parquet has no such column\. It has: text"):
        opened(tmp_path / "d")


def test_tools_that_appear_late_in_a_jsonl_file_are_read(tmp_path: Path) -> None:
    lines = [{"messages": CHAT}] * 200 + [{"messages": CHAT, "tools": [{"name": "f"}]}]
    found = read(opened(write_jsonl(tmp_path / "x.jsonl", lines)))
    assert [row.tools for row in found if isinstance(row, Conversation)] == [None] * 200 + [[{"name": "f"}]]


@pytest.mark.parametrize("tools", [[{"name": "f", "optional": None}], '[{"name": "f"}]'])
def test_the_tools_column_is_a_list_or_a_json_string(tmp_path: Path, tools: Any) -> None:
    pq.write_table(pa.table({"messages": [CHAT, CHAT], "tools": [tools, None]}), tmp_path / "x.parquet")
    first, second = read(opened(tmp_path / "x.parquet"))
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert first.tools in ([{"name": "f"}], '[{"name": "f"}]')
    assert second.tools is None


# Rows and their numbers


def test_every_line_that_is_not_blank_is_a_row_broken_ones_included(tmp_path: Path) -> None:
    good = json.dumps({"messages": CHAT}).encode()
    lines = [
        b"\xef\xbb\xbf" + good + b"\r\n", b"\n", b"  \t \r\n", good + b"\r\n", b'{"messages": [\n', b'{"a": "\xff"}\n',
        b"[1]\n", b"null\n", b"[" * 100_000 + b"\n", b'{"messages": null}\n', b"{}\n", good,
    ]  # fmt: skip
    found = read(opened(write_jsonl(tmp_path / "x.jsonl", lines)))
    assert [row.doc_id for row in found] == list(range(10))
    assert {row.doc_id: row.reason for row in found if isinstance(row, Reject)} == {
        2: "invalid_json", 3: "invalid_unicode", 4: "bad_type", 5: "bad_type", 6: "bad_type",
    }  # fmt: skip
    whole = [row.messages for row in found if isinstance(row, Conversation)]
    assert whole == [CHAT, CHAT, None, None, CHAT]


def test_numbers_run_on_over_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / "train-1.jsonl", [{"messages": CHAT}, b"\n", b"broken\n"])
    write_parquet(tmp_path / "d" / "train-2.parquet", 3)
    write_jsonl(tmp_path / "d" / "train-3.jsonl", [])
    write_jsonl(tmp_path / "d" / "train-4.jsonl", [{"messages": CHAT}])
    source = opened(tmp_path / "d")
    assert [row.doc_id for row in read(source)] == [0, 1, 2, 3, 4, 5]
    assert read(source)[2].messages[0]["content"] == "question 0"  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("limit", [1, 6, 7, 8, 20, 100])
def test_blocks_before_the_limit_do_not_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, limit: int
) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 7)
    lines = [{"messages": chat(f"question {i}", "hi")} for i in range(20)]
    path = (
        write_jsonl(tmp_path / "x.jsonl", lines)
        if kind == "jsonl"
        else write_parquet(tmp_path / "x.parquet", 20, row_group_size=7)
    )
    every, limited = opened(path).blocks(), opened(path, limit=limit).blocks()
    assert limited[:-1] == every[: len(limited) - 1]
    assert sum(block.num_rows for block in limited) == min(limit, 20)
    assert read(opened(path))[:limit] == read(opened(path, limit=limit))


def test_a_limit_below_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--limit 0"):
        opened(write_parquet(tmp_path / "x.parquet", 1), limit=0)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_blocks_of_any_row_groups_read_in_any_order_give_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 5)
    monkeypatch.setattr(rows, "ROWS_AT_ONCE", data.draw(st.integers(1, 30)))
    num_rows = data.draw(st.integers(0, 90))
    path = write_parquet(tmp_path / "x.parquet", num_rows, row_group_size=data.draw(st.integers(1, 100)))
    blocks = opened(path, limit=data.draw(st.none() | st.integers(1, 100))).blocks()
    assert all(one.first_doc_id + one.num_rows == two.first_doc_id for one, two in pairwise(blocks))
    for block in data.draw(st.permutations(blocks)):
        for i, row in enumerate(read_block(block)):
            assert isinstance(row, Conversation)
            assert row.doc_id == block.first_doc_id + i
            assert row.messages[0]["content"] == f"question {row.doc_id}"


def test_two_blocks_of_one_row_group_read_by_turns_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 2)
    monkeypatch.setattr(rows, "ROWS_AT_ONCE", 3)
    blocks = opened(write_parquet(tmp_path / "x.parquet", 16)).blocks()
    assert len(blocks) == 2
    for one, two in zip(*map(read_block, blocks), strict=True):
        assert (one.messages[0]["content"], two.messages[0]["content"]) == (  # type: ignore[union-attr]
            f"question {one.doc_id}",
            f"question {two.doc_id}",
        )


def test_a_large_row_group_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 5)
    opened_groups = []
    real = rows._RowGroup

    def counting(*args: Any) -> Any:
        opened_groups.append(args)
        return real(*args)

    monkeypatch.setattr(rows, "_RowGroup", counting)
    source = opened(write_parquet(tmp_path / "x.parquet", 200))
    assert len(source.blocks()) == 10
    assert len(read(source)) == 200
    assert len(opened_groups) == 1


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", 3)
    assert len(read(opened(path))) == 3
    pq.write_table(pa.table({"messages": [chat("new", "hi")] * 4}), path)
    assert [row.messages[0]["content"] for row in read(opened(path))] == ["new"] * 4  # type: ignore[union-attr]


def test_a_string_that_is_not_utf8_rejects_its_own_row_alone(tmp_path: Path) -> None:
    raw = pa.array([b"one", b"caf\xe9", "três".encode()], pa.binary())
    contents = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    roles = pa.array(["user"] * 3)
    messages = pa.ListArray.from_arrays(
        [0, 1, 2, 3], pa.StructArray.from_arrays([roles, contents], ["role", "content"])
    )
    pq.write_table(pa.table({"messages": messages}), tmp_path / "x.parquet")
    found = read(opened(tmp_path / "x.parquet"))
    assert [getattr(row, "reason", "") for row in found] == ["", "invalid_unicode", ""]
    assert found[2].messages == [{"role": "user", "content": "três"}]  # type: ignore[union-attr]


def test_a_damaged_page_is_a_clear_error(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", 2000)
    body = bytearray(path.read_bytes())
    body[4:400] = b"\xff" * 396
    path.write_bytes(body)
    with pytest.raises(ValueError, match="not a readable parquet file"):
        read(opened(path))


def test_null_members_of_arrow_structs_are_dropped_at_every_depth(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    other = [
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "g", "arguments": {"b": "2"}}}]}
    ]
    pq.write_table(pa.table({"messages": [messages, other]}), tmp_path / "x.parquet")
    found = read(opened(tmp_path / "x.parquet"))
    assert [row.messages for row in found] == [messages, other]  # type: ignore[union-attr]


nested = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


@given(nested)
def test_dropping_nulls_leaves_no_null_member_and_is_the_same_twice(value: Any) -> None:
    clean = drop_nulls(value)
    assert drop_nulls(clean) == clean
    stack = [clean]
    while stack:
        item = stack.pop()
        assert not isinstance(item, dict) or None not in item.values()
        stack += item.values() if isinstance(item, dict) else item if isinstance(item, list) else []


def test_a_line_of_five_megabytes_is_one_row(tmp_path: Path) -> None:
    lines = [{"messages": chat("x" * 5_000_000, "hi")}, {"messages": CHAT}]
    found = read(opened(write_jsonl(tmp_path / "x.jsonl", lines)))
    assert [len(row.messages[0]["content"]) for row in found] == [5_000_000, 5]  # type: ignore[union-attr]


def test_a_block_ends_at_its_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BYTES_PER_BLOCK", 60)
    source = opened(write_jsonl(tmp_path / "x.jsonl", [{"messages": CHAT}] * 5))
    assert [block.num_rows for block in source.blocks()] == [1] * 5
    assert [row.doc_id for row in read(source)] == list(range(5))


# Digests


def test_digests_are_remembered_until_the_file_changes_or_rehash_is_asked_for(tmp_path: Path) -> None:
    path, cache = write_jsonl(tmp_path / "x.jsonl", [{"messages": CHAT}]), tmp_path / "cache"
    first = digest_files([path], cache, rehash=False)
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"hello", b"HELLO"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, time and inode
    assert digest_files([path], cache, rehash=False) == first
    second = digest_files([path], cache, rehash=True)
    assert second != first
    path.write_bytes(b"{}\n")
    assert digest_files([path], cache, rehash=False) not in (first, second)


@pytest.mark.parametrize("memo", ["", "[]", "{", '{"%s": 3}', '{"%s": [1, 2, 3]}'])
def test_a_broken_memory_of_digests_is_made_again(tmp_path: Path, memo: str) -> None:
    path, cache = write_jsonl(tmp_path / "x.jsonl", [{}]), tmp_path / "cache"
    wanted = digest_files([path], tmp_path / "other", rehash=False)
    cache.mkdir()
    (cache / "digests.json").write_text(memo.replace("%s", str(path)))
    assert digest_files([path], cache, rehash=False) == wanted
    assert sorted(p.name for p in cache.iterdir()) == ["digests.json"]


# The hub


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def dataset_info(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    api = types.SimpleNamespace(dataset_info=dataset_info)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)


def test_a_hub_id_resolves_to_its_commit_and_the_splits_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def sibling(name: str, sha: str | None) -> Any:
        return types.SimpleNamespace(rfilename=name, size=3, lfs=types.SimpleNamespace(sha256=sha) if sha else None)

    siblings = [
        sibling("data/train-1.parquet", "b" * 64),
        sibling("README.md", None),
        sibling("data/train-0.jsonl", None),
    ]
    fake_hub(monkeypatch, types.SimpleNamespace(sha="c" * 40, siblings=siblings))
    identity, files = hub_identity("owner/name", "train", None)
    assert identity == {"id": "owner/name", "revision": "c" * 40, "split": "train"}
    assert [(f["name"], f["sha256"]) for f in files] == [
        ("data/train-0.jsonl", None),
        ("data/train-1.parquet", "b" * 64),
    ]


@pytest.mark.parametrize("error", [ConnectionError("no route"), TimeoutError(), RuntimeError("404\nmore")])
def test_an_unreachable_hub_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fake_hub(monkeypatch, error)
    with pytest.raises(
        ValueError, match=rf"--source owner/name.*{type(error).__name__}.*--source data/sample"
    ) as caught:
        opened("owner/name", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def offline_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("offline_datasets")
def test_what_datasets_prepares_is_read_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 64)
    write_parquet(tmp_path / "set" / "data" / "train-00000-of-00001.parquet", 200)
    write_parquet(tmp_path / "set" / "data" / "test-00000-of-00001.parquet", 3)
    fake_hub(monkeypatch, types.SimpleNamespace(sha="c" * 40, siblings=[]))
    real = prepare_with_datasets
    monkeypatch.setattr(
        "pipeline.source.prepare_with_datasets", lambda _, split, __: real(str(tmp_path / "set"), split, None)
    )
    source = opened("owner/name", tmp_path)
    assert source.recipe["revision"] == "c" * 40
    assert [block.num_rows for block in source.blocks()] == [64, 64, 64, 8]
    contents = [row.messages[0]["content"] for row in read(source)]  # type: ignore[union-attr]
    assert contents == [f"question {i}" for i in range(200)]


@pytest.mark.usefixtures("offline_datasets")
@pytest.mark.parametrize("split", ["train[:10]", "train+test", "validation"])
def test_a_split_that_is_none_is_an_error_that_lists_those_there_are(tmp_path: Path, split: str) -> None:
    write_parquet(tmp_path / "set" / "train.parquet", 20)
    write_parquet(tmp_path / "set" / "test.parquet", 2)
    with pytest.raises(ValueError, match=r"no such split\. It has: test, train"):
        prepare_with_datasets(str(tmp_path / "set"), split, None)
