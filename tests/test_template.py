"""Templates: those that cannot serve are refused at the start, and the Jinja environment is transformers' own."""

from pathlib import Path

import pytest

from pipeline.template import ChatTemplate, parse_variables
from tests.chatml import PLAIN, by_transformers, chat, qwen_template, rendered, renderer

# Refusals at the start


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}",
            r"not ChatML-like: expected .*\[user\]",
        ),
        (PLAIN.replace("<|im_end|>\n", "<|im_end|>"), "not ChatML-like"),
        ("<s>" + PLAIN, "not ChatML-like"),
        (PLAIN.replace("{{ m.content }}", ""), "not ChatML-like"),
        (PLAIN + "{{ '<|im_start|>assistant\n' }}", "not ChatML-like"),
        ("", "not ChatML-like"),
        ("{% for", "the chat template, line 1: .*not valid Jinja.*Correct it there"),
        ("{{ 1 }}\n{{ 1 | nonsense }}", "the chat template, line 2: .*not valid Jinja.*nonsense"),
        ("{{ raise_exception('set a mood') }}", "fails on a plain chat.*set a mood"),
        ("{{ missing.attribute.of }}", "fails on a plain chat.*UndefinedError"),
        ("{{ strftime_now('%d') }}" + PLAIN, "strftime_now"),
        ("{% if tools %}{{ strftime_now('%d') }}{% endif %}" + PLAIN, "strftime_now"),
        ("{% if messages[0].role == 'system' %}{{ strftime_now('%d') }}{% endif %}" + PLAIN, "strftime_now"),
        ("{% if not tools and messages[0].role == 'system' %}{{ strftime_now() }}{% endif %}" + PLAIN, "strftime_now"),
    ],
)
def test_a_template_that_cannot_serve_is_refused_at_the_start_with_the_reason(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        renderer(template)


def test_a_date_asked_for_later_ends_the_run_and_rejects_nothing() -> None:
    found = renderer("{% if messages|length > 5 %}{{ strftime_now('%d') }}{% endif %}" + PLAIN)
    with pytest.raises(ValueError, match="strftime_now"):
        rendered(found, chat(*"abcdef"))


def test_a_guarded_date_is_no_reason_to_refuse() -> None:
    guarded = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}" + PLAIN
    assert rendered(renderer(guarded), chat("a", "b")).text == by_transformers(PLAIN, chat("a", "b"))


def test_wrong_template_kwargs_are_said_at_the_start(qwen_fixtures: Path) -> None:
    template = qwen_template(qwen_fixtures, "qwen3_8")
    with pytest.raises(ValueError, match=r"Unexpected reasoning effort bogus.*--template-kwargs"):
        renderer(template, template_kwargs={"reasoning_effort": "bogus"})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_variable_that_is_the_chats_own_is_refused_by_its_name(name: str) -> None:
    for refused in (lambda: parse_variables(f'{{"a": 1, "{name}": []}}'), lambda: ChatTemplate(PLAIN, {name: []})):
        with pytest.raises(ValueError, match=rf"--template-kwargs: {name} cannot be set"):
            refused()


def test_every_other_name_reaches_the_template() -> None:
    source = "{{ documents[0] }}{{ environment }}{{ args }}{{ kwargs }}"
    variables = {"documents": ["a"], "environment": "b", "args": "c", "kwargs": "d", "self": "e"}
    assert ChatTemplate(source, variables)(chat("a", "b")) == "abcd"


def test_a_special_token_need_not_be_read_and_may_be_set_where_it_is() -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert ChatTemplate("{{ bos_token }}", {}, special_tokens=tokens)([]) == "<s>"
    assert ChatTemplate("{{ bos_token }}", {"bos_token": "x"}, special_tokens=tokens)([]) == "x"
    assert "never reads eos_token" in str(
        ChatTemplate("{{ bos_token }}", {"eos_token": "x"}, special_tokens=tokens).unread
    )


