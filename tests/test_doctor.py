"""The doctor finds and names every broken kernel, and passes the intact ones."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from trainer import cases, doctor, kernels, proofs
from trainer.batches import Batch
from trainer.cases import MIXING, Sizes
from trainer.kernels import TABLE, Kernels, select
from trainer.proofs import Finding

CPU = torch.device("cpu")
SMALL = Sizes(
    num_tokens=256,
    odd=(1, 2, 3, 31, 33, 63, 65),
    many=(8,) * 30,
    key_heads=2,
    value_heads=4,
    linear_dim=8,
    heads=2,
    kv_heads=1,
    head_dim=16,
    hidden=16,
    vocab=37,
    loss_vocab=37,
)

Function = Callable[..., Any]


def broken(operation: str, breaker: Callable[[Function], Function]) -> Kernels:
    chosen = select(CPU)
    changes: dict[str, Any] = {operation: breaker(getattr(chosen, operation))}
    return dataclasses.replace(chosen, **changes)


def examine(chosen: Kernels, **settings: Any) -> list[Finding]:
    return doctor.examine(chosen, CPU, **{"short": True, "model": False, "sizes": SMALL, **settings})


def failures(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if not finding.passed]


# --------------------------------------------------------------------------------------- ways to break


def with_boundaries(change: Callable[[Batch], list[int]]) -> Callable[[Function], Function]:
    def breaker(function: Function) -> Function:
        def called(*arguments: Any) -> Any:
            batch: Batch = arguments[-1]
            ends = torch.tensor(change(batch), dtype=torch.int32)
            numbers = torch.repeat_interleave(torch.arange(len(ends) - 1, dtype=torch.int32), ends.diff())
            wrong = dataclasses.replace(batch, cu_seqlens=ends, cu_seqlens_cpu=ends, seq_idx=numbers)
            return function(*arguments[:-1], wrong)

        return called

    return breaker


def ignored(batch: Batch) -> list[int]:
    return [0, len(batch.input_ids)]


def one_late(batch: Batch) -> list[int]:
    first, *inner, last = batch.cu_seqlens_cpu.tolist()
    return [first, *(end + 1 for end in inner), last]


def last_forgotten(batch: Batch) -> list[int]:
    ends: list[int] = batch.cu_seqlens_cpu.tolist()
    return [*ends[:-3], *ends[-2:]]


def with_inputs(change: Callable[..., tuple[Any, ...]]) -> Callable[[Function], Function]:
    return lambda function: lambda *arguments: function(*change(*arguments))


class _Gradients(torch.autograd.Function):
    """The tensors unchanged; their gradients changed."""

    @staticmethod
    def forward(ctx: Any, change: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.change = change
        return tuple(x.clone() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.change(*grads)


def with_gradients(num_inputs: int, change: Callable[..., tuple[Tensor, ...]]) -> Callable[[Function], Function]:
    def breaker(function: Function) -> Function:
        def called(*arguments: Any) -> Any:
            changed: Any = cast(Any, _Gradients).apply(change, *arguments[:num_inputs])
            return function(*changed, *arguments[num_inputs:])

        return called

    return breaker


def with_output(change: Callable[..., Tensor]) -> Callable[[Function], Function]:
    return lambda function: lambda *arguments: change(function(*arguments), *arguments)


def poisoned(out: Tensor, *arguments: Any) -> Tensor:
    flat = torch.zeros_like(out).flatten()
    flat[len(flat) // 2] = math.nan
    return out + flat.view_as(out)


def leaking_backward(*grads: Tensor) -> tuple[Tensor, ...]:
    *others, last = grads
    return *others, last + 1e-7 * last.roll(-70, 0)


def stale(function: Function) -> Function:
    """Lengths of the first row of this many tokens and segments, for good."""
    kept: dict[tuple[int, int], Batch] = {}

    def called(*arguments: Any) -> Any:
        batch: Batch = arguments[-1]
        return function(*arguments[:-1], kept.setdefault((len(arguments[0]), batch.cu_seqlens.numel()), batch))

    return called


def leaking(*, source: int | None = None, ahead: int, size: float) -> Callable[[Function], Function]:
    """The last output of a document, by default the longest, is added to all of a later one's; no gradient shows it."""

    def change(out: Tensor, *arguments: Any) -> Tensor:
        documents = cases.documents_of(arguments[-1])
        lengths = [document.stop - document.start for document in documents]
        start = lengths.index(max(lengths)) if source is None else source
        leak = torch.zeros_like(out)
        leak[documents[start + ahead]] = size * out[documents[start].stop - 1].detach()
        return out + leak

    return with_output(change)


