"""Hugging Face safetensors in and out, tensor by tensor.

    load_weights(model, folder)                    # a folder, or hub.weights_folder("Qwen/Qwen3.5-4B")
    export(out, model=model, source=folder, tokenizer_dir=dataset / "tokenizer", eos_token_ids=[248046, 248044])

Reads single and sharded files, under the text model's own names (`model.layers...`) and under those of the released
checkpoints (`model.language_model.layers...`), into the model that is already there. An export has the keys, dtypes and
configuration of the checkpoint that the run started from; vision tower and multi-token prediction, which are not
trained, are carried through from its files. Without one (random weights) it is a `Qwen3_5ForCausalLM`.

Guarantees: a missing, unexpected or misshapen text tensor stops loading; what is kept in fp32 is not rounded, unless
the source holds it rounded; an export is read back and compared bit by bit before it appears under its name.
Costs: loading holds one tensor beside the model. So does an export, but for a source with values that the parameters'
dtype cannot hold (fp32, float16), of whose largest tensor it holds some four copies. It reads the source twice.
"""

import contextlib
import copy
import functools
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.exports import publishing, read_json, refuse_replacing, save_tensors, write_json
from trainer.lora import adapted
from trainer.model import Qwen3_5ForCausalLM, keeps_fp32
from trainer.tensors import Deferred

GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

FILES = "model*.safetensors"
"""Names of the files with an export's tensors."""

SHARD_BYTES = 4 * 10**9
"""Largest file of an export; a single tensor above it has a file of its own."""

Tensors = Callable[[], Iterator[tuple[str, Deferred]]]
"""Keys and tensors of a checkpoint, the same ones on each call."""

_LEFT_OUT = ("model.visual.", "visual.", "mtp.", "model.mtp.")
_TOKENIZER_FILES = (
    "tokenizer", "chat_template", "added_tokens", "special_tokens_map", "vocab", "merges",
)  # fmt: skip
_RELEASED, _TEXT = "model.language_model.", "model."

_PROBE = "It's 3.14 o'clock\r\n\n  नमस्ते दुनिया, 你好世界 Größe e\u0301 don't 👩‍👩‍👧 x\t= [1,  22, 333]\n"
"""Marks, digits, blanks and contractions: where splitting rules differ."""


def load_weights(model: Qwen3_5ForCausalLM, folder: Path) -> None:
    """Read every parameter of the model from the safetensors in `folder`, keeping the model's dtypes.

    Raises ValueError for missing or damaged files, for missing, unexpected or misshapen tensors, and for a head that
    differs from the embeddings although the configuration ties them.
    """
    wanted = dict(model.named_parameters())
    places = {name: (file, key) for key, file in checkpoint_keys(folder).items() if (name := parameter_name(key))}
    if model.config.tie_word_embeddings:
        _leave_out_the_head(places)
    loaded: set[str] = set()
    unexpected: list[str] = []
    for name, (file, key) in places.items():
        if name not in wanted:
            unexpected.append(key)
            continue
        tensor = read_tensor(file, key)
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


def _leave_out_the_head(places: dict[str, tuple[Path, str]]) -> None:
    """Take out a tied head that is stored all the same, once it is known to be the embeddings' copy."""
    head, embeddings = places.pop("lm_head.weight", None), places.get("model.embed_tokens.weight")
    if head and embeddings and not _same_numbers(read_tensor(*head), read_tensor(*embeddings)):
        raise ValueError(
            f"{head[0]}: config.json ties {head[1]} to the embeddings, but it differs from {embeddings[1]}. Set "
            "tie_word_embeddings to false in config.json (beside text_config, where there is one) to train this head, "
            "or take it out of the file to train the tied one"
        )


