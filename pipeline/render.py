"""A chat through its template: text, turns, and where each assistant turn's targets begin.

The chat template is the reference. Control strings (every added token of the tokenizer, special or not) that a chat
itself contains become inert placeholders before the template sees them, so that only what the template writes is
control. A chat of a shape seen before (the same roles, plain contents) is put together from the shape's literal
parts instead of running Jinja; a sample of these is rendered by the template too and must be equal.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from pipeline.binpack import ASSISTANT, SYSTEM, TOOL, USER
from pipeline.source import Conversation, Reject

START, END = "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
EMPTY_THINK = f"{THINK}\n\n{END_THINK}\n\n"
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
CHECK_EVERY = 61  # one of so many fast renderings is compared with the template's
_LEADING_THINK = re.compile(rf"(\s*){THINK}(.*?){END_THINK}", re.DOTALL)


class MismatchError(RuntimeError):
    """A fast path differs from its reference on this run's own data; the reference must serve."""


class Refused(Exception):  # noqa: N818 (control flow within this module)
    """A chat is rejected: reason and detail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """One chat as text."""

    text: str
    """The template's output; control strings of the chat stand in it as placeholders."""
    roles: tuple[int, ...]
    """Role of each turn: SYSTEM, USER, ASSISTANT, TOOL."""
    skips: tuple[int, ...]
    """UTF-8 bytes from behind the turn's start token to its first target; -1 for turns without targets."""
    base: str = ""
    """What placeholders begin with; empty where there are none."""
    originals: tuple[str, ...] = ()
    """What placeholder number i stands for."""


