"""What `trainer.doctor` checks of a whole small model: 3 linear layers and 1 full one, on the chosen kernels.

The truth is the same model on the torch references in fp64. How far a right model may be from it is measured, too: by
the same model on the references in the dtype of the run.

Guarantees: as in `trainer.proofs`; loss, hidden states and the gradient of every parameter are compared.

Shapes: T tokens of the packed row, D width.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.batches import Batch
from trainer.cases import Maker, alone, documents_of, sides, some
from trainer.kernels import TABLE, Kernels
from trainer.model import Qwen3_5ForCausalLM
from trainer.proofs import Finding, Subject, largest_outside, reference_of, whole_error, worst
from trainer.sizes import ModelConfig

SLACK = {torch.bfloat16: (0.02, 0.5), torch.float32: (1e-4, 1e-2)}
"""(what is always allowed, what is never allowed) of a relative error in this dtype."""

REASON = "three times the error of the torch references in the same dtype, and a little"

Results = dict[str, Tensor]


def references() -> Kernels:
    """Every operation on its torch reference."""
    functions: dict[str, Any] = {operation: reference_of(operation) for operation in TABLE}
    return Kernels(**functions, table=())


def build(maker: Maker, kernels: Kernels) -> Qwen3_5ForCausalLM:
    """A small model in the dtype of the run; every parameter is random, so that each one shows."""
    sizes = maker.sizes
    config = ModelConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        num_hidden_layers=4,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        linear_key_head_dim=sizes.linear_dim,
        linear_value_head_dim=sizes.linear_dim,
        linear_num_key_heads=sizes.key_heads,
        linear_num_value_heads=sizes.value_heads,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        tie_word_embeddings=False,
    )
    model = Qwen3_5ForCausalLM(config, kernels=kernels)
    model.init_weights(seed=int(torch.randint(2**31, (), generator=maker.cpu_generator)))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=maker.cpu_generator)
            # Projections large enough that a layer says something beside the residual.
            parameter.add_(noise * (0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
        for name, parameter in model.named_parameters():
            if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
                # Queries like their keys: where they are orthogonal, a first token's output has no length to normalise.
                query, key = torch.split(parameter, sizes.key_heads * sizes.linear_dim)[:2]
                query.copy_(key + 0.3 * query)
    return model.to_dtype(maker.dtype).to(maker.device)


def twin(model: Qwen3_5ForCausalLM, *, exact: bool) -> Qwen3_5ForCausalLM:
    """The same weights on the references; in fp64 if `exact`."""
    other = Qwen3_5ForCausalLM(model.config, kernels=references()).to(model.lm_head.weight.device)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data.double() if exact else theirs.data.clone()
    return other


def run_model(model: Qwen3_5ForCausalLM, batch: Batch) -> Results:
    """Loss, hidden states, and the gradients of the embedded tokens and of every parameter."""
    embeds = model.model.embed_tokens(batch.input_ids)
    hidden = model.hidden(batch, inputs_embeds=embeds)
    loss = model.kernels.loss(hidden, model.lm_head.weight, batch.labels, batch.num_targets)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, [embeds, *parameters.values()])
    names = ["embedded tokens", *parameters]
    results = {"loss": loss.detach().clone(), "hidden states": hidden.detach().clone()}
    return results | {f"gradient of {name}": x.detach() for name, x in zip(names, gradients, strict=True)}


PER_TOKEN = ("hidden states", "gradient of embedded tokens")


def examine_model(kernels: Kernels, maker: Maker, *, short: bool, implementation: str = "all chosen") -> list[Finding]:
    """Everything about the whole model; an exception is a finding too."""
    subject = Subject(operation="model", implementation=implementation, version="", function=kernels.loss)
    findings: list[Finding] = []
    try:
        model = build(maker, kernels)
        for name, lengths, brief in maker.rows(short=short):
            batch = maker.batch(lengths)
            findings.extend(_agreement(subject, name, model, batch, maker, brief=brief))
            if not brief:
                findings.extend(_isolation(subject, name, model, batch, maker))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        findings.append(subject.finding("runs", math.nan, 0.0, text))
    return findings


def _agreement(
    subject: Subject, row: str, model: Qwen3_5ForCausalLM, batch: Batch, maker: Maker, *, brief: bool
) -> Iterator[Finding]:
    exact, plain = twin(model, exact=True), twin(model, exact=False)
    truth, usual, found = (run_model(each, batch) for each in (exact, plain, model))
    errors = {name: whole_error(found[name], x) for name, x in truth.items()}
    bounds = {name: _bound(whole_error(usual[name], x), maker) for name, x in truth.items()}
    bounds["loss"] = _bound(whole_error(usual["loss"], truth["loss"]), maker, floor=0.1)  # an average: rounding cancels
    for name in ("loss", "hidden states"):
        yield subject.finding(f"{row}: {name}", errors[name], bounds[name], REASON)
    name, _ = worst({name: errors[name] / bounds[name] for name in truth if name.startswith("gradient")})
    yield subject.finding(f"{row}: worst {name}", errors[name], bounds[name], REASON)
    if brief:
        return

    errors, bounds = {}, {}
    for document in some(documents_of(batch), at_most=15):
        expected = run_model(exact, alone(batch, document))
        for name in PER_TOKEN:
            key = f"{name}, {document.stop - document.start} tokens"
            average = float(truth[name].square().mean().sqrt())
            errors[key] = _document_error(found[name][document], expected[name], average)
            bounds[key] = _bound(_document_error(usual[name][document], expected[name], average), maker)
    key, _ = worst({key: error / bounds[key] for key, error in errors.items()})
    yield subject.finding(f"{row}: one by one, {key}", errors[key], bounds[key], REASON)


def _bound(usual: float, maker: Maker, *, floor: float = 1.0) -> float:
    always, never = SLACK[maker.dtype]
    return min(never, 3 * usual + floor * always)


def _document_error(found: Tensor, expected: Tensor, average: float) -> float:
    """Relative to the document's own size or, where it is smaller, to the average token's."""
    size = max(float(expected.norm()), average * math.sqrt(expected.numel()))
    return float((found.double() - expected).norm()) / size


def _isolation(subject: Subject, row: str, model: Qwen3_5ForCausalLM, batch: Batch, maker: Maker) -> Iterator[Finding]:
    touched = sides(batch)
    crossing: dict[str, float] = {}
    for side, tokens in touched.items():
        embeds = model.model.embed_tokens(batch.input_ids).detach().requires_grad_()
        hidden = model.hidden(batch, inputs_embeds=embeds)
        upstream = maker.normal(*hidden.shape)
        upstream[~tokens] = 0.0
        (gradient,) = torch.autograd.grad(hidden, [embeds], upstream)
        crossing[side] = largest_outside(gradient, tokens)
    name, error = worst(crossing)
    reason = "no document has a part in another's output"
    yield subject.finding(f"{row}: gradient crosses from {name}", error, 0.0, reason)

    with torch.no_grad():
        before, again = model.hidden(batch), model.hidden(batch)
        noise = 2 * float((before.double() - again.double()).abs().max())
        changes: dict[str, float] = {}
        for side, tokens in touched.items():
            ids = torch.where(tokens, (batch.input_ids + 1) % maker.sizes.vocab, batch.input_ids)
            after = model.hidden(dataclasses.replace(batch, input_ids=ids))
            changes[side] = largest_outside(after.double() - before.double(), tokens)
    name, error = worst(changes)
    reason = "twice what the same input gives on repetition"
    yield subject.finding(f"{row}: changing {name} changes others", error, noise, reason)
