"""The folder of a run: its name, and ``config.json``, which says what was run on what with what.

    RUN/config.json     every setting, dataset, model, versions, commit, machine, kernels, memory
    RUN/metrics.jsonl   see trainer.metrics
    RUN/checkpoints/    see trainer.checkpoint
    RUN/export/         a Hugging Face folder, after --method full
    RUN/adapter/        a PEFT folder, after --method lora
    RUN/.lock           held by the process that writes here; the file stays, the hold ends with the process

Guarantees: a folder that holds something is never written into unless the run is resumed, by one process at a time; a
run is resumed with its own settings, dataset and model alone, but for those that extend it, say where and how fast, or
are the way out of a divergence.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import platform
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pyarrow
import torch
import transformers

from pipeline import __version__
from pipeline.provenance import find_commit
from pipeline.shards import Manifest
from trainer import checkpoint
from trainer.report.log import CONFIG, LOCK

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RECORD_VERSION = 1
"""Version of the fields of ``config.json``."""

FREE_SETTINGS = (
    "shards", "eval_shards", "micro_rows", "steps", "epochs", "eval_every", "save_every", "keep", "out", "resume",
    "accept_slow_kernels", "recompute", "trace", "track", "lr", "warmup_steps", "clip",
)  # fmt: skip
"""Settings that may differ when a run is resumed: the dataset is known by its identity, not its path; the number of
rows at a time on one rank, as the number of ranks, does not enter the order; the learning rate, its warm-up and the
clipping are what to change after a divergence; the others extend or watch the run."""

TOLD_SETTINGS = ("clip", "epochs", "lr", "model", "steps", "warmup_steps")
"""Settings that may differ and change what the remaining steps do, or what is exported. A model's folder may have been
moved: its configuration is compared, and by ``trainer.checkpoint`` the frozen weights under adapters. The learning rate
is computed from these and the number of the step, counted from the beginning of the run: it goes on as if they had
always been so. Resumed after step 500 with ``--warmup-steps 1000`` it begins at half of ``--lr``; a warm-up shorter
than the steps done is over."""

_TEMPORARY = f".{CONFIG}.tmp"
"""What is left of ``config.json`` by a start that fails while it is written."""

_NOTHING_YET = (LOCK, CONFIG, _TEMPORARY)
"""What lies in the folder of a run that ended before its first step: nothing is lost if another begins there."""


def default_folder(*, model: str, dataset_id: str, today: datetime.date) -> Path:
    """``runs/<date>-<model>-<first 8 digits of the dataset's identity>``."""
    name = re.sub("@[0-9a-f]{40}$", "", model).removesuffix(".json").rstrip("/")
    name = name.replace(":", "-").rsplit("/", 1)[-1] if "/" in name else name.replace(":", "-")
    return Path("runs") / f"{today.isoformat()}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{dataset_id[:8]}"


def require_folder(out: Path, *, resume: bool, held: bool = True) -> None:
    """Check that a run may begin, or go on, in ``out``.

    Args:
        out: the folder.
        resume: whether it goes on.
        held: no other process can be beginning there: what a start left that ended before its first step, its record
            alone, is no hindrance then.

    Raises:
        ValueError: a new run in a folder that holds something, or resuming where no run is.
    """
    if resume and not (out / CONFIG).is_file():
        raise ValueError(f"--resume: {out / CONFIG} does not exist, so no run began there. Pass its folder as --out.")
    if (
        not resume
        and out.exists()
        and (not out.is_dir() or any(path.name not in _NOTHING_YET for path in out.iterdir()) or not _may_go(out, held))
    ):
        raise ValueError(
            f"--out {out} exists and is not empty. Add --resume to go on with the run in it, or choose another --out."
        )


def _may_go(out: Path, held: bool) -> bool:  # noqa: FBT001
    """Whether the config.json there is none, or the record of a run that may be replaced: not one of a model."""
    if not (out / CONFIG).exists():
        return True
    try:
        return held and bool(read(out))
    except ValueError:
        return False


