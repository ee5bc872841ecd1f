"""Traces on a run's page: five tables, the picture of a step, before and after."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import runs
from tests.runs import as_json, report, tables
from tests.traces import Event, kernel, launch, mark, op, span, two_steps
from trainer import timeline
from trainer.events import split, union
from trainer.report.__main__ import main
from trainer.report.lanes import COLUMNS, LANES, coverage, picture

LANES_TEXT = "A lane is filled as high as the share of that moment spent on it. CPU: in any operation or call."


def save(path: Path, events: list[Event]) -> Path:
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def kinds() -> list[Event]:
    """One step of 100 us: 40 of matrix on two streams that overlap for 10, then attention, delta rule, a copy."""
    return [
        mark(1, 0, 100),
        op("aten::mm", 0, 20),
        op("aten::mm", 5, 15),
        op("backward", 10, 30, tid=2),
        *(launch(i, i) for i in range(5)),
        kernel("nvjet_gemm", 10, 40, 0),
        kernel("nvjet_gemm", 30, 50, 1, stream=8),
        kernel("flash_fwd", 60, 65, 2),
        kernel("chunk_gated_delta", 65, 75, 3),
        span("gpu_memcpy", "Memcpy DtoH", 90, 95, correlation=4, tid=7),
    ]


def slower(events: list[Event]) -> list[Event]:
    """A thousand times: milliseconds."""
    return [event | {"ts": 1000 * event["ts"], "dur": 1000 * event["dur"]} for event in events]


def filled(area: str) -> float:
    """Share of the whole picture's box that lies under an area: its steps are H, to the right, then V, to a height."""
    whole, at, height = 0.0, 0, 100
    for right, to in re.findall(r"H(\d+)V(\d+)", area):
        whole, at, height = whole + (int(right) - at) * (100 - height), int(right), int(to)
    return whole / (100 * COLUMNS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return runs.write(tmp_path / "r", [runs.step(1)], runs.config())


def test_lanes_hold_what_ran_of_each_kind_in_milliseconds_of_the_step() -> None:
    lanes = picture(split(kinds()))
    assert lanes.wall_ms == pytest.approx(0.1)
    assert {name: [round(1e3 * t, 6) for span in spans for t in span] for name, spans in lanes.busy.items()} == {
        "CPU": [0, 30], "matrix": [10, 50], "attention": [60, 65], "delta rule": [65, 75], "other": [],
        "copies": [90, 95], "idle": [0, 10, 50, 60, 75, 90, 95, 100],
    }  # fmt: skip
    assert lanes.milliseconds("idle") == pytest.approx(0.04)
    assert set(lanes.busy) == set(LANES)


def test_the_picture_is_of_the_step_of_middle_length_with_all_that_ran_meanwhile() -> None:
    """Two steps of 130 and 70 us; of the longer one, the CPU's work of the next step is in it too."""
    lanes = picture(split(two_steps()))
    assert lanes.wall_ms == pytest.approx(0.130)
    assert lanes.milliseconds("CPU") == pytest.approx((20 + 20 + 10) / 1e3)
    assert lanes.milliseconds("matrix") == pytest.approx(0.060)
    assert lanes.milliseconds("other") == pytest.approx(0.035)
    assert lanes.milliseconds("idle") == pytest.approx(timeline.analyse(two_steps())[0].gpu_idle_ms)


def test_coverage_is_the_share_of_each_stretch() -> None:
    assert coverage([(1, 2), (3, 6)], until=6, num=3).tolist() == pytest.approx([0.5, 0.5, 1])
    assert coverage([], until=6, num=3).tolist() == [0, 0, 0]
    assert coverage([(0, 4)], until=8, num=1).tolist() == [0.5]


@given(st.lists(st.tuples(st.floats(0, 99), st.floats(0.001, 30)), max_size=30), st.integers(1, 50))
def test_no_time_is_lost_in_the_picture(spans: list[tuple[float, float]], num: int) -> None:
    merged = union((begin, min(100.0, begin + length)) for begin, length in spans)
    shares = coverage(merged, until=100, num=num)
    assert shares.sum() * 100 / num == pytest.approx(sum(end - begin for begin, end in merged), abs=1e-6)
    for i, share in enumerate(shares):
        low, high = i * 100 / num, (i + 1) * 100 / num
        inside = sum(max(0.0, min(high, end) - max(low, begin)) for begin, end in merged)
        assert share == pytest.approx(inside * num / 100, abs=1e-6)


def distinct() -> list[Event]:
    """One step of 100 ms whose counts and times are all different."""
    return slower([
        mark(1, 0, 100),
        *(op("aten::mm", i, i + 0.5) for i in range(10)),
        *(op("aten::_local_scalar_dense", 20 + 2 * i, 21 + 2 * i) for i in range(3)),
        *(launch(30 + 5 * i, i) for i in range(7)),
        *(span("cuda_runtime", "cudaStreamSynchronize", at, at + 1) for at in (70, 72)),
        kernel("nvjet_gemm", 35, 47, 0),
        kernel("flash_fwd", 48, 51, 1),
        kernel("chunk_gated_delta", 52, 58, 2),
        kernel("batch_trsm_left_kernel", 60, 67, 3),
        span("gpu_memcpy", "Memcpy DtoH", 70, 71, correlation=4, tid=7),
        span("gpu_memcpy", "Memcpy HtoD", 72, 76, correlation=5, tid=7),
    ])  # fmt: skip


DISTINCT = {
    "CPU time, ms": {"in operations and calls": "45.0", "the whole step": "100.0"},
    "CPU calls": {"all": "22", "operations": "13", "calls into CUDA": "9", "of them launches": "7",
                  "waits for the GPU": "2", "values read": "3"},
    "GPU time, ms": {"busy": "33.0", "idle": "67.0", "longest gap": "35.0", "matrix": "12.0", "attention": "3.0",
                     "delta rule": "6.0", "other": "7.0", "copies": "5.0"},
    "GPU time, shares": {"busy, of the step": "33.0%", "matrix, of all kinds": "36.4%",
                         "attention, of all kinds": "9.1%"},
    "GPU operations": {"all": "6", "kernels": "4", "copies to the host": "1"},
}  # fmt: skip


def test_every_row_of_the_five_tables_is_the_number_it_is_named_after(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "t.json.gz", distinct())
    found = tables(report(folder, "--trace", path))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for title, rows in DISTINCT.items():
        assert found[title] == [["", "t.json.gz"], *map(list, rows.items())]
        for name, text in rows.items():
            assert [*name.split(), text] in printed


def test_it_is_said_below_picture_and_tables_what_no_kernels_name_tells(folder: Path, tmp_path: Path) -> None:
    page = report(folder, "--trace", save(tmp_path / "t.json.gz", distinct()))
    assert page.count(f"<span>{LANES_TEXT} {timeline.UNNAMED}</span>".replace("'", "&#x27;")) == 1
    assert page.count(f'<p class="note">{timeline.UNNAMED}</p>'.replace("'", "&#x27;")) == 1


def test_the_five_tables_hold_what_trainer_timeline_prints(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = save(tmp_path / "before.json.gz", slower(two_steps()))
    after = save(tmp_path / "after.json", slower(kinds()))
    assert timeline.main([str(before), str(after), "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out).values()
    found = tables(report(folder, "--trace", before, after))

    def row(label: str, name: str, form: str, *, kind: str = "") -> list[str]:
        values = [s[name].get(kind, 0) if kind else s[name] for s in (one, two)]
        return [label, *map(form.format, values), f"{values[1] / values[0]:,.2f}" if values[0] else ""]

    assert found["CPU time, ms"] == [
        ["", "before", "after", "ratio"], row("in operations and calls", "cpu_ms", "{:,.1f}"),
        row("the whole step", "wall_ms", "{:,.1f}"),
    ]  # fmt: skip
    assert found["CPU calls"][1] == row("all", "num_cpu_calls", "{:,.0f}")
    assert found["GPU time, ms"][1:4] == [row("busy", "gpu_busy_ms", "{:,.1f}"), row("idle", "gpu_idle_ms", "{:,.1f}"),
                                          row("longest gap", "largest_gap_ms", "{:,.1f}")]  # fmt: skip
    assert found["GPU time, ms"][4] == row("matrix", "kind_ms", "{:,.1f}", kind="matrix")
    assert found["GPU time, shares"][2] == row("matrix, of all kinds", "matrix_share", "{:.1%}")
    assert found["GPU operations"][1] == row("all", "num_gpu_ops", "{:,.0f}")
    assert found["Kernels by time: after"][1] == ["50.0", "71.4%", "2", "matrix", "nvjet_gemm"]
    assert len(found["Time of each lane in that step"]) == 1 + len(LANES)
    traces = as_json(capsys, folder, "--trace", before, after)["traces"]
    assert list(traces) == [str(before), str(after)]
    assert traces[str(before)]["num_cpu_calls"] == one["num_cpu_calls"]


def test_two_traces_are_drawn_on_one_time_scale(folder: Path, tmp_path: Path) -> None:
    """Steps of 130 and 100 ms: what is filled of each lane is its time, in both of them."""
    before, after = save(tmp_path / "b.json", slower(two_steps())), save(tmp_path / "a.json", slower(kinds()))
    page = report(folder, "--trace", before, after)
    widths = re.findall(r'<rect y="\d+" width="([\d.]+)%" height="30"', page)
    assert [float(width) for width in widths] == [100.0] * 7 + [pytest.approx(100 * 100 / 130, abs=0.01)] * 7
    areas = re.findall(r'<path class="s\d" style="stroke:none" d="M0 100(.*?)Z">', page)
    rows = tables(page)["Time of each lane in that step"][1:]
    times = [float(row[column]) for column in (1, 3) for row in rows]
    assert [filled(area) * 130 for area in areas] == pytest.approx(times, abs=0.7)


def test_a_runs_own_trace_is_shown_and_a_broken_one_costs_only_itself(folder: Path, tmp_path: Path) -> None:
    save(folder / "trace.json.gz", kinds())
    assert "One step, by kind of operation" in report(folder)
    (folder / "trace.json.gz").write_bytes(b"broken")
    page = report(folder)
    assert "One step, by kind of operation" not in page
    assert "trace.json.gz is no trace of torch&#x27;s profiler" in page


def test_runs_own_traces_bear_their_names_and_those_beyond_two_are_said_to_be_left_out(
    folder: Path, tmp_path: Path
) -> None:
    folders = [folder, *(runs.write(tmp_path / name, [runs.step(1)], runs.config()) for name in "stu")]
    save(folder / "trace.json.gz", two_steps())
    assert tables(report(folder))["GPU operations"][0] == ["", "r"]
    save(folders[2] / "trace.json.gz", kinds())
    page = report(*folders)
    assert tables(page)["GPU operations"][:2] == [["", "r", "t", "ratio"], ["all", "2", "5", "3.33"]]
    assert "a ratio is t / r." in page
    assert "left out" not in page
    save(folders[3] / "trace.json.gz", kinds())
    assert "Two traces are shown; those of u are left out." in report(*folders)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'[{"ph": "X", "name": "a", "cat": "kernel"}]'])
def test_a_given_trace_that_is_none_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "t.json").write_bytes(content)
    assert main([str(folder), "--trace", str(tmp_path / "t.json")]) == 2
    assert f"error: {tmp_path / 't.json'}" in capsys.readouterr().err
    assert not (folder / "report.html").exists()


def test_three_traces_and_one_that_is_not_there_are_errors(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save(tmp_path / "t.json", kinds()))
    assert main([str(folder), "--trace", path, path, path]) == 2
    assert "3 were given" in capsys.readouterr().err
    assert main([str(folder), "--trace", str(tmp_path / "gone")]) == 2
    assert "gone is no trace" in capsys.readouterr().err


def test_a_trace_of_a_cpu_has_no_tables_and_no_lanes_of_a_gpu(folder: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "t.json", [mark(1, 0, 100), op("aten::mm", 10, 60)])
    page = report(folder, "--trace", path)
    found = tables(page)
    assert "Nothing ran on a GPU." in page
    assert found["Time of each lane in that step"][1:] == [["CPU", "0.05", "50.0%"]]
    assert "GPU time, ms" not in found


def test_the_page_stays_small_for_60_000_operations_in_a_step(folder: Path, tmp_path: Path) -> None:
    events: list[Event] = [mark(1, 0, 1e6)]
    for i in range(60_000):
        events += [launch(16.0 * i, i), kernel(f"{'gemm' if i % 3 else 'add'}_{i % 50}", 16.0 * i, 16.0 * i + 9, i)]
    page = report(folder, "--trace", save(tmp_path / "t.json.gz", events))
    assert len(page) < 300_000
    assert tables(page)["GPU operations"][1] == ["all", "60,000"]


def test_hostile_names_of_kernels_and_files_are_escaped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "<script>alert(1)</script>\x1b[2J"
    events: list[Any] = [mark(1, 0, 9), op(bad, 0, 4), launch(1, 1), kernel(bad, 2, 3, 1),
                         span("cuda_runtime", "cudaStreamSynchronize", 2, 3)]  # fmt: skip
    page = report(folder, "--trace", save(tmp_path / "<i>.json", events))
    assert "<script" not in page
    assert "<i>" not in page
    assert "\x1b" not in capsys.readouterr().out
