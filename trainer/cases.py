"""The inputs that `trainer.doctor` examines kernels with: random from a seed, shaped and scaled like a model's.

Costs: on a GPU one shape per operation (rows of T tokens, one max_seqlen), so that each kernel compiles once.

Shapes: T tokens of the packed row, D width, C conv channels, W conv width, H heads, G key/value heads, K key dim,
V value dim (in the loss: vocabulary).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.shards import Row
from trainer.batches import IGNORE_INDEX, Batch, make_batch

MIXING = ("gated_delta_rule", "causal_conv", "attention")
"""The operations through which one token can see another."""

EPS = 1e-6
"""Of every norm, as in the released models."""

Operation = Callable[..., Any]
"""Called as `Kernels` describes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large the checks are. The rows have one length and one longest segment: kernels compile once."""

    num_tokens: int
    """T, of every row."""
    odd: tuple[int, ...]
    """Documents around the kernels' block sizes, and a long one; another row backwards. Padding follows."""
    many: tuple[int, ...]
    """Many short documents; padding follows where they leave room."""
    key_heads: int
    """G of the delta rule: several, and fewer than H, so that reading another group's keys shows."""
    value_heads: int
    """H of the delta rule."""
    linear_dim: int
    """K and V of the delta rule."""
    heads: int
    """H of attention."""
    kv_heads: int
    """G of attention."""
    head_dim: int
    """K of attention."""
    hidden: int
    """D."""
    vocab: int
    """Token ids, and V of the model's loss."""
    loss_vocab: int
    """V of the loss examined alone: for a GPU, several blocks of its kernel and several parts of the row."""


AROUND_BLOCKS = (1, 2, 3, 4, 31, 32, 33, 4099, 63, 64, 65, 127, 128, 129)

RELEASED = Sizes(
    num_tokens=8192,
    odd=AROUND_BLOCKS,
    many=(32,) * 256,
    key_heads=16,
    value_heads=48,
    linear_dim=128,
    heads=4,
    kv_heads=2,
    head_dim=256,
    hidden=256,
    vocab=512,
    loss_vocab=100_000,
)
"""For a GPU: the head dims of the released models."""

NARROW = Sizes(
    num_tokens=8192,
    odd=AROUND_BLOCKS,
    many=(32,) * 256,
    key_heads=2,
    value_heads=4,
    linear_dim=8,
    heads=2,
    kv_heads=1,
    head_dim=16,
    hidden=16,
    vocab=97,
    loss_vocab=97,
)
"""For a CPU: the same rows, everything else small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One set of inputs of one operation."""

    name: str
    """What is special about it."""
    inputs: dict[str, Tensor]
    """By name, in the dtypes that the model passes; those that require gradients in `wanted`."""
    bind: Callable[[Operation], Operation]
    """Adds boundaries, eps or labels to the inputs."""
    weights: tuple[str, ...] = ()
    """Those of `inputs` that are parameters: frozen under LoRA."""
    bounds: Batch | None = None
    """Boundaries, where tokens mix."""
    brief: bool = False
    """Only the numbers of one forward and backward pass: beside a case of this operation that is examined in full."""


def random_batch(lengths: Sequence[int], sizes: Sizes, generator: torch.Generator) -> Batch:
    """Documents of these lengths with random ids, a third of the targets masked; padding up to T."""
    tail = sizes.num_tokens - sum(lengths)
    spans = [*lengths, tail] if tail else list(lengths)
    rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    position_ids = np.concatenate([np.arange(span) for span in spans])
    mask = (position_ids > 0) & (rng.random(sum(spans)) > 1 / 3)
    mask[sum(lengths) :] = False
    row = Row(
        input_ids=rng.integers(0, sizes.vocab, sum(spans)).astype(np.int32),
        position_ids=position_ids.astype(np.int32),
        loss_mask=mask,
        boundaries=np.cumsum([0, *spans]).astype(np.int32),
        doc_ids=np.arange(len(lengths)),
        pieces=np.zeros(len(lengths), np.int32),
    )
    return make_batch([row], max_seqlen=sizes.num_tokens)


def documents_of(batch: Batch) -> list[slice]:
    """Where each segment lies, the padding tail too."""
    return [slice(start, stop) for start, stop in itertools.pairwise(batch.cu_seqlens_cpu.tolist())]


