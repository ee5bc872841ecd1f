"""An adapter's record of the weights that it was trained on, and what merging makes of it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.released import write_source
from tests.tiny import tiny_model
from tests.training import BF16, LORA, SHORT, make_base, run
from trainer import adapters, bases, weights
from trainer.lora import add_adapters


def write_adapter(out: Path, source: Path | None, *, precision: torch.dtype = torch.float32, **how: Any) -> Path:
    """An adapter of a source, as a run in some precision leaves it; of random weights without one."""
    model = tiny_model().to_dtype(precision)
    if source is not None:
        weights.load_weights(model, source)
    add_adapters(model, rank=2, alpha=4.0, seed=0)
    return adapters.export(out, model=model, source=source, rank=2, alpha=4.0, **how)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A source and an adapter of it."""
    source = write_source(tmp_path / "source", kind="text")
    return source, write_adapter(tmp_path / "adapter", source)


@pytest.mark.parametrize("command", ["merge", "text"])
def test_where_no_adapter_lies_it_is_said_what_to_pass(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:  # fmt: skip
    source, adapter = pair
    (tmp_path / "a file").touch()
    folder = "the folder with adapter_config.json, such as RUN/adapter"
    for place, what in (
        (adapter.parent, f"{adapter}, where one lies"),
        (source, folder), (tmp_path / "nowhere", folder), (tmp_path / "a file", folder),
    ):  # fmt: skip
        words = ["--adapter", str(place), "--out", str(tmp_path / "out")]
        words += ["--source", str(source)] if command == "merge" else []
        monkeypatch.setattr(sys, "argv", ["adapters", command, *words])
        assert adapters.main() == 2
        lacking = "no adapter lies there, it has no adapter_config.json"
        assert capsys.readouterr().err == f"error: --adapter {place}: {lacking}. Pass {what}\n"
    assert not (tmp_path / "out").exists()


def retouched(source: Path, out: Path, change: Any) -> Path:
    """A copy of a checkpoint in one file, its floating tensors changed."""
    out.mkdir()
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    state = {key: weights.read_tensor(file, key) for key, file in weights.checkpoint_keys(source).items()}
    save_file({key: change(key, tensor).contiguous() for key, tensor in state.items()}, out / "model.safetensors")
    return out


def turned(key: str, tensor: Tensor) -> Tensor:
    return tensor.flip(0) if ".layers." in key and "mtp" not in key else tensor


def trained_further(key: str, tensor: Tensor) -> Tensor:
    """By a thousandth of each value, in one layer alone."""
    return tensor * 1.001 if key.endswith("layers.2.mlp.down_proj.weight") else tensor


def wider(_: str, tensor: Tensor) -> Tensor:
    return tensor.float()


def narrower(_: str, tensor: Tensor) -> Tensor:
    return tensor.bfloat16()


@pytest.mark.parametrize("kind", ["released", "text"])
@pytest.mark.parametrize("form", ["source", "text"])
def test_an_adapter_is_not_merged_into_weights_that_it_was_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, form: str
) -> None:
    source = write_source(tmp_path / "source", kind=kind, dtype=torch.float32)
    adapter = write_adapter(tmp_path / "a", source, base="Qwen/Tiny", revision="abc")
    if form == "text":
        adapter = adapters.for_text(adapter, tmp_path / "for-text")
    adapters.merge(source, adapter, tmp_path / "merged")
    assert capsys.readouterr().out == ""
    for count, change in ((31, turned), (1, trained_further)):
        other = retouched(source, tmp_path / change.__name__, change)
        words = rf"{other} holds other .*Qwen/Tiny@abc \({count} of the 31 weights.*--accept-other-source"
        with pytest.raises(ValueError, match=words):
            adapters.merge(other, adapter, tmp_path / "no")
        assert not (tmp_path / "no").exists()
        adapters.merge(other, adapter, tmp_path / "yes", accept_other_source=True)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"warning: --source {other} holds other weights")


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_of_the_base_in_another_dtype_is_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype, precision: torch.dtype
) -> None:
    """Whatever the run's own precision was, and whatever the source's."""
    source = write_source(tmp_path / "source", kind="released", dtype=dtype)
    adapter = write_adapter(tmp_path / "a", source, precision=precision)
    copies = [retouched(source, tmp_path / change.__name__, change) for change in (wider, narrower)]
    for base in (source, *copies):
        adapters.merge(base, adapter, tmp_path / "merged")
        assert capsys.readouterr().out == ""


def test_an_adapter_of_random_weights_is_merged_into_no_checkpoint(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", kind="text")
    adapter = write_adapter(tmp_path / "a", None)
    for accept in (False, True):
        with pytest.raises(ValueError, match=rf"{adapter} was trained on random weights .*Train one with --model"):
            adapters.merge(source, adapter, tmp_path / "merged", accept_other_source=accept)
    assert not (tmp_path / "merged").exists()


def test_of_an_adapter_without_a_record_of_its_base_one_line_says_so(
    tmp_path: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, adapter = pair
    (adapter / bases.BASE).unlink()
    adapters.merge(source, adapter, tmp_path / "merged")
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        f"warning: {adapter} has no {bases.BASE}: whether it was trained on the weights of {source} cannot be checked"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "an object is expected"),
        ("{}", "version None, this program reads 1"),
        ('{"version": 2}', "version 2, this program reads 1"),
        ('{"version": 1, "base": 5, "random": 0}', "base, random, weights missing or not what"),
    ],
)
def test_a_damaged_record_of_the_base_is_named(
    tmp_path: Path, pair: tuple[Path, Path], content: str, words: str
) -> None:
    source, adapter = pair
    (adapter / bases.BASE).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{bases.BASE}: .*{words}"):
        adapters.merge(source, adapter, tmp_path / "merged")


def test_the_command_line_refuses_other_weights_unless_they_are_asked_for(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = retouched(pair[0], tmp_path / "other", turned)
    command = ["adapters", "merge", "--adapter", str(pair[1]), "--source", str(other), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    assert adapters.main() == 2
    assert f"error: --source {other} holds other weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    command.append("--accept-other-source")
    assert adapters.main() == 0
    assert "merging all the same" in capsys.readouterr().out


def test_a_bf16_runs_adapter_goes_into_its_fp32_source_and_not_into_another_runs_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base(tmp_path)
    for name, seed in (("one", "0"), ("two", "1")):
        assert run(base, tmp_path / name, *SHORT, "--seed", seed) == 0
    one, two = (tmp_path / name / "export" for name in ("one", "two"))
    assert run(base, tmp_path / "lora", "--model", str(one), *SHORT, *LORA, *BF16) == 0
    capsys.readouterr()
    adapter = tmp_path / "lora" / "adapter"
    adapters.merge(one, adapter, tmp_path / "merged")
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=rf"--source {two} holds other .* recorded as {one} \("):
        adapters.merge(two, adapter, tmp_path / "no")
    assert run(base, tmp_path / "random", *SHORT, *LORA) == 0
    with pytest.raises(ValueError, match="trained on random weights"):
        adapters.merge(one, tmp_path / "random" / "adapter", tmp_path / "no")
    assert not (tmp_path / "no").exists()
