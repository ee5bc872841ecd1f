"""Break packing in every way that can be thought of, and count.

    python -m tests.faults                       # everything; some ten minutes on two cores
    python -m tests.faults --only kill disk      # kill, steps, steps-2, steps-3, disk, ctrl-c, two, flips, cache

Each kind prints one line of figures; a fault found is printed in full, and the exit status is then 1. Which moments,
steps, bytes and bits are hit follows from ``--seed``; how far a run has come at a moment depends on the machine.
Disk full needs the right to mount a tmpfs.
"""

import argparse
import contextlib
import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import pipeline.pack
from pipeline.manifest import MANIFEST
from pipeline.pack import Settings, main
from tests.damage import damage_cache, damage_dataset
from tests.scene import Count, Scene, arguments, content, end_group, is_whole, leftovers, make_scene, noting, start

STEPS = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "chmod", "link")
"""The calls of ``os`` that change what lies on a disk."""


# ---------------------------------------------------------------------------------------------- hooks


def kill_at(n: int) -> None:
    """From now on, kill this process and its group at the ``n``-th step, just before it."""
    count = [0]

    def hooked(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **more: Any) -> Any:
            count[0] += 1
            if count[0] == n:
                os.killpg(0, signal.SIGKILL)
            return real(*args, **more)

        return step

    for name in STEPS:
        setattr(os, name, hooked(getattr(os, name)))


def fill_at(n: int, folder: Path, leave: int) -> None:
    """From now on, fill the disk that ``folder`` lies on just before the ``n``-th file is begun."""
    count, real = [0], tempfile.mkstemp

    def step(*args: Any, **more: Any) -> Any:
        count[0] += 1
        if count[0] == n:
            fill(folder, leave)
        return real(*args, **more)

    tempfile.mkstemp = step


def fill(folder: Path, leave: int) -> None:
    """Fill a disk but for some bytes."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        room = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_bsize - leave))


def forked(scene: Scene, settings: Settings, hook: Callable[[], None], log: Path, *, name: str = "pack") -> int:
    """Pack in a forked process, its output in ``log``, after a hook; return its exit status, minus a signal's number.

    Its ``sys.argv[0]`` is ``name``; workers, which are started afresh, get that too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            os.setpgid(0, 0)
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if scene.rows_in_shard is not None:
                pipeline.pack.rows_per_shard = lambda _: scene.rows_in_shard  # type: ignore[attr-defined]
            sys.argv = [name, *arguments(settings)]
            hook()
            os._exit(main())
        os._exit(99)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def undisturbed(scene: Scene) -> dict[str, Any]:
    """What is right: the content that a run gives that nothing disturbs."""
    settings = scene.settings("right")
    scene.root.mkdir(exist_ok=True)
    status = forked(scene, settings, lambda: None, scene.root / "log")
    assert status == 0, (scene.root / "log").read_text()
    return content(settings.out)


# ---------------------------------------------------------------------------------------------- kill -9


def stage(settings: Settings) -> str:
    """How far an interrupted run had come, by what it left on disk."""
    out, cache = settings.out, settings.cache_dir
    if (out / MANIFEST).exists():
        return "after the manifest"
    if (out / "rejects.jsonl").exists():
        return "check"
    if [*out.glob("*.arrow"), *out.glob(".shard*")]:
        return "write"
    if not out.exists():
        return "start-up"
    return "encode" if [*cache.glob("*/block-*")] else "before the first block"


def finish(count: Count, scene: Scene, settings: Settings, right: dict[str, Any], what: str) -> None:
    """The same settings again, undisturbed: they complete and give the same bytes."""
    log = settings.out.parent / "log"
    status = forked(scene, settings, lambda: None, log)
    count.check(what, holds=status == 0, status=status, says=log.read_text()[-500:])
    if status == 0:
        same = content(settings.out) == right
        count.check(what, holds=same, why="other bytes")
        count["identical after the rerun"] += same


