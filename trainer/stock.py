"""The stock loop that ours is measured against: transformers' own model, padded batches, AdamW.

    without_fused_kernels()                  # before transformers' model is imported: its torch fallbacks serve
    model = build_stock(config, device=device, dtype=torch.bfloat16, seed=0)
    for batch in batches_of(documents(dataset), size=8, pad_id=0):
        padded_loss(model, batch.to(device), num_targets=batch.num_targets).backward()

Packed rows in the same model, without a leak: `cu_seq_lens_q` and `seq_idx` for the delta rule and the convolution
(both need the fused kernels, the torch fallbacks know no boundaries), restarting 2-D `position_ids` and no
attention mask, from which it makes the mask of attention itself; no cache.

Guarantees: documents of a padded batch are in the order given, none is cut or left out; parameters of the stock model
have our names, so that one function fills both.
Costs: logits of a whole batch in bf16 and fp32 with gradients, about 12 bytes a token and vocabulary entry.

Shapes: B documents of a padded batch, L tokens of the longest.
"""

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.shards import Bool, Int32, PackedDataset
from trainer.batches import IGNORE_INDEX, Batch
from trainer.sizes import ModelConfig, layer_types

FUSED = ("fla", "causal_conv1d")
"""Packages that transformers' model uses by itself where they can be imported."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Document:
    """One piece of a row."""

    doc_id: int
    """Its source row."""
    input_ids: Int32
    """int32 [tokens]"""
    loss_mask: Bool
    """bool [tokens] which of them are targets."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Padded:
    """A batch of documents, padded on the right to the longest."""

    input_ids: Tensor
    """int64 [B, L]"""
    attention_mask: Tensor
    """int64 [B, L] 1 where a document is."""
    labels: Tensor
    """int64 [B, L] not shifted: the token's id where it is a target, else IGNORE_INDEX."""
    num_tokens: int
    """Tokens of documents, without padding."""
    num_targets: int
    """Tokens that the loss is summed over."""
    sum_squared_lengths: int
    """Of the documents."""

    def to(self, device: torch.device) -> "Padded":
        """The batch on ``device``."""
        moved = {name: getattr(self, name).to(device) for name in ("input_ids", "attention_mask", "labels")}
        return dataclasses.replace(self, **moved)


def documents(dataset: PackedDataset, rows: Iterable[int] | None = None) -> list[Document]:
    """The pieces of these rows, or of all, in the order of the rows."""
    found = []
    for number in range(len(dataset)) if rows is None else rows:
        row = dataset[int(number)]
        for i, doc_id in enumerate(row.doc_ids):
            part = slice(int(row.boundaries[i]), int(row.boundaries[i + 1]))
            found.append(
                Document(doc_id=int(doc_id), input_ids=row.input_ids[part], loss_mask=row.loss_mask[part])
            )  # fmt: skip
    return found


def padded_batches(found: Sequence[Document], *, most_tokens: int, pad_id: int) -> list[Padded]:
    """Batches of as many documents, in this order, as fit ``most_tokens`` tokens, padding included.

    Worked example, 100 tokens, lengths 40 50 30 90: [40 50], [30], [90]. A longer document has a batch to itself.
    """
    groups: list[list[Document]] = []
    longest = 0
    for document in found:
        longest = max(longest, len(document.input_ids))
        if not groups or longest * (len(groups[-1]) + 1) > most_tokens:
            groups.append([])
            longest = len(document.input_ids)
        groups[-1].append(document)
    return [pad(group, pad_id=pad_id) for group in groups]


def batches_of(found: Sequence[Document], *, size: int, pad_id: int) -> list[Padded]:
    """Batches of ``size`` documents, in this order, however long they are; the last one may be smaller."""
    return [pad(found[i : i + size], pad_id=pad_id) for i in range(0, len(found), size)]


