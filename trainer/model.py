"""The Qwen3.5 text model (also Qwen3.6 and 3.8: their `model_type` is `qwen3_5`), for packed input only.

    config = resolve_config("random:0.8B")                  # or a hub id, a folder, random:CONFIG.json
    model = Qwen3_5ForCausalLM(config, kernels=select(torch.device("cpu")))
    model.init_weights(seed=0)                              # or weights.load_weights
    model(batch).backward()

Guarantees: parameter names and results equal transformers' `Qwen3_5ForCausalLM`; boundaries travel with every call,
so that no document sees another; `A_log` and the gated norm's weight stay fp32 whatever the compute dtype.
Costs: the kernels'; logits of all tokens exist in `logits` only.

Layers repeat as 3 gated-delta-net layers and 1 gated full-attention layer, each followed by a SwiGLU block.

Shapes: T tokens of the packed batch, D width, C conv channels, H heads, G key/value heads, K key dim, V value dim,
R rotary dims.
"""

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.batches import IGNORE_INDEX, Batch
from trainer.kernels import Kernels
from trainer.reference import Boundaries
from trainer.sizes import ModelConfig, check_config, layer_types, rotary

Rotary = tuple[Tensor, Tensor]
Make = Callable[[], Tensor] | None


def keeps_fp32(name: str) -> bool:
    """Whether the parameter of this name is stored and used in fp32 whatever the compute dtype."""
    return name.endswith((".linear_attn.A_log", ".linear_attn.norm.weight"))


class RMSNorm(nn.Module):
    """Zero-centred RMSNorm over the last dimension: x / rms(x) * (1 + weight)."""

    def __init__(self, dim: int, *, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta, and the norm of it; [..., D] each."""
        if delta is None:
            return x, self(x)
        return self.kernels.add_rms_norm(x, delta, self.weight, self.eps)


@contextlib.contextmanager
def remade(value: Tensor, make: Make) -> Iterator[None]:
    """Inside, autograd keeps ``make``, if there is one, in place of ``value``, and calls it in the backward pass.

    For the input of a matrix product that is cheap to compute again from tensors that are kept anyway.
    """
    if make is None or not torch.is_grad_enabled():
        yield
        return

    place, shape = value.data_ptr(), value.shape  # not the tensor: autograd holds `pack` on

    def pack(kept: Tensor) -> Tensor | Callable[[], Tensor]:
        return make if kept.data_ptr() == place and kept.shape == shape else kept

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return kept()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class GatedRMSNorm(nn.Module):
    """RMSNorm with a plain fp32 weight, times silu of a gate; once per value head."""

    def __init__(self, dim: int, *, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., V], [..., V] -> [..., V]"""
        return self.kernels.gated_rms_norm(x, gate, self.weight, self.eps)


class GatedDeltaNet(nn.Module):
    """Linear attention: causal conv, gated delta rule, gated norm. State and conv stop at every boundary."""

    def __init__(self, config: ModelConfig, *, kernels: Kernels) -> None:
        super().__init__()
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        channels, width = 2 * keys + values, config.linear_conv_kernel_dim
        self.widths = [keys, keys, values]
        self.kernels = kernels
        self.in_proj_qkv = nn.Linear(config.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.num_value_heads, bias=False)
        # Holds the weight [C, 1, W]; never called.
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.num_value_heads))
        self.A_log = nn.Parameter(torch.zeros(self.num_value_heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(self.value_dim, eps=config.rms_norm_eps, kernels=kernels)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, make_x: Make, bounds: Boundaries) -> Tensor:
        """[T, D] -> [T, D]; ``make_x`` gives ``x_TD`` again, None if nothing is to be made again."""
        assert self.A_log.dtype.itemsize >= 4, "A_log was rounded: change the dtype with model.to_dtype"
        kernels = self.kernels
        with remade(x_TD, make_x):
            mixed_TC, gate_TC = self.in_proj_qkv(x_TD), self.in_proj_z(x_TD)
            a_TH, b_TH = self.in_proj_a(x_TD), self.in_proj_b(x_TD)
        mixed_TC = kernels.causal_conv(mixed_TC, self.conv1d.weight.squeeze(1), bounds)
        query, key, value = torch.split(mixed_TC, self.widths, dim=-1)
        decay_TH, beta_TH = kernels.delta_gates(a_TH, b_TH, self.A_log, self.dt_bias)
        out_THV = kernels.gated_delta_rule(
            query.reshape(-1, self.num_key_heads, self.key_dim),
            key.reshape(-1, self.num_key_heads, self.key_dim),
            value.reshape(-1, self.num_value_heads, self.value_dim),
            decay_TH,
            beta_TH,
            bounds,
        )
        gate_THV = gate_TC.view_as(out_THV)
        normed_TC = self.norm(out_THV, gate_THV).flatten(1)
        with remade(normed_TC, make_x and (lambda: self.norm(out_THV, gate_THV).flatten(1))):
            out: Tensor = self.out_proj(normed_TC)
        return out


class GatedAttention(nn.Module):
    """Causal attention within each document, grouped key/value heads, rotary on part of each head, output gate."""

    def __init__(self, config: ModelConfig, *, kernels: Kernels) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.kernels = kernels
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, kernels=kernels)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, kernels=kernels)

    def forward(self, x_TD: Tensor, make_x: Make, tables: Rotary, bounds: Boundaries) -> Tensor:
        """[T, D] -> [T, D]; ``make_x`` as in `GatedDeltaNet`; tables: cosine and sine [T, R]."""
        kernels = self.kernels
        with remade(x_TD, make_x):
            both_THK = self._heads(self.q_proj(x_TD), 2 * self.head_dim)
            key_TGK = self._heads(self.k_proj(x_TD), self.head_dim)
            value_TGK = self._heads(self.v_proj(x_TD), self.head_dim)
        # Each head's query and its gate stand side by side in q_proj's output.
        query_THK, gate_THK = torch.chunk(both_THK, 2, dim=-1)
        query_THK = kernels.norm_rotary(query_THK, self.q_norm.weight, self.q_norm.eps, *tables)
        key_TGK = kernels.norm_rotary(key_TGK, self.k_norm.weight, self.k_norm.eps, *tables)
        out_THK = kernels.attention(query_THK, key_TGK, value_TGK, bounds)
        gated_TC = kernels.output_gate(out_THK, gate_THK).flatten(1)
        with remade(gated_TC, make_x and (lambda: kernels.output_gate(out_THK, gate_THK).flatten(1))):
            out: Tensor = self.o_proj(gated_TC)
        return out

    @staticmethod
    def _heads(x: Tensor, dim: int) -> Tensor:
        return x.view(x.shape[0], -1, dim)


