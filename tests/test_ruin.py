"""A run that goes wrong on the way says what and where, and leaves what was good."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.shards import PackedDataset
from tests.training import arguments, make_base, run
from trainer import checkpoint, train
from trainer.inputs import check_same_tokens


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    return make_base(tmp_path / "base")


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(base, out, "--lr", "1e39", "--clip", "0", "--schedule", "constant", "--steps", "1") == 2
    said = capsys.readouterr().err
    assert "step 1: the norm of the weights is" in said
    assert "There is no checkpoint yet" in said
    assert not checkpoint.steps(out)
    assert not (out / "export").exists()


def test_a_checkpoint_stays_until_a_step_from_the_next_one_came_out_finite(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "learning_rate", lambda step, **_: 1e10 if step == 2 else 1e-3)
    out = tmp_path / "run"
    assert run(base, out, "--clip", "0", "--steps", "5", "--save-every", "1", "--keep", "1") == 2
    said = capsys.readouterr().err
    assert "step 3" in said
    assert f"The newest checkpoint is {out / 'checkpoints' / 'step-00000002'}; go on with:\n  python" in said
    assert "if that diverges in its first step, remove it: the one before is there too" in said
    assert "step-00000001" in [path.name for path in checkpoint.steps(out)]


def test_old_checkpoints_go_as_the_run_goes_on(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    original = checkpoint.save

    def counted(out: Path, **rest: Any) -> None:
        original(out, **rest)
        counts.append(len(checkpoint.steps(out)))

    monkeypatch.setattr(checkpoint, "save", counted)
    out = tmp_path / "run"
    assert run(base, out, "--steps", "5", "--save-every", "1", "--keep", "2") == 0
    assert counts == [1, 2, 3, 3, 3]
    assert [path.name for path in checkpoint.steps(out)] == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("step", [0, 1])
def test_an_evaluation_that_is_not_finite_stops_the_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    losses = iter([float("nan")] if step == 0 else [5.0, float("inf")])
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: next(losses))
    out = tmp_path / "run"
    assert run(base, out, "--eval-shards", str(base / "eval"), "--eval-every", "1", "--steps", "2") == 2
    said = capsys.readouterr().err
    assert f"step {step}: the loss of the evaluation is" in said
    assert "There is no checkpoint yet" in said
    assert "whether the weights are whole" in said


def test_a_token_that_no_row_can_hold_names_its_row(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = PackedDataset.open(base / "packed")
    ids = np.array(dataset[3].input_ids, np.int32)
    (shard,) = (base / "packed").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    place = content.index(ids.tobytes())
    content[place + 4 * 5 + 2] ^= 0x40
    shard.write_bytes(content)
    assert run(base, tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "row 3 of" in said
    assert "pipeline.verify" in said


def test_a_tokenizer_that_no_export_could_take_along_is_named_before_the_run_begins(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = base / "packed" / "tokenizer" / "tokenizer.json"
    path.write_bytes(b"x" + path.read_bytes()[1:])  # as long as it was, which opening checks
    assert run(base, tmp_path / "run") == 2
    assert "tokenizer.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--eval-every", "3"), "--eval-every 3, but no --eval-shards: nothing is evaluated"),
        (("--lora-rank", "8"), "--lora-rank 8, but no --method lora: every weight is trained"),
        (("--trace", "100"), "--trace 100, but 1 steps are left after the first 3"),
    ],
)
def test_a_setting_without_effect_is_said(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert run(base, tmp_path / "run", "--steps", "4", *options) == 0
    assert f"warning: {said}" in capsys.readouterr().err


def test_settings_with_an_effect_are_not_warned_of(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--eval-shards", str(base / "eval"), "--eval-every", "2", "--method", "lora", "--lora-rank", "8")
    assert run(base, tmp_path / "run", "--steps", "4", "--trace", "1", *words) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_model_of_another_tokenizer_is_refused_though_every_id_fits(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(base, tmp_path / "first", "--steps", "1") == 0
    model = tmp_path / "first" / "export"
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content))  # other bytes, the same tokens
    assert run(base, tmp_path / "same", "--model", str(model), "--steps", "1") == 0
    content["model"]["vocab"]["more"] = 299
    file.write_text(json.dumps(content))
    assert run(base, tmp_path / "more", "--model", str(model), "--steps", "1") == 0
    content["added_tokens"] = [{"id": 299, "content": "<mine>", "single_word": False, "lstrip": False, "rstrip": False,
                                "normalized": False, "special": True}]  # fmt: skip
    file.write_text(json.dumps(content))
    assert run(base, tmp_path / "added", "--model", str(model), "--steps", "1") == 0
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert run(base, tmp_path / "other", "--model", str(model), "--steps", "1") == 2
    said = capsys.readouterr().err
    assert f"packed with another tokenizer than that of --model {model}: 2 ids are other tokens, such as" in said
    assert not (tmp_path / "other").exists()
    file.unlink()
    assert run(base, tmp_path / "none", "--model", str(model), "--steps", "1") == 0


def test_a_reserved_token_put_to_use_is_no_other_tokenizer(base: Path, tmp_path: Path) -> None:
    dataset = PackedDataset.open(base / "packed")
    mine, theirs = (Tokenizer.from_file(str(dataset.path / "tokenizer" / "tokenizer.json")) for _ in range(2))
    mine.add_special_tokens(["<call>"])
    theirs.add_special_tokens(["<reserved>"])
    assert mine.token_to_id("<call>") == theirs.token_to_id("<reserved>") == 256
    theirs.save(str(tmp_path / "tokenizer.json"))
    check_same_tokens(dataset, mine, str(tmp_path))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["<reserved>"] = 256  # an ordinary token there, as chat's marks are in another vocabulary
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="1 ids are other tokens, such as 256: '<call>' in the rows, '<reserved>' in"):
        check_same_tokens(dataset, mine, str(tmp_path))


def test_a_warm_up_as_long_as_the_run_is_said(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = "the learning rate never falls"
    assert run(base, tmp_path / "two", "--steps", "3", "--warmup-steps", "2") == 0
    assert warning not in capsys.readouterr().err
    assert run(base, tmp_path / "three", "--steps", "3", "--warmup-steps", "3") == 0
    assert warning in capsys.readouterr().err


def test_a_full_disk_says_which_file_and_how_to_go_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = checkpoint.save

    def full(out: Path, *, step: int, **rest: Any) -> None:
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(out / "checkpoints" / "optimizer"))
        original(out, step=step, **rest)

    monkeypatch.setattr(checkpoint, "save", full)
    out = tmp_path / "run"
    assert train.main([*arguments(base, out), "--steps", "3", "--save-every", "1"]) == 2
    said = capsys.readouterr().err
    assert "step 2: [Errno 28] No space left on device" in said
    assert "step-00000001; go on with:" in said
    assert "--resume" in said
