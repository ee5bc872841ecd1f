"""Hugging Face folders, in and out: names, dtypes, values, tokenizers, and transformers as the judge."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.released import write_tokenizer
from tests.tiny import batch_of, random_documents, tiny_model
from trainer import exports, weights
from trainer.model import Qwen3_5ForCausalLM, keeps_fp32
from trainer.sizes import resolve_config
from trainer.tensors import Deferred
from trainer.weights import export, load_weights


def state_of(model: Qwen3_5ForCausalLM) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def released(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names of a released checkpoint, with what a text model leaves out."""
    renamed = {
        key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: value
        for key, value in state.items()
    }
    return {
        **renamed,
        "model.visual.blocks.0.attn.qkv.weight": torch.zeros(3),
        "mtp.layers.0.mlp.up_proj.weight": torch.zeros(3),
    }


def assert_loads(folder: Path, expected: dict[str, Tensor], **changes: Any) -> None:
    model = tiny_model(seed=9, **changes)
    load_weights(model, folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def as_is(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state


@pytest.mark.parametrize("names", [as_is, released])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_load_under_both_sets_of_names_from_one_file_or_several(
    tmp_path: Path, *, names: Callable[[dict[str, Tensor]], dict[str, Tensor]], sharded: bool, tied: bool
) -> None:
    expected = state_of(tiny_model(tie_word_embeddings=tied))
    state = names(expected)
    if sharded:
        keys = sorted(state)
        files = {"a.safetensors": keys[::2], "b.safetensors": keys[1::2]}
        for file, part in files.items():
            save_file({key: state[key] for key in part}, tmp_path / file)
        weight_map = {key: file for file, part in files.items() for key in part}
        (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    else:
        save_file(state, tmp_path / "model.safetensors")
    assert_loads(tmp_path, expected, tie_word_embeddings=tied)


def test_a_bf16_model_keeps_its_fp32_parameters_unrounded(tmp_path: Path) -> None:
    expected = state_of(tiny_model())
    save_file(expected, tmp_path / "model.safetensors")
    model = tiny_model(seed=9).to_dtype(torch.bfloat16)
    load_weights(model, tmp_path)
    for name, parameter in model.named_parameters():
        wanted = expected[name] if keeps_fp32(name) else expected[name].bfloat16()
        assert parameter.dtype == wanted.dtype
        assert torch.equal(parameter, wanted), name


def test_a_tied_head_may_be_stored_but_not_another_one(tmp_path: Path) -> None:
    expected = state_of(tiny_model(tie_word_embeddings=True))
    head = expected["model.embed_tokens.weight"].clone()
    save_file({**expected, "lm_head.weight": head}, tmp_path / "model.safetensors")
    assert_loads(tmp_path, expected, tie_word_embeddings=True)
    save_file({**expected, "lm_head.weight": head.double()}, tmp_path / "model.safetensors")
    assert_loads(tmp_path, expected, tie_word_embeddings=True)
    head[3, 5] += 0.01
    save_file({**expected, "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"ties lm_head\.weight to the embeddings, but it differs .* to false"):
        load_weights(tiny_model(tie_word_embeddings=True), tmp_path)


def without_one(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != "model.layers.3.self_attn.q_norm.weight"}


def with_a_bias(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "model.layers.3.self_attn.q_proj.bias": torch.zeros(2)}


def misshapen(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "model.norm.weight": torch.zeros(65)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_one, "lacks model.layers.3.self_attn.q_norm.weight"),
        (with_a_bias, "has the unexpected model.layers.3.self_attn.q_proj.bias"),
        (misshapen, r"model.norm.weight has shape \[65\], the model \[64\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], words: str
) -> None:
    save_file(change(state_of(tiny_model())), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        load_weights(tiny_model(), tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_weights(tiny_model(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        load_weights(tiny_model(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / weights.INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"has no x\.safetensors"):
        load_weights(tiny_model(), tmp_path)
    (tmp_path / weights.INDEX).write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="not a safetensors index"):
        load_weights(tiny_model(), tmp_path)
    save_file(state_of(tiny_model()), tmp_path / "model.safetensors")  # beside which no index is needed
    load_weights(tiny_model(), tmp_path)


# --------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_an_export_with_the_same_keys_dtypes_and_logits(tmp_path: Path, *, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    out = export(tmp_path / "export", model=model, tokenizer_dir=None, eos_token_ids=[1, 7])
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(loaded).__name__ == "Qwen3_5ForCausalLM"
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    written = load_file(out / "model.safetensors")
    expected = state_of(model)
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    (ids,) = random_documents([90])
    torch.testing.assert_close(
        loaded(torch.tensor([ids]), use_cache=False).logits[0], model.logits(batch_of([ids])), rtol=1e-4, atol=1e-5
    )
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 7]
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["architectures"] == ["Qwen3_5ForCausalLM"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]


def test_an_export_comes_back_through_our_own_loader(tmp_path: Path) -> None:
    model = tiny_model()
    out = export(tmp_path / "export", model=model, tokenizer_dir=None, eos_token_ids=[1])
    again = Qwen3_5ForCausalLM(resolve_config(str(out)), kernels=model.kernels)
    load_weights(again, out)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_an_export_in_bf16_rounds_only_what_may_be_rounded(tmp_path: Path) -> None:
    model = tiny_model()
    out = export(tmp_path / "e", model=model, tokenizer_dir=None, eos_token_ids=[1], dtype=torch.bfloat16)
    for name, tensor in load_file(out / "model.safetensors").items():
        wanted = state_of(model)[name]
        assert torch.equal(tensor, wanted if keeps_fp32(name) else wanted.bfloat16())
        assert tensor.dtype == (torch.float32 if keeps_fp32(name) else torch.bfloat16)
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"


def test_a_large_export_has_several_files_and_an_index(tmp_path: Path) -> None:
    model = tiny_model()
    out = export(tmp_path / "e", model=model, tokenizer_dir=None, eos_token_ids=[1], shard_bytes=200_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((out / file).stat().st_size < 250_000 for file in files)
    assert_loads(out, state_of(model))
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_of(model).items())


@pytest.mark.parametrize("class_name", ["Qwen2Tokenizer", "PreTrainedTokenizerFast", None])
def test_an_exported_tokenizer_splits_as_tokenizer_json_does(tmp_path: Path, class_name: str | None) -> None:
    source = write_tokenizer(tmp_path / "tokenizer", class_name=class_name)
    out = export(tmp_path / "e", model=tiny_model(vocab_size=258), tokenizer_dir=source, eos_token_ids=[257])
    text = "3.1412 it's 12 नमस्ते"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(text)["input_ids"] == Tokenizer.from_file(str(source / "tokenizer.json")).encode(text).ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    settings = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    if class_name:
        assert settings["eos_token"] == "<|im_end|>"
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_former_export_is_replaced_and_another_folder_is_not(tmp_path: Path) -> None:
    first, second = tiny_model(seed=1), tiny_model(seed=2)
    out = tmp_path / "e"
    for model in (first, second):
        export(out, model=model, tokenizer_dir=None, eos_token_ids=[1])
    assert_loads(out, state_of(second))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ValueError, match="not an export"):
        export(tmp_path / "mine", model=first, tokenizer_dir=None, eos_token_ids=[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "mine"]


def test_an_export_that_reads_back_differently_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def writes_one_bit_wrong(tensors: dict[str, Deferred], file: Path, **how: Any) -> None:
        made = {name: tensor.make() for name, tensor in tensors.items()}
        save_file({**made, "model.norm.weight": made["model.norm.weight"] + 1e-3}, file, **how)

    def forgets_one(tensors: dict[str, Deferred], file: Path, **how: Any) -> None:
        save_file({name: tensor.make() for name, tensor in list(tensors.items())[1:]}, file, **how)

    monkeypatch.setattr(exports, "save_file", writes_one_bit_wrong)
    with pytest.raises(ValueError, match=r"model\.norm\.weight differs from the model"):
        export(tmp_path / "e", model=tiny_model(), tokenizer_dir=None, eos_token_ids=[1])
    assert not (tmp_path / "e").exists()

    monkeypatch.setattr(exports, "save_file", forgets_one)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is missing"):
        export(tmp_path / "e", model=tiny_model(), tokenizer_dir=None, eos_token_ids=[1])
    monkeypatch.undo()
    export(tmp_path / "e", model=tiny_model(), tokenizer_dir=None, eos_token_ids=[1])
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
    shutil.rmtree(tmp_path / "e")
