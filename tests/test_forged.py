"""Forged datasets end to end: one thing is altered, every hash is right again, and verify names it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.manifest import MANIFEST, DatasetError
from pipeline.shards import PackedDataset, verify_hashes
from pipeline.verify import verify_semantics
from tests.forge import Rows, forge, make_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 200 tokens of split chats, with lines of every kind but truncated."""
    return make_dataset(tmp_path_factory.mktemp("valid"))


def check(path: Path) -> None:
    """What ``verify --semantic`` does."""
    opened = PackedDataset.open(path)
    verify_hashes(opened)
    verify_semantics(opened)


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_a_copy_without_an_alteration_holds(tmp_path: Path, overflow: str) -> None:
    check(forge(make_dataset(tmp_path, overflow=overflow), tmp_path / "copy"))


def padded(rows: Rows) -> int:
    """The first row of two pieces or more and at least two tokens of padding."""
    return next(
        i for i, r in enumerate(rows)
        if len(r["doc_ids"]) == len(r["boundaries"]) - 2 >= 2 and r["boundaries"][-1] - r["boundaries"][-2] > 1
    )  # fmt: skip


def put(name: str, index: int, value: Any) -> Callable[[dict[str, list[Any]]], None]:
    kind = bool if name == "loss_mask" else int
    return lambda row: row[name].__setitem__(index, kind(value))


def move_a_boundary(row: dict[str, list[Any]]) -> None:
    """One token from the second piece to the first, its position right."""
    row["boundaries"][1] += 1
    first, second = row["boundaries"][1:3]
    row["position_ids"][:second] = [*range(first), *range(second - first)]


def learn_from_the_user(row: dict[str, list[Any]]) -> None:
    """The user's own end-of-turn."""
    row["loss_mask"][row["input_ids"].index(row["input_ids"][0], 1) - 2] = True


def learn_nothing(row: dict[str, list[Any]]) -> None:
    row["loss_mask"][: row["boundaries"][1]] = [False] * row["boundaries"][1]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (put("position_ids", 7, 9), "position_ids are wrong from token 7"),
        (put("boundaries", -1, 199), "boundaries must rise from 0 to 200"),
        (put("boundaries", 1, -5), "boundaries must rise from 0 to 200"),
        (lambda r: r.update(boundaries=[0, 2**31 - 1, -5, 200]), "boundaries must rise from 0 to 200"),
        (lambda r: r.update(boundaries=[]), "boundaries must rise from 0 to 200"),
        (move_a_boundary, "a piece does not start with"),
        (lambda r: r["doc_ids"].pop(), "do not go together"),
        (put("loss_mask", 0, 1), "a segment's first token is a target"),
        (put("loss_mask", -1, 1), "the padding from token"),
        (put("input_ids", -1, 5), "the padding from token"),
        (put("input_ids", 3, 10**6), "a token id is not below the vocabulary's"),
        (put("input_ids", 3, -1), "a token id is not below the vocabulary's"),
        (learn_from_the_user, "outside the assistant turns"),
        (learn_nothing, "a piece has no target"),
    ],
)
def test_a_row_that_breaks_a_rule_is_named_with_the_rule(
    dataset: Path, tmp_path: Path, change: Callable[[Any], Any], rule: str
) -> None:
    found: list[int] = []

    def alter(rows: Rows) -> None:
        found.append(padded(rows))
        change(rows[found[0]])

    forged = forge(dataset, tmp_path / "f", rows=alter)
    with pytest.raises(DatasetError, match=rule) as error:
        check(forged)
    assert f"shard-00000.arrow: row {found[0]}: " in str(error.value)


def rename(old: int, new: int) -> Callable[[Rows], None]:
    """Another doc_id for every piece of a document; a negative one counts from the last packed document."""
    return lambda rows: [row.update(doc_ids=[new if d == old else d for d in row["doc_ids"]]) for row in rows] and None


