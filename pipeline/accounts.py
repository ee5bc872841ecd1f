"""The account of a packed dataset: every total, limit and line of ``rejects.jsonl`` against what the rows hold.

    sums = Sums()
    for row in dataset: sums.add(row)
    for name, listed, found in check_totals(manifest, sums, lines): ...

Guarantees: nothing disappears. Every chat is in a row or in a line; every token is in a row, or counted as cut or
rejected. What the dataset alone cannot give exactly (lost last line breaks, rounds) is held within its bounds.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.assemble import histogram, parse_rejects, piece_width
from pipeline.manifest import REJECT_KINDS, REJECT_REASONS, DatasetError, Manifest
from pipeline.shards import Row, rows_per_shard
from pipeline.source import Reject

Finding = tuple[str, Any, Any]
"""Name, as listed, as found: a fault if the two differ."""

_LINES_OF = {
    "truncate": ("truncated", "prompt_longer_than_row"),
    "split": ("split", "round_longer_than_row"),
    "drop": ("", "longer_than_row"),
    "error": ("", ""),
}
"""What each overflow policy may do to a document longer than a row, and why it may reject one."""

_TOKENS = re.compile("[0-9]+ tokens")
_KEPT = "[0-9]+ of [0-9]+ tokens kept in [0-9]+ pieces"
_DETAILS = {
    "escaped": "[1-9][0-9]* control strings as text, [0-9]+ of them tool tags",
    "split": _KEPT,
    "truncated": _KEPT,
}
"""The detail of a line by what it reports."""


@dataclass(kw_only=True, slots=True)
class Sums:
    """What the rows add up to."""

    rows: int = 0
    tokens: int = 0
    targets: int = 0
    squared: int = 0
    max_segments: int = 0
    max_segment: int = 0
    max_token_id: int = 0
    lengths: list[int] = field(default_factory=list)
    pieces_per_row: list[int] = field(default_factory=list)
    numbers: list[tuple[int, int]] = field(default_factory=list)
    """(doc_id, piece) of every piece, beside its length."""
    full: set[int] = field(default_factory=set)
    """Documents with a piece that fills a row and ends with a target: they may have lost a last line break."""
    shards: list[list[int]] = field(default_factory=list)
    """Rows, pieces, tokens and targets of each shard."""

    def add(self, row: Row) -> None:
        """Count one row, of the shard that was opened last."""
        bounds = row.boundaries.astype(np.int64)
        lengths = bounds[1:] - bounds[:-1]
        pieces = lengths[: len(row.doc_ids)]
        counts = [1, len(pieces), int(pieces.sum()), int(row.loss_mask.sum())]
        self.shards[-1] = [total + count for total, count in zip(self.shards[-1], counts, strict=True)]
        self.rows += 1
        self.tokens += counts[2]
        self.targets += counts[3]
        self.squared += int((pieces**2).sum())
        self.max_segments = max(self.max_segments, len(lengths))
        self.max_segment = max(self.max_segment, int(lengths.max()))
        self.max_token_id = max(self.max_token_id, int(row.input_ids.max()))
        self.lengths += pieces.tolist()
        self.pieces_per_row.append(len(pieces))
        self.numbers += zip(row.doc_ids.tolist(), row.pieces.tolist(), strict=True)
        if len(lengths) == 1 and row.loss_mask[-1]:
            self.full.add(int(row.doc_ids[0]))

    def open_shard(self) -> None:
        """The rows that follow are another shard's."""
        self.shards.append([0, 0, 0, 0])


def check_totals(manifest: Manifest, sums: Sums, lines: list[Reject]) -> Iterator[Finding]:
    """Compare everything that rows and lines determine; the first finding whose sides differ is the fault."""
    yield from _counts(manifest, sums, lines)
    yield from _documents(manifest, sums, lines)
    yield from _cuts(manifest, sums, lines)