def parameter_name(key: str) -> str | None:
    """Our name for a checkpoint's key; None for what the text model does not have."""
    if key.startswith(_LEFT_OUT):
        return None
    return _TEXT + key.removeprefix(_RELEASED) if key.startswith(_RELEASED) else key


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors alone where it exists, as transformers reads it, unless an index names it as one of several."""
    single = (folder / SINGLE).is_file()
    names = [SINGLE]
    if (index := folder / INDEX).is_file():
        try:
            indexed = sorted(map(str, set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if not single:
                raise ValueError(f"{index}: not a safetensors index ({error!r})") from error
            indexed = []
        if SINGLE in indexed or not single:
            names = indexed
    if lost := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder} has no {', '.join(lost)}: fetch the checkpoint again, with its safetensors files")
    return [folder / name for name in names]


def checkpoint_keys(folder: Path) -> dict[str, Path]:
    """Every key of a folder's safetensors, in the files' order, with its file.

    Raises ValueError for missing and damaged files and for a key that lies in two of them.
    """
    found: dict[str, Path] = {}
    for file in _weight_files(folder):
        keys = file_keys(file)
        if twice := found.keys() & keys:
            raise ValueError(f"{file}: {min(twice)} lies in {found[min(twice)].name} too; fetch the checkpoint again")
        found |= dict.fromkeys(keys, file)
    return found


def file_keys(file: Path) -> list[str]:
    """The keys of one safetensors file. Raises ValueError where it is damaged."""
    with _opened(file) as opened:
        return list(opened.keys())


def read_tensor(file: Path, key: str) -> Tensor:
    """One tensor of a file, on the CPU. Its memory is the mapped file's; opened anew, so that no other pages stay."""
    with _opened(file) as opened:
        tensor: Tensor = opened.get_tensor(key)
    return tensor


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: damaged or not a safetensors file ({error}); fetch it again") from error


# --------------------------------------------------------------------------------------------- out


