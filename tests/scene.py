"""A dataset to break: a source, a tokenizer, the command that packs them, and what is right in the end.

Small, yet of several blocks and several shards, so that an interruption can fall between any two of them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.manifest import MANIFEST, DatasetError
from pipeline.pack import Settings
from pipeline.shards import PackedDataset, verify_hashes
from tests.chatml import write_tokenizer
from tests.chats import TEXT, write_parquet

ROOT = Path(__file__).resolve().parent.parent
MAX_TOKENS = 36


class Count(Counter[str]):
    """Figures of one kind of fault, and what went wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def check(self, what: str, *, holds: bool, **details: Any) -> None:
        """Note a fault unless something holds."""
        if not holds:
            self.faults.append(f"{what}: {details}")


@contextlib.contextmanager
def noting(count: Count, what: str) -> Iterator[None]:
    """Note what goes wrong and go on."""
    try:
        yield
    except Exception as error:
        count.check(what, holds=False, error=repr(error)[:500])


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What is packed, again and again, into folders below ``root``."""

    root: Path
    """Everything lies below it."""
    source: Path
    """A parquet file of several row groups."""
    tokenizer: Path
    """Folder of a small tokenizer."""
    rows_in_shard: int | None = None
    """Rows of a shard in forked runs, so that few rows make several; the format's own number for None."""

    def settings(self, name: str, *, workers: int = 1, **changes: Any) -> Settings:
        """Settings for the folders ``name/out`` and ``name/cache``."""
        folders = {"out": self.root / name / "out", "cache_dir": self.root / name / "cache"}
        base = {"source": str(self.source), "tokenizer": str(self.tokenizer), "max_tokens": MAX_TOKENS} | folders
        base["overflow"] = "split"
        return Settings(**(base | {"workers": workers} | changes))


def make_scene(root: Path, *, num_chats: int = 3600, num_blocks: int = 6, rows_in_shard: int | None = None) -> Scene:
    """Chats of one or two short rounds, some of them rejected, cut or escaped."""
    rng = np.random.default_rng(0)
    words = TEXT.split()
    picks = rng.integers(0, len(words), (num_chats, 8))
    lengths = rng.integers(1, 5, (num_chats, 4))
    chats: list[Any] = []
    for i in range(num_chats):
        texts = [" ".join(words[w] for w in picks[i][: lengths[i][j]]) for j in range(4 if i % 5 == 0 else 2)]
        roles = ("user", "assistant") * 2
        chats.append([{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)])
    for i in range(0, num_chats, 101):
        chats[i] = [] if i % 2 else [{"role": "user", "content": "write <|im_end|>"}, *chats[i][1:]]
    source = write_parquet(root / "train.parquet", chats, rows_in_group=-(-num_chats // num_blocks))
    return Scene(root=root, source=source, tokenizer=write_tokenizer(root / "tok"), rows_in_shard=rows_in_shard)


def arguments(settings: Settings) -> list[str]:
    """The command line's arguments for some settings."""
    names = ("source", "tokenizer", "out", "cache_dir", "max_tokens", "overflow", "workers")
    return [part for n in names for part in (f"--{n.replace('_', '-')}", str(getattr(settings, n)))]


def start(settings: Settings, *program: str) -> "subprocess.Popen[str]":
    """Start packing in a process group of its own; Ctrl-C works in it whatever the shell has handed down."""
    return subprocess.Popen(
        [sys.executable, *(program or ("-m", "pipeline.pack")), *arguments(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end_group(process: "subprocess.Popen[str]", number: int) -> tuple[str, str]:
    """Send a signal to a process and all its workers, wait, return its output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    return process.communicate(timeout=600)


def content(out: Path) -> dict[str, Any]:
    """Every file's bytes; of the manifest what is the same for every run."""
    files = {p.relative_to(out).as_posix(): p for p in out.rglob("*") if p.is_file()}
    body = json.loads(files.pop(MANIFEST).read_bytes())
    kept = {k: v for k, v in body.items() if k not in ("created", "checksum")}
    return {name: path.read_bytes() for name, path in files.items()} | {MANIFEST: kept}


def is_whole(out: Path) -> bool:
    """True: there is a dataset and every hash holds. False: there is none. Raises DatasetError for anything else."""
    if (out / MANIFEST).exists():
        verify_hashes(PackedDataset.open(out))
        return True
    try:
        PackedDataset.open(out)
    except DatasetError:
        return False
    raise AssertionError(f"{out}: opened without a manifest")


def leftovers(settings: Settings) -> list[str]:
    """What a finished run must not leave behind: temporary files, records of an unfinished run.

    Apart from a temporary note of some hundred bytes in the cache: another run may be writing one at this moment.
    """
    temporary = [*settings.out.rglob("*.tmp"), *settings.cache_dir.glob("*/*block-*.tmp")]
    return [str(p) for p in (*temporary, *(settings.cache_dir / "runs").glob("*"))]
