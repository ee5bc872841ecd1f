"""Adapters in PEFT's format, and checkpoints with adapters merged in.

    export(run / "adapter", model=model, source=folder, rank=16, alpha=32.0, ...)
    python -m trainer.adapters merge --adapter RUN/adapter --source FOLDER --out FOLDER
    python -m trainer.adapters text --adapter RUN/adapter --out FOLDER

`PeftModel.from_pretrained` loads the folder onto the class that the source's config.json names (with a vision tower:
`model.language_model.layers...`), or onto the text class, which AutoPeftModelForCausalLM takes, where that is asked for
or written by `text`. The targets are spelt as a pattern of
whole names, so that neither the head nor vision and MTP modules of the same short names match.

Guarantees: a folder is read back and compared before it appears under its name; merging refuses other weights than
those that the adapter was trained on (see `trainer.bases`), reads the original ones again, adds in fp32 and rounds
once, to the source's dtype, and carries everything else through.
Costs: an adapter is one file of (inputs + outputs) * rank numbers a layer; merging reads the source twice, some values
of it a third time, and holds a few fp32 copies of its largest adapted weight.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

from pipeline.cli import refuse_repeats
from trainer.bases import require_base, write_base
from trainer.exports import publishing, read_json, refuse_replacing, save_tensors, write_json
from trainer.hub import weights_folder
from trainer.lora import adapted
from trainer.model import Qwen3_5ForCausalLM
from trainer.tensors import Deferred
from trainer.weights import (
    FILES,
    GENERATION,
    SHARD_BYTES,
    carry_companions,
    checkpoint_keys,
    compare_files,
    copy_tokenizer,
    file_keys,
    generation_ends,
    parameter_name,
    read_tensor,
    write_checkpoint,
)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

TARGETS = (
    r"layers\.\d+\.(linear_attn\.(in_proj_qkv|in_proj_z|in_proj_b|in_proj_a|out_proj)"
    r"|self_attn\.(q_proj|k_proj|v_proj|o_proj)|mlp\.(gate_proj|up_proj|down_proj))"
)
"""Every linear layer of both layer kinds, below the text model's name; PEFT matches whole names."""

_NEUTRAL = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "bias", "target_modules", "init_lora_weights", "qalora_group_size",
    "megatron_core", "runtime_config",
})  # fmt: skip
"""Fields of an adapter's configuration that do not change W + alpha / r B A, or are looked at one by one."""
_ABSENT: tuple[object, ...] = (None, "", [], {})
_PEFT = "base_model.model."
_TEXT, _RELEASED = "model.", "model.language_model."


def export(
    out: Path,
    *,
    model: Qwen3_5ForCausalLM,
    source: Path | None,
    rank: int,
    alpha: float,
    for_class: Literal["source", "text"] = "source",
    tokenizer_dir: Path | None = None,
    eos_token_ids: Sequence[int] = (),
    base: str | None = None,
    revision: str | None = None,
) -> Path:
    """Write the model's adapters as a folder that PEFT loads; return it.

    Args:
        source: the checkpoint that the run started from; None for random weights, which are the text class's.
        for_class: `source` for the class that the source's config.json names, `text` for `Qwen3_5ForCausalLM`.
        tokenizer_dir: the dataset's `tokenizer/`; copied.
        eos_token_ids: where generation ends; goes into generation_config.json, which `merge` reads.
        base: name of the base model for people and programs, a hub id or a folder; `source` by default.
        revision: commit of a hub id.

    A former adapter at `out` is replaced; another folder there is refused.
    """
    needed = [] if source is None else [source]
    refuse_replacing(out, what="adapter", tensors=TENSORS, needed=needed)
    prefix = _RELEASED if for_class == "source" and source is not None and _is_released(source) else _TEXT
    tensors = _peft_tensors(model, prefix)
    base = base or (None if source is None else str(source))
    frozen = {name: layer.weight for name, layer in adapted(model).items()}
    with publishing(out) as folder:
        save_tensors(tensors, folder / TENSORS)
        write_json(folder / CONFIG, _peft_config(prefix, rank=rank, alpha=alpha, base=base, revision=revision))
        write_base(folder, frozen, name=f"{base}@{revision}" if revision else base, is_random=source is None)
        if eos_token_ids:
            write_json(folder / GENERATION, {"eos_token_id": list(eos_token_ids)})
        if tokenizer_dir is not None:
            copy_tokenizer(tokenizer_dir, folder)
        compare_files(dict.fromkeys(file_keys(folder / TENSORS), folder / TENSORS), tensors.items())
    return out


