"""Every row of a packed dataset read once: its pieces, the turns in them, and what stands out.

    found = scan(PackedDataset.open("data/packed"))

Guarantees: nothing comes from the manifest; rows whose pieces do not go together are an error, never a figure.
Costs: ids, masks and boundaries are read half a million tokens at a time into own memory, nothing stays mapped; 35 ns a
token on one core, 150 bytes of memory a piece. Needs polars.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from pipeline.manifest import damaged
from pipeline.progress import Progress
from pipeline.shards import Bool, Int32, Int64, PackedDataset
from pipeline.turns import START

if TYPE_CHECKING:
    import polars as pl
    from tokenizers import Tokenizer

TOKENS_AT_ONCE = 1 << 19
OPENING = 64
"""Tokens that documents must share, from their first user turn on, to count as repeated."""
ROLES = ("system", "user", "assistant", "tool", "other role", "outside of turns")
"""Whose turn a token is in: by the header ``<|im_start|>role`` and a line break; tool results that a template
writes into a user turn are told by ``<tool_response>`` at its begin."""
_OTHER, _OUTSIDE, _PADDING = 4, 5, 6
_PLAIN, _START, _BREAK, _REPLACEMENT = range(4)
_COLUMNS = [0, 2, 3, 4, 5]  # of the schema: all but the positions, which boundaries give

_OF_ROWS = ("row", "pieces", "tokens", "targets", "replaced", "token", "count")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What the rows hold."""

    pieces: "pl.DataFrame"
    """One line a piece, in row order: row, doc_id, piece, tokens, targets (int64); digest, xxh3_128 of its ids;
    opening, that of the 64 ids from its first user turn on (from its begin without one), null if it has fewer."""
    rows: "pl.DataFrame"
    """One line a row: row, pieces, tokens, targets, replaced (tokens with U+FFFD), token (its most frequent one, the
    least id of several), count (of it)."""
    roles: Int64
    """[6, 3] turns, tokens and targets of each of ROLES; the start token belongs to its turn."""
    max_token_id: int
    """In the rows, padding included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Some rows: R of T tokens."""

    ids: Int32
    """[R, T]"""
    mask: Bool
    """[R, T]"""
    bounds: Int64
    """Boundaries of all rows end to end."""
    num_bounds: Int64
    """[R] of each row."""
    doc_ids: Int64
    """[P]"""
    pieces: Int64
    """[P]"""
    num_pieces: Int64
    """[R] of each row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Where the P pieces of a part lie."""

    row: Int64
    """[P] in the part."""
    begin: Int64
    """[P] first token, counted over the part's rows end to end."""
    end: Int64
    """[P] behind the last."""