class Moments:
    """Moments spread over the whole run, as shares of the seconds that it takes; every other one with a full cache."""

    def __init__(self, scene: Scene, count: Count, right: dict[str, Any], *, seed: int, num: int) -> None:
        self._scene, self._count, self._rng, self._num = scene, count, np.random.default_rng(seed), num
        self._cache = scene.settings("right").cache_dir
        self._seconds: dict[tuple[int, bool], float] = {}
        for workers in (1, 2, 3):
            settings = scene.settings(f"whole{workers}-{seed}-{num}", workers=workers)
            self._seconds[workers, False], _, text = self._run(settings, 1e9, 0)
            count.check("undisturbed", holds=content(settings.out) == right, workers=workers, says=text[-300:])
            self._seconds[workers, True] = self._seconds[workers, False]

    def _run(self, settings: Settings, seconds: float, number: int) -> tuple[float, int, str]:
        begun, process = time.monotonic(), start(settings)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=min(seconds, 600))
        text = end_group(process, number)[1]
        return time.monotonic() - begun, process.returncode, text

    def interrupt(self, name: str, number: int) -> Iterator[tuple[Settings, int, str]]:
        """Runs that got a signal before their end, ``num`` of them: settings, exit status, output."""
        shares = self._rng.permutation((np.arange(self._num) + self._rng.random(self._num)) / self._num)
        for i, share in enumerate(shares):
            key = (1 + i % 3, i % 2 == 0)
            for attempt in range(20):
                settings = self._scene.settings(f"{name}{i}-{attempt}", workers=key[0])
                if key[1]:
                    shutil.copytree(self._cache, settings.cache_dir)
                seconds, status, text = self._run(settings, share * self._seconds[key], number)
                if status:
                    print(f"{name} {i + 1} of {self._num}: {stage(settings)}", file=sys.stderr)
                    yield settings, status, text
                    break
                # This machine was quicker than before. It may be so again, so that each attempt comes a bit earlier.
                self._seconds[key] = seconds * 0.95**attempt


def kill(scene: Scene, right: dict[str, Any], *, seed: int, num: int) -> Count:
    """kill -9 of the command and its workers at random moments spread over the whole run."""
    count = Count()
    for settings, status, _ in Moments(scene, count, right, seed=seed, num=num).interrupt("kill", signal.SIGKILL):
        count.check("kill", holds=status == -signal.SIGKILL, status=status)
        count["kills"] += 1
        count[f"in {stage(settings)}"] += 1
        with noting(count, f"kill of {settings.workers} workers"):
            whole = is_whole(settings.out)
            count["left no dataset" if not whole else "left a whole one"] += 1
        again = replace(settings, workers=1)
        finish(count, scene, again, right, f"rerun of {settings.out}")
        if not whole:
            count.check("left behind", holds=not leftovers(again), files=leftovers(again)[:3])
    return count


def steps(scene: Scene, right: dict[str, Any], *, seed: int, every: int = 1, workers: tuple[int, ...] = (1,)) -> Count:
    """kill -9 just before every call that changes what lies on the disk."""
    count = Count()
    for num_workers in workers:
        n = 1 + seed % every
        while True:
            settings = scene.settings(f"step{num_workers}-{n}", workers=num_workers)
            log = settings.out.parent / "log"
            status = forked(scene, settings, functools.partial(kill_at, n), log, name=f"kill_at {n}")
            if status == 0:
                break
            count.check(f"step {n}", holds=status == -signal.SIGKILL, status=status, says=log.read_text()[-500:])
            count[f"steps with {num_workers}"] += 1
            count[f"in {stage(settings)}"] += 1
            with noting(count, f"step {n}"):
                whole = is_whole(settings.out)
            finish(count, scene, settings, right, f"rerun after step {n}")
            if not whole:
                count.check("left behind", holds=not leftovers(settings), n=n, files=leftovers(settings)[:3])
            n += every
    return count


