"""What `trainer.doctor` checks of one operation: right numbers, and nothing that crosses a boundary.

The truth is the torch reference in fp64 on the same (rounded) inputs. Every tensor that a kernel gets is a fresh copy,
because some kernels overwrite theirs, and its memory is surrounded by freed NaN, because a kernel that forgets to write
a number should not find the right one there.

Guarantees: NaN, a missing gradient, another shape or an exception never pass. Measures are taken over a whole tensor
and over the worst single token, so that 8,192 right tokens do not hide a wrong one.

Shapes: T tokens of the packed row, D width, C conv channels, W conv width, H heads, G key/value heads, K key dim,
V value dim.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.cases import Case, Maker, Operation, alone, documents_of, sides, some
from trainer.kernels import TABLE

Results = dict[str, Tensor | None]
"""By name; None for a gradient that is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One check: what was measured, and what it may be."""

    operation: str
    """Field of `Kernels`, or `model`."""
    implementation: str
    """What served it."""
    version: str
    """Version of its package."""
    check: str
    """What was compared."""
    error: float
    """Measured; NaN where nothing could be measured."""
    bound: float
    """Largest error that passes."""
    reason: str
    """Why the bound is what it is; after an exception, its text."""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the bound."""
        return self.error <= self.bound  # False for NaN

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        note = "" if self.passed else f"  [{self.reason}]"
        return f"{verdict}  {self.operation:<17}{self.check:<58} {self.error:9.2e} <= {self.bound:.2e}{note}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The implementation that is examined."""

    operation: str
    """Field of `Kernels`."""
    implementation: str
    """As in the table of kernels."""
    version: str
    """As in the table of kernels."""
    function: Operation
    """Called as `Kernels` describes."""

    def finding(self, check: str, error: float, bound: float, reason: str) -> Finding:
        """A finding about this implementation."""
        return Finding(
            operation=self.operation,
            implementation=self.implementation,
            version=self.version,
            check=check,
            error=error,
            bound=bound,
            reason=reason,
        )


# ---------------------------------------------------------------------------------------------- measures

FEW_ROUNDINGS = "fp32 inside, one or two roundings to bf16, 0.002 each; at least twice that"

BF16 = {
    "gated_delta_rule": (0.02, "bf16 products within a chunk of 64: 0.005 seen on the released head dim"),
    "causal_conv": (0.01, FEW_ROUNDINGS),
    "attention": (0.02, "bf16 probabilities and output: 0.002 forward, 0.005 backward seen"),
    "rms_norm": (0.01, FEW_ROUNDINGS),
    "add_rms_norm": (0.01, FEW_ROUNDINGS),
    "norm_rotary": (0.02, "bf16 norm, then bf16 products and their sum: 0.005; four times that"),
    "delta_gates": (0.01, FEW_ROUNDINGS),
    "output_gate": (0.01, FEW_ROUNDINGS),
    "gated_rms_norm": (0.01, FEW_ROUNDINGS),
    "swiglu": (0.01, FEW_ROUNDINGS),
    "loss": (0.01, "bf16 logits and their gradient: 0.003; three times that"),
}
"""Bound of the relative error of a whole tensor, and why."""

FP32 = (2e-5, "fp32 throughout: sums of up to a few thousand terms, 1e-6 seen")

TOKEN_FACTOR = 10.0
"""The worst token may be off by so many times the bound of the whole: a misread token is off by about 1."""


def bound_of(operation: str, dtype: torch.dtype) -> tuple[float, str]:
    """(bound of the whole tensor's relative error, why)"""
    return BF16[operation] if dtype == torch.bfloat16 else FP32