def alter_totals(**changes: int) -> Callable[[dict[str, Any]], None]:
    def alter(body: dict[str, Any]) -> None:
        for name, change in changes.items():
            body["totals"][name] += change

    return alter


def renumber(rows: Rows) -> None:
    rows[0]["pieces"][0] += 1


@pytest.mark.parametrize(
    ("rows", "totals", "words"),
    [
        (rename(35, 34), {}, r"totals\.documents is \d+, the rows give"),
        (
            rename(35, 34),
            {"documents": -1, "chats_read": -1},
            r"documents whose pieces are not numbered.* \[34\]|beyond",
        ),
        (rename(35, 36), {}, r"documents beyond chats_read is \[\], the rows give \[36\]"),
        (rename(35, -1), {}, r"documents beyond chats_read is \[\], the rows give \[-1\]"),
        (rename(35, 31), {}, r"totals\.chats_read|both packed and rejected"),
        (renumber, {}, r"documents whose pieces are not numbered"),
    ],
)
def test_forged_documents_are_found(
    dataset: Path, tmp_path: Path, rows: Callable[[Rows], None], totals: dict[str, int], words: str
) -> None:
    with pytest.raises(DatasetError, match=words):
        check(forge(dataset, tmp_path / "f", rows=rows, body=alter_totals(**totals)))


@pytest.mark.parametrize("name", ["rows", "pieces", "tokens", "targets"])
def test_counts_of_a_shard_that_its_rows_do_not_give_are_found(dataset: Path, tmp_path: Path, name: str) -> None:
    def alter(body: dict[str, Any]) -> None:
        body["files"]["shards"][0][name] -= 1

    with pytest.raises(DatasetError, match=r"by shard|rows in its record batches"):
        check(forge(dataset, tmp_path / "f", body=alter))


def test_rows_behind_the_last_that_is_listed_are_found(dataset: Path, tmp_path: Path) -> None:
    forged = forge(dataset, tmp_path / "f", rows=lambda rows: rows.append(rows[0]))
    with pytest.raises(DatasetError, match=r"shard-00000.arrow: \d+ rows in its record batches, \d+ are listed"):
        check(forged)


def test_nulls_are_found(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"shard-00000.arrow: record batch 1 holds nulls"):
        check(forge(dataset, tmp_path / "f", rows=lambda rows: rows[9]["input_ids"].__setitem__(0, None)))


# --------------------------------------------------------------------------------------------- rejects