@contextlib.contextmanager
def locked(out: Path, *, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the folder of a run, making it if need be; a kill frees it too. Gives whether it is held indeed.

    Args:
        out: the folder.
        say: takes a warning where the file system has no locks.

    Raises:
        ValueError: another process holds it.
    """
    out.mkdir(parents=True, exist_ok=True)
    held = True
    with (out / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"--out {out}: another process is training there ({file.read().strip()}). Wait until it has ended, or "
                "stop it, or choose another --out."
            ) from None
        except OSError as error:
            say(f"warning: {out} cannot be locked ({error.strerror}): see to it that no other process trains there")
            held = False
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield held


def describe(
    *,
    settings: dict[str, Any],
    manifest: Manifest,
    eval_manifest: Manifest | None,
    model_config: dict[str, Any],
    device: torch.device,
    world_size: int,
    total_steps: int,
    kernels: list[dict[str, Any]],
    memory: dict[str, int],
) -> dict[str, Any]:
    """The content of ``config.json``; ``settings`` as JSON values, all of them resolved."""
    return {
        "version": RECORD_VERSION,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "total_steps": total_steps,  # follows from settings and dataset
        "dataset_id": manifest.dataset_id,
        "fingerprint": manifest.fingerprint,
        "eval_dataset_id": eval_manifest.dataset_id if eval_manifest else None,
        "eval_fingerprint": eval_manifest.fingerprint if eval_manifest else None,
        "model": model_config,
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, transformers, numpy, pyarrow)},
            "qwen-packed-finetune": __version__,
        },
        "commit": find_commit(),
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "ranks": world_size,
        },
        "kernels": kernels,
        "memory_estimate_bytes": memory,
    }


def write(out: Path, record: dict[str, Any], *, resume: bool) -> None:
    """Write ``config.json``, whole or not at all; a resumed run keeps its earlier starts under ``earlier``."""
    path = out / CONFIG
    earlier: list[dict[str, Any]] = []
    if resume:
        former = read(out)
        earlier = [*former.pop("earlier", []), former]
    out.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(_TEMPORARY)
    temporary.write_text(json.dumps(record | {"earlier": earlier}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def read(out: Path) -> dict[str, Any]:
    """Read ``config.json``. Raises ValueError where it is damaged or of another version."""
    path = out / CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version, _ = record["version"], record["settings"]["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}). Begin a new run in another --out.") from None
    if version != RECORD_VERSION:
        raise ValueError(f"{path} has version {version!r}; this program reads {RECORD_VERSION}. Begin a new run.")
    return dict(record)


def require_same_run(former: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """Check that ``record`` continues the run of ``former``.

    Returns:
        a line "--flag: then -> now" for each setting that differs, may differ, and changes what the next steps do.

    Raises:
        ValueError: naming each field that differs.
    """
    former, record = (json.loads(json.dumps(r)) for r in (former, record))
    if lines := _differences(_what_decides(former), _what_decides(record)):
        raise ValueError(
            "--resume: the run in this folder was begun with other values (then -> now):\n  "
            + "\n  ".join(lines)
            + "\nPass the same ones, or begin a new run in another --out."
        )
    return _differences(*(_what_is_told(r) for r in (former, record)))


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {before.get(name)!r} -> {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _flags(settings: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {f"--{name.replace('_', '-')}": settings[name] for name in names if name in settings}


def _what_is_told(record: dict[str, Any]) -> dict[str, Any]:
    """Flat: what may differ and changes what comes next; the evaluation rows by their identity."""
    return {"--eval-shards": record["eval_dataset_id"], **_flags(record["settings"], TOLD_SETTINGS)}


def _what_decides(record: dict[str, Any]) -> dict[str, Any]:
    """Flat: the dataset's identity, settings by their flag, the model's configuration field by field."""
    settings = {**record["settings"], "model": _without_path(record["settings"]["model"])}
    flags = _flags(settings, settings.keys() - set(FREE_SETTINGS))
    # Another version of transformers puts its own number there.
    model = {f"model.{k}": v for k, v in record["model"].items() if k != "transformers_version"}
    return {"dataset_id": record["dataset_id"], **flags, **model}


def _without_path(model: str | None) -> str | None:
    """A ``--model`` value, but for where a folder or a configuration lies: its content is compared."""
    if model is None or model.startswith("random:"):
        return "random:CONFIG.json" if model is not None and model.endswith(".json") else model
    return model if re.search("@[0-9a-f]{40}$", model) else "a folder"


def plain(settings: "DataclassInstance") -> dict[str, Any]:
    """Settings as JSON values."""
    found = dataclasses.asdict(settings)
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def command(settings: "DataclassInstance") -> str:
    """The command line that gives these settings."""
    words = ["python", "-m", "trainer.train"]
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name, value in plain(settings).items():
        if value != defaults[name]:
            flag = "--" + name.replace("_", "-")
            each = value if isinstance(value, tuple) else [value]
            words += [flag] if value is True else [word for one in each for word in (flag, str(one))]
    return shlex.join(words)


def how_to_resume(out: Path, settings: "DataclassInstance") -> str:
    """Where an interrupted run can go on, and with which command; ``settings`` are those of resuming it."""
    newest = checkpoint.latest(out)
    saved = f"The newest checkpoint is {newest}" if newest else "There is no checkpoint yet"
    return f"{saved}; go on with:\n  {command(settings)}"


def how_to_calm_down(out: Path, settings: "DataclassInstance") -> str:
    """What to do about a run that diverged; ``settings`` are those of resuming it."""
    saved = checkpoint.steps(out)
    if not saved:
        return (
            "There is no checkpoint yet. Begin again in another --out with a lower --lr, a longer --warmup-steps or a "
            "smaller --clip; if it was the first step or the evaluation before it, see whether the weights are whole."
        )
    before = "; if that diverges in its first step, remove it: the one before is there too" if len(saved) > 1 else ""
    return f"Lower --lr, lengthen --warmup-steps or make --clip smaller. {how_to_resume(out, settings)}{before}"
