"""Loss curves of ours and of transformers' loop, on a CPU at a tiny width: they are one curve in fp32."""

import dataclasses
import json
import os
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.shards import PackedDataset
from tests.packed import make_packed, random_rows
from tests.tiny import tiny_config, tiny_model
from tests.training import once
from trainer import bench, curves, distances, stock
from trainer.batches import make_batch
from trainer.weights import export


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


def job(shards: Path, model: str, folder: Path, variant: str, **changes: Any) -> curves.Job:
    fields: dict[str, Any] = {
        "variant": variant, "shards": shards, "model": model, "num_layers": 4, "steps": 5, "fp32_steps": 2,
        "rows_per_step": 2, "lr": 3e-3, "warmup_steps": 2, "seed": 0, "time_box": 600.0, "device": "cpu",
        "precision": "fp32", "out": folder / f"{variant}.jsonl",
    }  # fmt: skip
    return curves.Job(**(fields | changes))


def curve(shards: Path, model: str, folder: Path, variant: str, **changes: Any) -> list[float]:
    given = job(shards, model, folder, variant, **changes)
    result = curves.run(given)
    assert result["status"] == ("out of time" if given.time_box == 0 else "ok")
    assert ("fused" in result) == (not variant.startswith("ours"))  # it speaks of transformers' kernels alone
    return distances.losses(given.out)


def test_ours_packed_and_unpacked_and_transformers_padded_have_one_loss_curve(
    shards: Path, tiny: str, tmp_path: Path
) -> None:
    found = {
        name: curve(shards, tiny, tmp_path, name)
        for name in ("ours_packed", "stock_padded", "fused_padded", "ours_unpacked")
    }
    ours = found["ours_packed"]
    assert len(ours) == 5
    assert ours[0] - min(ours) > 0.01  # they move
    for theirs in found.values():
        assert theirs == pytest.approx(ours, abs=2e-5)
    figures = distances.figures(found)
    assert figures["stock_padded_max_difference"]["value"] < 2e-5
    assert figures["ours_packed_steps"]["value"] == 5


def test_curves_from_a_checkpoint_start_from_its_weights(shards: Path, tmp_path: Path) -> None:
    model = tiny_model(seed=5)
    source = export(tmp_path / "checkpoint", model=model, tokenizer_dir=None, eos_token_ids=[1])
    names = ("ours_packed", "stock_padded")
    ours, theirs = (curve(shards, str(source), tmp_path, name, lr=1e-3) for name in names)
    assert theirs == pytest.approx(ours, abs=2e-5)
    dataset = PackedDataset.open(shards)
    given = job(shards, str(source), tmp_path, "ours_packed")
    (first,) = curves.steps_of_documents(dataclasses.replace(given, steps=1), dataset)
    with torch.no_grad():
        rows = [curves.alone_in_a_row(d, length=64) for d in first]
        sums = [(model(b), b.num_targets) for b in (make_batch([row], max_seqlen=64) for row in rows)]
    expected = sum(float(s) for s, _ in sums) / sum(n for _, n in sums)
    assert ours[0] == pytest.approx(expected, abs=2e-5)


def test_noise_of_fp32_curves_is_one_rounding_of_fp32(shards: Path, tiny: str, tmp_path: Path) -> None:
    plain, moved = (
        curves.first_weights(job(shards, tiny, tmp_path, name, precision="bf16"), tiny_config()).state_dict()
        for name in ("ours_packed_fp32", "ours_packed_noise_fp32")
    )
    for name, weight in plain.items():
        assert moved[name].dtype == torch.float32
        assert torch.allclose(moved[name], weight.float(), rtol=2.0**-23, atol=0)
    assert not torch.equal(moved["lm_head.weight"], plain["lm_head.weight"].float())


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.bfloat16), (24, torch.float32)])
def test_noise_moves_about_half_of_the_weights_to_a_neighbour(bits: int, dtype: torch.dtype) -> None:
    model = tiny_model().to_dtype(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype == dtype}
    curves.move_by_one_rounding(model, seed=3, bits=bits)
    moved = []
    for name, parameter in model.named_parameters():
        if name in before:
            old, new = before[name].double(), parameter.detach().double()
            step = 2.0 ** (torch.floor(torch.log2(old.abs())) + 1 - bits)
            assert ((new - old).abs() <= step).all()
            moved.append((new != old).flatten())
    share = torch.cat(moved).double().mean().item()
    assert 0.4 < share <= 1


def test_sorting_changes_the_steps(shards: Path, tiny: str, tmp_path: Path) -> None:
    ours = curve(shards, tiny, tmp_path, "ours_packed", steps=2)
    found = curve(shards, tiny, tmp_path, "sorted_padded", steps=2)
    assert found != pytest.approx(ours, abs=1e-4)
    given = job(shards, tiny, tmp_path, "sorted_padded", steps=50)
    for group in curves.steps_of_documents(given, PackedDataset.open(shards)):
        lengths = [len(d.input_ids) for d in group]
        assert lengths == sorted(lengths)


