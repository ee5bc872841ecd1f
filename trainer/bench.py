"""Measure training on this machine and write records of it.

    python -m trainer.bench ladder --shards data/packed --record data/records      how fast, from stock to ours
    python -m trainer.bench curves --shards data/packed --record data/records      do the losses agree
    python -m trainer.bench table data/records/2026-11-30-ladder-....json           the README's table

Each rung and each curve runs in a process of its own, so that neither memory nor a hidden package of one is there in
the next; when it is done, or out of time or memory, the record is written again, whole, with it in.

Guarantees: what was measured stays when something later fails or the run is cut short; what failed is in the record
with its reason; a rung measured again replaces its former self; a record that other settings made is refused before
anything runs; Ctrl-C and SIGTERM end the processes too.
Costs: importing and compiling for every process, half a minute on a machine that has the kernels in its cache.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from pipeline.cli import refuse_repeats
from pipeline.provenance import find_commit
from pipeline.shards import PackedDataset
from trainer import curves, distances, ladder
from trainer.hub import is_random, pin
from trainer.measured import describe, record_path, write_whole
from trainer.rungs import RUNGS, Job
from trainer.sizes import resolve_config
from trainer.step import Precision

_started: set[subprocess.Popen[bytes]] = set()
"""Processes that measure now, in sessions of their own, which no Ctrl-C reaches."""

SHARED = {
    "rungs": ("model", "precision"),
    "variants": (
        "model", "num_layers", "steps", "rows_per_step", "lr", "warmup_steps", "seed", "precision", "device",
    ),
}  # fmt: skip
"""Settings that all rungs or variants of a record have in common, as they have the dataset: its figures compare them.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Common:
    """What both measurements take."""

    shards: Path
    """Packed rows of real chats."""
    record: Path = Path("data/records")
    """Folder of the record."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cuda or cpu."""
    precision: Precision = "bf16"
    """Of weights and activations."""
    commit: str = ""
    """The commit measured, or a file that holds it, for a copy of the program without .git."""
    notes: str = ""
    """What else a reader should know, of the rows for example."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder(Common):
    """Measure ways to train, each in a process of its own."""

    rungs: str = ",".join(RUNGS)
    """Which, in this order, with commas."""
    model: str = "random:27B"
    """The width, and the number of layers that is extrapolated to."""
    layers: str = "4,8"
    """Numbers of layers that full rungs are measured at: multiples of 4 keep the mix of layers."""
    lora_layers: int = 0
    """Layers of the LoRA rung; 0 for all."""
    lora_recompute: int = 20
    """Of these, how many are computed again in the backward pass."""
    steps: int = 8
    """Measured steps of a rung on fused kernels."""
    slow_steps: int = 2
    """Measured steps of a rung on torch's fallbacks."""
    padded_documents: int = 8
    """Documents of a padded batch, as many as transformers and TRL take by default; half of them where memory ends."""
    rung_timeout: float = 240.0
    """Seconds that one rung may take, imports and compilation included."""
    profile: bool = True
    """Profile one step, for the numbers of operations."""
    traces: Path | None = None
    """Keep the traces there, for python -m trainer.timeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves(Common):
    """Compare loss curves: ours, transformers' padded loop, documents one by one, batches sorted by length."""

    variants: str = ",".join(curves.VARIANTS)
    """Which, with commas; the others are compared with ours_packed."""
    model: str = "random:0.8B"
    """random:SIZE, or a checkpoint: its weights are what every curve starts from. Random ones are chaotic while they
    learn fast; a checkpoint shows smaller differences."""
    num_layers: int = 0
    """Layers of it; 0 for all."""
    steps: int = 200
    """Steps of each curve."""
    rows_per_step: int = 4
    """Rows whose documents one step takes."""
    lr: float = 3e-4
    """Highest learning rate."""
    warmup_steps: int = 20
    """Steps in which it rises."""
    fp32_steps: int = 10
    """Steps of the fp32 variants, which run on the torch references and are slow."""
    seed: int = 0
    """Of weights and order."""
    at_once: int = 1
    """How many variants train at the same time, dealt out to the GPUs that there are: their times do not count, their
    memory adds up."""
    time_box: float = 120.0
    """Seconds of training that one variant may take; a shorter curve is compared as far as it goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Print a record as a Markdown table."""

    path: Annotated[Path, tyro.conf.Positional]
    """A record of the ladder or of the curves."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 if something measured failed, 2 for an error of the input."""
    hear()
    given = sys.argv[1:] if args is None else list(args)
    commands = (
        Annotated[Ladder, tyro.conf.subcommand("ladder")]
        | Annotated[Curves, tyro.conf.subcommand("curves")]
        | Annotated[Table, tyro.conf.subcommand("table")]
    )
    settings: Any = tyro.cli(commands, prog="python -m trainer.bench", args=given)
    refuse_repeats(Ladder, Curves, Table, arguments=given)
    command = "python -m trainer.bench " + shlex.join(given)
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exception, as Ctrl-C is
    try:
        if isinstance(settings, Table):
            print(table(settings.path))
            return 0
        return run_ladder(settings, command) if isinstance(settings, Ladder) else run_curves(settings, command)
    except (ValueError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the record holds what was done before", file=sys.stderr)
        return 130
    finally:
        for process in list(_started):
            _end(process)
        signal.signal(signal.SIGTERM, former)


def table(path: Path) -> str:
    """The record as a Markdown table. Raises ValueError for what is no record, or one that has none."""
    tables, what = {"ladder": ladder.table, "curves": distances.table}, None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if (what := record.get("what")) in tables:
            return tables[what](record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no record of {' or of '.join(tables)} ({type(error).__name__}: {error}). Pass the .json that "
            f"python -m trainer.bench {' or '.join(tables)} wrote into --record, by default data/records"
        ) from error
    raise ValueError(f"{path} is a record of {what}; records of {' and of '.join(tables)} have a table")


def run_ladder(settings: Ladder, command: str) -> int:
    """Measure the rungs and print the table."""
    names = _names(settings.rungs, tuple(RUNGS), "--rungs")
    settings = replace(settings, model=pin(settings.model))
    config = resolve_config(settings.model)
    path, rungs, shared = _begin(settings, "ladder", part="rungs")
    about = {"device": settings.device, "settings": shared, "command": command, "commit": find_commit(settings.commit)}
    for name in names:
        rung = RUNGS[name]
        layers = (settings.lora_layers,) if rung.method == "lora" else tuple(map(int, settings.layers.split(",")))
        job = Job(
            rung=name, shards=settings.shards, model=settings.model, layers=layers,
            steps=settings.steps if rung.fused else settings.slow_steps,
            padded_documents=settings.padded_documents, recompute=settings.lora_recompute, device=settings.device,
            precision=settings.precision, profile=settings.profile, traces=settings.traces,
        )  # fmt: skip
        result = in_a_process("trainer.rungs", asdict(job), timeout=settings.rung_timeout)
        rungs[name] = result | about
        found: ladder.Figures = {}
        for one, measured in rungs.items():
            found |= ladder.figures(one, measured, config)
        notes = ladder.notes(config, rungs, settings.notes)
        record = describe(
            "ladder", found, command=command, commit=settings.commit, device=settings.device, notes=notes
        ) | {"rungs": rungs}
        write_whole(path, record)
        print(f"{name}: {result['status']} {result.get('detail', '')}", flush=True)
    print(f"{path}\n\n{ladder.table(json.loads(path.read_text(encoding='utf-8')))}")
    return int(any(rungs[name]["status"] != "ok" for name in names))


def run_curves(settings: Curves, command: str) -> int:
    """Train every variant and print how far the curves lie apart."""
    names = _names(settings.variants, tuple(curves.VARIANTS), "--variants")
    settings = replace(settings, model=pin(settings.model))
    resolve_config(settings.model)  # a wrong one is one error here, not one of every variant
    kind = "curves" if is_random(settings.model) else "curves-from-checkpoint"
    path, results, shared = _begin(settings, kind, part="variants")
    about = {"settings": shared, "command": command, "commit": find_commit(settings.commit)}
    visible = _visible_gpus() or [""]
    dealt = [visible[slot % len(visible)] for slot in range(min(settings.at_once, len(names)))]
    gpus: queue.SimpleQueue[str] = queue.SimpleQueue()
    for gpu in dealt:
        gpus.put(gpu)

    def train(name: str) -> dict[str, Any]:
        job = _curve(settings, name, out=path.with_name(f"{path.stem}-{name}.jsonl"))
        job.out.unlink(missing_ok=True)  # what fails before its first step has no curve, not its former one
        gpu = gpus.get()
        try:
            found = in_a_process("trainer.curves", asdict(job), timeout=settings.time_box + 180, gpu=gpu)
        finally:
            gpus.put(gpu)
        return {**found, "file": job.out.name, **about}

    pool = ThreadPoolExecutor(max_workers=settings.at_once)
    try:
        running = {pool.submit(train, name): name for name in names}
        for future in as_completed(running):
            name, result = running[future], future.result()
            results[name] = result
            found = distances.figures({one: distances.losses(path.with_name(r["file"])) for one, r in results.items()})
            notes = f"{distances.NOTES} {settings.notes}".strip()
            record = describe(
                "curves", found, command=command, commit=settings.commit, device=settings.device, notes=notes,
                num_gpus=len(set(dealt)),
            )  # fmt: skip
            write_whole(path, record | {"variants": results})
            print(f"{name}: {result['status']} {result.get('detail', '')}", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C the threads wait for processes that end next
    print(f"{path}\n\n{distances.table(json.loads(path.read_text(encoding='utf-8')))}")
    return int(any(results[name]["status"] not in ("ok", "out of time") for name in names))


def _curve(settings: Curves, variant: str, *, out: Path) -> curves.Job:
    return curves.Job(
        variant=variant, shards=settings.shards, model=settings.model, num_layers=settings.num_layers,
        steps=settings.steps, fp32_steps=settings.fp32_steps, rows_per_step=settings.rows_per_step, lr=settings.lr,
        warmup_steps=settings.warmup_steps, seed=settings.seed, time_box=settings.time_box, device=settings.device,
        precision=settings.precision, out=out,
    )  # fmt: skip


def _names(text: str, known: tuple[str, ...], flag: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{flag}: {', '.join(unknown)} unknown; there are {', '.join(known)}")
    return names


def _begin(settings: Common, what: str, *, part: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The record's file, the rungs or variants (``part``) that it holds already, and the settings that all share."""
    if not (settings.shards / "manifest.json").is_file():
        raise ValueError(f"--shards {settings.shards}: no dataset is there; python -m pipeline.pack writes one")
    path = record_path(settings.record, what, settings.device)
    former = json.loads(path.read_text(encoding="utf-8")).get(part, {}) if path.exists() else {}
    shared = {field: getattr(settings, field) for field in SHARED[part]}
    shared["dataset_id"] = PackedDataset.open(settings.shards).manifest.dataset_id
    _require_same(path, former, shared)
    return path, former, shared


def _require_same(path: Path, former: dict[str, Any], shared: dict[str, Any]) -> None:
    """Raise ValueError where the record holds what was measured with other settings, or does not say with which."""
    for name, result in former.items():
        if "settings" not in result:
            raise ValueError(
                f"{path} does not say which settings {name} was measured with, so nothing can be compared with it. "
                "Pass another folder as --record"
            )
        found = result["settings"]
        if others := [f"{f} {found.get(f)!r}, now {value!r}" for f, value in shared.items() if found.get(f) != value]:
            raise ValueError(
                f"{path} holds {name}, which was measured with other settings ({'; '.join(others)}) and would be "
                "compared with what runs now. Pass another folder as --record, or the same settings"
            )


def _visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, or the number of each GPU."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]


def in_a_process(module: str, job: dict[str, Any], *, timeout: float, gpu: str = "") -> dict[str, Any]:
    """Run ``python -m module JOB RESULT`` and return its result; `status` says how it ended.

    ``gpu`` is the one that it sees; by default those that this program does.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        job_file.write_text(json.dumps(job, default=str), encoding="utf-8")
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(job_file), str(result_file)],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
            )  # fmt: skip
            _started.add(process)
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)  # too slow, or this program was interrupted
                _started.discard(process)
        result = json.loads(result_file.read_text(encoding="utf-8")) if result_file.exists() else {}
        printed = log.read_text(encoding="utf-8", errors="replace").strip()
    if code != 0:
        print(printed[-4000:], file=sys.stderr)
    if code is None:
        return {**result, "status": "timeout", "detail": f"stopped after {timeout:.0f} s"}
    if code:
        return {**result, "status": "failed", "detail": printed.splitlines()[-1][:300] if printed else f"exit {code}"}
    return dict(result)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, with what it started, if it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, and the thread that started it knows
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
