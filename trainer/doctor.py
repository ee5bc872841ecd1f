"""Prove that the kernels of this machine are right: numbers, gradients, and that nothing flows between documents.

    python -m trainer.doctor                  the implementations that a run here would use
    python -m trainer.doctor --all            every usable one in the table of kernels
    python -m trainer.doctor --device cpu     the torch references, against themselves in fp64

    cases           random inputs from a seed
    proofs          one operation: output, gradients, worst token, packed against one by one, isolation, other lengths
    proofs_model    a small model of 4 layers: the same, with every parameter's gradient
    card            names, versions and speeds of the machine; memory of the loss

One line a check with the measured error and its bound; exit code 0 if all pass, 1 if one fails. Training runs
`require`, the short form, before its first step, and refuses where it fails.

Guarantees: the bounds have reasons (printed with a failure); NaN, a missing gradient and an exception fail.
Costs: under a minute, and the compilation of each kernel for one row length, which is timed apart; on a GPU some 50 GiB
of its memory, by a count of what lives in the references.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import dataclasses
import functools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from pipeline.cli import refuse_repeats
from pipeline.places import check_place
from trainer import card, measured
from trainer.cases import MIXING, NARROW, RELEASED, Maker, Sizes
from trainer.kernels import TABLE, Choice, Kernels, select
from trainer.proofs import Finding, Subject, examine_case, run
from trainer.proofs_model import build, examine_model, run_model

MEMORY_GIB = 50
"""What the checks take on a GPU, from the bytes that live in the fp64 references of 48 heads at 8,192 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Prove that this machine's kernels compute what the references do and keep documents apart."""

    device: Literal["cpu", "cuda"] | None = None
    """By default the GPU if there is one."""
    every: Annotated[bool, tyro.conf.arg(name="all")] = False
    """Examine every usable implementation, not only those that a run would use."""
    short: bool = False
    """Only what training checks at start: the model, and the operations that mix tokens, on two rows of one shape."""
    seed: int = 0
    """Of all inputs."""
    json: Path | None = None
    """Write everything to this file too."""
    record: Path | None = None
    """Write a record with the worst error of everything examined into this folder, such as data/records."""
    commit: str = ""
    """The commit examined, or a file that holds it, for the record; by default the one here."""


# ----------------------------------------------------------------------------------------------- examine


