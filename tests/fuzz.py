"""Feed the readers what nobody would write: chats and files of any shape, damaged parquet, forged manifests.

    python -m tests.fuzz --minutes 10            # CPU minutes, in processes that are watched

Right is: a clear error (ValueError or OSError that names the file), or rows and typed rejects that account for every
chat that was read. Wrong is anything else: another exception, a crash, a hang. Each kind prints its number of examples.
Examples of chats, lines and manifests are drawn by hypothesis from ``--seed`` on.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pipeline.encode import Encoder, encode_block, open_block
from pipeline.manifest import REJECT_REASONS, differing_fields
from pipeline.render import MismatchError
from pipeline.shards import PackedDataset, verify_hashes
from pipeline.source import open_source
from pipeline.tokenizer import read_folder
from pipeline.verify import check_recipe
from tests.chatml import TOOLS, write_tokenizer
from tests.packed import make_packed, random_rows
from tests.strange import JSONL, altered_bytes, damaged, good_files, manifests, tables

SECONDS = 20
"""An example that takes longer hangs."""

# ------------------------------------------------------------------------------------------ what is right


class WrongError(Exception):
    """What a reader did that it must not do."""


@cache
def encoders() -> tuple[Encoder, Encoder]:
    """A fast encoder and the reference, with a template that writes tools and calls."""
    files = read_folder(write_tokenizer(Path(tempfile.mkdtemp()), TOOLS), model=None)
    return tuple(Encoder(files, template_kwargs={}, targets="assistant", fast=fast) for fast in (True, False))  # type: ignore[return-value]


def check_source(data: bytes, suffix: str, folder: Path) -> str:
    """Read and encode a source of these bytes. What became of it; raises WrongError, or what the reader raises."""
    path = folder / f"train.{suffix}"
    path.write_bytes(data)
    names: dict[str, Any] = {"messages_column": "messages", "tools_column": None}
    more: dict[str, Any] = {"split": "train", "revision": None, "limit": None, "remember": False}
    try:
        source = open_source(str(path), cache_dir=folder, **names, **more)
        blocks = source.blocks()
        fast, reference = encoders()
        for block in blocks:
            try:
                record = encode_block(fast, block, folder)
            except MismatchError:
                record = encode_block(reference, block, folder)
            num_documents = open_block(folder, record).num_rows
            rejected = {r.doc_id for r in record.rejects if r.what == "rejected"}
            if block.num_rows != num_documents + len(rejected):
                raise WrongError(f"{block.num_rows} chats, {num_documents} documents, {len(rejected)} rejected")
            if any(r.what == "rejected" and r.reason not in REJECT_REASONS for r in record.rejects):
                raise WrongError(f"a reason that is not in the list: {record.rejects}")
    except (ValueError, OSError) as error:
        if str(path) not in str(error):
            raise WrongError(f"an error that does not name the file: {error!r}") from error
        return "clear error"
    return "read"


@cache
def valid_dataset() -> Path:
    """A small dataset whose manifest is forged."""
    rows = random_rows(num_rows=9, max_tokens=8, vocab_size=99)
    return make_packed(Path(tempfile.mkdtemp()) / "d", rows, max_tokens=8)


def check_manifest(data: bytes) -> str:
    """Read a manifest of these bytes, and the dataset it would be of, as ``verify`` and a trainer would."""
    dataset = valid_dataset()
    path = dataset / "manifest.json"
    path.chmod(0o644)
    path.write_bytes(data)
    uses: tuple[Callable[[PackedDataset], Any], ...] = (
        lambda opened: opened.manifest.to_bytes(),
        verify_hashes,
        check_recipe,
        lambda opened: [opened[i] for i in range(min(3, len(opened)))],
        lambda opened: opened[len(opened) - 1],
        lambda opened: differing_fields(opened.manifest.recipe, {"pack": 1}),
    )
    refused = 0
    for use in uses:
        try:
            use(PackedDataset.open(dataset))
        except (ValueError, OSError, IndexError) as error:
            if str(dataset) not in str(error) and not isinstance(error, IndexError):
                raise WrongError(f"an error that does not name the file: {error!r}") from error
            refused += 1
    return "read" if not refused else "refused at once" if refused == len(uses) else "refused later"


@cache
def valid_manifest() -> bytes:
    """Its bytes as they were."""
    return (valid_dataset() / "manifest.json").read_bytes()


# ------------------------------------------------------------------------------------------------ running

Check = Callable[[Any, Path], str]
KINDS: dict[str, tuple[Any, Check]] = {
    "jsonl": (JSONL, lambda data, folder: check_source(data, "jsonl", folder)),
    "parquet": (tables(), lambda data, folder: check_source(data, "parquet", folder)),
    "damaged parquet": (damaged, lambda data, folder: check_source(data, "parquet", folder)),
    "manifest": (st.deferred(lambda: manifests(valid_manifest())), lambda data, folder: check_manifest(data)),
    "manifest bytes": (lambda rng: altered_bytes(rng, valid_manifest()), lambda data, folder: check_manifest(data)),
}
"""What draws an example (a strategy, or a function of a random generator), and what is right for it."""


class Findings:
    """Counts of what became of examples; one example of each way to go wrong."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, tuple[str, bytes]] = {}

    def try_one(self, check: Check, data: bytes, folder: Path) -> None:
        """Check one example, its bytes on disk before: a crash leaves them there."""
        (folder / "example").write_bytes(data)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            self.counts[check(data, folder)] += 1
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "/pipeline/" in f.filename]
            where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
            key = f"{type(error).__name__} at {where}: {str(error)[:80] if isinstance(error, WrongError) else ''}"
            self.counts["WRONG"] += 1
            self.faults.setdefault(key[:100], (traceback.format_exc()[-1500:], data))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def examples(kind: str, number: int, count: int, folder: Path) -> Findings:
    """Check ``count`` examples of a kind, the ones that ``number`` gives."""
    drawn, check = KINDS[kind]
    findings = Findings()
    if not isinstance(drawn, st.SearchStrategy):
        rng = random.Random(number)
        for _ in range(count):
            findings.try_one(check, drawn(rng), folder)
        return findings

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(drawn)
    def try_each(data: bytes) -> None:
        findings.try_one(check, data, folder)

    try_each()
    return findings