def line(**fields: Any) -> bytes:
    body = {"doc_id": 36, "what": "rejected", "reason": "bad_type", "detail": "x"} | fields
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def kept_more(data: bytes) -> bytes:
    """A split document that claims one more token."""
    before, kept, after = data.partition(b'{"detail":"412 of 412 tokens')
    assert kept
    return before + b'{"detail":"413 of 413 tokens' + after


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "canonical form"),
        (lambda data: data.replace(b'":', b'": ', 1), "canonical form"),
        (lambda data: data + b"{\n", "rejects.jsonl"),
        (lambda data: data + b"[1]\n", "other fields"),
        (lambda data: data + b'{"doc_id":1}\n', "other fields"),
        (lambda data: data + b"[" * 100_000 + b"\n", "rejects.jsonl"),
        (lambda data: data + b"\xff\n", "rejects.jsonl"),
        (lambda data: data + line(doc_id=1.5), "float"),
        (lambda data: data + line(doc_id="36"), "another type"),
        (lambda data: data + line(doc_id=None), "another type"),
        (lambda data: data + line(detail=[]), "another type"),
        (lambda data: data + line(reason="because"), "document 36: unknown 'rejected', 'because'"),
        (lambda data: data + line(what="lost", reason=""), "document 36: unknown 'lost'"),
        (lambda data: data + line(what="split", reason="no_target"), "document 36: unknown 'split'"),
        (lambda data: data + line(what="split", reason="", detail="a bit"), "document 36: unknown detail 'a bit'"),
        (lambda data: data + line(reason="round_longer_than_row"), "document 36: unknown detail 'x'"),
        (lambda data: b"".join(reversed(data.splitlines(keepends=True))), "lines must be sorted"),
        (lambda data: data + data.splitlines(keepends=True)[-1], "lines must be sorted"),
        (lambda data: data + line(), "totals.rejected"),
        (lambda data: b"".join(data.splitlines(keepends=True)[1:]), r"totals\.(split|rejected)"),
        (kept_more, r"cut otherwise than rejects\.jsonl says is \[\], the rows give \[0\]"),
    ],
)
def test_forged_lines_of_rejects_are_found(
    dataset: Path, tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    files = {"rejects.jsonl": change((dataset / "rejects.jsonl").read_bytes())}
    with pytest.raises(DatasetError, match=words):
        check(forge(dataset, tmp_path / "f", files=files))


def test_a_document_both_packed_and_rejected_is_found(dataset: Path, tmp_path: Path) -> None:
    def alter(body: dict[str, Any]) -> None:
        body["totals"]["rejected"]["bad_type"] = 1
        body["totals"]["chats_read"] += 1

    files = {"rejects.jsonl": (dataset / "rejects.jsonl").read_bytes() + line(doc_id=35)}
    with pytest.raises(DatasetError, match=r"both packed and rejected is \[\], the rows give \[35\]"):
        check(forge(dataset, tmp_path / "f", files=files, body=alter))


# -------------------------------------------------------------------------------------------- tokenizer


def replaced_tokenizer(dataset: Path, tmp_path: Path, text: str, *, in_recipe: bool) -> Path:
    def alter(body: dict[str, Any]) -> None:
        if in_recipe:
            body["recipe"]["tokenizer"]["tokenizer_sha256"] = hashlib.sha256(text.encode()).hexdigest()

    return forge(dataset, tmp_path / "f", files={"tokenizer/tokenizer.json": text.encode()}, body=alter)


def test_another_tokenizer_is_found_by_the_recipes_digest(dataset: Path, tmp_path: Path) -> None:
    text = (dataset / "tokenizer" / "tokenizer.json").read_text() + " "
    with pytest.raises(DatasetError, match=r"tokenizer\.json: sha256 is [0-9a-f]+, the recipe says"):
        check(replaced_tokenizer(dataset, tmp_path, text, in_recipe=False))


def test_a_tokenizer_that_is_not_what_the_recipe_says_is_found(dataset: Path, tmp_path: Path) -> None:
    body = json.loads((dataset / "tokenizer" / "tokenizer.json").read_text())
    body["added_tokens"].append(body["added_tokens"][-1] | {"id": 999, "content": "<more>"})
    with pytest.raises(DatasetError, match=r"recipe\.tokenizer\.vocab_size: \d+ -> 1000"):
        check(replaced_tokenizer(dataset, tmp_path, json.dumps(body), in_recipe=True))


@pytest.mark.parametrize("change", [{"model": []}, {"decoder": "?"}, {"added_tokens": [{"content": "x", "id": "y"}]}])
def test_a_broken_tokenizer_is_a_clear_error(dataset: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    body = json.loads((dataset / "tokenizer" / "tokenizer.json").read_text()) | change
    with pytest.raises(DatasetError, match="no tokenizer that this can use"):
        check(replaced_tokenizer(dataset, tmp_path, json.dumps(body), in_recipe=True))


@pytest.mark.parametrize("name", ["rejects.jsonl", "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"])
def test_a_file_that_the_manifest_does_not_list_either_is_missed(dataset: Path, tmp_path: Path, name: str) -> None:
    def alter(body: dict[str, Any]) -> None:
        body["files"]["others"] = [entry for entry in body["files"]["others"] if entry["name"] != name]

    forged = forge(dataset, tmp_path / "f", body=alter)
    assert not (forged / name).exists()
    assert (forged / MANIFEST).exists()
    with pytest.raises(DatasetError, match=name):
        check(forged)
