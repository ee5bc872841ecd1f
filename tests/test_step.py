"""One step: one gradient however its rows are laid out, safe without targets, stopped before it ruins weights."""

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.shards import PackedDataset
from tests.packed import make_packed, random_rows
from trainer.batches import IGNORE_INDEX, Batch, Reader, StepBatches
from trainer.kernels import select
from trainer.model import Qwen3_5ForCausalLM, keeps_fp32
from trainer.optimizer import make_optimizer
from trainer.plan import epoch_order
from trainer.sizes import sample_config
from trainer.step import (
    DivergedError,
    Schedule,
    StepResult,
    compute_gradients,
    evaluate,
    gradient_norm,
    learning_rate,
    train_step,
)

CPU = torch.device("cpu")
VOCAB = 64


def make_model() -> Qwen3_5ForCausalLM:
    config = sample_config(vocab_size=VOCAB, pad_token_id=0, eos_token_ids=[1])
    model = Qwen3_5ForCausalLM(config, kernels=select(CPU))
    model.init_weights(seed=0)
    return model


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = random_rows(num_rows=8, max_tokens=48, vocab_size=VOCAB)
    rows[3] = [(doc, ids, [False] * len(ids)) for doc, ids, _ in rows[3]]  # one row has no target
    return make_packed(tmp_path_factory.mktemp("step") / "packed", rows, max_tokens=48, vocab_size=VOCAB)


def read(dataset: Path, *, micro_rows: int, rank: int = 0, world_size: int = 1, num_rows: int = 8) -> StepBatches:
    reader = Reader(dataset=PackedDataset.open(dataset), rank=rank, world_size=world_size, micro_rows=micro_rows)
    return reader.read(epoch_order(num_rows=8, seed=0, epoch=0)[:num_rows])


def num_targets(batches: StepBatches) -> int:
    return sum(batch.num_targets for batch in batches.micro)


def gradient(model: Qwen3_5ForCausalLM) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradient_of(dataset: Path, *, micro_rows: int) -> tuple[float, Tensor]:
    model, batches = make_model(), read(dataset, micro_rows=micro_rows)
    loss = compute_gradients(model, batches.micro, num_targets=num_targets(batches), device=CPU)
    return float(loss), gradient(model)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def do_step(model: Qwen3_5ForCausalLM, batches: StepBatches, *, clip: float = 1.0, lr: float = 1e-2) -> StepResult:
    optimizer = make_optimizer(model, lr=lr, weight_decay=0.1)
    return train_step(model, optimizer, batches, step=7, lr=lr, clip=clip, device=CPU)


def weights(model: Qwen3_5ForCausalLM) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def without_targets(batches: StepBatches) -> StepBatches:
    return dataclasses.replace(
        batches,
        micro=tuple(
            dataclasses.replace(b, labels=torch.full_like(b.labels, IGNORE_INDEX), num_targets=0) for b in batches.micro
        ),
    )


@pytest.mark.parametrize("micro_rows", [8, 4, 3])
def test_one_by_eight_and_eight_by_one_rows_have_one_gradient(dataset: Path, micro_rows: int) -> None:
    expected_loss, expected = gradient_of(dataset, micro_rows=1)
    loss, found = gradient_of(dataset, micro_rows=micro_rows)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative(found, expected) < 1e-5


def test_a_mean_of_means_would_be_noticed(dataset: Path) -> None:
    _, expected = gradient_of(dataset, micro_rows=1)
    model, batches = make_model(), read(dataset, micro_rows=1)
    for batch in batches.micro:
        (model(batch) / max(1, batch.num_targets) / len(batches.micro)).backward()
    assert relative(gradient(model), expected) > 1e-2


def test_the_loss_is_the_mean_over_targets(dataset: Path) -> None:
    model, batches = make_model(), read(dataset, micro_rows=8)
    (batch,) = batches.micro
    log_probabilities = model.logits(batch).log_softmax(-1)
    at = batch.labels != IGNORE_INDEX
    expected = -log_probabilities[at, batch.labels[at]].mean().item()
    result = do_step(model, batches)
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert (result.step, result.num_rows, result.num_targets) == (7, 8, int(at.sum()))