def whole_error(found: Tensor | None, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; infinite for a missing tensor or another shape."""
    if found is None or found.shape != expected.shape:
        return math.inf
    difference, norm = (found.double() - expected).norm(), expected.norm()
    return float(difference / norm) if norm > 0 else _zero_or_inf(difference)


def token_error(found: Tensor | None, expected: Tensor) -> float:
    """The same for the worst token [T, ...]; a token smaller than the average is measured by the average."""
    if found is None or found.shape != expected.shape:
        return math.inf
    difference = (found.double() - expected).flatten(1).norm(dim=1)
    norm = expected.flatten(1).norm(dim=1)
    average = norm.square().mean().sqrt()
    if not average > 0:
        return _zero_or_inf(difference.sum())
    return _largest(difference / norm.clamp_min(average))


def _zero_or_inf(difference: Tensor) -> float:
    return 0.0 if float(difference) == 0.0 else math.inf


def _largest(errors: Tensor) -> float:
    """NaN if one of them is."""
    return float(errors.max()) if bool(errors.isfinite().all()) else math.nan


def worst(errors: dict[str, float]) -> tuple[str, float]:
    """(name, error) of the largest; NaN counts as larger than anything."""
    return max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def reference_of(operation: str) -> Operation:
    """The torch reference: last in the table."""
    return TABLE[operation][-1].load()[0]


def poison(tensors: Sequence[Tensor]) -> None:
    """Leave NaN in the memory that a kernel is likely to get for its results."""
    blocks = [torch.full_like(tensor, math.nan) for tensor in tensors for _ in range(2)]
    del blocks


def outputs(result: Any) -> tuple[Tensor, ...]:
    """Of an operation with one or more outputs."""
    return result if isinstance(result, tuple) else (result,)


def run(
    function: Operation, inputs: dict[str, Tensor], *, upstream: Sequence[Tensor] = (), frozen: Sequence[str] = ()
) -> Results:
    """Every output and, where there are upstream gradients, the gradient of every input that is not frozen."""
    leaves = {
        name: x.detach().clone().requires_grad_(bool(upstream) and name not in frozen) for name, x in inputs.items()
    }
    poison(list(leaves.values()))
    outs = outputs(function(*leaves.values()))
    names = ["output"] if len(outs) == 1 else [f"output {i + 1}" for i in range(len(outs))]
    results: Results = {name: out.detach().clone() for name, out in zip(names, outs, strict=True)}
    if upstream:
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        weights = [x.to(out.dtype, copy=True) for x, out in zip(upstream, outs, strict=True)]
        gradients = torch.autograd.grad(outs, list(wanted.values()), weights, allow_unused=True)
        results.update({f"gradient of {name}": found for name, found in zip(wanted, gradients, strict=True)})
    return results


def examine_case(subject: Subject, case: Case, maker: Maker) -> Iterator[Finding]:
    """Everything about one operation and one set of inputs; an exception is a finding too."""
    try:
        yield from _agreement(subject, case, maker)
        if case.bounds is not None and not case.brief:
            yield from _isolation(subject, case, maker)
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernel: the references in fp64 need most of it
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        yield subject.finding(f"{case.name}: runs", math.nan, 0.0, text)


def _agreement(subject: Subject, case: Case, maker: Maker) -> Iterator[Finding]:
    function, reference = case.bind(subject.function), case.bind(reference_of(subject.operation))
    exact_inputs = {name: x.double() for name, x in case.inputs.items()}
    # A single number for the loss, and not 1: its backward pass has to use it.
    upstream = [
        maker.normal(*out.shape) if out.ndim else torch.tensor(0.37, device=maker.device)
        for out in outputs(reference(*exact_inputs.values()))
    ]
    expected = run(reference, exact_inputs, upstream=[x.double() for x in upstream])
    found = run(function, case.inputs, upstream=upstream)
    bound, reason = bound_of(subject.operation, maker.dtype)

    tokens: dict[str, float] = {}
    for name, truth in expected.items():
        assert truth is not None
        yield subject.finding(f"{case.name}: {name}", whole_error(found[name], truth), bound, reason)
        if truth.ndim and _input_of(name) not in case.weights:
            tokens[name] = token_error(found[name], truth)
    name, error = worst(tokens)
    yield subject.finding(f"{case.name}: worst token, {name}", error, bound * TOKEN_FACTOR, reason)
    if case.brief:
        return

    if case.weights:
        frozen = run(function, case.inputs, upstream=upstream, frozen=case.weights)
        name, error = worst({name: whole_error(x, _known(expected[name])) for name, x in frozen.items()})
        yield subject.finding(f"{case.name}: weight frozen, {name}", error, bound, reason)
    with torch.no_grad():
        without = run(function, case.inputs)
    name, error = worst({name: whole_error(x, _known(expected[name])) for name, x in without.items()})
    yield subject.finding(f"{case.name}: without gradients, {name}", error, bound, reason)
    if case.bounds is not None:
        yield from _one_by_one(subject, case, maker, found, upstream[0])


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _one_by_one(subject: Subject, case: Case, maker: Maker, found: Results, upstream: Tensor) -> Iterator[Finding]:
    """Each document of the packed row against the reference that saw this document alone."""
    reference, errors = reference_of(subject.operation), {}
    assert case.bounds is not None
    bounds_of_row = case.bounds
    average = {name: float(x.double().square().mean().sqrt()) for name, x in found.items() if x is not None}
    for document in some(documents_of(bounds_of_row), at_most=20):
        length = document.stop - document.start
        bounds = alone(bounds_of_row, document)
        part = {name: (x if name in case.weights else x[document]).double() for name, x in case.inputs.items()}
        truths = run(lambda *xs, bounds=bounds: reference(*xs, bounds), part, upstream=[upstream[document].double()])
        for name, truth in truths.items():
            packed = found[name]
            if packed is None or _input_of(name) in case.weights:
                continue  # a missing gradient is a finding already
            exact = _known(truth)
            size = max(float(exact.norm()), average[name] * exact.numel() ** 0.5)
            error = float((packed[document].double() - exact).norm())
            errors[f"{name}, {length} tokens"] = error / size if size else _zero_or_inf(torch.tensor(error))
    bound, reason = bound_of(subject.operation, maker.dtype)
    name, error = worst(errors)
    yield subject.finding(f"{case.name}: one by one, {name}", error, bound * TOKEN_FACTOR, reason)


def _isolation(subject: Subject, case: Case, maker: Maker) -> Iterator[Finding]:
    """No gradient and no number crosses a boundary: half of the documents are touched, the others may not notice."""
    function = case.bind(subject.function)
    assert case.bounds is not None
    touched = sides(case.bounds)
    before, again = run_quietly(function, case.inputs), run_quietly(function, case.inputs)
    crossing: dict[str, float] = {}
    for side, tokens in touched.items():
        upstream = maker.normal(*before.shape).to(before.dtype)
        upstream[~tokens] = 0.0
        for name, gradient in run(function, case.inputs, upstream=[upstream]).items():
            if name != "output" and _input_of(name) not in case.weights:
                crossing[f"{name}, {side}"] = largest_outside(gradient, tokens)
    name, error = worst(crossing)
    reason = "no document has a part in another's output"
    yield subject.finding(f"{case.name}: crosses, {name}", error, 0.0, reason)

    noise = 2 * float((before.double() - again.double()).abs().max())
    changes: dict[str, float] = {}
    for side, tokens in touched.items():
        changed = {name: x.clone() for name, x in case.inputs.items()}
        for name in changed.keys() - set(case.weights):
            changed[name][tokens] *= 0.5
        changes[side] = largest_outside(run_quietly(function, changed).double() - before.double(), tokens)
    name, error = worst(changes)
    reason = "twice what the same input gives on repetition"
    yield subject.finding(f"{case.name}: changing {name} changes others", error, noise, reason)


def _input_of(result: str) -> str:
    """The input that a gradient is of."""
    return result.removeprefix("gradient of ")


def run_quietly(function: Operation, inputs: dict[str, Tensor]) -> Tensor:
    """The output alone."""
    with torch.no_grad():
        return _known(run(function, inputs)["output"])


def largest_outside(x: Tensor | None, tokens: Tensor) -> float:
    """The largest magnitude at other tokens than these [T]; NaN where there is one."""
    return math.nan if x is None else _largest(x[~tokens].abs())