def wrong_length(out: Tensor, *arguments: Any) -> Tensor:
    return out[:-1]


def not_causal(query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
    outs = []
    for span in cases.documents_of(batch):
        q, k, v = (x[span].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1))
    return torch.cat(outs)


BROKEN: dict[str, tuple[str, Callable[[Function], Function]]] = {
    **{f"{name} ignores the boundaries": (name, with_boundaries(ignored)) for name in MIXING},
    **{f"{name} sees boundaries one token late": (name, with_boundaries(one_late)) for name in MIXING},
    **{f"{name} forgets one boundary": (name, with_boundaries(last_forgotten)) for name in MIXING},
    **{f"{name} keeps the lengths of an earlier row": (name, stale) for name in MIXING},
    **{
        f"{name} leaks into the document after the next": (name, leaking(source=2, ahead=2, size=1e-6))
        for name in MIXING
    },
    **{f"{name} gives one NaN": (name, with_output(poisoned)) for name in (*MIXING, "rms_norm", "loss")},
    "the delta rule swaps two gradients": (
        "gated_delta_rule",
        with_gradients(2, lambda query, key: (key, query)),
    ),
    "the delta rule leaks in its backward pass alone": ("gated_delta_rule", with_gradients(3, leaking_backward)),
    "the convolution leaks in its backward pass alone": ("causal_conv", with_gradients(1, leaking_backward)),
    "the delta rule drops beta": (
        "gated_delta_rule",
        with_inputs(lambda q, k, v, decay, beta, batch: (q, k, v, decay, 1.0 + 0.0 * beta, batch)),
    ),
    "the delta rule drops the decay": (
        "gated_delta_rule",
        with_inputs(lambda q, k, v, decay, beta, batch: (q, k, v, 0.0 * decay, beta, batch)),
    ),
    "the delta rule pairs values with another group's keys": (
        "gated_delta_rule",
        with_inputs(lambda q, k, *rest: (q.repeat(1, 2, 1), k.repeat(1, 2, 1), *rest)),
    ),
    "the delta rule drops the scale": ("gated_delta_rule", with_output(lambda out, *_: out * 8**0.5)),
    "the convolution drops a tap": (
        "causal_conv",
        with_inputs(lambda x, w, batch: (x, w * w.new_tensor([0, 1, 1, 1]), batch)),
    ),
    "the convolution drops a weight's gradient": (
        "causal_conv",
        with_gradients(2, lambda x, w: (x, torch.zeros_like(w))),
    ),
    "attention sees the future": ("attention", lambda function: not_causal),
    "attention drops the last token": ("attention", with_output(wrong_length)),
    "the norm's weight is plain": ("rms_norm", with_inputs(lambda x, w, eps: (x, w - 1.0, eps))),
    "the norm drops eps": ("rms_norm", with_inputs(lambda x, w, eps: (x, w, 0.0))),
    "the norm beside the sum drops the sum": (
        "add_rms_norm",
        lambda function: lambda x, delta, w, eps: (x + delta, function(x, delta * 0, w, eps)[1]),
    ),
    "the gated norm drops the gate": (
        "gated_rms_norm",
        with_inputs(lambda x, gate, w, eps: (x, 1.2784645 + 0.0 * gate, w, eps)),
    ),
    "the gated norm's eps is ten times too large": (
        "gated_rms_norm",
        with_inputs(lambda x, gate, w, eps: (x, gate, w, 10 * eps)),
    ),
    "the rotation turns backwards": ("norm_rotary", with_inputs(lambda x, w, eps, cos, sin: (x, w, eps, cos, -sin))),
    "the decay forgets its bias": ("delta_gates", with_inputs(lambda a, b, a_log, bias: (a, b, a_log, 0.0 * bias))),
    "the output gate is a silu": ("output_gate", with_output(lambda out, x, gate: out * gate)),
    "SwiGLU swaps gate and up": ("swiglu", with_inputs(lambda gate, up: (up, gate))),
    "SwiGLU overlooks one token": ("swiglu", with_output(lambda out, *_: torch.cat([out[:-1], 0.9 * out[-1:]]))),
    "the loss is shifted by one label": ("loss", with_inputs(lambda h, w, labels, n: (h, w, labels.roll(1), n))),
    "the loss counts what is no target": (
        "loss",
        with_inputs(lambda h, w, labels, n: (h, w, labels.clamp_min(0), len(labels))),
    ),
    "the loss forgets the factor of its backward pass": ("loss", with_gradients(1, lambda h: (h / 0.37,))),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_is_found_and_named(what: str) -> None:
    operation, breaker = BROKEN[what]
    failed = failures(examine(broken(operation, breaker)))
    if operation not in MIXING:
        assert not failed, "the short form examines what mixes tokens"
        failed = failures(examine(broken(operation, breaker), operations=list(TABLE)))
    assert {finding.operation for finding in failed} == {operation}, what
    assert {finding.implementation for finding in failed} == {"torch reference"}
    if "leaks" in what:
        assert all("cross" in f.check or "chang" in f.check for f in failed), "the numbers are right but for the leak"
    if "earlier row" in what:
        assert all(finding.check.startswith("other lengths") for finding in failed)


def test_a_leak_out_of_the_longest_document_is_found_though_the_numbers_hide_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        doctor, "_maker", lambda device, sizes, seed: cases.Maker(cases.NARROW, CPU, torch.bfloat16, seed=seed)
    )
    chosen = broken("attention", leaking(ahead=1, size=0.3))
    (failed,) = failures(examine(chosen, operations=["attention"]))
    assert "changes others" in failed.check


