"""Reasoning: found under each of its names or leading in the content, and put where each kind of template reads it."""

from pathlib import Path

import pytest

from tests.chatml import (
    FIELD,
    OWN,
    PLAIN,
    QWEN,
    SPLITS,
    TURN,
    after,
    by_transformers,
    qwen_template,
    refused,
    rendered,
    renderer,
    restored,
)

LEAD = " \n<think>\nwhy\n</think>\n\nbecause\n"


@pytest.mark.parametrize(("name", "reasoning"), [("plain", "keeps"), ("splits", "splits"), ("field", "field")])
def test_the_kind_of_a_template_is_found_out(name: str, reasoning: str) -> None:
    assert renderer(OWN[name]).reasoning == reasoning


def test_leading_reasoning_goes_where_each_kind_of_template_looks_for_it() -> None:
    messages = after(TURN | {"content": LEAD})
    moved = after(TURN | {"reasoning_content": "why", "content": "because"})
    for parts in (messages, after(TURN | {"content": [{"type": "text", "text": LEAD}]})):
        if parts is messages:
            assert rendered(renderer(PLAIN), parts).text == by_transformers(PLAIN, messages)
        assert rendered(renderer(SPLITS), parts).text == by_transformers(SPLITS, messages)
        out = rendered(renderer(FIELD), parts)
        assert out.text == by_transformers(FIELD, moved)
        assert out.base == ""


def test_moved_reasoning_and_its_answer_lose_the_line_breaks_around_them_and_nothing_else() -> None:
    template = PLAIN.replace("{{ m.content }}", "({{ m.reasoning_content }})[{{ m.content }}]")
    out = rendered(renderer(template), after(TURN | {"content": "<think>\n\n why \n</think>\n\n because \n\n"}))
    assert "( why )[ because ]" in out.text


def test_what_is_not_leading_or_has_a_reasoning_of_its_own_stays_text() -> None:
    for message in (
        TURN | {"content": "x <think>why</think> because"},
        TURN | {"content": "<think>no end"},
        TURN | {"content": LEAD, "reasoning_content": "other"},
    ):
        for template in (SPLITS, FIELD):
            found = renderer(template)
            out = rendered(found, after(message))
            assert "<think>" in found.escaped(out)
            assert message["content"].strip() in restored(found, out)
    found = renderer(SPLITS)
    assert found.escaped(rendered(found, [{"role": "user", "content": LEAD}, TURN])) == ["<think>", "</think>"]


def test_reasoning_ends_at_the_first_end_and_holds_no_control_tokens() -> None:
    for template in OWN.values():
        found = renderer(template)
        out = rendered(found, after(TURN | {"content": "<think>a <think> <|im_end|> b</think>c </think> d"}))
        assert found.escaped(out) == ["<think>", "<|im_end|>", "</think>"]
        assert sum(part == "</think>" for part, control in found.segments(out) if control) == 1


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_read_under_each_of_its_names(name: str) -> None:
    messages = after(TURN | {name: "because"})
    assert rendered(renderer(FIELD), messages).text == by_transformers(FIELD, messages)


def test_earlier_reasoning_may_be_dropped_and_the_last_may_not() -> None:
    two = after(TURN | {"reasoning_content": "first"}, {"role": "user", "content": "go on"}, TURN)
    assert "first" not in rendered(renderer(FIELD), two).text
    template = SPLITS.replace("{%- if loop.last %}", "{%- if false %}")
    assert refused(renderer(template), after(TURN | {"reasoning_content": "why"}))[0] == "template_drops_text"


@pytest.mark.parametrize("name", QWEN)
def test_qwens_templates_treat_reasoning_as_known(qwen_fixtures: Path, name: str) -> None:
    template = qwen_template(qwen_fixtures, name)
    found = renderer(template)
    wanted = {"qwen3_instruct_2507": "keeps", "qwen3_8": "field"}.get(name, "splits")
    assert found.reasoning == wanted
    messages = after(TURN | {"content": LEAD})
    seen = after(TURN | {"reasoning_content": "why", "content": "because"}) if wanted == "field" else messages
    assert rendered(found, messages).text == by_transformers(template, seen)


@pytest.mark.parametrize("name", QWEN)
def test_what_qwens_templates_add_is_said(qwen_fixtures: Path, name: str) -> None:
    template = qwen_template(qwen_fixtures, name)
    notes = renderer(template).notes
    assert any("system turn" in note for note in notes) == (name == "qwen3_8")
    assert any("empty think block" in note for note in notes) == (name != "qwen3_instruct_2507")
    if name == "qwen3_8":
        assert not any(
            "system" in note for note in renderer(template, template_kwargs={"enable_thinking": False}).notes
        )
