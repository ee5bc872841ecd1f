"""The token viewer holds what the rows hold: no token, byte or boundary is lost, and what is left out is said."""

import base64
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer

import pipeline.report.viewer
from pipeline.page import Markup, page, section
from pipeline.report.scan import open_dataset_tokenizer
from pipeline.report.viewer import MOST_BYTES, shown
from pipeline.shards import PackedDataset
from tests.forge import make_dataset
from tests.packed import Piece, make_packed, random_rows, with_byte_tokenizer

BYTE = {byte: i for i, byte in enumerate([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])}
BYTE |= {byte: 188 + i for i, byte in enumerate(b for b in range(256) if b not in BYTE)}
"""The id of each byte under ``with_byte_tokenizer``."""


def ids(text: str | bytes) -> list[int]:
    return [BYTE[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def opened(path: Path, rows: list[list[Piece]], *, max_tokens: int) -> PackedDataset:
    """Rows over a vocabulary of the 256 bytes."""
    return PackedDataset.open(with_byte_tokenizer(make_packed(path, rows, max_tokens=max_tokens, vocab_size=256)))


def view(dataset: PackedDataset, rows: list[tuple[int, str]]) -> tuple[Markup, str, Any]:
    """The viewer with the dataset's own tokenizer."""
    return pipeline.report.viewer.viewer(dataset, open_dataset_tokenizer(dataset), rows)


def cells(data: dict[str, Any], i: int) -> list[tuple[list[int], str]]:
    """Ids and text of each cell of a row."""
    held = np.frombuffer(base64.b64decode(data["rows"][i]["cells"]), f"<u{data['bytes']}").tolist()
    return [(np.atleast_1d(data["ids"][cell]).tolist(), data["texts"][cell]) for cell in held]


def pieces_of(text: bytes, cuts: set[int] = frozenset()) -> list[Piece]:  # type: ignore[assignment]
    """Bytes as documents, cut at some places; every second token is a target."""
    places = sorted({0, len(text), *cuts})
    return [(i, ids(text[a:b]), [j % 2 == 1 for j in range(b - a)]) for i, (a, b) in enumerate(pairwise(places))]


def whole(text: str | bytes) -> list[Piece]:
    """One document without any target."""
    return [(0, ids(text), [False] * len(ids(text)))]


# ------------------------------------------------------------------------------------------------ rows


def test_boundaries_documents_targets_and_padding_are_those_laid_down_by_hand(tmp_path: Path) -> None:
    rows: list[list[Piece]] = [[(7, ids("abcd"), [False, True, True, False]), (9, ids("xy"), [False, True])]]
    _, _, data = view(opened(tmp_path / "d", rows, max_tokens=10), [(0, "random")])
    (row,) = data["rows"]
    assert {name: value for name, value in row.items() if name != "cells"} == {
        "row": 0, "why": "random", "length": 6, "shown": 6, "bounds": [0, 4, 6], "docs": [7, 9], "pieces": [0, 0],
        "num_pieces": 2, "num_targets": 3, "learned": [2, 1], "targets": [1, 3, 5, 6],
    }  # fmt: skip
    assert data["max_tokens"] == 10
    assert cells(data, 0) == [([BYTE[ord(sign)]], sign) for sign in "abcdxy"]


def test_every_token_of_packed_chats_is_there_and_the_text_is_what_the_tokenizer_decodes(tmp_path: Path) -> None:
    dataset = PackedDataset.open(make_dataset(tmp_path))
    tokenizer = Tokenizer.from_file(str(dataset.path / "tokenizer" / "tokenizer.json"))
    _, _, data = view(dataset, [(i, "all") for i in range(min(24, len(dataset)))])
    for i, held in enumerate(data["rows"]):
        row = dataset[held["row"]]
        tokens = row.input_ids[: held["length"]].tolist()
        assert [token for cell, _ in cells(data, i) for token in cell] == tokens
        assert "".join(text for _, text in cells(data, i)) == tokenizer.decode(tokens, skip_special_tokens=False)
        mask = np.zeros(held["length"], np.bool_)
        for first, stop in zip(held["targets"][::2], held["targets"][1::2], strict=True):
            mask[first:stop] = True
        assert (mask == row.loss_mask[: held["length"]]).all()
        assert held["bounds"] == row.boundaries[: len(row.doc_ids) + 1].tolist()
    control = {data["texts"][i] for i in data["control"]}
    assert {"<|im_start|>", "<|im_end|>"} <= control
    assert all(text.startswith("<") for text in control)


def test_the_choice_names_each_row_and_why_it_is_shown(tmp_path: Path) -> None:
    markup, _, _ = view(opened(tmp_path / "d", [whole("a"), whole("b")], max_tokens=4), [(1, "longest; asked for")])
    assert '<option value="0">row 1: longest; asked for</option>' in markup


def test_a_split_document_keeps_the_number_of_its_piece(tmp_path: Path) -> None:
    dataset = PackedDataset.open(make_dataset(tmp_path))
    later = [i for i, row in enumerate(dataset) if row.pieces.any()][:24]
    _, _, data = view(dataset, [(i, "") for i in later])
    assert later
    assert [row["pieces"] for row in data["rows"]] == [dataset[i].pieces.tolist() for i in later]


def test_no_such_row_is_an_error_and_more_than_a_page_holds_our_own_mistake(tmp_path: Path) -> None:
    dataset = opened(tmp_path / "d", [whole("a")] * 26, max_tokens=4)
    with pytest.raises(AssertionError):
        view(dataset, [(i, "x") for i in range(25)])
    with pytest.raises(IndexError, match="row 26"):
        view(dataset, [(26, "asked for")])


def test_no_rows_are_no_fault(tmp_path: Path) -> None:
    markup, _, data = view(opened(tmp_path / "d", [whole("a")], max_tokens=4), [])
    assert data["rows"] == data["texts"] == []
    assert "0 of 1 row on this page." in markup


def test_without_scripts_the_page_says_how_to_see_a_row(tmp_path: Path) -> None:
    markup, _, _ = view(opened(tmp_path / "d", [whole("a")], max_tokens=4), [(0, "x")])
    assert re.search(r"<noscript>.*python -m pipeline.verify .*/d --show ROW", markup)


# ------------------------------------------------------------------------------------------------ text


def test_tokens_that_are_parts_of_one_character_are_one_cell(tmp_path: Path) -> None:
    _, _, data = view(opened(tmp_path / "d", [whole("é😀a")], max_tokens=8), [(0, "x")])
    assert cells(data, 0) == [(ids("é"), "é"), (ids("😀"), "😀"), (ids("a"), "a")]


@pytest.mark.parametrize("where", ["boundary", "target"])
def test_no_cell_lies_across_a_boundary_or_half_inside_the_targets(tmp_path: Path, where: str) -> None:
    smile = ids("😀")
    rows: list[list[Piece]] = [
        [(0, smile[:2], [False] * 2), (1, smile[2:], [False] * 2)] if where == "boundary" else
        [(0, smile, [False, False, True, True])],
    ]  # fmt: skip
    _, _, data = view(opened(tmp_path / "d", rows, max_tokens=4), [(0, "x")])
    assert [text for _, text in cells(data, 0)] == ["⟨F0⟩", "⟨9F⟩", "⟨98⟩", "⟨80⟩"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.sampled_from(["a", "é", "你", "😀", "\n", b"\xff", b"\xe4", b"\xbd\xa0"]), min_size=2, max_size=20),
       st.sets(st.integers(1, 12), max_size=3))  # fmt: skip
def test_no_byte_is_lost_whatever_bytes_there_are(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str | bytes], cuts: set[int]
) -> None:
    text = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    pieces = pieces_of(text, {cut for cut in cuts if cut < len(text)})
    dataset = opened(tmp_path_factory.mktemp("d") / "d", [pieces], max_tokens=len(text) + 1)
    _, _, data = view(dataset, [(0, "x")])
    seen = "".join(text for _, text in cells(data, 0)).encode()
    assert re.sub("⟨(..)⟩".encode(), lambda found: bytes.fromhex(found[1].decode()), seen) == text
    assert [token for cell, _ in cells(data, 0) for token in cell] == ids(text)