def _rank(rank: int, world_size: int, dataset: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    model = make_model()
    results = []
    for num_rows in (8, 1):  # with one row, the other rank runs padding
        batches = read(dataset, micro_rows=4, rank=rank, world_size=world_size, num_rows=num_rows)
        results.append(do_step(model, batches))
    broken = without_targets(read(dataset, micro_rows=4, rank=rank, world_size=world_size))
    results.append(do_step(model, broken))
    source = [read(dataset, micro_rows=4, rank=rank, world_size=world_size)]
    loss = evaluate(model, source, device=CPU)
    torch.save((results, weights(model), loss), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_by_four_rows_do_the_same_step_as_one_rank(dataset: Path, tmp_path: Path) -> None:
    mp.spawn(_rank, args=(2, dataset, tmp_path), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    model = make_model()
    expected = [do_step(model, read(dataset, micro_rows=8, num_rows=n)) for n in (8, 1)]
    for results, _, _ in found:
        for result, wanted in zip(results, expected, strict=False):
            assert result.num_targets == wanted.num_targets
            assert result.num_tokens == wanted.num_tokens
            assert result.loss == pytest.approx(wanted.loss, rel=1e-5)
            assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        assert results[2].loss is None
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1].values(), found[1][1].values(), strict=True))
    loss = evaluate(model, [read(dataset, micro_rows=8)], device=CPU)
    assert found[0][2] == found[1][2] == pytest.approx(loss, rel=1e-3)


def test_a_step_without_a_target_changes_nothing_and_says_so(dataset: Path) -> None:
    model = make_model()
    before = weights(model)
    result = do_step(model, without_targets(read(dataset, micro_rows=4)))
    assert (result.loss, result.grad_norm, result.num_targets) == (None, None, 0)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_micro_batch_without_a_target_adds_nothing(dataset: Path) -> None:
    batches = read(dataset, micro_rows=4)
    first, second = batches.micro
    (silent,) = without_targets(dataclasses.replace(batches, micro=(second,))).micro

    def of(micro: tuple[Batch, ...]) -> Tensor:
        model = make_model()
        compute_gradients(model, micro, num_targets=first.num_targets, device=CPU)
        return gradient(model)

    assert torch.equal(of((first, silent)), of((first,)))
    assert torch.isfinite(of((silent,))).all()


def test_a_step_lowers_the_loss_and_leaves_no_gradient_behind(dataset: Path) -> None:
    model, batches = make_model(), read(dataset, micro_rows=4)
    first = do_step(model, batches)
    assert all(p.grad is None for p in model.parameters())
    second = do_step(model, batches)
    assert first.loss is not None
    assert second.loss is not None
    assert second.loss < first.loss


@pytest.mark.parametrize("clip", [0.0, 1e-3, 1e3])
def test_the_norm_is_that_of_the_whole_gradient_before_clipping(dataset: Path, clip: float) -> None:
    _, expected = gradient_of(dataset, micro_rows=8)
    result = do_step(make_model(), read(dataset, micro_rows=8), clip=clip)
    assert result.grad_norm == pytest.approx(float(expected.double().norm()), rel=1e-5)


