"""Sizes, names, configurations and first weights of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM as Reference

from tests.tiny import batch_of, random_documents, tiny_config, tiny_model
from trainer.kernels import select
from trainer.model import Qwen3_5ForCausalLM, keeps_fp32
from trainer.sizes import SIZES, resolve_config, sample_config

CPU = select(torch.device("cpu"))


@pytest.mark.parametrize(
    ("size", "billions"), [("0.8B", 0.752), ("2B", 1.882), ("4B", 4.206), ("9B", 8.954), ("27B", 26.896)]
)
def test_each_size_has_its_number_of_parameters(size: str, billions: float) -> None:
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(resolve_config(f"random:{size}"), kernels=CPU)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == billions


@pytest.mark.parametrize("size", ["0.8B", "27B"])
def test_names_and_shapes_equal_transformers(size: str) -> None:
    config = resolve_config(f"random:{size}")
    with torch.device("meta"):
        ours, theirs = Qwen3_5ForCausalLM(config, kernels=CPU), Reference(config)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert [name for name, _ in ours.named_parameters() if keeps_fp32(name)] == [
        f"model.layers.{i}.linear_attn.{leaf}"
        for i, kind in enumerate(config.layer_types or [])
        if kind == "linear_attention"
        for leaf in ("A_log", "norm.weight")
    ]


def test_first_weights_depend_on_the_seed_alone() -> None:
    def fresh(seed: int) -> dict[str, torch.Tensor]:
        model = Qwen3_5ForCausalLM(tiny_config(), kernels=CPU)
        model.init_weights(seed=seed)
        return model.state_dict()

    first = fresh(1)
    torch.rand(3)
    again, other = fresh(1), fresh(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    same_shape = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(first[same_shape[0]], first[same_shape[1]])


def test_first_weights_forget_and_remember_at_sensible_rates() -> None:
    model = Qwen3_5ForCausalLM(tiny_config(), kernels=CPU)
    model.init_weights(seed=0)
    layer: Any = model.model.layers[0]
    step = torch.nn.functional.softplus(layer.linear_attn.dt_bias)
    assert ((step > 0.9e-3) & (step < 1.1e-1)).all()
    assert ((layer.linear_attn.A_log.exp() >= 1) & (layer.linear_attn.A_log.exp() <= 16)).all()
    assert torch.equal(layer.linear_attn.norm.weight, torch.ones(24))
    assert torch.count_nonzero(layer.input_layernorm.weight) == 0


def test_parameters_that_stay_fp32_survive_a_change_of_dtype() -> None:
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if keeps_fp32(name)}
    model.to_dtype(torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if keeps_fp32(name) else torch.bfloat16), name
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in before.items())
    batch = batch_of(random_documents([70, 30]))
    loss = model(batch)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, tiny_model()(batch), rtol=0.02, atol=0)


def test_rounding_the_decay_is_refused() -> None:
    with pytest.raises(AssertionError, match="to_dtype"):
        tiny_model().to(torch.bfloat16)(batch_of([[5, 6, 7]]))


def test_tied_weights_are_one_parameter() -> None:
    tied, apart = tiny_model(tie_word_embeddings=True), tiny_model(tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert len(list(apart.parameters())) == len(list(tied.parameters())) + 1


# ------------------------------------------------------------------------------------ configurations


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_text_configuration_is_read_from_a_file_and_from_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "config.json", tiny_config().to_dict())
    for spec in (str(tmp_path), f"random:{tmp_path / 'config.json'}"):
        assert resolve_config(spec).to_dict() == tiny_config().to_dict()


@pytest.mark.parametrize("where", ["text", "top"])
def test_a_released_configuration_gives_its_text_part_and_its_tying(tmp_path: Path, where: str) -> None:
    text = {**tiny_config().to_dict(), "mtp_num_hidden_layers": 1}
    del text["tie_word_embeddings"]
    full = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}}
    (text if where == "text" else full)["tie_word_embeddings"] = True
    write(tmp_path / "config.json", full)
    config = resolve_config(str(tmp_path))
    assert config.hidden_size == 64
    assert config.tie_word_embeddings is True


@pytest.mark.parametrize(
    ("names", "outer", "inner", "tied"),
    [
        (["Qwen3_5ForConditionalGeneration"], True, False, True),
        (["Qwen3_5ForConditionalGeneration"], False, True, False),
        (["Qwen3_5ForConditionalGeneration"], None, True, False),
        (["Qwen3_5ForCausalLM"], False, True, True),
        (["Qwen3_5ForCausalLM"], True, False, False),
        (["Qwen3_5ForCausalLM"], True, None, False),
        ([], True, False, True),
        (5, False, True, False),
    ],
)
def test_the_class_decides_which_flag_ties_as_in_transformers(
    tmp_path: Path, *, names: object, outer: bool | None, inner: bool | None, tied: bool
) -> None:
    text = {k: v for k, v in tiny_config().to_dict().items() if k != "tie_word_embeddings"}
    full: dict[str, Any] = {"model_type": "qwen3_5", "architectures": names, "text_config": text}
    for part, flag in ((full, outer), (text, inner)):
        if flag is not None:
            part["tie_word_embeddings"] = flag
    write(tmp_path / "config.json", full)
    assert resolve_config(str(tmp_path)).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ([1, 2], "model_type 'list'"),
        ({"model_type": "qwen3_5_text", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "qwen3_5_text", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen3_5_text", "num_attention_heads": 5}, "4 does not divide"),
        ({"model_type": "qwen3_5_text", "vocab_size": "many"}, "not a Qwen3.5 configuration"),
    ],
)
def test_a_configuration_that_cannot_be_computed_is_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_config(f"random:{write(tmp_path / 'c.json', content)}")


def test_specs_that_name_nothing_say_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    for spec, words in (
        ("random:3B", "0.8B, 2B, 4B, 9B, 27B"),
        ("nowhere", "no such folder, and not a hub id"),
        (str(tmp_path), "config.json"),
        (f"random:{tmp_path / 'bad.json'}", "as JSON"),
    ):
        with pytest.raises(ValueError, match=words):
            resolve_config(spec)


def test_the_samples_model_has_every_kind_of_layer_and_is_small() -> None:
    config = sample_config(vocab_size=4096, pad_token_id=3, eos_token_ids=[3, 4])
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config, kernels=CPU)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (4096, 3, [3, 4])
    assert sum(p.numel() for p in model.parameters()) < 3e6
    assert set(SIZES) == {"0.8B", "2B", "4B", "9B", "27B"}
