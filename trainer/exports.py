"""What an export may replace, how it appears under its name, what lies in it.

    refuse_replacing(out, what="export", tensors="model*.safetensors", needed=[source])
    with publishing(out) as folder:
        save_tensors(tensors, folder / "model.safetensors")

Guarantees: only an empty folder, or one that this program wrote and nothing was added to, is replaced, once the new one
is complete; when the disk is full the file is named and the former folder stays.
Costs: one small file in each folder.
"""

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.folders import publish_folder, start_folder
from trainer.tensors import Deferred, save_file

MARK = ".written_by_trainer.json"
"""File in every folder that this program wrote: the names of the others."""

_WRITTEN = (".safetensors", ".json", ".jinja", ".txt")
_TOKENIZER = ("tokenizer", "vocab", "merges")
"""Endings and beginnings of names in folders that earlier versions wrote, which left no mark."""


def refuse_replacing(out: Path, *, what: str, tensors: str, needed: Sequence[Path]) -> None:
    """Raise ValueError where writing `out` would remove what it may not.

    Args:
        what: for people, `export` or `adapter`.
        tensors: pattern of the names of its safetensors files.
        needed: what is read while `out` is written.
    """
    for path in needed:
        if path.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"{out} holds the source {path}, which is not replaced; choose another folder")
    if out.is_symlink() or (out.exists() and not _is_ours(out, tensors)):
        raise ValueError(
            f"{out} exists and is not an {what} that this program wrote, or something was added to it; choose another "
            "folder or remove it"
        )


def _is_ours(folder: Path, tensors: str) -> bool:
    """Whether a folder is empty, or has our files alone."""
    if not folder.is_dir():
        return False
    files = list(folder.iterdir())
    weights = [file for file in files if file.suffix == ".safetensors"]
    if not weights:
        return not files
    if not all(file.is_file() and not file.is_symlink() for file in files):
        return False
    if not (folder / MARK).is_file():
        known = all(file.suffix in _WRITTEN or file.name.startswith(_TOKENIZER) for file in files)
        return known and _in_a_run(folder)
    return all(file.match(tensors) for file in weights) and {file.name for file in files} <= _marked(folder)


def _in_a_run(folder: Path) -> bool:
    """Whether the name is the one a run gives to what it exports: earlier versions wrote no mark."""
    run = folder.absolute().parent
    return folder.name in ("export", "adapter") and (run / "checkpoints").is_dir() and (run / "metrics.jsonl").is_file()


def _marked(folder: Path) -> set[str]:
    """The names of the files that were written there."""
    try:
        found = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return set()
    return {MARK, *map(str, found)} if isinstance(found, list) else set()


@contextlib.contextmanager
def publishing(out: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name if nothing is raised; else it is removed: it may fill the disk."""
    temporary = start_folder(out)
    try:
        yield temporary
        write_json(temporary / MARK, sorted(file.name for file in temporary.iterdir()))
    except BaseException as error:
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a write's error does not say where
            error.filename = str(out)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    publish_folder(temporary, out)


def save_tensors(tensors: Mapping[str, Tensor | Deferred], file: Path) -> None:
    """Write one safetensors file. Raises OSError where the disk is full."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})  # transformers asks for it
    except OSError as error:
        why = error.strerror or error
        todo = (
            "free some space"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "see that its folder can be written to"
        )
        raise OSError(f"{file}: cannot be written ({why}); {todo} and try again, nothing was replaced") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file or it says null. Raises ValueError for everything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); repair or remove it") from error
    if not isinstance(found, dict | None):
        raise ValueError(f"{path}: an object is expected, not {type(found).__name__}; repair or remove it")
    return found or {}


def write_json(path: Path, value: object) -> None:
    """Indented, with unescaped text and a line break at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
