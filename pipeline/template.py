"""The chat template: Jinja source compiled in the environment that chat templates are written for.

That environment is transformers' (a sandbox, ``tojson`` without HTML escapes, loop controls, ``raise_exception``,
``{% generation %}``), but for ``strftime_now``: a date in the text would make the same data another every day.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from pipeline.manifest import fingerprint

PASSED = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that are those of the chat, and no setting's."""


def parse_variables(text: str) -> dict[str, Any]:
    """Read ``--template-kwargs``: variables for the template, one JSON object.

    Raises:
        ValueError: it is none, holds a float, or names a variable that is the chat's.
    """
    try:
        variables = json.loads(text)
        fingerprint({"kwargs": variables})
    except (ValueError, TypeError) as error:
        raise ValueError(f"--template-kwargs {text}: expected one JSON object without floats ({error})") from None
    if not isinstance(variables, dict):
        raise ValueError(f"--template-kwargs {text}: expected one JSON object, e.g. '{{\"enable_thinking\": false}}'")
    _check_variables(variables)
    return variables


def _check_variables(variables: dict[str, Any]) -> None:
    if passed := [name for name in PASSED if name in variables]:
        raise ValueError(
            f"--template-kwargs: {' and '.join(passed)} cannot be set there, as every chat brings its own. "
            "Leave out what names the chat itself; other variables of the template may stay."
        )


class DateError(ValueError):
    """The chat template asks for the date."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        variables: what was asked to be set in it, by ``--template-kwargs``.
        special_tokens: bos_token and the like, which it may use or not.
        origin: where the source was found, for messages.

    Raises:
        ValueError: it is not valid Jinja, or a variable is the chat's.
    """

    def __init__(
        self,
        source: str,
        variables: dict[str, Any],
        *,
        special_tokens: dict[str, str] | None = None,
        origin: str = "the chat template",
    ) -> None:
        _check_variables(variables)
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            read = jinja2.meta.find_undeclared_variables(tree)
        except jinja2.TemplateError as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ValueError(
                f"{origin}{line}: this chat template is not valid Jinja: {error}. "
                "Correct it there, or use a --tokenizer with another template."
            ) from None
        unread = sorted(variables.keys() - read)
        self.unread = _unread(unread, _offered(tree, read), origin) if unread else None
        """A warning if the template never reads a variable: it is misspelt, or another template's."""
        self.tested = _tested_strings(tree)
        self._variables = {"documents": None, **(special_tokens or {}), **variables}

    def __call__(self, messages: list[dict[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        """The text of a chat, with the prompt for the next answer if asked for.

        Raises:
            DateError: it asks for the date.
            Exception: whatever else the template raises.
        """
        try:
            chat = dict(zip(PASSED, (messages, tools, prompt), strict=True))
            return self._template.render({**self._variables, **chat})  # no keywords: "self" may be a variable's name
        except jinja2.UndefinedError as error:
            if "strftime_now" not in str(error):
                raise
            raise DateError(
                "the chat template calls strftime_now: a date in the text would make the same data another every day. "
                "Pass a fixed date if the template takes one (see its source for the name), as in "
                """--template-kwargs '{"date_string": "1 January 2026"}', or use another template."""
            ) from None


def _unread(names: list[str], offered: list[str], origin: str) -> str:
    """The message for variables that change nothing."""
    others = f"{', '.join(offered)}; is a name misspelt?" if offered else "nothing"
    found = f"--template-kwargs: the chat template never reads {' or '.join(names)} ({origin}); "
    return f"{found}besides the chat it reads {others}"


def _offered(tree: jinja2.nodes.Template, read: set[str]) -> list[str]:
    """Of the names that a template reads from outside, those to set there.

    A name that it first sets and then reads is its own: Jinja looks outside only on paths that do not set it.
    """
    first: dict[str, str] = {}
    for name in _names_in_order(tree):
        first.setdefault(name.name, name.ctx)
    return sorted(name for name in read - {*PASSED, "strftime_now"} if first.get(name) == "load")


def _names_in_order(node: jinja2.nodes.Node) -> Iterator[jinja2.nodes.Name]:
    """Every name in the order of evaluation: of an assignment, the value before the target."""
    if isinstance(node, jinja2.nodes.Name):
        yield node
    target = node.target if isinstance(node, jinja2.nodes.Assign | jinja2.nodes.AssignBlock) else None
    for child in sorted(node.iter_child_nodes(), key=lambda child: child is target):
        yield from _names_in_order(child)


def _tested_strings(tree: jinja2.nodes.Template) -> tuple[str, ...]:
    """Literals that a template may look for in a text: a text that holds one could be treated in a way of its own.

    They are what it passes to methods and to ``replace``, and what it compares with. Roles and keys, which are names,
    cannot be told from words in comparisons and are left out of those; stripped white space is tried out.
    """
    found: set[str] = set()
    for node in tree.find_all((jinja2.nodes.Compare, jinja2.nodes.Call, jinja2.nodes.Filter)):
        if isinstance(node, jinja2.nodes.Compare):
            found |= {text for text in _literals([node]) if text.strip() and not text.isidentifier()}
        elif isinstance(node, jinja2.nodes.Filter):
            found |= set(_literals(node.args)) if node.name == "replace" else set()
        elif isinstance(node, jinja2.nodes.Call) and isinstance(node.node, jinja2.nodes.Getattr):
            method = node.node.attr
            if method in ("strip", "lstrip", "rstrip"):
                found |= {sign for text in _literals(node.args) for sign in text if not sign.isspace()}
            elif method not in ("get", "items", "keys"):
                found |= set(_literals(node.args))
    return tuple(sorted(found - {""}))


def _literals(nodes: Iterable[jinja2.nodes.Node]) -> Iterator[str]:
    for node in nodes:
        for const in [node] if isinstance(node, jinja2.nodes.Const) else node.find_all(jinja2.nodes.Const):
            if isinstance(const.value, str):
                yield const.value


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}`` blocks, which some templates carry; they render as their content."""

    tags = {"generation"}  # noqa: RUF012 (the attribute's type is jinja2's)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)  # what is set inside stays inside


def _environment() -> jinja2.Environment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (templates pass these by position)
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,  # noqa: FBT001, FBT002
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
