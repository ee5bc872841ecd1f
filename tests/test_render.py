"""What a chat must be: chats of many forms are rendered as apply_chat_template does, others refused with a reason.

The reasons are those of the closed list, the details never quote the data, and no text of a chat is dropped unnoticed.
"""

from typing import Any

import pytest

from pipeline import render
from pipeline.source import Conversation, Reject
from tests.chatml import FIELD, PLAIN, SPLITS, TURN, after, by_transformers, chat, refused, rendered, renderer

TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city"}}


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no_messages"), (None, "no_messages"), ("", "no_messages"),
        ("text", "bad_type"), ({"role": "user"}, "bad_type"), (3, "bad_type"), ([None], "bad_type"),
        (after("hi"), "bad_type"), (after({"content": "no role"}), "bad_type"), (after({"role": None}), "bad_type"),
        (after({"role": ["user"], "content": "x"}), "bad_type"), (after(TURN | {"content": 3}), "bad_type"),
        (after({"role": "assistant", "content": {"text": "x"}}), "bad_type"),
        (after(TURN | {"content": [3]}), "bad_type"), (after(TURN | {"content": [None]}), "bad_type"),
        (after(TURN | {"content": [{"type": "text"}]}), "bad_type"),
        (after(TURN | {"content": [{"type": "image", "image": "x.png", "text": ""}]}), "bad_type"),
        (after(TURN | {"content": [{"type": "text", "text": "x", "image_url": "y"}]}), "bad_type"),
        (after(TURN | {"content": [{"type": "file", "text": "x"}]}), "bad_type"),
        (after(TURN | {"reasoning_content": ["a"]}), "bad_type"), (after(TURN | {"thinking": {"a": 1}}), "bad_type"),
        (after(TURN | {"tool_calls": "f"}), "bad_type"), (after(TURN | {"tool_calls": ["f"]}), "bad_type"),
        (after(TURN | {"tool_calls": [{"function": {"arguments": {}}}]}), "bad_type"),
        (after(TURN | {"tool_calls": [{"name": "f", "arguments": [1]}]}), "bad_type"),
        (after(TURN | {"tool_calls": [{"name": "f", "arguments": "[1]"}]}), "bad_type"),
        (after(TURN | {"tool_calls": [{"name": "f", "arguments": deep(60)}]}), "bad_type"),
        (after(TURN | {"tool_calls": [{"name": "f", "arguments": deep(10_000)}]}), "bad_type"),
        (after(TURN | {"tool_calls": [{"name": "f", "arguments": '{"a":' * 100_000}]}), "bad_type"),
        (after(TURN | {"tool_calls": [{"name": "f", "arguments": "{a: 1}"}]}), "invalid_json"),
        (after(TURN | {"content": "lone \ud800"}), "invalid_unicode"),
        (after({"role": "robot", "content": "beep"}), "unknown_role"),
        (after(TURN | {"role": "assistant\nobey"}), "unknown_role"),
        (after(TURN | {"content": [{"text": "a"}, {"text": "<|im_end|>"}], "function_call": {"name": "gone"}}),
         "template_drops_text"),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_rejected_with_its_reason(messages: Any, reason: str) -> None:
    assert refused(renderer(SPLITS), messages)[0] == reason


@pytest.mark.parametrize(
    ("tools", "reason"),
    [(3, "bad_type"), (0, "bad_type"), (False, "bad_type"), ({}, "bad_type"), (["f"], "bad_type"), ("[3]", "bad_type"),
     ("{", "invalid_json"), ('[{"a":' * 100_000, "bad_type")],
)  # fmt: skip
@pytest.mark.parametrize("doc_id", [0, 1])
def test_tools_that_are_none_are_rejected_whatever_path_the_chat_takes(tools: Any, reason: str, doc_id: int) -> None:
    found = renderer(SPLITS)
    for _ in range(3):
        rendered(found, chat("a", "b"))
    out = found.render(Conversation(doc_id=doc_id, messages=chat("a", "b"), tools=tools))
    assert isinstance(out, Reject)
    assert out.reason == reason


@pytest.mark.parametrize("tools", [None, [], "", " \n", "[]", "null"])
def test_no_tools_come_in_many_forms(tools: Any) -> None:
    found = renderer(SPLITS)
    for _ in range(3):
        assert rendered(found, chat("a", "b"), tools, doc_id=0).text == by_transformers(SPLITS, chat("a", "b"))


def test_details_are_our_own_words_and_never_the_datas() -> None:
    secret = "s3cr3t"
    found = renderer(SPLITS)
    for messages in (after(secret), after({"role": secret, "content": secret}), [{secret: secret}], secret):
        assert secret not in refused(found, messages)[1]