def pad(group: Sequence[Document], *, pad_id: int) -> Padded:
    """One batch of these documents."""
    lengths = [len(document.input_ids) for document in group]
    ids_BL = np.full((len(group), max(lengths)), pad_id, np.int64)
    labels_BL = np.full(ids_BL.shape, IGNORE_INDEX, np.int64)
    for ids, labels, document in zip(ids_BL, labels_BL, group, strict=True):
        ids[: len(document.input_ids)] = document.input_ids
        labels[: len(document.input_ids)][document.loss_mask] = document.input_ids[document.loss_mask]
    mask_BL = np.arange(ids_BL.shape[1]) < np.array(lengths)[:, None]
    return Padded(
        input_ids=torch.from_numpy(ids_BL),
        attention_mask=torch.from_numpy(mask_BL.astype(np.int64)),
        labels=torch.from_numpy(labels_BL),
        num_tokens=sum(lengths),
        num_targets=int((labels_BL != IGNORE_INDEX).sum()),
        sum_squared_lengths=sum(length**2 for length in lengths),
    )


def without_fused_kernels() -> None:
    """Hide fla and causal-conv1d from transformers in this process, as if they were not installed."""
    assert "transformers.models.qwen3_5.modeling_qwen3_5" not in sys.modules, "too late: the model is imported"
    for name in FUSED:
        sys.modules[name] = None  # type: ignore[assignment]


def fused_kernels_in_use() -> bool:
    """Whether transformers' model found fla and causal-conv1d."""
    return all(sys.modules.get(name) is not None for name in FUSED)


def with_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The same width with another number of layers, in the same order of kinds, repeated where there are more."""
    kinds = layer_types(config)
    fields: dict[str, Any] = config.to_dict()
    fields |= {"num_hidden_layers": num_layers, "layer_types": [kinds[i % len(kinds)] for i in range(num_layers)]}
    return ModelConfig(**fields)


@contextmanager
def created_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Modules made here are on ``device`` in ``dtype`` at once: no copy in host memory, nothing wider."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(former)


def build_stock(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int, recompute: bool = False
) -> nn.Module:
    """transformers' Qwen3_5ForCausalLM with random weights, made where it is used.

    ``recompute`` is its gradient checkpointing: every layer keeps its input alone and is computed again.
    """
    from transformers import Qwen3_5ForCausalLM

    with created_on(device, dtype):
        model: nn.Module = Qwen3_5ForCausalLM._from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="sdpa"
        )
    fill_weights(model, seed=seed, std=config.initializer_range)
    if recompute:
        # renamed in transformers 5.2x
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(model, name) for name in names if hasattr(model, name))
        enable({"use_reentrant": False})
    return model.train()


@torch.no_grad()
def fill_weights(model: nn.Module, *, seed: int, std: float) -> None:
    """Random weights drawn where they are, for measuring: a CPU would take minutes for the 27B.

    They have the distributions of `trainer.model`'s, but not its values: those of a GPU's generator.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        device = parameter.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
        if name.endswith("linear_attn.norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("norm.weight"):
            parameter.zero_()
        elif name.endswith("A_log"):
            parameter.uniform_(1.0, 16.0, generator=generator).log_()
        elif name.endswith("dt_bias"):
            step = torch.empty_like(parameter, dtype=torch.float32)
            step.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
            parameter.copy_(step + torch.log(-torch.expm1(-step)))
        elif name.endswith("conv1d.weight"):
            bound = parameter.shape[-1] ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
        else:
            parameter.normal_(0.0, std, generator=generator)


def padded_loss(model: nn.Module, batch: Padded, *, num_targets: int) -> Tensor:
    """Summed loss of the batch's targets over ``num_targets``, by transformers' own loss over whole logits."""
    loss: Tensor = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        labels=batch.labels,
        num_items_in_batch=num_targets,
        use_cache=False,
    ).loss
    return loss


def packed_loss(model: nn.Module, batch: Batch, *, num_targets: int) -> Tensor:
    """The same for a packed row, documents kept apart."""
    loss: Tensor = model(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        labels=batch.labels[None],
        shift_labels=batch.labels[None],
        cu_seq_lens_q=batch.cu_seqlens,
        cu_seq_lens_k=batch.cu_seqlens,
        max_length_q=batch.max_seqlen,
        max_length_k=batch.max_seqlen,
        seq_idx=batch.seq_idx[None],
        num_items_in_batch=num_targets,
        use_cache=False,
    ).loss
    return loss


def stock_optimizer(model: nn.Module, *, lr: float) -> torch.optim.Optimizer:
    """torch's AdamW on the weights as they are, one call for all of them on a GPU."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=parameters[0].is_cuda or None
    )
