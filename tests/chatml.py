"""A throw-away tokenizer, small ChatML templates of our own, and what tests of rendering and encoding ask of both.

There is one template for each way that templates treat reasoning; Qwen's own are read from QWEN_FIXTURES.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pipeline.encode import Document, Encoder
from pipeline.manifest import REJECT_REASONS
from pipeline.render import Renderer, Rendering
from pipeline.source import Conversation, Reject
from pipeline.tokenizer import TokenizerFiles, read_folder

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTROL = SPECIAL + NOT_SPECIAL

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes every message as it is; reads no reasoning, no tools."""

TOOLS = """
{%- if tools %}{{- '<|im_start|>system\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- elif m.role in ('system', 'user') %}
        {%- set content = m.content if m.content is string else m.content | map(attribute='text') | join %}
        {{- '<|im_start|>' + m.role + '\n' + content | trim + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content if m.content is string else (m.content or []) | map(attribute='text') | join %}
        {%- set content, reasoning = content | trim, (m.reasoning_content or '') | trim %}
        {%- if SPLIT and not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set content = content.split('</think>')[-1] | trim %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.last %}{{- '<think>\n' + reasoning + '\n</think>\n\n' }}{%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\n<tool_call>\n' + call.name + ' ' + call.arguments | tojson + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('unknown role') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
SPLITS = TOOLS.replace("SPLIT", "true")
"""Takes reasoning out of the content itself, as Qwen3 does; the last answer alone keeps it."""
FIELD = TOOLS.replace("SPLIT", "false")
"""Reads reasoning_content alone, as Qwen3.8 does."""
OWN = {"plain": PLAIN, "splits": SPLITS, "field": FIELD}
QWEN = ("qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")

TURN = {"role": "assistant", "content": "hi"}


@cache
def tokenizer_json() -> str:
    """A byte-level BPE with Qwen's kind of splitting, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    rule = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rule), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = [
        "system user assistant hello hello there friend, how are you?\n\nI am <fine>.\n\n",
        "think tool_call im_end",
    ]
    tokenizer.train_from_iterator(corpus * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    return str(tokenizer.to_str())


def write_tokenizer(folder: Path, template: str = PLAIN, *, body: dict[str, Any] | None = None) -> Path:
    """Write a tokenizer folder; ``body`` replaces entries of its tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer_json()) | (body or {})))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text(template)
    return folder


def make_encoder(folder: Path, template: str = PLAIN, **settings: Any) -> Encoder:
    """An encoder on the throw-away tokenizer."""
    files: TokenizerFiles = read_folder(write_tokenizer(folder, template), model=None)
    return Encoder(files, **({"template_kwargs": {}, "targets": "assistant"} | settings))


def chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """user, assistant, user, assistant ..., perhaps after a system message."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


def encode_one(encoder: Encoder, messages: Any, tools: Any = None, *, doc_id: int = 1) -> Document | Reject:
    """The Document or the rejection of one chat."""
    found = encoder.encode([Conversation(doc_id=doc_id, messages=messages, tools=tools)])
    return next(item for item in found if isinstance(item, Document) or item.what == "rejected")


def documents(encoder: Encoder, chats: list[Any], *, escaped: bool = False) -> list[Document]:
    """One Document a chat, nothing rejected; ``escaped`` allows chats with control strings."""
    found = encoder.encode([Conversation(doc_id=i, messages=messages) for i, messages in enumerate(chats)])
    for item in found:
        assert isinstance(item, Document) or (escaped and item.what == "escaped"), item
    return [item for item in found if isinstance(item, Document)]


def mask_by_offsets(tokenizer: Tokenizer, text: str) -> list[bool]:
    """Targets derived from character offsets, for chats without reasoning.

    They are the answers, past an empty think block, to the end of turn.
    """
    span = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)", re.DOTALL)
    inside = np.zeros(len(text) + 1, bool)
    for match in span.finditer(text):
        inside[slice(*match.span(1))] = True
    return [bool(inside[start]) for start, _ in tokenizer.encode(text, add_special_tokens=False).offsets]


@cache
def library(tokenizer: str) -> Tokenizer:
    """The library's tokenizer from the text of a tokenizer.json."""
    return Tokenizer.from_str(tokenizer)


def decoded(files: TokenizerFiles, ids: Any) -> str:
    """Text of token ids, control tokens included."""
    return str(library(files.json).decode([int(i) for i in ids], skip_special_tokens=False))


def target_texts(files: TokenizerFiles, document: Document) -> list[str]:
    """Decoded runs of targets."""
    runs: list[list[int]] = []
    previous = False
    for token, is_target in zip(document.input_ids.tolist(), document.loss_mask.tolist(), strict=True):
        if is_target:
            runs[-1].append(token) if previous else runs.append([token])
        previous = is_target
    return [decoded(files, run) for run in runs]


def after(*messages: Any) -> list[Any]:
    """A user's message and then these."""
    return [{"role": "user", "content": "hello"}, *messages]


def renderer(template: str, **more: Any) -> Renderer:
    """A renderer that knows the throw-away tokenizer's control strings."""
    arguments: dict[str, Any] = {"special_tokens": {}, "control_strings": CONTROL, "template_kwargs": {}}
    return Renderer(template, **(arguments | more))


def rendered(found: Renderer, messages: Any, tools: Any = None, *, doc_id: int = 1) -> Rendering:
    """The rendering of a chat that is one."""
    out = found.render(Conversation(doc_id=doc_id, messages=messages, tools=tools))
    assert isinstance(out, Rendering), out
    return out


def refused(found: Renderer, messages: Any, tools: Any = None) -> tuple[str, str]:
    """Reason and detail of a chat's rejection."""
    out = found.render(Conversation(doc_id=1, messages=messages, tools=tools))
    assert isinstance(out, Reject), out
    assert out.what == "rejected"
    assert out.reason in REJECT_REASONS
    return out.reason, out.detail


def restored(found: Renderer, rendering: Rendering) -> str:
    """The text of a rendering, what the chat contains put back."""
    return "".join(part for part, _ in found.segments(rendering))


def by_transformers(template: str, messages: Any, tools: Any = None, **kwargs: Any) -> str:
    """The text that apply_chat_template gives."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return str(render_jinja_template([messages], tools=tools, chat_template=template, **kwargs)[0][0])


@cache
def qwen_template(folder: Path, name: str) -> str:
    """Source of one of Qwen's templates in the folder QWEN_FIXTURES."""
    return (folder / "chat_templates" / f"{name}.jinja").read_text("utf-8")