class Renderer:
    """Renders chats with one template.

    Args:
        template: Jinja source of the chat template.
        special_tokens: bos_token and the like, as the template may use them.
        control_strings: content of every added token.
        template_kwargs: further variables for the template.
        fast: use shapes seen before.

    Raises:
        ValueError: the template is not ChatML-like, or cannot be compiled; says what was looked for.
    """

    def __init__(
        self,
        template: str,
        *,
        special_tokens: dict[str, str],
        control_strings: tuple[str, ...],
        template_kwargs: dict[str, Any],
        fast: bool = True,
    ) -> None:
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from None
        self._variables = {**special_tokens, "documents": None, **template_kwargs}
        self._fast = fast
        self._shapes: dict[tuple[str, ...], _Shape | None] = {}
        self._control = _any_of(control_strings)
        self._forbidden = _forbidden(control_strings)
        self._triggers = tuple({text[0] for text in control_strings})
        self._thinks_first = False
        self.reasoning = "keeps"
        self.notes: tuple[str, ...] = ()
        self._probe()

    # ------------------------------------------------------------------------------------------- public

    def render(self, chat: Conversation) -> Rendering | Reject:
        """Render one chat, or say why not.

        Raises:
            MismatchError: a shape's rendering differs from the template's.
        """
        try:
            fast = self._render_by_shape(chat) if self._fast else None
            if fast is not None and chat.doc_id % CHECK_EVERY:
                return fast
            slow = self._render_by_template(chat)
        except Refused as refused:
            reason, detail = refused.args
            return Reject(doc_id=chat.doc_id, what="rejected", reason=reason, detail=detail)
        if fast is not None and fast != slow:
            raise MismatchError(f"document {chat.doc_id}: its shape renders differently from the chat template")
        return slow

    def segments(self, rendering: Rendering) -> Iterator[tuple[str, bool]]:
        """Parts (text, is it a control token) of a rendering, what the chat contains put back as plain text."""
        end = 0
        for match in self._control.finditer(rendering.text):
            if match.start() > end:
                yield _restore(rendering, rendering.text[end : match.start()]), False
            yield match[0], True
            end = match.end()
        if end < len(rendering.text):
            yield _restore(rendering, rendering.text[end:]), False

    def escaped(self, rendering: Rendering) -> list[str]:
        """Control strings of the chat itself that stand in the rendering as plain text."""
        if not rendering.base:
            return []
        plain = (text for text, control in self.segments(rendering) if not control)
        return [found for text in plain for found in self._control.findall(text)]

    # ------------------------------------------------------------------------------------- the reference

    def _render_by_template(self, chat: Conversation) -> Rendering:
        messages, tools = _checked(chat)
        escape = _Escape(self._forbidden, self._triggers, (messages, tools))
        messages = [self._prepare(message, escape) for message in messages]
        tools = escape(tools)
        text = self._run(messages, tools)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused("invalid_unicode", "a lone surrogate") from None
        turns = _turns(text)
        if turns is None:
            raise Refused("template_refuses", "the rendering is not a sequence of turns")
        roles = _align(turns, messages)
        _check_nothing_dropped(text, turns, messages, tools, self.reasoning)
        skips = tuple(self._skip(text, t) if r == ASSISTANT else -1 for t, r in zip(turns, roles, strict=True))
        base = escape.base if escape.originals else ""
        return Rendering(text=text, roles=roles, skips=skips, base=base, originals=tuple(escape.originals))

    def _run(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=prompt, **self._variables
            )
        except (Exception, RecursionError):  # a template may raise anything
            unknown = any(message["role"] not in ROLES for message in messages)
            if unknown:
                raise Refused("unknown_role", "the chat template refuses a role") from None
            raise Refused("template_refuses", "the chat template raised an error") from None

    def _prepare(self, message: dict[str, Any], escape: "_Escape") -> dict[str, Any]:
        """Escape a message's strings; its leading reasoning goes where this template looks for it."""
        content = message.get("content")
        lead = None
        if message["role"] == "assistant" and isinstance(content, str) and "reasoning_content" not in message:
            lead = _LEADING_THINK.match(content)
        out: dict[str, Any] = {key: escape(value) for key, value in message.items() if key != "content" or not lead}
        if lead:
            reasoning, rest = escape(lead[2]), escape(lead.string[lead.end() :])
            if self.reasoning == "field":
                out |= {"reasoning_content": reasoning.strip("\n"), "content": rest.strip("\n")}
            else:
                out["content"] = f"{lead[1]}{THINK}{reasoning}{END_THINK}{rest}"
        return out

    def _skip(self, text: str, turn: "_Turn") -> int:
        """Bytes from behind the start token to the first target of an assistant turn."""
        skip = len(turn.header.encode()) + 1
        if text.startswith(EMPTY_THINK, turn.body):
            return skip + len(EMPTY_THINK)
        if self._thinks_first and text.startswith(f"{THINK}\n", turn.body):
            return skip + len(f"{THINK}\n")
        return skip

    # ---------------------------------------------------------------------------------------- fast path

    def _render_by_shape(self, chat: Conversation) -> Rendering | None:
        """The rendering from its shape's literal parts, or None where the template must run."""
        if chat.tools or not isinstance(chat.messages, list) or not chat.messages:
            return None
        roles, contents = [], []
        for message in chat.messages:
            if not isinstance(message, dict) or message.keys() != {"role", "content"}:
                return None
            content = message["content"]
            if not isinstance(content, str) or not content or content.isspace() or not self._is_plain(content):
                return None
            roles.append(message["role"])
            contents.append(content)
        key = tuple(roles)
        if key not in self._shapes:
            if not all(isinstance(role, str) for role in key):
                return None
            self._shapes[key] = self._learn(key)
        shape = self._shapes[key]
        return shape.fill(contents) if shape else None

    def _is_plain(self, content: str) -> bool:
        if any(trigger in content for trigger in self._triggers) and self._forbidden.search(content):
            return False
        return END_THINK not in content and (content.isascii() or _encodable(content))

    def _learn(self, roles: tuple[str, ...]) -> "_Shape | None":
        """Render markers in place of contents and see what stands around them and what happens to white space."""
        markers = [f"zq{i}zq" for i in range(len(roles))]
        probes = []
        for wrap in ("{}", "\n {} \n", " \n {} \n "):
            contents = [wrap.format(marker) for marker in markers]
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            try:
                probes.append((contents, self._render_by_template(Conversation(doc_id=0, messages=messages))))
            except Refused:
                return None
        plain = probes[0][1]
        literals = re.split("zq[0-9]+zq", plain.text)
        if re.findall("zq[0-9]+zq", plain.text) != markers:
            return None
        transforms = []
        for i in range(len(roles)):
            fits = [f for f in _TRANSFORMS if all(_between(p.text, literals, i) == f(c[i]) for c, p in probes)]
            if not fits:
                return None
            transforms.append(fits[0])
        return _Shape(literals=tuple(literals), transforms=tuple(transforms), roles=plain.roles, skips=plain.skips)

    # ------------------------------------------------------------------------------------------- probes

    def _probe(self) -> None:
        """What kind of template is this? Refuse one that is not ChatML-like; note what it adds on its own."""
        chat = [{"role": "user", "content": "zq0zq"}, {"role": "assistant", "content": "zq1zq"}]
        try:
            text = self._run(chat, None)
            turns = _turns(text)
        except Refused:
            turns, text = None, ""
        headers = [turn.header for turn in turns or []]
        if headers not in (["user", "assistant"], ["system", "user", "assistant"]) or "zq1zq" not in text:
            raise ValueError(
                f"the chat template is not ChatML-like: expected a user and an assistant message to become "
                f"{START}user\\n...{END}\\n{START}assistant\\n...{END}\\n, perhaps after a system turn; found "
                f"{text[:200]!r}. Use a Qwen chat template, or one of this form."
            )
        split = [chat[0], {"role": "assistant", "content": f"{THINK}\nzq2zq\n{END_THINK}\n\nzq1zq"}]
        field = [chat[0], {"role": "assistant", "content": "zq1zq", "reasoning_content": "zq2zq"}]
        with_field = self._run(field, None)
        if "zq2zq" in with_field:
            self.reasoning = "splits" if self._run(split, None) == with_field else "field"
        prompt = self._run(chat[:1], None, prompt=True)
        self._thinks_first = prompt.endswith(f"{THINK}\n")
        notes = []
        if headers[0] == "system":
            notes.append("a system turn before every chat that has none")
        if EMPTY_THINK in text:
            notes.append("an empty think block in answers without reasoning")
        self.notes = tuple(notes)


