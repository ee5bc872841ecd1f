"""The tokenizer folder: what is read, what the recipe records, and which tokenizers are refused and why."""

import importlib
import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pipeline.pack import Settings, pack
from pipeline.tokenizer import PROBES, SPLITTING_RULES, open_tokenizer, read_folder
from tests.chatml import PLAIN, tokenizer_json, write_tokenizer


def test_a_folder_is_read_with_its_ids_and_its_template(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [401, 7, null]}')
    files = open_tokenizer(str(tmp_path))
    library = Tokenizer.from_str(tokenizer_json())
    assert files.model is None
    assert files.template == PLAIN
    assert files.pad_token_id == library.token_to_id("<|endoftext|>")
    assert files.eos_token_ids == tuple(dict.fromkeys([library.token_to_id("<|im_end|>"), 401, 7]))
    assert files.vocab_size == library.get_vocab_size(with_added_tokens=True)
    assert files.added_tokens["<think>"] == library.token_to_id("<think>")
    assert files.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_token_lengths_are_those_of_the_text_in_bytes(tmp_path: Path) -> None:
    files = read_folder(write_tokenizer(tmp_path), model=None)
    text = "<|im_start|>user\nhéllo 👋🏽 \u4f60\u597d <think>\n\n</think>\n\n\x00\ufffe<|im_end|>\n"
    ids = Tokenizer.from_str(files.json).encode(text, add_special_tokens=False).ids
    assert files.token_bytes()[ids].sum() == len(text.encode())
    assert files.token_bytes()[files.added_tokens["<|im_start|>"]] == 12


def test_one_character_of_the_template_changes_the_recipe(tmp_path: Path) -> None:
    one = read_folder(write_tokenizer(tmp_path / "a", PLAIN), model=None).recipe({})
    two = read_folder(write_tokenizer(tmp_path / "b", PLAIN + " "), model=None).recipe({})
    assert one["template_sha256"] != two["template_sha256"]
    assert one["tokenizer_sha256"] == two["tokenizer_sha256"]


def test_published_files_are_the_sources_bytes_and_the_template_used(tmp_path: Path) -> None:
    files = read_folder(write_tokenizer(tmp_path), model=None)
    published = files.published()
    assert published["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
    assert published["chat_template.jinja"].decode() == PLAIN


@pytest.mark.parametrize(
    "value", ["{{ 1 }}", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ 1 }}"}]]
)
def test_the_template_may_stand_in_the_config(tmp_path: Path, value: Any) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    assert read_folder(tmp_path, model=None).template == "{{ 1 }}"


