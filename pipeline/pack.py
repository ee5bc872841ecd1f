"""Pack chats into verified Arrow shards, once.

    python -m pipeline.pack --max-tokens 8192
    python -m pipeline.pack --source data/sample --tokenizer data/sample --max-tokens 2048

Stages: open (digest sources, read the tokenizer) -> encode (blocks, cached) -> plan (from lengths alone) -> write
(shards) -> check (hashes read back) -> manifest. The manifest is written last; before it there is no dataset.

Guarantees: the same recipe gives the same bytes for any number of workers and after any interruption; a run that was
killed goes on where it stopped; a finished dataset is recognised and left alone; another recipe is refused.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
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
from pipeline.assemble import EncodedSet, account, build_shard, open_encoded, reject_bytes, reject_lines, shard_jobs
from pipeline.binpack import ALGORITHM, Overflow, PackPlan, plan_packing
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
from pipeline.render import MismatchError
from pipeline.shards import (
    ROWS_PER_BATCH,
    PackedDataset,
    hash_file,
    publish,
    rows_per_shard,
    shard_name,
    verify_hashes,
)
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
    settings = tyro.cli(Settings, description=None)
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
    if (finished := existing(settings.out, recipe)) is not None:
        print(f"{settings.out}: finished, nothing to do (dataset_id {finished.dataset_id[:12]})")
        return finished
    with _lock(settings.out):
        run = _Run(settings, recipe)
        with Workers(settings.workers) as workers:
            with stages.time("encode"):
                encoded = _encode(settings, source, tokenizer, recipe, workers)
            with stages.time("plan"):
                pack_settings = recipe["pack"]
                plan = plan_packing(
                    encoded.documents,
                    max_tokens=pack_settings["max_tokens"],
                    overflow=pack_settings["overflow"],
                    seed=pack_settings["seed"],
                )
                if not plan.num_rows:
                    raise ValueError(_nothing_left(encoded, plan))
            with stages.time("write"):
                shards = run.write_shards(encoded, plan, workers)
                others = run.write_others(encoded, plan, tokenizer)
        with stages.time("check"):
            manifest = run.finish(encoded, plan, shards, others, stages)
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
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _encode_blocks(source, tokenizer, recipe, folder, workers, fast=True)
    except MismatchError as error:
        print(f"note: {error}; encoding again without fast paths, which takes longer", file=sys.stderr)
        shutil.rmtree(folder)
        folder.mkdir()
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
        _need_disk(folder, sum(path.stat().st_size for path in source.paths) * len(missing) // len(blocks), "the cache")
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


# ----------------------------------------------------------------------------------------------- write


class _Run:
    """An unfinished dataset: its folder, and the completion records under the cache that make it resumable."""

    def __init__(self, settings: Settings, recipe: dict[str, Any]) -> None:
        self.settings, self.recipe, self.out = settings, recipe, settings.out
        self.fingerprint = fingerprint(recipe)
        name = hashlib.sha256(str(settings.out.resolve()).encode()).hexdigest()[:16]
        self.records = settings.cache_dir / "runs" / name
        self._claim()

    def _claim(self) -> None:
        """Make ``out`` this run's: go on with what it began, clear what another recipe left unfinished."""
        recipe_file = self.records / "recipe.json"
        found = sorted(p for p in self.out.rglob("*") if not p.is_dir())
        ours = recipe_file.exists()
        foreign = [p for p in found if not ours or not _may_be_ours(p.relative_to(self.out))]
        if foreign:
            raise DatasetError(
                f"--out {self.out} is not empty and no unfinished run accounts for {foreign[0].name}: "
                "choose another folder, or empty this one"
            )
        same = ours and recipe_file.read_text() == self.fingerprint
        for path in found:
            if not same or path.suffix == ".tmp":
                path.unlink()
        if ours and not same:
            shutil.rmtree(self.records)
        self.records.mkdir(parents=True, exist_ok=True)
        publish(recipe_file, self.fingerprint.encode())

    def write_shards(self, encoded: EncodedSet, plan: PackPlan, workers: Workers) -> list[dict[str, Any]]:
        """Write every shard that is not there yet; return all entries."""
        jobs = shard_jobs(encoded, plan, rows_per_shard=self.recipe["shards"]["rows_per_shard"])
        done = {job.index: entry for job in jobs if (entry := self._recorded(job.index))}
        missing = [job for job in jobs if job.index not in done]
        bytes_per_row = -(-self.recipe["pack"]["max_tokens"] * 65 // 8)
        rows = sum(len(job.row_offsets) - 1 for job in missing)
        _need_disk(self.out, rows * bytes_per_row + 2**20, "the shards")
        progress = Progress("write", rows, "rows")
        results = workers.map(build_shard, [(job, self.out, self.recipe, self.fingerprint) for job in missing])
        for job, entry in zip(missing, results, strict=True):
            publish(self._record(job.index), json.dumps(entry).encode())
            done[job.index] = entry
            progress.add(entry["rows"])
        progress.close()
        return [done[job.index] for job in jobs]

    def write_others(self, encoded: EncodedSet, plan: PackPlan, tokenizer: TokenizerFiles) -> list[dict[str, Any]]:
        """Write rejects and tokenizer files; return their entries."""
        folder = self.out / "tokenizer"
        folder.mkdir(exist_ok=True)
        entries = [publish(self.out / "rejects.jsonl", reject_bytes(reject_lines(encoded, plan)))]
        for name, data in sorted(tokenizer.published().items()):
            entries.append(publish(folder / name, data) | {"name": f"tokenizer/{name}"})
        return entries

    def finish(
        self,
        encoded: EncodedSet,
        plan: PackPlan,
        shards: list[dict[str, Any]],
        others: list[dict[str, Any]],
        stages: "_Stages",
    ) -> Manifest:
        """Read all hashes back, write the manifest, forget the run."""
        content = account(encoded, plan, shards, max_tokens=self.recipe["pack"]["max_tokens"])
        listed = [{k: v for k, v in shard.items() if k != "max_token_id"} for shard in shards]
        manifest = Manifest.build(
            recipe=self.recipe,
            created=_created(self.settings, stages),
            files={"shards": listed, "others": others},
            **content,
        )
        verify_hashes(PackedDataset(self.out, manifest))
        publish(self.out / MANIFEST, manifest.to_bytes())
        self._note_drift(manifest)
        shutil.rmtree(self.records)
        return manifest

    def _record(self, index: int) -> Path:
        return self.records / f"{shard_name(index)}.json"

    def _recorded(self, index: int) -> dict[str, Any] | None:
        """The entry of a shard that an earlier, interrupted run completed, if the file still is what it was."""
        try:
            entry: dict[str, Any] = json.loads(self._record(index).read_bytes())
            return entry if hash_file(self.out / entry["name"]) == entry["xxh3_128"] else None
        except (OSError, ValueError, KeyError):
            return None

    def _note_drift(self, manifest: Manifest) -> None:
        """Say so if the same recipe came out differently before, under other versions."""
        memo = self.settings.cache_dir / "made" / manifest.fingerprint[:32]
        now = {"dataset_id": manifest.dataset_id, "versions": manifest.created["versions"]}
        with contextlib.suppress(OSError, ValueError):
            before = json.loads(memo.read_bytes())
            if before.get("dataset_id") != manifest.dataset_id:
                changed = ", ".join(differing_fields(before.get("versions"), now["versions"])) or "no version differs"
                print(f"warning: the same recipe gave other content before ({changed})", file=sys.stderr)
        memo.parent.mkdir(parents=True, exist_ok=True)
        memo.with_suffix(".tmp").write_text(json.dumps(now))
        memo.with_suffix(".tmp").replace(memo)


def _may_be_ours(name: Path) -> bool:
    """Could a run have written this file before it was interrupted?"""
    text = name.as_posix()
    stem = text.removeprefix(".").split(".")[0]
    return stem.startswith("shard-") or text.startswith(("tokenizer/", "rejects.jsonl", ".rejects", f".{MANIFEST}"))


@contextlib.contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold the folder itself, so that two runs never write into one and nothing is left behind."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatasetError(f"--out {out}: another run is writing there; wait for it, or choose another") from None
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            out.rmdir()  # only if nothing was written


def _need_disk(folder: Path, num_bytes: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(f"{folder}: {what} need about {num_bytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; make room")


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
