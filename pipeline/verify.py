"""Prove that a packed dataset is what its manifest says.

    python -m pipeline.verify data/packed              # every file's hash, nothing foreign
    python -m pipeline.verify data/packed --quick      # manifest, identities, exact sizes
    python -m pipeline.verify data/packed --semantic   # and every invariant of every row, every total
    python -m pipeline.verify data/packed --show 12    # row 12 decoded, boundaries and targets marked

Exit status 0: it holds; 1: it does not, and the first fault is named; 2: a wrong argument; 130: interrupted.
Costs: full is a read at disk speed, semantic about 0.4 ms a row of 8,192 tokens.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import tyro

from pipeline.accounts import Sums, check_totals, read_lines
from pipeline.cli import refuse_repeats
from pipeline.cut import Overflow
from pipeline.encode import Targets
from pipeline.manifest import DatasetError, Manifest, differing_fields
from pipeline.progress import Progress
from pipeline.render import END, START
from pipeline.shards import ROWS_PER_BATCH, PackedDataset, Row, rows_per_shard, verify_hashes
from pipeline.tokenizer import TEMPLATE_FILE, TokenizerFiles, read_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Check a packed dataset: by default the hash of every file."""

    dataset: Annotated[Path, tyro.conf.Positional]
    """Folder that holds manifest.json."""
    quick: bool = False
    """Only the manifest, its identities and the exact size of every file; not with --semantic."""
    semantic: bool = False
    """Also recompute every invariant of every row, and every total from the rows; not with --quick."""
    show: int | None = None
    """Print one row decoded, its boundaries and targets marked, and check nothing else."""


