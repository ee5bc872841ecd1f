"""The table at the end, and the advice in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.manifest import REJECT_REASONS
from pipeline.pack import Settings, dry_run, pack
from pipeline.source import Reject
from pipeline.summary import none_packed
from tests.chatml import write_tokenizer
from tests.chats import small_chats, write_parquet


def summary_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], *, num_chats: int, num_tagged: int) -> str:
    chats = small_chats(num_chats, longest=6)
    for chat in chats[:num_tagged]:
        chat[1]["content"] += " <tool_call>x</tool_call>"
    source = write_parquet(tmp_path / "train.parquet", chats, rows_in_group=1000)
    tokenizer = write_tokenizer(tmp_path / "tok")
    pack(Settings(source=str(source), tokenizer=str(tokenizer), max_tokens=256, out=tmp_path / "out",
                  cache_dir=tmp_path / "cache", workers=1))  # fmt: skip
    return capsys.readouterr().out


def test_tool_tags_in_more_than_one_of_a_thousand_chats_are_advised_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "2 of 1,999 chats" in (text := summary_of(tmp_path, capsys, num_chats=1999, num_tagged=2))
    assert "tool_calls" in text


def test_tool_tags_in_one_of_a_thousand_chats_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tool_calls" not in summary_of(tmp_path, capsys, num_chats=2000, num_tagged=2)


def test_the_table_names_the_bound_targets_bytes_a_token_and_the_seconds_of_every_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = dict(
        line.split(maxsplit=1) for line in summary_of(tmp_path, capsys, num_chats=60, num_tagged=0).splitlines()
    )
    assert "above that bound" in lines["rows"]
    assert "by the bound" in lines["fill"]
    assert "targets" in lines["tokens"]
    assert "a token of row" in lines["bytes"]
    assert [part.split()[0] for part in lines["seconds"].split(", ")] == ["open", "encode", "plan", "write", "check"]


# ------------------------------------------------------------------------------------------- where nothing is left

SAID = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}'


def error_of(tmp_path: Path, data: bytes, **changes: Any) -> list[str]:
    """What packing and its dry run say of a .jsonl file of which no chat can be packed."""
    (tmp_path / "in.jsonl").write_bytes(data)
    tokenizer = write_tokenizer(tmp_path / "tok")
    base = {"source": str(tmp_path / "in.jsonl"), "tokenizer": str(tokenizer), "max_tokens": 256,
            "out": tmp_path / "out", "cache_dir": tmp_path / "cache", "workers": 1}  # fmt: skip
    said = []
    for run in (dry_run, pack):
        with pytest.raises(ValueError, match=r"^none of ") as error:
            run(Settings(**(base | changes)))
        said.append(str(error.value))
    return said


@pytest.mark.parametrize(
    ("data", "count", "advice"),
    [
        (b'{"messages": [{"from": "human", "value": "hi"}]}\n' * 3, "3 bad_type (row 0: message 0 has no role)",
         'rename other keys, as "from" and "value"'),
        (f"{SAID}\n".encode("utf-16"), "row 0: the line is not UTF-8", "is UTF-8 text"),
        (f"{SAID}\n{SAID}\n".encode("utf-16-le"), "row 0: the line is not JSON", "is UTF-8 text"),
        (f"{SAID}\r{SAID}\r".encode(), "1 invalid_json (row 0: the line is not JSON)", "ended by a line feed"),
        (f"[{SAID}, {SAID}]".encode(), "row 0: the line is not a JSON object", "jq -c"),
        (f"[\n{SAID},\n{SAID},\n]".encode(), "row 0: the line is not JSON", "jq -c"),
        (json.dumps({"messages": SAID}).encode(), "row 0: messages is not a list", "parse JSON text into lists"),
        (b'{"messages": []}', "1 no_messages (row 0: no messages)", "--messages-column"),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', "1 no_target (row 0: no assistant turn)", "to learn"),
        (f'{SAID[:-1]}, "tools": 3}}'.encode(), "row 0: tools is not a list", "--tools-column"),
    ],
)  # fmt: skip
def test_where_no_chat_can_be_packed_each_reason_has_a_count_an_example_and_advice(
    tmp_path: Path, data: bytes, count: str, advice: str
) -> None:
    for said in error_of(tmp_path, data):
        assert count in said
        assert advice in said


def test_reasons_are_ordered_by_their_number_and_the_first_row_of_each_is_named(tmp_path: Path) -> None:
    user = b'{"messages": [{"role": "user", "content": "hi"}]}\n'
    for said in error_of(tmp_path, b"{\n" + user + user + f"{SAID}\n".encode(), max_tokens=4, overflow="drop"):
        assert "2 no_target (row 1: no assistant turn), 1 invalid_json (row 0: the line is not JSON)" in said
        assert "1 longer_than_row (row 3: " in said
        assert "Raise --max-tokens, or choose --overflow truncate or split." in said


def test_there_is_advice_for_every_reason() -> None:
    for reason in REJECT_REASONS:
        said = none_packed("1", [Reject(doc_id=0, what="rejected", reason=reason, detail="3 tokens")])
        assert said.startswith(f"none of 1 chats can be packed: 1 {reason} (row 0: 3 tokens). ")
        assert said.endswith(".")
