"""Pack chats into verified Arrow shards, once.

    python -m pipeline.pack --max-tokens 8192
    python -m pipeline.pack --source data/sample --tokenizer data/sample --max-tokens 2048
    python -m pipeline.pack --source chats.jsonl --dry-run     # rows, bytes and seconds; nothing is written

Stages: open (digest sources, read the tokenizer) -> encode (blocks, cached) -> plan (from lengths alone) -> write
(shards) -> check (hashes read back) -> manifest. The manifest is written last; before it there is no dataset.

Guarantees: the same recipe gives the same bytes for any number of workers and after any interruption; a run that was
killed goes on where it stopped; a finished dataset is recognised and left alone; another recipe is refused.
"""

from pipeline.interrupt import INTERRUPTED, hear, quiet_imports

if __name__ == "__main__":
    quiet_imports(INTERRUPTED)

import contextlib
import gc
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import tyro

from pipeline import __version__
from pipeline.assemble import EncodedSet, account, open_encoded
from pipeline.binpack import ALGORITHM, plan_packing
from pipeline.cli import refuse_repeats
from pipeline.cut import Overflow
from pipeline.encode import (
    ENCODE_VERSION,
    BlockRecord,
    Encoder,
    Targets,
    block_name,
    encode_block,
    encode_fingerprint,
)
from pipeline.manifest import MANIFEST, DatasetError, Manifest, differing_fields, fingerprint
from pipeline.places import check_place, explained
from pipeline.progress import Progress
from pipeline.publish import Run, hold, need_disk
from pipeline.render import MismatchError
from pipeline.rows import Block
from pipeline.shards import ROWS_PER_BATCH, PackedDataset, publish, rows_per_shard
from pipeline.source import Source, open_source
from pipeline.summary import nothing_left, summary
from pipeline.template import ChatTemplate, parse_variables
from pipeline.tokenizer import TokenizerFiles, open_tokenizer
from pipeline.workers import Workers, shared

