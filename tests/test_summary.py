"""The table at the end, and the advice in it."""

from pathlib import Path

import pytest

from pipeline.pack import Settings, pack
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
