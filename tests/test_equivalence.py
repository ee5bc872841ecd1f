"""Packed equals separate: against transformers' own model, and against ourselves one document at a time."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Qwen3_5ForCausalLM as Reference

from tests.tiny import LENGTHS, PAD, batch_of, random_documents, row_of, tiny_config, tiny_model
from trainer.batches import Batch, make_batch
from trainer.kernels import Kernels, select
from trainer.model import Qwen3_5ForCausalLM, generate_greedy

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def reference_of(model: Qwen3_5ForCausalLM) -> Reference:
    """transformers' model with our weights. Its pad id is none: it would drop that row's gradient."""
    config = tiny_config(tie_word_embeddings=model.config.tie_word_embeddings, pad_token_id=None)
    reference = Reference(config)
    reference.load_state_dict(model.state_dict())
    return reference.eval()


def separate(reference: Reference, documents: list[list[int]]) -> tuple[list[Tensor], Tensor]:
    """Logits of each document alone and the sum of all losses."""
    logits = [reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in documents]
    losses = [
        F.cross_entropy(found[:-1], torch.tensor(ids[1:]), reduction="sum")
        for found, ids in zip(logits, documents, strict=True)
        if len(ids) > 1
    ]
    return logits, torch.stack(losses).sum()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(dict(model.named_parameters())), "every parameter has a gradient"
    return found


def assert_close(found: Tensor, expected: Tensor, *, what: str = "", relative: float = 2e-5) -> None:
    """Largest difference relative to the largest expected value."""
    error = float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-6))
    assert error < relative, f"{what}: relative error {error}"


def split(x: Tensor, batch: Batch) -> list[Tensor]:
    return list(torch.split(x, batch.cu_seqlens.diff().tolist()))


@pytest.mark.parametrize("tied", [False, True])
def test_packed_documents_equal_transformers_one_by_one_in_logits_loss_and_every_gradient(*, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    reference = reference_of(model)
    documents = random_documents(LENGTHS)
    batch = batch_of(documents, tail=40)

    expected_logits, expected_loss = separate(reference, documents)
    expected_loss.backward()
    loss = model(batch)
    loss.backward()

    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert_close(loss, expected_loss)
    for found, expected in zip(split(model.logits(batch), batch), expected_logits, strict=False):
        assert_close(found, expected, what=f"logits of {len(expected)} tokens")
    expected_gradients = gradients(reference)
    for name, gradient in gradients(model).items():
        assert_close(gradient, expected_gradients[name], what=name, relative=1e-4)


def test_packed_documents_equal_our_own_model_one_by_one() -> None:
    packed, alone = tiny_model(), tiny_model()
    documents = random_documents(LENGTHS, seed=1)
    batch = batch_of(documents, tail=7)
    packed(batch).backward()
    for document in documents:
        alone(batch_of([document])).backward()

    for document, found in zip(documents, split(packed.logits(batch), batch), strict=False):
        assert_close(found, alone.logits(batch_of([document])), what=f"{len(document)} tokens")
    expected = gradients(alone)
    for name, gradient in gradients(packed).items():
        assert_close(gradient, expected[name], what=name, relative=1e-4)


@pytest.mark.parametrize("lengths", [[5, 9, 6], LENGTHS, [70, 200, 5]])
def test_the_gradient_of_one_document_is_zero_in_every_other(lengths: list[int]) -> None:
    model = tiny_model()
    documents = random_documents(lengths)
    batch = batch_of(documents, tail=3)
    embeds = model.model.embed_tokens(batch.input_ids).detach().requires_grad_()
    logits = split(model.logits(batch, inputs_embeds=embeds), batch)
    for i in range(len(lengths)):
        (gradient,) = torch.autograd.grad(logits[i].logsumexp(-1).sum(), embeds, retain_graph=True)
        for j, part in enumerate(split(gradient, batch)):
            if i == j:
                assert part.abs().max() > 0
            else:
                assert torch.count_nonzero(part) == 0, f"document {j} feels the loss of document {i}"


def test_changing_one_document_changes_no_bit_of_another() -> None:
    model = tiny_model()
    first, second, third = random_documents([5, 9, 6])
    before = split(model.logits(batch_of([first, second, third])), batch_of([first, second, third]))
    other = [(token + 1) % 199 for token in second]
    after = split(model.logits(batch_of([first, other, third])), batch_of([first, other, third]))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])


def test_later_documents_of_5_9_and_6_tokens_equal_transformers() -> None:
    model = tiny_model()
    documents = random_documents([5, 9, 6], seed=2)
    batch = batch_of(documents)
    expected, _ = separate(reference_of(model), documents)
    for found, wanted in zip(split(model.logits(batch), batch), expected, strict=True):
        assert_close(found, wanted)


def test_two_rows_end_to_end_equal_each_alone() -> None:
    model = tiny_model()
    rows = [row_of(random_documents([30, 70], seed=1)), row_of(random_documents([64], seed=2), tail=36)]
    both = make_batch(rows, max_seqlen=100)
    alone = [make_batch([row], max_seqlen=100) for row in rows]
    assert_close(model.hidden(both), torch.cat([model.hidden(batch) for batch in alone]))
    assert_close(model(both), model(alone[0]) + model(alone[1]))


@pytest.mark.parametrize("next_length", [100, 83])
def test_the_last_rows_boundaries_do_not_linger(next_length: int) -> None:
    model = tiny_model()
    model(batch_of(random_documents([20, 50, 30])))
    (document,) = random_documents([next_length], seed=3)
    (expected,), _ = separate(reference_of(model), [document])
    assert_close(model.logits(batch_of([document])), expected)


def test_the_padding_tail_changes_neither_loss_nor_gradient() -> None:
    without, with_tail = tiny_model(), tiny_model()
    documents = random_documents([33, 20])
    loss = without(batch_of(documents))
    loss_with_tail = with_tail(batch_of(documents, tail=75))
    loss.backward()
    loss_with_tail.backward()
    assert_close(loss_with_tail, loss, relative=1e-6)
    expected = gradients(without)
    for name, gradient in gradients(with_tail).items():
        assert_close(gradient, expected[name], what=name)


def test_the_pad_and_end_ids_inside_a_document_split_nothing() -> None:
    model = tiny_model()
    document = [5, 6, 1, 7, PAD, 8, 9]
    (expected,), _ = separate(reference_of(model), [document])
    assert_close(model.logits(batch_of([document])), expected)


def test_256_documents_of_32_tokens_equal_unpacked() -> None:
    model = tiny_model()
    documents = random_documents([32] * 256)
    batch = batch_of(documents)
    with torch.no_grad():
        logits = split(model.logits(batch), batch)
        expected, _ = separate(reference_of(model), [documents[i] for i in (0, 1, 100, 255)])
    for i, wanted in zip((0, 1, 100, 255), expected, strict=True):
        assert_close(logits[i], wanted)


def test_a_document_of_4099_tokens_equals_transformers() -> None:
    model = tiny_model()
    documents = random_documents([3, 4099])
    batch = batch_of(documents)
    with torch.no_grad():
        expected, loss = separate(reference_of(model), documents)
        assert_close(split(model.logits(batch), batch)[1], expected[1], relative=1e-4)
        assert_close(model(batch), loss)


def test_every_operation_that_mixes_tokens_gets_the_rows_own_boundaries() -> None:
    seen: list[tuple[str, Any]] = []

    def probe(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(*arguments: Any) -> Tensor:
            seen.append((name, arguments[-1]))
            return function(*arguments)

        return called

    chosen = select(CPU)
    mixers = ("gated_delta_rule", "causal_conv", "attention")
    probes: dict[str, Any] = {name: probe(name, getattr(chosen, name)) for name in mixers}
    kernels: Kernels = dataclasses.replace(chosen, **probes)
    model = tiny_model(kernels=kernels)
    for lengths in ([10, 20], [30], [7, 8, 9]):
        seen.clear()
        batch = batch_of(random_documents(lengths), tail=2)
        model(batch)
        assert [name for name, _ in seen] == ["causal_conv", "gated_delta_rule"] * 3 + ["attention"]
        for _, bounds in seen:
            assert bounds.cu_seqlens is batch.cu_seqlens
            assert bounds.seq_idx is batch.seq_idx
            assert bounds.cu_seqlens_cpu.tolist() == batch.cu_seqlens.tolist()


def test_rotary_positions_come_from_the_batch() -> None:
    model = tiny_model()
    batch = batch_of(random_documents([20, 30]))
    spread = dataclasses.replace(batch, position_ids=batch.position_ids * 50)
    found, plain = model.logits(spread), model.logits(batch)
    assert torch.equal(found[[0, 20]], plain[[0, 20]])  # a first token sees itself alone, at any position
    assert (found[1:20] - plain[1:20]).abs().max() > 1e-3
    assert (found[21:] - plain[21:]).abs().max() > 1e-3


def test_recomputing_layers_changes_no_gradient() -> None:
    plain, recomputed = tiny_model(), tiny_model()
    recomputed.set_recompute(2)
    batch = batch_of(random_documents([40, 25]))
    plain(batch).backward()
    recomputed(batch).backward()
    expected = gradients(plain)
    for name, gradient in gradients(recomputed).items():
        assert torch.equal(gradient, expected[name]), name


def test_autocast_to_bf16_rounds_no_more_than_transformers_does_and_keeps_isolation() -> None:
    exact, rounded = tiny_model(), tiny_model()
    reference = reference_of(exact)
    documents = random_documents([70, 9, 130])
    batch = batch_of(documents)
    loss = exact(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded_loss = rounded(batch)
        _, reference_loss = separate(reference, documents)
        embeds = rounded.model.embed_tokens(batch.input_ids).detach().requires_grad_()
        hidden = rounded.hidden(batch, inputs_embeds=embeds)
    (gradient,) = torch.autograd.grad(hidden[70:79].sum(), embeds)
    assert torch.count_nonzero(gradient[:70]) == torch.count_nonzero(gradient[79:]) == 0

    for total in (loss, rounded_loss, reference_loss):
        total.backward()
    assert rounded_loss.dtype == torch.float32
    assert_close(rounded_loss, loss, relative=0.01)
    ours, theirs, wanted = gradients(rounded), gradients(reference), gradients(exact)
    assert all(found.dtype == torch.float32 for found in ours.values())

    def rounding(found: dict[str, Tensor]) -> float:
        return float(torch.cat([(found[name] - wanted[name]).flatten() for name in wanted]).norm())

    assert rounding(ours) < 1.25 * rounding(theirs)


def test_a_batch_without_targets_has_loss_zero_and_gradient_zero() -> None:
    model = tiny_model()
    loss = model(batch_of(random_documents([1, 1]), tail=5))
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients(model).values())


def test_greedy_generation_equals_transformers_and_stops_at_an_end_id() -> None:
    model = tiny_model()
    reference = reference_of(model)
    prompt = [5, 9, 2, 44]
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=198, pad_token_id=0
    )[0, len(prompt) :].tolist()
    assert generate_greedy(model, prompt, max_new_tokens=12, eos_ids=[198]) == expected
    stop = expected[3]
    assert generate_greedy(model, prompt, max_new_tokens=12, eos_ids=[stop]) == expected[: expected.index(stop) + 1]
    with pytest.raises(ValueError, match="nothing to continue"):
        generate_greedy(model, [], max_new_tokens=1, eos_ids=[])


def watched(made: list[StorageWeakRef], function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, the storage of what it returns noted."""

    def call(*arguments: Any) -> Any:
        out = function(*arguments)
        made.append(StorageWeakRef((out[1] if isinstance(out, tuple) else out).untyped_storage()))
        return out

    return call


