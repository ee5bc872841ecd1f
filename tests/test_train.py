"""Whole runs of a tiny model: what they leave, in every mode; errors that say what to pass."""

import datetime
import hashlib
import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers import Qwen3_5ForCausalLM as Reference

from pipeline.shards import PackedDataset
from tests.packed import make_packed, random_rows
from tests.training import (
    BF16,
    LORA,
    ROOT,
    SHORT,
    VOCAB,
    T,
    arguments,
    long,
    make_base,
    metrics,
    on_two_ranks,
    packed,
    run,
)
from trainer import checkpoint, inputs, memory, train
from trainer.kernels import select
from trainer.model import keeps_fp32
from trainer.record import command, default_folder
from trainer.settings import Settings, resolve


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def uninterrupted(base: Path) -> Path:
    out = base / "uninterrupted"
    assert run(base, out, *long(base)) == 0
    return out


def test_a_run_leaves_metrics_checkpoints_record_and_export(base: Path, uninterrupted: Path) -> None:
    lines = metrics(uninterrupted)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["rows_seen"] for line in steps] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert all(line.keys() == {"step", "rows_seen", "tokens", "targets", "loss", "lr", "grad_norm"} for line in steps)
    dataset = PackedDataset.open(base / "packed")
    for name in ("tokens", "targets"):
        assert sum(line[name] for line in steps) == 3 * dataset.manifest.totals[name]
    assert steps[-1]["loss"] < steps[0]["loss"]
    evaluations = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(evaluations) == [0, 3, 6, 8]
    assert [path.name for path in checkpoint.steps(uninterrupted)] == ["step-00000006", "step-00000008"]


def test_the_record_says_what_was_run_with_what(base: Path, uninterrupted: Path) -> None:
    found = json.loads((uninterrupted / "config.json").read_text())
    dataset = PackedDataset.open(base / "packed")
    assert found["dataset_id"] == dataset.manifest.dataset_id
    assert found["fingerprint"] == dataset.manifest.fingerprint
    assert found["settings"].keys() == set(train.Settings.__dataclass_fields__)
    assert (found["settings"]["precision"], found["settings"]["epochs"], found["total_steps"]) == ("fp32", 3, 8)
    assert found["model"]["hidden_size"] == 32
    assert found["versions"].keys() >= {"python", "torch", "transformers", "numpy", "pyarrow"}
    assert {choice["operation"] for choice in found["kernels"]} >= {"gated_delta_rule", "attention", "loss"}
    assert found["memory_estimate_bytes"]["weights"] > 0
    assert "commit" in found


def test_transformers_loads_the_export(uninterrupted: Path) -> None:
    model = Reference.from_pretrained(uninterrupted / "export")
    tokenizer = AutoTokenizer.from_pretrained(uninterrupted / "export")
    ids = torch.tensor([tokenizer("a sentence")["input_ids"]])
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_a_bf16_run_keeps_fp32_masters_and_exports_bf16(base: Path, tmp_path: Path) -> None:
    assert run(base, tmp_path / "run", *SHORT, *BF16) == 0
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    kept = load_file(newest / "model.safetensors")
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    for name, tensor in exported.items():
        assert tensor.dtype == (torch.float32 if keeps_fp32(name) else torch.bfloat16), name
        assert torch.equal(tensor, kept[name].to(tensor.dtype)), name
    assert any(not torch.equal(kept[name].bfloat16().float(), kept[name]) for name in kept)
    assert metrics(tmp_path / "run")[-1]["loss"] < metrics(tmp_path / "run")[0]["loss"] + 0.5


def test_a_bf16_run_of_an_fp32_source_exports_the_masters(base: Path, uninterrupted: Path, tmp_path: Path) -> None:
    source = uninterrupted / "export"
    assert run(base, tmp_path / "run", "--model", str(source), *SHORT, *BF16) == 0
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    kept = load_file(newest / "model.safetensors")
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        assert exported[name].dtype == tensor.dtype == torch.float32
        moved = kept[name] != tensor.bfloat16().float()  # what loading rounded and no step moved is the source's own
        assert torch.equal(exported[name], torch.where(moved, kept[name], tensor)), name
        assert moved.any(), name
    assert any(not torch.equal(tensor.bfloat16().float(), tensor) for tensor in exported.values())


