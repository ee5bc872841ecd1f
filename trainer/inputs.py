"""What a run is given is opened and fits together: shards, evaluation shards and the model's configuration.

Guarantees: every mismatch is an error of one message before any weight is read, with what to pass instead.
"""

import filecmp
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import Qwen3_5TextConfig

from pipeline.places import check_place
from pipeline.shards import PackedDataset
from trainer import hub, memory, record, trackers
from trainer.plan import Plan
from trainer.settings import Settings, check_settings, recompute_layers, resolve, without_effect
from trainer.sizes import SIZES, ModelConfig, resolve_config, sample_config
from trainer.step import Precision
from trainer.world import World, on_rank_0, say

SAMPLE_TOKENIZER_SHA256 = "ea5234817e8cd4d3f69f5198f378d6abc2fe319597459b014c0168a0a5467d22"
"""tokenizer_sha256 of ``data/sample``: its shards train a small built-in configuration without ``--model``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Everything that is known before any weight is read."""

    settings: Settings
    """All of them resolved."""
    world: World
    """This process."""
    dataset: PackedDataset
    """Rows to train on."""
    eval_dataset: PackedDataset | None
    """Rows to evaluate on."""
    config: ModelConfig
    """The model's configuration."""
    plan: Plan
    """Which rows each step takes."""
    estimate: memory.Estimate
    """Memory that was found to fit."""
    out: Path
    """Folder of the run."""
    precision: Precision
    """What weights and activations are."""
    recompute_layers: int
    """How many layers compute their activations again."""
    source: Path | None
    """Folder of the weights that the run begins with; None for random ones."""


def prepare(settings: Settings, world: World) -> Inputs:
    """Open and check everything that needs no weight.

    Raises:
        ValueError: for settings, shards or a model that are wrong, do not fit together, or not into memory.
    """
    check_settings(settings)
    on_rank_0(world, lambda: trackers.require(settings.track))
    dataset = PackedDataset.open(settings.shards)
    spec = pin_model(settings, dataset, world)
    settings = resolve(settings, spec=spec, dataset_id=dataset.manifest.dataset_id, device=world.device)
    assert settings.out is not None
    assert settings.precision is not None
    out = settings.out
    on_rank_0(world, lambda: check_place("--out", out, write=True))
    record.require_folder(out, resume=settings.resume)
    eval_dataset = open_evaluation(settings.eval_shards, dataset) if settings.eval_shards else None
    plan = Plan.build(
        num_rows=len(dataset), seed=settings.seed, rows_per_step=settings.rows_per_step, epochs=settings.epochs,
        steps=settings.steps,
    )  # fmt: skip
    config = choose_model(spec, dataset)
    check_dataset(dataset, config, model=spec)
    for line in without_effect(settings, total_steps=plan.steps_left(rows_seen=0)):
        say(world, f"warning: {line}")
    num_recomputed = recompute_layers(settings, num_layers=config.num_hidden_layers)
    estimate = check_memory(settings, config, dataset, world=world, num_recomputed=num_recomputed)
    return Inputs(
        settings=settings, world=world, dataset=dataset, eval_dataset=eval_dataset, config=config, plan=plan,
        estimate=estimate, out=settings.out, precision=settings.precision, recompute_layers=num_recomputed,
        source=None if spec is None else hub.weights_folder(spec),
    )  # fmt: skip


def open_evaluation(path: Path, dataset: PackedDataset) -> PackedDataset:
    """The evaluation rows. Raises ValueError if another tokenizer packed them, or there are none."""
    found = PackedDataset.open(path)
    theirs, ours = (d.manifest.recipe["tokenizer"]["tokenizer_sha256"] for d in (found, dataset))
    if theirs != ours:
        raise ValueError(
            f"--eval-shards {path} was packed with the tokenizer {theirs[:12]}, {dataset.path} with "
            f"{ours[:12]}: losses would mean nothing. Pack both with the same --tokenizer."
        )
    if len(found) == 0:
        raise ValueError(f"--eval-shards {path} has 0 rows; pack a source that has targets")
    return found