def examine(
    kernels: Kernels,
    device: torch.device,
    *,
    short: bool,
    operations: Sequence[str] | None = None,
    model: bool = True,
    sizes: Sizes | None = None,
    seed: int = 0,
    say: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Examine the chosen kernels, in bf16 on a GPU and in fp32 on a CPU.

    Args:
        short: only the operations that mix tokens and the model, on the row of odd lengths and its reverse.
        operations: fields of `Kernels`; all by default.
        model: whether to examine the small model too.
        sizes: by default `RELEASED` on a GPU, `NARROW` on a CPU.
        say: is told every finding as it comes.

    Raises:
        ValueError: there is too little memory to examine them.
    """
    maker = _maker(device, sizes, seed)
    wanted = operations if operations is not None else MIXING if short else tuple(TABLE)
    findings: list[Finding] = []
    try:
        for finding in _findings(kernels, maker, wanted, short=short, model=model):
            say(finding)
            findings.append(finding)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"too little memory on {device} to prove its kernels: their references compute in fp64 and need some "
            f"{MEMORY_GIB} GiB ({str(error).splitlines()[0]}). End what else uses it (nvidia-smi names it), or choose "
            "another GPU with CUDA_VISIBLE_DEVICES."
        ) from None
    return findings


def _maker(device: torch.device, sizes: Sizes | None, seed: int) -> Maker:
    on_gpu = device.type == "cuda"
    return Maker(
        sizes or (RELEASED if on_gpu else NARROW), device, torch.bfloat16 if on_gpu else torch.float32, seed=seed
    )


def _findings(
    kernels: Kernels, maker: Maker, operations: Sequence[str], *, short: bool, model: bool
) -> Iterator[Finding]:
    for operation in operations:
        for case in maker.cases(operation, short=short):
            yield from examine_case(subject_of(kernels, operation), case, maker)
    if model:
        yield from examine_model(kernels, maker, short=short)


def subject_of(kernels: Kernels, operation: str) -> Subject:
    """The implementation that was chosen for an operation."""
    found = next((choice for choice in kernels.table if choice.operation == operation), None)
    return Subject(
        operation=operation,
        implementation=found.implementation if found else "unknown",
        version=found.version if found else "",
        function=getattr(kernels, operation),
    )


def require(kernels: Kernels, device: torch.device, *, sizes: Sizes | None = None) -> None:
    """The short form: the whole model and the operations that mix tokens.

    Raises:
        ValueError: naming every operation that failed, what served it, and what to do; or for too little memory.
    """
    failed = [finding for finding in examine(kernels, device, short=True, sizes=sizes) if not finding.passed]
    if device.type == "cuda":
        torch.compiler.reset()  # shapes compiled here do not count towards the limit of the run's own
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if failed:
        raise ValueError("\n".join(_advice(failed, kernels)))


def _advice(failed: list[Finding], kernels: Kernels) -> list[str]:
    lines = [
        f"the kernels of this machine are wrong in {len(failed)} checks; training with them would go wrong unseen:"
    ]
    lines += [
        f"  {finding.operation} ({finding.implementation} {finding.version}): {finding.check}: error "
        f"{finding.error:.2e}, at most {finding.bound:.2e} is right ({finding.reason})"
        for finding in failed
    ]
    blamed = {finding.operation for finding in failed} - {"model"}
    if not blamed:
        served = (f"{c.operation}: {c.implementation} {c.version}" for c in kernels.table)
        lines.append(f"The operations that mix tokens pass on their own. The model runs on {', '.join(served)}.")
    lines.append(
        "Install another version of the package that serves it, or uninstall it so that the next implementation in "
        "the table is chosen; `python -m trainer.doctor --all` shows which ones pass here."
    )
    return lines


# --------------------------------------------------------------------------------------------------- all


def others(kernels: Kernels, device: torch.device) -> Iterator[tuple[str, Kernels]]:
    """(operation, kernels with another usable implementation of it), for all that were not chosen."""
    for operation, implementations in TABLE.items():
        for implementation in implementations:
            if implementation.obstacle(device) or implementation.name == subject_of(kernels, operation).implementation:
                continue
            function, version = implementation.load()
            choice = Choice(
                operation=operation,
                implementation=implementation.name,
                version=version,
                why="not the first choice",
                fused=implementation.fused,
            )
            table = tuple(choice if c.operation == operation else c for c in kernels.table)
            changes: dict[str, Any] = {operation: function, "table": table}
            yield operation, dataclasses.replace(kernels, **changes)


def warm_up(kernels: Kernels, device: torch.device, *, short: bool, operations: Sequence[str], model: bool) -> float:
    """Seconds to run every kernel once in each of its forms, so that it is compiled; errors show up later."""
    begun, maker = time.perf_counter(), _maker(device, None, 0)
    for operation in operations:
        for case in maker.cases(operation, short=short):
            function = case.bind(getattr(kernels, operation))
            for frozen in {(), case.weights}:
                _quietly(functools.partial(_once, function, case.inputs, frozen))
    if model:
        _quietly(lambda: run_model(build(maker, kernels), maker.batch(maker.sizes.odd)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _once(function: Callable[..., Any], inputs: dict[str, torch.Tensor], frozen: Sequence[str]) -> None:
    with torch.no_grad():
        outs = run(function, inputs)
    run(function, inputs, upstream=[torch.ones_like(out) for out in outs.values() if out is not None], frozen=frozen)


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        return  # the examination meets it again, and reports it


# -------------------------------------------------------------------------------------------------- main


@dataclass(kw_only=True)
class Report:
    """Everything that one run of the doctor says."""

    machine: dict[str, str]
    """Names and versions."""
    speeds: dict[str, float]
    """Measured, by name and unit."""
    findings: list[Finding] = dataclasses.field(default_factory=list)
    """All checks."""
    warm_up_seconds: float = 0.0
    """Compilation and first runs."""
    check_seconds: float = 0.0
    """The checks."""

    @property
    def failed(self) -> list[Finding]:
        """The checks that did not pass."""
        return [finding for finding in self.findings if not finding.passed]

    def add(self, finding: Finding) -> None:
        """Print and keep a finding."""
        print(finding, flush=True)
        self.findings.append(finding)

    def figures(self) -> measured.Figures:
        """Numbers, times and speeds, and of everything examined the check that came nearest to its bound."""
        found: measured.Figures = {
            "checks": {"value": len(self.findings), "unit": "in all"},
            "failed": {"value": len(self.failed), "unit": "of them"},
            "check_seconds": {"value": round(self.check_seconds, 1), "unit": "s, compilation aside"},
            "warm_up_seconds": {"value": round(self.warm_up_seconds, 1), "unit": "s, first runs with compilation"},
        }
        for name, value in self.speeds.items():
            what, _, unit = name.rpartition(", ")
            found[what or name] = {"value": round(value, 1), "unit": unit}
        by_subject: dict[str, list[Finding]] = {}
        for finding in self.findings:
            subject = f"{finding.operation} on {finding.implementation} {finding.version}".strip()
            by_subject.setdefault(subject, []).append(finding)
        for subject, findings in by_subject.items():
            worst = max(findings, key=lambda f: (not f.passed, f.error / f.bound if f.bound else 0.0))
            found[f"{subject}: worst error"] = {
                "value": _plain(worst.error),
                "unit": f"at most {worst.bound:.2e} ({worst.check}); {len(findings)} checks",
            }
        return found

    def to_json(self, kernels: Kernels) -> str:
        """One object; numbers that JSON lacks become text."""
        found = [
            {**dataclasses.asdict(finding), "passed": finding.passed, "error": _plain(finding.error)}
            for finding in self.findings
        ]
        return json.dumps(
            {
                "passed": not self.failed,
                "machine": self.machine,
                "speeds": self.speeds,
                "warm_up_seconds": self.warm_up_seconds,
                "check_seconds": self.check_seconds,
                "kernels": [dataclasses.asdict(choice) for choice in kernels.table],
                "findings": found,
            },
            indent=1,
        )


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 if a check failed, 2 if nothing could be examined, 130 after Ctrl-C."""
    hear()
    settings = tyro.cli(Settings, prog="python -m trainer.doctor", args=args, config=(tyro.conf.FlagCreatePairsOff,))
    refuse_repeats(Settings, arguments=args)
    try:
        return _command(settings, ["python", "-m", "trainer.doctor", *(sys.argv[1:] if args is None else args)])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _command(settings: Settings, command: list[str]) -> int:
    for flag, path in (("--record", settings.record), ("--json", settings.json and settings.json.parent)):
        if path is not None:
            check_place(flag, path, write=True)
    name = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda, but torch finds no GPU here; use --device cpu", file=sys.stderr)
        return 2
    device = torch.device(name)
    kernels = select(device, accept_slow=True)
    report = Report(machine=card.describe(device), speeds={})
    for key, text in report.machine.items():
        print(f"{key:<20}{text}")
    for choice in kernels.table:
        print(f"  {choice.operation:<17} {choice.implementation} {choice.version} ({choice.why})")
    try:
        _examine_all(report, kernels, device, settings)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {len(report.findings)} checks", file=sys.stderr)
        return 130
    print(f"warm-up and compilation {report.warm_up_seconds:.1f} s, checks {report.check_seconds:.1f} s")
    if settings.json:
        settings.json.write_text(report.to_json(kernels), encoding="utf-8")
    if settings.record:
        record = measured.describe(
            "doctor",
            report.figures(),
            command=shlex.join(command),
            commit=settings.commit,
            device=device.type,
            notes="",
        )
        measured.write_whole(measured.record_path(settings.record, "doctor", device.type), record)
    failed = sorted({f"{f.operation} ({f.implementation} {f.version})" for f in report.failed})
    if failed:
        print(f"FAIL: {len(report.failed)} of {len(report.findings)} checks: {', '.join(failed)}")
        return 1
    print(f"PASS: all {len(report.findings)} checks")
    return 0


def _examine_all(report: Report, kernels: Kernels, device: torch.device, settings: Settings) -> None:
    """The chosen kernels, then speeds and memory on a GPU, then the others if asked for."""
    wanted = MIXING if settings.short else tuple(TABLE)
    _examine_some(report, kernels, device, settings, wanted, model=True)
    if device.type == "cuda" and not settings.short:
        report.speeds = card.speeds(kernels, device)
        for key, value in report.speeds.items():
            print(f"{key:<55}{value:9.1f}")
        report.add(card.loss_memory(subject_of(kernels, "loss"), device))
    for operation, changed in others(kernels, device) if settings.every else ():
        subject = subject_of(changed, operation)
        print(f"{operation} on {subject.implementation} {subject.version}")
        _examine_some(report, changed, device, settings, [operation], model=operation in MIXING)


def _examine_some(
    report: Report,
    kernels: Kernels,
    device: torch.device,
    settings: Settings,
    operations: Sequence[str],
    *,
    model: bool,
) -> None:
    if device.type == "cuda":
        report.warm_up_seconds += warm_up(kernels, device, short=settings.short, operations=operations, model=model)
    begun = time.perf_counter()
    examine(
        kernels, device, short=settings.short, operations=operations, model=model, seed=settings.seed, say=report.add
    )
    report.check_seconds += time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