def test_clipping_scales_the_gradient_that_the_optimizer_sees(dataset: Path) -> None:
    model = make_model()
    seen = {}

    class Watching(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            seen["norm"] = float(gradient(model).norm())

    optimizer = Watching(model.parameters(), lr=0.1)
    for clip in (0.01, 0.0):
        batches = read(dataset, micro_rows=8)
        result = train_step(model, optimizer, batches, step=1, lr=0.5, clip=clip, device=CPU)
        assert seen["norm"] == pytest.approx(clip or result.grad_norm, rel=1e-3)
        assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_update(dataset: Path, value: float) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[0] = value
    before = weights(model)
    batches = read(dataset, micro_rows=8)
    with pytest.raises(DivergedError, match="step 7: loss") as caught:
        do_step(model, batches)
    message = str(caught.value)
    assert " ".join(map(str, batches.rows)) in message
    assert " ".join(map(str, sorted(batches.doc_ids))) in message
    assert all(torch.equal(before[n], p.nan_to_num(nan=0.5)) or "norm" in n for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_that_is_not_finite_stops_too(dataset: Path) -> None:
    model = make_model()
    model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
    before = weights(model)
    with pytest.raises(DivergedError, match=r"gradient norm (inf|nan)"):
        do_step(model, read(dataset, micro_rows=8))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_bf16_weights_and_gradients_give_a_loss_close_to_fp32(dataset: Path) -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model().to_dtype(dtype)
        result = do_step(model, read(dataset, micro_rows=4))
        losses.append(result.loss)
        narrow = {p.dtype for name, p in model.named_parameters() if not keeps_fp32(name)}
        assert narrow == {dtype}
        assert {p.dtype for name, p in model.named_parameters() if keeps_fp32(name)} == {torch.float32}
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1] != losses[0]


@pytest.mark.parametrize("micro_rows", [8, 3])
def test_bf16_micro_steps_have_one_gradient_within_its_rounding(dataset: Path, micro_rows: int) -> None:
    def of(micro_rows: int) -> Tensor:
        model, batches = make_model().to_dtype(torch.bfloat16), read(dataset, micro_rows=micro_rows)
        compute_gradients(model, batches.micro, num_targets=num_targets(batches), device=CPU)
        return gradient(model)

    assert relative(of(micro_rows), of(1)) < 2e-2


def test_bf16_micro_steps_are_added_up_in_fp32_and_rounded_once(dataset: Path) -> None:
    batches = read(dataset, micro_rows=1)
    assert len(batches.micro) == 8
    count = num_targets(batches)
    model = make_model().to_dtype(torch.bfloat16)
    expected = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for micro in batches.micro:
        compute_gradients(model, [micro], num_targets=count, device=CPU)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                expected[name] += parameter.grad.float()
        model.zero_grad()

    def found(*, wide_sums: bool) -> dict[str, Tensor]:
        model.zero_grad()
        compute_gradients(model, batches.micro, num_targets=count, device=CPU, wide_sums=wide_sums)
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    wide, narrow = found(wide_sums=True), found(wide_sums=False)
    assert wide.keys() == expected.keys()
    assert all(torch.equal(wide[name], total.to(wide[name].dtype)) for name, total in expected.items())
    assert not all(torch.equal(narrow[name], wide[name]) for name in wide)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(50, 40).bfloat16(), torch.randn(7), torch.randn(300).bfloat16()]
    expected = torch.cat([g.double().flatten() for g in gradients]).norm()
    assert float(gradient_norm(gradients)) == pytest.approx(float(expected), rel=1e-6)


def test_evaluation_is_the_mean_over_targets_whatever_the_batches(dataset: Path) -> None:
    model = make_model()
    expected, _ = gradient_of(dataset, micro_rows=8)
    for micro_rows in (1, 3, 8):
        found = evaluate(model, [read(dataset, micro_rows=micro_rows)], device=CPU)
        assert found == pytest.approx(expected, rel=1e-6)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_without_a_target_has_no_loss(dataset: Path) -> None:
    source = [without_targets(read(dataset, micro_rows=8))]
    assert evaluate(make_model(), source, device=CPU) is None


def rates(schedule: Schedule, *, warmup_steps: int, total_steps: int) -> list[float]:
    steps = range(1, total_steps + 1)
    return [
        learning_rate(s, peak=1.0, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps) for s in steps
    ]


def test_the_linear_schedule_is_the_worked_example() -> None:
    assert rates("linear", warmup_steps=2, total_steps=6) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])


def test_a_cosine_is_at_half_its_height_in_the_middle() -> None:
    assert rates("cosine", warmup_steps=0, total_steps=4) == pytest.approx([1, 0.853553, 0.5, 0.146447], rel=1e-5)


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    warmup_steps=st.integers(0, 30),
    total_steps=st.integers(1, 30),
)
def test_a_rate_rises_to_its_peak_then_never_rises_and_never_reaches_zero(
    schedule: Schedule, warmup_steps: int, total_steps: int
) -> None:
    found = rates(schedule, warmup_steps=warmup_steps, total_steps=total_steps)
    top = min(max(warmup_steps, 1), total_steps)
    assert all(a < b for a, b in pairwise(found[:top]))
    assert all(a >= b > 0 for a, b in pairwise(found[top - 1 :]))
    assert max(found) <= 1
    assert warmup_steps > total_steps or found[top - 1] == 1
