"""A model small enough for every test, and packed batches of given documents."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.shards import Row
from trainer.batches import Batch, make_batch
from trainer.kernels import Kernels, select
from trainer.model import Qwen3_5ForCausalLM
from trainer.sizes import ModelConfig

LENGTHS = [1, 2, 3, 63, 64, 65, 127, 128, 129]
"""Around the chunk of 64, and the shortest."""

PAD = 0


def tiny_config(**changes: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "pad_token_id": PAD,
        "eos_token_id": [1],
    }
    return ModelConfig(**{**settings, **changes})


def tiny_model(*, seed: int = 0, kernels: Kernels | None = None, **changes: Any) -> Qwen3_5ForCausalLM:
    """Random weights; norms and biases too, so that a wrong one shows."""
    model = Qwen3_5ForCausalLM(tiny_config(**changes), kernels=kernels or select(torch.device("cpu")))
    model.init_weights(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def random_documents(lengths: Sequence[int], *, vocab_size: int = 199, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab_size, length).tolist() for length in lengths]


def row_of(documents: Sequence[Sequence[int]], *, tail: int = 0) -> Row:
    """One row of whole documents and `tail` tokens of padding; all but first tokens are targets."""
    lengths = [len(document) for document in documents] + ([tail] if tail else [])
    mask = np.concatenate([np.arange(length) > 0 for length in lengths])
    mask[len(mask) - tail :] = False
    return Row(
        input_ids=np.concatenate([*documents, [PAD] * tail]).astype(np.int32),
        position_ids=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        loss_mask=mask,
        boundaries=np.cumsum([0, *lengths]).astype(np.int32),
        doc_ids=np.arange(len(documents)),
        pieces=np.zeros(len(documents), np.int32),
    )


def batch_of(documents: Sequence[Sequence[int]], *, tail: int = 0, max_seqlen: int = 8192) -> Batch:
    return make_batch([row_of(documents, tail=tail)], max_seqlen=max_seqlen)