def test_bf16_curves_stay_beside_each_other_and_noise_is_measured(shards: Path, tiny: str, tmp_path: Path) -> None:
    noise = ("ours_packed_noise", "ours_packed_noise_2", "stock_padded_noise")
    exact = ("ours_packed_fp32", "stock_padded_fp32", "ours_packed_noise_fp32")
    names = ("ours_packed", *noise, "stock_padded", *exact)
    found = {name: curve(shards, tiny, tmp_path, name, steps=3, precision="bf16") for name in names}
    assert len({tuple(found[name]) for name in names[:5]}) == 5
    for name in names[1:5]:
        assert found[name] == pytest.approx(found["ours_packed"], abs=0.02)
    assert found["stock_padded_fp32"] == pytest.approx(found["ours_packed_fp32"], abs=1e-5)
    assert found["ours_packed_noise_fp32"] == pytest.approx(found["ours_packed_fp32"], abs=1e-5)
    assert len(found["ours_packed_fp32"]) == 2
    figures = distances.figures(found)
    assert "from ours_packed_fp32 over 2 steps" in figures["stock_padded_fp32_max_difference"]["unit"]


def test_a_curve_is_in_the_record_as_soon_as_it_is_done(
    shards: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def process(module: str, job: dict[str, Any], *, timeout: float, gpu: str) -> dict[str, Any]:
        job["out"].write_text('{"step": 1, "loss": 5.0}\n')
        end = time.monotonic() + 300
        while job["variant"] == "stock_padded" and not list(tmp_path.glob("*.json")) and time.monotonic() < end:
            time.sleep(0.01)  # the slower one, named first
        found = [list(json.loads(path.read_text())["variants"]) for path in tmp_path.glob("*.json")]
        return {"status": "ok", "before": found}

    monkeypatch.setattr(bench, "in_a_process", process)
    command = ["curves", "--shards", str(shards), "--model", tiny, "--record", str(tmp_path), "--device", "cpu"]
    assert bench.main(once(*command, "--at-once", "2", "--variants", "stock_padded,ours_packed")) == 0
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["variants"]["stock_padded"]["before"] == [["ours_packed"]]


def short_curve(module: str, job: dict[str, Any], *, timeout: float, gpu: str) -> dict[str, Any]:
    """In place of a process."""
    job["out"].write_text("".join(json.dumps({"step": i, "loss": 5.0 - i}) + "\n" for i in range(3)))
    return {"status": "ok"}


def test_curves_of_other_settings_are_refused_before_anything_runs(
    shards: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "in_a_process", short_curve)
    command = ["curves", "--shards", str(shards), "--model", tiny, "--record", str(tmp_path), "--device", "cpu"]
    command += ["--variants", "ours_packed"]
    assert bench.main(once(*command, "--variants", "stock_padded")) == 0
    assert bench.main(once(*command, "--fp32-steps", "3", "--time-box", "9", "--at-once", "2")) == 0
    (path,) = tmp_path.glob("*.json")
    before = {file: file.read_text() for file in tmp_path.iterdir()}
    for changed, reasons in (
        (["--lr", "3e-2", "--seed", "7"], ("lr 0.0003, now 0.03", "seed 0, now 7")),
        (["--model", "random:0.8B"], (f"model {tiny!r}, now 'random:0.8B'",)),
        (["--num-layers", "4"], ("num_layers 0, now 4",)),
        (["--steps", "9", "--warmup-steps", "2"], ("steps 200, now 9", "warmup_steps 20, now 2")),
        (["--rows-per-step", "1"], ("rows_per_step 4, now 1",)),
        (["--precision", "fp32"], ("precision 'bf16', now 'fp32'",)),
    ):
        capsys.readouterr()
        assert bench.main(once(*command, *changed)) == 2
        error = capsys.readouterr().err
        assert f"error: {path} holds stock_padded" in error
        assert all(reason in error for reason in reasons), error
        assert "Pass another folder as --record" in error
    assert {file: file.read_text() for file in tmp_path.iterdir()} == before


def test_a_variant_that_fails_at_once_has_no_curve(
    shards: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["curves", "--shards", str(shards), "--model", tiny, "--record", str(tmp_path), "--device", "cpu"]
    command += ["--variants", "ours_packed"]
    monkeypatch.setattr(bench, "in_a_process", short_curve)
    assert bench.main(command) == 0
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["figures"]["ours_packed_steps"]["value"] == 3
    monkeypatch.setattr(bench, "in_a_process", lambda *_, **__: {"status": "failed", "detail": "broken"})
    assert bench.main(command) == 1
    assert json.loads(path.read_text())["figures"] == {}


def test_a_model_that_there_is_not_is_one_error_of_all_curves(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "in_a_process", short_curve)
    command = ["curves", "--shards", str(shards), "--record", str(tmp_path), "--device", "cpu"]
    assert bench.main(once(*command, "--model", "random:7B")) == 2
    assert capsys.readouterr().err.startswith("error: --model random:7B: no such size")
    assert not list(tmp_path.iterdir())


def test_curves_from_two_checkpoints_do_not_share_a_record(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "in_a_process", short_curve)
    one, two = (
        str(export(tmp_path / f"checkpoint-{seed}", model=tiny_model(seed=seed), tokenizer_dir=None, eos_token_ids=[1]))
        for seed in (1, 2)
    )
    command = ["curves", "--shards", str(shards), "--record", str(tmp_path / "records"), "--device", "cpu"]
    assert bench.main(once(*command, "--model", one, "--variants", "ours_packed")) == 0
    assert bench.main(once(*command, "--model", two, "--variants", "stock_padded")) == 2
    assert f"model {one!r}, now {two!r}" in capsys.readouterr().err


def test_variants_at_once_are_dealt_out_to_the_gpus(
    shards: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3)
    used: list[str] = []

    def process(module: str, job: dict[str, Any], *, timeout: float, gpu: str) -> dict[str, Any]:
        job["out"].write_text('{"step": 1, "loss": 5.0}\n')
        used.append(gpu)
        together.wait(300)
        return {"status": "ok"}

    monkeypatch.setattr(bench, "in_a_process", process)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    command = ["curves", "--shards", str(shards), "--model", tiny, "--record", str(tmp_path), "--device", "cpu"]
    six = ",".join(curves.VARIANTS[:6])
    assert bench.main(once(*command, "--at-once", "3", "--variants", six)) == 0
    assert sorted(used) == ["4"] * 4 + ["7"] * 2


@pytest.mark.parametrize(("at_once", "variants", "used"), [(1, 3, 1), (2, 3, 2), (8, 4, 3), (8, 2, 2)])
def test_the_record_says_how_many_gpus_were_used(
    shards: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, variants: int, used: int
) -> None:
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\necho NVIDIA H200\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5")
    monkeypatch.setattr(bench, "in_a_process", short_curve)
    command = ["curves", "--shards", str(shards), "--model", tiny, "--record", str(tmp_path), "--device", "cuda"]
    some = ",".join(curves.VARIANTS[:variants])
    assert bench.main(once(*command, "--at-once", str(at_once), "--variants", some)) == 0
    (path,) = tmp_path.glob("*-curves-nvidia-h200.json")
    record = json.loads(path.read_text())
    assert (record["machine"], record["num_gpus"]) == ("NVIDIA H200", used)


def test_a_process_sees_the_gpu_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "says_gpu.py").write_text(
        "import json, os, sys\n"
        "open(sys.argv[2], 'w').write(json.dumps({'gpu': os.environ.get('CUDA_VISIBLE_DEVICES')}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert bench.in_a_process("says_gpu", {}, timeout=300, gpu="1") == {"gpu": "1"}
    assert bench.in_a_process("says_gpu", {}, timeout=300) == {"gpu": "0,1"}


def test_the_two_sides_and_their_noise_are_distances_counted_by_hand() -> None:
    found = distances.figures({
        "ours_packed": [3.0, 2.0], "ours_packed_noise": [3.2, 2.0], "ours_packed_noise_2": [3.4, 2.0],
        "stock_padded": [3.0, 1.0], "stock_padded_noise": [3.0, 1.2, 9.0], "sorted_padded": [1.0, 9.0],
    })  # fmt: skip
    # Two steps are one window: ours 2.5 2.6 2.7, theirs 2.0 2.1. Pairs: .1 .2 .1 and .1; sides: 2.6 and 2.05.
    assert found["one_rounding_mean_difference"]["value"] == pytest.approx(0.125)
    assert found["one_rounding_max_difference"]["value"] == pytest.approx(0.2)
    assert found["sides_mean_difference"]["value"] == pytest.approx(0.55)
    assert "over 2 steps" in found["sides_max_difference"]["unit"]


def test_a_curve_out_of_time_or_cut_short_is_as_long_as_it_got(shards: Path, tiny: str, tmp_path: Path) -> None:
    assert len(curve(shards, tiny, tmp_path, "ours_packed", time_box=0.0)) == 1
    path = tmp_path / "cut.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert distances.losses(path) == [2.5]
    assert distances.smooth([1, 2, 3, 4], window=2) == [1.5, 2.5, 3.5]
    assert distances.smooth([1, 3], window=10) == [2]


def test_the_record_of_curves_has_a_table(
    shards: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "in_a_process", short_curve)
    command = ["curves", "--shards", str(shards), "--model", tiny, "--record", str(tmp_path), "--device", "cpu"]
    assert bench.main(once(*command, "--variants", "ours_packed,stock_padded")) == 0
    assert "| `stock_padded` | 3 | 5.0 | 4.0 | 1.0 | 0.0 | 0.0 |" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    assert dataclasses.asdict(bench.Table(path=path))["path"] == path
    assert json.loads(path.read_text())["figures"]["stock_padded_max_difference"]["value"] == 0
