"""What a run did, or is doing: a table here, and one self-contained page beside its log.

    python -m trainer.report runs/NAME                  RUN/report.html: loss, speed, memory, step times, kernels
    python -m trainer.report runs/A runs/B              laid over one another, with what differs
    python -m trainer.report runs/NAME --trace BEFORE AFTER      where a step's time goes, by two profiler traces

    RUN ── log.read ──▶ Run ── figures ──▶ Figures ── text, page ──▶ table, page

Guarantees: every figure is arithmetic over the log; a run that goes on is read as it is at this moment, and not
disturbed. The page loads nothing and runs nothing. Needs no torch.
Costs: under a second; 4 s for 100,000 steps, 15 s and 1.6 GB for a trace of 280 MB.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from pipeline.cli import refuse_repeats
from pipeline.page.charts import NUM_COLOURS
from trainer.report.figures import as_json, figures
from trainer.report.log import TRACE, Run, read
from trainer.report.page import as_page
from trainer.report.text import Pair, as_text, concerns, differing, printable
from trainer.report.traces import Trace, load
from trainer.timeline import table as trace_table

REPORT = "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Show what a run did, or several runs beside one another."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, at most 8."""
    trace: tuple[Path, ...] = ()
    """One trace of torch's profiler, or two: before and after. By default those of the first two runs that have one."""
    out: Path | None = None
    """Where the page goes. By default report.html in the first run's folder."""
    json: bool = False
    """Print the figures as JSON."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for input that cannot be read, 130 after Ctrl-C."""
    hear()
    settings = tyro.cli(Settings, prog="python -m trainer.report", args=args, config=(tyro.conf.FlagCreatePairsOff,))
    refuse_repeats(Settings, arguments=args)
    try:
        now = time.time()
        pairs = open_runs(settings.runs, now=now)
        traces, troubles = open_traces(settings.trace, [run for run, _ in pairs])
        out = settings.out or settings.runs[0] / REPORT
        check_place(out, settings.runs, settings.trace)
        write(out, as_page(pairs, traces=traces, now=now, troubles=troubles))
        if settings.json:
            print(json.dumps(everything(pairs, traces), indent=1, allow_nan=False))
        else:
            summaries = {trace.name: trace.summary for trace in traces}
            tables = [as_text(pairs), *([trace_table(summaries)] if traces else []), *troubles, str(out)]
            encoding = sys.stdout.encoding or "utf-8"
            print(printable("\n\n".join(tables)).encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:  # as behind head: who reads has seen enough, and the page is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def check_place(out: Path, runs: Sequence[Path], traces: Sequence[Path]) -> None:
    """Refuse a place where a folder is, or where the page would replace a file of a run, or a trace.

    Raises:
        ValueError: naming another.
    """
    place = out.resolve()
    for folder in (run.resolve() for run in runs):
        if place.is_relative_to(folder) and place != folder / REPORT:
            raise ValueError(
                f"--out {out}: in a run's folder the page is called {REPORT}, and every other name is a file of the "
                f"run. Name a file outside of {folder}, or leave --out out."
            )
    if place in [trace.resolve() for trace in traces]:
        raise ValueError(f"--out {out} is one of the traces: name another file, or leave --out out.")
    if place.is_dir():
        raise ValueError(f"--out {out} is a folder: name the file that the page becomes, such as {out / REPORT}")


def open_runs(paths: Sequence[Path], *, now: float) -> list[Pair]:
    """Every run with its figures, under names of their own.

    Raises:
        ValueError: none, too many, the same one twice, or one that cannot be read.
    """
    if not paths:
        raise ValueError("no run given: pass the folder of one, or of several")
    if len(paths) > NUM_COLOURS:
        raise ValueError(f"{len(paths)} runs are too many to tell apart; pass at most {NUM_COLOURS}")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("the same run is given twice")
    runs = [read(path) for path in paths]
    found = Counter(run.name for run in runs)
    named = [run if found[run.name] == 1 else dataclasses.replace(run, name=str(run.path)) for run in runs]
    return [(run, figures(run, now=now)) for run in named]


def open_traces(given: Sequence[Path], runs: Sequence[Run]) -> tuple[list[Trace], list[str]]:
    """The traces given, or of the first two runs that have one; and what is wrong with these or left out.

    Raises:
        ValueError: more than two given, or one that is none.
    """
    if len(given) > 2:
        raise ValueError(f"--trace takes one file or two, before and after; {len(given)} were given")
    if given:
        names = ("before", "after") if len(given) == 2 else (given[0].name,)
        return [load(path, name=name) for path, name in zip(given, names, strict=True)], []
    traces: list[Trace] = []
    troubles, left_out = [], []
    for run in (run for run in runs if (run.path / TRACE).exists()):
        if len(traces) == 2:
            left_out.append(run.name)
            continue
        try:
            traces.append(load(run.path / TRACE, name=run.name))
        except ValueError as error:
            troubles.append(str(error))
    if left_out:
        troubles.append(f"Two traces are shown; those of {', '.join(left_out)} are left out.")
    return traces, troubles


def everything(pairs: Sequence[Pair], traces: Sequence[Trace]) -> dict[str, Any]:
    """The numbers of the page as JSON values."""
    return {
        "runs": [as_json(f) | {"path": str(run.path), "look_into": concerns(run, f)} for run, f in pairs],
        "differing": differing([run for run, _ in pairs]),
        "traces": {str(trace.path): trace.summary for trace in traces},
    }


def write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all. Raises OSError, which names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()  # it may fill the disk
        if isinstance(error, OSError) and error.filename is None:  # a write's error does not say where
            error.filename = str(path)
        raise


if __name__ == "__main__":
    sys.exit(main())
