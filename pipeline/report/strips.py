"""A picture of rows as strips: which documents lie in each, which tokens are targets, what is padding.

    markup = picture(dataset, strips(figures))

At most 480 columns a row, whatever T is: a column stands for T / 480 tokens and shows the piece of its middle one,
full where at least half of the tokens are targets. Costs: the rows shown are read, some 200 bytes of page each piece.
The same dataset gives the same picture.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.page import Markup, element, figure, table
from pipeline.report.figures import Figures
from pipeline.report.wording import many
from pipeline.shards import PackedDataset, Row

NUM_STRIPS, COLUMNS = 64, 480
COLOURS = (1, 2, 3, 4, 5, 6)
"""Of page.css; the piece's place in its row chooses one, so that neighbours differ."""
_TOP, _HIGH, _GAP, _SCALE, _LETTER = 20, 10, 3, 2, 8
"""Height above the first strip, of a strip, below it; width of a column, and of a letter of a row's number."""
PADDING = -1


def strip_rows(num_rows: int) -> list[int]:
    """At most 64 rows, evenly spaced from the first to the last.

    Worked example: of 100 rows, 0 2 3 5 6 8 ... 97 99.
    """
    return [round(i) for i in np.linspace(0, max(num_rows - 1, 0), min(NUM_STRIPS, num_rows)).tolist()]


def strips(f: Figures) -> list[dict[str, int]]:
    """The rows of the picture: row, pieces, targets, padding."""
    held = f.rows[strip_rows(f.totals["rows"])].iter_rows(named=True)
    return [
        {"row": row["row"], "pieces": row["pieces"], "targets": row["targets"],
         "padding": f.manifest.max_tokens - row["tokens"]}
        for row in held
    ]  # fmt: skip


def columns(row: Row, max_tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """What each column of a strip shows: the piece's place in the row, or PADDING; whether it is drawn full.

    Worked example, T = 960, so 2 tokens a column: pieces from 0 to 3 and from 3 to 960: the middle tokens are
    1, 3, 5 ...: the first column is piece 0, all others are piece 1.
    """
    num = min(COLUMNS, max_tokens)
    edges = np.arange(num + 1) * max_tokens // num
    middle = (edges[:-1] + edges[1:]) // 2
    place = np.searchsorted(row.boundaries, middle, side="right") - 1
    targets = np.add.reduceat(row.loss_mask.astype(np.int64), edges[:-1])
    return np.where(place < len(row.doc_ids), place, PADDING), 2 * targets >= edges[1:] - edges[:-1]


def picture(dataset: PackedDataset, rows: Sequence[dict[str, int]]) -> Markup:
    """These rows, as ``strips`` gives them, as a figure."""
    max_tokens = dataset.manifest.max_tokens
    num = min(COLUMNS, max_tokens)
    left, wide = 12 + _LETTER * len(f"{max((row['row'] for row in rows), default=0):,}"), COLUMNS * _SCALE / num
    shapes: defaultdict[str, list[str]] = defaultdict(list)
    last = element("text", f"T = {max_tokens:,} tokens", class_="end", x=left + COLUMNS * _SCALE, y=_TOP - 7)
    texts = [element("text", "0", x=left, y=_TOP - 7), last]
    for i, row in enumerate(rows):
        end = _TOP + i * (_HIGH + _GAP) + _HIGH
        place, full = columns(dataset[row["row"]], max_tokens)
        starts = [0, *(np.flatnonzero(np.diff(place * 2 + full)) + 1).tolist(), num]
        for start, stop in pairwise(starts):
            piece, high = int(place[start]), _HIGH if full[start] else _HIGH // 2
            x, right = left + round(start * wide), left + round(stop * wide)
            if piece == PADDING:
                shapes["padding"].append(f"M{x + 0.5} {end - _HIGH + 0.5}H{right - 0.5}V{end - 0.5}H{x + 0.5}z")
            else:
                kind = f"s{COLOURS[piece % len(COLOURS)]}" + " other" * (not full[start])
                shapes[kind].append(f"M{x} {end - high}H{right}V{end}H{x}z")
        if i % 2 == 0:
            texts.append(element("text", f"{row['row']:,}", class_="end", x=left - 8, y=end))
    paths = [element("path", d="".join(parts), class_=kind) for kind, parts in sorted(shapes.items())]
    size = f"0 0 {left + COLUMNS * _SCALE} {_TOP + len(rows) * (_HIGH + _GAP)}"
    return figure(
        element("svg", *paths, *texts, viewBox=size, class_="strips"),
        title=many(len(rows), "row"),
        text="A strip is a row, with the number of every second one on its left. Each piece has a colour: strong and "
        "of full height where its tokens are targets, lighter and of half where they are not; padding is a grey "
        f"outline. {_resolution(max_tokens, num)}",
        fallback=table(("row", "pieces", "targets", "padding"), [[f"{n:,}" for n in row.values()] for row in rows],
                       caption="The rows of the picture", numeric=range(4)),
    )  # fmt: skip


def _resolution(max_tokens: int, num: int) -> str:
    if num == max_tokens:
        return "Every token is drawn."
    return f"A strip has {num} columns of about {max_tokens / num:,.3g} tokens; what is shorter may not show."