def _counts(manifest: Manifest, sums: Sums, lines: list[Reject]) -> Iterator[Finding]:
    """What the rows, and the number of lines of each kind, give at once."""
    totals, limits, listed = manifest.totals, manifest.limits, manifest.files["shards"]
    kinds = Counter(line.what for line in lines)
    shards = [[s["rows"], s["pieces"], s["tokens"], s["targets"]] for s in listed]
    yield "rows, pieces, tokens, targets by shard", shards, sums.shards
    full = [rows_per_shard(manifest.max_tokens)] * (len(shards) - 1)
    yield "rows of all shards but the last", [s["rows"] for s in listed[:-1]], full
    for name, found in (
        ("rows", sums.rows),
        ("pieces", len(sums.lengths)),
        ("tokens", sums.tokens),
        ("targets", sums.targets),
        ("padding", sums.rows * manifest.max_tokens - sums.tokens),
        ("documents", len({doc_id for doc_id, _ in sums.numbers})),
        *((kind, kinds[kind]) for kind in ("truncated", "split", "escaped")),
    ):
        yield f"totals.{name}", totals[name], found
    reasons = Counter(line.reason for line in lines if line.what == "rejected")
    yield "totals.rejected", totals["rejected"], dict(reasons)
    for name, found in (
        ("max_segments_per_row", sums.max_segments),
        ("max_segment_tokens", sums.max_segment),
        ("max_token_id", sums.max_token_id),
        ("sum_of_squared_lengths", sums.squared),
    ):
        yield f"limits.{name}", limits[name], found
    bars = {
        "piece_tokens": histogram(sums.lengths, piece_width(manifest.max_tokens)),
        "pieces_per_row": histogram(sums.pieces_per_row, 1),
    }
    yield "histograms", manifest.histograms, bars


def _documents(manifest: Manifest, sums: Sums, lines: list[Reject]) -> Iterator[Finding]:
    """Every chat that was read is packed or rejected, and never both."""
    chats_read = manifest.totals["chats_read"]
    packed = {doc_id for doc_id, _ in sums.numbers}
    rejected = {line.doc_id for line in lines if line.what == "rejected"}
    yield "totals.chats_read", chats_read, len(packed) + len(rejected)
    limits = [source["limit"] for source in manifest.recipe["source"]]
    if limits and None not in limits:
        yield _between("totals.chats_read", chats_read, 0, sum(limits))
    yield "documents both packed and rejected", [], sorted(packed & rejected)[:5]
    named = packed | {line.doc_id for line in lines}
    yield "documents beyond chats_read", [], sorted(d for d in named if not 0 <= d < chats_read)[:5]
    yield "documents whose pieces are not numbered 0, 1, 2 ... once each", [], misnumbered(sums.numbers)


def misnumbered(numbers: list[tuple[int, int]]) -> list[int]:
    """A document's pieces are numbered 0 to n - 1, each once: sorted, each is 0 or one more than the last.

    Args:
        numbers: (doc_id, piece) of every piece.

    Returns:
        Up to five doc_ids for which that is not so.
    """
    table = np.array(sorted(numbers), np.int64).reshape(-1, 2)
    first = np.append(True, np.diff(table[:, 0]) != 0)[: len(table)]
    right = np.where(first, table[:, 1] == 0, np.diff(table[:, 1], prepend=0) == 1)
    return [int(doc_id) for doc_id in table[~right, 0][:5]]


