"""Read chats: a hub id, a parquet or jsonl file, or a folder of them.

A source is a list of blocks in a fixed order; a block is read on its own, by any worker, and yields a Conversation
for every row it holds, or a Reject that says why there is none. A row's number (doc_id) counts every row of the
source in recipe order, before ``--limit`` and before rejection.

Costs: one pass over local files to digest them, remembered by path, size, mtime and inode; a block holds about
2,000 rows or 64 MB of text at most, so memory stays bounded whatever the set's size.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_PER_BLOCK = 2048
BYTES_PER_BLOCK = 1 << 26

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LOCAL_OPTIONS = (
    "Without a network, use local data: --source FILE.parquet | FILE.jsonl | FOLDER and --tokenizer FOLDER (one that "
    "holds tokenizer.json and a chat template); data/sample is both: --source data/sample --tokenizer data/sample"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row of a source, as found."""

    doc_id: int
    """Row number in the source."""
    messages: Any
    """The messages column: a list of dicts with role and content, if all is well."""
    tools: Any = None
    """The tools column: a list of tool definitions or a JSON string of one, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A document that is left out, or changed on the way: one line of ``rejects.jsonl``."""

    doc_id: int
    """Row number in the source."""
    what: str
    """One of shards.REJECT_KINDS."""
    reason: str
    """One of shards.REJECT_REASONS; empty for what is not rejected."""
    detail: str
    """A fixed phrase of ours with integers in it; never text from the data."""
    tokens: int = 0
    """Tokens of the document, where it was encoded before it was rejected."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What was asked for, resolved: the recipe's entry and the local files behind it."""

    recipe: dict[str, Any]
    """The entry of ``recipe["source"]``: id, revision, split, files, columns, limit."""
    paths: tuple[Path, ...]
    """Local files, in recipe order."""
    kind: str
    """As in Block, or "" where each file's name tells."""

    def blocks(self) -> list[Block]:
        """Cut the files into blocks, the last one cut at the limit. Reads footers, and jsonl files once."""
        columns = (self.recipe["messages_column"], self.recipe["tools_column"])
        limit = self.recipe["limit"]
        first, out = 0, []
        for path in self.paths:
            kind = self.kind or path.suffix[1:]
            for offset, num_bytes, rows in _EXTENTS[kind](path):
                wanted = rows if limit is None else min(rows, limit - first)
                if wanted > 0:
                    out.append(
                        Block(path=str(path), kind=kind, first_doc_id=first, num_rows=wanted, offset=offset,
                              num_bytes=num_bytes, columns=columns)
                    )  # fmt: skip
                    first += wanted
        return out


