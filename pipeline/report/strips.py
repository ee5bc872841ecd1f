"""A picture of rows as strips: which documents lie in each, which tokens are targets, what is padding.

    markup = picture(dataset, strip_rows(len(dataset)))

At most 480 columns a row, whatever T is: a column stands for T / 480 tokens and shows the document of its middle one,
strong where at least half of the tokens are targets. Costs: the rows shown are read, some 200 bytes of page each
document. The same dataset gives the same picture.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.page import Markup, element, figure, table
from pipeline.shards import PackedDataset, Row

NUM_STRIPS, COLUMNS = 64, 480
COLOURS = (1, 2, 3, 4, 5, 6)
"""Of page.css; the document's place in its row chooses one, so that neighbours differ."""
_HIGH, _GAP, _SCALE, _LETTER = 10, 3, 2, 8
"""Height of a strip and space below it; width of a column, and of a letter of a row's number."""
PADDING = -1


def strip_rows(num_rows: int) -> list[int]:
    """At most 64 rows, evenly spaced from the first to the last.

    Worked example: of 100 rows, 0 2 3 5 6 8 ... 97 99.
    """
    return [round(i) for i in np.linspace(0, max(num_rows - 1, 0), min(NUM_STRIPS, num_rows)).tolist()]


def columns(row: Row, max_tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """What each column of a strip shows: the document's place in the row, or PADDING; whether it is drawn strong.

    Worked example, T = 960, so 2 tokens a column: pieces from 0 to 3 and from 3 to 960: the middle tokens are
    1, 3, 5 ...: the first column is piece 0, all others are piece 1.
    """
    num = min(COLUMNS, max_tokens)
    edges = np.arange(num + 1) * max_tokens // num
    middle = (edges[:-1] + edges[1:]) // 2
    place = np.searchsorted(row.boundaries, middle, side="right") - 1
    targets = np.add.reduceat(row.loss_mask.astype(np.int64), edges[:-1])
    return np.where(place < len(row.doc_ids), place, PADDING), 2 * targets >= edges[1:] - edges[:-1]


def picture(dataset: PackedDataset, rows: Sequence[int]) -> Markup:
    """The strips of some rows as a figure."""
    max_tokens = dataset.manifest.max_tokens
    num = min(COLUMNS, max_tokens)
    left, wide = 12 + _LETTER * len(f"{max(rows, default=0):,}"), COLUMNS * _SCALE / num
    paths: defaultdict[tuple[int, bool], list[str]] = defaultdict(list)
    drawn, listed = [], []
    for i, index in enumerate(rows):
        row = dataset[index]
        top = i * (_HIGH + _GAP)
        place, strong = columns(row, max_tokens)
        value = place * 2 + strong
        starts = [0, *(np.flatnonzero(np.diff(value)) + 1).tolist(), num]
        for start, stop in pairwise(starts):
            x, end = left + round(start * wide), left + round(stop * wide)
            paths[int(place[start]), bool(strong[start])].append(f"M{x} {top}H{end}V{top + _HIGH}H{x}z")
        if i % 2 == 0:
            drawn.append(element("text", f"{index:,}", class_="end", x=left - 8, y=top + _HIGH))
        tail = max_tokens - int(row.boundaries[len(row.doc_ids)])
        listed.append((f"{index:,}", f"{len(row.doc_ids):,}", f"{int(row.loss_mask.sum()):,}", f"{tail:,}"))
    return figure(
        _svg(paths, drawn, wide=left + COLUMNS * _SCALE, num_rows=len(rows)),
        title=f"{len(rows):,} rows",
        text="A strip is a row, with the number of every second one on its left. A colour for each document, strong "
        f"where its tokens are targets, faint where they are not; padding is grey. {_resolution(max_tokens, num)}",
        fallback=table(("row", "documents", "targets", "padding"), listed, caption="The rows of the picture",
                       numeric=range(4)),
    )  # fmt: skip


def _resolution(max_tokens: int, num: int) -> str:
    if num == max_tokens:
        return "Every token is drawn."
    return f"A strip has {num} columns of about {max_tokens / num:,.3g} tokens; what is shorter may not show."


def _svg(paths: dict[tuple[int, bool], list[str]], drawn: list[Markup], *, wide: int, num_rows: int) -> Markup:
    merged: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
    for (place, strong), parts in paths.items():
        colour = "edge" if place == PADDING else f"s{COLOURS[place % len(COLOURS)]}"
        merged[colour, strong or place == PADDING] += parts
    shapes = [
        element("path", d="".join(parts), style=f"fill:var(--{colour})", fill_opacity=None if strong else 0.4)
        for (colour, strong), parts in sorted(merged.items())
    ]
    high = max(num_rows * (_HIGH + _GAP) - _GAP, 1)
    return element("svg", *shapes, *drawn, viewBox=f"0 0 {wide} {high}", class_="strips")