def alone(batch: Batch, document: slice) -> Batch:
    """The batch that this document is on its own."""
    length, labels = document.stop - document.start, batch.labels[document]
    ends = torch.tensor([0, length], dtype=torch.int32)
    return dataclasses.replace(
        batch,
        input_ids=batch.input_ids[document],
        position_ids=batch.position_ids[document],
        labels=labels,
        num_targets=int((labels != IGNORE_INDEX).sum()),
        cu_seqlens=ends.to(batch.cu_seqlens.device),
        cu_seqlens_cpu=ends,
        seq_idx=torch.zeros_like(batch.seq_idx[document]),
    )


def some(documents: list[slice], *, at_most: int) -> list[slice]:
    """All, or as many from the first to the last."""
    if len(documents) <= at_most:
        return documents
    return [documents[i] for i in sorted({round(i * (len(documents) - 1) / (at_most - 1)) for i in range(at_most)})]


def sides(batch: Batch) -> dict[str, Tensor]:
    """Tokens [T] to touch while the others stay, by name: the even or the odd ones of runs of 1, 2, 4 ... documents.

    Of up to 16 documents, some side holds the one and not the other, whichever two they are. Of more, runs of one part
    each from its neighbours, and the first from the last half.
    """
    bits = (len(batch.cu_seqlens_cpu) - 2).bit_length()
    found: dict[str, Tensor] = {}
    for bit in range(bits) if bits <= 4 else (0, bits - 1):
        odd = (batch.seq_idx >> bit) % 2 == 1
        found |= {f"even runs of {2**bit}": ~odd, f"odd runs of {2**bit}": odd}
    return found