def open_source(
    spec: str,
    *,
    split: str,
    revision: str | None,
    messages_column: str,
    tools_column: str | None,
    limit: int | None,
    cache_dir: Path,
    rehash: bool = False,
) -> Source:
    """Resolve ``--source``: find its files, digest them, check the columns.

    Args:
        spec: a path if there is one, else a hub id.
        split: the hub's split; in a folder, files whose stem is ``split`` or starts with ``split-``.
        revision: of a hub id; None for its newest, which is recorded.
        messages_column: column of the messages.
        tools_column: column of the tools; None for "tools" where there is one.
        limit: read this many rows at most.
        cache_dir: where digests are remembered.
        rehash: digest again, whatever is remembered.

    Raises:
        ValueError: nothing there, no such split, no such column, hub out of reach; says what was found.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: must be at least 1")
    columns: tuple[str | None, str] = (messages_column, tools_column or "tools")
    path = Path(spec)
    if path.exists():
        paths = _local_files(path, split)
        root = path if path.is_dir() else path.parent
        kind, identity = "", {"id": None, "revision": None, "split": split if path.is_dir() else None}
        names = [p.relative_to(root).as_posix() for p in paths]
        digests = digest_files(paths, cache_dir, rehash=rehash)
        files = [
            {"name": n, "bytes": p.stat().st_size, "sha256": d} for n, p, d in zip(names, paths, digests, strict=True)
        ]
    elif HUB_ID.fullmatch(spec):
        kind = "arrow"
        identity, files = hub_identity(spec, split, revision)
        paths = prepare_with_datasets(spec, split, identity["revision"])
    else:
        raise ValueError(f"--source {spec}: no such file or folder, and not a hub id (owner/name). {LOCAL_OPTIONS}")
    found = _columns(paths, kind)
    if found and messages_column not in found:
        raise ValueError(
            f"--messages-column {messages_column}: {paths[0]} has no such column. It has: {', '.join(sorted(found))}"
        )
    if tools_column is not None and tools_column not in found:
        raise ValueError(f"--tools-column {tools_column}: no such column. There are: {', '.join(sorted(found))}")
    recipe = identity | {
        "files": files,
        "messages_column": messages_column,
        "tools_column": columns[1] if columns[1] in found else None,
        "limit": limit,
    }
    return Source(recipe=recipe, paths=tuple(paths), kind=kind)


def read_block(block: Block) -> Iterator[Conversation | Reject]:
    """Every row of a block, in order: a Conversation, or a Reject if the row cannot be read at all."""
    rows = _jsonl_rows(block) if block.kind == "jsonl" else _arrow_rows(block)
    messages_column, tools_column = block.columns
    for doc_id, row in zip(count(block.first_doc_id), rows, strict=False):
        if isinstance(row, tuple):
            yield Reject(doc_id=doc_id, what="rejected", reason=row[0], detail=row[1])
        else:
            tools = row.get(tools_column) if tools_column else None
            yield Conversation(doc_id=doc_id, messages=row.get(messages_column), tools=tools)


def digest_files(paths: list[Path], cache_dir: Path, *, rehash: bool) -> list[str]:
    """sha256 of each file, remembered in ``cache_dir/digests.json`` by path, size, mtime and inode."""
    memo_path = cache_dir / "digests.json"
    try:
        memo = json.loads(memo_path.read_bytes())
        memo = memo if isinstance(memo, dict) else {}
    except (OSError, ValueError):
        memo = {}
    out, changed = [], False
    for path in paths:
        stat = path.stat()
        key, now = str(path.resolve()), [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = memo.get(key)
        if rehash or not isinstance(known, list) or known[:3] != now or len(known) != 4:
            with path.open("rb") as file:
                known = [*now, hashlib.file_digest(file, "sha256").hexdigest()]
            memo[key], changed = known, True
        out.append(str(known[3]))
    if changed:
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary = memo_path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(memo))
        temporary.replace(memo_path)
    return out


# ------------------------------------------------------------------------------------------------- hub


def hub_identity(spec: str, split: str, revision: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Resolve a hub id: its commit, and the split's files with the digests the hub gives.

    Raises:
        ValueError: the hub is out of reach, or has no such dataset.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(spec, revision=revision, files_metadata=True, timeout=10)
    except Exception as error:  # the hub client raises its HTTP library's errors too
        raise unreachable(f"--source {spec}", error) from None
    files = [
        {"name": file.rfilename, "bytes": file.size, "sha256": file.lfs.sha256 if file.lfs else None}
        for file in sorted(info.siblings or [], key=lambda f: f.rfilename)
        if Path(file.rfilename).stem == split or Path(file.rfilename).stem.startswith(f"{split}-")
    ]
    return {"id": spec, "revision": info.sha, "split": split}, files


def prepare_with_datasets(spec: str, split: str, revision: str | None) -> list[Path]:
    """Let ``datasets`` download and prepare a split; return the Arrow stream files that hold it.

    Raises:
        ValueError: no such split, or the download fails.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(spec, revision=revision)
        builder.download_and_prepare()
        dataset = builder.as_dataset(split=split)
    except Exception as error:
        raise unreachable(f"--source {spec} --split {split}", error) from None
    return [Path(entry["filename"]) for entry in dataset.cache_files]


def unreachable(what: str, error: BaseException) -> ValueError:
    """The one message for a hub that does not answer or does not have what was asked for."""
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else ""
    return ValueError(
        f"{what}: no such local path, and the Hugging Face hub could not provide it "
        f"({type(error).__name__}: {reason}). {LOCAL_OPTIONS}"
    )


# ----------------------------------------------------------------------------------------- local files