@pytest.mark.parametrize("lengths", [SMALL.odd, cases.AROUND_BLOCKS, SMALL.many, cases.NARROW.many])
def test_every_document_is_changed_beside_each_neighbour_that_is_not(lengths: tuple[int, ...]) -> None:
    sizes = SMALL if sum(lengths) <= SMALL.num_tokens else cases.NARROW
    batch = cases.random_batch(lengths, sizes, torch.Generator().manual_seed(0))
    count = len(cases.documents_of(batch))
    chosen = [{int(i) for i in batch.seq_idx[tokens].unique()} for tokens in cases.sides(batch).values()]
    parted = {(i, j) for side in chosen for i in side for j in set(range(count)) - side}
    pairs = set(itertools.permutations(range(count), 2))
    assert parted <= pairs
    assert parted == pairs or count > 16, "every pair of a few documents"
    assert {(i, j) for i, j in pairs if abs(i - j) == 1} <= parted
    assert len(chosen) <= 8, "one run of the kernel each"


@pytest.mark.parametrize("sizes", [cases.RELEASED, cases.NARROW])
def test_the_examined_delta_rule_has_groups_of_heads_as_the_larger_models_have(sizes: Sizes) -> None:
    assert 1 < sizes.key_heads < sizes.value_heads


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_the_loss_examined_on_a_gpu_takes_several_parts_of_the_row_and_of_the_vocabulary() -> None:
    from trainer.fused import LOSS_BYTES

    sizes = cases.RELEASED
    assert 0.6 * sizes.num_tokens * sizes.loss_vocab * 2 > LOSS_BYTES, "a third of the tokens is no target"
    assert sizes.loss_vocab > 4 * 8192, "what the kernel reads at a time"


