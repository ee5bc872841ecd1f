"""What a measurement was made with: the commit of this program, the machine's cores, versions of packages.

Costs: asks git for the commit.
"""

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def find_commit(given: str = "") -> str | None:
    """What is given, or what the file of that name holds; else the commit of this program's own repository.

    With ``-dirty`` where files differ from it; None without a repository.
    """
    if given:
        return Path(given).read_text(encoding="utf-8").strip() if Path(given).is_file() else given
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.SubprocessError):  # no git here, or it does not answer
        return None
    return found.stdout.strip() or None


def cores() -> str:
    """This machine without its GPUs, in words."""
    return f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, {platform.system()}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