def export(
    out: Path,
    *,
    model: Qwen3_5ForCausalLM,
    tokenizer_dir: Path | None,
    eos_token_ids: Sequence[int],
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    masters: Mapping[Tensor, Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a folder that transformers loads with equal logits; return it.

    Args:
        tokenizer_dir: the dataset's `tokenizer/`; copied, with a class that keeps its splitting rule. By default the
            source's own.
        eos_token_ids: where generation ends, beside what the source says.
        source: the checkpoint that the model was loaded from: gives class, keys, dtypes and all that is not trained.
        dtype: of the written weights, those that stay fp32 aside, where there is no source; by default the model's.
        masters: the optimizer's wider value of each parameter; written where the source's dtype holds values that the
            parameter's cannot, for numbers that training has moved.

    A former export at `out` is replaced once the new one is complete and compared; another folder there is refused.
    Raises OSError where the disk is full; the former export stays.
    """
    assert not adapted(model), "a model with adapters is exported by trainer.adapters"
    assert source is None or dtype is None, "a source's dtypes are kept"

    def tensors() -> Iterator[tuple[str, Deferred]]:
        return _own_tensors(model, dtype) if source is None else _like_source(source, model, masters or {})

    def companions(folder: Path) -> None:
        if source is not None:
            carry_companions(source, folder, tokenizer_dir=tokenizer_dir, eos_token_ids=eos_token_ids)
            return
        _write_config(folder, model, dtype, eos_token_ids)
        if tokenizer_dir is not None:
            copy_tokenizer(tokenizer_dir, folder)

    needed = [] if source is None else [source]
    return write_checkpoint(out, needed=needed, tensors=tensors, companions=companions, shard_bytes=shard_bytes)


def write_checkpoint(
    out: Path,
    *,
    needed: Sequence[Path],
    tensors: Tensors,
    companions: Callable[[Path], None],
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write tensors and what `companions` puts beside them, read them back, compare, and give the folder its name.

    Raises ValueError where `out` is something else than an export of ours, or holds a folder that is `needed`.
    """
    refuse_replacing(out, what="export", tensors=FILES, needed=needed)
    with publishing(out) as temporary:
        _write_shards(temporary, tensors(), shard_bytes)
        companions(temporary)
        compare_files(checkpoint_keys(temporary), tensors())
    return out


def compare_files(files: dict[str, Path], tensors: Iterable[tuple[str, Tensor | Deferred]]) -> None:
    """Read written keys back; raises ValueError unless they are exactly these, with their dtypes, shapes and bits."""
    left = dict(files)
    for key, expected in tensors:
        if key not in left:
            raise ValueError(f"{key} is missing after writing; check the disk and export again")
        made = expected.make() if isinstance(expected, Deferred) else expected
        if not _same_bits(read_tensor(left[key], key), made):
            raise ValueError(
                f"{left[key]}: {key} differs from the model after writing; check the disk and export again"
            )
        del left[key]
    if left:
        raise ValueError(f"{len(left)} unexpected tensors after writing, {min(left)} first; export again")


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Compared as bytes: NaN equals itself, and -0 is not 0."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    flat = (tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(*flat)


def _same_numbers(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors, of whatever dtypes, hold the same numbers."""
    if first.dtype == second.dtype:
        return _same_bits(first, second)
    wide = torch.promote_types(first.dtype, second.dtype)
    return torch.equal(first.to(wide), second.to(wide))


def _write_config(
    folder: Path, model: Qwen3_5ForCausalLM, dtype: torch.dtype | None, eos_token_ids: Sequence[int]
) -> None:
    """The configuration of a text model that comes from no checkpoint."""
    config = copy.deepcopy(model.config)
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.dtype = dtype or model.lm_head.weight.dtype
    config.eos_token_id = list(eos_token_ids)
    config.save_pretrained(folder)
    ends = {"eos_token_id": list(eos_token_ids), "pad_token_id": config.pad_token_id}
    write_json(folder / GENERATION, ends)


def _own_tensors(model: Qwen3_5ForCausalLM, dtype: torch.dtype | None) -> Iterator[tuple[str, Deferred]]:
    """Every parameter once (a tied head is not), under its own name."""
    for name, parameter in model.named_parameters():
        written = parameter.dtype if dtype is None or keeps_fp32(name) else dtype
        make = functools.partial(_on_the_cpu, parameter, written)
        yield name, Deferred(dtype=written, shape=parameter.shape, make=make)


def _on_the_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().cpu().to(dtype)


def _like_source(
    source: Path, model: Qwen3_5ForCausalLM, masters: Mapping[Tensor, Tensor]
) -> Iterator[tuple[str, Deferred]]:
    """The source's keys in its order: our parameters in its dtypes, and the rest as it is."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied head may be stored all the same
    left = {name for name, _ in model.named_parameters()}
    for key, file in checkpoint_keys(source).items():
        tensor = read_tensor(file, key)  # nothing is read before its bytes are looked at
        name = parameter_name(key)
        make: Callable[[], Tensor] = functools.partial(read_tensor, file, key)
        if name is None:
            yield key, Deferred(dtype=tensor.dtype, shape=tensor.shape, make=make)
            continue
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise ValueError(
                f"{file}: {key} {list(tensor.shape)} does not fit the model: not what the run started from"
            )
        left.discard(name)
        make = functools.partial(_trained, file, key, parameters[name], masters)
        yield key, Deferred(dtype=tensor.dtype, shape=tensor.shape, make=make)
    if left:
        raise ValueError(f"{source} lacks {min(left)}: it is not what the run started from")


def _trained(file: Path, key: str, parameter: Tensor, masters: Mapping[Tensor, Tensor]) -> Tensor:
    """A parameter in the dtype of the source's tensor; where the parameter's own cannot hold it, as exact as known."""
    tensor = read_tensor(file, key)
    if tensor.dtype == parameter.dtype or tensor.itemsize < parameter.itemsize:
        return _on_the_cpu(parameter, tensor.dtype)
    value = _on_the_cpu(masters.get(parameter, parameter), tensor.dtype)  # float16 has digits that bfloat16 has not
    # What loading rounded and training did not change is the source's own, unrounded: rows of tokens never seen, say.
    unchanged = _bits(value) == _bits(tensor.to(parameter.dtype).to(tensor.dtype))
    return torch.where(unchanged, tensor, value)


def _bits(tensor: Tensor) -> Tensor:
    """Its numbers' bits as integers: NaN equals itself, and -0 is not 0."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Deferred]], shard_bytes: int) -> None:
    """Write tensors as they come, a file at a time; an index where there are several."""
    written: list[list[str]] = []
    shard: dict[str, Deferred] = {}
    filled = total = 0

    def flush() -> None:
        save_tensors(shard, folder / f"{len(written)}.safetensors")
        written.append(list(shard))
        shard.clear()

    for key, tensor in tensors:
        if shard and filled + tensor.nbytes > shard_bytes:
            flush()
            filled = 0
        shard[key] = tensor
        filled += tensor.nbytes
        total += tensor.nbytes
    flush()
    names = [f"model-{i:05d}-of-{len(written):05d}.safetensors" for i in range(1, len(written) + 1)]
    names = [SINGLE] if len(written) == 1 else names
    for i, name in enumerate(names):
        (folder / f"{i}.safetensors").rename(folder / name)
    if len(written) > 1:
        weight_map = {key: name for name, keys in zip(names, written, strict=True) for key in keys}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def carry_companions(source: Path, target: Path, *, tokenizer_dir: Path | None, eos_token_ids: Sequence[int]) -> None:
    """Copy what lies beside a checkpoint's weights: configurations, processors; the tokenizer from `tokenizer_dir`.

    generation_config.json ends generation at `eos_token_ids` too; every other file is copied byte for byte.
    """
    for file in sorted(source.iterdir()):
        theirs = tokenizer_dir is None or not file.name.startswith(_TOKENIZER_FILES)
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt") and file.name != INDEX and theirs:
            shutil.copyfile(file, target / file.name)
    if tokenizer_dir is not None:
        copy_tokenizer(tokenizer_dir, target)
    found, ends = read_json(source / GENERATION), generation_ends(source / GENERATION)
    if new := [token for token in eos_token_ids if token not in ends]:
        write_json(target / GENERATION, {**found, "eos_token_id": [*new, *ends]})


def generation_ends(settings: Path) -> list[int]:
    """The eos_token_id of a generation_config.json as a list, empty where there is none. Raises ValueError for text."""
    found = read_json(settings).get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ends):
        raise ValueError(f"{settings}: eos_token_id is {found!r}, not a number or a list of numbers; repair it")
    return list(ends)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer; name the plain fast class where the given one splits text in another way."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name.startswith(_TOKENIZER_FILES):
            shutil.copyfile(file, target / file.name)
    settings = "tokenizer_config.json"
    found = read_json(source / settings)
    try:
        Tokenizer.from_file(str(source / "tokenizer.json"))
        alike = bool(found) and _splits_alike(target)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{source}: tokenizer.json or {settings} cannot be read ({error!r}); pack again") from error
    if not alike:
        write_json(target / settings, {**found, "tokenizer_class": "PreTrainedTokenizerFast"})
    if _splits_alike(target):
        return
    if not _splits_alike(target, chosen=PreTrainedTokenizerFast):
        raise ValueError(f"{source}: transformers reads this tokenizer as another one; look at tokenizer_config.json")
    warnings.warn(  # recent versions go by the configuration's model_type, whatever the tokenizer says
        f"{source}: transformers' AutoTokenizer splits text otherwise than tokenizer.json beside this model's "
        "config.json; load it with PreTrainedTokenizerFast.from_pretrained, and check that the dataset was packed with "
        "this model's own tokenizer",
        stacklevel=2,
    )


def _splits_alike(folder: Path, *, chosen: Any = AutoTokenizer) -> bool:
    """Whether transformers' class, of its own choice by default, gives the ids of tokenizer.json on the probe."""
    expected: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_PROBE).ids
    return bool(chosen.from_pretrained(folder)(_PROBE)["input_ids"] == expected)
