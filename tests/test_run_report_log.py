"""What trainer.report.log makes of logs as kills, older versions and editors leave them."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import runs
from trainer import record
from trainer.report.log import COLUMNS, GREATEST, VERSIONS, number, read, whole


def test_a_log_is_read_as_columns(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval_loss": 6.0}, *map(runs.step, (1, 2)), {"step": 2, "eval_loss": 4.0}]
    run = read(runs.write(tmp_path / "r", lines, runs.config()))
    assert run.step.tolist() == [1, 2]
    assert set(run.columns) == set(COLUMNS)
    for name in COLUMNS:
        assert run.column(name).tolist() == [runs.step(1)[name], runs.step(2)[name]]
    assert (run.eval_step.tolist(), run.eval_loss.tolist()) == ([0, 2], [6.0, 4.0])
    assert (run.skipped.size, run.not_finite.size, run.unused_lines, run.cut) == (0, 0, (), False)


def test_an_old_log_lacks_the_fields_that_were_not_recorded(tmp_path: Path) -> None:
    run = read(runs.write(tmp_path / "r", [runs.step(1, step_s=None, data_wait_s=None, mfu=None)], runs.config()))
    for name in ("step_s", "data_wait_s", "mfu"):
        assert not run.has(name)
        assert np.isnan(run.column(name)).tolist() == [True]
    assert run.has("hfu")
    assert run.column("hfu").tolist() == [0.6]


def test_a_field_that_only_some_steps_have_is_a_gap_in_the_others(tmp_path: Path) -> None:
    run = read(runs.write(tmp_path / "r", [runs.step(1, step_s=None), runs.step(2, step_s=3.0)], runs.config()))
    assert np.isnan(run.column("step_s")).tolist() == [True, False]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1', "\ufffd", '{"loss": 1.0}'])
def test_a_last_line_that_a_kill_cut_is_left_out(tmp_path: Path, torn: str) -> None:
    run = read(runs.write(tmp_path / "r", [runs.step(1), runs.step(2), torn], runs.config()))
    assert (run.step.tolist(), run.cut, run.unused_lines) == ([1, 2], True, ())


@pytest.mark.parametrize(
    "line",
    ["{\n", "null\n", "7\n", '"text"\n', "[1, 2]\n", '{"loss": 1}\n', '{"step": "2"}\n', '{"step": -1, "loss": 1}\n',
     '{"step": true, "loss": 1}\n', '{"step": 1.5, "loss": 1}\n', '{"step": 1e400, "loss": 1}\n', "[" * 100_000 + "\n",
     '{"step": ' + "9" * 5000 + ', "loss": 1}\n', '{"step": 1000000000001, "loss": 1}\n'],
)  # fmt: skip
def test_other_lines_are_numbered_and_left_out(tmp_path: Path, line: str) -> None:
    run = read(runs.write(tmp_path / "r", [runs.step(1), line, "\n", runs.step(2)], runs.config()))
    assert (run.step.tolist(), run.unused_lines, run.cut) == ([1, 2], (2,), False)


def test_bytes_that_are_no_text_cost_their_line_alone(tmp_path: Path) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(1)], runs.config())
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\xff\xfe\n" + json.dumps(runs.step(2)).encode() + b"\r\n")
    run = read(folder)
    assert (run.step.tolist(), run.unused_lines) == ([1, 2], (2,))


def test_a_step_logged_twice_counts_as_it_was_logged_last_and_steps_are_sorted(tmp_path: Path) -> None:
    lines = [runs.step(2, loss=9.0), runs.step(1), runs.step(2, loss=3.0)]
    run = read(runs.write(tmp_path / "r", lines, runs.config()))
    assert run.step.tolist() == [1, 2]
    assert run.column("loss")[1] == 3.0


def test_steps_without_a_target_and_values_that_are_no_number_are_told_apart(tmp_path: Path) -> None:
    lines = [
        runs.step(1),
        json.dumps(runs.step(2) | {"loss": None, "grad_norm": None}) + "\n",
        *(runs.step(3 + i, loss=value) for i, value in enumerate([math.nan, -math.inf, "nan", True, [], 10**400])),
    ]
    run = read(runs.write(tmp_path / "r", lines, runs.config()))
    assert run.skipped.tolist() == [2]
    assert run.not_finite.tolist() == [3, 4, 5, 6, 7, 8]
    assert np.isfinite(run.column("loss")).tolist() == [True] + 7 * [False]


def test_a_run_without_a_step_yet_or_without_its_config_is_read(tmp_path: Path) -> None:
    assert read(runs.write(tmp_path / "new", None, runs.config())).step.size == 0
    empty = read(runs.write(tmp_path / "empty", [], runs.config()))
    assert (empty.step.size, empty.unused_lines, empty.cut) == (0, (), False)
    bare = read(runs.write(tmp_path / "bare", [runs.step(1)]))
    assert (bare.has_config, bare.config["settings"], bare.config["kernels"]) == (False, {}, [])


def test_no_folder_and_a_folder_of_something_else_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "no", "is no folder"), (tmp_path / "file", "is no folder"),
                        (tmp_path, "neither config.json nor metrics.jsonl")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            read(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "JSONDecodeError"), ('{"version": 1', "JSONDecodeError"), ("[]", "no object"), ("{}", "version None"),
     ('{"version": 99}', "version 99"), ('{"version": 1, "settings": []}', "'settings' is list, not dict"),
     ('{"version": 1, "kernels": {}}', "'kernels' is dict"), ('{"version": 1, "earlier": [3]}', "'earlier' holds"),
     ("[" * 100_000, "RecursionError"), ("\udcff", "UnicodeDecodeError")],
)  # fmt: skip
def test_a_damaged_config_is_an_error_that_says_what_and_what_to_do(tmp_path: Path, content: str, words: str) -> None:
    folder = runs.write(tmp_path / "r", [runs.step(1)])
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=words) as error:
        read(folder)
    assert "config.json" in str(error.value)
    assert "move it away" in str(error.value)


@given(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.none(), max_size=1)
    )
)
def test_a_number_is_finite_and_itself_or_it_is_none(value: Any) -> None:
    found = number(value)
    is_number = type(value) in (int, float) and value == value and abs(value) <= GREATEST
    assert found == float(value) if is_number else math.isnan(found)
    assert whole(value) == (value if type(value) is int and 0 <= value <= 10**12 else None)


def test_the_version_is_what_the_trainer_writes() -> None:
    assert record.RECORD_VERSION in VERSIONS


def test_the_report_loads_no_torch() -> None:
    code = "import sys, trainer.report; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