PACK_VERSION = 1
MAX_TOKENS = 2**24  # a shard holds 8 rows at least


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Turn chats into bin-packed Arrow shards with position ids and boundaries: once, verified, reusable.

    Without --source and --tokenizer it reads ultrachat_200k from the Hugging Face hub for Qwen3.8-27B. Offline, try
    --source data/sample --tokenizer data/sample.

    The same command again recognises a finished dataset, or goes on after an interruption. Another --max-tokens,
    --overflow or --seed with another --out packs again from encoded chats in the cache, in seconds.
    """

    source: str = "HuggingFaceH4/ultrachat_200k"
    """What to read: a .parquet or .jsonl file, a folder of them, or a hub id where no such path exists."""
    split: str = "train_sft"
    """The hub's split; in a folder, the files named SPLIT or SPLIT-*. A single file is read whole."""
    revision: str | None = None
    """Branch, tag or commit of a hub id. Without one, its newest commit, which the manifest records."""
    messages_column: str = "messages"
    """Column that holds each chat: a list of messages with role and content."""
    tools_column: str | None = None
    """Column of tool definitions, a list or its JSON text. Without one, "tools" where there is such a column."""
    tokenizer: str = "Qwen/Qwen3.8-27B"
    """Tokenizer and chat template: a folder that holds tokenizer.json and the template, or a hub id."""
    template_kwargs: str = "{}"
    """Variables for the chat template, one JSON object, e.g. '{"enable_thinking": false}'. The summary says what the
    template adds on its own."""
    targets: Targets = "assistant"
    """Tokens that are learned: every assistant turn with its end token, only each chat's last one, or all tokens."""
    max_tokens: int = 8192
    """T, tokens of every row, 2 or more: the longest text that training sees at once."""
    overflow: Overflow = "truncate"
    """What happens to a chat longer than a row. truncate: it ends after the last assistant turn that fits. split: as
    many whole rounds a piece as fit, later pieces without the earlier ones' context. drop: rejected, and listed. error:
    stop. A chat that fits is never cut."""
    seed: int = 0
    """Decides which chats share a row, and the order of rows; 0 to 2**63 - 1. The same seed gives the same bytes."""
    out: Path = Path("data/packed")
    """Folder of the dataset: missing, empty, or left by an interrupted run of this command."""
    cache_dir: Path = Path("data/cache")
    """Folder of encoded chats, about 4.2 bytes a token, reused for any row length, overflow policy or seed. It can be
    deleted at any time."""
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processes that encode and write, some 0.7 GB each. The result does not depend on their number."""
    limit: int | None = None
    """Read only so many chats, from the front."""
    compression: Literal["zstd"] | None = None
    """Compress the shards, for shipping; rows are then slower to read."""
    rehash: bool = False
    """Digest local sources again, even where size, time and inode are as remembered."""
    dry_run: bool = False
    """Say what would be made and write nothing: rows (exact where the cache is complete, else estimated from a
    sample), bytes, seconds, and which cache would be used."""


def main() -> int:
    """The command line. Returns the exit status: 0 done, 2 an error that is explained, 130 interrupted."""
    settings = tyro.cli(Settings, prog="python -m pipeline.pack")
    refuse_repeats(Settings)
    try:
        hear()
        if settings.dry_run:
            print(dry_run(settings))
        else:
            pack(settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        options = ("out", "cache_dir", "source", "tokenizer")
        places = {f"--{name.replace('_', '-')}": str(getattr(settings, name)) for name in options}
        print(f"error: {explained(error, places)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130
    return 0


def pack(settings: Settings) -> Manifest:
    """Make the dataset that ``settings`` ask for, or recognise that it is there.

    Raises:
        ValueError: bad settings or input, or the folder holds something else; says what to do.
        OSError: disk full and the like; the same command goes on once there is room.
    """
    stages = _Stages()
    with stages.time("open"):
        source, tokenizer, recipe = resolve(settings)
    if (finished := existing(settings.out, recipe)) is None:
        with hold(settings.out, wait=False, what=f"--out {settings.out}"):
            finished = existing(settings.out, recipe)  # another run may just have finished it
            if finished is None:
                return _make(settings, source, tokenizer, recipe, stages)
    print(_finished(settings, finished))
    return finished


def dry_run(settings: Settings) -> str:
    """What ``pack`` would make, as a table; nothing is written, but what the hub's client keeps of a hub id.

    Raises:
        ValueError: as ``pack``.
    """
    from pipeline.preview import preview

    source, tokenizer, recipe = resolve(replace(settings, dry_run=True))
    if (finished := existing(settings.out, recipe)) is not None:
        return _finished(settings, finished)
    out, cache_dir, workers = settings.out, settings.cache_dir, settings.workers
    return preview(source, tokenizer, recipe, out=out, cache_dir=cache_dir, workers=workers)


def _finished(settings: Settings, manifest: Manifest) -> str:
    return f"{settings.out}: finished, nothing to do (dataset_id {manifest.dataset_id[:12]})"


def _make(
    settings: Settings, source: Source, tokenizer: TokenizerFiles, recipe: dict[str, Any], stages: "_Stages"
) -> Manifest:
    if warning := tokenizer.class_warning():
        print(f"warning: {warning}", file=sys.stderr)
    run = Run(settings.out, settings.cache_dir, recipe)
    rule = recipe["pack"]
    with stages.time("encode"):
        encoded = _encode(settings, source, tokenizer, recipe)
    with stages.time("plan"):
        plan = plan_packing(
            encoded.documents, max_tokens=rule["max_tokens"], overflow=rule["overflow"], seed=rule["seed"]
        )
        if not plan.num_rows:
            raise ValueError(nothing_left(encoded, plan))
    seconds = stages.milliseconds["plan"] / 1000
    print(f"plan     {len(plan.docs):,} pieces into {plan.num_rows:,} rows in {seconds:.1f} s", file=sys.stderr)
    with stages.time("write"), Workers(settings.workers) as workers:
        shards = run.write_shards(encoded, plan, workers)
        others = run.write_others(encoded, plan, tokenizer)
    manifest = Manifest.build(
        recipe=recipe,
        created=_created(settings, stages),
        files={"shards": [{k: v for k, v in s.items() if k != "max_token_id"} for s in shards], "others": others},
        **account(encoded, plan, shards, max_tokens=rule["max_tokens"]),
    )
    with stages.time("check"):
        run.finish(manifest)
    notes = _notes(settings, tokenizer)
    print(summary(manifest, encoded, plan, milliseconds=stages.milliseconds, template_adds=notes))
    return manifest


def resolve(settings: Settings) -> tuple[Source, TokenizerFiles, dict[str, Any]]:
    """Open source and tokenizer and write down the recipe: every setting that shapes the content."""
    kwargs = parse_variables(settings.template_kwargs)
    _check(settings)
    source = open_source(
        settings.source,
        split=settings.split,
        revision=settings.revision,
        messages_column=settings.messages_column,
        tools_column=settings.tools_column,
        limit=settings.limit,
        cache_dir=settings.cache_dir,
        rehash=settings.rehash,
        remember=not settings.dry_run,
    )
    tokenizer = open_tokenizer(settings.tokenizer)
    if warning := ChatTemplate(tokenizer.template, kwargs, origin=tokenizer.template_origin).unread:
        print(f"warning: {warning}", file=sys.stderr)
    recipe = {
        "source": [source.recipe],
        "tokenizer": tokenizer.recipe(kwargs),
        "encode": {"version": ENCODE_VERSION, "targets": settings.targets},
        "pack": {
            "version": PACK_VERSION,
            "max_tokens": settings.max_tokens,
            "overflow": settings.overflow,
            "algorithm": ALGORITHM,
            "seed": settings.seed,
            "partitions": 1,
        },
        "shards": {
            "rows_per_shard": rows_per_shard(settings.max_tokens),
            "rows_per_batch": ROWS_PER_BATCH,
            "compression": settings.compression,
        },
    }
    return source, tokenizer, recipe


def _check(settings: Settings) -> None:
    """Refuse settings out of range before anything is read or written."""
    if settings.max_tokens < 2:
        raise ValueError(f"--max-tokens {settings.max_tokens}: a row needs at least 2 tokens")
    if settings.max_tokens > MAX_TOKENS:
        raise ValueError(f"--max-tokens {settings.max_tokens}: use at most {MAX_TOKENS}; a shard is built in memory")
    if not 0 <= settings.seed < 2**63:
        raise ValueError(f"--seed {settings.seed}: use 0 to 2**63 - 1")
    if settings.workers < 1:
        raise ValueError(f"--workers {settings.workers}: use at least 1")
    places = {"--out": settings.out, "--cache-dir": settings.cache_dir}
    for flag, folder in places.items():
        check_place(flag, folder, write=False)
    if not settings.dry_run and not (settings.out / MANIFEST).exists():  # what is finished is left alone
        for flag, folder in places.items():
            check_place(flag, folder, write=True)
    if settings.cache_dir.resolve().is_relative_to(settings.out.resolve()):
        raise ValueError(
            f"--out {settings.out}: --cache-dir {settings.cache_dir} is or lies within it, where nothing but the "
            "dataset may lie; choose another folder for one of them"
        )


def existing(out: Path, recipe: dict[str, Any]) -> Manifest | None:
    """The finished dataset in ``out`` if it is this recipe's, None if there is none.

    Raises:
        DatasetError: it is another recipe's, or damaged.
    """
    if not (out / MANIFEST).exists():
        return None
    manifest = PackedDataset.open(out).manifest
    if manifest.fingerprint == fingerprint(recipe):
        return manifest
    fields = "\n  ".join(differing_fields(manifest.recipe, recipe))
    raise DatasetError(
        f"--out {out} holds a finished dataset of another recipe (there -> asked for):\n  {fields}\n"
        "Choose another --out, or delete that folder; encoded chats in the cache are reused where they can be."
    )


# ---------------------------------------------------------------------------------------------- encode


def _encode(settings: Settings, source: Source, tokenizer: TokenizerFiles, recipe: dict[str, Any]) -> EncodedSet:
    """Encode what the cache lacks; by the references alone if a fast path proves different on this data."""
    folder = settings.cache_dir / encode_fingerprint(recipe)[:32]
    slow = folder / "references-only"  # a fast path was found to differ: never again for this data
    with hold(folder, wait=True, what=f"--cache-dir {folder}"):
        for leftover in folder.glob(".*.tmp"):  # of a run that was killed
            leftover.unlink()
        try:
            return _encode_blocks(settings, source, tokenizer, recipe, folder, fast=not slow.exists())
        except MismatchError as error:
            print(f"note: {error}; encoding again without fast paths, which takes longer", file=sys.stderr)
        publish(slow, b"")
        for block in folder.glob("block-*"):
            block.unlink()
        return _encode_blocks(settings, source, tokenizer, recipe, folder, fast=False)


def _encode_blocks(
    settings: Settings, source: Source, tokenizer: TokenizerFiles, recipe: dict[str, Any], folder: Path, *, fast: bool
) -> EncodedSet:
    blocks = source.blocks()
    records = {i: record for i, block in enumerate(blocks) if (record := BlockRecord.read(folder, block_name(block)))}
    missing = [i for i in range(len(blocks)) if i not in records]
    if missing:
        need_disk(folder, sum(path.stat().st_size for path in source.paths) * len(missing) // len(blocks), "the cache")
        progress = Progress("encode", sum(blocks[i].num_rows for i in missing), "chats")
        make = (tokenizer, recipe["tokenizer"]["template_kwargs"], recipe["encode"]["targets"], fast)
        jobs = [(blocks[i], folder) for i in missing]
        with Workers(settings.workers, shared=make) as workers:
            for i, record in zip(missing, workers.map(_encode_job, jobs), strict=True):
                records[i] = record
                progress.add(record.num_chats)
        progress.close()
    else:
        print(f"encode   {len(blocks)} blocks from the cache", file=sys.stderr)
    return open_encoded(folder, [records[i] for i in range(len(blocks))])


_encoder: tuple[Any, Encoder] | None = None  # this process's encoder, and what it was made from


def _encode_job(block: Block, folder: Path) -> BlockRecord:
    global _encoder
    make: tuple[TokenizerFiles, dict[str, Any], Targets, bool] = shared()
    if _encoder is None or _encoder[0] != make:
        files, kwargs, targets, fast = make
        _encoder = (make, Encoder(files, template_kwargs=kwargs, targets=targets, fast=fast))
        gc.freeze()  # a vocabulary need not be searched for garbage again and again
    return encode_block(_encoder[1], block, folder)


# ---------------------------------------------------------------------------------------------- report


class _Stages:
    """Milliseconds by stage."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, int] = {}

    @contextlib.contextmanager
    def time(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.milliseconds[stage] = round((time.monotonic() - started) * 1000)


def _created(settings: Settings, stages: _Stages) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "paths": {name: str(getattr(settings, name)) for name in ("source", "tokenizer", "out", "cache_dir")},
        "milliseconds": dict(stages.milliseconds),
        "versions": {
            "python": platform.python_version(),
            "package": __version__,
            **{name: version(name) for name in ("pyarrow", "tokenizers", "fastokens")},
        },
    }


def _notes(settings: Settings, tokenizer: TokenizerFiles) -> tuple[str, ...]:
    from pipeline.render import Renderer

    return Renderer(
        tokenizer.template,
        special_tokens=tokenizer.special_tokens,
        control_strings=tuple(tokenizer.added_tokens),
        template_kwargs=parse_variables(settings.template_kwargs),
    ).notes


if __name__ == "__main__":
    sys.exit(main())