def _local_files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        if path.suffix not in (".parquet", ".jsonl"):
            raise ValueError(f"--source {path}: expected a .parquet or .jsonl file, or a folder of them")
        return [path]
    every = sorted(p for suffix in ("parquet", "jsonl") for p in path.rglob(f"*.{suffix}"))
    if not every:
        raise ValueError(f"--source {path}: no .parquet or .jsonl file in this folder")
    chosen = [p for p in every if p.stem == split or p.stem.startswith(f"{split}-")]
    if not chosen:
        names = ", ".join(p.relative_to(path).as_posix() for p in every[:10])
        raise ValueError(f"--split {split}: no file in {path} is named {split} or {split}-*; found {names}")
    return chosen


def _columns(paths: list[Path], kind: str) -> set[str]:
    """Column names: of the first file's schema, or of the first hundred readable lines of jsonl."""
    if not paths:
        return set()
    if kind == "arrow":
        with pa.memory_map(str(paths[0])) as file:
            return set(pa.ipc.open_stream(file).schema.names)
    if paths[0].suffix == ".parquet":
        return set(_parquet(paths[0]).schema_arrow.names)
    names: set[str] = set()
    with paths[0].open("rb") as lines:
        for _, line in zip(range(100), lines, strict=False):
            row = _parse_line(line)
            names |= row.keys() if isinstance(row, dict) else set()
    return names


def _parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{path}: not a readable parquet file ({type(error).__name__}). Download or write it again."
        ) from None


Extent = tuple[int, int, int]
"""offset, bytes, rows of a block within its file."""


def _parquet_extents(path: Path) -> list[Extent]:
    """Blocks follow row groups, so that none is decoded twice, unless one is very large."""
    out: list[Extent] = []
    first = 0
    metadata = _parquet(path).metadata
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


_EXTENTS = {"parquet": _parquet_extents, "jsonl": _jsonl_extents, "arrow": _stream_extents}

Unreadable = tuple[str, str]
"""(reason, detail) in place of a row."""


def _jsonl_rows(block: Block) -> Iterator[dict[str, Any] | Unreadable]:
    with Path(block.path).open("rb") as file:
        file.seek(block.offset)
        end = block.offset + block.num_bytes
        rows = 0
        while file.tell() < end and rows < block.num_rows:
            line = file.readline()
            if not line.isspace():
                rows += 1
                yield _parse_line(line)


def _parse_line(line: bytes) -> dict[str, Any] | Unreadable:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError:
        return ("invalid_unicode", "the line is not UTF-8")
    except (ValueError, RecursionError):
        return ("invalid_json", "the line is not JSON")
    return row if isinstance(row, dict) else ("bad_type", "the line is not a JSON object")


def _arrow_rows(block: Block) -> Iterator[dict[str, Any] | Unreadable]:
    table = _stream_table(block) if block.kind == "arrow" else _parquet_table(block)
    for start in range(0, len(table), 64):
        part = table.slice(start, 64)
        try:
            yield from (drop_nulls(row) for row in part.to_pylist())
        except UnicodeDecodeError:  # Arrow does not validate strings: find the rows that are not UTF-8
            for i in range(len(part)):
                try:
                    yield drop_nulls(part.slice(i, 1).to_pylist()[0])
                except UnicodeDecodeError:
                    yield ("invalid_unicode", "a string is not UTF-8")


def _wanted(names: list[str], columns: tuple[str, str | None]) -> list[str]:
    missing = columns[0] not in names
    if missing:
        raise ValueError(f"no column {columns[0]} in this file; it has: {', '.join(names)}")
    return [name for name in columns if name in names]


def _parquet_table(block: Block) -> pa.Table:
    file = _parquet(Path(block.path))
    columns = _wanted(file.schema_arrow.names, block.columns)
    first = 0
    parts: list[pa.Table] = []
    for i in range(file.num_row_groups):
        rows = file.metadata.row_group(i).num_rows
        lo, hi = max(first, block.offset), min(first + rows, block.offset + block.num_rows)
        if lo < hi:
            parts.append(file.read_row_group(i, columns=columns).slice(lo - first, hi - lo))
        first += rows
    return pa.concat_tables(parts)


def _stream_table(block: Block) -> pa.Table:
    table = pa.ipc.open_stream(pa.memory_map(block.path)).read_all()
    return table.select(_wanted(table.column_names, block.columns)).slice(block.offset, block.num_rows)


def drop_nulls(value: Any) -> Any:
    """Drop null members of dicts, at every depth: Arrow structs hold every key that any row has."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [drop_nulls(v) for v in value]
    return value
