"""What --dry-run says, and that it writes nothing."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import pipeline.pack
import pipeline.preview
from pipeline.manifest import DatasetError
from pipeline.pack import Settings, dry_run, pack
from tests.chatml import write_tokenizer
from tests.chats import small_chats, write_parquet


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Settings over 600 small chats in blocks of 50; keywords replace them."""
    source = write_parquet(tmp_path / "in" / "train.parquet", small_chats(600))
    tokenizer = write_tokenizer(tmp_path / "tok")

    def settings(**changes: Any) -> Settings:
        base = {"source": str(source), "tokenizer": str(tokenizer), "max_tokens": 256, "out": tmp_path / "out",
                "cache_dir": tmp_path / "cache", "workers": 1}  # fmt: skip
        return Settings(**(base | changes))

    return settings


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.relative_to(folder).as_posix(): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def number(text: str, line: str) -> int:
    """The first number of a line of the table."""
    row = next(row for row in text.splitlines() if row.startswith(f"{line} "))
    return int(re.findall(r"[0-9][0-9,]*", row)[0].replace(",", ""))


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_without_a_cache_everything_is_estimated_and_nothing_is_written(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overflow: str
) -> None:
    monkeypatch.setattr(pipeline.preview, "SAMPLE_CHATS", 300)
    before = listing(tmp_path)
    text = dry_run(make(overflow=overflow))
    assert listing(tmp_path) == before
    assert re.search(r"estimated from [2-4]\d\d of the chats", text)
    assert "empty, made first" in text
    rows = pack(make(overflow=overflow)).totals["rows"]
    assert abs(number(text, "rows") - rows) <= 0.03 * rows + 1


def test_a_source_smaller_than_a_sample_is_planned_exactly(make: Any) -> None:
    text = dry_run(make(max_tokens=64, overflow="split"))
    assert "exact, from every chat" in text
    totals = pack(make(max_tokens=64, overflow="split")).totals
    assert (number(text, "rows"), number(text, "tokens")) == (totals["rows"], totals["tokens"])


def test_rows_are_estimated_where_most_chats_exceed_half_a_row(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.preview, "SAMPLE_CHATS", 300)
    text = dry_run(make(max_tokens=110, overflow="drop"))
    rows = pack(make(max_tokens=110, overflow="drop")).totals["rows"]
    assert abs(number(text, "rows") - rows) <= 0.1 * rows + 1


def test_with_a_complete_cache_the_rows_are_exact_and_nothing_is_written(make: Any, tmp_path: Path) -> None:
    pack(make())
    before = listing(tmp_path)
    text = dry_run(make(max_tokens=100, out=tmp_path / "other"))
    assert listing(tmp_path) == before
    assert "exact, from the plan itself" in text
    assert "complete, nothing is encoded again" in text
    totals = pack(make(max_tokens=100, out=tmp_path / "other")).totals
    assert (number(text, "rows"), number(text, "tokens")) == (totals["rows"], totals["tokens"])


def test_blocks_that_are_there_are_counted(make: Any, tmp_path: Path) -> None:
    pack(make())
    missing = sorted((tmp_path / "cache").glob("*/block-*.arrow"))[3]
    missing.unlink()
    assert "11 of 12 blocks are there" in dry_run(make(max_tokens=100, out=tmp_path / "other"))


def test_a_finished_dataset_is_recognised_and_another_recipe_refused(make: Any) -> None:
    pack(make())
    assert "nothing to do" in dry_run(make())
    with pytest.raises(DatasetError, match=r"pack\.seed: 0 -> 1"):
        dry_run(make(seed=1))


def test_the_command_prints_the_table_and_exits_0(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = make()
    names = ("source", "tokenizer", "out", "cache_dir", "max_tokens")
    arguments = [part for n in names for part in (f"--{n.replace('_', '-')}", str(getattr(settings, n)))]
    monkeypatch.setattr(sys, "argv", ["pack", *arguments, "--dry-run"])
    before = listing(tmp_path)
    assert pipeline.pack.main() == 0
    assert listing(tmp_path) == before
    text = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{text}" for name in ("dry run", "source", "cache", "rows", "bytes", "seconds"))


def test_what_cannot_be_packed_is_the_error_that_packing_gives(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of a sample of 600 chats can be packed"):
        dry_run(make(max_tokens=4))
    with pytest.raises(ValueError, match="none of 600 chats can be packed"):
        pack(make(max_tokens=4))
    with pytest.raises(ValueError, match="none of 600 chats can be packed"):
        dry_run(make(max_tokens=4))


def test_a_source_without_rows_is_an_error_that_says_so(make: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    for run in (dry_run, pack):
        with pytest.raises(ValueError, match="hold no chat"):
            run(make(source=str(tmp_path / "empty.jsonl")))


def test_a_source_of_rejects_alone_is_an_error(make: Any, tmp_path: Path) -> None:
    users = [[{"role": "user", "content": "hi"}]] * 5
    with pytest.raises(ValueError, match="none of a sample of 5 chats"):
        dry_run(make(source=str(write_parquet(tmp_path / "users.parquet", users))))