def run_watched(*, names: Sequence[str], again: bool, layers: int) -> tuple[list[Tensor], list[bool]]:
    """Gradients, and whether each output of these operations was gone after the forward pass."""
    made: list[StorageWeakRef] = []
    kernels = dataclasses.replace(select(CPU), rematerialize=again)
    kernels = dataclasses.replace(kernels, **{name: watched(made, getattr(kernels, name)) for name in names})
    model = tiny_model(kernels=kernels)
    model.set_recompute(layers)
    loss = model(batch_of(random_documents([40, 1, 23]), tail=3))
    released = [reference.expired() for reference in made]
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], released


def test_cheap_tensors_computed_again_give_the_same_gradients_and_are_not_held() -> None:
    names = ("add_rms_norm", "output_gate", "gated_rms_norm", "swiglu")
    plain, released = run_watched(names=names, again=False, layers=0)
    assert not any(released[:-1])  # nobody holds the last norm's output: the loss has done its backward pass
    again, released = run_watched(names=names, again=True, layers=0)
    assert all(released)
    assert len(released) == 4 * 2 + 4 + 4  # norms but the first, gates, swiglu
    assert len(plain) == len(list(tiny_model().parameters()))
    assert all(torch.equal(one, two) for one, two in zip(plain, again, strict=True))


@pytest.mark.parametrize("again", [False, True])
def test_a_recomputed_layer_holds_nothing_of_its_inside(again: bool) -> None:  # noqa: FBT001
    names = ("causal_conv", "gated_delta_rule", "attention", "gated_rms_norm", "output_gate", "swiglu")
    plain, released = run_watched(names=names, again=again, layers=0)
    assert not all(released)
    recomputed, released = run_watched(names=names, again=again, layers=4)
    assert all(released)
    assert len(released) == 3 * 4 + 3  # of three linear layers and a full one
    assert all(torch.equal(one, two) for one, two in zip(plain, recomputed, strict=True))
