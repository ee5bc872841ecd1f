"""The folder of a dataset while it is being written: who holds it, what is done already, what may be cleared.

Completion records lie under the cache, one for each shard, so that a run that was killed goes on where it stopped;
in the folder itself nothing but the dataset's own files ever lies. The manifest is written last: before it there is
no dataset.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.assemble import EncodedSet, build_shard, reject_bytes, reject_lines, shard_jobs
from pipeline.binpack import PackPlan
from pipeline.manifest import MANIFEST, DatasetError, Manifest, differing_fields, fingerprint
from pipeline.memo import read_note, write_note
from pipeline.progress import Progress
from pipeline.shards import PackedDataset, hash_file, publish, shard_name, verify_hashes
from pipeline.tokenizer import FILES, TokenizerFiles
from pipeline.workers import Workers

_NAMES = "|".join(re.escape(name) for name in FILES)
_OURS = re.compile(
    r"shard-\d{5,}\.arrow|rejects\.jsonl"
    rf"|\.(shard-\d{{5,}}\.arrow|rejects\.jsonl|{re.escape(MANIFEST)})\.[^/]*\.tmp"
    rf"|tokenizer/(({_NAMES})|\.({_NAMES})\.[^/]*\.tmp)"
)
"""Every name that a run can have written before it was interrupted."""


class Run:
    """An unfinished dataset: its folder, and the completion records under the cache that make it resumable.

    Args:
        out: folder of the dataset, which this run holds.
        cache_dir: where completion records lie.
        recipe: what was asked for.

    Raises:
        DatasetError: ``out`` holds files that no unfinished run accounts for.
    """

    def __init__(self, out: Path, cache_dir: Path, recipe: dict[str, Any]) -> None:
        self.out, self.recipe = out, recipe
        self.fingerprint = fingerprint(recipe)
        name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
        self._records = cache_dir / "runs" / name
        self._memo = cache_dir / "made" / self.fingerprint[:32]
        self._claim()

    def _claim(self) -> None:
        """Make ``out`` this run's: go on with what it began, clear what another recipe left unfinished."""
        recipe_file = self._records / "recipe.json"
        found = sorted(p for p in self.out.rglob("*") if not p.is_dir())
        ours = recipe_file.exists()
        foreign = [p for p in found if not ours or not _OURS.fullmatch(p.relative_to(self.out).as_posix())]
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
            shutil.rmtree(self._records)
        self._records.mkdir(parents=True, exist_ok=True)
        publish(recipe_file, self.fingerprint.encode())

    def write_shards(self, encoded: EncodedSet, plan: PackPlan, workers: Workers) -> list[dict[str, Any]]:
        """Write every shard that is not there yet; return all entries."""
        jobs = shard_jobs(encoded, plan, rows_per_shard=self.recipe["shards"]["rows_per_shard"])
        done = {job.index: entry for job in jobs if (entry := self._recorded(job.index))}
        missing = [job for job in jobs if job.index not in done]
        bytes_per_row = -(-self.recipe["pack"]["max_tokens"] * 65 // 8)
        rows = sum(len(job.row_offsets) - 1 for job in missing)
        need_disk(self.out, rows * bytes_per_row + 2**20, "the shards")
        progress = Progress("write", rows, "rows")
        results = workers.map(build_shard, [(job, self.out, self.recipe, self.fingerprint) for job in missing])
        for job, entry in zip(missing, results, strict=True):
            write_note(self._record(job.index), entry)
            done[job.index] = entry
            progress.add(entry["rows"])
        progress.close()
        return [done[job.index] for job in jobs]

    def write_others(self, encoded: EncodedSet, plan: PackPlan, tokenizer: TokenizerFiles) -> list[dict[str, Any]]:
        """Write rejects and tokenizer files; return their entries."""
        folder, files = self.out / "tokenizer", tokenizer.published()
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():  # files that the recipe does not name may have gone since the interruption
            if path.name not in files:
                path.unlink()
        entries = [publish(self.out / "rejects.jsonl", reject_bytes(reject_lines(encoded, plan)))]
        for name, data in sorted(files.items()):
            entries.append(publish(folder / name, data) | {"name": f"tokenizer/{name}"})
        return entries

    def finish(self, manifest: Manifest) -> None:
        """Read all hashes back, write the manifest, forget the run."""
        progress = Progress("check", sum(entry["bytes"] for entry in manifest.all_files()), "bytes")
        verify_hashes(PackedDataset(self.out, manifest), progress=progress.add)
        progress.close()
        publish(self.out / MANIFEST, manifest.to_bytes())
        shutil.rmtree(self._records)
        with contextlib.suppress(OSError):  # the dataset is there: a full disk must not say otherwise
            self._note_drift(manifest)

    def _record(self, index: int) -> Path:
        return self._records / f"{shard_name(index)}.json"

    def _recorded(self, index: int) -> dict[str, Any] | None:
        """The entry of a shard that an earlier, interrupted run completed, if the file still is what it was."""
        if (entry := read_note(self._record(index))) is None:
            return None
        try:
            return entry if hash_file(self.out / entry["name"]) == entry["xxh3_128"] else None
        except (OSError, ValueError, KeyError):
            return None

    def _note_drift(self, manifest: Manifest) -> None:
        """Say so if the same recipe came out differently before, under other versions."""
        now = {"dataset_id": manifest.dataset_id, "versions": manifest.created["versions"]}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            before = json.loads(self._memo.read_bytes())
            if before.get("dataset_id") != manifest.dataset_id:
                changed = ", ".join(differing_fields(before.get("versions"), now["versions"])) or "no version differs"
                print(f"warning: the same recipe gave other content before ({changed})", file=sys.stderr)
        self._memo.parent.mkdir(parents=True, exist_ok=True)
        publish(self._memo, json.dumps(now).encode())


@contextlib.contextmanager
def hold(folder: Path, *, wait: bool, what: str) -> Iterator[None]:
    """Hold a folder itself, so that two runs never write into one and nothing is left behind.

    Args:
        folder: made if it is missing, and removed if it is empty in the end.
        wait: for the other run, if there is one, instead of refusing.
        what: its name in messages.

    Raises:
        DatasetError: another run holds it.
    """
    while (descriptor := _locked(folder, wait=wait, what=what)) is None:
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only if nothing was written
        os.close(descriptor)


def _locked(folder: Path, *, wait: bool, what: str) -> int | None:
    """A descriptor that holds ``folder``; None if another run removed the empty folder meanwhile: a lock on nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise DatasetError(f"{what}: another run is writing there; wait for it, or choose another") from None
            print(f"{what}: another run is writing there; waiting for it", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def need_disk(folder: Path, num_bytes: int, what: str) -> None:
    """Raise OSError, with both numbers, if less than ``num_bytes`` are free where ``folder`` lies."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(f"{folder}: {what} need about {num_bytes:,} bytes, {free:,} are free; make room")
