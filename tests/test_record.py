"""The record of a run: which settings may change on resume, and a start that fails while it is written."""

from pathlib import Path
from typing import Any

import pytest

from trainer.record import read, require_folder, require_same_run, write

SETTINGS = {
    "model": "random:4B",
    "lr": 0.01,
    "warmup_steps": 2,
    "clip": 1.0,
    "steps": 8,
    "epochs": 1,
    "keep": 2,
    "seed": 0,
}


def record(*, eval_dataset_id: str | None = None, **changes: Any) -> dict[str, Any]:
    model = {"hidden_size": 8}
    return {
        "version": 1, "settings": SETTINGS | changes, "dataset_id": "d", "eval_dataset_id": eval_dataset_id,
        "model": model,
    }  # fmt: skip


def test_changes_of_what_the_next_steps_do_are_told() -> None:
    assert require_same_run(record(), record()) == []
    assert require_same_run(record(), record(keep=3)) == []
    assert require_same_run(record(), record(lr=0.001, warmup_steps=4, clip=0.5, steps=9)) == [
        "--clip: 1.0 -> 0.5",
        "--lr: 0.01 -> 0.001",
        "--steps: 8 -> 9",
        "--warmup-steps: 2 -> 4",
    ]


def test_another_evaluation_set_is_told() -> None:
    assert require_same_run(record(), record(eval_dataset_id="e")) == ["--eval-shards: None -> 'e'"]
    assert require_same_run(record(eval_dataset_id="e"), record(eval_dataset_id="f")) == ["--eval-shards: 'e' -> 'f'"]


COMMIT = "@" + "a" * 40


@pytest.mark.parametrize(
    ("then", "now"), [("/a/base", "/b/base/"), ("random:/a/tiny.json", "random:../tiny.json"), ("base", "./base")]
)
def test_a_model_that_was_moved_is_told(then: str, now: str) -> None:
    assert require_same_run(record(model=then), record(model=now)) == [f"--model: {then!r} -> {now!r}"]


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("random:4B", "random:9B"), ("random:4B", "random:tiny.json"), ("random:tiny.json", "base"),
        ("base", "o/tiny" + COMMIT), ("o/tiny" + COMMIT, "o/tiny@" + "b" * 40), (None, "base"),
    ],
)  # fmt: skip
def test_another_kind_of_model_or_another_commit_is_refused(then: str | None, now: str) -> None:
    with pytest.raises(ValueError, match="--model: "):
        require_same_run(record(model=then), record(model=now))


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
            write(tmp_path, record(), resume=False)
    assert [path.name for path in tmp_path.iterdir()] == [".config.json.tmp"]
    require_folder(tmp_path, resume=False)
    write(tmp_path, record(), resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert read(tmp_path)["earlier"] == []


def test_a_start_that_failed_before_its_first_step_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    write(tmp_path, record(seed=1), resume=False)
    require_folder(tmp_path, resume=False)
    write(tmp_path, record(), resume=False)
    assert (read(tmp_path)["settings"]["seed"], read(tmp_path)["earlier"]) == (0, [])
    write(tmp_path, record(), resume=True)
    assert len(read(tmp_path)["earlier"]) == 1
    with pytest.raises(ValueError, match="not empty"):
        require_folder(tmp_path, resume=False, held=False)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="not empty"):
        require_folder(tmp_path, resume=False)


@pytest.mark.parametrize("content", ['{"hidden_size": 8, "model_type": "qwen3_5_text"}', "{", '{"version": 1}', "[]"])
def test_a_config_of_something_else_is_not_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="not empty"):
        require_folder(tmp_path, resume=False)
    with pytest.raises(ValueError, match=r"cannot be read|version"):
        read(tmp_path)