def pin_model(settings: Settings, dataset: PackedDataset, world: World) -> str | None:
    """The model that is asked for, or the one that the recipe names; None where neither does.

    A hub id comes with its commit: that of the run where one is resumed, else what the hub holds now, equal on all
    ranks. Raises ValueError where no run is to be resumed, the hub is needed and cannot be reached, or what is a folder
    on one rank is none on another.
    """
    spec: str | None = settings.model or dataset.manifest.recipe["tokenizer"]["model"]
    if spec is None:
        return None

    def find() -> tuple[str, bool]:
        found = former_commit(settings.out, spec) if settings.resume and settings.out is not None else None
        found = found or hub.pin(spec)
        return found, Path(found).is_dir()

    found, is_folder = on_rank_0(world, find)
    if Path(found).is_dir() != is_folder:
        here, there = ("no folder", "a folder") if is_folder else ("a folder", "no folder")
        raise ValueError(f"--model {found}: {here} on rank {world.rank}, {there} on rank 0. Pass an absolute path")
    return found


def former_commit(out: Path, spec: str) -> str | None:
    """The model of the run in ``out`` where it is the hub's that ``spec`` asks for, of whatever commit."""
    record.require_folder(out, resume=True)
    former = record.read(out)["settings"]["model"]
    if former is None or any(hub.is_random(one) or Path(one).is_dir() for one in (spec, former)):
        return None
    (name, revision), (former_name, _) = hub.parse(spec), hub.parse(former)
    return former if name == former_name and not hub.is_commit(revision) else None


def choose_model(spec: str | None, dataset: PackedDataset) -> ModelConfig:
    """The configuration behind ``spec``, or the small one for the sample's own tokenizer.

    Args:
        spec: a ``--model`` value or the model that the recipe names; None where it names none.
        dataset: the shards.

    Raises:
        ValueError: there is no model, or its configuration cannot be had.
    """
    if spec is not None:
        return resolve_config(spec)
    tokenizer = dataset.manifest.recipe["tokenizer"]
    if tokenizer["tokenizer_sha256"] != SAMPLE_TOKENIZER_SHA256:
        raise ValueError(
            f"the tokenizer of {dataset.path} was a local folder, which names no model. Pass --model: a hub id "
            "such as Qwen/Qwen3.5-0.8B, a folder with config.json and safetensors, or random: with one of "
            f"{', '.join(SIZES)} or a configuration file. Its vocabulary has to hold the tokenizer's."
        )
    return sample_config(
        vocab_size=tokenizer["vocab_size"],
        pad_token_id=tokenizer["pad_token_id"],
        eos_token_ids=tokenizer["eos_token_ids"],
    )


def check_dataset(dataset: PackedDataset, config: ModelConfig, *, model: str | None) -> None:
    """Refuse rows that this model cannot be trained on or exported after. Raises ValueError."""
    check_vocabulary(config, dataset, model or "the sample's model")
    check_targets(dataset)
    tokenizer = read_tokenizer(dataset)
    if model is not None and not hub.is_random(model):
        check_same_tokens(dataset, tokenizer, model)


def check_vocabulary(config: ModelConfig, dataset: PackedDataset, model: str) -> None:
    """Refuse a model that has no embedding for a token of the dataset. Raises ValueError."""
    tokenizer = dataset.manifest.recipe["tokenizer"]
    for what, largest in (
        ("the tokenizer's largest token id", tokenizer["vocab_size"] - 1),
        ("the pad id", tokenizer["pad_token_id"]),
        ("the largest token id in the rows", dataset.manifest.limits["max_token_id"]),
    ):
        if largest >= config.vocab_size:
            raise ValueError(
                f"{what} of {dataset.path} is {largest}, but {model} has a vocabulary of {config.vocab_size}. "
                "Train the model that the tokenizer belongs to, or pack again with the model's own tokenizer."
            )