def _cuts(manifest: Manifest, sums: Sums, lines: list[Reject]) -> Iterator[Finding]:
    """What was left out: the numbers in the lines against the pieces, then against the totals."""
    totals, max_tokens = manifest.totals, manifest.max_tokens
    kind, reason = _LINES_OF[manifest.recipe["pack"]["overflow"]]
    others = [li.doc_id for li in lines if li.what in ("truncated", "split") and li.what != kind]
    others += [li.doc_id for li in lines if li.reason.endswith("_row") and li.reason != reason]
    yield "documents cut or rejected against the overflow policy", [], others[:5]
    kept, pieces = Counter[int](), Counter[int]()
    for (doc_id, _), length in zip(sums.numbers, sums.lengths, strict=True):
        kept[doc_id] += length
        pieces[doc_id] += 1
    cut = {line.doc_id: _integers(line) for line in lines if line.what == kind}
    wrong = [
        doc_id
        for doc_id, (rest, length, num) in cut.items()
        if (rest, num) != (kept[doc_id], pieces[doc_id]) or not max(rest, max_tokens + 1) <= length
    ]
    yield "documents cut otherwise than rejects.jsonl says", [], wrong[:5]
    several = [d for d, num in pieces.items() if num > 1 and not (kind == "split" and d in cut)]
    yield "documents of several pieces that were not split", [], several[:5]
    lost = [length - rest for rest, length, _ in cut.values()]
    # A whole document of T tokens and a last line break drops that, which no line reports.
    yield _between("totals.tokens_cut", totals["tokens_cut"], sum(lost), sum(lost) + len(sums.full - cut.keys()))
    # A round has two tokens at least, and "split" leaves out whole rounds.
    rounds = sum(num > 0 for num in lost) if kind == "split" else 0
    yield _between("totals.rounds_cut", totals["rounds_cut"], rounds, sum(lost) // 2)
    yield from _rejections(manifest, sums, [line for line in lines if line.what == "rejected"])


def _rejections(manifest: Manifest, sums: Sums, rejected: list[Reject]) -> Iterator[Finding]:
    totals = manifest.totals
    short = [li.doc_id for li in rejected if li.reason.endswith("_row") and _integers(li)[0] <= manifest.max_tokens]
    yield "documents rejected as too long that fit", [], short[:5]
    counted = [_TOKENS.fullmatch(line.detail) is not None for line in rejected]
    known = sum(_integers(line)[0] for line, is_counted in zip(rejected, counted, strict=True) if is_counted)
    # The line of a chat without an assistant turn does not say how many tokens it had.
    bare = any(li.reason == "no_target" and not is_counted for li, is_counted in zip(rejected, counted, strict=True))
    yield _between("totals.tokens_rejected", totals["tokens_rejected"], known, None if bare else known)
    rendered = sums.tokens + totals["tokens_cut"] + totals["tokens_rejected"]
    yield "totals.tokens_rendered", totals["tokens_rendered"], rendered


def _between(name: str, listed: int, low: int, high: int | None) -> Finding:
    """A total of which only bounds are known, the upper one None if it is not; found is ``listed`` within them."""
    if low <= listed and (high is None or listed <= high):
        return name, listed, listed
    return name, listed, low if low == high else f"{low} to {'more' if high is None else high}"


def _integers(line: Reject) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", line.detail)]


def read_lines(path: Path) -> list[Reject]:
    """The lines of a ``rejects.jsonl``.

    Raises:
        DatasetError: it is not what packing writes: its form, order, reasons or details.
    """
    try:
        lines = parse_rejects(path.read_bytes())
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise DatasetError(f"{path}: {error}. Pack again.") from None
    for line in lines:
        if (fault := _line_fault(line)) is not None:
            raise DatasetError(f"{path}: document {line.doc_id!r:.40}: {fault}. Pack again.")
    keys = [(line.doc_id, line.what) for line in lines]
    if keys != sorted(set(keys)):
        raise DatasetError(f"{path}: lines must be sorted, one for each (doc_id, what). Pack again.")
    return lines


def _line_fault(line: Reject) -> str | None:
    if type(line.doc_id) is not int or not all(isinstance(t, str) for t in (line.what, line.reason, line.detail)):
        return "a value of another type"
    known = line.reason in REJECT_REASONS if line.what == "rejected" else line.reason == ""
    if line.what not in REJECT_KINDS or not known:
        return f"unknown {line.what!r:.80}, {line.reason!r:.80}"
    form = _TOKENS if line.reason.endswith("_row") else _DETAILS.get(line.what, ".*")
    return None if re.fullmatch(form, line.detail) else f"unknown detail {line.detail!r:.80}"
