"""The packed shard format, version 1: its one home.

A dataset is a directory that holds ``manifest.json``; it exists if and only if that file does (written last).
Beside it lie ``shard-NNNNN.arrow`` (Arrow IPC files), ``tokenizer/`` and ``rejects.jsonl``, all listed in the
manifest with size and hash.

Guarantees: a published file is never changed in place; a reader refuses what it cannot honour; every error names
the file, what was expected, what was found and what to do next.
Costs: opening reads the manifest and one ``stat`` a file; a row's two int32 columns are views of the mapped file.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from pipeline.manifest import FORMAT, FORMAT_VERSION, MANIFEST, DatasetError, Manifest, damaged

__all__ = ["Bool", "DatasetError", "Int32", "Int64", "Manifest", "PackedDataset", "Row", "ShardRows"]

ROWS_PER_BATCH = 8
REPORT = "report.html"

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


# ---------------------------------------------------------------------------------------------- values


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of T tokens: several pieces of documents end to end, then padding if any. Arrays are read-only."""

    input_ids: Int32
    """[T] token ids; the padding tail holds the pad id."""
    position_ids: Int32
    """[T] restarts at 0 at every boundary, in the padding too."""
    loss_mask: Bool
    """[T] this token is a target; never a segment's first token, never padding."""
    boundaries: Int32
    """[segments + 1] 0, strictly increasing, ends with T; the padding tail is one more segment."""
    doc_ids: Int64
    """[pieces] source row of each piece; one shorter than the segments when there is padding."""
    pieces: Int32
    """[pieces] 0 for a whole or truncated document; 0, 1, 2 ... for the pieces of a split one."""


def rows_per_shard(max_tokens: int) -> int:
    """Rows in every shard but the last: about 128 MiB, a multiple of 8, from 8 to 2048."""
    bytes_per_row = -(-max_tokens * 65 // 8)  # two int32 and one bit a token
    return max(8, min(2048, 2**27 // bytes_per_row) // 8 * 8)


def shard_name(index: int) -> str:
    """File name of shard number ``index``."""
    return f"shard-{index:05d}.arrow"


def schema(*, max_tokens: int, fingerprint: str, shard: int) -> pa.Schema:
    """The Arrow schema of one shard, its identity in the metadata."""
    return pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in _types(max_tokens).items()],
        metadata={
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "fingerprint": fingerprint,
            "shard": str(shard),
            "max_tokens": str(max_tokens),
        },
    )


# --------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRows:
    """The content of one shard before it is laid out: R rows of T tokens."""

    input_ids: Int32
    """[R, T] token ids, padding filled in."""
    loss_mask: Bool
    """[R, T] targets."""
    piece_lengths: Int64
    """[P] tokens of each piece, in row order."""
    row_offsets: Int64
    """[R + 1] first piece of each row."""
    doc_ids: Int64
    """[P] source row of each piece."""
    pieces: Int32
    """[P] number of each piece within its document."""


def shard_bytes(rows: ShardRows, *, fingerprint: str, shard: int, compression: str | None = None) -> pa.Buffer:
    """Lay out one shard as an Arrow IPC file in memory.

    Args:
        rows: the content.
        fingerprint: the recipe's, for the footer check.
        shard: its number.
        compression: None or "zstd".
    """
    num_rows, max_tokens = rows.input_ids.shape
    boundaries, segment_offsets = _boundaries(rows, max_tokens)
    target = schema(max_tokens=max_tokens, fingerprint=fingerprint, shard=shard)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, target, options=options) as writer:
        for first in range(0, num_rows, ROWS_PER_BATCH):
            stop = min(first + ROWS_PER_BATCH, num_rows)
            tokens = slice(first * max_tokens, stop * max_tokens)
            bits = pa.py_buffer(np.packbits(rows.loss_mask[first:stop].reshape(-1), bitorder="little"))
            mask = pa.Array.from_buffers(pa.bool_(), (stop - first) * max_tokens, [None, bits])
            positions = _positions(boundaries[segment_offsets[first] : segment_offsets[stop]])
            fixed = [pa.array(rows.input_ids.reshape(-1)[tokens]), pa.array(positions), mask]
            ragged: list[tuple[npt.NDArray[Any], Int64]] = [
                (boundaries, segment_offsets),
                (rows.doc_ids, rows.row_offsets),
                (rows.pieces, rows.row_offsets),
            ]
            arrays = [
                pa.FixedSizeListArray.from_arrays(values, type=field.type)
                for values, field in zip(fixed, list(target)[:3], strict=True)
            ] + [
                _list_array(values, offsets[first : stop + 1], field.type)
                for (values, offsets), field in zip(ragged, list(target)[3:], strict=True)
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=target))
    return sink.getvalue()