def check_targets(dataset: PackedDataset) -> None:
    """Refuse a dataset in which nothing can be learned. Raises ValueError."""
    if dataset.manifest.totals["targets"] == 0:
        raise ValueError(
            f"{dataset.path} has {len(dataset)} rows and no target: no token of theirs is to be learned. Pack again; "
            "targets are what the assistant says (rejects.jsonl and --targets tell what became of it)."
        )


def read_tokenizer(dataset: PackedDataset) -> Tokenizer:
    """The dataset's tokenizer, which an export takes along. Raises ValueError where it cannot be read."""
    path = dataset.path / "tokenizer" / hub.TOKENIZER
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the type that tokenizers raises
        raise ValueError(
            f"{path} cannot be read ({error}); the export needs it. Copy the dataset again, or pack again"
        ) from error


def check_same_tokens(dataset: PackedDataset, tokenizer: Tokenizer, model: str) -> None:
    """Refuse weights that came with a tokenizer in which some id is another token. Raises ValueError.

    Tokens that only one of both has are fine, so is another file with the same vocabulary, and another name for an id
    that both add to theirs, as reserved ones are put to use.
    """
    path = hub.tokenizer_file(model)
    if path is None or same_content(path, dataset.path / "tokenizer" / hub.TOKENIZER):
        return
    try:
        theirs = Tokenizer.from_file(str(path))
    except Exception:  # the type that tokenizers raises; nothing of it is used
        return
    mine, other = ({i: token for token, i in each.get_vocab().items()} for each in (tokenizer, theirs))
    renamed = tokenizer.get_added_tokens_decoder().keys() & theirs.get_added_tokens_decoder().keys()
    if differing := sorted(i for i in (mine.keys() & other.keys()) - renamed if mine[i] != other[i]):
        first = differing[0]
        raise ValueError(
            f"{dataset.path} was packed with another tokenizer than that of --model {model}: {len(differing)} ids are "
            f"other tokens, such as {first}: {mine[first]!r} in the rows, {other[first]!r} in {path}. Train the model "
            f"that the tokenizer belongs to, or pack again with --tokenizer {hub.parse(model)[0]}"
        )


def same_content(one: Path, other: Path) -> bool:
    """Whether two files hold the same bytes."""
    return one.stat().st_size == other.stat().st_size and filecmp.cmp(one, other, shallow=False)


def check_memory(
    settings: Settings, config: ModelConfig, dataset: PackedDataset, *, world: World, num_recomputed: int
) -> memory.Estimate:
    """Memory that the run takes.

    Args:
        settings: all of them resolved.
        config: the model.
        dataset: the shards.
        world: this process, and where it computes.
        num_recomputed: layers that compute their activations again.

    Raises:
        ValueError: there is not that much; says what would fit.
    """
    assert settings.precision is not None
    on_gpu = world.device.type == "cuda"
    workload = memory.Workload(
        config=config,
        max_tokens=dataset.manifest.max_tokens,
        micro_rows=min(settings.micro_rows, settings.rows_per_step),
        max_segments_per_row=dataset.manifest.limits["max_segments_per_row"],
        method=settings.method,
        precision=settings.precision,
        optimizer=settings.optimizer,
        lora_rank=settings.lora_rank,
        recompute_layers=num_recomputed,
        micro_steps=-(-settings.rows_per_step // (settings.micro_rows * world.size)),
        fused=on_gpu,
        processes=1 if on_gpu else world.local_size,
    )
    return memory.require(
        workload,
        available=memory.available_bytes(world.device),
        where="this GPU" if on_gpu else "this machine",
        alternatives=alternatives(settings.model),
    )


def alternatives(spec: str | None) -> dict[str, ModelConfig]:
    """Other sizes to suggest, as ``--model`` would name them."""
    prefix = "random:" if spec is None or spec.startswith("random:") else "Qwen/Qwen3.5-"
    return {prefix + size: Qwen3_5TextConfig(**fields) for size, fields in SIZES.items()}
