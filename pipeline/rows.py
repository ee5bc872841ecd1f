"""The rows of parquet, jsonl and Arrow stream files, block by block.

A block is read on its own, by any worker, in any order. Costs: a row group of a parquet file is decoded once by each
worker, 1,024 rows at a time, so that memory stays bounded whatever its size.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_PER_BLOCK = 2048
BYTES_PER_BLOCK = 1 << 25
ROWS_AT_ONCE = 1024  # decoded from a parquet file
PARQUET_BUFFER = 1 << 20  # bytes read at once of each column
MAX_DEPTH = 100  # levels; Python's own limit depends on who calls, which must not decide what is rejected
TOO_DEEP = ("bad_type", f"nested more than {MAX_DEPTH} levels deep")
NO_PYTHON = (ValueError, OverflowError, LookupError, NotImplementedError)
"""What Arrow raises for values of a row: no UTF-8, a time out of range or in an unknown zone, fields of one name."""

Extent = tuple[int, int, int]
"""offset, bytes, rows of a block within its file."""

Stamp = tuple[int, int, int]
"""Size, time and inode of a file: another one means that it may hold something else."""

Unreadable = tuple[str, str]
"""(reason, detail) in place of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some consecutive rows of one file."""

    path: str
    """The local file."""
    kind: str
    """parquet, jsonl, or arrow (a stream file that ``datasets`` prepared)."""
    first_doc_id: int
    """Number of the first row in the source."""
    num_rows: int
    """Rows to read."""
    offset: int
    """Where they begin: a byte (jsonl) or a row of the file (parquet, arrow)."""
    num_bytes: int
    """Bytes to read (jsonl), 0 otherwise."""
    columns: tuple[str, str | None]
    """Names of the messages and the tools column; None where there are no tools."""
    stamp: Stamp
    """Of the file when it was digested."""


# --------------------------------------------------------------------------------------------- extents


def stamp_of(path: Path) -> Stamp:
    """What tells a file from the one that was there before. Raises OSError."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def parquet_file(path: Path) -> pq.ParquetFile:
    """The file, its footer read. Raises ValueError if it cannot be."""
    try:
        # Neither mapped, whose pages would count, nor fetched ahead: that would hold a row group's columns whole.
        return pq.ParquetFile(path, buffer_size=PARQUET_BUFFER, pre_buffer=False)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # names that are not UTF-8, and the like
        raise _broken(path, error) from None


def _broken(path: Path | str, error: Exception) -> ValueError:
    return ValueError(f"{path}: not a readable parquet file ({type(error).__name__}). Download or write it again.")