# ----------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """What the template makes of chats with the same roles and plain contents."""

    literals: tuple[str, ...]
    transforms: tuple[Callable[[str], str], ...]
    roles: tuple[int, ...]
    skips: tuple[int, ...]

    def fill(self, contents: list[str]) -> Rendering:
        parts = [self.literals[0]]
        for transform, content, literal in zip(self.transforms, contents, self.literals[1:], strict=True):
            parts += (transform(content), literal)
        return Rendering(text="".join(parts), roles=self.roles, skips=self.skips)


_TRANSFORMS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: text.strip(),
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: text.lstrip(),
    lambda text: text.rstrip(),
)
"""What templates do to a content; told apart by wrapping a marker in a line break and a blank."""


def _between(text: str, literals: list[str], i: int) -> str | None:
    """What stands in a probe between the i-th and the next literal, given that the marker is there."""
    at = text.find(f"zq{i}zq")
    start = text.rfind(literals[i], 0, at) + len(literals[i])
    stop = text.find(literals[i + 1], at) if literals[i + 1] else len(text)
    return text[start:stop] if at >= 0 <= stop else None


# --------------------------------------------------------------------------------------------- escaping


class _Escape:
    """Replaces control strings in values by placeholders ``<base><number>e``: letters and digits only."""

    def __init__(self, forbidden: re.Pattern[str], triggers: tuple[str, ...], chat: Any) -> None:
        self._forbidden, self._triggers, self._chat = forbidden, triggers, chat
        self.originals: list[str] = []
        self.base = ""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            if not any(trigger in value for trigger in self._triggers):
                return value
            return self._forbidden.sub(self._placeholder, value)
        if isinstance(value, dict):
            return {self(k): self(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self(v) for v in value]
        return value

    def _placeholder(self, match: re.Match[str]) -> str:
        if not self.base:  # a hash of the chat cannot stand in the chat
            digest = hashlib.sha256(repr(self._chat).encode(errors="surrogatepass")).hexdigest()
            self.base = f"zq{digest[:24]}n"
        self.originals.append(match[0])
        return f"{self.base}{len(self.originals) - 1}e"


def _restore(rendering: Rendering, text: str) -> str:
    if not rendering.base:
        return text
    return re.sub(f"{rendering.base}([0-9]+)e", lambda m: rendering.originals[int(m[1])], text)


def _any_of(strings: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(strings, key=lambda s: (-len(s), s))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _forbidden(strings: tuple[str, ...]) -> re.Pattern[str]:
    """A control string anywhere, or the beginning of one at the very end, which the next part could complete."""
    starts = {s[:n] for s in strings for n in range(1, len(s))}
    tail = _any_of(tuple(starts)).pattern
    return re.compile(rf"{_any_of(strings).pattern}|(?:{tail})(?=\s*\Z)")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------ checks of a chat


def _checked(chat: Conversation) -> tuple[list[dict[str, Any]], Any]:
    """Messages and tools with the right types; string arguments parsed."""
    messages, tools = chat.messages, chat.tools
    if messages is None or messages in ([], ""):
        raise Refused("no_messages", "no messages")
    if not isinstance(messages, list):
        raise Refused("bad_type", "messages is not a list")
    if isinstance(tools, str):
        tools = _parsed(tools, "the tools column")
    if tools is not None and not isinstance(tools, list):
        raise Refused("bad_type", "tools is not a list")
    return [_checked_message(message, i) for i, message in enumerate(messages)], tools or None


def _checked_message(message: Any, i: int) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("bad_type", f"message {i} has no role")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise Refused("bad_type", f"content of message {i} is neither text nor a list")
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and not isinstance(part.get("text"), str):
            raise Refused("bad_type", f"a content part of message {i} is not text")
    out = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in out:
        if not isinstance(out["tool_calls"], list):
            raise Refused("bad_type", f"tool_calls of message {i} is not a list")
        out["tool_calls"] = [_checked_call(call, i) for call in out["tool_calls"]]
    return out


def _checked_call(call: Any, i: int) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise Refused("bad_type", f"a tool call of message {i} has no name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"arguments of a tool call of message {i}") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise Refused("bad_type", f"arguments of a tool call of message {i} are not an object")
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Refused("invalid_json", f"{what} is not JSON") from None


# --------------------------------------------------------------------------------- checks of a rendering


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """One block of the rendering; positions in characters."""

    header: str
    start: int
    body: int
    end: int


def _turns(text: str) -> list[_Turn] | None:
    """Read a rendering as blocks ``START header \\n body END \\n``; None if it is anything else."""
    turns, at = [], 0
    while at < len(text):
        end = text.find(END, at)
        line = text.find("\n", at)
        if not text.startswith(START, at) or not at < line < end or not text.startswith("\n", end + len(END)):
            return None
        if text.find(START, at + 1, end) >= 0:
            return None
        turns.append(_Turn(header=text[at + len(START) : line], start=at, body=line + 1, end=end))
        at = end + len(END) + 1
    return turns


def _align(turns: list[_Turn], messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """Role of each turn: consecutive tool messages are one turn; a system turn may come from the template."""
    expected = [
        m["role"]
        for i, m in enumerate(messages)
        if not (m["role"] == "tool" and i and messages[i - 1]["role"] == "tool")
    ]
    headers = [turn.header for turn in turns]
    system = headers[:1] == ["system"]
    silent = expected[:1] == ["system"] and not system and not _texts(messages[0])  # an empty one may be left out
    wanted = expected[1:] if silent or (system and expected[:1] == ["system"]) else expected
    found = headers[1:] if system else headers
    same = len(found) == len(wanted) and all(
        h == r or (r == "tool" and h == "user") for h, r in zip(found, wanted, strict=True)
    )
    if not same:
        unknown = any(role not in ROLES for role in expected)
        raise Refused(
            "unknown_role" if unknown else "template_drops_text", "turns of the rendering do not match the messages"
        )
    return tuple(([SYSTEM] if system else []) + [ROLES.get(role, SYSTEM) for role in wanted])


def _texts(message: dict[str, Any]) -> list[str]:
    """Texts of a message's content that are not blank, stripped."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _check_nothing_dropped(
    text: str, turns: list[_Turn], messages: list[dict[str, Any]], tools: Any, reasoning: str
) -> None:
    """Every content, tool call, tool definition and the last reasoning stand in the rendering, in order."""
    at = 0
    for i, message in enumerate(messages):
        needles = _texts(message)
        if message["role"] == "assistant" and reasoning == "splits" and needles:
            lead = _LEADING_THINK.match(needles[0])
            needles = [needles[0][lead.end() :].strip(), *needles[1:]] if lead else needles
        for needle in needles:
            at = _find(text, needle, at)
        if i == len(messages) - 1 and isinstance(message.get("reasoning_content"), str):
            _find(text, message["reasoning_content"].strip(), 0)
        for call in message.get("tool_calls", ()):
            for needle in _strings(call.get("function", call)):
                _find(text, needle, turns[0].start)
    for tool in tools or ():
        for needle in _strings(tool):
            _find(text, needle, 0)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _find(text: str, needle: str, start: int) -> int:
    """Where the needle ends in the text, raw or as a JSON string's inside."""
    for form in (needle, json.dumps(needle, ensure_ascii=False)[1:-1]):
        at = text.find(form, start)
        if at >= 0:
            return at + len(form)
    raise Refused("template_drops_text", "a text of the chat is missing from the rendering")


# -------------------------------------------------------------------------------------------- templates


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}`` blocks, which some templates carry; they render as their content."""

    tags = {"generation"}  # noqa: RUF012 (the attribute's type is jinja2's)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The environment that chat templates are written for, as transformers sets it up."""

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
