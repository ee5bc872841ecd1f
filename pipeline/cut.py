"""Decide what of each document is packed, from lengths alone: the only place where something is left out.

    pieces, rounds_cut, reasons, long = cut(documents, max_tokens=8192, overflow="truncate")

Guarantees: no document that fits is cut, but for a last line break; every piece starts at a turn and has a target that
is not its first token; what is left out is counted. Costs: a few passes over the turns; ``split`` loops over rounds of
documents longer than a row.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

SYSTEM, USER, ASSISTANT, TOOL = 0, 1, 2, 3
"""Roles of turns."""

Overflow = Literal["truncate", "split", "drop", "error"]
"""What happens to a document longer than a row."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

REASONS = ("", "no_target", "longer_than_row", "prompt_longer_than_row", "round_longer_than_row")
"""Why a document is rejected here; its code is the place in this tuple, 0 for a document that is packed."""

DOC, START, STOP, NUMBER, TARGETS = range(5)
"""Columns of a table of pieces: as docs, starts, stops, numbers and targets in ``PackPlan``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Every document of a dataset as flat arrays: D documents, N turns over all of them."""

    doc_ids: Int64
    """[D] source row of each document, for messages; everything else here counts documents from 0 to D - 1."""
    lengths: Int64
    """[D] tokens of the whole document."""
    turn_offsets: Int64
    """[D + 1] the turns of document d are turn_offsets[d] to turn_offsets[d + 1]; at least one each."""
    turn_ends: Int32
    """[N] token in its document at which the turn ends; a document's last one equals its length."""
    roles: UInt8
    """[N] SYSTEM, USER, ASSISTANT or TOOL."""
    turn_targets: Int32
    """[N] number of targets in the turn."""
    turn_first_target: Int32
    """[N] token in its document at which the turn's targets, all contiguous, begin; -1 if there are none."""


def cut(documents: Documents, *, max_tokens: int, overflow: Overflow) -> tuple[Int64, int, UInt8, Int64]:
    """Turn documents into pieces of at most ``max_tokens``; the rules are at ``_truncate`` and ``_split``.

    Returns:
        pieces [P, 5], a table; rounds_cut; reasons [D], codes of ``REASONS``; the documents longer than a row.

    Raises:
        ValueError: a document is longer than a row and overflow is "error".
    """
    documents = _without_first_tokens(documents)
    targets = _sum_by_document(documents.turn_targets, documents)
    reasons = np.where(targets > 0, 0, REASONS.index("no_target")).astype(np.uint8)
    fits = documents.lengths - _ends_with_line_break(documents) <= max_tokens
    whole, long = np.flatnonzero(fits & (targets > 0)), np.flatnonzero(~fits & (targets > 0))
    pieces = _table(whole, np.minimum(documents.lengths[whole], max_tokens), targets[whole])
    if overflow == "drop" or not len(long):
        reasons[long] = REASONS.index("longer_than_row")
        return pieces, 0, reasons, long
    if overflow == "error":
        raise ValueError(
            f"document {documents.doc_ids[long[0]]} has {documents.lengths[long[0]]} tokens, more than a row "
            f"of {max_tokens}, and {len(long) - 1} others are longer too: raise --max-tokens, or choose with "
            "--overflow truncate, split or drop what happens to them"
        )
    rule = _truncate if overflow == "truncate" else _split
    parts, rounds_cut, reasons[long] = rule(_select(documents, long), max_tokens=max_tokens)
    parts[:, DOC] = long[parts[:, DOC]]
    return np.concatenate([pieces, parts]), rounds_cut, reasons, long


def _table(docs: Int64, stops: Int64, targets: Int64) -> Int64:
    """[P, 5] pieces that are the beginnings of documents."""
    return np.stack([docs, np.zeros_like(docs), stops, np.zeros_like(docs), targets], axis=1)


def _truncate(documents: Documents, *, max_tokens: int) -> tuple[Int64, int, UInt8]:
    """The longest prefix that ends with an assistant turn and has a target, else a cut inside an assistant turn.

    That cut is at T and needs a target of the same turn before it; else the prompt is longer than a row.
    Returns pieces, rounds_cut and reasons, as ``cut`` does.
    """
    offsets, owner = documents.turn_offsets[:-1], _owners(documents)
    starts, ends, targets = _turn_starts(documents), documents.turn_ends, documents.turn_targets
    first = np.where(targets > 0, documents.turn_first_target, np.int32(2**31 - 1))
    assistant = documents.roles == ASSISTANT
    whole = assistant & (ends <= max_tokens) & (np.minimum.reduceat(first, offsets)[owner] < ends)
    inside = assistant & (max_tokens < ends) & (first < max_tokens)
    stops = np.maximum.reduceat(np.where(whole, ends, 0), offsets).astype(np.int64)
    stops[(stops == 0) & np.logical_or.reduceat(inside, offsets)] = max_tokens
    kept = _sum_by_document(np.clip(stops[owner] - first, 0, targets), documents)
    packed = np.flatnonzero(stops)
    lost_rounds = _starts_round(documents) & (starts >= stops[owner]) & (stops[owner] > 0)
    reasons = np.where(stops > 0, 0, REASONS.index("prompt_longer_than_row")).astype(np.uint8)
    return _table(packed, stops[packed], kept[packed]), int(lost_rounds.sum()), reasons


