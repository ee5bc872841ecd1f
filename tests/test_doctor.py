"""The doctor finds and names every broken kernel, and passes the intact ones."""

import itertools
import math
from typing import Any

import pytest
import torch

from tests.broken import BROKEN, CPU, SMALL, Function, broken, examine, failures, leaking
from trainer import cases, doctor, proofs
from trainer.cases import MIXING, Sizes
from trainer.kernels import TABLE, select
from trainer.proofs import Finding


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
