"""What was cut and rejected: no total can be moved, not even together with another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.manifest import DatasetError
from pipeline.shards import PackedDataset
from pipeline.verify import verify_semantics
from tests.chatml import write_tokenizer
from tests.chats import write_parquet
from tests.forge import chats, forge, make_dataset


def plain_chats() -> list[Any]:
    """Without a chat that has no assistant turn, whose line does not say its tokens."""
    return [chat for chat in chats() if len(chat) != 1]


@pytest.fixture(scope="module", params=["split", "truncate", "drop"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("valid")
    source = write_parquet(root / "plain.parquet", plain_chats())
    return make_dataset(root, source=str(source), overflow=request.param)


MOVES = [
    {"tokens_cut": 1, "tokens_rendered": 1},
    {"tokens_cut": 1, "tokens_rejected": -1},
    {"tokens_cut": -1, "tokens_rejected": 1},
    {"tokens_rejected": 1, "tokens_rendered": 1},
    {"tokens_rejected": -1, "tokens_rendered": -1},
    {"tokens_rendered": 1},
    {"rounds_cut": 10**5},
]


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_tokens_cannot_be_moved_between_totals(dataset: Path, tmp_path: Path, move: dict[str, int]) -> None:
    def alter(body: dict[str, Any]) -> None:
        for name, change in move.items():
            body["totals"][name] += change
        if body["totals"]["tokens_cut"] < 0:  # nothing was cut: nothing to take from there
            body["totals"]["tokens_cut"] = 10**6

    verify_semantics(PackedDataset.open(forge(dataset, tmp_path / "right")))
    with pytest.raises(DatasetError, match=r"totals\.(tokens_cut|tokens_rejected|tokens_rendered|rounds_cut) is"):
        verify_semantics(PackedDataset.open(forge(dataset, tmp_path / "f", body=alter)))


def test_a_policy_that_did_not_cut_as_the_lines_say_is_found(dataset: Path, tmp_path: Path) -> None:
    own = json.loads((dataset / "manifest.json").read_bytes())["recipe"]["pack"]["overflow"]
    for other in {"split", "truncate", "drop", "error"} - {own}:

        def alter(body: dict[str, Any], other: str = other) -> None:
            body["recipe"]["pack"]["overflow"] = other

        with pytest.raises(DatasetError, match="against the overflow policy"):
            verify_semantics(PackedDataset.open(forge(dataset, tmp_path / other, body=alter)))


def test_more_chats_than_the_limit_are_found(dataset: Path, tmp_path: Path) -> None:
    def alter(body: dict[str, Any]) -> None:
        body["recipe"]["source"][0]["limit"] = 3

    with pytest.raises(DatasetError, match=r"totals\.chats_read is 35, the rows give 0 to 3"):
        verify_semantics(PackedDataset.open(forge(dataset, tmp_path / "f", body=alter)))


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop", "error"])
def test_a_lost_last_line_break_is_a_token_cut_without_a_line(tmp_path: Path, overflow: str) -> None:
    chat = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hello, friend"}]
    source = write_parquet(tmp_path / "one.parquet", [chat])
    tokenizer = write_tokenizer(tmp_path / "tok")
    whole = make_dataset(tmp_path / "w", source=str(source), tokenizer=str(tokenizer), overflow=overflow)
    tokens = PackedDataset.open(whole).manifest.totals["tokens"]
    cut = make_dataset(
        tmp_path / "c", source=str(source), tokenizer=str(tokenizer), overflow=overflow, max_tokens=tokens - 1
    )
    assert PackedDataset.open(cut).manifest.totals["tokens_cut"] == 1
    assert (cut / "rejects.jsonl").read_bytes() == b""
    verify_semantics(PackedDataset.open(cut))

    def alter(body: dict[str, Any]) -> None:
        body["totals"]["tokens_cut"] += 1
        body["totals"]["tokens_rendered"] += 1

    with pytest.raises(DatasetError, match=r"totals\.tokens_cut is 2, the rows give 0 to 1"):
        verify_semantics(PackedDataset.open(forge(cut, tmp_path / "f", body=alter)))
