"""Read chats: a hub id, a parquet or jsonl file, or a folder of them.

A source is a list of blocks in a fixed order; a block is read on its own, by any worker, and yields a Conversation
for every row it holds, or a Reject that says why there is none. A row's number (doc_id) counts every row of the
source in recipe order, before ``--limit`` and before rejection.

Costs: one pass over local files to digest them, remembered by path, size, mtime and inode; a block holds about
2,000 rows or 32 MB of text at most, so memory stays bounded whatever the set's size.
"""

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.hub import HUB_ID, LOCAL_OPTIONS, hub_identity, prepare_with_datasets
from pipeline.memo import read_note, write_note
from pipeline.progress import Progress
from pipeline.rows import EXTENTS, Block, Stamp, parquet_file, parse_line, read_rows, stamp_of

LINES_TO_LOOK_AT = 10_000  # of a jsonl file, for the names of its columns


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
class Source:
    """What was asked for, resolved: the recipe's entry and the local files behind it."""

    recipe: dict[str, Any]
    """The entry of ``recipe["source"]``: id, revision, split, files, columns, limit."""
    paths: tuple[Path, ...]
    """Local files, in recipe order."""
    stamps: tuple[Stamp, ...]
    """Of each of them, taken before its digest."""
    kind: str
    """As in Block, or "" where each file's name tells."""

    def blocks(self) -> list[Block]:
        """Cut the files into blocks, the last one cut at the limit. Reads footers, and jsonl files once."""
        columns = (self.recipe["messages_column"], self.recipe["tools_column"])
        limit = self.recipe["limit"]
        first, out = 0, []
        for path, stamp in zip(self.paths, self.stamps, strict=True):
            kind = self.kind or path.suffix[1:]
            for offset, num_bytes, rows in EXTENTS[kind](path):
                wanted = rows if limit is None else min(rows, limit - first)
                if wanted > 0:
                    out.append(
                        Block(path=str(path), kind=kind, first_doc_id=first, num_rows=wanted, offset=offset,
                              num_bytes=num_bytes, columns=columns, stamp=stamp)
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
    remember: bool = True,
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
        remember: write digests to ``cache_dir``.

    Raises:
        ValueError: nothing there, no such split, no such column, hub out of reach; says what was found.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: must be at least 1")
    path = Path(spec)
    if path.exists():
        kind, paths = "", _local_files(path, split, revision)
        stamps = [stamp_of(path) for path in paths]
        identity = {"id": None, "revision": None, "split": split if path.is_dir() else None}
        files = _described(paths, path, digest_files(paths, cache_dir, rehash=rehash, remember=remember))
    elif HUB_ID.fullmatch(spec):
        kind = "arrow"
        identity, files = hub_identity(spec, split, revision)
        paths = prepare_with_datasets(spec, split, identity["revision"])
        stamps = [stamp_of(path) for path in paths]
    else:
        raise ValueError(f"--source {spec}: no such file or folder, and not a hub id (owner/name). {LOCAL_OPTIONS}")
    recipe = identity | {
        "files": files,
        "messages_column": messages_column,
        "tools_column": _tools_column(paths, kind, messages_column, tools_column),
        "limit": limit,
    }
    return Source(recipe=recipe, paths=tuple(paths), stamps=tuple(stamps), kind=kind)


def read_block(block: Block) -> Iterator[Conversation | Reject]:
    """Every row of a block, in order: a Conversation, or a Reject if the row cannot be read at all.

    Raises:
        ValueError: the file cannot be read; or, after the last row at the latest, it was written anew since its digest
            was taken.
    """
    messages_column, tools_column = block.columns
    for doc_id, row in zip(count(block.first_doc_id), read_rows(block), strict=False):
        if isinstance(row, tuple):
            yield Reject(doc_id=doc_id, what="rejected", reason=row[0], detail=row[1])
        else:
            tools = row.get(tools_column) if tools_column else None
            yield Conversation(doc_id=doc_id, messages=row.get(messages_column), tools=tools)


def digest_files(paths: list[Path], cache_dir: Path, *, rehash: bool, remember: bool = True) -> list[str]:
    """sha256 of each file, remembered in ``cache_dir/digests.json`` by path, size, mtime and inode."""
    memo_path = cache_dir / "digests.json"
    memo = read_note(memo_path) or {}
    stats = {path: list(stamp_of(path)) for path in paths}
    keys = {path: str(path.resolve()) for path in paths}

    def is_known(path: Path) -> bool:
        known = memo.get(keys[path])
        return not rehash and isinstance(known, list) and len(known) == 4 and known[:3] == stats[path]

    unknown = [path for path in paths if not is_known(path)]
    if unknown:
        progress = Progress("digest", sum(stats[path][0] for path in unknown), "bytes")
        for path in unknown:
            memo[keys[path]] = [*stats[path], _sha256(path, progress)]
        progress.close()
    if unknown and remember:
        cache_dir.mkdir(parents=True, exist_ok=True)
        write_note(memo_path, memo)
    return [str(memo[keys[path]][3]) for path in paths]


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
            progress.add(len(part))
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------- local files


def _local_files(path: Path, split: str, revision: str | None) -> list[Path]:
    if revision is not None:
        raise ValueError(f"--revision {revision}: --source {path} is a local path, which has no revisions")
    if path.is_file():
        if path.suffix not in (".parquet", ".jsonl"):
            raise ValueError(f"--source {path}: expected a .parquet or .jsonl file, or a folder of them")
        return [path]
    every = sorted(p for suffix in ("parquet", "jsonl") for p in path.rglob(f"*.{suffix}") if p.is_file())
    if not every:
        raise ValueError(f"--source {path}: no .parquet or .jsonl file in this folder")
    chosen = [p for p in every if p.stem == split or p.stem.startswith(f"{split}-")]
    if not chosen:
        names = ", ".join(p.relative_to(path).as_posix() for p in every[:10])
        raise ValueError(
            f"--split {split}: no file in {path} is named {split} or {split}-*; found {names}. "
            f"{_split_advice([p.stem for p in every])}"
        )
    return chosen


def _split_advice(stems: list[str]) -> str:
    """What to pass instead: the one split there, or those to choose from; each selects by the rule of ``--split``."""
    splits = sorted({stem.partition("-")[0] for stem in stems} - {""})
    advice = " or ".join(f"--split {shlex.quote(name)}" for name in splits[:10])
    return (
        f"Pass {advice}, or name one file as --source, which is read whole." if advice else "Name one file as --source."
    )


def _described(paths: list[Path], source: Path, digests: list[str]) -> list[dict[str, Any]]:
    """What the recipe says of each file: its name within the source, bytes, sha256."""
    root = source if source.is_dir() else source.parent
    return [
        {"name": path.relative_to(root).as_posix(), "bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    ]


def _tools_column(paths: list[Path], kind: str, messages_column: str, tools_column: str | None) -> str | None:
    """Check the columns of every file; return the tools column to read.

    Rows of jsonl need not be alike, so that ``tools`` is looked for in each of them, whatever the first ones hold.
    """
    found: set[str] = set()
    for path in paths:
        suffix = kind or path.suffix[1:]
        names = _columns(path, suffix, {messages_column, tools_column or messages_column})
        if names and messages_column not in names:
            raise ValueError(
                f"--messages-column {messages_column}: {path} has no such column. It has: {', '.join(sorted(names))}. "
                "Pass the one that holds the chats, as --messages-column NAME; each must be a list of {role, content}."
            )
        found |= names | ({"tools"} if suffix == "jsonl" and tools_column is None else set())
    if tools_column is not None and tools_column not in found:
        raise ValueError(
            f"--tools-column {tools_column}: no such column. There are: "
            f"{', '.join(sorted(found))}. Pass one of them, or leave the option out"
        )
    column = tools_column or "tools"
    return column if column in found else None


def _columns(path: Path, kind: str, wanted: set[str]) -> set[str]:
    """Column names of a file: its schema's, or those of the readable lines up to where all wanted ones were met."""
    if kind == "arrow":
        with pa.memory_map(str(path)) as file:
            return set(pa.ipc.open_stream(file).schema.names)
    if kind == "parquet":
        return set(parquet_file(path).schema_arrow.names)
    names: set[str] = set()
    with path.open("rb") as lines:
        for _, line in zip(range(LINES_TO_LOOK_AT), lines, strict=False):
            row = parse_line(line)
            names |= row.keys() if isinstance(row, dict) else set()
            if wanted <= names:
                break
    return names
