"""Damage to a dataset, or to the cache it is made from: every kind is found, and the file is named.

python -m tests.faults --only flips cache
"""

import contextlib
import functools
import io
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.pack import pack
from pipeline.shards import PackedDataset, verify_hashes
from tests.scene import Count, Scene, content

PAGE = 4096


def check(dataset: Path) -> str:
    """What ``verify`` says of a dataset: the error's text, "" if it holds. Another error than a clear one is raised."""
    try:
        verify_hashes(PackedDataset.open(dataset))
    except (ValueError, OSError) as error:
        return str(error)
    return ""


@contextlib.contextmanager
def altered(file: Path, data: bytes | None) -> Iterator[None]:
    """Other bytes in a file, or no file at all, for as long as this lasts."""
    whole = file.read_bytes()
    file.chmod(0o644)
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    try:
        yield
    finally:
        file.write_bytes(whole)
        file.chmod(0o444)


def damage_dataset(scene: Scene, *, seed: int, num_flips: int) -> Count:
    """Flip bits, truncate, extend, zero pages, swap, remove, add and exchange files; ``verify`` must name each."""
    count, rng = Count(), np.random.default_rng(seed)
    settings = scene.settings("damaged")
    other = scene.settings("damaged", out=scene.root / "damaged" / "other", seed=1)  # equal sizes, another recipe
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pack(settings)
        pack(other)
    out = settings.out
    files = sorted(p for p in out.rglob("*") if p.is_file())
    shards = [p for p in files if p.suffix == ".arrow"]
    found = functools.partial(_found, count, out)
    _flips(files, rng, num_flips, found)
    for file in files:
        whole = file.read_bytes()
        for cut in sorted({0, len(whole) // 2, max(0, len(whole) - PAGE), len(whole) - 1}):
            with altered(file, whole[:cut]):
                found("truncated", file)
        for more in (b"\0", b"\n", b" ", whole):
            with altered(file, whole + more):
                found("extended", file)
        for at in range(0, len(whole), PAGE):
            zeroed = whole[:at] + bytes(min(PAGE, len(whole) - at)) + whole[at + PAGE :]
            if zeroed != whole:
                with altered(file, zeroed):
                    found("zeroed pages", file)
        with altered(file, None):
            found("missing", file)
    _exchanged(shards, out, other.out, found)
    for name in ("shard-00099.arrow", "notes.txt", "tokenizer/x", "sub/y", ".hidden", ".shard-00000.arrow.x.tmp"):
        foreign = out / name
        foreign.parent.mkdir(exist_ok=True)
        foreign.write_bytes(b"")
        found("foreign", foreign)
        foreign.unlink()
    count.check("restored", holds=check(out) == "", says=check(out))
    return count


def _found(count: Count, out: Path, kind: str, file: Path) -> None:
    try:
        says = check(out)
    except Exception as error:
        says = f"not a clear error: {error!r}"
    named = file.relative_to(out).as_posix() in says
    count[kind] += 1
    count["found and named"] += named
    count.check(f"{kind} {file.name}", holds=named, says=says[:300])


def _flips(files: list[Path], rng: np.random.Generator, num: int, found: Callable[[str, Path], None]) -> None:
    """Half of the bits anywhere, so that each byte is as likely as another, half in a file chosen first."""
    sizes = np.array([file.stat().st_size for file in files])
    for i in range(num):
        file = files[int(rng.choice(len(files), p=sizes / sizes.sum() if i % 2 else None))]
        at, bit = int(rng.integers(file.stat().st_size)), int(rng.integers(8))
        file.chmod(0o644)
        with file.open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << bit]))
            opened.flush()
            found("bit flips", file)
            opened.seek(at)
            opened.write(bytes([byte]))
        file.chmod(0o444)


def _exchanged(shards: list[Path], out: Path, other: Path, found: Callable[[str, Path], None]) -> None:
    for one, two in pairwise(shards):
        first, second = one.read_bytes(), two.read_bytes()
        with altered(one, second), altered(two, first):
            found("swapped", min(one, two))
    for shard in shards:
        foreign = (other / shard.name).read_bytes()
        with altered(shard, foreign):
            found("of another dataset", shard)
    for name in ("rejects.jsonl", "tokenizer/tokenizer.json", "manifest.json"):
        if (other / name).read_bytes() != (out / name).read_bytes():
            with altered(out / name, (other / name).read_bytes()):
                # Another dataset's whole manifest is a good one: it is the files that are not its own.
                found("of another dataset", out / (name if name != "manifest.json" else "shard-0000"))


def damage_cache(scene: Scene, *, seed: int, num_flips: int) -> Count:
    """Flip bits in the cache and in the records of an unfinished run: the same bytes come out, or a clear error."""
    count, rng = Count(), np.random.default_rng(seed)
    settings = scene.settings("flipped")
    base = settings.out.parent
    base.mkdir()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pack(whole := scene.settings("unflipped"))
        right = content(whole.out)
        _unfinished(settings)
        shutil.copytree(base, keep := scene.root / "unfinished")
        for i in range(num_flips):
            shutil.rmtree(base)
            shutil.copytree(keep, base)
            files = sorted(p for p in settings.cache_dir.rglob("*") if p.is_file())
            files += sorted(settings.out.glob("shard-*"))
            kinds = sorted({_kind(p) for p in files})
            kind = kinds[i % len(kinds)]
            chosen = [p for p in files if _kind(p) == kind]
            file = chosen[int(rng.integers(len(chosen)))]
            data = bytearray(file.read_bytes())
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            file.chmod(0o644)
            file.write_bytes(data)
            count[f"flips in {kind}"] += 1
            try:
                pack(settings)
            except (ValueError, OSError):
                count["clear errors"] += 1
                continue
            except Exception as error:
                count.check(f"{kind} {i}", holds=False, error=repr(error)[:300])
                continue
            differs = [name for name, data in content(settings.out).items() if data != right[name]]
            count.check(f"{kind} {i}", holds=not differs, differs=differs)
            count["the same bytes"] += not differs
    return count


def _kind(path: Path) -> str:
    stem = path.name.split("-")[0]
    return {"block": f"block{path.suffix}", "shard": f"shard{path.suffix}"}.get(stem, path.name)


def _unfinished(settings: Any) -> None:
    """A run that stops just before its manifest is written."""
    import pipeline.publish

    real = pipeline.publish.Run.finish

    def stop(*_: Any) -> None:
        raise OSError(28, "stopped here")

    pipeline.publish.Run.finish = stop  # type: ignore[method-assign]
    try:
        pack(settings)
    except OSError:
        return
    finally:
        pipeline.publish.Run.finish = real  # type: ignore[method-assign]
