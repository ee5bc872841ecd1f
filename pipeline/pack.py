"""Pack chats into verified Arrow shards, once.

    python -m pipeline.pack --max-tokens 8192
    python -m pipeline.pack --source data/sample --tokenizer data/sample --max-tokens 2048

Stages: open (digest sources, read the tokenizer) -> encode (blocks, cached) -> plan (from lengths alone) -> write
(shards) -> check (hashes read back) -> manifest. The manifest is written last; before it there is no dataset.

Guarantees: the same recipe gives the same bytes for any number of workers and after any interruption; a run that was
killed goes on where it stopped; a finished dataset is recognised and left alone; another recipe is refused.
"""

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import tyro

from pipeline import __version__
from pipeline.assemble import EncodedSet, account, open_encoded, reject_lines
from pipeline.binpack import ALGORITHM, PackPlan, plan_packing
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
from pipeline.progress import Progress
from pipeline.publish import Run, hold, need_disk
from pipeline.render import MismatchError
from pipeline.shards import ROWS_PER_BATCH, PackedDataset, publish, rows_per_shard
from pipeline.source import Source, open_source
from pipeline.tokenizer import TokenizerFiles, open_tokenizer
from pipeline.workers import Workers

PACK_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Turn chats into bin-packed Arrow shards with position ids and boundaries: once, verified, reusable.

    Without --source and --tokenizer it reads ultrachat_200k from the Hugging Face hub for Qwen3.8-27B. Offline, try
    --source data/sample --tokenizer data/sample.
    """

    source: str = "HuggingFaceH4/ultrachat_200k"
    """What to read: a hub id, a .parquet or .jsonl file, or a folder of them."""
    split: str = "train_sft"
    """The hub's split; in a folder, the files named SPLIT or SPLIT-*. A single file is read whole."""
    revision: str | None = None
    """Revision of a hub id; its newest commit otherwise, which the manifest records."""
    messages_column: str = "messages"
    """Column that holds the messages."""
    tools_column: str | None = None
    """Column that holds tool definitions; "tools" is used where there is one."""
    tokenizer: str = "Qwen/Qwen3.8-27B"
    """Tokenizer and chat template: a hub id or a folder that holds tokenizer.json and the template."""
    template_kwargs: str = "{}"
    """Variables for the chat template, one JSON object, e.g. '{"enable_thinking": false}'."""
    targets: Targets = "assistant"
    """What is learned: every assistant turn, only each chat's last one, or all tokens."""
    max_tokens: int = 8192
    """T, tokens of every row."""
    overflow: Overflow = "truncate"
    """Chats longer than a row: truncate after the last assistant turn that fits; split at rounds; drop; error."""
    seed: int = 0
    """Decides which chats share a row, and the order of rows."""
    out: Path = Path("data/packed")
    """Folder of the dataset."""
    cache_dir: Path = Path("data/cache")
    """Encoded chats, reused for any row length, overflow policy or seed; delete it whenever you like."""
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processes that encode and write; the result does not depend on it."""
    limit: int | None = None
    """Read only so many chats."""
    compression: Literal["zstd"] | None = None
    """Compress the shards, for shipping: reading is then slower."""
    rehash: bool = False
    """Digest local sources again, even if size, time and inode are as remembered."""


def main() -> int:
    """The command line. Returns the exit status: 0 done, 2 an error that is explained, 130 interrupted."""
    settings = tyro.cli(Settings, prog="python -m pipeline.pack")
    try:
        pack(settings)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: nothing half-published is left; the same command goes on from here", file=sys.stderr)
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
    print(f"{settings.out}: finished, nothing to do (dataset_id {finished.dataset_id[:12]})")
    return finished


def _make(
    settings: Settings, source: Source, tokenizer: TokenizerFiles, recipe: dict[str, Any], stages: "_Stages"
) -> Manifest:
    if warning := tokenizer.class_warning():
        print(f"warning: {warning}", file=sys.stderr)
    run = Run(settings.out, settings.cache_dir, recipe)
    rule = recipe["pack"]
    with Workers(settings.workers) as workers:
        with stages.time("encode"):
            encoded = _encode(settings, source, tokenizer, recipe, workers)
        with stages.time("plan"):
            plan = plan_packing(
                encoded.documents, max_tokens=rule["max_tokens"], overflow=rule["overflow"], seed=rule["seed"]
            )
            if not plan.num_rows:
                raise ValueError(_nothing_left(encoded, plan))
        with stages.time("write"):
            shards = run.write_shards(encoded, plan, workers)
            others = run.write_others(encoded, plan, tokenizer)
    manifest = Manifest.build(
        recipe=recipe,
        created=_created(settings, stages),
        files={"shards": [{k: v for k, v in s.items() if k != "max_token_id"} for s in shards], "others": others},
        **account(encoded, plan, shards, max_tokens=rule["max_tokens"]),
    )
    run.finish(manifest)
    print(summary(manifest, tokenizer_notes=_notes(settings, tokenizer)))
    return manifest


def resolve(settings: Settings) -> tuple[Source, TokenizerFiles, dict[str, Any]]:
    """Open source and tokenizer and write down the recipe: every setting that shapes the content."""
    kwargs = _template_kwargs(settings.template_kwargs)
    if settings.max_tokens < 2:
        raise ValueError(f"--max-tokens {settings.max_tokens}: a row needs at least 2 tokens")
    if not 0 <= settings.seed < 2**63:
        raise ValueError(f"--seed {settings.seed}: use 0 to 2**63 - 1")
    if settings.workers < 1:
        raise ValueError(f"--workers {settings.workers}: use at least 1")
    source = open_source(
        settings.source,
        split=settings.split,
        revision=settings.revision,
        messages_column=settings.messages_column,
        tools_column=settings.tools_column,
        limit=settings.limit,
        cache_dir=settings.cache_dir,
        rehash=settings.rehash,
    )
    tokenizer = open_tokenizer(settings.tokenizer)
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


def existing(out: Path, recipe: dict[str, Any]) -> Manifest | None:
    """The finished dataset in ``out`` if it is this recipe's, None if there is none.

    Raises:
        DatasetError: it is another recipe's, or damaged, or ``out`` holds foreign files.
    """
    if not (out / MANIFEST).exists():
        if out.exists() and not out.is_dir():
            raise DatasetError(f"--out {out}: this is a file; choose a folder")
        return None
    manifest = PackedDataset.open(out).manifest
    if manifest.fingerprint == fingerprint(recipe):
        return manifest
    fields = "\n  ".join(differing_fields(manifest.recipe, recipe))
    raise DatasetError(
        f"--out {out} holds a finished dataset of another recipe (there -> asked for):\n  {fields}\n"
        "Choose another --out, or delete that folder; encoded chats in the cache are reused where they can be."
    )


def _template_kwargs(text: str) -> dict[str, Any]:
    try:
        kwargs = json.loads(text)
        fingerprint({"kwargs": kwargs})
    except (ValueError, TypeError) as error:
        raise ValueError(f"--template-kwargs {text}: expected one JSON object without floats ({error})") from None
    if not isinstance(kwargs, dict):
        raise ValueError(f"--template-kwargs {text}: expected one JSON object, e.g. '{{\"enable_thinking\": false}}'")
    return kwargs


# ---------------------------------------------------------------------------------------------- encode


def _encode(
    settings: Settings, source: Source, tokenizer: TokenizerFiles, recipe: dict[str, Any], workers: Workers
) -> EncodedSet:
    """Encode what the cache lacks; by the references alone if a fast path proves different on this data."""
    folder = settings.cache_dir / encode_fingerprint(recipe)[:32]
    slow = folder / "references-only"  # a fast path was found to differ: never again for this data
    with hold(folder, wait=True, what=f"--cache-dir {folder}"):
        for leftover in folder.glob(".*.tmp"):  # of a run that was killed
            leftover.unlink()
        try:
            return _encode_blocks(source, tokenizer, recipe, folder, workers, fast=not slow.exists())
        except MismatchError as error:
            print(f"note: {error}; encoding again without fast paths, which takes longer", file=sys.stderr)
        publish(slow, b"")
        for block in folder.glob("block-*"):
            block.unlink()
        return _encode_blocks(source, tokenizer, recipe, folder, workers, fast=False)


def _encode_blocks(
    source: Source,
    tokenizer: TokenizerFiles,
    recipe: dict[str, Any],
    folder: Path,
    workers: Workers,
    *,
    fast: bool,
) -> EncodedSet:
    blocks = source.blocks()
    records = {i: record for i, block in enumerate(blocks) if (record := BlockRecord.read(folder, block_name(block)))}
    missing = [i for i in range(len(blocks)) if i not in records]
    if missing:
        need_disk(folder, sum(path.stat().st_size for path in source.paths) * len(missing) // len(blocks), "the cache")
        progress = Progress("encode", sum(blocks[i].num_rows for i in missing), "chats")
        make = (tokenizer, recipe["tokenizer"]["template_kwargs"], recipe["encode"]["targets"], fast)
        jobs = [(make, blocks[i], folder) for i in missing]
        for i, record in zip(missing, workers.map(_encode_job, jobs), strict=True):
            records[i] = record
            progress.add(record.num_chats)
        progress.close()
    else:
        print(f"encode   {len(blocks)} blocks from the cache", file=sys.stderr)
    return open_encoded(folder, [records[i] for i in range(len(blocks))])


_encoder: tuple[Any, Encoder] | None = None  # this process's encoder, and what it was made from


def _encode_job(make: tuple[TokenizerFiles, dict[str, Any], Targets, bool], block: Any, folder: Path) -> BlockRecord:
    global _encoder
    if _encoder is None or _encoder[0] != make:
        files, kwargs, targets, fast = make
        _encoder = (make, Encoder(files, template_kwargs=kwargs, targets=targets, fast=fast))
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
        "milliseconds": stages.milliseconds,
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
        template_kwargs=_template_kwargs(settings.template_kwargs),
    ).notes


def _nothing_left(encoded: EncodedSet, plan: PackPlan) -> str:
    reasons: dict[str, int] = {}
    for line in reject_lines(encoded, plan):
        if line.what == "rejected":
            reasons[line.reason] = reasons.get(line.reason, 0) + 1
    return f"none of {encoded.num_chats} chats can be packed: {reasons}. Check the columns, --max-tokens and --overflow"


def summary(manifest: Manifest, *, tokenizer_notes: tuple[str, ...] = ()) -> str:
    """One table of what came out."""
    totals, files = manifest.totals, manifest.all_files()
    capacity = totals["rows"] * manifest.max_tokens
    size = sum(entry["bytes"] for entry in files if entry["name"].endswith(".arrow"))
    seconds = ", ".join(f"{k} {v / 1000:.1f}" for k, v in manifest.created.get("milliseconds", {}).items())
    rejected = ", ".join(f"{reason} {n:,}" for reason, n in totals["rejected"].items()) or "none"
    lines = [
        ("rows", f"{totals['rows']:,} of {manifest.max_tokens:,} tokens in {len(manifest.files['shards'])} shards"),
        ("fill", f"{totals['tokens'] / capacity:.3%} ({totals['padding']:,} tokens of padding)"),
        ("tokens", f"{totals['tokens']:,}, targets {totals['targets']:,}"),
        ("chats", f"{totals['chats_read']:,} read, {totals['documents']:,} packed, {totals['truncated']:,} truncated, "
                  f"{totals['split']:,} split, {totals['escaped']:,} with control strings as text"),
        ("cut", f"{totals['tokens_cut']:,} tokens, {totals['rounds_cut']:,} rounds"),
        ("rejected", rejected),
        ("bytes", f"{size:,} in shards, {size / max(capacity, 1):.2f} a token of row"),
        ("seconds", seconds),
        ("dataset_id", manifest.dataset_id),
    ]  # fmt: skip
    if tokenizer_notes:
        lines.append(("template", "adds " + " and ".join(tokenizer_notes) + " (see --template-kwargs)"))
    return "\n".join(f"{name:<11}{text}" for name, text in lines)


if __name__ == "__main__":
    sys.exit(main())
