"""The rungs of the ladder and the records made of them, on a CPU at a tiny width."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.shards import PackedDataset
from tests.packed import make_packed, random_rows
from tests.tiny import tiny_config
from tests.training import once
from trainer import bench, flops, ladder, rungs, stock

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are named after the day: midnight between two commands would make two of one."""
    monkeypatch.setattr(
        "trainer.measured.datetime", SimpleNamespace(now=lambda zone: datetime(2026, 1, 2, tzinfo=zone))
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = random_rows(num_rows=6, max_tokens=64, vocab_size=199)
    return make_packed(tmp_path_factory.mktemp("packed") / "rows", rows, max_tokens=64, vocab_size=199)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.json"
    path.write_text(json.dumps(tiny_config(num_hidden_layers=12).to_dict()))
    return f"random:{path}"


@pytest.fixture(autouse=True)
def _stock_model_may_be_imported_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "without_fused_kernels", lambda: None)


# ------------------------------------------------------------------------------------------------ rungs


def job(shards: Path, model: str, rung: str, **changes: Any) -> rungs.Job:
    fields: dict[str, Any] = {
        "rung": rung, "shards": shards, "model": model, "layers": (4,), "steps": 2, "padded_documents": 8,
        "recompute": 2, "device": "cpu", "precision": "fp32", "profile": False, "traces": None,
    }  # fmt: skip
    return rungs.Job(**(fields | changes))


def run(given: rungs.Job) -> dict[str, Any]:
    written: list[dict[str, Any]] = []
    rungs.run(given, lambda result: written.append(json.loads(json.dumps(result))))
    assert [len(result["runs"]) for result in written] == [*range(len(given.layers) + 1), len(given.layers)]
    return written[-1]


@pytest.mark.parametrize("rung", ["stock_padded", "sorted_padded", "full_bf16", "full_bf16_nomaster", "lora_bf16"])
def test_a_rung_measures_steps_over_different_documents(shards: Path, tiny: str, rung: str) -> None:
    result = run(job(shards, tiny, rung))
    assert result["status"] == "ok"
    (found,) = result["runs"]
    assert found["layers"] == 4
    assert (found["trained"] < found["parameters"]) == (rung == "lora_bf16")
    num_bytes = 4 * found["parameters"] + 12 * found["trained"]  # fp32 weights; gradients and two moments
    assert found["state_gib"] * 2**30 == pytest.approx(num_bytes, rel=1e-3)
    one, two = found["steps"]
    assert one["loss"] != two["loss"]
    for step in (one, two):
        assert 0 < step["optimizer_seconds"] < step["seconds"]
        assert 0 < step["targets"] < step["tokens"] <= step["slots"]
        assert step["sum_squared_lengths"] <= step["slots_sum_squared_lengths"]
        assert step["loss"] == pytest.approx(np.log(199), rel=0.1)


def test_a_rung_profiles_a_step_and_keeps_the_trace(shards: Path, tiny: str, tmp_path: Path) -> None:
    result = run(job(shards, tiny, "full_bf16", profile=True, traces=tmp_path, steps=1, precision="bf16"))
    assert [p.name for p in tmp_path.iterdir()] == ["full_bf16-4-layers.json.gz"]
    found = result["runs"][0]["profile"]
    assert found["num_steps"] == 1
    assert found["num_cpu_calls"] > 500
    assert found["num_gpu_ops"] == 0