def _split(documents: Documents, *, max_tokens: int) -> tuple[Int64, int, UInt8]:
    """As many whole rounds a piece as fit; a round that does not fit and a piece without a target are left out.

    Returns pieces, rounds_cut and reasons, as ``cut`` does.
    """
    turns = np.flatnonzero(_starts_round(documents))
    owner, starts = _owners(documents)[turns], _turn_starts(documents)[turns]
    stops = documents.turn_ends[np.append(turns[1:], len(documents.turn_ends)) - 1]
    targets = np.add.reduceat(documents.turn_targets, turns)
    # Where a round's very first token is a target, a piece that starts with it has one target fewer.
    loses = (documents.turn_first_target[turns] == starts) & (documents.turn_targets[turns] > 0)
    found: list[list[int]] = []  # doc, start, stop, rounds, targets
    rounds = (column.tolist() for column in (owner, starts, stops, targets, loses))
    for doc, start, stop, num_targets, loses_one in zip(*rounds, strict=True):
        piece = found[-1] if found else [-1, 0, 0, 0, 0]
        if piece[DOC] == doc and piece[STOP] == start and stop - piece[START] <= max_tokens:
            piece[STOP:] = [stop, piece[3] + 1, piece[TARGETS] + num_targets]
        elif stop - start <= max_tokens:
            found.append([doc, start, stop, 1, num_targets - loses_one])
    pieces = np.array(found, np.int64).reshape(-1, 5)
    pieces = pieces[pieces[:, TARGETS] > 0]
    reasons = np.full(len(documents.lengths), REASONS.index("no_target"), np.uint8)
    reasons[owner[stops - starts > max_tokens]] = REASONS.index("round_longer_than_row")
    reasons[pieces[:, DOC]] = 0
    rounds_cut = int((reasons[owner] == 0).sum() - pieces[:, 3].sum())
    pieces[:, NUMBER] = np.arange(len(pieces)) - np.searchsorted(pieces[:, DOC], pieces[:, DOC])
    return pieces, rounds_cut, reasons


def _without_first_tokens(documents: Documents) -> Documents:
    """The same documents, their first token no target: a piece's first token never is one."""
    at_zero = (documents.turn_first_target == 0) & (documents.turn_targets > 0)
    return replace(
        documents,
        turn_targets=documents.turn_targets - at_zero,
        turn_first_target=documents.turn_first_target + at_zero,
    )


def _ends_with_line_break(documents: Documents) -> Bool:
    """[D] the document's last token is the line break after the targets of its last turn.

    Of 9 tokens 5, 6 and 7 are targets and 8 is the line break: 5 + 3 == 9 - 1.
    """
    last = documents.turn_offsets[1:] - 1
    targets_end = documents.turn_first_target[last].astype(np.int64) + documents.turn_targets[last]
    flags: Bool = (documents.turn_targets[last] > 0) & (targets_end == documents.lengths - 1)
    return flags


def _starts_round(documents: Documents) -> Bool:
    """[N] a round starts at the turn: a user turn after an assistant or tool turn, or a document's first turn."""
    after = np.isin(np.append(SYSTEM, documents.roles[:-1]), (ASSISTANT, TOOL))
    flags: Bool = (documents.roles == USER) & after
    flags[documents.turn_offsets[:-1]] = True
    return flags


def _turn_starts(documents: Documents) -> Int32:
    """[N] token in its document at which the turn starts."""
    starts = np.append(np.int32(0), documents.turn_ends[:-1])
    starts[documents.turn_offsets[:-1]] = 0
    return starts


def _owners(documents: Documents) -> Int64:
    """[N] document of each turn."""
    return np.repeat(np.arange(len(documents.lengths)), np.diff(documents.turn_offsets))


def _sum_by_document(values: Int32, documents: Documents) -> Int64:
    """[D] sum over a document's turns."""
    return np.diff(np.append(0, np.cumsum(values, dtype=np.int64))[documents.turn_offsets])


def _select(documents: Documents, docs: Int64) -> Documents:
    """Some of the documents, as documents of their own."""
    turns = np.flatnonzero(np.isin(_owners(documents), docs))
    return Documents(
        doc_ids=documents.doc_ids[docs],
        lengths=documents.lengths[docs],
        turn_offsets=np.append(0, np.cumsum(np.diff(documents.turn_offsets)[docs])),
        turn_ends=documents.turn_ends[turns],
        roles=documents.roles[turns],
        turn_targets=documents.turn_targets[turns],
        turn_first_target=documents.turn_first_target[turns],
    )
