"""Warming up meets every kind of row and leaves the model as it was."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.shards import PackedDataset
from tests.packed import make_packed, random_rows
from tests.tiny import tiny_model
from trainer.batches import make_batch
from trainer.kernels import select
from trainer.plan import Plan, rank_share
from trainer.warmup import SEGMENTS, Use, made_up_row, row_counts, warm_up, warm_up_all

CPU = torch.device("cpu")


def test_warming_up_meets_every_number_of_documents_and_changes_nothing() -> None:
    kernels, met = select(CPU), []

    def conv(x: Any, weight: Any, bounds: Any) -> Any:
        met.append((len(bounds.cu_seqlens) - 1, torch.is_grad_enabled()))
        return kernels.causal_conv(x, weight, bounds)

    model = tiny_model(kernels=dataclasses.replace(kernels, causal_conv=conv))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    warm_up(model, num_tokens=64, micro_rows=2, max_seqlen=64, device=CPU)
    assert set(met) == {(2 * number, grad) for number in SEGMENTS for grad in (True, False)}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@given(
    num_rows=st.integers(1, 40),
    rows_per_step=st.integers(1, 9),
    micro_rows=st.integers(1, 5),
    world_size=st.integers(1, 3),
    data=st.data(),
)
def test_every_micro_step_of_a_run_holds_a_number_of_rows_that_was_warmed_up(
    num_rows: int, rows_per_step: int, micro_rows: int, world_size: int, data: st.DataObject
) -> None:
    plan = Plan.build(num_rows=num_rows, seed=0, rows_per_step=rows_per_step, epochs=1, steps=None)
    begin = seen = data.draw(st.integers(0, num_rows))
    rank = data.draw(st.integers(0, world_size - 1))
    met: set[int] = set()
    while len(rows := plan.rows(rows_seen=seen)):
        share = rank_share(rows, rank=rank, world_size=world_size, micro_rows=micro_rows)
        met |= {max(1, len(ids)) for ids in share}
        seen += len(rows)
    use = Use(dataset=cast(Any, None), num_rows=plan.total_rows - begin, at_once=rows_per_step)
    found = row_counts(use, rank=rank, world_size=world_size, micro_rows=micro_rows)
    assert found == sorted(met, reverse=True)


def test_rows_of_evaluation_alone_leave_no_gradient_behind() -> None:
    grads: list[bool] = []
    model = tiny_model()
    model.register_forward_hook(lambda *_: grads.append(torch.is_grad_enabled()))
    warm_up(model, num_tokens=40, micro_rows=1, max_seqlen=40, device=CPU, training=False)
    assert grads == [False] * len(SEGMENTS)


def test_rows_of_evaluation_are_met_before_the_first_step_too(tmp_path: Path) -> None:
    rows, others = (
        make_packed(
            tmp_path / str(length),
            random_rows(num_rows=10, max_tokens=length, vocab_size=300),
            max_tokens=length,
            vocab_size=300,
        )
        for length in (32, 48)
    )
    met: list[tuple[int, bool]] = []
    model = tiny_model()
    model.register_forward_hook(lambda _, batches, __: met.append((len(batches[0].input_ids), torch.is_grad_enabled())))
    uses = [
        Use(dataset=PackedDataset.open(rows), num_rows=8, at_once=4),
        Use(dataset=PackedDataset.open(rows), num_rows=10, at_once=4, training=False),
        Use(dataset=PackedDataset.open(others), num_rows=10, at_once=4, training=False),
    ]
    warm_up_all(model, uses, rank=0, world_size=1, micro_rows=4, device=CPU)
    kinds = {(128, True), (128, False), (64, False), (192, False), (96, False)}
    assert set(met) == kinds
    assert len({met.count(kind) for kind in kinds}) == 1, "nothing is met twice"


def test_no_made_up_document_is_longer_than_kernels_are_told() -> None:
    warm_up(tiny_model(), num_tokens=40, micro_rows=1, max_seqlen=15, device=CPU)
    with pytest.raises(ValueError, match="max_segment_tokens"):
        make_batch([made_up_row(num_tokens=40, num_segments=2)], max_seqlen=15)


@given(num_tokens=st.integers(1, 300), number=st.sampled_from(SEGMENTS))
def test_a_made_up_row_is_a_valid_row(num_tokens: int, number: int) -> None:
    num_segments = min(num_tokens, number)
    row = made_up_row(num_tokens=num_tokens, num_segments=num_segments)
    batch = make_batch([row], max_seqlen=num_tokens)
    assert len(batch.cu_seqlens) == num_segments + 1
    assert (batch.cu_seqlens.diff() > 0).all()
    assert batch.position_ids[batch.cu_seqlens[:-1]].tolist() == [0] * num_segments
    assert batch.num_targets == int(row.loss_mask.sum())