def test_a_lora_run_leaves_an_adapter_and_checkpoints_without_frozen_weights(
    base: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = uninterrupted / "export"
    assert run(base, tmp_path / "run", "--model", str(source), *SHORT, *LORA) == 0
    said = capsys.readouterr().err
    assert f"python -m trainer.adapters merge --adapter {tmp_path / 'run' / 'adapter'} --source {source}" in said
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    kept = load_file(newest / "model.safetensors")
    assert all(name.endswith((".lora_A", ".lora_B")) for name in kept)
    assert any(tensor.any() for name, tensor in kept.items() if name.endswith("lora_B"))
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()
    assert not (tmp_path / "run" / "export").exists()
    # The first loss is that of the model which is adapted.
    assert metrics(tmp_path / "run")[0]["loss"] < metrics(uninterrupted)[1]["loss"]


def test_on_a_gpu_the_doctor_is_asked_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    class Doctor:
        @staticmethod
        def require(kernels: object, device: torch.device) -> None:
            asked.append(device)
            raise ValueError("attention failed")

    monkeypatch.setattr("trainer.doctor", Doctor, raising=False)
    kernels = select(torch.device("cpu"))
    train.prove(kernels, torch.device("cpu"))
    assert not asked
    with pytest.raises(ValueError, match="attention failed"):
        train.prove(kernels, torch.device("cuda"))
    assert asked == [torch.device("cuda")]


def test_fp32_on_a_gpu_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    settings = Settings(shards=tmp_path, out=tmp_path / "run", precision="fp32")
    with pytest.raises(ValueError, match="--precision fp32: a GPU's kernels compute in bf16"):
        resolve(settings, spec=None, dataset_id="0" * 32, device=torch.device("cuda"))
    assert resolve(settings, spec=None, dataset_id="0" * 32, device=torch.device("cpu")).precision == "fp32"


def test_a_trace_of_some_steps_is_written(base: Path, tmp_path: Path) -> None:
    assert run(base, tmp_path / "run", "--steps", "6", "--trace", "1") == 0
    assert (tmp_path / "run" / "trace.json.gz").is_file()


def test_a_dataset_without_a_target_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = random_rows(num_rows=3, max_tokens=T, vocab_size=VOCAB)
    silent = [[(doc, ids, [False] * len(ids)) for doc, ids, _ in row] for row in rows]
    shards = make_packed(tmp_path / "packed", silent, max_tokens=T, vocab_size=VOCAB)
    assert run(base, tmp_path / "run", "--shards", str(shards)) == 2
    assert "has 3 rows and no target" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_is_not_written_into(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("mine")
    assert run(base, tmp_path) == 2
    assert "is not empty. Add --resume" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("num_rows", "more", "steps"),
    [(1, (), 1), (3, (), 1), (1, ("--steps", "2"), 2), (3, ("--micro-rows", "4"), 1)],
)
def test_fewer_rows_than_a_step_work(
    base: Path, tmp_path: Path, num_rows: int, more: tuple[str, ...], steps: int
) -> None:
    shards = packed(tmp_path / "packed", num_rows=num_rows)
    assert run(base, tmp_path / "run", "--shards", str(shards), *more) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, steps + 1))


def test_two_ranks_train_as_one_does_with_fewer_rows_than_ranks_too(base: Path, tmp_path: Path) -> None:
    # 10 rows, 3 a step: the last step has one row for two ranks.
    more = ("--rows-per-step", "3", "--eval-shards", str(base / "eval"))
    assert run(base, tmp_path / "one", *more) == 0
    assert on_two_ranks(arguments(base, tmp_path / "two", *more)) == [0, 0]
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [line["step"] for line in two] == [0, 1, 2, 3, 4, 4]
    for expected, found in zip(one, two, strict=True):
        assert found == {name: pytest.approx(value, rel=1e-3) for name, value in expected.items()}