class _Ids:
    """Which ids the counting looks for: a class for each id, and headers by role."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        vocab = tokenizer.get_vocab()
        self.kinds = np.zeros(max(vocab.values(), default=0) + 2, np.uint8)  # the last one: any id beyond
        for text, i in vocab.items():  # a byte-level vocabulary spells a line break Ċ, and U+FFFD ï¿½
            self.kinds[i] = _BREAK if text.startswith("Ċ") else _REPLACEMENT if "ï¿½" in text else _PLAIN
        if (start := vocab.get(START)) is not None:
            self.kinds[start] = _START
        self.headers = [tokenizer.encode(role, add_special_tokens=False).ids for role in ROLES[:_OTHER]]
        self.tool_response = vocab.get("<tool_response>", -1)


def open_dataset_tokenizer(dataset: PackedDataset) -> "Tokenizer":
    """The tokenizer that lies beside the shards.

    Raises:
        DatasetError: it is none that this can use.
    """
    from tokenizers import Tokenizer

    path = dataset.path / "tokenizer" / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise damaged(str(path), "a tokenizer", f"none that this can use ({str(error)[:100]})") from None


def scan(dataset: PackedDataset, tokenizer: "Tokenizer") -> Scan:
    """Read every row once.

    Raises:
        DatasetError: naming a shard that cannot be read, or whose rows are not as the format says.
    """
    import polars as pl

    ids = _Ids(tokenizer)
    whole = dict.fromkeys(("row", "doc_id", "piece", "tokens", "targets"), pl.Int64)
    pieces = [pl.DataFrame(schema=whole | dict.fromkeys(("digest", "opening"), pl.String))]
    rows = [pl.DataFrame(schema=dict.fromkeys(_OF_ROWS, pl.Int64))]
    roles, most, first_row = np.zeros((len(ROLES) + 1, 3), np.int64), 0, 0
    progress = Progress("report", len(dataset), "rows")
    for number in range(len(dataset.manifest.files["shards"])):
        for part in _parts(dataset, number):
            places = _check(part, str(dataset._shard_path(number)))
            kinds = np.take(ids.kinds, part.ids.reshape(-1), mode="clip")
            turns = _Turns(part, places, kinds, ids)
            roles += turns.counts
            most = max(most, int(part.ids.max()))
            pieces.append(pl.DataFrame(_pieces(part, places, turns, first_row), schema=pieces[0].schema))
            rows.append(pl.DataFrame(_rows(part, places, kinds, first_row), schema=rows[0].schema))
            first_row += len(part.ids)
            progress.add(len(part.ids))
    progress.close()
    return Scan(pieces=pl.concat(pieces), rows=pl.concat(rows), roles=roles[:-1], max_token_id=most)


# --------------------------------------------------------------------------------------------- reading


def _parts(dataset: PackedDataset, number: int) -> Iterator[_Part]:
    """The rows of a shard, about half a million tokens at a time."""
    listed, path = dataset.manifest.files["shards"][number]["rows"], str(dataset._shard_path(number))
    num_rows, max_tokens = 0, dataset.manifest.max_tokens
    dataset._open_shard(number)  # its footer
    options = pa.ipc.IpcReadOptions(included_fields=_COLUMNS, use_threads=False)
    batches: list[pa.RecordBatch] = []
    try:
        with pa.OSFile(path) as file:  # read, not mapped
            reader = pa.ipc.open_file(file, options=options)
            for i in range(reader.num_record_batches):
                batches.append(_batch(reader, i, path))
                num_rows += batches[-1].num_rows
                if sum(batch.num_rows for batch in batches) * max_tokens >= TOKENS_AT_ONCE:
                    yield _part(batches, max_tokens)
                    batches = []
            if any(batch.num_rows for batch in batches):
                yield _part(batches, max_tokens)
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, "rows of pieces", f"unreadable bytes ({type(error).__name__})") from None
    if num_rows != listed:
        raise damaged(path, f"{listed} rows", str(num_rows))


def _batch(reader: pa.ipc.RecordBatchFileReader, i: int, path: str) -> pa.RecordBatch:
    batch = reader.get_batch(i)
    batch.validate(full=True)
    if any(column.null_count or column.values.null_count for column in batch.columns):
        raise damaged(path, "rows without nulls", f"nulls in record batch {i}")
    return batch


def _part(batches: list[pa.RecordBatch], max_tokens: int) -> _Part:
    def joined(i: int) -> Any:
        return np.concatenate([batch.column(i).flatten().to_numpy(zero_copy_only=False) for batch in batches])

    def counts(i: int) -> Int64:
        lengths = [batch.column(i).value_lengths().to_numpy() for batch in batches]
        return np.concatenate(lengths).astype(np.int64)

    num_doc_ids, num_pieces = counts(3), counts(4)
    if (num_doc_ids != num_pieces).any():
        num_doc_ids = np.zeros_like(num_doc_ids)  # refused as a row without pieces
    return _Part(
        ids=joined(0).reshape(-1, max_tokens),
        mask=joined(1).reshape(-1, max_tokens),
        bounds=joined(2).astype(np.int64), num_bounds=counts(2),
        doc_ids=joined(3), pieces=joined(4).astype(np.int64), num_pieces=num_doc_ids,
    )  # fmt: skip


def _check(part: _Part, path: str) -> _Places:
    """Where each piece lies.

    Raises:
        DatasetError: the boundaries do not rise from 0 to T, or do not go with the pieces; an id is negative.
    """
    max_tokens, ends = part.ids.shape[1], np.cumsum(part.num_bounds)
    first = ends - part.num_bounds
    spare = part.num_bounds - 1 - part.num_pieces  # 1 where the row ends with padding
    if (part.num_bounds < 2).any() or (part.num_pieces < 1).any() or ((spare != 0) & (spare != 1)).any():
        raise damaged(path, "a document for each segment but the padding", "rows in which they do not go together")
    rises = np.diff(part.bounds) > 0
    rises[ends[:-1] - 1] = True  # from one row to the next
    if (part.bounds[first] != 0).any() or (part.bounds[ends - 1] != max_tokens).any() or not rises.all():
        raise damaged(path, f"boundaries that rise from 0 to {max_tokens}", "others")
    if part.ids.min() < 0:
        raise damaged(path, "token ids from 0 on", str(part.ids.min()))
    row = np.repeat(np.arange(len(part.ids)), part.num_pieces)
    at = np.arange(len(row)) + np.repeat(first - np.cumsum(part.num_pieces) + part.num_pieces, part.num_pieces)
    return _Places(row=row, begin=row * max_tokens + part.bounds[at], end=row * max_tokens + part.bounds[at + 1])


# -------------------------------------------------------------------------------------------- counting


class _Turns:
    """The turns of some rows: who speaks, where, and how much of it is a target.

    Edges are where a turn, a piece or padding begins. Worked example, T = 8: pieces from 0 to 3 and from 3 to 6, start
    tokens at 0, 3 and 5: edges 0 3 5 6, the last one of padding; 3, 2, 1 and 2 tokens follow them.
    """

    def __init__(self, part: _Part, places: _Places, kinds: npt.NDArray[np.uint8], ids: _Ids) -> None:
        flat, max_tokens = part.ids.reshape(-1), part.ids.shape[1]
        last = places.end[np.cumsum(part.num_pieces) - 1]
        tails = last[last % max_tokens != 0]
        segments = np.sort(np.concatenate([places.begin, tails]))
        is_edge = kinds == _START
        is_edge[segments] = True
        self.at = np.flatnonzero(is_edge)
        self.piece = np.searchsorted(places.begin, self.at, side="right") - 1
        self._ids, self._kinds, self._is_open = ids, kinds, kinds[self.at] == _START
        stop = np.append(self.at[1:], flat.size)
        segment = segments[np.searchsorted(segments, self.at, side="right") - 1]
        is_padding = np.isin(segment, tails)
        self.role = np.where(is_padding, _PADDING, self._roles(flat, stop))
        targets = np.add.reduceat(part.mask.reshape(-1), self.at, dtype=np.int64)
        self.targets = np.bincount(self.piece, np.where(is_padding, 0, targets), len(places.begin)).astype(np.int64)
        counted = (self._is_open, stop - self.at, targets)
        self.counts = np.stack([np.bincount(self.role, num, len(ROLES) + 1).astype(np.int64) for num in counted], 1)

    def _roles(self, flat: Int32, stop: Int64) -> Int64:
        def ids_at(offset: int) -> Int32:
            return np.take(flat, self.at + offset, mode="clip")

        found = np.where(self._is_open, _OTHER, _OUTSIDE)
        for role, header in enumerate(self._ids.headers):
            behind = len(header) + 1  # where its line break stands
            matches = self._is_open & (self.at + behind < stop)
            matches &= np.take(self._kinds, self.at + behind, mode="clip") == _BREAK
            for i, token in enumerate(header):
                matches &= ids_at(1 + i) == token
            found[matches] = role
            if ROLES[role] == "user":
                held = matches & (self.at + behind + 1 < stop) & (ids_at(behind + 1) == self._ids.tool_response)
                found[held] = ROLES.index("tool")
        return found

    def first_user_turns(self, begin: Int64) -> Int64:
        """[P] where each piece's first user turn begins, else where the piece does."""
        users = np.flatnonzero(self.role == ROLES.index("user"))
        piece, first = np.unique(self.piece[users], return_index=True)
        found = begin.copy()
        found[piece] = self.at[users[first]]
        return found


