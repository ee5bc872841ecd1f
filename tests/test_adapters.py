"""Adapters out and merged, with peft and transformers as the judges, for both classes of checkpoint."""

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from tests.released import COMPANIONS, whole_class, write_source, write_tokenizer
from tests.tiny import batch_of, random_documents, tiny_model
from trainer import adapters, bases, exports, weights
from trainer.kernels import select
from trainer.lora import adapted, add_adapters
from trainer.model import Qwen3_5ForCausalLM
from trainer.sizes import resolve_config

(IDS,) = random_documents([70])
RANK, ALPHA = 4, 12.0


def loaded(source: Path) -> Qwen3_5ForCausalLM:
    model = Qwen3_5ForCausalLM(resolve_config(str(source)), kernels=select(torch.device("cpu")))
    weights.load_weights(model, source)
    return model


def trained(source: Path) -> Qwen3_5ForCausalLM:
    """The source with adapters that say something."""
    model = loaded(source)
    add_adapters(model, rank=RANK, alpha=ALPHA, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in adapted(model).values():
            layer.lora_B.normal_(std=0.05)
    return model


def ours(model: Qwen3_5ForCausalLM) -> Tensor:
    return model.logits(batch_of([IDS])).detach()


@torch.no_grad()
def theirs(model: Any) -> Tensor:
    logits: Tensor = model.eval()(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    return logits


def far_apart(first: Tensor, second: Tensor) -> bool:
    return float((first - second).abs().max()) > 0.05


def load_with_peft(base: Any, adapter: Path) -> Any:
    """peft warns of missing keys and says nothing about unexpected ones: both are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft's own call
        model = peft.PeftModel.from_pretrained(base, adapter)
        result = peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(adapter)))
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora_" in key]
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "for_class"), [("released", "source"), ("released", "text"), ("text", "source")])
def test_peft_loads_an_adapter_onto_transformers_class_with_our_logits(
    tmp_path: Path, *, kind: str, for_class: Any, tied: bool
) -> None:
    source = write_source(tmp_path / "source", kind=kind, tied=tied)
    model = trained(source)
    out = adapters.export(tmp_path / "adapter", model=model, source=source, rank=RANK, alpha=ALPHA, for_class=for_class)
    cls = whole_class("text" if for_class == "text" else kind)
    base = cls.from_pretrained(source, dtype=torch.float32)
    before = theirs(base)
    torch.testing.assert_close(before, ours(loaded(source)), rtol=1e-4, atol=1e-4)
    with_adapter = load_with_peft(base, out)
    torch.testing.assert_close(theirs(with_adapter), ours(model), rtol=1e-4, atol=1e-4)
    assert far_apart(theirs(with_adapter), before)
    wrapped = {name for name, module in with_adapter.named_modules() if hasattr(module, "lora_A")}
    assert len(wrapped) == len(adapted(model)) == 3 * 8 + 7
    assert not any(word in name for name in wrapped for word in ("visual", "mtp", "lm_head"))
    prefix = "model.language_model" if (kind, for_class) == ("released", "source") else "model"
    assert f"base_model.model.{prefix}.layers.0.linear_attn.in_proj_qkv.lora_A.weight" in load_file(
        out / adapters.TENSORS
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "source"]


@pytest.mark.parametrize("targets", ["ours", "by name"])
@pytest.mark.parametrize("kind", ["released", "text"])
def test_an_adapter_written_for_the_text_class_is_loaded_by_peft_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, targets: str
) -> None:
    source = write_source(tmp_path / "source", kind=kind)
    model = trained(source)
    adapter = adapters.export(tmp_path / "a", model=model, source=source, rank=RANK, alpha=ALPHA, eos_token_ids=[7])
    if targets == "by name":
        config = json.loads((adapter / adapters.CONFIG).read_text(encoding="utf-8"))
        config["target_modules"] = sorted(name.rpartition(".")[2] for name in adapted(model))
        (adapter / adapters.CONFIG).write_text(json.dumps(config), encoding="utf-8")
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["adapters", "text", "--adapter", str(adapter), "--out", str(out)])
    for _ in range(2):  # a former one is replaced
        assert adapters.main() == 0
    load_with_peft(whole_class("text").from_pretrained(source, dtype=torch.float32), out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        found = peft.AutoPeftModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(found.get_base_model()).__name__ == "Qwen3_5ForCausalLM"
    torch.testing.assert_close(theirs(found), ours(model), rtol=1e-4, atol=1e-4)
    assert far_apart(theirs(found), ours(loaded(source)))
    assert {path.name for path in out.iterdir()} == {path.name for path in adapter.iterdir()}
    merged = [adapters.merge(source, folder, tmp_path / f"m-{folder.name}") for folder in (adapter, out)]
    first, second = (load_file(folder / "model.safetensors") for folder in merged)
    assert all(weights._same_bits(tensor, second[key]) for key, tensor in first.items())


@pytest.mark.parametrize("place", ["adapter", ".", "mine"])
def test_writing_for_the_text_class_replaces_nothing_else(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any, place: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    out = str(tmp_path / place)
    monkeypatch.setattr(sys, "argv", ["adapters", "text", "--adapter", str(pair[1]), "--out", out])
    assert adapters.main() == 2
    assert ("not an adapter" if place == "mine" else "holds the source") in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "mine", "source"]
    assert len(load_file(pair[1] / adapters.TENSORS)) == 2 * (3 * 8 + 7)


@pytest.mark.parametrize("spoil", ["missing", "unexpected"])
def test_peft_itself_would_notice_a_key_that_is_not_its_own(tmp_path: Path, spoil: str) -> None:
    source = write_source(tmp_path / "source", kind="text")
    out = adapters.export(tmp_path / "a", model=trained(source), source=source, rank=RANK, alpha=ALPHA)
    stored = load_file(out / adapters.TENSORS)
    key = "base_model.model.model.layers.3.mlp.up_proj.lora_B.weight"
    if spoil == "missing":
        del stored[key]
    else:
        stored[key.replace("up_proj", "side_proj")] = stored[key].clone()
    save_file(stored, out / adapters.TENSORS)
    with pytest.raises((UserWarning, AssertionError)):
        load_with_peft(whole_class("text").from_pretrained(source, dtype=torch.float32), out)


def test_the_tokenizer_comes_along_and_into_a_merged_checkpoint(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", kind="text")
    dataset = write_tokenizer(tmp_path / "tokenizer", class_name="Qwen2Tokenizer")
    adapter = adapters.export(
        tmp_path / "a", model=trained(source), source=source, rank=RANK, alpha=ALPHA, tokenizer_dir=dataset
    )
    merged = adapters.merge(source, adapter, tmp_path / "merged")
    text = "3.1412 it's"
    wanted = Tokenizer.from_file(str(dataset / "tokenizer.json")).encode(text).ids
    for folder in (adapter, merged):
        assert (folder / "tokenizer.json").read_bytes() == (dataset / "tokenizer.json").read_bytes()
        assert (folder / "chat_template.jinja").read_bytes() == (dataset / "chat_template.jinja").read_bytes()
        assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == wanted
    assert not list(merged.glob("adapter*"))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_the_targets_are_whole_names_of_ours_alone(prefix: str) -> None:
    pattern = adapters._peft_config(prefix, rank=1, alpha=1.0, base=None, revision=None)["target_modules"]
    assert re.fullmatch(pattern, f"{prefix}layers.12.mlp.up_proj")
    assert re.fullmatch(pattern, f"{prefix}layers.3.self_attn.o_proj")
    for foreign in (
        "lm_head",
        "mtp.layers.0.mlp.up_proj",
        "model.mtp.layers.0.mlp.up_proj",
        "model.visual.blocks.0.attn.proj",
        "model.visual.layers.0.mlp.up_proj",
        f"{prefix}layers.0.linear_attn.conv1d",
        f"{prefix}layers.0.linear_attn.norm",
        f"x.{prefix}layers.0.mlp.up_proj",
        f"{prefix}layers.0.mlp.up_proj.base_layer",
    ):
        assert not re.fullmatch(pattern, foreign), foreign


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["released", "text"])
def test_a_merged_checkpoint_computes_what_the_adapter_did_and_carries_the_rest(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    source = write_source(tmp_path / "source", kind=kind, dtype=dtype)
    model = trained(source)
    adapter = adapters.export(
        tmp_path / "adapter", model=model, source=source, rank=RANK, alpha=ALPHA, eos_token_ids=[7, 5]
    )
    out = adapters.merge(source, adapter, tmp_path / "merged", shard_bytes=100_000)
    base, info = whole_class(kind).from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # A bf16 source is rounded once more: some 2**-9 of every weight.
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    change = ours(model) - ours(loaded(source))
    print("rounding moves logits by", float((theirs(base) - ours(model)).norm() / change.norm()), "of the change")
    assert (theirs(base) - ours(model)).norm() < tolerance * change.norm()
    assert far_apart(theirs(base), ours(loaded(source)))
    layers = adapted(model)
    before, after = weights.checkpoint_keys(source), weights.checkpoint_keys(out)
    assert before.keys() == after.keys()
    for key in before:
        old, new = weights.read_tensor(before[key], key), weights.read_tensor(after[key], key)
        layer = layers.get((weights.parameter_name(key) or "").removesuffix(".weight"))
        if layer is not None:
            exact = old.double() + layer.scale * (layer.lora_B.double() @ layer.lora_A.double())
            step = torch.finfo(dtype).eps
            assert ((new.double() - exact).abs() <= exact.abs() * (step / 2 + 1e-6) + 1e-6).all(), key
            assert not torch.equal(old, new)
        else:
            assert weights._same_bits(old, new), key
        assert old.dtype == new.dtype
    ends = json.loads((out / "generation_config.json").read_text(encoding="utf-8"))
    assert ends == {**COMPANIONS["generation_config.json"], "eos_token_id": [5, 1, 7]}
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_adapters_are_stored_in_their_dtype_with_what_loading_needs(tmp_path: Path) -> None:
    model = tiny_model().to_dtype(torch.bfloat16)
    add_adapters(model, rank=RANK, alpha=0.5, seed=0)
    out = adapters.export(tmp_path / "a", model=model, source=None, rank=RANK, alpha=0.5, base="Qwen/Tiny")
    stored = load_file(out / adapters.TENSORS)
    assert len(stored) == 2 * len(adapted(model))
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    config = peft.PeftConfig.from_pretrained(out)
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (RANK, 0.5, "Qwen/Tiny")
    assert {path.name for path in out.iterdir()} == {exports.MARK, bases.BASE, adapters.CONFIG, adapters.TENSORS}


def test_a_former_adapter_is_replaced_and_another_folder_is_not(tmp_path: Path) -> None:
    model = tiny_model()
    add_adapters(model, rank=RANK, alpha=ALPHA, seed=0)
    how: dict[str, Any] = {"model": model, "source": None, "rank": RANK, "alpha": ALPHA}
    for _ in range(2):
        adapters.export(tmp_path / "a", **how)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ValueError, match="not an adapter"):
        adapters.export(tmp_path / "mine", **how)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "mine"]


def test_an_adapter_that_reads_back_differently_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    add_adapters(model, rank=RANK, alpha=ALPHA, seed=0)

    def wrong(tensors: dict[str, Tensor], file: Path, **how: Any) -> None:
        save_file({key: -tensor for key, tensor in tensors.items()}, file, **how)

    monkeypatch.setattr(exports, "save_file", wrong)
    with pytest.raises(ValueError, match="differs from the model"):
        adapters.export(tmp_path / "a", model=model, source=None, rank=RANK, alpha=ALPHA)
    assert not (tmp_path / "a").exists()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A source and an adapter of it."""
    source = write_source(tmp_path / "source", kind="text")
    adapter = adapters.export(tmp_path / "adapter", model=trained(source), source=source, rank=RANK, alpha=ALPHA)
    return source, adapter


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "plain LoRA alone, not use_dora"),
        ({"use_rslora": True}, "plain LoRA alone, not use_rslora"),
        ({"modules_to_save": ["lm_head"]}, "plain LoRA alone, not modules_to_save"),
        ({"bias": "all"}, "plain LoRA alone, not bias 'all'"),
        ({"bias": "lora_only"}, "plain LoRA alone, not bias"),
        ({"r": 0}, "plain LoRA alone, not r 0"),
        ({"r": 2.5}, r"plain LoRA alone, not r 2\.5"),
        ({"lora_alpha": float("nan")}, "plain LoRA alone, not lora_alpha nan"),
        ({"r": RANK + 1}, rf"is \[{RANK}, \d+\], adapter_config\.json says r {RANK + 1}"),
        ({"lora_alpha": 10**400}, "not an adapter's configuration"),
        ({"peft_type": "LOHA"}, "plain LoRA alone, not peft_type 'LOHA'"),
        ({"peft_type": None}, "plain LoRA alone, not peft_type"),
        *(
            ({"init_lora_weights": way}, f"plain LoRA alone, not init_lora_weights '{way}'")
            for way in ("pissa", "pissa_niter_4", "olora", "eva", "corda", "loftq", "lora_ga", "another")
        ),
        ({"alora_invocation_tokens": [5]}, "plain LoRA alone, not alora_invocation_tokens"),
        ({"layer_replication": [[0, 4], [2, 4]]}, "plain LoRA alone, not layer_replication"),
        ({"use_qalora": True}, "plain LoRA alone, not use_qalora"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, "plain LoRA alone, not target_parameters"),
        ({"trainable_token_indices": [0]}, "plain LoRA alone, not trainable_token_indices"),
        ({"rank_pattern": {"up_proj": 2}}, "plain LoRA alone, not rank_pattern"),
        ({"alpha_pattern": {"up_proj": 2}}, "plain LoRA alone, not alpha_pattern"),
        ({"exclude_modules": ["up_proj"]}, "plain LoRA alone, not exclude_modules"),
        ({"layers_to_transform": 0}, "plain LoRA alone, not layers_to_transform 0"),
        ({"lora_bias": True}, "plain LoRA alone, not lora_bias"),
        ({"of_a_later_peft": "x"}, "plain LoRA alone, not of_a_later_peft 'x'"),
        ({"r": None}, "not an adapter's configuration"),
    ],
)
def test_what_is_computed_otherwise_is_not_merged(
    tmp_path: Path, pair: tuple[Path, Path], change: dict[str, Any], words: str
) -> None:
    source, adapter = pair
    config = json.loads((adapter / adapters.CONFIG).read_text(encoding="utf-8"))
    (adapter / adapters.CONFIG).write_text(json.dumps({**config, **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        adapters.merge(source, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own call
@pytest.mark.parametrize("initial", [True, False, "gaussian"])
def test_an_adapter_that_peft_wrote_is_merged_as_peft_does(tmp_path: Path, *, initial: Any) -> None:
    source = write_source(tmp_path / "source", kind="text", dtype=torch.float32)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=8, target_modules=["up_proj", "q_proj"], init_lora_weights=initial, lora_dropout=0.1
    )
    model = peft.get_peft_model(whole_class("text").from_pretrained(source), config)
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    out = adapters.merge(source, tmp_path / "adapter", tmp_path / "merged")
    expected = theirs(model.merge_and_unload())
    torch.testing.assert_close(theirs(whole_class("text").from_pretrained(out)), expected, rtol=1e-4, atol=1e-4)
    assert far_apart(expected, ours(loaded(source)))


def without_a_half(key: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    return None if key.endswith("layers.3.mlp.up_proj.lora_B.weight") else (key, tensor)


def of_a_sixth_layer(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    return key.replace("layers.3.", "layers.5."), tensor


def too_wide(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    return key, torch.cat([tensor, tensor], dim=1) if key.endswith("lora_A.weight") else tensor


def of_one_value(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    return key, torch.tensor(1.0) if key.endswith("lora_A.weight") else tensor


def of_whole_numbers(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    return key, tensor.long()


def of_a_norm(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    return key.replace("layers.3.self_attn.o_proj", "norm"), tensor


def of_the_vision_tower(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    return key.replace("model.layers.3.mlp", "model.visual.blocks.0.mlp"), tensor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_a_half, r"one half of model\.layers\.3\.mlp\.up_proj alone"),
        (of_a_sixth_layer, r"lacks model\.layers\.5\..*is it its base model"),
        (too_wide, "belongs to another model"),
        (of_one_value, r"is \[\], adapter_config\.json says r"),
        (of_whole_numbers, "belongs to another model"),
        (of_a_norm, "belongs to another model"),
        (of_the_vision_tower, "is no adapter of a text layer"),
    ],
)
def test_an_adapter_that_does_not_fit_its_source_is_not_merged(
    tmp_path: Path, pair: tuple[Path, Path], change: Any, words: str
) -> None:
    source, adapter = pair
    stored = load_file(adapter / adapters.TENSORS)
    changed = dict(filter(None, (change(key, tensor) for key, tensor in stored.items())))
    save_file(changed, adapter / adapters.TENSORS)
    with pytest.raises(ValueError, match=words):
        adapters.merge(source, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_command_line_merges_and_says_what_is_wrong(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, adapter = pair
    out = tmp_path / "merged"
    command = ["adapters", "merge", "--adapter", str(adapter), "--source", str(source), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert adapters.main() == 0
    assert str(out) in capsys.readouterr().out
    assert weights.checkpoint_keys(out).keys() == weights.checkpoint_keys(source).keys()
    command[-1] = str(source)
    assert adapters.main() == 2
    assert "holds the source" in capsys.readouterr().err
    command[-3] = "random:4B"
    assert adapters.main() == 2
    assert "--source random:4B" in capsys.readouterr().err