class Maker:
    """Makes inputs on one device in one dtype from one seed."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype, *, seed: int) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)
        self.cpu_generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers, rounded to the dtype."""
        return self.wide(*shape).mul_(scale).to(self.dtype)

    def wide(self, *shape: int) -> Tensor:
        """Normal numbers in fp32."""
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Between 0 and 1, in fp32."""
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def batch(self, lengths: Sequence[int]) -> Batch:
        """One packed row."""
        return random_batch(lengths, self.sizes, self.cpu_generator).to(self.device)

    def rows(self, *, short: bool) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """(name, lengths, brief) of the rows that show whether documents stay apart, in this order."""
        yield "odd lengths", self.sizes.odd, False
        # As many tokens and segments as before: what was kept of the other row, and found by its shape, is wrong here.
        yield "other lengths", self.sizes.odd[::-1], True
        if not short:
            yield "many documents", self.sizes.many, False

    def cases(self, operation: str, *, short: bool) -> Iterator[Case]:
        """The inputs to examine this operation with."""
        sizes = self.sizes
        if operation in MIXING:
            for name, lengths, brief in self.rows(short=short):
                yield self._mixing(operation, name, self.batch(lengths), brief=brief)
            if not short:
                yield self._mixing(operation, "one document", self.batch((sizes.num_tokens,)), brief=True)
            if operation == "gated_delta_rule" and not short:
                scale = math.sqrt(EPS / sizes.linear_dim)  # squares add up to eps: forgetting it shows
                yield self._mixing(operation, "tiny queries and keys", self.batch(sizes.odd), scale=scale)
        elif operation == "loss":
            yield self._loss("a third is no target", ignored=1 / 3)
            yield self._loss("no target at all", ignored=1.0)
        elif operation in ("swiglu", "output_gate"):
            shape = (sizes.num_tokens, sizes.heads, sizes.head_dim)
            first = "gate" if operation == "swiglu" else "x"
            second = "up" if operation == "swiglu" else "gate"
            inputs = {first: self.normal(*shape), second: self.normal(*shape)}
            yield Case(name="random", inputs=inputs, bind=lambda function: function)
        elif operation == "delta_gates":
            yield self._delta_gates()
        else:
            for name, scale in (("random", 1.0), ("tiny", 1e-3)):  # 1e-3 squared is eps: forgetting eps shows
                yield self._norm(operation, name, scale=scale)

    def _mixing(self, operation: str, name: str, batch: Batch, *, scale: float = 1.0, brief: bool = False) -> Case:
        inputs = getattr(self, f"_{operation}")(scale)
        weights = ("weight",) if "weight" in inputs else ()

        def bind(function: Operation) -> Operation:
            return lambda *tensors: function(*tensors, batch)

        return Case(name=name, inputs=inputs, bind=bind, weights=weights, bounds=batch, brief=brief)

    def _gated_delta_rule(self, scale: float) -> dict[str, Tensor]:
        sizes, num_tokens = self.sizes, self.sizes.num_tokens

        def after_silu(heads: int) -> Tensor:  # as the convolution leaves them: keys are alike, not orthogonal
            return F.silu(self.wide(num_tokens, heads, sizes.linear_dim)).mul_(scale).to(self.dtype)

        # Memories of one to a thousand tokens, as at the model's initialisation.
        rate = 1.0 + 15.0 * self.uniform(sizes.value_heads)
        step = torch.exp(math.log(1e-3) + math.log(100.0) * self.uniform(sizes.value_heads))
        step = F.softplus(torch.log(torch.expm1(step)) + self.wide(num_tokens, sizes.value_heads))
        return {
            "query": after_silu(sizes.key_heads),
            "key": after_silu(sizes.key_heads),
            "value": self.normal(num_tokens, sizes.value_heads, sizes.linear_dim),
            "decay": -rate * step,
            "beta": torch.sigmoid(1.5 * self.wide(num_tokens, sizes.value_heads)).to(self.dtype),
        }

    def _causal_conv(self, scale: float) -> dict[str, Tensor]:
        channels = (2 * self.sizes.key_heads + self.sizes.value_heads) * self.sizes.linear_dim
        return {"x": self.normal(self.sizes.num_tokens, channels), "weight": self.normal(channels, 4, scale=0.5)}

    def _attention(self, scale: float) -> dict[str, Tensor]:
        sizes = self.sizes
        return {
            name: self.normal(sizes.num_tokens, heads, sizes.head_dim)
            for name, heads in (("query", sizes.heads), ("key", sizes.kv_heads), ("value", sizes.kv_heads))
        }

    def _delta_gates(self) -> Case:
        num_tokens, heads = self.sizes.num_tokens, self.sizes.value_heads
        inputs = {
            "a": self.normal(num_tokens, heads),
            "b": self.normal(num_tokens, heads),
            "A_log": torch.log(1.0 + 15.0 * self.uniform(heads)),  # stays fp32 in the model
            "dt_bias": self.normal(heads, scale=2.0),
        }
        return Case(name="random", inputs=inputs, bind=lambda function: function, weights=("A_log", "dt_bias"))

    def _norm(self, operation: str, name: str, *, scale: float) -> Case:
        gated, sizes = operation == "gated_rms_norm", self.sizes
        heads, width = (sizes.value_heads, sizes.linear_dim) if gated else (sizes.heads, sizes.head_dim)
        inputs = {"x": self.normal(sizes.num_tokens, heads, width, scale=scale)}
        if gated:
            inputs["gate"] = self.normal(sizes.num_tokens, heads, width)
        if operation == "add_rms_norm":
            inputs["delta"] = self.normal(sizes.num_tokens, heads, width, scale=scale)
        # The gated norm's weight is plain and stays fp32 in the model, the others' is an offset from 1.
        inputs["weight"] = 1.0 + 0.3 * self.wide(width) if gated else self.normal(width, scale=0.3)
        tables: tuple[Tensor, ...] = ()
        if operation == "norm_rotary":
            angles = (6.3 * self.uniform(sizes.num_tokens, width // 8)).repeat(1, 2)
            tables = (angles.cos().to(self.dtype), angles.sin().to(self.dtype))

        def bind(function: Operation) -> Operation:
            return lambda *tensors: function(*tensors, EPS, *tables)

        return Case(name=name, inputs=inputs, bind=bind, weights=("weight",))

    def _loss(self, name: str, *, ignored: float) -> Case:
        sizes = self.sizes
        labels = (self.uniform(sizes.num_tokens) * sizes.loss_vocab).long().clamp_max(sizes.loss_vocab - 1)
        labels[self.uniform(sizes.num_tokens) < ignored] = IGNORE_INDEX
        num_targets = int((labels != IGNORE_INDEX).sum())
        inputs = {
            "hidden": self.normal(sizes.num_tokens, sizes.hidden),
            "weight": self.normal(sizes.loss_vocab, sizes.hidden, scale=1.5 * sizes.hidden**-0.5),
        }
        return Case(
            name=name,
            inputs=inputs,
            bind=lambda function: lambda *tensors: function(*tensors, labels, num_targets),
            weights=("weight",),
        )