def main() -> int:
    """The command line. Returns the exit status."""
    settings = tyro.cli(Settings, prog="python -m pipeline.verify")
    refuse_repeats(Settings)
    if settings.quick and settings.semantic:
        print("error: --quick checks sizes only, --semantic every row. Leave one of them out.", file=sys.stderr)
        return 2
    try:
        hear()
        dataset = PackedDataset.open(settings.dataset)
        if settings.show is not None:
            print(show(dataset, settings.show, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
            return 0
        if not settings.quick:
            verify_hashes(dataset)
        if settings.semantic:
            verify_semantics(dataset)
    except (ValueError, OSError, IndexError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    level = "semantic" if settings.semantic else "quick" if settings.quick else "full"
    print(f"{settings.dataset}: {level} check passed, {len(dataset):,} rows, dataset_id {dataset.manifest.dataset_id}")
    return 0


# -------------------------------------------------------------------------------------------- semantic


def verify_semantics(dataset: PackedDataset) -> None:
    """Recompute every invariant of the format from the rows.

    Raises:
        DatasetError: naming the first row, or the total, that does not hold.
    """
    manifest = dataset.manifest
    check_recipe(dataset)
    rules = RowRules(_tokenizer(dataset), manifest)
    progress = Progress("verify", len(dataset), "rows")
    sums, index = Sums(), 0
    for number, shard in enumerate(manifest.files["shards"]):
        _check_batches(dataset, number)
        sums.open_shard()
        for _ in range(shard["rows"]):
            row = dataset[index]
            if (fault := rules.fault(row)) is not None:
                raise DatasetError(f"{dataset.path / shard['name']}: row {index}: {fault}. Pack again.")
            sums.add(row)
            index += 1
        progress.add(shard["rows"])
    progress.close()
    for what, listed, found in check_totals(manifest, sums, read_lines(dataset.path / "rejects.jsonl")):
        if listed != found:
            raise DatasetError(f"{dataset.path}/manifest.json: {what} is {listed}, the rows give {found}. Pack again.")


_RECIPE: dict[str, Any] = {
    "source": [{
        "id": str | None, "revision": str | None, "split": str | None, "messages_column": str,
        "tools_column": str | None, "limit": int | None,
        "files": [{"name": str, "bytes": int | None, "sha256": str | None}],
    }],
    "tokenizer": {"model": str | None, "tokenizer_sha256": str, "template_sha256": str, "template_kwargs": dict,
                  "vocab_size": int, "pad_token_id": int, "eos_token_ids": [int]},
    "encode": {"version": int, "targets": get_args(Targets)},
    "pack": {"version": int, "max_tokens": int, "overflow": get_args(Overflow), "algorithm": str, "seed": int,
             "partitions": int},
    "shards": {"rows_per_shard": int, "rows_per_batch": int, "compression": (None, "zstd")},
}  # fmt: skip
"""Every field of a recipe: its type, its values, or the same of what it holds."""


def check_recipe(dataset: PackedDataset) -> None:
    """Refuse a recipe that lacks a field, holds another type, or contradicts the format's own numbers.

    Raises:
        DatasetError: naming the field.
    """
    recipe, max_tokens = dataset.manifest.recipe, dataset.manifest.max_tokens
    fault = next(_recipe_faults(recipe, _RECIPE, "recipe"), None)
    if fault is None:
        by_shard = {"rows_per_shard": rows_per_shard(max_tokens), "rows_per_batch": ROWS_PER_BATCH}
        numbers = {"pack": {"max_tokens": max_tokens}, "shards": by_shard}
        held = {part: {name: recipe[part][name] for name in names} for part, names in numbers.items()}
        fault = next(iter(differing_fields(held, numbers, "recipe")), None)
    if fault is None and max_tokens >= 2**31:
        fault = f"max_tokens {max_tokens} is more than a boundary can hold"
    if fault is not None:
        raise DatasetError(f"{dataset.path}/manifest.json: {fault}. Pack again.")


def _recipe_faults(value: Any, wanted: Any, path: str) -> Iterator[str]:
    if isinstance(wanted, dict | list):
        if not isinstance(value, type(wanted)):
            yield f"{path} must be {'an object' if isinstance(wanted, dict) else 'a list'}, found {value!r:.80}"
        elif isinstance(wanted, dict):
            for name, inner in wanted.items():
                if name in value:
                    yield from _recipe_faults(value[name], inner, f"{path}.{name}")
                else:
                    yield f"{path}.{name} is missing"
        else:
            for i, item in enumerate(value):
                yield from _recipe_faults(item, wanted[0], f"{path}[{i}]")
    elif isinstance(wanted, tuple):
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in wanted):
            yield f"{path} must be one of {wanted}, found {value!r:.80}"
    elif not isinstance(value, wanted) or isinstance(value, bool):
        yield f"{path} must be of type {getattr(wanted, '__name__', wanted)}, found {value!r:.80}"


def _check_batches(dataset: PackedDataset, shard: int) -> None:
    """A shard's record batches are valid, without nulls, and hold the rows that are listed: 8 each but the last."""
    entry = dataset.manifest.files["shards"][shard]
    path, reader = dataset.path / entry["name"], dataset._open_shard(shard)
    sizes = []
    try:
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            batch.validate(full=True)
            if any(column.null_count or column.values.null_count for column in batch.columns):
                raise DatasetError(f"{path}: record batch {number} holds nulls. Pack again.")
            sizes.append(batch.num_rows)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise DatasetError(f"{path}: record batch {len(sizes)} is malformed ({reason}). Pack again.") from None
    full, rest = divmod(entry["rows"], ROWS_PER_BATCH)
    if sizes != [ROWS_PER_BATCH] * full + [rest] * (rest > 0):
        raise DatasetError(f"{path}: {sum(sizes)} rows in its record batches, {entry['rows']} are listed. Pack again.")


class RowRules:
    """The invariants of one row."""

    def __init__(self, files: TokenizerFiles, manifest: Manifest) -> None:
        recipe = manifest.recipe
        self._max_tokens = manifest.max_tokens
        self._pad = recipe["tokenizer"]["pad_token_id"]
        self._vocab_size = recipe["tokenizer"]["vocab_size"]
        self._start, self._end = files.added_tokens[START], files.added_tokens[END]
        from tokenizers import Tokenizer

        try:
            self._assistant = Tokenizer.from_str(files.json).encode("assistant", add_special_tokens=False).ids
        except Exception as error:  # the library raises nothing more special
            raise DatasetError(
                f"tokenizer/tokenizer.json: no tokenizer that this can use ({error}). Pack again."
            ) from None
        self._targets = recipe["encode"]["targets"]

    def fault(self, row: Row) -> str | None:
        """The first rule that a row breaks, or None."""
        bounds, total = row.boundaries.astype(np.int64), self._max_tokens
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or (np.diff(bounds) <= 0).any():
            return f"boundaries must rise from 0 to {total}, found {bounds.tolist()[:20]}"
        segments, num_pieces = len(bounds) - 1, len(row.doc_ids)
        if num_pieces not in (segments, segments - 1) or num_pieces == 0 or len(row.pieces) != num_pieces:
            return f"{segments} segments, {num_pieces} doc_ids, {len(row.pieces)} pieces do not go together"
        starts = bounds[:-1]
        positions = np.arange(total) - np.repeat(starts, np.diff(bounds))
        if (row.position_ids != positions).any():
            return f"position_ids are wrong from token {int(np.flatnonzero(row.position_ids != positions)[0])}"
        if (row.input_ids < 0).any() or (row.input_ids >= self._vocab_size).any():
            return f"a token id is not below the vocabulary's {self._vocab_size}"
        if row.loss_mask[starts].any():
            return "a segment's first token is a target"
        tail = int(bounds[num_pieces])
        if (row.input_ids[tail:] != self._pad).any() or row.loss_mask[tail:].any():
            return f"the padding from token {tail} on holds something else than the pad id, or a target"
        if (np.add.reduceat(row.loss_mask.astype(np.int64), starts)[:num_pieces] == 0).any():
            return "a piece has no target"
        if (row.input_ids[starts[:num_pieces]] != self._start).any():
            return f"a piece does not start with {START}"
        return None if self._targets == "all" else self._target_fault(row)

    def _target_fault(self, row: Row) -> str | None:
        """Targets lie in assistant turns and run to the end-of-turn token, unless the piece was cut there."""
        opens = np.flatnonzero(row.input_ids == self._start)
        targets = np.flatnonzero(row.loss_mask)
        turn = opens[np.searchsorted(opens, targets, side="right") - 1]
        if (targets < turn + 2 + len(self._assistant)).any():  # start token, role and line break
            return "a target lies in the header of a turn"
        if any((row.input_ids[turn + 1 + i] != token).any() for i, token in enumerate(self._assistant)):
            return "a target lies outside the assistant turns"
        last = targets[np.append(np.diff(targets) > 1, True)]
        cut = np.isin(last + 1, row.boundaries)
        if ((row.input_ids[last] != self._end) & ~cut).any():
            return f"a run of targets does not end with {END}"
        return None


def _tokenizer(dataset: PackedDataset) -> TokenizerFiles:
    """The dataset's own tokenizer, checked against the recipe: digests, then what it holds."""
    recipe = dataset.manifest.recipe["tokenizer"]
    folder = dataset.path / "tokenizer"
    for name, digest in (("tokenizer.json", "tokenizer_sha256"), (TEMPLATE_FILE, "template_sha256")):
        try:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            raise DatasetError(f"{folder / name} cannot be read ({error.strerror}). Pack again.") from None
        if found != recipe[digest]:
            raise DatasetError(f"{folder / name}: sha256 is {found}, the recipe says {recipe[digest]}. Pack again.")
    try:
        files = read_folder(folder, model=recipe["model"])
        held = files.recipe(recipe["template_kwargs"])
    except (ValueError, TypeError, OSError) as error:
        raise DatasetError(f"{folder}: no tokenizer that this can use ({error}). Pack again.") from None
    if differing := differing_fields(recipe, {name: held.get(name) for name in recipe}, "recipe.tokenizer"):
        raise DatasetError(f"{folder}: not what the recipe says (there -> found): {differing[0]}. Pack again.")
    return files


# ------------------------------------------------------------------------------------------------ show


def show(dataset: PackedDataset, index: int, *, colour: bool) -> str:
    """One row as text: a line before each piece, targets in green (or between « and » without colours).

    Raises:
        IndexError: no such row.
    """
    from tokenizers import Tokenizer

    row = dataset[index]
    tokenizer = Tokenizer.from_file(str(dataset.path / "tokenizer" / "tokenizer.json"))
    opening, closing = ("\x1b[32m", "\x1b[0m") if colour else ("«", "»")
    out = [f"row {index} of {len(dataset)}: {dataset.manifest.max_tokens} tokens, {len(row.doc_ids)} pieces"]
    for i, (start, stop) in enumerate(zip(row.boundaries[:-1].tolist(), row.boundaries[1:].tolist(), strict=True)):
        if i == len(row.doc_ids):
            out.append(f"──── padding: tokens {start} to {stop}")
            break
        targets = int(row.loss_mask[start:stop].sum())
        out.append(
            f"──── document {row.doc_ids[i]}, piece {row.pieces[i]}: tokens {start} to {stop}, {targets} targets"
        )
        text = ""
        for is_target, ids in _runs(row.input_ids[start:stop], row.loss_mask[start:stop]):
            part = tokenizer.decode(ids, skip_special_tokens=False)
            text += f"{opening}{part}{closing}" if is_target else part
        out.append(text)
    return "\n".join(out)


def _runs(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]) -> list[tuple[bool, list[int]]]:
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [(bool(mask[a]), ids[a:b].tolist()) for a, b in pairwise(edges)]


if __name__ == "__main__":
    sys.exit(main())