def publish(path: Path, data: bytes | pa.Buffer) -> dict[str, Any]:
    """Write a file so that it is whole or absent: temporary file, fsync, rename, fsync of the directory.

    Returns:
        {"name", "bytes", "xxh3_128"} as the manifest lists it.

    Raises:
        OSError: disk full and the like, naming the file; nothing is left behind.
    """
    view = memoryview(data)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(view)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o444)  # noqa: PTH101 (Path.chmod would follow the same call)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # a write's error does not say where
            error.filename = str(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108
        raise
    sync_directory(path.parent)
    return {"name": path.name, "bytes": view.nbytes, "xxh3_128": xxhash.xxh3_128_hexdigest(view)}


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------- reading


class PackedDataset:
    """Rows of a packed dataset by number, memory-mapped.

    ``dataset[i]`` is a Row. Opening checks the manifest and every file's exact size; a shard's footer is checked
    when it is first touched; hashes are checked by ``verify_hashes``.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._first_rows = np.cumsum([0, *(shard["rows"] for shard in manifest.files["shards"])])
        self._readers: dict[int, pa.ipc.RecordBatchFileReader] = {}
        self._last: tuple[int, int, pa.RecordBatch] | None = None

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a dataset directory. Raises DatasetError if it is none, or a file is missing or has another size."""
        directory = Path(path)
        manifest = Manifest.read(directory)
        for entry in manifest.all_files():
            file = directory / entry["name"]
            try:
                size = file.stat().st_size
            except OSError:
                raise damaged(str(file), f"a file of {entry['bytes']} bytes", "no such file") from None
            if not file.is_file():  # reading a pipe would wait for ever
                raise damaged(str(file), f"a file of {entry['bytes']} bytes", "no regular file")
            if size != entry["bytes"]:
                raise damaged(str(file), f"{entry['bytes']} bytes", f"{size} bytes")
        return cls(directory, manifest)

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index}: this dataset has rows 0 to {len(self) - 1}")
        shard = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        in_shard = index - int(self._first_rows[shard])
        number, i = divmod(in_shard, ROWS_PER_BATCH)
        batch = self._batch(shard, number)
        if i >= batch.num_rows:
            raise damaged(str(self._shard_path(shard)), f"row {in_shard}", f"{batch.num_rows} rows in batch {number}")
        max_tokens = self.manifest.max_tokens
        return Row(
            input_ids=_fixed(batch.column(0), i, max_tokens),
            position_ids=_fixed(batch.column(1), i, max_tokens),
            loss_mask=_bits(batch.column(2), i, max_tokens),
            boundaries=_ragged(batch.column(3), i),
            doc_ids=_ragged(batch.column(4), i),
            pieces=_ragged(batch.column(5), i),
        )

    def _shard_path(self, shard: int) -> Path:
        return self.path / str(self.manifest.files["shards"][shard]["name"])

    def _batch(self, shard: int, number: int) -> pa.RecordBatch:
        if self._last is not None and self._last[:2] == (shard, number):
            return self._last[2]
        if shard not in self._readers:
            self._readers[shard] = self._open_shard(shard)
        try:
            batch = self._readers[shard].get_batch(number)
        except (pa.ArrowException, OSError) as error:
            path = str(self._shard_path(shard))
            raise damaged(path, f"record batch {number}", f"unreadable bytes ({type(error).__name__})") from None
        self._last = (shard, number, batch)
        return batch

    def _open_shard(self, shard: int) -> pa.ipc.RecordBatchFileReader:
        path = self._shard_path(shard)
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
        except (pa.ArrowException, OSError) as error:
            raise damaged(str(path), "an Arrow IPC file", f"unreadable bytes ({type(error).__name__})") from None
        manifest = self.manifest
        expected = schema(max_tokens=manifest.max_tokens, fingerprint=manifest.fingerprint, shard=shard)
        if not reader.schema.equals(expected, check_metadata=True):
            metadata = (reader.schema.metadata or {}).items()
            found = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in metadata}
            raise damaged(str(path), f"schema and metadata of shard {shard} of {manifest.fingerprint}", str(found))
        batches = -(-manifest.files["shards"][shard]["rows"] // ROWS_PER_BATCH)
        if reader.num_record_batches != batches:
            raise damaged(str(path), f"{batches} record batches", str(reader.num_record_batches))
        return reader


def verify_hashes(dataset: PackedDataset, *, progress: Callable[[int], None] | None = None) -> None:
    """Full check: every listed file has its hash, and nothing else lies in the directory.

    Args:
        dataset: what is checked.
        progress: told the bytes of each file that was read.

    Raises:
        DatasetError: naming the first file that is damaged, or that does not belong.
    """
    for entry in dataset.manifest.all_files():
        path = dataset.path / entry["name"]
        found = hash_file(path)
        if found != entry["xxh3_128"]:
            raise damaged(str(path), f"xxh3_128 {entry['xxh3_128']}", found)
        if progress is not None:
            progress(entry["bytes"])
    known = {MANIFEST, REPORT, *(entry["name"] for entry in dataset.manifest.all_files())}
    for file in sorted(p for p in dataset.path.rglob("*") if not p.is_dir()):
        name = file.relative_to(dataset.path).as_posix()
        if name not in known:
            raise DatasetError(f"{file}: a foreign file; the manifest does not list it. Move it elsewhere.")


def hash_file(path: Path) -> str:
    """xxh3_128 of a file's bytes, read in blocks."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------- details


def _types(max_tokens: int) -> dict[str, pa.DataType]:
    def fixed(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("item", kind, nullable=False), max_tokens)

    def ragged(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("item", kind, nullable=False))

    return {
        "input_ids": fixed(pa.int32()),
        "position_ids": fixed(pa.int32()),
        "loss_mask": fixed(pa.bool_()),
        "boundaries": ragged(pa.int32()),
        "doc_ids": ragged(pa.int64()),
        "pieces": ragged(pa.int32()),
    }


def _boundaries(rows: ShardRows, max_tokens: int) -> tuple[Int32, Int64]:
    """Boundaries of all rows end to end, and where each row's begin.

    Worked example, T = 8: pieces of 3 and 4 tokens, then one of 8: boundaries 0 3 7 8 | 0 8, offsets 0 4 6.
    """
    values: list[npt.NDArray[np.int64]] = []
    for first, stop in zip(rows.row_offsets[:-1], rows.row_offsets[1:], strict=True):
        ends = np.cumsum(rows.piece_lengths[first:stop])
        tail = [] if len(ends) and ends[-1] == max_tokens else [max_tokens]
        values.append(np.concatenate([[0], ends, tail]).astype(np.int64))
    offsets = np.cumsum([0, *map(len, values)])
    return np.concatenate(values).astype(np.int32), offsets


def _positions(boundaries: Int32) -> Int32:
    """[rows * T] position ids of some rows, from their boundaries end to end.

    Worked example: boundaries 0 3 5 | 0 5 have steps 3 2 -5 5; those above 0 are the segments' lengths 3 2 5, so that
    they start at 0 3 5 and the positions are 0 1 2 0 1 0 1 2 3 4.
    """
    steps = np.diff(boundaries)
    lengths = steps[steps > 0]
    ends = np.cumsum(lengths, dtype=np.int32)
    return np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - lengths, lengths)


def _list_array(values: npt.NDArray[Any], offsets: Int64, kind: pa.DataType) -> pa.ListArray:
    """A list array over a slice of ``values``; offsets start at 0 in every batch: bytes depend on its rows alone."""
    chunk = np.ascontiguousarray(values[offsets[0] : offsets[-1]])
    return pa.ListArray.from_arrays(pa.array((offsets - offsets[0]).astype(np.int32)), pa.array(chunk), type=kind)


def _fixed(column: pa.FixedSizeListArray, i: int, max_tokens: int) -> Int32:
    """View of row ``i``: the child array of a batch read from a file starts at its buffer's begin."""
    flat = np.frombuffer(column.values.buffers()[1], np.int32)
    row = flat[i * max_tokens : (i + 1) * max_tokens]
    row.flags.writeable = False
    return row


def unpack_bits(packed: npt.NDArray[np.uint8], first: int, count: int) -> Bool:
    """Bits ``first`` to ``first + count`` as booleans; they may begin inside a byte.

    Worked example, T = 8193: row 1 begins at bit 8193, which is bit 1 of byte 1024.
    """
    stop = first + count
    bits = np.unpackbits(packed[first // 8 : -(-stop // 8)], bitorder="little")
    return bits[first % 8 : first % 8 + count].view(np.bool_)


def _bits(column: pa.FixedSizeListArray, i: int, max_tokens: int) -> Bool:
    mask = unpack_bits(np.frombuffer(column.values.buffers()[1], np.uint8), i * max_tokens, max_tokens)
    mask.flags.writeable = False
    return mask


def _ragged(column: pa.ListArray, i: int) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = column[i].values.to_numpy()
    values.flags.writeable = False
    return values