def test_tiny_queries_show_a_forgotten_eps() -> None:
    def breaker(function: Function) -> Function:
        return lambda query, key, *rest: function(query * 1e3, key, *rest)  # large enough that eps does nothing

    intact = broken("gated_delta_rule", lambda function: function)
    assert not failures(examine(intact, short=False, operations=["gated_delta_rule"]))
    failed = failures(examine(broken("gated_delta_rule", breaker), short=False, operations=["gated_delta_rule"]))
    assert any(finding.check.startswith("tiny") for finding in failed)


def test_the_references_pass_everything_and_every_operation_is_examined() -> None:
    told: list[Finding] = []
    found = examine(select(CPU), short=False, model=True, say=told.append)
    assert not failures(found)
    assert told == found
    assert {finding.operation for finding in found} == {*TABLE, "model"}
    for operation in MIXING:
        checks = [finding.check for finding in found if finding.operation == operation]
        assert any(check.startswith("other lengths: output") for check in checks)
        assert any(check.startswith("one document: output") for check in checks)
        for row in ("odd lengths", "many documents"):
            assert any(check.startswith(f"{row}: one by one") for check in checks)
            assert any(check.startswith(f"{row}: crosses") for check in checks)


def test_other_seeds_and_bf16_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not failures(examine(select(CPU), operations=list(TABLE), seed=3))
    monkeypatch.setattr(
        doctor, "_maker", lambda device, sizes, seed: cases.Maker(SMALL, CPU, torch.bfloat16, seed=seed)
    )
    assert not failures(examine(select(CPU), operations=list(TABLE)))


@pytest.mark.parametrize(
    "what",
    [
        "attention ignores the boundaries",
        "attention keeps the lengths of an earlier row",
        "the convolution drops a tap",
        "the norm beside the sum drops the sum",
    ],
)
def test_the_whole_model_shows_a_broken_kernel(what: str) -> None:
    failed = failures(examine(broken(*BROKEN[what]), operations=[], model=True))
    assert {finding.operation for finding in failed} == {"model"}
    crosses = any("crosses" in finding.check for finding in failed)
    assert crosses == ("boundaries" in what)


def test_an_exception_in_a_kernel_is_a_finding() -> None:
    def breaker(function: Function) -> Function:
        def called(*arguments: Any) -> Any:
            raise RuntimeError("misaligned address\nand more")

        return called

    failed = failures(examine(broken("causal_conv", breaker)))
    assert {(f.operation, f.reason) for f in failed} == {("causal_conv", "RuntimeError: misaligned address")}


