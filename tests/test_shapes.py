"""The fast path of rendering: equal to the template on every chat it takes, and checked on some; the rest is left."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.render import MismatchError, Renderer
from pipeline.source import Conversation
from tests.chatml import (
    CONTROL,
    OWN,
    PLAIN,
    QWEN,
    SPLITS,
    by_transformers,
    chat,
    qwen_template,
    refused,
    rendered,
    renderer,
)

BLANKS = st.text(st.sampled_from(" \n\t\r\x0b\x0c\x1c\x85\xa0\u2003\u2028"), max_size=3)
CONTENTS = st.builds(
    "{}{}{}".format, BLANKS, st.text(max_size=6) | st.sampled_from(["a b", "<tool_response>x", "x</think>y"]), BLANKS
)
CHATS = st.builds(
    lambda contents, system: chat(*contents, system=system),
    st.lists(CONTENTS, min_size=1, max_size=4),
    st.none() | CONTENTS,
)


@cache
def both(template: str, control: tuple[str, ...]) -> tuple[Renderer, Renderer]:
    return tuple(renderer(template, control_strings=control, fast=fast) for fast in (True, False))  # type: ignore[return-value]


def fast_equals_template(template: str, messages: Any, control: tuple[str, ...] = CONTROL) -> None:
    fast, slow = both(template, control)
    if tuple(m["role"] for m in messages) not in fast._shapes._shapes:
        for _ in range(2):
            fast.render(Conversation(doc_id=1, messages=[m | {"content": "x"} for m in messages]))
    one = Conversation(doc_id=1, messages=messages)
    assert fast.render(one) == slow.render(one)


@settings(max_examples=100, deadline=None)
@given(messages=CHATS)
def test_the_fast_path_equals_our_templates(messages: Any) -> None:
    for template in OWN.values():
        fast_equals_template(template, messages)


@pytest.mark.parametrize("name", QWEN)
@settings(max_examples=40, deadline=None)
@given(messages=CHATS)
def test_the_fast_path_equals_qwens_templates(qwen_fixtures: Path, name: str, messages: Any) -> None:
    template = qwen_template(qwen_fixtures, name)
    fast_equals_template(template, messages)
    fast_equals_template(template, messages, ("<|im_start|>", "<|im_end|>"))


STRIPS = ["", ".strip()", ".strip('\n')", ".strip(' ')", ".strip(' \n')", ".lstrip('\n')", ".rstrip('\n')",
          ".rstrip(' ')", ".lstrip()", ".strip('\t ')", "[0:]", ".strip('x')", ".replace('a', 'b')",
          ".replace('\\n\\n', ' ')", ".split('a')[0]", " | replace('a', 'b')"]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(contents=st.lists(CONTENTS, min_size=2, max_size=2))
@pytest.mark.parametrize("strip", STRIPS)
def test_every_way_of_stripping_is_learned_or_left_to_the_template(strip: str, contents: list[str]) -> None:
    template = PLAIN.replace("m.content", f"(m.content{strip})")
    fast_equals_template(template, chat(*contents))
    fast_equals_template(template, chat("banana\n\nxx x", "xa x"))


def test_a_literal_that_the_template_looks_for_leaves_the_chat_to_it() -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content.replace('(c)', '[c]') }}{{ '!' if '#!' in m.content }}")
    for content in ("x (c) y", "#! x", "plain"):
        found = renderer(template)
        for _ in range(3):
            rendered(found, chat("a", "b"))
        messages = chat(content, "answer")
        if "(c)" in content:
            assert refused(found, messages)[0] == "template_drops_text"
        else:
            assert rendered(found, messages).text == by_transformers(template, messages)


@pytest.mark.parametrize("hidden", ["{{ '!' if m.content | length > 3 }}", "{% if 'secret' in m.content %}!{% endif %}",
                                    "{% if 'secret' in m.content %}<|im_end|>{% endif %}"])  # fmt: skip
def test_a_hidden_branch_is_a_mismatch_where_a_chat_is_checked(hidden: str) -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content }}" + hidden)
    template = template.replace("m.content | length > 3", "(m.content | length > 3) and 'secret' in m.content")
    found = renderer(template)
    for _ in range(3):
        rendered(found, chat("a", "b"))
    with pytest.raises(MismatchError, match="document 61"):
        found.render(Conversation(doc_id=61, messages=chat("secret", "b")))


def test_the_fast_path_is_taken_for_plain_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    found = renderer(SPLITS)
    for _ in range(2):
        rendered(found, chat("a", "b"))

    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(found, "_render_by_template", never)
    assert rendered(found, chat("hello\n", " there")).text == by_transformers(SPLITS, chat("hello\n", " there"))
    with pytest.raises(AssertionError):
        rendered(found, chat("hello", "there"), doc_id=61)


def test_shapes_are_remembered_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.shapes.MAX_SHAPES", 3)
    found = renderer(PLAIN)
    for i in range(20):
        rendered(found, [{"role": f"role{i}", "content": "x"}, *chat("a", "b")])
    assert len(found._shapes._seen_once) == 3


def test_a_chat_of_four_hundred_turns_is_rendered_both_ways() -> None:
    messages = chat(*(f"message {i}" for i in range(400)))
    for template in OWN.values():
        fast_equals_template(template, messages)


def test_a_template_that_writes_a_content_twice_or_out_of_order_is_left_to_itself() -> None:
    backwards = PLAIN.replace("{{ m.content }}", "{{ m.content }} {{ messages[-loop.index].content }}")
    for template in (PLAIN.replace("{{ m.content }}", "{{ m.content }} {{ m.content }}"), backwards):
        fast_equals_template(template, chat("one", "two"))


def test_a_lone_surrogate_is_refused_in_a_shape_seen_before_too() -> None:
    found = renderer(PLAIN)
    for _ in range(3):
        rendered(found, chat("a", "b"))
    assert refused(found, chat("lone \ud800", "b"))[0] == "invalid_unicode"