class SwiGLU(nn.Module):
    """down(silu(gate) * up)"""

    def __init__(self, config: ModelConfig, *, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, make_x: Make) -> Tensor:
        """[T, D] -> [T, D]; ``make_x`` as in `GatedDeltaNet`."""
        swiglu = self.kernels.swiglu
        with remade(x_TD, make_x):
            gate_TF, up_TF = self.gate_proj(x_TD), self.up_proj(x_TD)
        inner_TF = swiglu(gate_TF, up_TF)
        with remade(inner_TF, make_x and (lambda: swiglu(gate_TF, up_TF))):
            out: Tensor = self.down_proj(inner_TF)
        return out


class DecoderLayer(nn.Module):
    """A token mixer and a SwiGLU block, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, *, layer_type: str, kernels: Kernels) -> None:
        super().__init__()
        self.is_linear = layer_type == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config, kernels=kernels)
        else:
            self.self_attn = GatedAttention(config, kernels=kernels)
        self.mlp = SwiGLU(config, kernels=kernels)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, kernels=kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, kernels=kernels)

    def forward(
        self, x_TD: Tensor, delta_TD: Tensor | None, tables: Rotary, bounds: Boundaries, *, rematerialize: bool
    ) -> tuple[Tensor, Tensor]:
        """Residual stream and what the layer before adds to it -> the stream and what this layer adds to it.

        So every sum stands beside the norm that reads it, and one kernel does both. ``rematerialize`` is for layers
        that keep their activations: a recomputed layer would be kept alive by what makes its tensors again.
        """
        x_TD, normed_TD = self.input_layernorm.add(x_TD, delta_TD)
        make = functools.partial(self.input_layernorm, x_TD) if rematerialize else None
        if self.is_linear:
            delta_TD = self.linear_attn(normed_TD, make, bounds)
        else:
            delta_TD = self.self_attn(normed_TD, make, tables, bounds)
        x_TD, normed_TD = self.post_attention_layernorm.add(x_TD, delta_TD)
        make = functools.partial(self.post_attention_layernorm, x_TD) if rematerialize else None
        return x_TD, self.mlp(normed_TD, make)


class TextModel(nn.Module):
    """Embedding, layers, last norm: everything but the head."""

    def __init__(self, config: ModelConfig, *, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.num_recomputed = 0
        self.rematerialize = kernels.rematerialize
        # No padding_idx: padding has no targets, and a pad id inside a document is a token like any other.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_type=layer_type, kernels=kernels) for layer_type in layer_types(config)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, kernels=kernels)

    def forward(self, batch: Batch, *, inputs_embeds: Tensor | None = None) -> Tensor:
        """Hidden states [T, D] after the last norm."""
        x_TD = self.embed_tokens(batch.input_ids) if inputs_embeds is None else inputs_embeds
        tables = rotary_tables(self.config, batch.position_ids, dtype=x_TD.dtype)
        delta_TD: Tensor | None = None
        for i, layer in enumerate(self.layers):
            if i < self.num_recomputed and torch.is_grad_enabled():
                call = functools.partial(layer, rematerialize=False)
                x_TD, delta_TD = checkpoint(
                    call, x_TD, delta_TD, tables, batch, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_TD, delta_TD = layer(x_TD, delta_TD, tables, batch, rematerialize=self.rematerialize)
        out: Tensor = self.norm.add(x_TD, delta_TD)[1]
        return out


class Qwen3_5ForCausalLM(nn.Module):  # noqa: N801 - the name under which the released weights are known
    """The whole model. Takes a `Batch`; there is no way to call it without boundaries."""

    def __init__(self, config: ModelConfig, *, kernels: Kernels) -> None:
        """Parameters in the default dtype, not yet set: call `init_weights` or load a checkpoint.

        Raises ValueError for a configuration that asks for something this model does not compute.
        """
        super().__init__()
        check_config(config)
        self.config = config
        self.kernels = kernels
        self.model = TextModel(config, kernels=kernels)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share embedding and head where the configuration says so; again after `to_empty`."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def set_recompute(self, num_layers: int, /) -> None:
        """Keep only the inputs of the first ``num_layers`` layers for the backward pass, compute the rest again."""
        self.model.num_recomputed = num_layers

    def forward(self, batch: Batch) -> Tensor:
        """fp32 scalar: the sum of the cross entropy over the batch's targets; 0 where it has none."""
        return self.kernels.loss(self.hidden(batch), self.lm_head.weight, batch.labels, batch.num_targets)

    def hidden(self, batch: Batch, *, inputs_embeds: Tensor | None = None) -> Tensor:
        """Hidden states [T, D] after the last norm; `inputs_embeds` [T, D] replaces the embedding lookup."""
        out: Tensor = self.model(batch, inputs_embeds=inputs_embeds)
        return out

    def logits(self, batch: Batch, *, inputs_embeds: Tensor | None = None) -> Tensor:
        """Logits [T, vocabulary] of every token, all alive at once: for tests and generation."""
        out: Tensor = self.lm_head(self.hidden(batch, inputs_embeds=inputs_embeds))
        return out

    def to_dtype(self, dtype: torch.dtype, /) -> "Qwen3_5ForCausalLM":
        """Cast every parameter but those that stay fp32; in place."""
        for name, parameter in self.named_parameters():
            if not keeps_fp32(name):
                parameter.data = parameter.data.to(dtype)
        return self

    @torch.no_grad()
    def init_weights(self, *, seed: int) -> None:
        """Random weights, each from its own generator on the CPU: the same on any device and any number of them."""
        for name, parameter in self.named_parameters():
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            parameter.copy_(_initial(name, parameter.shape, std=self.config.initializer_range, generator=generator))


