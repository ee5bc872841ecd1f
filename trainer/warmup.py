"""Compile every kernel of a run before its first step, so that none of its rows waits for a compiler.

Kernels are compiled for shapes, which a run has few of: rows of one length, a few numbers of them at a time. But some
choose among variants by the number of documents in a row, a few, some or many, and each variant takes its compiler half
a minute. So made-up rows of every kind pass through the model, forward and backward, as those of training and of
evaluation do.

Costs: minutes on a machine that compiles for the first time, else a few seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.shards import PackedDataset, Row
from trainer.batches import make_batch
from trainer.model import Qwen3_5ForCausalLM
from trainer.plan import rank_share

SEGMENTS = (1, 2, 4, 6, 16)
"""Documents in a made-up row. FlashQLA's forward kernel has three variants, for segments x heads up to about a third of
a GPU's 132 processors, up to two thirds, and beyond: with 16 to 48 heads these numbers meet each that is met at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Rows that are going to be read."""

    dataset: PackedDataset
    """Where they are."""
    num_rows: int
    """How many."""
    at_once: int
    """Rows of a step, over all ranks; of an evaluation those of one micro-step of all of them."""
    training: bool = True
    """Backward too."""


def warm_up_all(
    model: Qwen3_5ForCausalLM,
    uses: Sequence[Use],
    *,
    rank: int,
    world_size: int,
    micro_rows: int,
    device: torch.device,
) -> None:
    """Warm up for every number of tokens that a micro-step of one of the uses has, once each."""
    met: set[tuple[int, int]] = set()
    for use in uses:
        manifest = use.dataset.manifest
        for count in row_counts(use, rank=rank, world_size=world_size, micro_rows=micro_rows):
            if (manifest.max_tokens, count) not in met:
                warm_up(
                    model, num_tokens=manifest.max_tokens, micro_rows=count, device=device, training=use.training,
                    max_seqlen=manifest.limits["max_segment_tokens"],
                )  # fmt: skip
            met.add((manifest.max_tokens, count))


def row_counts(use: Use, *, rank: int, world_size: int, micro_rows: int) -> list[int]:
    """Numbers of rows in one of this rank's micro-steps, of full steps and of the smaller last one; the most first.

    Worked example, 11 rows in steps of 8, micro_rows 3, one rank: [3 3 2] [3], so 3 2.
    """
    left = max(0, use.num_rows)
    steps = {min(use.at_once, left), left % use.at_once} - {0}
    shares = (
        rank_share(np.arange(count), rank=rank, world_size=world_size, micro_rows=micro_rows) for count in steps
    )  # fmt: skip
    return sorted({max(1, len(rows)) for share in shares for rows in share}, reverse=True)  # none: a row of padding


def made_up_row(*, num_tokens: int, num_segments: int) -> Row:
    """A row of equal documents; every second token is a target. Worked example, 5 tokens, 2 segments: 0 2 5."""
    bounds = np.linspace(0, num_tokens, num_segments + 1).astype(np.int32)
    position_ids = np.arange(num_tokens) - np.repeat(bounds[:-1], np.diff(bounds))
    return Row(
        input_ids=np.zeros(num_tokens, np.int32),
        position_ids=position_ids.astype(np.int32),
        loss_mask=position_ids % 2 == 1,
        boundaries=bounds,
        doc_ids=np.arange(num_segments, dtype=np.int64),
        pieces=np.zeros(num_segments, np.int32),
    )


def warm_up(
    model: Qwen3_5ForCausalLM,
    *,
    num_tokens: int,
    micro_rows: int,
    max_seqlen: int,
    device: torch.device,
    training: bool = True,
) -> None:
    """Run made-up rows through the model; its weights and the random state stay as they are.

    Args:
        model: ready to be trained.
        num_tokens: T, tokens of a row.
        micro_rows: rows of one micro-step.
        max_seqlen: tokens of the longest segment that kernels are told of.
        device: where the model is.
        training: backward too; rows of evaluation alone need no gradient, nor the memory of one.
    """
    fewest = -(-num_tokens // max_seqlen)
    for num_segments in sorted({min(num_tokens, max(fewest, number)) for number in SEGMENTS}):
        rows = [made_up_row(num_tokens=num_tokens, num_segments=num_segments)] * micro_rows
        batch = make_batch(rows, max_seqlen=max_seqlen).to(device)
        if training:
            (model(batch) / max(1, batch.num_targets)).backward()
            model.zero_grad(set_to_none=True)
        with torch.no_grad():
            model(batch)
