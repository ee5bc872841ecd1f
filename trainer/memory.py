"""Whether a run fits this machine, said before any weight is read.

    Workload ── estimate ──▶ Estimate (a table) ── require ──▶ goes on, or an error that names what would fit

Guarantees: an estimate needs the configuration alone, no weight and no forward pass. On the CPU the peak of real
runs lies within 0.6 and 1.2 times the estimate (``tests/test_memory.py``). On an H200 peaks lay between
0.88 and 0.99 times the estimate, which adds gradients to activations though the one grow while the other go.
Costs: milliseconds.

With torch references activations are counted from what autograd keeps, with fused kernels from what these keep.
Legend: D width, F feed-forward width, H heads, K and V head dimensions, C channels of the convolution.
"""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from trainer.optimizer import OptimizerKind
from trainer.reference import CHUNK, LOSS_BLOCK
from trainer.sizes import ModelConfig, layer_types
from trainer.step import Precision

Method = Literal["full", "lora"]

USABLE = 0.95
"""Share of the free memory that a run may plan with; allocators round up."""

FUSED_LOGITS = 2**29
"""Logits alive at once in the fused loss."""

SHORTEST_ROW = 512
"""No shorter rows are suggested: few chats would fit."""

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What decides how much memory a process needs."""

    config: ModelConfig
    """The model."""
    max_tokens: int
    """T, tokens of a row."""
    micro_rows: int
    """Most rows of one micro-step."""
    max_segments_per_row: int
    """Most segments of a row: the delta rule works in whole chunks of each."""
    method: Method
    """full: every parameter has a gradient and two moments; lora: those of the adapters alone."""
    precision: Precision
    """bf16 halves weights, gradients and activations; the optimizer then has fp32 weights of its own."""
    optimizer: OptimizerKind = "adamw"
    """adamw_bf16 has neither these nor fp32 moments."""
    lora_rank: int = 16
    """Inner width of the adapters."""
    recompute_layers: int = 0
    """Layers that keep their input alone."""
    micro_steps: int = 1
    """Micro-steps of one step in a process."""
    fused: bool = False
    """Whether fused kernels run, as on a GPU, or the torch references."""
    processes: int = 1
    """Processes that share the memory: all of a machine on a CPU, one on each GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One line of an estimate."""

    name: str
    """What needs it."""
    num_bytes: int
    """How much, in one process."""
    why: str
    """The arithmetic in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Memory that a run needs."""

    parts: tuple[Part, ...]
    """Per process, largest things by name."""
    processes: int
    """Processes that share the memory."""

    @property
    def num_bytes(self) -> int:
        """Of all processes together."""
        return self.processes * sum(part.num_bytes for part in self.parts)

    def table(self) -> str:
        """The parts, one a line, indented."""
        lines = [f"  {p.name:<14} {p.num_bytes / GIB:9.2f} GiB   {p.why}" for p in self.parts]
        if self.processes > 1:
            lines.append(f"  times {self.processes} processes")
        return "\n".join(lines)


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the model; tied embeddings count once."""
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return embeddings + config.hidden_size + sum(_layer_parameters(config, kind) for kind in layer_types(config))


def _layer_parameters(config: ModelConfig, kind: str) -> int:
    width = config.hidden_size
    block = 2 * width + 3 * width * config.intermediate_size
    if kind == "full_attention":
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        return block + width * (3 * queries + 2 * keys) + 2 * config.head_dim  # the gate doubles q_proj
    heads, value_dim = config.linear_num_value_heads, config.linear_value_head_dim
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * value_dim
    channels = 2 * keys + values
    projections = width * (channels + 2 * values + 2 * heads)
    return block + projections + channels * config.linear_conv_kernel_dim + 2 * heads + value_dim


def linear_shapes(config: ModelConfig, kind: str) -> list[tuple[int, int]]:
    """(inputs, outputs) of every linear layer in one layer of this kind."""
    width, ffn = config.hidden_size, config.intermediate_size
    block = [(width, ffn), (width, ffn), (ffn, width)]
    if kind == "full_attention":
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        return [(width, 2 * queries), (width, keys), (width, keys), (queries, width), *block]
    values = config.linear_num_value_heads * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    heads = config.linear_num_value_heads
    return [(width, channels), (width, values), (width, heads), (width, heads), (values, width), *block]


def num_adapter_parameters(config: ModelConfig, rank: int) -> int:
    """Parameters of LoRA adapters on every linear layer but the head."""
    shapes = [shape for kind in layer_types(config) for shape in linear_shapes(config, kind)]
    return rank * sum(inputs + outputs for inputs, outputs in shapes)


