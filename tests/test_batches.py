"""Rows laid end to end: boundaries as in the shard, labels that cross none, a thread that behaves."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.shards import PackedDataset, Row
from tests.packed import make_packed, random_rows
from trainer.batches import IGNORE_INDEX, Batch, Prefetch, Reader, make_batch, padding_row
from trainer.plan import Plan


def make_row(lengths: list[int], *, num_pieces: int | None = None, first_id: int = 10) -> Row:
    """Segments of these lengths, every token but a piece's first a target; the rest of them padding."""
    num_pieces = len(lengths) if num_pieces is None else num_pieces
    boundaries = np.cumsum([0, *lengths]).astype(np.int32)
    mask = np.ones(boundaries[-1], np.bool_)
    mask[boundaries[:-1]] = False
    mask[boundaries[num_pieces] :] = False
    return Row(
        input_ids=np.arange(first_id, first_id + boundaries[-1], dtype=np.int32),
        position_ids=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        loss_mask=mask,
        boundaries=boundaries,
        doc_ids=np.arange(num_pieces, dtype=np.int64),
        pieces=np.zeros(num_pieces, np.int32),
    )


def test_two_rows_become_one_sequence() -> None:
    batch = make_batch([make_row([3, 1]), make_row([4], first_id=50)], max_seqlen=4)
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 50, 51, 52, 53]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == batch.cu_seqlens_cpu.tolist() == [0, 3, 4, 8]
    assert batch.seq_idx.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert batch.labels.tolist() == [11, 12, -100, -100, 51, 52, 53, -100]
    assert batch.max_seqlen == 4


def test_tensors_have_the_types_that_kernels_take() -> None:
    batch = make_batch([make_row([3, 1])], max_seqlen=4)
    assert {batch.cu_seqlens.dtype, batch.cu_seqlens_cpu.dtype, batch.seq_idx.dtype} == {torch.int32}
    assert {batch.input_ids.dtype, batch.position_ids.dtype, batch.labels.dtype} == {torch.int64}
    assert isinstance(batch.max_seqlen, int)


def test_counts_leave_the_padding_out() -> None:
    batch = make_batch([make_row([3, 2, 3], num_pieces=2), make_row([8])], max_seqlen=8)
    assert batch.num_tokens == 5 + 8
    assert batch.sum_squared_lengths == 9 + 4 + 64
    assert batch.num_targets == 2 + 1 + 7 == int((batch.labels != IGNORE_INDEX).sum())
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 16]  # the tail is one segment


def test_a_mask_with_holes_is_kept() -> None:
    row = make_row([6])
    mask = np.array([0, 1, 0, 0, 1, 1], np.bool_)
    row = Row(**{name: getattr(row, name) for name in Row.__dataclass_fields__} | {"loss_mask": mask})
    assert make_batch([row], max_seqlen=6).labels.tolist() == [11, -100, -100, 14, 15, -100]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 2),
)
def test_no_label_crosses_a_boundary_and_every_target_has_one(lengths: list[list[int]], padded: int) -> None:
    rows = [make_row(n, num_pieces=max(0, len(n) - (padded > 0))) for n in lengths]
    batch = make_batch(rows, max_seqlen=9)
    labels, segments = batch.labels.tolist(), batch.seq_idx.tolist()
    for t, label in enumerate(labels):
        if label != IGNORE_INDEX:
            assert segments[t] == segments[t + 1]
            assert label == batch.input_ids[t + 1]
    assert batch.num_targets == sum(label != IGNORE_INDEX for label in labels)
    assert torch.equal(torch.diff(batch.cu_seqlens), torch.bincount(batch.seq_idx).int())


def test_each_batch_has_boundaries_of_its_own() -> None:
    row = make_row([4])
    first, second = make_batch([row], max_seqlen=4), make_batch([row], max_seqlen=4)
    pointers = {t.data_ptr() for b in (first, second) for t in (b.cu_seqlens, b.cu_seqlens_cpu)}
    assert len(pointers) == 4