def _pieces(part: _Part, places: _Places, turns: _Turns, first_row: int) -> dict[str, Any]:
    ids = part.ids.reshape(-1).data
    begin, end, hash_ = places.begin.tolist(), places.end.tolist(), xxhash.xxh3_128_hexdigest
    opening = turns.first_user_turns(places.begin).tolist()
    return {
        "row": first_row + places.row, "doc_id": part.doc_ids, "piece": part.pieces,
        "tokens": places.end - places.begin, "targets": turns.targets,
        "digest": [hash_(ids[a:b]) for a, b in zip(begin, end, strict=True)],
        "opening": [
            hash_(ids[a : a + OPENING]) if b - a >= OPENING else None for a, b in zip(opening, end, strict=True)
        ],
    }  # fmt: skip


def _rows(part: _Part, places: _Places, kinds: npt.NDArray[np.uint8], first_row: int) -> dict[str, Any]:
    num_rows, max_tokens = part.ids.shape
    tokens = np.bincount(places.row, places.end - places.begin, num_rows).astype(np.int64)
    token, count = most_frequent(part.ids, tokens)
    replaced = np.flatnonzero(kinds == _REPLACEMENT) // max_tokens
    return {
        "row": first_row + np.arange(num_rows), "pieces": part.num_pieces, "tokens": tokens,
        "targets": part.mask.sum(axis=1, dtype=np.int64), "replaced": np.bincount(replaced, minlength=num_rows),
        "token": token, "count": count,
    }  # fmt: skip


def most_frequent(ids: Int32, tokens: Int64) -> tuple[Int64, Int64]:
    """[R] the id that each row holds most often before its padding, the least of several, and how often.

    Worked example: a row 5 7 5 9 of which the last is padding sorts to -1 5 5 7; its runs are of 1, 2 and 1.
    """
    num_rows, max_tokens = ids.shape
    held = np.where(np.arange(max_tokens) < tokens[:, None], ids, -1) if (tokens < max_tokens).any() else ids
    ordered = np.sort(held, axis=1).reshape(-1)
    is_new = np.empty(ordered.size, np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    is_new[::max_tokens] = True
    at = np.flatnonzero(is_new)
    runs = np.diff(at, append=ordered.size)
    runs[ordered[at] < 0] = 0
    row = at // max_tokens
    count = np.maximum.reduceat(runs, np.searchsorted(row, np.arange(num_rows)))
    hits = np.flatnonzero(runs == count[row])
    _, first = np.unique(row[hits], return_index=True)
    return ordered[at[hits[first]]].astype(np.int64), count
