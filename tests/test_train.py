"""Whole runs of a tiny model: the same bits again, over interruptions too; errors that say what to pass."""

import datetime
import hashlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers import Qwen3_5ForCausalLM as Reference

from pipeline.shards import PackedDataset
from tests.packed import make_packed, random_rows, with_byte_tokenizer
from tests.tiny import tiny_config
from trainer import checkpoint, train
from trainer.kernels import select
from trainer.metrics import Metrics
from trainer.model import keeps_fp32
from trainer.record import command, default_folder, require_folder
from trainer.settings import Settings, resolve

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 300
T = 32


def packed(path: Path, *, num_rows: int = 10, max_tokens: int = T, seed: int = 0, **options: Any) -> Path:
    """A dataset whose tokenizer transformers can load: 256 bytes, no merges."""
    rows = random_rows(num_rows=num_rows, max_tokens=max_tokens, vocab_size=VOCAB, seed=seed)
    make_packed(path, rows, max_tokens=max_tokens, **({"vocab_size": VOCAB} | options))
    return with_byte_tokenizer(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    packed(folder / "packed")
    packed(folder / "eval", num_rows=3, max_tokens=48, seed=1)
    config = tiny_config(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, head_dim=16, num_hidden_layers=2,
                         layer_types=["linear_attention", "full_attention"])  # fmt: skip
    (folder / "tiny.json").write_text(json.dumps(config.to_dict()))
    return folder


def arguments(base: Path, out: Path, *more: str) -> list[str]:
    return [
        "--shards", str(base / "packed"), "--model", f"random:{base / 'tiny.json'}", "--rows-per-step", "4",
        "--lr", "1e-2", "--out", str(out), *more,
    ]  # fmt: skip


def run(base: Path, out: Path, *more: str) -> int:
    return train.main(arguments(base, out, *more))


def metrics(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_s"} for line in found]


def final_bytes(out: Path) -> dict[str, str]:
    """Hashes of the newest checkpoint and of the export: weights, moments, place in the data."""
    newest = checkpoint.latest(out)
    assert newest is not None
    files = [newest / name for name in ("model.safetensors", "optimizer.safetensors", "state.json")]
    files.append(out / "export" / "model.safetensors")
    return {f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def interrupt_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = Metrics.step

    def interrupted(self: Metrics, result: Any, *, rows_seen: int) -> None:
        original(self, result, rows_seen=rows_seen)
        if result.step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Metrics, "step", interrupted)


LONG = ("--eval-shards", "EVAL", "--epochs", "3", "--save-every", "2", "--eval-every", "3", "--warmup-steps", "2")
"""8 steps, the last of 2 rows; checkpoints after 2, 4, 6, 8; evaluations at 0, 3, 6, 8."""


def long(base: Path) -> list[str]:
    return [str(base / "eval") if word == "EVAL" else word for word in LONG]


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
    assert all(line.keys() == {"step", "rows_seen", "targets", "loss", "lr", "grad_norm"} for line in steps)
    dataset = PackedDataset.open(base / "packed")
    assert sum(line["targets"] for line in steps) == 3 * dataset.manifest.totals["targets"]
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
    assert (found["settings"]["precision"], found["settings"]["epochs"]) == ("fp32", 3)
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


def test_two_runs_of_the_same_settings_are_equal_bit_by_bit(base: Path, uninterrupted: Path, tmp_path: Path) -> None:
    assert run(base, tmp_path / "again", *long(base)) == 0
    assert metrics(tmp_path / "again") == metrics(uninterrupted)
    assert final_bytes(tmp_path / "again") == final_bytes(uninterrupted)


def test_another_seed_is_another_run(base: Path, uninterrupted: Path, tmp_path: Path) -> None:
    assert run(base, tmp_path / "seed", *long(base), "--seed", "1") == 0
    assert metrics(tmp_path / "seed") != metrics(uninterrupted)


def test_a_run_interrupted_and_resumed_twice_equals_an_uninterrupted_one(
    base: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = arguments(base, out, *long(base))
    for step in (5, 7):  # the first lies between checkpoints, the second is reached from the one after step 4
        with pytest.MonkeyPatch.context() as patch:
            interrupt_after(patch, step)
            assert train.main(words) == 130
        said = capsys.readouterr().err
        line = re.findall(r"go on with:\n  python -m trainer.train (.*)", said)[0]
        words = shlex.split(line)  # what it says is what works
        assert "--resume" in words
    assert train.main(words) == 0
    assert metrics(out) == metrics(uninterrupted)
    assert final_bytes(out) == final_bytes(uninterrupted)
    assert not [path for path in (out / "checkpoints").iterdir() if not path.name.startswith("step-")]


def test_a_run_interrupted_before_its_first_checkpoint_begins_again(
    base: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 1)
        assert run(base, out, *long(base)) == 130
    assert "There is no checkpoint yet" in capsys.readouterr().err
    assert run(base, out, *long(base), "--resume") == 0
    assert metrics(out) == metrics(uninterrupted)


def test_a_run_killed_at_any_moment_equals_an_uninterrupted_one(
    base: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = arguments(base, out, *long(base))
    rng = random.Random(time.time_ns())
    for attempt in range(2):
        more = ["--resume"] if attempt else []
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.train", *words, "--save-every", "1", *more],
            cwd=ROOT, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        wanted = "step-00000001" if attempt == 0 else "step-00000003"
        deadline = time.monotonic() + 90
        while (
            process.poll() is None
            and time.monotonic() < deadline
            and not any(path.name >= wanted for path in checkpoint.steps(out))
        ):
            time.sleep(0.005)
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run(base, out, *long(base), "--resume") == 0
    assert metrics(out) == metrics(uninterrupted)
    assert final_bytes(out) == final_bytes(uninterrupted)


SHORT = ("--steps", "4", "--save-every", "2", "--warmup-steps", "1")
BF16 = ("--precision", "bf16", "--recompute", "1")
LORA = ("--method", "lora", "--lora-rank", "4", "--lora-alpha", "8")


@pytest.mark.parametrize("more", [BF16, LORA + BF16], ids=["bf16", "lora"])
def test_in_bf16_and_with_adapters_too_an_interrupted_run_equals_an_uninterrupted_one(
    base: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    assert run(base, tmp_path / "one", *SHORT, *more) == 0
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 3)
        assert run(base, tmp_path / "two", *SHORT, *more) == 130
    assert [path.name for path in checkpoint.steps(tmp_path / "two")] == ["step-00000002"]
    torch.manual_seed(3)  # the state of the generator is restored too
    assert run(base, tmp_path / "two", *SHORT, *more, "--resume") == 0
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    first, second = (every_file(tmp_path / name) for name in ("one", "two"))
    assert first == second
    assert len(first) >= 8


def every_file(out: Path) -> dict[str, str]:
    """Hashes of all that a run leaves but of what tells times, places and settings."""
    files = [file for name in ("checkpoints", "export", "adapter") for file in sorted((out / name).rglob("*.*"))]
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


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


def test_a_checkpoint_of_another_method_or_optimizer_is_not_resumed(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(base, tmp_path / "run", "--steps", "1") == 0
    assert run(base, tmp_path / "run", "--steps", "2", "--resume", *LORA) == 2
    said = capsys.readouterr().err
    assert "--method: 'full' -> 'lora'" in said
    assert "--lora-rank: 16 -> 4" in said


def test_recomputation_changes_nothing_and_may_change_on_resume(base: Path, tmp_path: Path) -> None:
    steady = ("--schedule", "constant")
    assert run(base, tmp_path / "none", *steady, "--steps", "2") == 0
    assert run(base, tmp_path / "all", *steady, "--steps", "1", "--recompute", "all") == 0
    assert run(base, tmp_path / "all", *steady, "--steps", "2", "--recompute", "1", "--resume", "--keep", "1") == 0
    assert metrics(tmp_path / "all") == metrics(tmp_path / "none")
    assert final_bytes(tmp_path / "all") == final_bytes(tmp_path / "none")


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


def test_resuming_a_finished_run_says_that_nothing_is_left(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(base, out) == 0
    before = (metrics(out), final_bytes(out))
    assert run(base, out, "--resume") == 0
    assert "nothing is left to train: all 3 steps are done" in capsys.readouterr().err
    assert (metrics(out), final_bytes(out)) == before


def test_a_finished_run_can_be_extended_past_the_end_of_an_epoch(base: Path, tmp_path: Path) -> None:
    steady = ("--schedule", "constant", "--rows-per-step", "5")  # the last of the words counts
    assert run(base, tmp_path / "one", *steady, "--epochs", "1") == 0
    assert run(base, tmp_path / "one", *steady, "--epochs", "2", "--resume", "--keep", "1") == 0
    assert run(base, tmp_path / "two", *steady, "--epochs", "2") == 0
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    assert final_bytes(tmp_path / "one") == final_bytes(tmp_path / "two")
    assert len(checkpoint.steps(tmp_path / "one")) == 1


def test_other_settings_or_data_are_not_resumed(
    base: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(base, uninterrupted, *long(base), "--resume", "--lr", "0.5", "--seed", "9") == 2
    said = capsys.readouterr().err
    assert "--lr: 0.01 -> 0.5" in said
    assert "--seed: 0 -> 9" in said
    assert run(base, uninterrupted, *long(base), "--resume", "--shards", str(base / "eval")) == 2
    assert "dataset_id: " in capsys.readouterr().err


def test_a_folder_that_holds_something_is_not_written_into(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("mine")
    assert run(base, tmp_path) == 2
    assert "is not empty. Add --resume" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_the_place_of_a_resumed_run_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run began there"):
        require_folder(tmp_path, resume=True)
    require_folder(tmp_path, resume=False)
    require_folder(tmp_path / "new", resume=False)


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


def _rank(rank: int, world_size: int, words: list[str], port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    assert train.main(words) == 0


def test_two_ranks_train_as_one_does_with_fewer_rows_than_ranks_too(base: Path, tmp_path: Path) -> None:
    # 10 rows, 3 a step: the last step has one row for two ranks.
    more = ("--rows-per-step", "3", "--eval-shards", str(base / "eval"))
    assert run(base, tmp_path / "one", *more) == 0
    port = 20_000 + os.getpid() % 20_000
    mp.spawn(_rank, args=(2, arguments(base, tmp_path / "two", *more), port), nprocs=2)
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
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    begun = time.monotonic()
    assert run(base, tmp_path / "run", *more) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
    assert time.monotonic() - begun < 10


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
    monkeypatch.setattr(train, "SAMPLE_TOKENIZER_SHA256", "5" * 64)
    assert train.main(["--shards", str(shards), "--out", str(tmp_path / "run"), "--steps", "1"]) == 0
    found = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (found["settings"]["model"], found["model"]["vocab_size"]) == (None, VOCAB)


def test_the_samples_tokenizer_is_the_one_that_is_recognised() -> None:
    file = ROOT / "data" / "sample" / "tokenizer.json"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == train.SAMPLE_TOKENIZER_SHA256


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


def test_help_reads_like_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert caught.value.code == 0
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for name in train.Settings.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in said
    assert "Rows of one optimizer step, over all ranks and micro-steps." in said
