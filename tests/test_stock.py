"""transformers' loop that ours is measured against, on a CPU at a tiny width."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.shards import PackedDataset
from tests.packed import make_packed, random_rows
from tests.tiny import tiny_config
from trainer import curves, stock
from trainer.batches import IGNORE_INDEX, make_batch
from trainer.kernels import select
from trainer.model import Qwen3_5ForCausalLM
from trainer.reference import causal_conv, gated_delta_rule

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = random_rows(num_rows=6, max_tokens=64, vocab_size=199)
    return make_packed(tmp_path_factory.mktemp("packed") / "rows", rows, max_tokens=64, vocab_size=199)


def test_documents_of_a_dataset_are_all_of_it(shards: Path) -> None:
    dataset = PackedDataset.open(shards)
    found = stock.documents(dataset)
    totals = dataset.manifest.totals
    assert sum(len(d.input_ids) for d in found) == totals["tokens"]
    assert sum(int(d.loss_mask.sum()) for d in found) == totals["targets"]
    assert len(found) == totals["pieces"]


def document(length: int, number: int = 0) -> stock.Document:
    ids = np.arange(100, 100 + length, dtype=np.int32)
    return stock.Document(doc_id=number, input_ids=ids, loss_mask=np.arange(length) % 2 == 1)


def test_padded_batches_hold_what_fits_in_the_order_given() -> None:
    found = stock.padded_batches([document(n) for n in (40, 50, 30, 90, 120, 5)], most_tokens=100, pad_id=0)
    assert [tuple(b.input_ids.shape) for b in found] == [(2, 50), (1, 30), (1, 90), (1, 120), (1, 5)]
    first = found[0]
    assert first.attention_mask.sum(1).tolist() == [40, 50]
    assert first.input_ids[0, 40:].unique().tolist() == [0]
    assert first.labels[0, :4].tolist() == [IGNORE_INDEX, 101, IGNORE_INDEX, 103]
    assert first.labels[0, 40:].unique().tolist() == [IGNORE_INDEX]
    assert (first.num_tokens, first.num_targets, first.sum_squared_lengths) == (90, 45, 1600 + 2500)


def test_batches_of_so_many_documents_leave_none_out() -> None:
    found = stock.batches_of([document(n) for n in (40, 50, 30, 90, 120)], size=2, pad_id=0)
    assert [tuple(b.input_ids.shape) for b in found] == [(2, 50), (2, 90), (1, 120)]
    assert [b.num_tokens for b in found] == [90, 120, 120]


def test_gradient_checkpointing_changes_no_gradient_of_the_stock_model() -> None:
    (batch,) = stock.batches_of([document(n) for n in (9, 30)], size=2, pad_id=0)
    gradients = []
    for recompute in (False, True):
        model = stock.build_stock(tiny_config(), device=CPU, dtype=torch.float32, seed=0, recompute=recompute)
        calls: list[str] = []
        mlp = model.get_submodule("model.layers.0.mlp")
        mlp.register_forward_pre_hook(lambda *_, seen=calls: seen.append("mlp"))
        stock.padded_loss(model, batch, num_targets=batch.num_targets).backward()
        assert len(calls) == 1 + recompute
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_hidden_packages_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "transformers.models.qwen3_5.modeling_qwen3_5", raising=False)
    for name in stock.FUSED:
        monkeypatch.setitem(sys.modules, name, sys)
    assert stock.fused_kernels_in_use()
    stock.without_fused_kernels()
    assert not stock.fused_kernels_in_use()
    with pytest.raises(ImportError):
        __import__("fla")


def test_more_or_fewer_layers_keep_the_order_of_kinds() -> None:
    config = tiny_config(num_hidden_layers=4)
    longer = stock.with_layers(config, 8)
    assert longer.layer_types == 2 * (3 * ["linear_attention"] + ["full_attention"])
    assert stock.with_layers(longer, 4).to_dict() == config.to_dict()


def test_weights_filled_in_place_have_the_trainers_distributions() -> None:
    config = tiny_config(hidden_size=256, vocab_size=500)
    with stock.created_on(CPU, torch.bfloat16):
        model = Qwen3_5ForCausalLM(config, kernels=select(CPU))
    assert torch.get_default_dtype() == torch.float32
    stock.fill_weights(model, seed=3, std=config.initializer_range)
    expected = Qwen3_5ForCausalLM(config, kernels=select(CPU))
    expected.init_weights(seed=3)
    expected.to_dtype(torch.bfloat16)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert ours.dtype == theirs.dtype, name
        (mean, std), (expected_mean, expected_std) = ((p.detach().float().mean(), p.detach().float().std(correction=0))
                                                      for p in (ours, theirs))  # fmt: skip
        if ours.numel() > 1000:
            assert std.item() == pytest.approx(expected_std.item(), rel=0.1), name
        assert (mean - expected_mean).abs() <= 2 * expected_std, name


def test_packed_rows_in_the_stock_model_have_our_loss(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    def conv(x_BCT: Tensor, weight: Tensor, bias: None, *, activation: str, seq_idx: Tensor, **_: Any) -> Tensor:
        assert activation == "silu"
        assert bias is None
        assert torch.equal(seq_idx[0], batch.seq_idx)
        return causal_conv(x_BCT[0].T, weight, batch).T[None]

    def delta(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any) -> Any:
        assert torch.equal(cu_seqlens, batch.cu_seqlens)
        return gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], batch)[None], None

    monkeypatch.setattr(theirs, "causal_conv1d_fn", conv)
    monkeypatch.setattr(theirs, "torch_chunk_gated_delta_rule", delta)
    dataset = PackedDataset.open(shards)
    batch = make_batch([dataset[0]], max_seqlen=64)
    config = tiny_config()
    ours = curves.common_weights(config, model="random:0.8B", seed=1, precision="fp32")
    model = stock.build_stock(config, device=CPU, dtype=torch.float32, seed=0)
    model.load_state_dict(ours.state_dict())
    loss = stock.packed_loss(model, batch, num_targets=batch.num_targets)
    assert loss.item() == pytest.approx(ours(batch).item() / batch.num_targets, rel=1e-5)
