"""The folders that a run writes to: refused before anything is read if they cannot serve, explained if they fail later.

Costs: a folder made and removed again for each place that is missing.
"""

import errno
import os
import tempfile
from pathlib import Path

_ADVICE = {
    errno.ENOSPC: "Make room",
    errno.EDQUOT: "Make room, or have the quota raised",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f), or choose a file system that allows larger files",
    errno.EACCES: "Give this user the right to it, or choose another place",
    errno.EPERM: "Give this user the right to it, or choose another place",
    errno.EROFS: "Choose a place that can be written to",
}


def check_place(flag: str, folder: Path, *, write: bool) -> None:
    """Refuse a folder that cannot be made or written to.

    Args:
        flag: the option that names it.
        folder: one that is there, or may be missing together with folders above it.
        write: try whether it can be written to; otherwise only look at what is there, and make nothing.

    Raises:
        ValueError: it is a file, lies under one, or cannot be written to; says which.
    """
    here = folder.absolute()
    try:
        while not _is_there(here):
            here = here.parent
        if not here.is_dir():
            which = "this" if here == folder.absolute() else str(here)
            what = "a file" if here.exists() else "a link to nothing"
            raise ValueError(f"{flag} {folder}: {which} is {what}; choose another folder")
        if write and not os.access(here, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if write and here != folder.absolute():  # some file systems allow none, whatever the rights say
            Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=here)).rmdir()
    except OSError as error:
        what = "cannot be written to" if here == folder.absolute() else f"cannot be made in {here}"
        raise ValueError(f"{flag} {folder}: this {what} ({error.strerror}); choose another folder") from None


def _is_there(path: Path) -> bool:
    """Whether there is anything, a link to nothing too. Raises OSError for a name that no file can have."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def explained(error: OSError, places: dict[str, str]) -> str:
    """What the system said, in words: which option's place, why, what to do. What is in words already is left alone.

    Args:
        error: as it was raised.
        places: the path behind each option.
    """
    if error.errno is None:
        return str(error)
    where = ""
    if isinstance(error.filename, str | bytes | os.PathLike):  # a number, where a file was opened by one
        path = Path(os.fsdecode(error.filename))
        held = [flag for flag, place in places.items() if path.absolute().is_relative_to(Path(place).absolute())]
        where = f"{held[0]} {places[held[0]]}: {path}: " if held else f"{path}: "
    advice = _ADVICE.get(error.errno, "Put that right")
    return f"{where}{error.strerror}. {advice}; the same command goes on from here."
