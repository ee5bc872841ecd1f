"""The token viewer of a report: some rows of a dataset, decoded, with boundaries and targets.

Guarantees: every token of a row that is shown can be seen. Tokens that are parts of a character are joined into it
where they make one, and are shown as their bytes, ⟨E4⟩, where they do not; invisible characters are shown by their
number. Padding is folded into one line. What is left out is said.
Costs: two bytes a token and the texts of the ids used; 24 rows of 8,192 tokens are about 0.8 MB of page.
"""

import base64
import json
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline.page import Markup, element
from pipeline.report.signs import NUM_ROWS
from pipeline.report.wording import many
from pipeline.shards import PackedDataset, Row

MOST_TOKENS = 400_000
"""Of all rows together."""
MOST_BYTES = 2_200_000
"""Of the viewer's data, so that the page stays under 3 MB: where ids hardly ever repeat, fewer tokens are shown."""
MOST_IN_ROW = 2**15
"""Of one row, so that it opens within a second."""
LONGEST_JOIN = 8
"""Tokens that are tried together: a character has at most 4 bytes, but its neighbours may share tokens with it."""
SCRIPT = Path(__file__).with_name("viewer.js")

Cell = tuple[int, ...]
"""Ids of the tokens that are shown together: one, or those that a character was split into."""


