"""Small checkpoints as they are released, with a vision tower, MTP heads, processors, an index; a small tokenizer."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers import Qwen3_5ForCausalLM as TextClass

from tests.tiny import tiny_config
from trainer.model import keeps_fp32

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}

COMPANIONS: dict[str, Any] = {
    "generation_config.json": {"eos_token_id": [1, 7], "temperature": 0.6, "do_sample": True},
    "preprocessor_config.json": {"patch_size": 4, "image_processor_type": "Qwen2VLImageProcessorFast"},
    "video_preprocessor_config.json": {"patch_size": 4},
}


def whole_class(kind: str) -> type[Any]:
    """transformers' class of a kind of checkpoint, `released` or `text`."""
    found: type[Any] = Qwen3_5ForConditionalGeneration if kind == "released" else TextClass
    return found


def write_source(folder: Path, *, kind: str, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Path:
    """A checkpoint of random weights, never all zero, in `folder`."""
    text = tiny_config(tie_word_embeddings=tied)
    config: Any = text
    if kind == "released":
        config = Qwen3_5Config(text_config=text.to_dict(), vision_config=VISION, tie_word_embeddings=tied)
    torch.manual_seed(3)
    model = whole_class(kind)(config)
    state: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        noisy = value.detach() + 0.1 * torch.randn(value.shape)
        state[key] = noisy if keeps_fp32(key) else noisy.to(dtype)
    if tied:
        del state["lm_head.weight"]
    if kind == "released":
        state |= {
            "mtp.fc.weight": torch.randn(4, 6).to(dtype),
            "mtp.layers.0.mlp.up_proj.weight": torch.tensor([float("nan"), -0.0, float("inf")]),
            "mtp.layers.0.mlp.down_proj.weight": torch.randn(8).to(torch.float8_e4m3fn),
            "mtp.num_steps": torch.tensor(3),
        }
    folder.mkdir(parents=True)
    config.architectures = [whole_class(kind).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    keys = sorted(state)
    parts = {f"model-{i}.safetensors": keys[i::3] for i in range(3)}
    for file, part in parts.items():
        save_file({key: state[key].contiguous() for key in part}, folder / file, metadata={"format": "pt"})
    weight_map = {key: file for file, part in parts.items() for key in part}
    total = sum(value.nbytes for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for name, content in COMPANIONS.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_tokenizer(folder: Path, *, class_name: str | None) -> Path:
    """Byte-level tokenizer that splits nothing, unlike what Qwen2Tokenizer builds."""
    folder.mkdir()
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "12": 256, "<|im_end|>": 257}, merges=[("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("$^"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "tokenizer_class": class_name}
    if class_name:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    return folder
