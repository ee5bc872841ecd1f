"""What the demo shows at its end: the loss against guessing, and a sentence that the export completes.

    python -m trainer.demo runs/demo --shards data/packed-sample --eval-shards data/packed-sample-eval

The export is loaded by transformers, as any other program would load it.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import tyro
from safetensors import SafetensorError

from pipeline.cli import refuse_repeats
from pipeline.shards import PackedDataset
from trainer.measured import record_path, write_whole
from trainer.report import log


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Compare a finished run with guessing by token frequency, and let its export complete a sentence."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run."""
    shards: Path
    """The dataset it was trained on."""
    eval_shards: Path
    """The held-out dataset."""
    question: str = "What kind of world is Jupiter?"
    """What the user says."""
    sentence: str = "Jupiter is a"
    """How the assistant's answer begins."""
    max_new_tokens: int = 16
    """Longest completion."""
    record_dir: Path | None = None
    """Also write a record of the figures there."""


def guessing_loss(train: PackedDataset, held_out: PackedDataset) -> float:
    """Mean loss, in nats, of guessing every held-out target by how often each token is a target in training.

    Every token of the vocabulary is counted once more than it occurs, so that none has probability 0.
    """
    size = train.manifest.recipe["tokenizer"]["vocab_size"]
    counts = _target_counts(train, size) + 1
    losses = -np.log(counts / counts.sum())
    held = _target_counts(held_out, size)
    return float((losses * held).sum() / held.sum())


def _target_counts(dataset: PackedDataset, size: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(size, np.int64)
    for row in dataset:
        counts += np.bincount(row.input_ids[row.loss_mask], minlength=size)
    return counts


def final_loss(run: Path) -> float:
    """The last evaluation loss of a run. Raises ValueError for what is no run, or one that was not evaluated."""
    losses = log.read(run).eval_loss
    if not losses.size:
        raise ValueError(f"{run / log.METRICS} has no evaluation, so no loss to compare. Train it with --eval-shards")
    if not np.isfinite(losses[-1]):
        raise ValueError(
            f"{run / log.METRICS} ends with an evaluation without a target, so without a loss to compare. Train it "
            "with --eval-shards that have targets"
        )
    return float(losses[-1])


def find_export(run: Path) -> Path:
    """The model that a run exported. Raises ValueError where there is none."""
    export = run / "export"
    if not (export / "config.json").is_file():
        raise ValueError(
            f"{export} holds no model, so nothing can complete the sentence: the run has not finished, or trained "
            "adapters, which are in adapter/. Go on with --resume, or train every weight with --method full"
        )
    return export


def complete(export: Path, question: str, sentence: str, *, max_new_tokens: int) -> str:
    """Let an exported folder complete an answer, greedily, through transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    chat = [{"role": "user", "content": question}]
    prompt = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False))
    ids = tokenizer(prompt + sentence, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def write_record(settings: Settings, figures: dict[str, tuple[float, str]]) -> Path:
    """Write the figures with the run's own commit, machine and versions; return the file."""
    assert settings.record_dir is not None
    config = json.loads((settings.run / "config.json").read_text())
    record = {
        "what": "demo",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "make demo",
        "commit": config["commit"],
        "machine": config["machine"],
        "num_gpus": 0,
        "versions": config["versions"],
        "figures": {name: {"value": round(value, 3), "unit": unit} for name, (value, unit) in figures.items()},
        "notes": "data/sample, the built-in small configuration, torch references on the CPU",
    }
    path = record_path(settings.record_dir, "demo", "cpu")
    write_whole(path, record)
    return path


def show(settings: Settings) -> bool:
    """Print it all; whether the model is better than guessing.

    Raises ValueError or OSError for a run, an export or a dataset that cannot be used.
    """
    loss, export = final_loss(settings.run), find_export(settings.run)  # both fail at once, counting takes a while
    guess = guessing_loss(PackedDataset.open(settings.shards), PackedDataset.open(settings.eval_shards))
    completion = complete(export, settings.question, settings.sentence, max_new_tokens=settings.max_new_tokens)
    print(f"\nheld-out loss   {loss:.3f} nats a target; guessing by token frequency {guess:.3f}")
    print(f"the user asks   {settings.question}")
    print(f"the model says  {settings.sentence}\033[1m{completion}\033[0m" if sys.stdout.isatty() else
          f"the model says  {settings.sentence}[{completion}]")  # fmt: skip
    print(f"dataset         {settings.shards}  (python -m pipeline.verify {settings.shards} --show 0)")
    print(f"run             {settings.run}/metrics.jsonl, {settings.run}/config.json, {settings.run}/checkpoints")
    print(f"export          {export}  (transformers loads it)")
    if settings.record_dir is not None:
        figures = {"eval_loss": (loss, "nats a target"), "guessing_loss": (guess, "nats a target")}
        print(f"record          {write_record(settings, figures)}")
    return loss < guess


def main() -> int:
    """The command line.

    Returns the exit status: 0, 1 if the model is no better than guessing, 2 for what cannot be used, 130 after Ctrl-C.
    """
    hear()
    settings = tyro.cli(Settings, prog="python -m trainer.demo")
    refuse_repeats(Settings)
    try:
        return 0 if show(settings) else 1
    except (ValueError, OSError, SafetensorError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # transformers' errors have many lines
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