def test_too_little_memory_is_no_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def greedy(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    chosen = dataclasses.replace(select(CPU), causal_conv=greedy)
    monkeypatch.setattr(doctor, "NARROW", SMALL)
    monkeypatch.setattr(doctor, "select", lambda *_, **__: chosen)
    assert doctor.main(["--device", "cpu", "--short"]) == 2
    error = capsys.readouterr().err
    assert "error: too little memory on cpu" in error
    assert "Tried to allocate 9 GiB" in error
    for operations in ([], ["causal_conv"]):  # the model, an operation
        with pytest.raises(ValueError, match="some 50 GiB"):
            examine(chosen, operations=operations, model=not operations)


def test_memory_that_a_kernel_forgets_to_write_does_not_hold_the_right_numbers() -> None:
    seen: list[int] = []

    def recorder(function: Function) -> Function:
        def called(*arguments: Any) -> Any:
            seen.append(sum(int(torch.empty_like(x).isnan().all()) for x in arguments[:3]))
            return function(*arguments)

        return called

    examine(broken("attention", recorder), operations=["attention"])
    assert sum(seen) > 0


def test_nan_infinity_and_missing_results_never_pass() -> None:
    x = torch.ones(4, 3, dtype=torch.float64)
    for wrong in (torch.full_like(x, math.nan), torch.full_like(x, math.inf), None, x[:3]):
        for error in (proofs.whole_error(wrong, x), proofs.token_error(wrong, x)):
            finding = Finding(
                operation="a", implementation="b", version="c", check="d", error=error, bound=1e9, reason="e"
            )
            assert not finding.passed
    assert proofs.worst({"a": 1.0, "b": math.nan})[0] == "b"
    assert proofs.whole_error(torch.zeros_like(x), torch.zeros_like(x)) == 0.0
    assert proofs.whole_error(x, torch.zeros_like(x)) == math.inf


def test_one_wrong_token_of_many_is_measured_by_itself() -> None:
    right = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wrong = right.clone()
    wrong[77] = 0.0
    assert proofs.whole_error(wrong, right) < 0.02 < 0.5 < proofs.token_error(wrong, right)


def test_training_is_refused_with_names_numbers_and_what_to_do() -> None:
    doctor.require(select(CPU), CPU, sizes=SMALL)
    with pytest.raises(ValueError, match="gated_delta_rule") as caught:
        doctor.require(broken("gated_delta_rule", with_boundaries(ignored)), CPU, sizes=SMALL)
    message = str(caught.value)
    assert f"torch reference {torch.__version__}" in message
    assert "at most" in message
    assert "--all" in message


def test_the_command_prints_a_verdict_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "NARROW", SMALL)
    assert doctor.main(["--device", "cpu", "--short", "--json", str(tmp_path / "ok.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS: all ")
    found = json.loads((tmp_path / "ok.json").read_text())
    assert found["passed"]
    assert len(found["findings"]) > 20

    wrong = broken("attention", with_output(poisoned))
    monkeypatch.setattr(doctor, "select", lambda device, accept_slow: wrong)
    assert doctor.main(["--device", "cpu", "--short", "--json", str(tmp_path / "bad.json")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAIL")
    assert "attention (torch reference" in last
    assert not json.loads((tmp_path / "bad.json").read_text())["passed"]


def test_the_record_holds_of_each_subject_the_check_nearest_to_its_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "NARROW", SMALL)
    words = ["--device", "cpu", "--short", "--record", str(tmp_path / "records"), "--commit", "abc"]
    assert doctor.main([*words, "--json", str(tmp_path / "all.json")]) == 0
    (file,) = (tmp_path / "records").iterdir()
    record = json.loads(file.read_text())
    assert (record["what"], record["commit"]) == ("doctor", "abc")
    assert record["command"].startswith("python -m trainer.doctor --device cpu --short")
    figures, findings = record["figures"], json.loads((tmp_path / "all.json").read_text())["findings"]
    assert (figures["checks"]["value"], figures["failed"]["value"]) == (len(findings), 0)
    of_one = [finding for finding in findings if finding["operation"] == "causal_conv"]
    worst = max(of_one, key=lambda finding: finding["error"] / finding["bound"] if finding["bound"] else 0)
    (name,) = (name for name in figures if name.startswith("causal_conv on torch reference"))
    assert figures[name]["value"] == worst["error"]
    assert worst["check"] in figures[name]["unit"]


@pytest.mark.parametrize("option", ["--record", "--json"])
def test_a_place_that_cannot_serve_is_refused_before_anything_is_examined(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    (tmp_path / "file").touch()
    assert doctor.main(["--device", "cpu", "--short", option, str(tmp_path / "file" / "x")]) == 2
    said = capsys.readouterr()
    assert f"error: {option} " in said.err
    assert "PASS" not in said.out


def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main(["--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_all_examines_every_usable_implementation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    intact = TABLE["swiglu"][-1]
    second = dataclasses.replace(intact, name="wrong one", load=lambda: (lambda gate, up: gate, "0.1"))
    monkeypatch.setitem(kernels.TABLE, "swiglu", (intact, second, intact))
    monkeypatch.setattr(doctor, "NARROW", SMALL)
    assert doctor.main(["--device", "cpu", "--all"]) == 1
    assert "swiglu (wrong one 0.1)" in capsys.readouterr().out.splitlines()[-1]
