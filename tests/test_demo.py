"""What the demo says where it cannot show anything: one line that says what to do, and status 2."""

import sys
from pathlib import Path

import pytest

from tests import runs
from tests.packed import make_packed, random_rows
from trainer import demo

EVALUATION = {"step": 1, "eval_loss": 3.5}


def fails(run: Path, *, shards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What it says of a run; that it is one line, and the exit status."""
    monkeypatch.setattr(sys, "argv", ["demo", str(run), "--shards", str(shards), "--eval-shards", str(shards)])
    assert demo.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err.removeprefix("error: ")


def test_what_lacks_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, shards = tmp_path / "run", tmp_path / "nowhere"

    def said() -> str:
        return fails(run, shards=shards, monkeypatch=monkeypatch, capsys=capsys)

    assert said().startswith(f"{run} is no folder. Pass the folder of a run")
    runs.write(run, [runs.step(1)], runs.config())
    assert said() == (
        f"{run / 'metrics.jsonl'} has no evaluation, so no loss to compare. Train it with --eval-shards\n"
    )
    runs.write(run, [runs.step(1), EVALUATION, {"step": 2, "eval_loss": None}])
    assert said().startswith(f"{run / 'metrics.jsonl'} ends with an evaluation without a target")
    runs.write(run, [runs.step(1), EVALUATION])
    assert said().startswith(f"{run / 'export'} holds no model, so nothing can complete the sentence")
    (run / "export").mkdir()
    (run / "export" / "config.json").write_text("{}")
    assert said().startswith(f"{shards} is not a packed dataset")
    rows = random_rows(num_rows=2, max_tokens=32, vocab_size=99)
    make_packed(shards, rows, max_tokens=32, vocab_size=99)
    assert said()  # of what transformers says of an empty configuration


def test_the_last_evaluation_counts(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval_loss": 9}, runs.step(1), EVALUATION]
    assert demo.final_loss(runs.write(tmp_path, lines)) == 3.5


@pytest.mark.parametrize(("loss", "status"), [(1.0, 0), (99.0, 1)])
def test_the_exit_status_tells_whether_the_model_is_better_than_guessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loss: float, status: int
) -> None:
    run = runs.write(tmp_path / "run", [{"step": 1, "eval_loss": loss}])
    (run / "export").mkdir()
    (run / "export" / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "complete", lambda *_, **__: " planet")
    monkeypatch.setattr(demo, "guessing_loss", lambda *_: 7.0)
    rows = random_rows(num_rows=2, max_tokens=32, vocab_size=99)
    shards = str(make_packed(tmp_path / "packed", rows, max_tokens=32, vocab_size=99))
    monkeypatch.setattr(sys, "argv", ["demo", str(run), "--shards", shards, "--eval-shards", shards])
    assert demo.main() == status
    printed = capsys.readouterr().out
    assert f"held-out loss   {loss:.3f} nats a target; guessing by token frequency 7.000" in printed
    assert "Jupiter is a[ planet]" in printed
