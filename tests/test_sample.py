"""The sample in data/sample: its chats, its tokenizer, its chat template, and that the generator makes them again.

Where QWEN_FIXTURES names a folder with Qwen's own templates and tokenizer, the sample's are compared with them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import unicodedata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

SAMPLE = Path(__file__).resolve().parent.parent / "data" / "sample"
FIXTURES = Path(os.environ.get("QWEN_FIXTURES", "")) if os.environ.get("QWEN_FIXTURES") else None
needs_fixtures = pytest.mark.skipif(
    FIXTURES is None, reason="QWEN_FIXTURES is not set: Qwen's own templates and tokenizer are not here to compare with"
)
QWEN3_5_SPLIT_RULE = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
Chat = list[dict[str, Any]]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_sample", SAMPLE / "make_sample.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_sample"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def splits() -> dict[str, list[dict[str, Any]]]:
    files = {name: SAMPLE / f"{name}_sft-00000-of-00001.parquet" for name in ("train", "test")}
    return {name: pq.read_table(path).to_pylist() for name, path in files.items()}


@pytest.fixture(scope="module")
def all_rows(splits: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return splits["train"] + splits["test"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    template = (SAMPLE / "chat_template.jinja").read_text("utf-8")
    return PreTrainedTokenizerFast(tokenizer_file=str(SAMPLE / "tokenizer.json"), chat_template=template)


def render(tokenizer: PreTrainedTokenizerFast, chat: Chat, **kwargs: Any) -> str:
    return str(tokenizer.apply_chat_template(chat, tokenize=False, **kwargs))


def text_of(row: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in row["messages"])


# The chats


def test_the_files_have_ultrachats_schema() -> None:
    for path in SAMPLE.glob("*.parquet"):
        schema = pq.read_schema(path)
        assert schema.names == ["prompt", "prompt_id", "messages"]
        assert [str(schema.field(name).type) for name in ("prompt", "prompt_id")] == ["string", "string"]
        assert str(schema.field("messages").type) == "list<element: struct<content: string, role: string>>"


def test_there_are_at_least_600_chats_and_a_held_out_part(splits: dict[str, list[dict[str, Any]]]) -> None:
    assert len(splits["train"]) == 640
    assert len(splits["test"]) == 64


def test_prompt_is_the_first_user_message_and_prompt_id_its_hash(all_rows: list[dict[str, Any]]) -> None:
    for row in all_rows:
        assert row["prompt"] == next(m["content"] for m in row["messages"] if m["role"] == "user")
        assert row["prompt_id"] == hashlib.sha256(row["prompt"].encode()).hexdigest()


def test_user_and_assistant_alternate_after_an_optional_system_turn(all_rows: list[dict[str, Any]]) -> None:
    num_system = 0
    for row in all_rows:
        roles = [message["role"] for message in row["messages"]]
        if roles[0] == "system":
            num_system += 1
            del roles[0]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert 4 <= len(row["messages"]) <= 14
        assert all(message["content"].strip() for message in row["messages"])
    assert num_system > 40


def test_lengths_are_shaped_like_ultrachats(
    splits: dict[str, list[dict[str, Any]]], tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [render(tokenizer, row["messages"]) for row in splits["train"]]
    lengths = np.array([len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]])
    assert 1000 < np.median(lengths) < 1200
    assert 0.35 < np.log(lengths[lengths < 8192]).std() < 0.6
    assert 3 <= (lengths > 8192).sum() <= 5
    assert 6.0 < np.mean([len(row["messages"]) for row in splits["train"]]) < 6.8


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("German", r"\b(und|ist|nicht)\b.*\b(die|der|das)\b"),
        ("French", r"\b(pour|avec)\b.*\b(le|la|les|des)\b"),
        ("Spanish", r"\b(cada|los|las)\b.*\b(con|para|el)\b.*[¿¡]|¿"),
        ("Portuguese", r"\b(não|são|vivem|dormem)\b"),
        ("Russian", "[\u0400-\u04ff]{4}"),
        ("Hindi", "[\u0900-\u097f]{3}"),
        ("Chinese", "[\u4e00-\u9fff]{8}"),
        ("Japanese", "[\u3040-\u309f]{4}"),
        ("Arabic", "[\u0621-\u064a]{4}"),
        ("Python", r"```python\n"),
        ("SQL", r"SELECT .*\nFROM "),
        ("shell", r"```bash\n"),
        ("JSON", r"```json\n\{"),
        ("a table", r"\| --- \| --- \|"),
        ("bullets", r"(?m)^- \*\*"),
        ("emoji", "[\U0001f300-\U0001faff]"),
    ],
)
def test_each_split_has(splits: dict[str, list[dict[str, Any]]], split: str, what: str, pattern: str) -> None:
    assert sum(bool(re.search(pattern, text_of(row))) for row in splits[split]) >= 2, what


def test_some_texts_have_combining_marks_and_some_name_control_strings(splits: dict[str, list[dict[str, Any]]]) -> None:
    texts = [text_of(row) for row in splits["train"]]
    assert sum(unicodedata.normalize("NFC", text) != text and "e\u0301" in text for text in texts) >= 3
    naming = [text for text in texts if re.search(r"<\|im_end\|>|<think>|<tool_call>", text)]
    assert 2 <= len(naming) <= 4


def test_held_out_chats_are_not_in_the_training_part(splits: dict[str, list[dict[str, Any]]]) -> None:
    prompts = [row["prompt"] for rows in splits.values() for row in rows]
    assert len(set(prompts)) == len(prompts)
    answers = {
        message["content"] for row in splits["train"] for message in row["messages"] if len(message["content"]) > 250
    }
    held_out = [
        message["content"] for row in splits["test"] for message in row["messages"] if len(message["content"]) > 250
    ]
    assert not answers.intersection(held_out)


def test_code_blocks_of_json_parse_and_tables_are_rectangular(all_rows: list[dict[str, Any]]) -> None:
    num_blocks = 0
    for row in all_rows:
        for message in row["messages"]:
            for block in re.findall(r"```json\n(.*?)\n```", message["content"], re.DOTALL):
                num_blocks += isinstance(json.loads(block), dict)
            for table in re.findall(r"(?:^\|.*\|$\n?)+", message["content"], re.MULTILINE):
                widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().splitlines()}
                assert len(widths) == 1, table
            assert message["content"].count("```") % 2 == 0
    assert num_blocks > 50


def test_no_template_syntax_is_left_in_a_chat(all_rows: list[dict[str, Any]]) -> None:
    for row in all_rows:
        outside_code = re.sub(r"```.*?```|`[^`]*`", "", text_of(row), flags=re.DOTALL)
        outside_code = outside_code.replace('{"name": "weather"}', "")  # a chat about tool calls
        assert not re.search(r"[{}\ue000-\ue0ff]", outside_code), row["prompt"]


def test_the_python_in_the_chats_does_what_it_says(generator: ModuleType) -> None:
    topic = next(topic for topic in generator.read_topics() if topic.name == "en/python")
    for row in topic.rows:
        scope: dict[str, Any] = {}
        exec(row["code"], scope)
        assert repr(eval(f"{row['name']}({row['sample']})", scope)) == row["result"]


def test_the_committed_files_are_small() -> None:
    files = [path for pattern in ("*.*", "text/*.toml") for path in SAMPLE.glob(pattern) if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000


# Making them again


def test_the_generator_makes_the_same_chats_and_the_same_tokenizer(
    generator: ModuleType, splits: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    chats = generator.make_chats()
    assert chats == {name: [row["messages"] for row in rows] for name, rows in splits.items()}
    generator.write_parquet(tmp_path / "test.parquet", chats["test"])
    assert pq.read_table(tmp_path / "test.parquet").to_pylist() == splits["test"]
    assert generator.train_tokenizer(chats["train"]) == (SAMPLE / "tokenizer.json").read_text("utf-8")
    assert json.loads((SAMPLE / "tokenizer_config.json").read_text("utf-8")) == generator.TOKENIZER_CONFIG


def test_one_chat_does_not_depend_on_the_others(generator: ModuleType) -> None:
    topics = generator.read_topics()
    assert generator.draw_chat(topics, "train", 7, 0)[1] == generator.draw_chat(topics, "train", 7, 0)[1]
    assert generator.draw_chat(topics, "train", 7, 0)[1] != generator.draw_chat(topics, "train", 7, 1)[1]


@pytest.mark.parametrize(
    ("template", "outcomes"),
    [
        ("{a|b}{name}", {"a{x|y}", "b{x|y}"}),  # braces and bars of a value are text
        ("{Name} {other|{other}}", {"{x|y} other", "{x|y} z"}),
        ("{Other}!", {"Z!"}),
        ("  plain  ", {"plain"}),
    ],
)
def test_fill_expands_choices_and_fields_from_the_inside_out(
    generator: ModuleType, template: str, outcomes: set[str]
) -> None:
    fields = {"name": "{x|y}", "other": "z"}
    assert {generator.fill(template, fields, generator.Random(seed)) for seed in range(20)} == outcomes


# The tokenizer


def test_the_tokenizer_keeps_qwen3_5s_splitting_rule() -> None:
    spec = json.loads((SAMPLE / "tokenizer.json").read_text("utf-8"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN3_5_SPLIT_RULE}, "behavior": "Isolated", "invert": False}
    assert spec["normalizer"] == {"type": "NFC"}
    assert spec["pre_tokenizer"] == {"type": "Sequence", "pretokenizers": [split, byte_level]}
    assert spec["post_processor"] == byte_level


def test_the_vocabulary_has_every_byte_and_ends_with_the_control_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    spec = json.loads((SAMPLE / "tokenizer.json").read_text("utf-8"))
    added = spec["added_tokens"]
    assert len(tokenizer) == 4096
    assert [token["id"] for token in added] == list(range(4096 - 33, 4096))
    assert len(spec["model"]["vocab"]) == 4096 - 33
    config = json.loads((SAMPLE / "tokenizer_config.json").read_text("utf-8"))
    assert (config["pad_token"], config["eos_token"]) == (added[0]["content"], added[2]["content"])
    assert (config["pad_token"], config["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    units = {len(piece) for piece in spec["model"]["vocab"]}
    assert min(units) == 1
    assert sum(len(piece) == 1 for piece in spec["model"]["vocab"]) == 256


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


@needs_fixtures
def test_the_tokenizers_structure_is_qwens() -> None:
    assert FIXTURES is not None
    theirs = json.loads((FIXTURES / "qwen3_5_tokenizer" / "tokenizer.json").read_text("utf-8"))
    ours = json.loads((SAMPLE / "tokenizer.json").read_text("utf-8"))
    for name in ("version", "truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"):
        assert ours[name] == theirs[name], name
    for name in set(theirs["model"]) - {"vocab", "merges"}:
        assert ours["model"][name] == theirs["model"][name], name
    first = {"ours": ours["added_tokens"][0]["id"], "theirs": theirs["added_tokens"][0]["id"]}
    assert [token | {"id": token["id"] - first["ours"]} for token in ours["added_tokens"]] == [
        token | {"id": token["id"] - first["theirs"]} for token in theirs["added_tokens"]
    ]
    config = json.loads((FIXTURES / "qwen3_5_tokenizer" / "tokenizer_config.json").read_text("utf-8"))
    assert json.loads((SAMPLE / "tokenizer_config.json").read_text("utf-8")) == config


# The chat template


def test_the_template_renders_a_plain_chat(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "See you."},
    ]
    head = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert render(tokenizer, chat) == head + "<|im_start|>assistant\n<think>\n\n</think>\n\nSee you.<|im_end|>\n"
    prompt = render(tokenizer, chat[:-1], add_generation_prompt=True)
    assert prompt == head + "<|im_start|>assistant\n<think>\n"
    prompt = render(tokenizer, chat[:-1], add_generation_prompt=True, enable_thinking=False)
    assert prompt == head + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("chat", "kwargs", "message"),
    [
        ([{"role": "assistant", "content": "Hi"}], {}, "at least one user message"),
        (
            [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "4"}],
            {},
            "must be system, user or assistant",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], {}, "must be a string"),
        ([{"role": "user", "content": None}], {}, "must be a string"),
        ([{"role": "user", "content": "Hi"}, {"role": "system", "content": "x"}], {}, "first message"),
        ([{"role": "user", "content": "Hi"}], {"tools": [{"type": "function", "function": {"name": "f"}}]}, "no tools"),
        (
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            ],
            {},
            "no tool calls",
        ),
    ],
)
def test_the_template_refuses_what_it_does_not_support(
    tokenizer: PreTrainedTokenizerFast, chat: Chat, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        render(tokenizer, chat, **kwargs)


pieces = st.sampled_from(
    ["<think>", "</think>", "\n", " ", "\t", "a", "é", "<tool_response>", "</tool_response>", "\u3000"]
)
contents = st.lists(pieces, max_size=8).map("".join)
optional_reasoning: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}), contents.map(lambda text: {"reasoning_content": text}), st.just({"reasoning_content": None})
)
user_turns = st.builds(lambda content: {"role": "user", "content": content}, contents)
assistant_turns = st.builds(
    lambda content, more: {"role": "assistant", "content": content} | more, contents, optional_reasoning
)
turns = st.lists(st.one_of(user_turns, assistant_turns), min_size=1, max_size=6)
system_turns = st.lists(st.builds(lambda content: {"role": "system", "content": content}, contents), max_size=1)


@needs_fixtures
@settings(deadline=None, max_examples=400)
@given(
    system=system_turns, rest=turns, kwargs=st.sampled_from([{}, {"enable_thinking": False}, {"enable_thinking": True}])
)
def test_any_plain_chat_is_rendered_as_qwens_template_renders_it(
    tokenizer: PreTrainedTokenizerFast, system: Chat, rest: Chat, kwargs: dict[str, Any]
) -> None:
    outcomes = []
    for template in (None, qwen_template()):
        try:
            text = render(tokenizer, system + rest, chat_template=template, add_generation_prompt=True, **kwargs)
        except Exception:  # both refuse a chat without a question, in their own words
            text = "refused"
        outcomes.append(text)
    assert outcomes[0] == outcomes[1]


@needs_fixtures
def test_every_chat_of_the_sample_is_rendered_as_qwens_template_renders_it(
    tokenizer: PreTrainedTokenizerFast, all_rows: list[dict[str, Any]]
) -> None:
    for row in all_rows:
        theirs = render(tokenizer, row["messages"], chat_template=qwen_template())
        assert render(tokenizer, row["messages"]) == theirs


@needs_fixtures
def test_real_chats_are_rendered_as_qwens_template_renders_them(tokenizer: PreTrainedTokenizerFast) -> None:
    assert FIXTURES is not None
    chats = FIXTURES / "ultrachat_1019.parquet"
    if not chats.exists():
        pytest.skip(f"{chats} is not there")
    for messages in pq.read_table(chats)["messages"].to_pylist():
        assert render(tokenizer, messages) == render(tokenizer, messages, chat_template=qwen_template())


def qwen_template() -> str:
    assert FIXTURES is not None
    return (FIXTURES / "chat_templates" / "qwen3_5_think.jinja").read_text("utf-8")