def watched(kind: str, number: int, count: int, keep: Path) -> Findings:
    """``examples`` in a process of its own: a crash or a hang there is a finding here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        if not (child := os.fork()):
            code = 1
            try:
                resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                with Path(os.devnull).open("w") as nothing, contextlib.redirect_stderr(nothing):
                    findings = examples(kind, number, count, folder)
                faults = {key: (text, data.hex()) for key, (text, data) in findings.faults.items()}
                (folder / "result").write_text(json.dumps([findings.counts, faults]))
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        found = Findings()
        if (code := os.waitstatus_to_exitcode(status)) == 0:
            counts, faults = json.loads((folder / "result").read_text())
            found.counts.update(counts)
            found.faults = {key: (text, bytes.fromhex(data)) for key, (text, data) in faults.items()}
        else:
            how = "a hang" if code == -signal.SIGPROF else f"a crash ({code})"
            example = folder / "example"
            found.counts["WRONG"] += 1
            found.faults[how] = ("", example.read_bytes() if example.exists() else b"")
        for key, (_, data) in found.faults.items():
            keep.mkdir(exist_ok=True)
            (keep / f"{kind}-{abs(hash(key)) % 10**6}".replace(" ", "-")).write_bytes(data)
    return found


def main() -> int:
    """The command line. Returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(KINDS), help="kinds of examples")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where wrong examples are kept")
    parser.add_argument("--batch", type=int, default=200, help="examples of a process")
    options = parser.parse_args()
    total: dict[str, Findings] = {kind: Findings() for kind in options.only}
    seconds: Counter[str] = Counter()
    valid_manifest(), encoders(), good_files()
    number = options.seed
    while sum(seconds.values()) < 60 * options.minutes or len(seconds) < len(options.only):  # every kind once at least
        kind = min(options.only, key=lambda k: seconds[k])
        before = os.times()
        found = watched(kind, number, options.batch, options.keep)
        after = os.times()
        seconds[kind] += after.children_user + after.children_system - before.children_user - before.children_system
        total[kind].counts.update(found.counts)
        for key, fault in found.faults.items():
            if key not in total[kind].faults:
                total[kind].faults[key] = fault
                print(f"WRONG {kind}, seed {number}: {key}\n{fault[0]}\n{fault[1][:300]!r}\n", flush=True)
        number += 1
    for kind, findings in total.items():
        what = ", ".join(f"{n:,} {name}" for name, n in sorted(findings.counts.items()))
        print(f"{kind:<16} {findings.counts.total():,} examples in {seconds[kind]:.0f} CPU s: {what}")
    return int(any(findings.faults for findings in total.values()))


if __name__ == "__main__":
    sys.exit(main())
