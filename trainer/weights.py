"""Hugging Face safetensors in and out.

    load_weights(model, folder)                    # a folder, or weights_folder("Qwen/Qwen3.5-4B")
    export(out, model=model, tokenizer_dir=dataset / "tokenizer", eos_token_ids=[248046, 248044])

Reads single and sharded files, under the text model's own names (`model.layers...`) and under those of the released
checkpoints (`model.language_model.layers...`), tensor by tensor into the model that is already there. Vision tower and
multi-token prediction are left out, reading and writing: an export is the text model.

Guarantees: a missing, unexpected or misshapen text tensor stops loading; parameters that are kept in fp32 are never
rounded; an export is compared with the model, tensor by tensor, before it appears under its name.
Costs: loading holds one tensor beside the model; exporting one file of at most 5 GB.
"""

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from trainer.checkpoint import publish_folder, start_folder
from trainer.model import Qwen3_5ForCausalLM, keeps_fp32
from trainer.sizes import hub_revision, is_random

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

SHARD_BYTES = 5 * 10**9
"""Largest file of an export; a single tensor above it has a file of its own."""

_LEFT_OUT = ("model.visual.", "visual.", "mtp.", "model.mtp.")
_RELEASED, _TEXT = "model.language_model.", "model."

_PROBE = "It's 3.14 o'clock\r\n\n  नमस्ते दुनिया, 你好世界 Größe e\u0301 don't 👩‍👩‍👧 x\t= [1,  22, 333]\n"
"""Marks, digits, blanks and contractions: where splitting rules differ."""


def weights_folder(spec: str) -> Path | None:
    """Local folder with the weights behind a `--model` value, fetched if need be; None for random weights.

    Raises ValueError where the hub cannot be reached and the cache does not hold them.
    """
    if is_random(spec):
        return None
    if Path(spec).is_dir():
        return Path(spec)
    revision = hub_revision(spec)
    try:
        found = huggingface_hub.snapshot_download(
            spec,
            revision=revision,
            allow_patterns=["*.safetensors", "*.json"],
            local_files_only=revision is None,
        )
    except OSError as error:
        raise ValueError(
            f"--model {spec}: its weights are not in the local cache and cannot be fetched ({error}). "
            "Pass a folder with config.json and safetensors, or random:SIZE"
        ) from error
    return Path(str(found))


def load_weights(model: Qwen3_5ForCausalLM, folder: Path) -> None:
    """Read every parameter of the model from the safetensors in `folder`, keeping the model's dtypes.

    Raises ValueError for missing or damaged files, and for missing, unexpected or misshapen tensors.
    """
    wanted = dict(model.named_parameters())
    tied = model.config.tie_word_embeddings
    loaded: set[str] = set()
    unexpected: list[str] = []
    for file in _weight_files(folder):
        for key, tensor in _tensors(file):
            name = parameter_name(key)
            if name is None or (tied and name == "lm_head.weight"):
                continue
            if name not in wanted:
                unexpected.append(key)
                continue
            if tensor.shape != wanted[name].shape:
                raise ValueError(
                    f"{file}: {key} has shape {list(tensor.shape)}, the model {list(wanted[name].shape)}; "
                    "config.json and weights do not belong together"
                )
            with torch.no_grad():
                wanted[name].copy_(tensor)
            loaded.add(name)
    missing = sorted(wanted.keys() - loaded)
    for what, names in (("lacks", missing), ("has the unexpected", sorted(unexpected))):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{folder} {what} {', '.join(names[:5])}{more}; is it a Qwen3.5 of this configuration?")


def parameter_name(key: str) -> str | None:
    """Our name for a checkpoint's key; None for what the text model does not have."""
    if key.startswith(_LEFT_OUT):
        return None
    return _TEXT + key.removeprefix(_RELEASED) if key.startswith(_RELEASED) else key


def _weight_files(folder: Path) -> list[Path]:
    if (index := folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not a safetensors index ({error!r})") from error
    else:
        names = [SINGLE]
    if lost := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder} has no {', '.join(lost)}: fetch the checkpoint again, with its safetensors files")
    return [folder / name for name in names]


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a file that the text model may want, one at a time."""
    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                if parameter_name(key) is not None:
                    yield key, opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: damaged or not a safetensors file ({error}); fetch it again") from error


def export(
    out: Path,
    *,
    model: Qwen3_5ForCausalLM,
    tokenizer_dir: Path | None,
    eos_token_ids: Sequence[int],
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a folder that `transformers.AutoModelForCausalLM` loads with equal logits; return it.

    Args:
        tokenizer_dir: the dataset's `tokenizer/`; copied, with a class that keeps its splitting rule.
        eos_token_ids: where generation ends.
        dtype: of the written weights, those that stay fp32 aside; the model's own by default.

    A former export at `out` is replaced once the new one is complete and compared; another folder there is refused.
    """
    if out.exists() and (not (out / "config.json").is_file() or out.is_symlink()):
        raise ValueError(f"{out} exists and is not an export; choose another folder or remove it")
    temporary = start_folder(out)
    state = _state(model, dtype)
    _write_weights(temporary, state, shard_bytes)
    config = copy.deepcopy(model.config)
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.dtype = dtype or model.lm_head.weight.dtype
    config.eos_token_id = list(eos_token_ids)
    config.save_pretrained(temporary)
    _write_json(
        temporary / "generation_config.json",
        {"eos_token_id": list(eos_token_ids), "pad_token_id": config.pad_token_id},
    )
    if tokenizer_dir is not None:
        _copy_tokenizer(tokenizer_dir, temporary)
    compare(temporary, state)
    publish_folder(temporary, out)
    return out


def compare(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Read an export back; raises ValueError unless it holds exactly these tensors."""
    left = dict(state)
    for file in _weight_files(folder):
        for key, tensor in _tensors(file):
            expected = left.pop(key, None)
            if expected is None or tensor.dtype != expected.dtype or not torch.equal(tensor, expected.cpu()):
                raise ValueError(f"{file}: {key} differs from the model after writing; check the disk and export again")
    if left:
        raise ValueError(f"{folder}: {len(left)} tensors are missing after writing, {next(iter(left))} first")


def _state(model: Qwen3_5ForCausalLM, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What is written: every parameter once (a tied head is not), in its dtype."""
    return {
        name: parameter.detach().to(parameter.dtype if dtype is None or keeps_fp32(name) else dtype)
        for name, parameter in model.named_parameters()
    }


def _write_weights(folder: Path, state: Mapping[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = [SINGLE] if len(shards) == 1 else files
    for file, shard in zip(files, shards, strict=True):
        ready = {name: tensor.cpu().contiguous() for name, tensor in shard.items()}
        save_file(ready, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for tensor in state.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer; name the plain fast class where the given one splits text in another way."""
    for file in sorted(source.iterdir()):
        if file.is_file():
            shutil.copyfile(file, target / file.name)
    settings = target / "tokenizer_config.json"
    found: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    if not found or not _splits_alike(target):
        _write_json(settings, {**found, "tokenizer_class": "PreTrainedTokenizerFast"})
    if not _splits_alike(target):
        raise ValueError(f"{source}: transformers reads this tokenizer as another one; look at tokenizer_config.json")


def _splits_alike(folder: Path) -> bool:
    """Whether transformers' choice of class gives the ids of tokenizer.json on the probe."""
    expected: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_PROBE).ids
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    return bool(loaded(_PROBE)["input_ids"] == expected)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
