"""The order of rows: a permutation each epoch, and the same whoever asks, and from wherever one resumes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.plan import MAX_SEED, Cursor, Plan, epoch_order, rank_share, stream_rows

SEEDS = st.integers(0, MAX_SEED)


def make_plan(*, num_rows: int, rows_per_step: int, epochs: int = 1, steps: int | None = None, seed: int = 0) -> Plan:
    return Plan.build(num_rows=num_rows, seed=seed, rows_per_step=rows_per_step, epochs=epochs, steps=steps)


def walk(plan: Plan, *, rows_seen: int = 0) -> list[list[int]]:
    steps = []
    while len(rows := plan.rows(rows_seen=rows_seen)):
        steps.append(rows.tolist())
        rows_seen += len(rows)
    return steps


def test_the_order_is_the_golden_one() -> None:
    assert epoch_order(num_rows=10, seed=0, epoch=0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]


def test_other_seeds_and_epochs_have_other_orders() -> None:
    orders = {tuple(epoch_order(num_rows=50, seed=seed, epoch=epoch)) for seed in (0, 1, MAX_SEED) for epoch in (0, 1)}
    assert len(orders) == 6


@given(num_rows=st.integers(1, 300), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_an_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_order(num_rows=num_rows, seed=seed, epoch=epoch)), np.arange(num_rows))


def test_an_order_cannot_be_changed_by_whoever_reads_it() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(num_rows=4, seed=0, epoch=0)[0] = 1


@given(num_rows=st.integers(1, 40), seed=SEEDS, first=st.integers(0, 200), count=st.integers(0, 100))
def test_the_stream_is_one_epoch_after_the_other(num_rows: int, seed: int, first: int, count: int) -> None:
    epochs = range((first + count) // num_rows + 1)
    whole = np.concatenate([epoch_order(num_rows=num_rows, seed=seed, epoch=e) for e in epochs])
    found = stream_rows(num_rows=num_rows, seed=seed, first=first, count=count)
    assert np.array_equal(found, whole[first : first + count])


@given(num_rows=st.integers(1, 60), rows_per_step=st.integers(1, 70), epochs=st.integers(1, 3))
def test_epochs_take_every_row_as_often_as_there_are_epochs(num_rows: int, rows_per_step: int, epochs: int) -> None:
    plan = make_plan(num_rows=num_rows, rows_per_step=rows_per_step, epochs=epochs)
    steps = walk(plan)
    counts = np.bincount([row for step in steps for row in step], minlength=num_rows)
    assert (counts == epochs).all()
    assert len(steps) == plan.steps_left(rows_seen=0) == -(-epochs * num_rows // rows_per_step)
    assert all(len(step) == rows_per_step for step in steps[:-1])


def test_a_number_of_steps_replaces_the_epochs_and_every_step_is_full() -> None:
    steps = walk(make_plan(num_rows=3, rows_per_step=2, steps=5))
    assert [len(step) for step in steps] == [2, 2, 2, 2, 2]


def test_more_rows_in_a_step_than_in_the_dataset_span_several_epochs() -> None:
    (step,) = walk(make_plan(num_rows=1, rows_per_step=4, steps=1))
    assert step == [0, 0, 0, 0]
    assert walk(make_plan(num_rows=1, rows_per_step=4)) == [[0]]


@given(num_rows=st.integers(1, 40), rows_per_step=st.integers(1, 20), epochs=st.integers(1, 3), data=st.data())
def test_resuming_at_any_step_continues_the_same_rows(
    num_rows: int, rows_per_step: int, epochs: int, data: st.DataObject
) -> None:
    plan = make_plan(num_rows=num_rows, rows_per_step=rows_per_step, epochs=epochs)
    steps = walk(plan)
    stop = data.draw(st.integers(0, len(steps)))
    seen = sum(map(len, steps[:stop]))
    assert walk(plan, rows_seen=seen) == steps[stop:]
    assert plan.steps_left(rows_seen=seen) == len(steps) - stop


def test_resuming_at_the_very_end_of_an_epoch_goes_on_with_the_next_one() -> None:
    plan = make_plan(num_rows=10, rows_per_step=5, epochs=2)
    assert walk(plan, rows_seen=10) == epoch_order(num_rows=10, seed=0, epoch=1).reshape(2, 5).tolist()


def test_at_the_end_nothing_is_left() -> None:
    plan = make_plan(num_rows=10, rows_per_step=4)
    assert plan.rows(rows_seen=10).tolist() == []
    assert plan.steps_left(rows_seen=10) == 0


@given(num_rows=st.integers(1, 40), world_size=st.integers(1, 9), micro_rows=st.integers(1, 5), seed=st.integers(0, 99))
def test_ranks_and_micro_batches_share_a_step_without_repeating_or_losing_a_row(
    num_rows: int, world_size: int, micro_rows: int, seed: int
) -> None:
    rows = epoch_order(num_rows=num_rows, seed=seed, epoch=0)
    shares = [rank_share(rows, rank=r, world_size=world_size, micro_rows=micro_rows) for r in range(world_size)]
    assert {len(share) for share in shares} == {-(-num_rows // (world_size * micro_rows))}
    assert all(len(part) <= micro_rows for share in shares for part in share)
    taken = [np.concatenate(share) for share in shares]
    assert sorted(np.concatenate(taken)) == sorted(rows)
    for rank, mine in enumerate(taken):
        assert mine.tolist() == rows[rank::world_size].tolist()


def test_evaluation_visits_each_row_once() -> None:
    assert sorted(make_plan(num_rows=3, rows_per_step=1).evaluation_rows(num_rows=7)) == list(range(7))


def test_a_state_is_continued_where_it_was() -> None:
    cursor = Cursor(dataset_id="abc", seed=3)
    cursor.advance(8)
    cursor.advance(2)
    state = cursor.state()
    assert state == {"version": 1, "dataset_id": "abc", "seed": 3, "plan_version": 1, "rows_seen": 10}
    assert Cursor.from_state(state, dataset_id="abc", seed=3) == cursor


@pytest.mark.parametrize(("name", "value"), [("version", 2), ("plan_version", 2), ("dataset_id", "other"), ("seed", 4)])
def test_a_state_of_another_run_is_refused_with_the_differing_field(name: str, value: object) -> None:
    state = Cursor(dataset_id="abc", seed=3).state() | {name: value}
    with pytest.raises(ValueError, match=rf"{name}: {value!r} in the checkpoint"):
        Cursor.from_state(state, dataset_id="abc", seed=3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_rows": 0}, "0 rows"),
        ({"rows_per_step": 0}, "--rows-per-step 0"),
        ({"epochs": 0}, "--epochs 0"),
        ({"steps": 0}, "--steps 0"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**63}, "2\\*\\*63 - 1"),
    ],
)
def test_what_has_no_order_is_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(**{"num_rows": 4, "rows_per_step": 2} | changed)