def _layer_activations(workload: Workload, kind: str) -> int:
    """Bytes that one layer keeps for its backward pass in one micro-step."""
    tokens = workload.micro_rows * workload.max_tokens
    narrow = _width(workload)
    adapters = workload.lora_rank * len(linear_shapes(workload.config, kind)) if workload.method == "lora" else 0
    kept = _fused_activations if workload.fused else _reference_activations
    return tokens * narrow * adapters + kept(workload, kind)


def _reference_activations(workload: Workload, kind: str) -> int:
    """Of the torch references.

    The factors are counts of tensors per token, found by fitting what autograd saved at 36 shapes (largest error
    0.01 %); see ``test_activations_are_what_autograd_keeps``.
    """
    config = workload.config
    tokens = workload.micro_rows * workload.max_tokens
    narrow = _width(workload)
    block = tokens * (9 * config.hidden_size * 4 + 4 * config.intermediate_size * narrow)
    if kind == "full_attention":
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        return block + tokens * (10 * queries + 2 * keys) * 4
    heads, K, V = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * K + heads * V
    # Each segment is rounded up to whole chunks.
    slots = tokens + workload.micro_rows * min(workload.max_segments_per_row, workload.max_tokens) * (CHUNK // 2)
    per_head = 6 * K + 9 * V + 5 * CHUNK + 8 + (K * K + 2 * K * V) // CHUNK
    return block + tokens * 3 * channels * narrow + slots * heads * per_head * 4


def _fused_activations(workload: Workload, kind: str) -> int:
    """Of the fused kernels, whose norms and gates are computed again from what is kept anyway.

    Block: both sums of the residual stream, the halves of the gated product. Attention: q_proj's output, queries and
    keys before and behind the rotation, values, output. Delta rule: channels before the convolution, normalised
    queries and keys, values, output and its gate, the triangular systems of all chunks.
    """
    config = workload.config
    per_token = 2 * config.hidden_size + 2 * config.intermediate_size
    if kind == "full_attention":
        per_token += 4 * config.num_attention_heads * config.head_dim + 3 * config.num_key_value_heads * config.head_dim
    else:
        heads = config.linear_num_value_heads
        keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
        per_token += 2 * (2 * keys + values) + 2 * values + heads * (CHUNK + 8)
    return workload.micro_rows * workload.max_tokens * per_token * _width(workload)


def _width(workload: Workload) -> int:
    """Bytes of a weight or activation."""
    return 2 if workload.precision == "bf16" else 4


def _activations(workload: Workload) -> Part:
    """What the forward pass leaves for the backward pass, and one layer at work in it."""
    layers = [_layer_activations(workload, kind) for kind in layer_types(workload.config)]
    tokens = workload.micro_rows * workload.max_tokens
    again = min(workload.recompute_layers, len(layers))
    inputs = 2 * tokens * workload.config.hidden_size * _width(workload)
    return Part(
        name="activations",
        num_bytes=again * inputs + sum(layers[again:]) + max(layers, default=0),
        why=f"{workload.micro_rows} x {workload.max_tokens} tokens, {len(layers)} layers, {again} of them recomputed, "
        "and one at work",
    )


def _loss(workload: Workload) -> Part:
    config = workload.config
    tokens = workload.micro_rows * workload.max_tokens
    head = config.vocab_size * config.hidden_size if workload.method == "full" else 0
    why = f"logits of a block, gradient of the head of {config.vocab_size} x {config.hidden_size}"
    if workload.fused:
        num_bytes = FUSED_LOGITS + _width(workload) * (3 * tokens * config.hidden_size + head)
    else:
        num_bytes = 4 * min(tokens * config.vocab_size, max(LOSS_BLOCK, config.vocab_size)) + 8 * head
    return Part(name="loss", num_bytes=num_bytes, why=why if head else "logits of a block")


def estimate(workload: Workload) -> Estimate:
    """Memory at the peak of a training step, from the configuration alone."""
    count = num_parameters(workload.config)
    adapters = num_adapter_parameters(workload.config, workload.lora_rank) if workload.method == "lora" else 0
    trained = adapters or count
    narrow = _width(workload)
    parts = [
        Part(
            name="weights",
            num_bytes=narrow * (count + adapters),
            why=f"{count / 1e9:.3f} B parameters x {narrow} bytes ({workload.precision})"
            + (f" and {adapters / 1e6:.1f} M of adapters" if adapters else ""),
        ),
        Part(name="gradients", num_bytes=narrow * trained, why="as many" if trained == count else "of adapters"),
    ]
    if workload.precision == "bf16" and workload.optimizer == "adamw":
        if workload.micro_steps > 1:
            parts.append(Part(name="gradient sums", num_bytes=4 * trained, why="of several micro-steps, in fp32"))
        parts.append(Part(name="fp32 masters", num_bytes=4 * trained, why="what the optimizer updates, 4 bytes each"))
    width = narrow if workload.optimizer == "adamw_bf16" else 4
    parts.append(Part(name="Adam's moments", num_bytes=2 * width * trained, why=f"two of {width} bytes each"))
    return Estimate(parts=(*parts, _activations(workload), _loss(workload)), processes=workload.processes)


def available_bytes(device: torch.device) -> int:
    """Memory that is free now: of the GPU, or of the machine within the limit of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = [line.split() for line in _read(Path("/proc/meminfo")).splitlines()]
    found = [
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        *(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"),
    ]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, now = (_read(Path("/sys/fs/cgroup") / name).strip() for name in (limit, used))
        if most.isdigit() and now.isdigit():
            found.append(max(0, int(most) - int(now)))
    return min(found)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def require(workload: Workload, *, available: int, where: str, alternatives: Mapping[str, ModelConfig]) -> Estimate:
    """Return the estimate if it fits.

    Args:
        workload: the run.
        available: free bytes.
        where: name of the memory, for the message.
        alternatives: other models by their ``--model`` value, to suggest from.

    Raises:
        ValueError: it does not fit; says what is needed for what, and what would fit.
    """
    needed = estimate(workload)
    if needed.num_bytes <= USABLE * available:
        return needed
    lines = [f"  {line}" for line in _suggestions(workload, available, alternatives)]
    elsewhere = math.ceil(needed.num_bytes / USABLE / GIB)
    raise ValueError(
        f"this run needs about {needed.num_bytes / GIB:.1f} GiB of memory; {where} has "
        f"{available / GIB:.1f} GiB free.\n{needed.table()}\nWhat would fit:\n"
        + "\n".join([*lines, f"  this run on a machine with {elsewhere} GiB free"])
    )


def _suggestions(workload: Workload, available: int, alternatives: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Changes of the run that fit, the smallest change first."""

    def fits(**changes: object) -> bool:
        changed = dataclasses.replace(workload, **changes)  # type: ignore[arg-type]
        return estimate(changed).num_bytes <= USABLE * available

    def with_recompute(flags: str, **changes: object) -> Iterator[str]:
        """The flags with the fewest recomputed layers that make them fit, if any do."""
        for count in range(workload.recompute_layers, workload.config.num_hidden_layers + 1):
            if fits(**changes, recompute_layers=count):
                more = f"--recompute {count}" if count > workload.recompute_layers else ""
                yield " ".join(filter(None, [flags, more]))
                return

    for flags in with_recompute(""):
        yield f"{flags} (layers computed again in the backward pass; the same gradient)"
    if workload.micro_rows > 1:
        for flags in with_recompute("--micro-rows 1", micro_rows=1):
            yield f"{flags} (more micro-steps of fewer rows; the same gradient)"
    one = "--micro-rows 1" if workload.micro_rows > 1 else ""
    if workload.method == "full" and workload.precision == "bf16" and workload.optimizer == "adamw":
        yield from with_recompute(f"--optimizer adamw_bf16 {one}".strip(), optimizer="adamw_bf16", micro_rows=1)
    if workload.method == "full":
        yield from with_recompute(f"--method lora {one}".strip(), method="lora", optimizer="adamw", micro_rows=1)
    rows = [workload.max_tokens >> i for i in range(16) if workload.max_tokens >> i >= SHORTEST_ROW]
    for length in rows[1:]:
        if fits(micro_rows=1, max_tokens=length):
            yield f"this model with shorter rows: pack again with --max-tokens {length}, train with --micro-rows 1"
            break
    most = num_parameters(workload.config)
    smaller = [(name, config) for name, config in alternatives.items() if num_parameters(config) < most]
    for name, config in sorted(smaller, key=lambda item: -num_parameters(item[1])):
        for length in rows or [workload.max_tokens]:
            if fits(config=config, micro_rows=1, max_tokens=length):
                packed = "" if length == workload.max_tokens else f" on shards packed with --max-tokens {length},"
                yield f"a smaller model: --model {name}{packed} with --micro-rows 1"
                return
