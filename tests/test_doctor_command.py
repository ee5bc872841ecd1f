"""The doctor's command, its record, and what training is told when it fails."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.broken import CPU, SMALL, broken, examine, ignored, poisoned, with_boundaries, with_output
from trainer import doctor, kernels
from trainer.kernels import TABLE, select


def test_too_little_memory_is_no_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def greedy(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    chosen = dataclasses.replace(select(CPU), causal_conv=greedy)
    monkeypatch.setattr(doctor, "NARROW", SMALL)
    monkeypatch.setattr(doctor, "select", lambda *_, **__: chosen)
    assert doctor.main(["--device", "cpu", "--short"]) == 2
    error = capsys.readouterr().err
    assert "error: too little memory on cpu" in error
    assert "Tried to allocate 9 GiB" in error
    for operations in ([], ["causal_conv"]):  # the model, an operation
        with pytest.raises(ValueError, match="some 50 GiB"):
            examine(chosen, operations=operations, model=not operations)


def test_training_is_refused_with_names_numbers_and_what_to_do() -> None:
    doctor.require(select(CPU), CPU, sizes=SMALL)
    with pytest.raises(ValueError, match="gated_delta_rule") as caught:
        doctor.require(broken("gated_delta_rule", with_boundaries(ignored)), CPU, sizes=SMALL)
    message = str(caught.value)
    assert f"torch reference {torch.__version__}" in message
    assert "at most" in message
    assert "--all" in message


def test_the_command_prints_a_verdict_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "NARROW", SMALL)
    assert doctor.main(["--device", "cpu", "--short", "--json", str(tmp_path / "ok.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS: all ")
    found = json.loads((tmp_path / "ok.json").read_text())
    assert found["passed"]
    assert len(found["findings"]) > 20

    wrong = broken("attention", with_output(poisoned))
    monkeypatch.setattr(doctor, "select", lambda device, accept_slow: wrong)
    assert doctor.main(["--device", "cpu", "--short", "--json", str(tmp_path / "bad.json")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAIL")
    assert "attention (torch reference" in last
    assert not json.loads((tmp_path / "bad.json").read_text())["passed"]


def test_the_record_holds_of_each_subject_the_check_nearest_to_its_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "NARROW", SMALL)
    words = ["--device", "cpu", "--short", "--record", str(tmp_path / "records"), "--commit", "abc"]
    assert doctor.main([*words, "--json", str(tmp_path / "all.json")]) == 0
    (file,) = (tmp_path / "records").iterdir()
    record = json.loads(file.read_text())
    assert (record["what"], record["commit"]) == ("doctor", "abc")
    assert record["command"].startswith("python -m trainer.doctor --device cpu --short")
    figures, findings = record["figures"], json.loads((tmp_path / "all.json").read_text())["findings"]
    assert (figures["checks"]["value"], figures["failed"]["value"]) == (len(findings), 0)
    of_one = [finding for finding in findings if finding["operation"] == "causal_conv"]
    worst = max(of_one, key=lambda finding: finding["error"] / finding["bound"] if finding["bound"] else 0)
    (name,) = (name for name in figures if name.startswith("causal_conv on torch reference"))
    assert figures[name]["value"] == worst["error"]
    assert worst["check"] in figures[name]["unit"]


@pytest.mark.parametrize("option", ["--record", "--json"])
def test_a_place_that_cannot_serve_is_refused_before_anything_is_examined(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    (tmp_path / "file").touch()
    assert doctor.main(["--device", "cpu", "--short", option, str(tmp_path / "file" / "x")]) == 2
    said = capsys.readouterr()
    assert f"error: {option} " in said.err
    assert "PASS" not in said.out


def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main(["--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_all_examines_every_usable_implementation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    intact = TABLE["swiglu"][-1]
    second = dataclasses.replace(intact, name="wrong one", load=lambda: (lambda gate, up: gate, "0.1"))
    monkeypatch.setitem(kernels.TABLE, "swiglu", (intact, second, intact))
    monkeypatch.setattr(doctor, "NARROW", SMALL)
    assert doctor.main(["--device", "cpu", "--all"]) == 1
    assert "swiglu (wrong one 0.1)" in capsys.readouterr().out.splitlines()[-1]