# ------------------------------------------------------------------------------------------- disk full


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """A tmpfs of ``size`` bytes. Raises OSError where it may not be mounted."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        raise OSError(errno.EPERM, done.stderr.decode().strip(), str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def check_full(count: Count, settings: Settings, status: int, text: str, what: str) -> None:
    """A run on a full disk: its error says so and names the place, and nothing half-published is left."""
    named = str(settings.out) in text or str(settings.cache_dir) in text
    clear = status == 2 and ("No space left" in text or "make room" in text) and "Traceback" not in text
    count.check(what, holds=clear and named, status=status, says=text[-400:])
    with noting(count, what):
        is_whole(settings.out)
    temporary = [p for p in leftovers(settings) if p.endswith(".tmp")]
    count.check(what, holds=not temporary, left=temporary)
    count["of them said before writing" if "make room" in text else "of them while writing"] += 1


def disk(
    scene: Scene, right: dict[str, Any], *, seed: int, leave: tuple[int, ...] = (0, 4096), every: int = 1
) -> Count:
    """A disk too small from the start, then one that another program fills before every single file."""
    count, mount = Count(), scene.root / "mnt"
    try:
        with mounted(mount, 2**14):
            pass
    except OSError as error:
        count[f"skipped: no tmpfs may be mounted here ({error.strerror})"] = 1
        return count
    for share in (0.0, 0.2, 0.5, 0.8, 0.95, 1.0)[::every]:  # of what is needed
        with mounted(mount, 2**14 + int(share * 2**21)):
            settings = scene.settings("mnt")
            status = forked(scene, settings, lambda: None, scene.root / "log")
            if status:
                count["sizes too small"] += 1
                check_full(count, settings, status, (scene.root / "log").read_text(), f"share {share}")
                subprocess.run(["mount", "-o", f"remount,size={2**25}", str(mount)], check=True)
                finish(count, scene, settings, right, f"larger than {share}")
    for room in leave:
        n = 1 + seed % every
        while True:
            with mounted(mount, 2**25):
                settings = scene.settings("mnt")
                hook = functools.partial(fill_at, n, mount, room)
                status = forked(scene, settings, hook, scene.root / "log")
                if not (mount / "filler").exists():
                    break
                (mount / "filler").unlink()
                count["files on a full disk"] += 1
                count["of them without harm"] += not status
                if status:
                    check_full(count, settings, status, (scene.root / "log").read_text(), f"file {n}, {room} left")
                count[f"in {stage(settings)}"] += 1
                whole = (settings.out / MANIFEST).exists()
                finish(count, scene, settings, right, f"room made after file {n}")
                count.check("left behind", holds=whole or not leftovers(settings), n=n, files=leftovers(settings)[:3])
            n += every
    return count


# -------------------------------------------------------------------------------------- Ctrl-C, two runs


def ctrl_c(scene: Scene, right: dict[str, Any], *, seed: int, num: int) -> Count:
    """SIGINT to the whole group, as a terminal sends it, at random moments."""
    count = Count()
    for settings, status, text in Moments(scene, count, right, seed=seed, num=num).interrupt("ctrl-c", signal.SIGINT):
        where = stage(settings)
        if where == "start-up" and "interrupted" not in text:  # Python itself answers until main begins
            count["during imports"] += 1
            count["of them with a traceback"] += "Traceback" in text
        elif where == "after the manifest" and status == -signal.SIGINT and "Traceback" not in text:
            count["while Python ended"] += 1
        else:
            where = "encode" if where == "start-up" and "digest" in text else where  # the empty folder is gone again
            count[f"in {where}"] += 1
            clear = status == 130 and "interrupted" in text and "Traceback" not in text
            count.check(f"Ctrl-C in {where}", holds=clear, status=status, says=text[-600:])
            temporary = [p for p in leftovers(settings) if p.endswith(".tmp")]
            count.check(f"Ctrl-C in {where}", holds=not temporary, left=temporary)
        with noting(count, f"Ctrl-C in {where}"):
            is_whole(settings.out)
        finish(count, scene, replace(settings, workers=1), right, f"rerun of {settings.out}")
    return count


def two(scene: Scene, right: dict[str, Any], *, seed: int, num: int) -> Count:
    """Two commands at once: on one folder, then on two folders with one cache."""
    rng, count = np.random.default_rng(seed), Count()
    for i in range(num):
        shared = i % 2 == 0
        one = scene.settings(f"two{i}", workers=1 + i % 3)
        other = one if shared else scene.settings(f"two{i}", out=one.out.parent / "out2", workers=1 + (i + 1) % 3)
        processes = [start(one)]
        time.sleep(float(rng.random()) * (0.5 if i % 4 < 2 else 0.01))
        processes.append(start(other))
        texts = [process.communicate(timeout=600)[1] for process in processes]
        codes = [process.returncode for process in processes]
        refused = [
            "another run is writing there" in text and code == 2 for text, code in zip(texts, codes, strict=True)
        ]
        right_end = all(c == 0 or (r and shared) for c, r in zip(codes, refused, strict=True)) and 0 in codes
        count.check(f"pair {i}", holds=right_end, codes=codes, says=[text[-400:] for text in texts])
        count["pairs on one folder" if shared else "pairs on one cache"] += 1
        count["refused"] += sum(refused)
        count["waited"] += sum("waiting for it" in text for text in texts)
        for settings in (one, other):
            with noting(count, f"pair {i}"):
                count.check(f"pair {i}", holds=is_whole(settings.out) and content(settings.out) == right)
                count.check(f"pair {i}", holds=not leftovers(settings), files=leftovers(settings)[:3])
    return count


# ------------------------------------------------------------------------------------------------- main


def run(names: list[str], *, seed: int, root: Path, short: bool = False) -> int:
    """Run some kinds, in their short form or whole, and print their figures. Returns the number of faults."""
    small = make_scene(root / "small", num_chats=300, num_blocks=3, rows_in_shard=64)
    large = make_scene(root / "large", num_chats=300, num_blocks=3) if short else make_scene(root / "large")
    right, every = {scene.root: undisturbed(scene) for scene in (large, small)}, 16 if short else 1
    num = dict.fromkeys(("kill", "ctrl-c", "two"), 2) | {"flips": 200, "cache": 12}
    if not short:
        num = {"kill": 50, "ctrl-c": 30, "two": 20, "flips": 2000, "cache": 200}
    kinds: dict[str, Callable[[], Count]] = {
        "kill": lambda: kill(large, right[large.root], seed=seed, num=num["kill"]),
        "steps": lambda: steps(small, right[small.root], seed=seed, every=every),
        "steps-2": lambda: steps(small, right[small.root], seed=seed, every=4 * every, workers=(2,)),
        "steps-3": lambda: steps(small, right[small.root], seed=seed, every=4 * every, workers=(3,)),
        "disk": lambda: disk(small, right[small.root], seed=seed, leave=(0,) if short else (0, 4096), every=every),
        "ctrl-c": lambda: ctrl_c(large, right[large.root], seed=seed, num=num["ctrl-c"]),
        "two": lambda: two(large, right[large.root], seed=seed, num=num["two"]),
        "flips": lambda: damage_dataset(large, seed=seed, num_flips=num["flips"]),
        "cache": lambda: damage_cache(small, seed=seed, num_flips=num["cache"]),
    }
    num_faults = 0
    for name in names or list(kinds):
        begun = time.monotonic()
        count = kinds[name]()
        print(f"{name:<8} {', '.join(f'{v:,} {k}' for k, v in count.items())}", end="")
        print(f", {len(count.faults)} faults in {time.monotonic() - begun:.0f} s", flush=True)
        for fault in count.faults:
            print(f"  FAULT {fault}", flush=True)
        num_faults += len(count.faults)
    return num_faults


if __name__ == "__mp_main__" and sys.argv[0].startswith("kill_at "):  # in a worker of a run that is to be killed
    kill_at(int(sys.argv[0].split()[1]))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="kinds; all of them by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a few of each, within seconds, as the tests run it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(options.only, seed=options.seed, root=Path(folder), short=options.short) > 0)