def added(content: str, **flags: bool) -> dict[str, Any]:
    """An added token more in tokenizer.json."""
    tokens = json.loads(tokenizer_json())["added_tokens"]
    return {"added_tokens": [*tokens, tokens[-1] | {"id": 999, "content": content} | flags]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "byte-level BPE"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "byte-level BPE"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
        ({"normalizer": {"type": "Lowercase"}}, "NFC"),
        ({"added_tokens": []}, r"<\|im_start\|> and <\|im_end\|> must be added tokens"),
        ({"added_tokens": [{"id": 3}]}, "not what tokenizers writes"),
        ({"model": None}, "not what tokenizers writes"),
        (added("<mask>", lstrip=True), "exactly"),
        (added("<mask>", rstrip=True), "exactly"),
        (added("<mask>", single_word=True), "exactly"),
        (added("<KELVIN>", normalized=True), "normalized"),
        (added("<\u212b>", normalized=True), "normalized"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_with_the_reason(
    tmp_path: Path, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_folder(write_tokenizer(tmp_path, body=body), model=None)


def test_dropout_is_refused(tmp_path: Path) -> None:
    model = json.loads(tokenizer_json())["model"] | {"dropout": 0.1}
    with pytest.raises(ValueError, match="dropout"):
        read_folder(write_tokenizer(tmp_path, body={"model": model}), model=None)


def test_a_normalized_ascii_token_is_accepted(tmp_path: Path) -> None:
    body = added("<my_tag>", normalized=True)
    assert "<my_tag>" in read_folder(write_tokenizer(tmp_path, body=body), model=None).added_tokens


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json in this folder. Name the folder that holds it"),
        ("tokenizer.json", "{", "not JSON"),
        ("tokenizer.json", "[]", "expected a JSON object"),
        ("tokenizer_config.json", "no", "not JSON"),
        ("tokenizer_config.json", '{"pad_token": "<pad>"}', "pad_token '<pad>' is not an added token"),
        ("chat_template.jinja", None, "no chat template .*Put the model's own there as chat_template.jinja"),
    ],
)
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_folder(tmp_path, model=None)


@pytest.mark.parametrize("spec", ["no/such/folder", "/no/such", "nothing here"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_an_error_that_names_local_options(spec: str) -> None:
    with pytest.raises(ValueError, match="--tokenizer data/sample"):
        open_tokenizer(spec)


def test_a_file_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        open_tokenizer(str(write_tokenizer(tmp_path) / "tokenizer.json"))


def test_a_hub_that_does_not_answer_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no route\nto host")

    def not_downloaded(*_: Any, local_files_only: bool, **__: Any) -> str:
        raise FileNotFoundError(f"local only: {local_files_only}")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", not_downloaded)
    with pytest.raises(ValueError, match=r"--tokenizer Qwen/Qwen3.8-27B: .*OSError: no route\).*data/sample"):
        open_tokenizer("Qwen/Qwen3.8-27B")


def test_a_tokenizer_downloaded_before_serves_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_tokenizer(tmp_path))

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no route")

    def cached(*_: Any, local_files_only: bool, **__: Any) -> str:
        assert local_files_only
        return folder

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    assert open_tokenizer("owner/name").model == "owner/name"


def test_a_hub_tokenizer_records_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_tokenizer(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: folder)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: types.SimpleNamespace(sha="c" * 40))
    assert open_tokenizer("owner/name").recipe({"a": 1})["model"] == "owner/name"


def test_qwens_own_tokenizers_are_read(qwen_fixtures: Path) -> None:
    new, old = (open_tokenizer(str(qwen_fixtures / name)) for name in ("qwen3_5_tokenizer", "qwen3_tokenizer"))
    assert (new.vocab_size, new.pad_token_id, new.eos_token_ids) == (248077, 248044, (248046,))
    assert (old.vocab_size, old.pad_token_id, old.eos_token_ids) == (151669, 151643, (151645,))


def with_class(folder: Path, name: str | None) -> Path:
    """The folder of a tokenizer whose tokenizer_config.json names a class."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "tokenizer_class": name}))
    return folder


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_a_class_that_splits_otherwise_is_named_in_a_warning(tmp_path: Path, name: str) -> None:
    sample = shutil.copytree("data/sample", tmp_path / "sample", ignore=shutil.ignore_patterns("*.jsonl"))
    warning = read_folder(with_class(sample, name), model=None).class_warning()
    assert warning is not None
    assert name in warning
    splitters = [
        tokenizer.pre_tokenizer
        for tokenizer in (
            AutoTokenizer.from_pretrained(sample).backend_tokenizer,
            Tokenizer.from_file(str(sample / "tokenizer.json")),
        )
    ]
    by_class, own = ([splitter.pre_tokenize_str(text) for text in PROBES] for splitter in splitters)
    assert by_class != own  # the warning is true


def test_packing_prints_that_warning_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = shutil.copytree("data/sample", tmp_path / "sample")
    tokenizer = with_class(sample, "Qwen2Tokenizer")
    pack(
        Settings(
            source=str(sample), tokenizer=str(tokenizer), limit=5, workers=1, out=tmp_path / "packed",
            cache_dir=tmp_path / "cache",
        )
    )  # fmt: skip
    assert "warning: tokenizer_config.json names the class Qwen2Tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "Qwen3_5Tokenizer", "TokenizersBackend", None])
def test_a_class_that_splits_alike_is_no_reason_to_warn(tmp_path: Path, name: str | None) -> None:
    sample = shutil.copytree("data/sample", tmp_path / "sample", ignore=shutil.ignore_patterns("*.jsonl"))
    assert read_folder(with_class(sample, name), model=None).class_warning() is None


def test_the_classes_rules_are_those_of_transformers() -> None:
    for name, module in (("Qwen2Tokenizer", "qwen2"), ("Qwen3_5Tokenizer", "qwen3_5")):
        path = f"transformers.models.{module}.tokenization_{module}"
        assert SPLITTING_RULES[name] == importlib.import_module(path).PRETOKENIZE_REGEX


def test_the_real_vocabulary_under_the_older_class_is_warned_of(tmp_path: Path, qwen_fixtures: Path) -> None:
    folder = shutil.copytree(qwen_fixtures / "qwen3_5_tokenizer", tmp_path / "tokenizer")
    assert read_folder(folder, model=None).class_warning() is None
    assert "Qwen2Tokenizer" in str(read_folder(with_class(folder, "Qwen2Tokenizer"), model=None).class_warning())
    loaded, library = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert any(loaded(text)["input_ids"] != library.encode(text).ids for text in PROBES)