def test_a_long_run_of_stray_bytes_costs_no_more_than_its_length(tmp_path: Path) -> None:
    _, _, data = view(opened(tmp_path / "d", [whole(b"\xf0" * 30_000)], max_tokens=30_001), [(0, "x")])
    assert len(cells(data, 0)) == 30_000


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (b"a b\n\tc", "a b\n\tc"),
        (b"a\r\n", "a⟨U+000D⟩\n"),
        ("a\u202eb\u200b\ufeff\u2028\u00ad".encode(), "a⟨U+202E⟩b⟨U+200B⟩⟨U+FEFF⟩⟨U+2028⟩⟨U+00AD⟩"),
        ("👩\u200d👧 क्\u200dष ❤\ufe0f".encode(), "👩\u200d👧 क्\u200dष ❤\ufe0f"),
        (b"\x00\x1b[31m", "⟨U+0000⟩⟨U+001B⟩[31m"),
        (b"ok\xe4\xbd", "ok⟨E4⟩⟨BD⟩"),
    ],
)
def test_nothing_invisible_stays_so_but_what_shapes_its_neighbours(held: bytes, text: str) -> None:
    assert shown(held) == text


def test_an_id_that_the_vocabulary_lacks_is_shown_by_its_number(tmp_path: Path) -> None:
    rows: list[list[Piece]] = [[(0, [BYTE[97], 300], [False, True])]]
    path = with_byte_tokenizer(make_packed(tmp_path / "d", rows, max_tokens=4, vocab_size=512))
    _, _, data = view(PackedDataset.open(path), [(0, "x")])
    assert cells(data, 0) == [([BYTE[97]], "a"), ([300], "⟨id 300: not in the vocabulary⟩")]