def _parquet_extents(path: Path) -> list[Extent]:
    """Blocks follow row groups, so that none is decoded twice, unless one is very large."""
    out: list[Extent] = []
    first = 0
    metadata = parquet_file(path).metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if min(sizes, default=0) < 0 or sum(sizes) != metadata.num_rows:  # a damaged footer may promise 2**60 rows
        raise _broken(path, ValueError())
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        parts = max(1, -(-group.num_rows // (4 * ROWS_PER_BLOCK)), -(-group.total_byte_size // BYTES_PER_BLOCK))
        step = max(1, -(-group.num_rows // parts))
        out += [(first + r, 0, min(step, group.num_rows - r)) for r in range(0, group.num_rows, step)]
        first += group.num_rows
    return out


def _jsonl_extents(path: Path) -> list[Extent]:
    """Blocks of non-blank lines; blank ones are no rows."""
    out: list[Extent] = []
    with path.open("rb") as lines:
        start = end = rows = 0
        for line in lines:
            end += len(line)
            rows += not line.isspace()
            if rows == ROWS_PER_BLOCK or end - start >= BYTES_PER_BLOCK:
                out.append((start, end - start, rows))
                start, rows = end, 0
        out.append((start, end - start, rows))
    return [extent for extent in out if extent[2]]


def _stream_extents(path: Path) -> list[Extent]:
    with pa.memory_map(str(path)) as file:
        rows = sum(batch.num_rows for batch in pa.ipc.open_stream(file))
    return [(first, 0, min(ROWS_PER_BLOCK, rows - first)) for first in range(0, rows, ROWS_PER_BLOCK)]


EXTENTS = {"parquet": _parquet_extents, "jsonl": _jsonl_extents, "arrow": _stream_extents}


def read_rows(block: Block) -> Iterator[dict[str, Any] | Unreadable]:
    """Every row of a block, in order.

    Raises:
        ValueError: the file is not what its first look promised, or no longer the one that was digested.
    """
    yield from _jsonl_rows(block) if block.kind == "jsonl" else _arrow_rows(block)
    if stamp_of(Path(block.path)) != block.stamp:
        raise ValueError(f"{block.path}: written anew since its digest was taken. Run the same command again.")


def _jsonl_rows(block: Block) -> Iterator[dict[str, Any] | Unreadable]:
    with Path(block.path).open("rb") as file:
        file.seek(block.offset)
        end = block.offset + block.num_bytes
        rows = 0
        while file.tell() < end and rows < block.num_rows:
            line = file.readline()
            if not line:
                raise ValueError(f"{block.path}: shorter than it was a moment ago. Run the same command again.")
            if not line.isspace():
                rows += 1
                yield parse_line(line)


def parse_line(line: bytes) -> dict[str, Any] | Unreadable:
    """One line of jsonl."""
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError:
        return ("invalid_unicode", "the line is not UTF-8")
    except RecursionError:
        return TOO_DEEP
    except ValueError:
        return ("invalid_json", "the line is not JSON")
    return row if isinstance(row, dict) else ("bad_type", "the line is not a JSON object")


def _arrow_rows(block: Block) -> Iterator[dict[str, Any] | Unreadable]:
    for batch in _stream_batches(block) if block.kind == "arrow" else _parquet_batches(block):
        clean = drop_nulls if any(_holds_nulls(column) for column in batch.columns) else _unchanged
        for start in range(0, len(batch), 64):
            part = batch.slice(start, 64)
            try:
                rows = part.to_pylist()
            except NO_PYTHON:  # Arrow does not validate strings: find the rows that are not UTF-8
                rows = [_one_row(part.slice(i, 1)) for i in range(len(part))]
            yield from (row if isinstance(row, tuple) else clean(row) for row in rows)


def _one_row(row: pa.RecordBatch) -> dict[str, Any] | Unreadable:
    try:
        return dict(row.to_pylist()[0])
    except UnicodeDecodeError:
        return ("invalid_unicode", "a string is not UTF-8")
    except NO_PYTHON:
        return ("bad_type", "a value that Python cannot hold")


def _stream_batches(block: Block) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(block.path) as file:
        table = pa.ipc.open_stream(file).read_all()
        wanted = [name for name in block.columns if name in table.column_names]
        yield from table.select(wanted).slice(block.offset, block.num_rows).to_batches()


class _RowGroup:
    """A row group of a parquet file, decoded from front to back some rows at a time."""

    def __init__(self, file: pq.ParquetFile, group: int, columns: tuple[str, str | None], key: object) -> None:
        self.key, self.first = key, 0
        wanted = [name for name in columns if name in file.schema_arrow.names]
        self._batches = file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[group], columns=wanted)
        self._batch = next(self._batches)

    def read(self, start: int, stop: int) -> pa.RecordBatch:
        """Rows from ``start`` on, as far as they are decoded; ``start`` is not before ``first``."""
        while start >= self.first + len(self._batch):
            self.first += len(self._batch)
            self._batch = next(self._batches)
        return self._batch.slice(start - self.first, stop - start)


_row_group: _RowGroup | None = None  # the last one read: a large group's next block goes on in it


def _parquet_batches(block: Block) -> Iterator[pa.RecordBatch]:
    """The rows of a block, which lies within one row group."""
    global _row_group
    try:
        stamp, file = stamp_of(Path(block.path)), parquet_file(Path(block.path))
        ends = list(accumulate(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)))
        group = bisect_right(ends, block.offset)
        first = block.offset - (ends[group - 1] if group else 0)
        at, stop = first, first + block.num_rows
        key = (block.path, stamp, group, block.columns)
        while at < stop:
            if _row_group is None or _row_group.key != key or _row_group.first > at:
                _row_group = _RowGroup(file, group, block.columns, key)
            batch = _row_group.read(at, stop)
            at += len(batch)
            yield batch
    except (pa.ArrowException, OSError, StopIteration) as error:
        _row_group = None
        raise _broken(block.path, error) from None


def _holds_nulls(array: pa.Array) -> bool:
    """Whether there is a null at any depth."""
    if array.null_count:
        return True
    kind = array.type
    if pa.types.is_struct(kind):
        return any(_holds_nulls(array.field(i)) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_nulls(array.values)
    return bool(pa.types.is_nested(kind))


def _unchanged(value: Any) -> Any:
    return value


def drop_nulls(value: Any) -> Any:
    """Drop null members of dicts, at every depth: Arrow structs hold every key that any row has."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [drop_nulls(v) for v in value]
    return value