def _initial(name: str, shape: torch.Size, *, std: float, generator: torch.Generator) -> Tensor:
    """fp32 first values of the parameter of this name."""
    values = torch.empty(shape)
    if name.endswith("linear_attn.norm.weight"):
        return values.fill_(1.0)
    if name.endswith("norm.weight"):
        return values.zero_()
    if name.endswith("A_log"):  # decay rates
        return values.uniform_(1.0, 16.0, generator=generator).log_()
    if name.endswith("dt_bias"):
        # Inverse softplus of steps between 0.001 and 0.1: memories of one to a thousand tokens.
        step = values.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        return step + torch.log(-torch.expm1(-step))
    if name.endswith("conv1d.weight"):  # few inputs: a small deviation would silence the layer
        bound = shape[-1] ** -0.5
        return values.uniform_(-bound, bound, generator=generator)
    return values.normal_(0.0, std, generator=generator)


def rotary_tables(config: ModelConfig, position_ids: Tensor, *, dtype: torch.dtype) -> Rotary:
    """Cosine and sine [T, R] of each token's place in its own document."""
    num_dims, theta = rotary(config)
    exponent = torch.arange(0, num_dims, 2, dtype=torch.float32, device=position_ids.device) / num_dims
    frequency = 1.0 / (theta**exponent)
    angle_TR = (position_ids.float().unsqueeze(-1) * frequency).repeat(1, 2)
    return angle_TR.cos().to(dtype), angle_TR.sin().to(dtype)


def single_document(ids: list[int], *, device: torch.device) -> Batch:
    """A batch of one document without targets: for generation."""
    num_tokens = len(ids)
    boundaries = torch.tensor([0, num_tokens], dtype=torch.int32)
    return Batch(
        input_ids=torch.tensor(ids),
        position_ids=torch.arange(num_tokens),
        labels=torch.full((num_tokens,), IGNORE_INDEX),
        cu_seqlens=boundaries,
        cu_seqlens_cpu=boundaries.clone(),
        seq_idx=torch.zeros(num_tokens, dtype=torch.int32),
        max_seqlen=num_tokens,
        num_targets=0,
        num_tokens=num_tokens,
        sum_squared_lengths=num_tokens**2,
    ).to(device)


@torch.no_grad()
def generate_greedy(model: Qwen3_5ForCausalLM, ids: list[int], *, max_new_tokens: int, eos_ids: list[int]) -> list[int]:
    """The likeliest continuation of `ids`, without them; ends with the first of `eos_ids`.

    Computes the whole text again for every token: for a sentence, not for serving.
    """
    if not ids:
        raise ValueError("there is nothing to continue: pass at least one token id")
    written: list[int] = []
    while len(written) < max_new_tokens and not set(written[-1:]) & set(eos_ids):
        batch = single_document([*ids, *written], device=model.lm_head.weight.device)
        last = model.lm_head(model.hidden(batch)[-1])
        written.append(int(last.argmax()))
    return written
