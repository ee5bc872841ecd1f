"""Folders that get their name when they are finished.

    temporary = start_folder(final)
    ...                                 # write into it
    publish_folder(temporary, final)

    .tmp-new-NAME       what is being written; the process that writes holds a lock on the folder itself
    .tmp-old-NAME       the former folder, between the two renames that replace it

Guarantees: under its name a folder is whole, after a kill at any moment too, and a former one is lost only to a whole
one; one process at a time writes a folder; folders of other names are left alone.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from pipeline.shards import sync_directory

LEFTOVER = ".tmp-"
"""How the names of folders begin that are unfinished or about to be removed."""
NEW, OLD = f"{LEFTOVER}new-", f"{LEFTOVER}old-"

_HELD: dict[Path, int] = {}
"""Descriptors whose locks keep other processes out of the folders that this one writes."""


def start_folder(final: Path) -> Path:
    """An empty folder beside `final` to write into, this process's own until it is published or the process ends.

    What a killed run left of exactly that name is removed, or gets its name back if it is all there is. Raises
    ValueError while another process writes there; where the file system has no locks, that goes unnoticed.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f"{NEW}{final.name}")
    _let_go(temporary)
    temporary.mkdir(exist_ok=True)
    _hold(temporary, final)
    for leftover in temporary.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
    restore_former(final)
    if (former := _former(final)).exists():
        shutil.rmtree(former)
    return temporary


def publish_folder(temporary: Path, final: Path) -> None:
    """Give a finished folder its name; a former one of that name is removed.

    If this fails, the former one is back and the new one removed: it may fill the disk.
    """
    former = _former(final)
    try:
        for file in temporary.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_directory(temporary)
        if final.exists():
            final.rename(former)
        temporary.replace(final)
        sync_directory(final.parent)
        shutil.rmtree(former, ignore_errors=True)
    except BaseException:
        restore_former(final)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        _let_go(temporary)  # last: the next one removes the former folder too


def _hold(temporary: Path, final: Path) -> None:
    """Lock the folder itself: a kill frees it, and no other file is left behind."""
    taken = ValueError(f"{final}: another process is writing it; wait until it has ended, or choose another folder")
    try:
        held = os.open(temporary, os.O_RDONLY)
    except FileNotFoundError:
        raise taken from None
    _HELD[temporary] = held
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _let_go(temporary)
        raise taken from None
    except OSError:
        return  # no locks here
    # The holder may have published or removed it meanwhile: then what is locked has another name, or none.
    if not temporary.exists() or not os.path.samestat(os.fstat(held), temporary.stat()):
        _let_go(temporary)
        raise taken


def _let_go(temporary: Path) -> None:
    if (held := _HELD.pop(temporary, None)) is not None:
        os.close(held)


def _former(final: Path) -> Path:
    return final.with_name(f"{OLD}{final.name}")


def restore_former(final: Path) -> None:
    """Undo the first of the two renames where the second never came; other ranks may do the same."""
    if not final.exists():
        with contextlib.suppress(FileNotFoundError):
            _former(final).rename(final)