def test_a_target_at_the_begin_of_a_segment_is_refused() -> None:
    row = make_row([2, 2])
    mask = np.array([0, 1, 1, 0], np.bool_)
    row = Row(**{name: getattr(row, name) for name in Row.__dataclass_fields__} | {"loss_mask": mask})
    with pytest.raises(ValueError, match="cross a boundary"):
        make_batch([row], max_seqlen=4)


def test_a_segment_longer_than_the_manifest_says_is_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens, more than the 4"):
        make_batch([make_row([5])], max_seqlen=4)


def test_a_padding_row_has_no_document_and_no_target() -> None:
    batch = make_batch([padding_row(num_tokens=8, pad_id=7, max_seqlen=8)], max_seqlen=8)
    assert batch.input_ids.tolist() == [7] * 8
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert (batch.num_targets, batch.num_tokens, batch.sum_squared_lengths) == (0, 0, 0)


def test_a_padding_row_keeps_to_the_longest_segment_of_the_run() -> None:
    batch = make_batch([padding_row(num_tokens=8, pad_id=7, max_seqlen=3)], max_seqlen=3)
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_moving_to_the_cpu_changes_nothing() -> None:
    batch = make_batch([make_row([4])], max_seqlen=4)
    assert batch.to(torch.device("cpu")) is batch


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = random_rows(num_rows=7, max_tokens=32, vocab_size=64)
    return make_packed(tmp_path_factory.mktemp("data") / "packed", rows, max_tokens=32, vocab_size=64)


def targets(batches: tuple[Batch, ...]) -> int:
    return sum(batch.num_targets for batch in batches)


@pytest.mark.parametrize(("world_size", "micro_rows"), [(1, 1), (1, 8), (2, 2), (3, 1), (9, 1)])
def test_all_ranks_together_read_the_step(dataset: Path, world_size: int, micro_rows: int) -> None:
    packed = PackedDataset.open(dataset)
    rows = Plan.build(num_rows=7, seed=0, rows_per_step=7, epochs=1, steps=None).rows(rows_seen=0)
    steps = [
        Reader(dataset=packed, rank=r, world_size=world_size, micro_rows=micro_rows).read(rows)
        for r in range(world_size)
    ]
    assert {len(step.micro) for step in steps} == {-(-7 // (world_size * micro_rows))}
    assert sum(targets(step.micro) for step in steps) == packed.manifest.totals["targets"]
    assert sum(b.num_tokens for step in steps for b in step.micro) == packed.manifest.totals["tokens"]
    documents = sorted({int(doc) for row in packed for doc in row.doc_ids})
    assert sorted(doc for step in steps for doc in step.doc_ids) == documents


def test_a_reader_follows_the_plan_to_its_end(dataset: Path) -> None:
    reader = Reader(dataset=PackedDataset.open(dataset), micro_rows=2)
    plan = Plan.build(num_rows=7, seed=1, rows_per_step=4, epochs=1, steps=None)
    steps = list(reader.read_all(plan, rows_seen=0))
    assert [len(step.rows) for step in steps] == [4, 3]
    assert sorted(row for step in steps for row in step.rows) == list(range(7))
    assert [step.rows for step in reader.read_all(plan, rows_seen=4)] == [steps[1].rows]


def test_prefetching_keeps_order_and_ends() -> None:
    with Prefetch(iter(range(100)), depth=3) as items:
        assert list(items) == list(range(100))
        assert list(items) == []


def test_prefetching_stays_within_its_queue() -> None:
    made = []

    def source() -> Iterator[int]:
        for i in range(50):
            made.append(i)
            yield i

    with Prefetch(source(), depth=2) as items:
        assert next(items) == 0
        time.sleep(0.3)
        assert len(made) <= 1 + 2 + 1  # taken, queued, waiting to be queued


def test_an_error_while_prefetching_comes_where_its_item_would_have() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    with Prefetch(source()) as items:
        assert next(items) == 1
        with pytest.raises(OSError, match="the disk is gone"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def test_leaving_early_ends_the_thread() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 0

    def use() -> None:
        with Prefetch(endless()) as items:
            next(items)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
