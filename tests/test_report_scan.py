"""What is read from the rows: pieces, roles, openings, the most frequent token; and what is refused."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pipeline.manifest import DatasetError
from pipeline.report.scan import OPENING, ROLES, TOKENS_AT_ONCE, Scan, most_frequent, open_dataset_tokenizer, scan
from pipeline.shards import PackedDataset
from tests.forge import Rows, forge, make_dataset
from tests.packed import Piece, make_packed, random_rows, with_byte_tokenizer
from tests.talk import chat, document, ids, make_talk, turn


def scan_of(path: Path) -> Scan:
    dataset = PackedDataset.open(path)
    return scan(dataset, open_dataset_tokenizer(dataset))


def roles_of(path: Path) -> dict[str, list[int]]:
    """Turns, tokens and targets by role, those that occur."""
    return {role: counts for role, counts in zip(ROLES, scan_of(path).roles.tolist(), strict=True) if counts[1]}


# ----------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("max_tokens", [64, 61])
def test_pieces_of_many_shards_are_those_that_the_rows_hold(
    tmp_path: Path, max_tokens: int, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.report.scan.TOKENS_AT_ONCE", 9 * max_tokens)  # two record batches, then one
    rows = random_rows(num_rows=45, max_tokens=max_tokens, vocab_size=90)
    path = with_byte_tokenizer(
        make_packed(tmp_path / "d", rows, max_tokens=max_tokens, rows_in_shard=24, compression=compression)
    )
    found, dataset = scan_of(path), PackedDataset.open(path)
    assert found.pieces.select("row", "doc_id", "piece", "tokens", "targets", "digest").rows() == [
        (i, int(row.doc_ids[j]), int(row.pieces[j]), int(stop - start), int(row.loss_mask[start:stop].sum()),
         xxhash.xxh3_128_hexdigest(row.input_ids[start:stop]))
        for i, row in enumerate(dataset)
        for j, (start, stop) in enumerate(zip(row.boundaries[: len(row.doc_ids)], row.boundaries[1:], strict=False))
    ]  # fmt: skip
    for row, number, held in zip(dataset, range(45), found.rows.iter_rows(named=True), strict=True):
        tail = int(row.boundaries[len(row.doc_ids)])
        counts = Counter(row.input_ids[:tail].tolist())
        assert (held["row"], held["pieces"], held["tokens"]) == (number, len(row.doc_ids), tail)
        assert held["targets"] == row.loss_mask.sum()
        assert held["count"] == max(counts.values())
        assert held["token"] == min(token for token, count in counts.items() if count == held["count"])
    assert found.max_token_id == max(int(row.input_ids.max()) for row in dataset)
    assert TOKENS_AT_ONCE >= 1 << 18


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=6), st.data())
def test_the_most_frequent_token_is_the_one_that_counting_gives(rows: list[list[int]], data: st.DataObject) -> None:
    tokens = [data.draw(st.integers(1, 5)) for _ in rows]
    token, count = most_frequent(np.array(rows, np.int32), np.array(tokens))
    for row, num, found, times in zip(rows, tokens, token.tolist(), count.tolist(), strict=True):
        counted = Counter(row[:num])
        assert times == max(counted.values())
        assert found == min(t for t, n in counted.items() if n == times)


def test_a_dataset_without_rows_gives_none(tmp_path: Path) -> None:
    found = scan_of(with_byte_tokenizer(make_packed(tmp_path / "d", [], max_tokens=10)))
    assert (len(found.pieces), len(found.rows), found.roles.sum(), found.max_token_id) == (0, 0, 0, 0)


def test_tokens_that_hold_a_replacement_character_anywhere_are_counted(tmp_path: Path) -> None:
    text = "x \ufffd,\ufffd and x"
    assert len(ids(text)) == len(text) - 1  # the first and the space before it are one token
    found = scan_of(make_talk(tmp_path, [[document(0, turn("user", text))], [chat(1, "a", "b")]], max_tokens=80))
    assert found.rows["replaced"].to_list() == [2, 0]


# ------------------------------------------------------------------------------------------------ roles


def test_tokens_belong_to_the_role_that_their_turns_header_names(tmp_path: Path) -> None:
    said = {"system": "obey", "user": "why?", "assistant": "because", "critic": "no"}
    first = document(0, *(turn(role, text) for role, text in said.items()))
    second = document(1, turn("user", "<tool_response>\n7\n</tool_response>"), turn("assistant", "seven"))
    found = roles_of(make_talk(tmp_path, [[first, second]], max_tokens=200))
    num = {role: len(turn(role, text)[0]) for role, text in said.items()}
    tool, more = len(turn("user", "<tool_response>\n7\n</tool_response>")[0]), len(turn("assistant", "seven")[0])
    assert found == {
        "system": [1, num["system"], 0],
        "user": [1, num["user"], 0],
        "assistant": [2, num["assistant"] + more, len("because") + 1 + len("seven") + 1],
        "tool": [1, tool, 0],
        "other role": [1, num["critic"], 0],
    }


def test_a_role_whose_name_only_begins_like_a_known_one_is_another(tmp_path: Path) -> None:
    path = make_talk(tmp_path, [[document(0, turn("users", "x"), turn("assistant", "y"))]], max_tokens=80)
    assert {"other role", "assistant"} == roles_of(path).keys()


def test_a_header_is_not_completed_by_the_tokens_of_the_next_document(tmp_path: Path) -> None:
    cut: Piece = (0, [*ids("<|im_start|>us")], [False] * 3)
    rest: Piece = (1, ids("er\nhello"), [False] * 8)
    found = roles_of(make_talk(tmp_path, [[cut, rest]], max_tokens=40))
    assert found == {"other role": [1, 3, 0], "outside of turns": [0, 8, 0]}


def test_padding_is_nobodys_turn_even_if_it_is_made_of_start_tokens(tmp_path: Path) -> None:
    def pad(rows: Rows) -> None:
        tail = rows[0]["boundaries"][1]
        rows[0]["input_ids"][tail:] = ids("<|im_start|>") * (len(rows[0]["input_ids"]) - tail)

    path = make_talk(tmp_path, [[chat(0, "a", "b")]], max_tokens=90, rows=pad)
    assert {role: turns for role, (turns, _, _) in roles_of(path).items()} == {"user": 1, "assistant": 1}


def test_roles_of_packed_chats_are_those_that_decoding_and_reading_them_gives(tmp_path: Path) -> None:
    path = make_dataset(tmp_path)
    dataset = PackedDataset.open(path)
    tokenizer = open_dataset_tokenizer(dataset)
    start = tokenizer.token_to_id("<|im_start|>")
    counted: Counter[tuple[str, str]] = Counter()
    for row in dataset:
        tail, role = int(row.boundaries[len(row.doc_ids)]), ""
        for i in range(tail):
            if row.input_ids[i] == start:
                text = tokenizer.decode(row.input_ids[i + 1 : i + 12].tolist(), skip_special_tokens=False)
                role = text.partition("\n")[0]
                counted[role, "turns"] += 1
            counted[role, "tokens"] += 1
            counted[role, "targets"] += int(row.loss_mask[i])
    found = {(role, name): num for role, counts in roles_of(path).items()
             for name, num in zip(("turns", "tokens", "targets"), counts, strict=True)}  # fmt: skip
    assert found == {("user", "targets"): 0} | counted


# --------------------------------------------------------------------------------------------- openings


def test_an_opening_begins_with_the_first_user_turn_and_short_ones_have_none(tmp_path: Path) -> None:
    long, system = "x" * OPENING, turn("system", "s" * 90)
    documents = [
        document(0, turn("user", long), turn("assistant", "one")),
        document(1, system, turn("user", long), turn("assistant", "two")),
        document(2, system, turn("user", "short"), turn("assistant", "y" * 10)),
        document(3, turn("assistant", long)),
    ]
    pieces = scan_of(make_talk(tmp_path, [documents], max_tokens=900)).pieces
    expected = xxhash.xxh3_128_hexdigest(np.array(documents[0][1][:OPENING], np.int32))
    alone = xxhash.xxh3_128_hexdigest(np.array(documents[3][1][:OPENING], np.int32))
    assert pieces["opening"].to_list() == [expected, expected, None, alone]


# -------------------------------------------------------------------------------------------- forgeries


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [[chat(0, "a", "b"), chat(1, "c", "d")], [chat(2, "e", "f")]]
    return make_talk(tmp_path_factory.mktemp("talk"), rows, max_tokens=100)


def lower(rows: Rows) -> None:
    rows[1]["boundaries"][1] += 1000


def late(rows: Rows) -> None:
    rows[0]["boundaries"][0] = 1


def short(rows: Rows) -> None:
    rows[0]["boundaries"][-1] -= 1


def none(rows: Rows) -> None:
    rows[0]["boundaries"] = []


def fewer(rows: Rows) -> None:
    rows[0]["doc_ids"] = rows[0]["pieces"] = []


def more(rows: Rows) -> None:
    rows[1]["doc_ids"] += [7, 8]
    rows[1]["pieces"] += [0, 0]


def unequal(rows: Rows) -> None:
    rows[1]["pieces"] += [0]


def negative(rows: Rows) -> None:
    rows[1]["input_ids"][0] = -1


def lost(rows: Rows) -> None:
    del rows[1]


@pytest.mark.parametrize("alter", [lower, late, short, none, fewer, more, unequal, negative, lost])
def test_rows_that_do_not_go_together_are_an_error_that_names_the_shard(
    talk: Path, tmp_path: Path, alter: Callable[[Rows], None]
) -> None:
    with pytest.raises(DatasetError, match=r"shard-00000\.arrow: expected"):
        scan_of(forge(talk, tmp_path / "d", rows=alter))


def test_nulls_are_an_error(talk: Path, tmp_path: Path) -> None:
    def null(rows: Rows) -> None:
        rows[0]["doc_ids"][0] = None

    with pytest.raises(DatasetError, match="nulls"):
        scan_of(forge(talk, tmp_path / "d", rows=null))


def test_shards_that_cannot_be_read_are_named(talk: Path, tmp_path: Path) -> None:
    path = forge(talk, tmp_path / "d") / "shard-00000.arrow"
    whole = path.read_bytes()
    for damaged in (bytes(len(whole)), whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)):
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match="shard-00000"):
            scan_of(path.parent)


def test_damage_within_a_shard_gives_figures_or_a_clear_error_but_never_anything_else(
    talk: Path, tmp_path: Path
) -> None:
    path = forge(talk, tmp_path / "d") / "shard-00000.arrow"
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    errors = 0
    for _ in range(300):
        data = bytearray(whole)
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            scan_of(path.parent)
        except DatasetError:
            errors += 1
    assert errors > 10


@pytest.mark.parametrize("text", [b"{}", b"", b"\xff", b'{"model": 1}'])
def test_a_tokenizer_that_is_none_is_named(talk: Path, tmp_path: Path, text: bytes) -> None:
    path = forge(talk, tmp_path / "d", files={"tokenizer/tokenizer.json": text})
    with pytest.raises(DatasetError, match=r"tokenizer\.json: expected a tokenizer"):
        open_dataset_tokenizer(PackedDataset.open(path))