def viewer(dataset: PackedDataset, tokenizer: Tokenizer, rows: Sequence[tuple[int, str]]) -> tuple[Markup, str, Any]:
    """The viewer's markup, its script and its data, as ``page`` takes them.

    Args:
        dataset: where the rows are.
        tokenizer: the dataset's.
        rows: up to 24 row numbers, each once, and why it is shown, in the order of showing.

    Raises:
        IndexError: no such row.
    """
    assert len(rows) <= NUM_ROWS, len(rows)
    words = _Words(tokenizer)
    limit = min(MOST_IN_ROW, MOST_TOKENS // max(1, len(rows)))
    data = _data(dataset, rows, words, limit)
    while (size := len(json.dumps(data, ensure_ascii=False).encode())) > MOST_BYTES:  # ids that hardly ever repeat
        limit = limit * MOST_BYTES * 9 // (size * 10)
        data = _data(dataset, rows, words, limit)
    return _markup(dataset, data["rows"]), SCRIPT.read_text(encoding="utf-8"), data


def _data(dataset: PackedDataset, rows: Sequence[tuple[int, str]], words: "_Words", limit: int) -> dict[str, Any]:
    """What the script reads: each distinct cell once, and rows as numbers of cells."""
    held = [_row(dataset[number], words, limit) | {"row": number, "why": why} for number, why in rows]
    cells = {cell: i for i, cell in enumerate(dict.fromkeys(cell for row in held for cell in row["cells"]))}
    kind = "<u4" if len(cells) > 2**16 else "<u2"
    for row in held:
        packed = np.array([cells[cell] for cell in row["cells"]], kind)
        row["cells"] = base64.b64encode(packed.tobytes()).decode()
    return {
        "max_tokens": dataset.manifest.max_tokens,
        "texts": [words.text(cell) for cell in cells],
        "ids": [cell[0] if len(cell) == 1 else cell for cell in cells],
        "control": [i for cell, i in cells.items() if cell[0] in words.added],
        "bytes": int(kind[2]),
        "rows": held,
    }


def _row(row: Row, words: "_Words", limit: int) -> dict[str, Any]:
    """One row's content, cut at ``limit`` tokens; counts are of the whole row."""
    num_pieces = len(row.doc_ids)
    length = int(row.boundaries[num_pieces])
    shown = min(length, limit)
    bounds = row.boundaries[: num_pieces + 1]
    begun = int(np.searchsorted(bounds[:-1], shown))  # pieces that are shown, the last one perhaps in part
    changes = np.flatnonzero(np.diff(row.loss_mask[:shown].astype(np.int8), prepend=0, append=0)).tolist()
    before = np.concatenate([[0], np.cumsum(row.loss_mask)])[bounds]
    return {
        "length": length,
        "shown": shown,
        "num_pieces": num_pieces,
        "num_targets": int(before[-1]),
        "bounds": bounds[: begun + 1].tolist(),
        "docs": row.doc_ids[:begun].tolist(),
        "pieces": row.pieces[:begun].tolist(),
        "learned": np.diff(before)[:begun].tolist(),
        "targets": changes,
        "cells": list(words.cells(row.input_ids[:shown].tolist(), {*bounds.tolist(), *changes})),
    }


# ----------------------------------------------------------------------------------------------- markup

_BUTTONS = (
    ("row-back", "‹ Row", "Previous row", "k"),
    ("row-on", "Row ›", "Next row", "j"),
    ("document-back", "‹ Document", "Previous document", "p"),
    ("document-on", "Document ›", "Next document", "n"),
    ("target-on", "Targets ›", "Next run of targets", "t"),
    ("borders", "Borders", "Borders between tokens", "b"),
)
"""What each does, what it says, its name, its key; the script knows what each does."""
_KEYS = (
    ("← →", "token"),
    ("P N", "document"),
    ("K J", "row"),
    ("T", "next targets"),
    ("Shift T", "targets before"),
    ("Home End", "first and last token"),
    ("R", "choose a row"),
    ("B", "borders of tokens"),
)


def _markup(dataset: PackedDataset, rows: Sequence[dict[str, Any]]) -> Markup:
    """What the script fills; without scripts, how to see a row all the same."""
    options = [element("option", f"row {row['row']:,}: {row['why']}", value=str(i)) for i, row in enumerate(rows)]
    buttons = [
        element("button", text, type="button", data_do=do, title=f"{name} ({key.upper()})", aria_label=name,
                aria_keyshortcuts=key.upper(), aria_pressed="false" if do == "borders" else None)
        for do, text, name, key in _BUTTONS
    ]  # fmt: skip
    keys = [element("li", *(element("kbd", key) for key in held.split()), f" {what}") for held, what in _KEYS]
    signs = [
        element("li", element("span", "text", class_="target"), "target: the loss counts it"),
        element("li", element("span", "text", class_="other"), "only read"),
        element("li", element("span", "<|text|>", class_="control"), "control token"),
        element("li", element("span", class_="nl"), "line break"),
        element("li", element("span", "⟨E4⟩", class_="other"), "a byte that is no whole character"),
    ]
    return element(
        "div",
        element("noscript", element("p", f"Without JavaScript: python -m pipeline.verify {dataset.path} --show ROW")),
        element("div", element("label", "Show ", element("select", *options, id="viewer-row")),
                element("div", *buttons, role="group", aria_label="Go to"), class_="bar"),
        element("p", id="viewer-summary", role="status"),
        element("div", id="viewer-pane", tabindex="0", role="region", aria_label="Tokens of the row",
                aria_describedby="viewer-keys"),
        element("p", id="viewer-info", aria_live="polite"),
        element("ul", *keys, id="viewer-keys", aria_label="Keys, while the viewer has the focus"),
        element("ul", *signs, id="viewer-signs", aria_label="Signs"),
        *_left_out(dataset, rows),
        id="viewer",
    )  # fmt: skip


def _left_out(dataset: PackedDataset, rows: Sequence[dict[str, Any]]) -> list[Markup]:
    said = [f"{len(rows):,} of {many(len(dataset), 'row')} on this page."]
    said += [
        f"Row {row['row']:,}: tokens 0 to {row['shown'] - 1:,} of {row['length']:,} are shown."
        for row in rows
        if row["shown"] < row["length"]
    ]
    return [element("p", line, class_="note") for line in said]


# ------------------------------------------------------------------------------------------------- text


class _Words:
    """What the ids of a dataset's own tokenizer stand for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}

    def bytes(self, token: int) -> bytes:
        """A token's UTF-8 bytes, which need not be whole characters."""
        if token not in self._known:
            spelled = self.added.get(token) or self._tokenizer.id_to_token(token)
            if spelled is None:
                held = f"⟨id {token}: not in the vocabulary⟩".encode()
            elif token in self.added:
                held = spelled.encode()
            else:
                held = b"".join(_alphabet().get(sign, sign.encode()) for sign in spelled)
            self._known[token] = held
        return self._known[token]

    def cells(self, ids: Sequence[int], apart: set[int]) -> Iterator[Cell]:
        """Tokens one by one, but joined where several make whole characters; never across a place of ``apart``."""
        i = 0
        while i < len(ids):
            stop, held = i + 1, self.bytes(ids[i])
            if not _is_whole(held):
                for j in range(i + 1, min(i + LONGEST_JOIN, len(ids))):
                    if j in apart or _is_whole(self.bytes(ids[j])):
                        break
                    held += self.bytes(ids[j])
                    if _is_whole(held):
                        stop = j + 1
                        break
            yield tuple(ids[i:stop])
            i = stop

    def text(self, cell: Cell) -> str:
        """As it is shown."""
        return shown(b"".join(self.bytes(token) for token in cell))


def shown(held: bytes) -> str:
    """Bytes as text in which nothing is invisible but blanks, tabs and line breaks (the script marks those)."""
    text = held.decode(errors="surrogateescape")
    return "".join(_visible(sign) for sign in text)


def _visible(sign: str) -> str:
    if "\udc80" <= sign <= "\udcff":
        return f"⟨{ord(sign) - 0xDC00:02X}⟩"
    joiner = sign in "\n\t\u200c\u200d"  # these two shape their neighbours
    if not joiner and unicodedata.category(sign) in ("Cc", "Cf", "Zl", "Zp"):
        return f"⟨U+{ord(sign):04X}⟩"
    return sign


@lru_cache(maxsize=1 << 16)
def _is_whole(held: bytes) -> bool:
    try:
        held.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache
def _alphabet() -> dict[str, bytes]:
    """Byte-level BPE spells a byte that prints as itself, the 68 others as the characters from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    spelled = {chr(byte): bytes([byte]) for byte in prints}
    return spelled | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}