def test_what_runs_out_of_memory_keeps_what_was_measured_before(
    shards: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(_: rungs.Job, config: Any, device: torch.device, *, first: bool) -> dict[str, Any]:
        if not first:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
        return {"layers": config.num_hidden_layers}

    monkeypatch.setattr(rungs, "measure", measure)
    written: list[dict[str, Any]] = []
    rungs.run(job(shards, tiny, "full_bf16", layers=(4, 8)), written.append)
    assert written[-1]["status"] == "out of memory"
    assert written[-1]["detail"] == "at 8 layers: CUDA out of memory. Tried to allocate 9 GiB"
    assert written[-1]["runs"] == [{"layers": 4}]


def test_padded_batches_that_do_not_fit_are_halved_once(
    shards: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, int]] = []

    def measure(given: rungs.Job, config: Any, device: torch.device, *, first: bool) -> dict[str, Any]:
        tried.append((given.padded_documents, config.num_hidden_layers))
        if tried[-1] == (8, 8):
            raise torch.OutOfMemoryError("out")
        return {"layers": config.num_hidden_layers}

    monkeypatch.setattr(rungs, "measure", measure)
    written: list[dict[str, Any]] = []
    rungs.run(job(shards, tiny, "stock_padded", layers=(4, 8)), written.append)
    assert tried == [(8, 4), (8, 8), (4, 4), (4, 8)]
    assert written[-1] == {
        "status": "ok", "recompute": 12, "padded_documents": 4, "runs": [{"layers": 4}, {"layers": 8}],
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- figures


def measured(layers: int, seconds: list[float], *, optimizer: float = 0.0, ops: int | None = None) -> dict[str, Any]:
    step = {
        "tokens": 900,
        "slots": 1000,
        "targets": 600,
        "sum_squared_lengths": 5000,
        "slots_sum_squared_lengths": 6000,
    }
    steps = [{**step, "seconds": s, "optimizer_seconds": optimizer} for s in seconds]
    found: dict[str, Any] = {"layers": layers, "peak_gib": 10.0 * layers, "steps": steps}
    found |= {"held_gib": 1.5 * layers, "state_gib": 8.0 * layers}
    return found if ops is None else found | {"profile": {"num_gpu_ops": ops, "num_cpu_calls": 2 * ops, "num_waits": 1}}


@pytest.fixture
def _flops(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_flops(config: Any, *, num_tokens: int, sum_squared_lengths: int, method: str) -> float:
        return 1e9 * num_tokens

    def hardware_flops(config: Any, *, recompute_layers: int, num_tokens: int, **_: Any) -> float:
        return 1e9 * num_tokens * (1 + recompute_layers / config.num_hidden_layers)

    monkeypatch.setattr(flops, "model_flops", model_flops)
    monkeypatch.setattr(flops, "hardware_flops", hardware_flops)
    monkeypatch.setattr(flops, "PEAK", 1e12)


def value(found: ladder.Figures, name: str) -> float:
    return float(found[name]["value"])


@pytest.mark.usefixtures("_flops")
def test_full_rungs_are_extrapolated_along_a_line_with_an_eighth_of_the_update() -> None:
    runs = [
        measured(4, [0.4, 0.4, 9.0], optimizer=0.1, ops=400),
        measured(8, [0.7, 0.7, 0.7], optimizer=0.2, ops=700),
    ]  # fmt: skip
    found = ladder.figures("full_bf16", {"runs": runs, "device": "cuda"}, tiny_config(num_hidden_layers=64))
    compute, update = 0.3 + 15 * 0.2, 1.6
    assert value(found, "full_bf16_optimizer_ms") == pytest.approx(1600)
    assert value(found, "full_bf16_tokens_per_s") == pytest.approx(900 / (compute + update / 8), abs=0.1)
    hours = 257.7e6 / 32 * (compute + update / 32) / 900 / 3600
    assert value(found, "full_bf16_ultrachat_hours_32_gpus") == pytest.approx(hours, abs=0.01)
    assert value(found, "full_bf16_mfu") == pytest.approx(0.9 / (compute + update / 8), abs=1e-4)
    assert value(found, "full_bf16_hardware_mfu") == pytest.approx(1.0 / (compute + update / 8), abs=1e-4)
    assert value(found, "full_bf16_gpu_ops") == 400 + 15 * 300
    assert value(found, "full_bf16_gib_of_8_gpus") == 64 * (1.5 + 8 / 8)
    assert found["full_bf16_peak_gib"] == {"value": 80.0, "unit": "GiB at 8 layers"}
    assert "64 layers, extrapolated from 4 and 8" in found["full_bf16_tokens_per_s"]["unit"]


@pytest.mark.usefixtures("_flops")
def test_lora_is_measured_whole_with_all_of_its_update() -> None:
    result = {"runs": [measured(64, [2.0], optimizer=0.5, ops=9)], "device": "cuda", "recompute": 16}
    found = ladder.figures("lora_bf16", result, tiny_config(num_hidden_layers=64))
    assert value(found, "lora_bf16_tokens_per_s") == 450
    assert value(found, "lora_bf16_hardware_mfu") == pytest.approx(1.25 / 2)
    assert value(found, "lora_bf16_gpu_ops") == 9
    assert "extrapolated" not in str(found)


def test_padded_rungs_count_every_batch_and_scale_operations_of_the_fewest_layers() -> None:
    runs = [measured(4, [0.2, 0.6], ops=100), measured(8, [0.4, 1.0])]
    found = ladder.figures("stock_padded", {"runs": runs, "device": "cpu"}, tiny_config(num_hidden_layers=64))
    assert value(found, "stock_padded_tokens_per_s") == pytest.approx(900 / (0.4 + 15 * 0.3), abs=0.1)
    assert value(found, "stock_padded_gpu_ops") == 1600
    assert "in proportion to 4" in found["stock_padded_gpu_ops"]["unit"]
    assert value(found, "stock_padded_document_share") == 0.9


@pytest.mark.usefixtures("_flops")
def test_no_more_layers_are_computed_again_than_the_model_has() -> None:
    config = tiny_config(num_hidden_layers=64)
    result = {"runs": [measured(64, [2.0])], "device": "cuda", "recompute": 80}
    assert value(ladder.figures("lora_bf16", result, config), "lora_bf16_hardware_mfu") == pytest.approx(2 / 2)
    said = ladder.notes(config, {"lora_bf16": result, "full_bf16": {"recompute": 0}}, "")
    assert "Layers computed again in the backward pass: lora_bf16 64. " in said


def test_one_number_of_layers_gives_no_rate() -> None:
    result = {"runs": [measured(4, [0.2])], "device": "cpu"}
    assert list(ladder.figures("full_bf16", result, tiny_config(num_hidden_layers=64))) == ["full_bf16_peak_gib"]
    assert ladder.figures("full_bf16", {"runs": []}, tiny_config()) == {}


# ---------------------------------------------------------------------------------------------- records


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Results by rung in place of processes."""
    results: dict[str, Any] = {}
    monkeypatch.setattr(bench, "in_a_process", lambda module, job, *, timeout: dict(results[job["rung"]]))
    return results


def test_the_record_holds_each_rung_as_it_finishes_and_failures_with_their_reason(
    shards: Path, tiny: str, tmp_path: Path, processes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    commit = tmp_path / "commit"
    commit.write_text("abc123-dirty\n")
    record = tmp_path / "records"
    command = [
        "ladder", "--shards", str(shards), "--model", tiny, "--record", str(record), "--device", "cpu", "--commit",
        str(commit), "--notes", "a test",
    ]  # fmt: skip
    processes["stock_padded"] = {
        "status": "ok",
        "padded_documents": 4,
        "runs": [measured(4, [0.4]), measured(8, [0.8])],
    }
    processes["full_bf16"] = {"status": "timeout", "detail": "stopped after 9 s", "runs": [measured(4, [0.1])]}
    assert bench.main(once(*command, "--rungs", "stock_padded,full_bf16")) == 1
    (path,) = record.iterdir()
    found = json.loads(path.read_text())
    assert found["what"] == "ladder"
    assert found["commit"] == "abc123-dirty"
    assert found["num_gpus"] == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["figures"]["stock_padded_tokens_per_s"]["value"] == 750
    assert found["rungs"]["full_bf16"]["detail"] == "stopped after 9 s"
    assert "full_bf16_tokens_per_s" not in found["figures"]
    assert found["notes"].endswith("a test")
    assert "Documents of a padded batch: stock_padded 4." in found["notes"]

    processes["full_bf16"] = {"status": "ok", "runs": [measured(4, [0.1]), measured(8, [0.2])]}
    assert bench.main(once(*command, "--rungs", "full_bf16")) == 0
    found = json.loads(path.read_text())
    assert found["figures"]["full_bf16_tokens_per_s"]["value"] == 3000
    assert found["figures"]["stock_padded_tokens_per_s"]["value"] == 750
    capsys.readouterr()
    assert bench.main(["table", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| `stock_padded` | 750 |" in printed
    assert "| `full_bf16` | 3,000 |" in printed


def test_a_record_of_another_model_precision_or_dataset_is_refused(
    shards: Path, tiny: str, tmp_path: Path, processes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ladder", "--shards", str(shards), "--model", tiny, "--record", str(tmp_path / "records")]
    command += ["--device", "cpu", "--rungs", "full_bf16"]
    processes["full_bf16"] = {"status": "ok", "runs": [measured(4, [0.1]), measured(8, [0.2])]}
    assert bench.main(command) == 0
    (path,) = (tmp_path / "records").iterdir()
    before = path.read_text()
    rows = random_rows(num_rows=4, max_tokens=64, vocab_size=199)
    other = make_packed(tmp_path / "other", rows, max_tokens=64, vocab_size=199)
    processes.clear()  # nothing runs
    for changed, reason in (
        (["--model", "random:27B"], f"model {tiny!r}, now 'random:27B'"),
        (["--precision", "fp32"], "precision 'bf16', now 'fp32'"),
        (["--shards", str(other)], f"dataset_id {PackedDataset.open(shards).manifest.dataset_id!r}, now "),
    ):
        capsys.readouterr()
        assert bench.main(once(*command, "--rungs", "lora_bf16", *changed)) == 2
        error = capsys.readouterr().err
        assert f"error: {path} holds full_bf16" in error
        assert reason in error
        assert "Pass another folder as --record" in error
    assert path.read_text() == before


def test_a_record_that_does_not_say_its_settings_is_refused_but_has_a_table(
    shards: Path, tiny: str, tmp_path: Path, processes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ladder", "--shards", str(shards), "--model", tiny, "--record", str(tmp_path), "--device", "cpu"]
    processes["full_bf16"] = {"status": "ok", "runs": [measured(4, [0.1]), measured(8, [0.2])]}
    assert bench.main(once(*command, "--rungs", "full_bf16")) == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    del record["rungs"]["full_bf16"]["settings"]
    path.write_text(json.dumps(record))
    assert bench.main(once(*command, "--rungs", "full_bf16")) == 2
    assert f"error: {path} does not say which settings full_bf16" in capsys.readouterr().err
    assert bench.main(["table", str(path)]) == 0
    assert "| `full_bf16` | 3,000 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "data/records").glob("*.json")), ids=lambda p: p.stem
)
def test_records_have_a_table_or_an_error_that_names_those_that_have(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = json.loads(path.read_text())["what"]
    has_table = what in ("ladder", "curves")
    assert bench.main(["table", str(path)]) == (0 if has_table else 2)
    printed = capsys.readouterr()
    assert printed.out.startswith("| ") == has_table
    if not has_table:
        assert printed.err == f"error: {path} is a record of {what}; records of ladder and of curves have a table\n"


@pytest.mark.parametrize("content", [None, "", "x", "[]", "[" * 100_000, "{}", '{"what": []}', '{"what": "ladder"}',
                                     '{"what": "curves", "variants": 5}'])  # fmt: skip
def test_a_table_of_what_is_no_record_names_the_file_and_what_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    for place in (path, tmp_path):
        assert bench.main(["table", str(place)]) == 2
        said = capsys.readouterr().err
        if content == "{}" and place == path:
            assert said == f"error: {path} is a record of None; records of ladder and of curves have a table\n"
            continue
        assert said.startswith(f"error: {place} is no record of ladder or of curves (")
        assert said.endswith("python -m trainer.bench ladder or curves wrote into --record, by default data/records\n")


def test_an_unknown_rung_or_folder_is_an_error(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["ladder", "--shards", str(shards), "--rungs", "fastest"]) == 2
    assert "fastest unknown; there are stock_padded" in capsys.readouterr().err
    assert bench.main(["ladder", "--shards", str(tmp_path), "--rungs", "full_bf16"]) == 2
    assert "no dataset is there" in capsys.readouterr().err


def test_a_process_that_hangs_or_fails_leaves_what_it_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "written"
    (tmp_path / "made_up.py").write_text(
        "import json, pathlib, sys, time\n"
        "job = json.load(open(sys.argv[1]))\n"
        "json.dump({'status': 'started', 'runs': [job['number']]}, open(sys.argv[2], 'w'))\n"
        f"if job['hang']: pathlib.Path({str(written)!r}).touch(); time.sleep(900)\n"
        "raise RuntimeError('broken')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed = bench.in_a_process("made_up", {"number": 1, "hang": False}, timeout=300)
    assert failed == {"status": "failed", "detail": "RuntimeError: broken", "runs": [1]}
    assert "Traceback" in capsys.readouterr().err

    class Hung(subprocess.Popen[bytes]):
        """Its time begins when it hangs, however long a slow machine takes to start it."""

        def wait(self, timeout: float | None = None) -> int:
            assert soon(written.exists)
            return super().wait(timeout)

    monkeypatch.setattr(bench.subprocess, "Popen", Hung)
    hung = bench.in_a_process("made_up", {"number": 2, "hang": True}, timeout=2)
    assert hung == {"status": "timeout", "detail": "stopped after 2 s", "runs": [2]}


@pytest.mark.parametrize("what", ["curves", "ladder"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_processes_that_measure(
    shards: Path, tiny: str, tmp_path: Path, what: str, sent: signal.Signals
) -> None:
    (tmp_path / "sleeper.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\ntime.sleep(1800)\n"
    )
    (tmp_path / "measure.py").write_text(
        "import sys\nfrom trainer import bench\nreal = bench.in_a_process\n"
        "bench.in_a_process = lambda module, job, **rest: real('sleeper', job, **rest)\n"
        "sys.exit(bench.main(sys.argv[1:]))\n"
    )
    some = ["--at-once", "2", "--time-box", "200"] if what == "curves" else ["--layers", "4"]
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "measure.py"), what, "--shards", str(shards), "--model", tiny,
         "--record", str(tmp_path), "--device", "cpu", *some],
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}:{tmp_path}"},
    )  # fmt: skip
    try:
        wanted = 2 if what == "curves" else 1
        assert soon(lambda: len(list(tmp_path.glob("*.pid"))) == wanted)
        process.send_signal(sent)
        assert process.wait(300) == (130 if sent == signal.SIGINT else 143)
    finally:
        process.kill()
    assert len(list(tmp_path.glob("*.pid"))) == wanted  # those that waited for their turn never began
    for path in tmp_path.glob("*.pid"):
        assert soon(lambda path=path: not Path("/proc", path.stem).exists())


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it holds within ten minutes."""
    end = time.monotonic() + 600
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()