# ------------------------------------------------------------------------------------------------ size


def test_what_is_left_out_of_long_rows_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.report.viewer, "MOST_TOKENS", 10)
    dataset = opened(tmp_path / "d", [whole("abcdefgh"), whole("xyz"), whole("z")], max_tokens=12)
    markup, _, data = view(dataset, [(0, "longest"), (1, "shortest")])
    assert [(row["length"], row["shown"]) for row in data["rows"]] == [(8, 5), (3, 3)]
    assert [text for _, text in cells(data, 0)] == list("abcde")
    assert "Row 0: tokens 0 to 4 of 8 are shown." in markup
    assert "Row 1:" not in markup
    assert "2 of 3 rows on this page." in markup


def test_a_row_that_is_cut_counts_all_of_it_and_lists_the_documents_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.report.viewer, "MOST_IN_ROW", 4)
    pieces: list[Piece] = [(i, ids("abc"), [False, True, True]) for i in range(4)]
    _, _, data = view(opened(tmp_path / "d", [pieces], max_tokens=16), [(0, "x")])
    (row,) = data["rows"]
    assert (row["length"], row["shown"], row["num_pieces"], row["num_targets"]) == (12, 4, 4, 8)
    assert (row["docs"], row["bounds"], row["learned"], row["targets"]) == ([0, 1], [0, 3, 6], [2, 2], [1, 3])


def test_ids_that_hardly_ever_repeat_are_cut_to_the_size_that_a_page_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[list[Piece]] = [[(i, list(range(i * 8192, i * 8192 + 8192)), [False] * 8192)] for i in range(9)]
    path = with_byte_tokenizer(make_packed(tmp_path / "d", rows, max_tokens=8192, vocab_size=9 * 8192))
    dataset, all_rows = PackedDataset.open(path), [(i, "x") for i in range(9)]
    markup, script, data = view(dataset, all_rows)
    assert data["bytes"] == 2
    assert data["rows"][8]["shown"] < 8192
    assert MOST_BYTES // 2 < len(page(title="t", parts=[section("v", markup)], script=script, data=data)) < 3_000_000

    monkeypatch.setattr(pipeline.report.viewer, "MOST_BYTES", 10**9)
    _, _, data = view(dataset, all_rows)
    assert data["bytes"] == 4
    assert [token for cell, _ in cells(data, 8) for token in cell] == dataset[8].input_ids.tolist()


def with_real_vocabulary(dataset: PackedDataset, fixtures: Path) -> PackedDataset:
    path = dataset.path / "tokenizer" / "tokenizer.json"
    path.unlink()
    path.write_bytes((fixtures / "qwen3_5_tokenizer" / "tokenizer.json").read_bytes())
    return dataset


def size(dataset: PackedDataset) -> int:
    markup, script, data = view(dataset, [(i, "random") for i in range(24)])
    return len(page(title="t", parts=[section("v", markup)], script=script, data=data))


def test_24_rows_of_8192_real_tokens_leave_room_for_the_rest_of_the_page(qwen_fixtures: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(qwen_fixtures / "qwen3_5_tokenizer" / "tokenizer.json"))
    chats = pq.read_table(qwen_fixtures / "ultrachat_1019.parquet").column("messages").to_pylist()
    texts = [message["content"] for chat in chats for message in chat]
    stream = [token for encoding in tokenizer.encode_batch(texts[:2500]) for token in encoding.ids]
    mask = [i % 200 > 100 for i in range(8192)]
    rows: list[list[Piece]] = [[(i, stream[i * 8192 : (i + 1) * 8192], mask)] for i in range(24)]
    assert len(rows[-1][0][1]) == 8192
    path = make_packed(tmp_path / "d", rows, max_tokens=8192, vocab_size=248_320)
    assert size(with_real_vocabulary(PackedDataset.open(path), qwen_fixtures)) < 1_200_000


def test_24_long_rows_of_random_ids_of_the_real_vocabulary_stay_under_3_mb(qwen_fixtures: Path, tmp_path: Path) -> None:
    rows = random_rows(num_rows=24, max_tokens=32_768, vocab_size=248_000)
    path = make_packed(tmp_path / "d", rows, max_tokens=32_768, vocab_size=248_320)
    assert size(with_real_vocabulary(PackedDataset.open(path), qwen_fixtures)) < 2_900_000
