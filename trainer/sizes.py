"""Which model: a `--model` value becomes a configuration, before any weight is read.

    resolve_config("Qwen/Qwen3.5-4B")        hub id: its config.json, nothing else is fetched
    resolve_config("checkpoints/mine")       folder with a config.json
    resolve_config("random:4B")              a size of the table below, random weights
    resolve_config("random:tiny.json")       a configuration of your own, random weights

A config.json may be a text model's or a released one's, whose `text_config` is taken.
Costs: one small request for a hub id, answered or given up within seconds; the rest reads one file.
"""

import json
import math
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3_5TextConfig

from trainer.hub import config_file

ModelConfig = Qwen3_5TextConfig

EOS_TOKEN_IDS = (248046, 248044)
"""`<|im_end|>` and `<|endoftext|>` of the 248,320-entry vocabulary."""

COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
"""Fields of a configuration that are at least 1."""

_COMMON: dict[str, Any] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "eos_token_id": EOS_TOKEN_IDS[0],
    "pad_token_id": EOS_TOKEN_IDS[1],
}


def _size(
    hidden: int, layers: int, ffn: int, heads: int, kv: int, linear_k: int, linear_v: int, tied: int
) -> dict[str, Any]:
    return {
        **_COMMON,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "linear_num_key_heads": linear_k,
        "linear_num_value_heads": linear_v,
        "tie_word_embeddings": bool(tied),
    }


SIZES: dict[str, dict[str, Any]] = {
    # hidden, layers, ffn, heads, key/value heads, linear key heads, linear value heads, tied
    "0.8B": _size(1024, 24, 3584, 8, 2, 16, 16, 1),
    "2B": _size(2048, 24, 6144, 8, 2, 16, 16, 1),
    "4B": _size(2560, 32, 9216, 16, 4, 16, 32, 1),
    "9B": _size(4096, 32, 12288, 16, 4, 16, 32, 0),
    "27B": _size(5120, 64, 17408, 24, 4, 16, 48, 0),
}
"""The released sizes: `random:NAME`, and what their checkpoints must match."""


def sample_config(*, vocab_size: int, pad_token_id: int, eos_token_ids: list[int]) -> ModelConfig:
    """The small model for the sample's own tokenizer: 3 linear layers and 1 full one, trained on a CPU in minutes."""
    config = Qwen3_5TextConfig(
        **{
            **_size(128, 4, 384, 4, 2, 4, 4, 1),
            "vocab_size": vocab_size,
            "head_dim": 32,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "pad_token_id": pad_token_id,
            "eos_token_id": list(eos_token_ids),
        }
    )
    check_config(config)
    return config


def resolve_config(spec: str) -> ModelConfig:
    """The configuration behind a `--model` value.

    Raises ValueError, within seconds, for what cannot be found, reached, read or computed.
    """
    name = spec.removeprefix("random:")
    if name == spec:
        config = _read(config_file(spec))
    elif name in SIZES:
        config = Qwen3_5TextConfig(**SIZES[name])
    elif name.endswith(".json"):
        config = _read(Path(name))
    else:
        raise ValueError(
            f"--model {spec}: no such size; use random: with one of {', '.join(SIZES)} or with the path of a "
            "configuration that ends in .json"
        )
    check_config(config)
    return config


def _read(path: Path) -> ModelConfig:
    """Read a text model's configuration, or a released one's text part."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model: cannot read {path} as JSON ({error}); it should be a Qwen3.5 config.json"
        ) from error
    if not isinstance(found, dict) or found.get("model_type", "qwen3_5_text") not in ("qwen3_5", "qwen3_5_text"):
        kind = found.get("model_type") if isinstance(found, dict) else type(found).__name__
        raise ValueError(
            f"--model: {path} has model_type {kind!r}; this trainer knows qwen3_5 and qwen3_5_text "
            "(Qwen3.5, Qwen3.6 and Qwen3.8)"
        )
    if "text_config" in found:
        if not isinstance(found["text_config"], dict):
            raise ValueError(f"--model: {path} has a text_config that is no object, so no Qwen3.5 configuration")
        found = _text_part(found)
    try:
        return Qwen3_5TextConfig(**{**found, "model_type": "qwen3_5_text"})
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"--model: {path} is not a Qwen3.5 configuration: {error}") from error


def _text_part(found: dict[str, Any]) -> dict[str, Any]:
    """The text model's configuration of a file that has one inside.

    transformers' class with a vision tower ties its embeddings where the outer flag says so, the text class where the
    inner one does, and neither without its own flag. Files that name no class have one of both flags, or both.
    """
    inner, outer = dict(found["text_config"]), {k: v for k, v in found.items() if k == "tie_word_embeddings"}
    flags = {"tie_word_embeddings": False}
    match found.get("architectures"):
        case ["Qwen3_5ForCausalLM", *_]:
            return flags | inner
        case [_, *_]:
            return inner | flags | outer
    return flags | inner | outer


def rotary(config: ModelConfig) -> tuple[int, float]:
    """(rotary dims of each head, theta)"""
    parameters: dict[str, Any] = dict(config.rope_parameters or {})
    return int(config.head_dim * parameters.get("partial_rotary_factor", 1.0)), float(parameters["rope_theta"])


def layer_types(config: ModelConfig) -> list[str]:
    """`linear_attention` or `full_attention` for each layer."""
    assert config.layer_types is not None, "transformers fills layer_types"
    return config.layer_types


def check_config(config: ModelConfig) -> None:
    """Raise ValueError for a configuration that asks for something this model does not compute."""
    _check_sizes(config)
    rope_type = dict(config.rope_parameters or {}).get("rope_type", "default")
    expected = {
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (config.attention_bias, False),
        "attention_dropout": (float(config.attention_dropout), 0.0),
        "rope_parameters.rope_type": (rope_type, "default"),
    }
    for field, (found, wanted) in expected.items():
        if found != wanted:
            raise ValueError(f"{field} is {found!r} in the model's configuration; this model computes {wanted!r} only")
    unknown = set(layer_types(config)) - {"linear_attention", "full_attention"}
    if unknown or len(layer_types(config)) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types has {len(layer_types(config))} entries for {config.num_hidden_layers} layers and these "
            f"unknown types: {sorted(unknown)}; each layer is linear_attention or full_attention"
        )
    for name, many, few in (
        ("linear_num_value_heads", config.linear_num_value_heads, config.linear_num_key_heads),
        ("num_attention_heads", config.num_attention_heads, config.num_key_value_heads),
        ("rotary dims", rotary(config)[0], 2),
    ):
        if many % few:
            raise ValueError(f"{name} is {many} in the model's configuration, which {few} does not divide")


def _check_sizes(config: ModelConfig) -> None:
    """Raise ValueError for sizes with which nothing can be computed, or nothing is left to compute."""
    for name in COUNTS:
        found = getattr(config, name)
        if type(found) is not int or found < 1:
            raise ValueError(f"{name} is {found!r} in the model's configuration; it is a whole number of at least 1")
    parameters: dict[str, Any] = dict(config.rope_parameters or {})
    for name, highest in (("rope_theta", math.inf), ("partial_rotary_factor", 1.0)):
        found = parameters.get(name, 1.0)
        if not isinstance(found, int | float) or not 0 < found <= highest:
            bounds = "above 0" if highest == math.inf else f"above 0 and at most {highest}"
            raise ValueError(f"rope_parameters.{name} is {found!r} in the model's configuration; it is {bounds}")