@pytest.mark.parametrize(
    ("source", "offered"),
    [
        ("{{ messages }}{{ tools }}{{ add_generation_prompt }}", "besides the chat it reads nothing"),
        ("{{ mood }}{{ range(raise_exception('x')) }}", "it reads mood; is"),
        ("{% if mood is defined and strftime_now is defined %}{% endif %}", "it reads mood; is"),
        ("{% if not date is defined %}{% set date = 1 %}{% endif %}{{ date }}", "it reads date; is"),
        ("{% set date = date | default(1) %}{{ date }}", "it reads date; is"),
        (
            "{% for m in messages %}{% if m %}{% set x = m %}{% endif %}{{ x }}{% endfor %}",
            "besides the chat it reads nothing",
        ),
        ("{% macro f(a=first) %}{{ a }}{{ second }}{% endmacro %}{{ f() }}", "it reads first, second; is"),
        (
            "{% generation %}{{ mood }}{% endgeneration %}{% block b %}{{ more }}{% endblock %}",
            "it reads mood, more; is",
        ),
    ],
)
def test_a_variable_that_is_never_read_is_told_with_those_that_are(source: str, offered: str) -> None:
    unread = ChatTemplate(source, {"moood": False}, origin="here").unread
    assert unread
    assert unread.startswith("--template-kwargs: the chat template never reads moood (here); ")
    assert offered in unread


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", ["enable_thinking"]),
        ("qwen3_instruct_2507", []),
        ("qwen3_5_think", ["add_vision_id", "enable_thinking"]),
        ("qwen3_5_nothink", ["add_vision_id", "enable_thinking"]),
        ("qwen3_6", ["add_vision_id", "enable_thinking", "preserve_thinking"]),
        ("qwen3_8", ["add_vision_id", "enable_thinking", "preserve_thinking", "reasoning_effort"]),
    ],
)
def test_qwens_templates_read_their_own_options_and_no_others(
    qwen_fixtures: Path, name: str, options: list[str]
) -> None:
    template = qwen_template(qwen_fixtures, name)
    values = {option: "low" if option == "reasoning_effort" else True for option in options}
    assert ChatTemplate(template, values).unread is None
    unread = str(ChatTemplate(template, {"enable_thinkin": False, **values}).unread)
    assert "never reads enable_thinkin (" in unread
    wanted = f"{', '.join(options)}; is" if options else "nothing"
    assert f"besides the chat it reads {wanted}" in unread


# The Jinja environment


@pytest.mark.parametrize(
    "source",
    [
        "{{ {'b': '<é>&', 'a': [1, none, true, 1.5]} | tojson }}",
        "{{ {'b': 'é', 'a': 1} | tojson(true) }}{{ {'b': 'é', 'a': 1} | tojson(indent=2, sort_keys=true) }}",
        "{{ [1, 2] | tojson(separators=(',', ':')) }}",
        "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% if loop.index == 3 %}"
        "{% break %}{% endif %}{% endfor %}",
        "{% set x = 1 %}a {% generation %}\n  b{% set x = 2 %} {{ x }}{% endgeneration %}\n {{ x }} c",
        "{% for m in messages %}{%- generation -%} {{ m.content }}{{ loop.index }} {%- endgeneration -%}{% endfor %}",
        "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}",
        "  {% if true %}\n    x\n  {% endif %}\n{{ documents is none }}{{ tools is none }}\n\n",
        "{{ messages[0] | items | list | length }}{{ add_generation_prompt }}{{ mood | default('calm') }}",
        "{% macro f(x) %}{{ x | trim }}{% endmacro %}{{ f(' a\u00a0') }}{{ messages[::-1] | length }}\r\n",
    ],
)
def test_the_environment_is_that_of_transformers(source: str) -> None:
    messages = chat("a", "b", "c", "d")
    assert ChatTemplate(source, {"mood": "gay"})(messages) == by_transformers(source, messages, mood="gay")


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('x') }}"]
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(Exception, match=r"x|unsafe|undefined|append"):
        ChatTemplate(source, {})(chat("a", "b"))
