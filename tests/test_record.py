"""The record of a run: which settings may change on resume, and a start that fails while it is written."""

from pathlib import Path
from typing import Any

import pytest

from trainer.record import read, require_folder, require_same_run, write

SETTINGS = {"lr": 0.01, "warmup_steps": 2, "clip": 1.0, "steps": 8, "epochs": 1, "keep": 2, "seed": 0}


def record(**changes: Any) -> dict[str, Any]:
    return {"version": 1, "settings": SETTINGS | changes, "dataset_id": "d", "model": {"hidden_size": 8}}


def test_changes_of_what_the_next_steps_do_are_told() -> None:
    assert require_same_run(record(), record()) == []
    assert require_same_run(record(), record(keep=3)) == []
    assert require_same_run(record(), record(lr=0.001, warmup_steps=4, clip=0.5, steps=9)) == [
        "--clip: 1.0 -> 0.5",
        "--lr: 0.01 -> 0.001",
        "--steps: 8 -> 9",
        "--warmup-steps: 2 -> 4",
    ]


def test_a_change_that_is_refused_is_named_without_those_that_are_free() -> None:
    with pytest.raises(ValueError, match="--seed: 0 -> 1") as raised:
        require_same_run(record(), record(seed=1, lr=0.001))
    assert "--lr" not in str(raised.value)


def test_a_start_that_fails_while_its_record_is_written_leaves_the_folder_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, record())
    assert [path.name for path in tmp_path.iterdir()] == [".config.json.tmp"]
    require_folder(tmp_path, resume=False)
    write(tmp_path, record())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert read(tmp_path)["earlier"] == []
