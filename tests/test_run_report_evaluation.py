"""A run that was resumed with another evaluation set: what its report says of the losses of both."""

from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.runs import as_json, report, tables
from tests.training import make_base, packed, run
from trainer.report.figures import EvalChange, figures
from trainer.report.log import read

UNKNOWN = EvalChange(last_step=None)


def start(rows: str | None, *, every: int = 0, total: int = 10) -> dict[str, Any]:
    """A start's record."""
    return runs.config(settings={"eval_every": every, "steps": total}, total_steps=total, eval_dataset_id=rows)


def written(folder: Path, starts: list[dict[str, Any]], evaluated: list[int]) -> Path:
    *earlier, last = starts
    evaluations = [{"step": step, "eval_loss": 5.0 - step / 8} for step in evaluated]
    return runs.write(folder, [runs.step(1), *evaluations], last | {"earlier": earlier})


@pytest.mark.parametrize(
    ("starts", "evaluated", "expected"),
    [
        # Who made an evaluation follows from its step.
        ([start("a"), start("b", total=20)], [0, 10, 20], EvalChange(last_step=10)),
        ([start("a", every=3, total=12), start("b", every=5, total=12)], [0, 3, 6, 10, 12], EvalChange(last_step=6)),
        ([start("a"), start("a", total=15), start("b", total=20)], [0, 10, 15, 20], EvalChange(last_step=15)),
        ([start("a"), start(None, total=15), start("b", total=20)], [0, 10, 20], EvalChange(last_step=10)),
        ([start("a", every=4), start("b", every=4, total=20)], [0, 4, 8, 10, 12, 16, 20], EvalChange(last_step=10)),
        # It does not: that after step 10 can be either's, and so can all of them.
        ([start("a", every=3), start("b", every=5, total=20)], [0, 3, 6, 10, 15, 20], UNKNOWN),
        ([start("a", every=5), start("b", every=5, total=20)], [0, 5, 10, 15, 20], UNKNOWN),
        ([start("a", every=2, total=20), start("b", every=2, total=20)], [0, 2, 4, 6], UNKNOWN),
        ([start("a"), start("b", total=20), start("a", total=30)], [0, 10, 20, 30], UNKNOWN),
        ([start("a") | {"settings": 5}, start("b", total=20)], [0, 10, 20], UNKNOWN),
        ([start("a") | {"total_steps": "x"}, start("b", total=20)], [0, 10, 20], UNKNOWN),
        ([start("a"), start("b", total=20)], [0, 7, 20], UNKNOWN),  # nobody's
        # Epochs may end with a smaller step, so the later start may have one step more than it recorded.
        ([start("a"), start("b", total=20)], [0, 10, 21], EvalChange(last_step=10)),
        # One set alone.
        ([start("a"), start("a", total=20)], [0, 10, 20], None),
        ([start(None), start("b", total=20)], [10, 20], None),
        ([start("a"), start(None, total=20)], [0, 10], None),
        ([start("a"), start("b", total=20)], [0], None),
        ([start("a"), start("b", total=20)], [], None),
        ([start("a"), start("b", every=3, total=20)], [3, 6, 20], None),  # no checkpoint yet: begun anew
        ([start("a", every=3, total=20), start("b", total=20)], [3, 6], None),
    ],
)
def test_a_changed_evaluation_set_is_told_and_where_if_the_schedules_tell(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    starts: list[dict[str, Any]],
    evaluated: list[int],
    expected: EvalChange | None,
) -> None:
    folder = written(tmp_path / "r", starts, evaluated)
    assert figures(read(folder), now=0).eval_change == expected
    page = report(folder)
    printed = capsys.readouterr().out
    if expected is None:
        line = None
    elif expected.last_step is None:
        line = "changed on a resume, and the log does not tell at which step: losses before and after it are"
    else:
        line = f"changed on a resume: evaluations up to step {expected.last_step} are of other rows than later ones."
    for text in (page, printed):
        assert text.count("The evaluation set changed") == (line is not None)
        assert line is None or f"The evaluation set {line}" in text


def test_the_chart_has_a_line_for_each_set_where_it_is_known_which_loss_is_whose(tmp_path: Path) -> None:
    known = written(tmp_path / "known", [start("a"), start("b", total=20)], [0, 10, 20])
    rows = tables(report(known))["Training and evaluation loss"]
    assert rows[0] == ["step", "training", "evaluation, former set", "evaluation"]
    assert [row[2:] for row in rows[1:]] == [["5.0000", ""], ["", ""], ["3.7500", ""], ["", "2.5000"]]
    unknown = written(tmp_path / "unknown", [start("a", every=5), start("b", every=5)], [0, 5, 10])
    assert tables(report(unknown))["Training and evaluation loss"][0] == ["step", "training", "evaluation"]


def test_of_a_run_that_was_finished_and_resumed_with_another_set_the_step_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base(tmp_path)
    other, out = packed(tmp_path / "other", num_rows=2, seed=2), tmp_path / "run"
    assert run(base, out, "--steps", "2", "--eval-shards", str(base / "eval")) == 0
    assert run(base, out, "--steps", "4", "--eval-shards", str(other), "--resume") == 0
    (found,) = as_json(capsys, out)["runs"]
    assert found["eval_change"] == {"last_step": 2}
    assert found["look_into"] == [
        "The evaluation set changed on a resume: evaluations up to step 2 are of other rows than later ones."
    ]