def merge(
    source: Path,
    adapter: Path,
    out: Path,
    *,
    accept_other_source: bool = False,
    say: Callable[[str], None] = print,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the source with an adapter added to its weights, in its own class, keys and dtypes; return the folder.

    Args:
        source: the checkpoint that the adapter was trained on, or a copy of it.
        adapter: its folder.
        out: folder to write.
        accept_other_source: merge into other weights too, telling `say`.
        say: takes one line where what the adapter was trained on is another source, or not known.
        shard_bytes: largest file of the result.

    Raises ValueError for an adapter that does not fit the source, was trained on other weights, or that PEFT would
    compute otherwise.
    """
    refuse_replacing(out, what="export", tensors=FILES, needed=[source, adapter])
    config, halves = _read_config(adapter), _halves(adapter / TENSORS)
    require_base(source, adapter, accept_other=accept_other_source, say=say)

    def companions(folder: Path) -> None:
        eos_token_ids = generation_ends(adapter / GENERATION)
        tokenizer_dir = adapter if (adapter / "tokenizer.json").is_file() else None
        carry_companions(source, folder, tokenizer_dir=tokenizer_dir, eos_token_ids=eos_token_ids)

    tensors = functools.partial(_merged_tensors, source, adapter, config, halves)
    return write_checkpoint(
        out, needed=[source, adapter], tensors=tensors, companions=companions, shard_bytes=shard_bytes
    )


def _merged_tensors(
    source: Path, adapter: Path, config: dict[str, Any], halves: dict[str, dict[str, str]]
) -> Iterator[tuple[str, Deferred]]:
    """Every tensor of the source under its key, with the adapter added where there is one."""
    file, scale = adapter / TENSORS, config["lora_alpha"] / config["r"]
    left = set(halves)
    for key, place in checkpoint_keys(source).items():
        weight = read_tensor(place, key)  # nothing is read before its bytes are looked at
        make: Callable[[], Tensor] = functools.partial(read_tensor, place, key)
        layer = (parameter_name(key) or "").removesuffix(".weight")
        if layer in left:
            left.remove(layer)
            a_RI = read_tensor(file, halves[layer]["lora_A"])
            if a_RI.shape[:1] != (config["r"],):
                raise ValueError(f"{file}: lora_A of {layer} is {list(a_RI.shape)}, {CONFIG} says r {config['r']}")
            make = functools.partial(_merged_anew, place, key, file, halves[layer], scale)
        yield key, Deferred(dtype=weight.dtype, shape=weight.shape, make=make)
    if left:
        raise ValueError(
            f"{source} lacks {min(left)}.weight, for which {adapter} has an adapter; is it its base model?"
        )


def _merged_anew(place: Path, key: str, file: Path, halves: dict[str, str], scale: float) -> Tensor:
    a_RI, b_OR = (read_tensor(file, halves[half]) for half in ("lora_A", "lora_B"))
    return merged(read_tensor(place, key), a_RI, b_OR, scale)


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """W + scale B A, computed in fp32 (fp64 for an fp64 weight) and rounded once to the weight's dtype."""
    parts = (weight_OI, a_RI, b_OR)
    plain = all(part.dim() == 2 and part.is_floating_point() for part in parts)
    if not plain or a_RI.shape != (b_OR.shape[1], weight_OI.shape[1]) or b_OR.shape[0] != weight_OI.shape[0]:
        raise ValueError(
            f"an adapter of {list(b_OR.shape)} by {list(a_RI.shape)} does not fit a weight of {list(weight_OI.shape)}; "
            "it belongs to another model"
        )
    exact = torch.promote_types(weight_OI.dtype, torch.float32)
    return torch.addmm(weight_OI.to(exact), b_OR.to(exact), a_RI.to(exact), alpha=scale).to(weight_OI.dtype)


def for_text(adapter: Path, out: Path) -> Path:
    """Write an adapter anew for the text class, `Qwen3_5ForCausalLM`, whatever class it is for; return the folder.

    Raises ValueError for an adapter that `merge` would refuse too.
    """
    refuse_replacing(out, what="adapter", tensors=TENSORS, needed=[adapter])
    config, file = _read_config(adapter), adapter / TENSORS
    halves = _halves(file)
    tensors = {
        f"{_PEFT}{layer}.{half}.weight": read_tensor(file, key)
        for layer, keys in halves.items()
        for half, key in keys.items()
    }
    with publishing(out) as folder:
        save_tensors(tensors, folder / TENSORS)
        carry_companions(adapter, folder, tokenizer_dir=None, eos_token_ids=[])
        # By name: a pattern may be spelt for the other class.
        write_json(folder / CONFIG, {**config, "target_modules": sorted(halves)})
        compare_files(dict.fromkeys(file_keys(folder / TENSORS), folder / TENSORS), tensors.items())
    return out


def _is_released(source: Path) -> bool:
    """Whether the source's config.json names the class with a vision tower."""
    config = read_json(source / "config.json")
    names = config.get("architectures") or []
    return "Qwen3_5ForConditionalGeneration" in names if names else "text_config" in config


def _peft_tensors(model: Qwen3_5ForCausalLM, prefix: str) -> dict[str, Tensor]:
    """Both halves of every adapter, on the CPU, under PEFT's names."""
    layers = adapted(model)
    assert layers, "the model has no adapters"
    return {
        f"{_PEFT}{prefix}{name.removeprefix(_TEXT)}.{half}.weight": value.detach().cpu().contiguous()
        for name, layer in layers.items()
        for half, value in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
    }


def _peft_config(prefix: str, *, rank: int, alpha: float, base: str | None, revision: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": prefix.replace(".", r"\.") + TARGETS,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _read_config(adapter: Path) -> dict[str, Any]:
    """A plain LoRA's configuration.

    Raises ValueError where there is none, and for one that is computed in another way, or that we do not know.

    Some ways of initializing change the base model's weights as well, so their names matter.
    """
    file = adapter / CONFIG
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        whole, finite = config["r"] >= 1 and type(config["r"]) is int, math.isfinite(config["lora_alpha"])
    except (FileNotFoundError, NotADirectoryError):
        below = adapter / "adapter"  # where a run has it, whose own folder is easily passed instead
        there = (below / CONFIG).is_file()
        where = f"{below}, where one lies" if there else f"the folder with {CONFIG}, such as RUN/adapter"
        raise ValueError(f"--adapter {adapter}: no adapter lies there, it has no {CONFIG}. Pass {where}") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{file}: not an adapter's configuration ({error!r})") from error
    initial = config.get("init_lora_weights")
    plain = {
        "peft_type": config.get("peft_type") == "LORA",
        "r": whole,
        "lora_alpha": finite,
        "bias": config.get("bias") in (None, "none"),
        "init_lora_weights": initial is None or isinstance(initial, bool) or initial == "gaussian",
        **{name: value is False or value in _ABSENT for name, value in config.items() if name not in _NEUTRAL},
    }
    if other := [f"{name} {config.get(name)!r}" for name, holds in plain.items() if not holds]:
        raise ValueError(f"{file}: merging knows plain LoRA alone, not {', '.join(other)}; merge it with peft")
    return config


def _halves(file: Path) -> dict[str, dict[str, str]]:
    """Keys of an adapter's file under our name of the layer and lora_A or lora_B; both are there."""
    found: dict[str, dict[str, str]] = {}
    for key in file_keys(file):
        layer, _, half = key.removeprefix(_PEFT).removesuffix(".weight").rpartition(".")
        name = parameter_name(layer)
        if not key.startswith(_PEFT) or half not in ("lora_A", "lora_B") or name is None:
            raise ValueError(f"{file}: {key} is no adapter of a text layer; merge this one with peft")
        found.setdefault(name, {})[half] = key
    if alone := [name for name, halves in found.items() if len(halves) < 2]:
        raise ValueError(f"{file} has one half of {min(alone)} alone; export the adapter again")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """Merge an adapter into the weights that it was trained on."""

    adapter: Path
    """Folder with adapter_config.json, such as RUN/adapter."""
    source: str
    """Folder or hub id of the checkpoint that the run started from."""
    out: Path
    """Folder to write; a former export there is replaced, anything else refused."""
    accept_other_source: bool = False
    """Merge also where --source holds other weights than those that the adapter was trained on, of the same shapes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Write an adapter for the text class, which AutoPeftModelForCausalLM loads."""

    adapter: Path
    """Folder with adapter_config.json, such as RUN/adapter."""
    out: Path
    """Folder to write; a former adapter there is replaced, anything else refused."""


def main() -> int:
    """The command line. Returns the exit status: 0, or 2 where nothing was written, 130 after Ctrl-C."""
    hear()
    settings: Merge | Text = tyro.extras.subcommand_cli_from_dict(
        {"merge": Merge, "text": Text}, prog="python -m trainer.adapters", config=(tyro.conf.FlagCreatePairsOff,)
    )
    refuse_repeats(Merge, Text)
    try:
        if isinstance(settings, Text):
            print(f"for the text class: {for_text(settings.adapter, settings.out)}")
            return 0
        source = weights_folder(settings.source, flag="--source")
        if source is None:
            raise ValueError(
                f"--source {settings.source}: random weights are in no checkpoint; pass a folder or a hub id"
            )
        out = merge(source, settings.adapter, settings.out, accept_other_source=settings.accept_other_source)
        print(f"merged: {out}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted: {settings.out} is as it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