def test_blank_contents_users_in_a_row_and_an_assistant_first_are_chats() -> None:
    found = renderer(PLAIN)
    for messages in (
        chat("", ""),
        chat(" \n ", "\t"),
        [{"role": "user", "content": "a"}, *chat("b", "c")],
        [{"role": "assistant", "content": "a"}, *chat("b", "c")],
        [{"role": "user", "content": "alone"}],
    ):
        assert rendered(found, messages).text == by_transformers(PLAIN, messages)


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        # Dropped texts that stand in the rendering all the same, elsewhere or in the template's own words.
        (PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string }}"),
         [{"role": "user", "content": [{"type": "text", "text": "assistant"}]}, TURN], None),
        (PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string }}"),
         after(TURN, {"role": "user", "content": [{"type": "text", "text": "im"}]}), None),
        (PLAIN, after(TURN, TURN | {"content": "", "tool_calls": [{"name": "a", "arguments": {}}]}), None),
        (PLAIN, after(TURN | {"reasoning_content": "because"}), None),
        (PLAIN, after(TURN | {"reasoning": "because"}), None),
        (PLAIN, [{"role": "user", "content": "why not"}, TURN | {"reasoning": "why"}], None),
        (PLAIN, chat("a", "b"), [TOOL]),
        (PLAIN.replace("for m in messages", "for m in messages if m.role != 'system'"),
         chat("spoken again", "b", system="spoken"), None),
        (PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string else m.content[0].text }}"),
         after(TURN | {"content": [{"text": "twice"}, {"text": "twice"}]}), None),
        (PLAIN.replace("{{ m.content }}", "{{ m.content[:5] }}"), chat("a", "longer than five"), None),
        (PLAIN.replace("for m in messages", "for m in messages if m.role != 'tool'"),
         after(TURN, {"role": "tool", "content": "dropped"}), None),
    ],
)  # fmt: skip
def test_a_text_that_the_template_drops_is_noticed(template: str, messages: Any, tools: Any) -> None:
    assert refused(renderer(template), messages, tools)[0] == "template_drops_text"


def test_arguments_written_with_json_escapes_are_no_dropped_text() -> None:
    template = SPLITS.replace("call.arguments | tojson", "call.arguments | tojson(true)")
    call = {"name": "weather", "arguments": {"city": "Köln"}}
    text = rendered(renderer(template), after({"role": "assistant", "tool_calls": [call]})).text
    assert 'weather {"city": "K\\u00f6ln"}' in text


def test_null_members_of_a_content_part_are_none() -> None:
    parts = [{"type": "text", "text": "six", "image": None}]
    assert rendered(renderer(SPLITS), after(TURN | {"content": parts})).text == by_transformers(
        SPLITS, after(TURN | {"content": "six"})
    )


def test_only_an_assistants_reasoning_is_looked_at() -> None:
    messages = [{"role": "user", "content": "a", "thinking": ["b"]}, TURN]
    assert rendered(renderer(FIELD), messages).text == by_transformers(FIELD, messages)


def test_an_unknown_role_that_the_template_drops_is_named() -> None:
    template = PLAIN.replace("for m in messages", "for m in messages if m.role != 'robot'")
    assert refused(renderer(template), after(TURN, {"role": "robot", "content": "x"}))[0] == "unknown_role"


def test_a_rendering_that_is_no_sequence_of_turns_is_refused() -> None:
    template = PLAIN.replace("<|im_end|>\n", "<|im_end|>{{ '' if m.content == 'odd' else '\n' }}")
    assert refused(renderer(template), chat("a", "odd"))[0] == "template_refuses"


def test_ids_of_tool_calls_need_not_be_rendered() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    flat = {"id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
    for tool_call in (call, flat):
        text = rendered(renderer(SPLITS), after({"role": "assistant", "tool_calls": [tool_call]})).text
        assert '<tool_call>\nweather {"city": "Rome"}\n</tool_call>' in text


@pytest.mark.parametrize("arguments", [None, "", "  ", {}, "{}"])
def test_a_tool_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": arguments}}]}
    assert "now {}" in rendered(renderer(SPLITS), after(message)).text


def test_consecutive_tool_results_are_one_turn_of_role_tool() -> None:
    messages = after(
        TURN | {"tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}, TURN,
    )  # fmt: skip
    out = rendered(renderer(SPLITS), messages, [TOOL])
    assert out.roles == tuple(render.ROLES[role] for role in ("system", "user", "assistant", "tool", "assistant"))
    assert [skip >= 0 for skip in out.skips] == [False, False, True, False, True]


def test_a_blank_system_message_may_be_left_out_and_a_spoken_one_may_not() -> None:
    template = PLAIN.replace("for m in messages", "for m in messages if m.content or m.role != 'system'")
    assert len(rendered(renderer(template), chat("a", "b", system="")).roles) == 2
    template = PLAIN.replace("for m in messages", "for m in messages if m.role != 'system'")
    assert refused(renderer(template), chat("a", "b", system="spoken"))[0] == "template_drops_text"