def test_a_run_that_diverges_stops_and_names_its_rows(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(base, tmp_path / "run", "--lr", "1e30", "--clip", "0", "--schedule", "constant") == 2
    said = capsys.readouterr().err
    assert re.search(r"error: step \d: loss", said)
    assert "rows of the step: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--method", "lora", "--lora-rank", "0"), "--lora-rank 0"),
        (("--method", "lora", "--lora-alpha", "0"), "--lora-alpha 0"),
        (("--recompute", "some"), "--recompute some"),
        (("--recompute", "3"), "the model has 2 layers"),
        (("--optimizer", "adamw_bf16"), "--precision bf16"),
        (("--trace", "-1"), "--trace -1"),
        (("--lr", "nan"), "--lr nan"),
        (("--clip", "-1"), "--clip -1"),
        (("--micro-rows", "0"), "--micro-rows 0"),
        (("--keep", "0"), "--keep 0"),
        (("--rows-per-step", "0"), "--rows-per-step 0"),
        (("--seed", "-1"), "seed -1"),
        (("--shards", "nowhere"), "not a packed dataset"),
        (("--model", "random:3B"), "0.8B, 2B, 4B"),
        (("--model", "random:27B"), "this run needs about"),
    ],
)
def test_what_cannot_run_is_an_error_of_one_message(
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _: 24 * memory.GIB)  # on this machine 27B may fit
    begun = time.process_time()
    assert run(base, tmp_path / "run", *more) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
    assert time.process_time() - begun < 10  # of work: a busy machine takes longer


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--eval-shards", "one", "--eval-shards", "two"), "--eval-shards is given twice"),
        (("--lr", "1e-3", "--lr=1e-4"), "--lr is given twice"),
    ],
)
def test_an_option_given_twice_is_refused(
    base: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.main(["--shards", str(base / "packed"), *option])
    assert message in capsys.readouterr().err


def test_a_place_that_is_no_folder_is_named_with_its_option(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(base, tmp_path / "file" / "run") == 2
    assert f"--out {tmp_path / 'file' / 'run'}: {tmp_path / 'file'} is a file" in capsys.readouterr().err


def test_resume_needs_the_folder(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--shards", str(base / "packed"), "--resume"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err


def test_without_a_model_the_error_says_what_to_pass(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--shards", str(base / "packed")]) == 2
    assert "Pass --model: a hub id such as Qwen/Qwen3.5-0.8B" in capsys.readouterr().err


def test_the_model_that_the_tokenizer_belongs_to_is_the_default(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = packed(tmp_path / "packed", model=f"random:{base / 'tiny.json'}")
    assert train.main(["--shards", str(shards), "--out", str(tmp_path / "run"), "--steps", "1"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["hidden_size"] == 32


def test_the_samples_tokenizer_takes_the_small_built_in_model(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = packed(tmp_path / "packed", tokenizer_sha256="5" * 64)
    monkeypatch.setattr(inputs, "SAMPLE_TOKENIZER_SHA256", "5" * 64)
    assert train.main(["--shards", str(shards), "--out", str(tmp_path / "run"), "--steps", "1"]) == 0
    found = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (found["settings"]["model"], found["model"]["vocab_size"]) == (None, VOCAB)


def test_the_samples_tokenizer_is_the_one_that_is_recognised() -> None:
    file = ROOT / "data" / "sample" / "tokenizer.json"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == inputs.SAMPLE_TOKENIZER_SHA256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": VOCAB + 2}, f"largest token id of PATH is {VOCAB + 1}"),
        ({"pad_token_id": VOCAB}, f"the pad id of PATH is {VOCAB}"),
    ],
)
def test_a_model_without_an_embedding_for_a_token_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], message: str
) -> None:
    shards = packed(tmp_path / "packed", **options)
    assert run(base, tmp_path / "run", "--shards", str(shards)) == 2
    said = capsys.readouterr().err
    assert message.replace("PATH", str(shards)) in said
    assert f"a vocabulary of {VOCAB}" in said


def test_evaluation_rows_of_another_tokenizer_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = packed(tmp_path / "eval", tokenizer_sha256="7" * 64)
    assert run(base, tmp_path / "run", "--eval-shards", str(other)) == 2
    assert "Pack both with the same --tokenizer" in capsys.readouterr().err


def test_an_empty_dataset_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = packed(tmp_path / "packed", num_rows=0)
    assert run(base, tmp_path / "run", "--shards", str(shards)) == 2
    assert "0 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3.5-0.8B", "Qwen3.5-0.8B"),
        ("random:0.8B", "random-0.8B"),
        ("random:some where/tiny.json", "tiny"),
        ("/models/mine/", "mine"),
    ],
)
def test_a_run_is_named_after_day_model_and_dataset(model: str, name: str) -> None:
    found = default_folder(model=model, dataset_id="0123456789abcdef", today=datetime.date(2026, 1, 2))
    assert found == Path("runs") / f"2026-01-02-{name}-01234567"


def test_the_command_line_of_settings_gives_them_back() -> None:
    line = command(train.Settings(shards=Path("a b"), lr=0.1, resume=True, keep=2))
    assert shlex.split(line) == ["python", "-m", "trainer.train", "--shards", "a b", "--lr", "0.1", "--resume"]
    both = command(train.Settings(shards=Path("x"), track=("tensorboard", "wandb")))
    assert both.endswith(" --track tensorboard --track wandb")


def test_help_reads_like_documentation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # in a narrow terminal words lie in more than one column
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert caught.value.code == 0
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for name in train.Settings.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in said
    assert "Rows of one optimizer step, over all ranks and micro-steps." in said
