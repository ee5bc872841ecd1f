"""A chat through its template: text, turns, and where each assistant turn's targets begin.

The chat template is the reference (template.py). A chat is checked and its control strings are escaped before the
template sees it (chats.py); the result is read as turns, and nothing may be missing from it (turns.py). Chats of a
shape seen before skip the template (shapes.py); a sample of them is rendered both ways and must be equal.
"""

from collections.abc import Iterator
from typing import Any

from pipeline.chats import END_THINK, LEADING_THINK, THINK, ControlStrings, Escape, Refused, checked, restore
from pipeline.cut import ASSISTANT
from pipeline.rows import TOO_DEEP
from pipeline.shapes import Shapes
from pipeline.source import Conversation, Reject
from pipeline.template import ChatTemplate, DateError
from pipeline.turns import END, ROLES, START, Rendering, Turn, align, check_nothing_dropped, read_turns

__all__ = ["END", "START", "MismatchError", "Renderer", "Rendering"]

EMPTY_THINK = f"{THINK}\n\n{END_THINK}\n\n"
CHECK_EVERY = 61  # one of so many fast renderings is compared with the template's
_TOOL = {
    "type": "function",
    "function": {"name": "zq3zq", "description": "zq4zq", "parameters": {"type": "object", "properties": {}}},
}


class MismatchError(RuntimeError):
    """A fast path differs from its reference on this run's own data; the reference must serve."""


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
        self._template = ChatTemplate(template, template_kwargs, special_tokens=special_tokens)
        self._control = ControlStrings(control_strings)
        self._looked_for = tuple(s for s in {END_THINK, *self._template.tested} if not self._control.pattern.search(s))
        self._shapes = Shapes(self._render_by_template, self._is_special)
        self._fast = fast
        self._thinks_first = False
        self.reasoning = "keeps"
        self.notes: tuple[str, ...] = ()
        self._probe()

    # ------------------------------------------------------------------------------------------- public

    def render(self, chat: Conversation) -> Rendering | Reject:
        """Render one chat, or say why not.

        Raises:
            MismatchError: a shape's rendering differs from the template's.
            DateError: the template asks for the date, which no data should depend on.
        """
        fast = self._shapes.render(chat) if self._fast else None
        if fast is not None and chat.doc_id % CHECK_EVERY:
            return fast
        slow: Rendering | Reject
        try:
            slow = self._render_by_template(chat)
        except Refused as refused:
            reason, detail = refused.args
            slow = Reject(doc_id=chat.doc_id, what="rejected", reason=reason, detail=detail)
        if fast is not None and fast != slow:
            raise MismatchError(f"document {chat.doc_id}: its shape renders differently from the chat template")
        return slow

    def segments(self, rendering: Rendering) -> Iterator[tuple[str, bool]]:
        """Parts (text, is it a control token) of a rendering, what the chat contains put back as plain text."""
        text, end = rendering.text, 0
        for match in self._control.pattern.finditer(text):
            if match.start() > end:
                yield restore(text[end : match.start()], rendering.base, rendering.originals), False
            yield match[0], True
            end = match.end()
        if end < len(text):
            yield restore(text[end:], rendering.base, rendering.originals), False

    def escaped(self, rendering: Rendering) -> list[str]:
        """Control strings of the chat itself that stand in the rendering as plain text."""
        if not rendering.base:
            return []
        plain = (text for text, control in self.segments(rendering) if not control)
        return [found for text in plain for found in self._control.pattern.findall(text)]

    # ------------------------------------------------------------------------------------- the reference

    def _render_by_template(self, chat: Conversation) -> Rendering:
        try:
            messages, tools = checked(chat)
            escape = Escape(self._control, (messages, tools))
            messages = [self._prepare(message, escape) for message in messages]
            tools = escape(tools)
        except RecursionError:
            raise Refused(*TOO_DEEP) from None
        text = self._run(messages, tools)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused("invalid_unicode", "a lone surrogate") from None
        turns = read_turns(text)
        if turns is None:
            raise Refused("template_refuses", "the rendering is not a sequence of turns")
        roles, owners = align(turns, messages)
        check_nothing_dropped(text, turns, owners, messages, tools=tools, splits=self.reasoning == "splits")
        skips = tuple(self._skip(text, t) if r == ASSISTANT else -1 for t, r in zip(turns, roles, strict=True))
        base = escape.base if escape.originals else ""
        return Rendering(text=text, roles=roles, skips=skips, base=base, originals=tuple(escape.originals))

    def _is_special(self, text: str) -> bool:
        """Whether the template could treat this text in a way of its own."""
        for literal in self._looked_for:  # quicker than any() here
            if literal in text:
                return True
        return self._control.touches(text)

    def _run(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> str:
        try:
            return self._template(messages, tools, prompt=prompt)
        except (MemoryError, DateError):
            raise
        except Exception:  # a template may raise anything
            if any(message["role"] not in ROLES for message in messages):
                raise Refused("unknown_role", "the chat template refuses a role") from None
            raise Refused("template_refuses", "the chat template raised an error") from None

    def _prepare(self, message: dict[str, Any], escape: Escape) -> dict[str, Any]:
        """Escape a message's strings; its leading reasoning goes where this template looks for it."""
        content = message.get("content")
        first = content[0] if isinstance(content, list) and content else content
        text = first.get("text") if isinstance(first, dict) else first
        lead = None
        if message["role"] == "assistant" and isinstance(text, str) and "reasoning_content" not in message:
            lead = LEADING_THINK.match(text)
        if not lead:
            return {escape(key): escape(value) for key, value in message.items()}
        out = {escape(key): escape(value) for key, value in message.items() if key != "content"}
        reasoning, rest = escape(lead[2]), escape(lead.string[lead.end() :])
        if self.reasoning == "field":
            out["reasoning_content"], rest = reasoning.strip("\n"), rest.strip("\n")
        else:
            rest = f"{lead[1]}{THINK}{reasoning}{END_THINK}{rest}"
        if isinstance(content, list):
            part = escape({**first, "text": ""}) | {"text": rest} if isinstance(first, dict) else rest
            return out | {"content": [part, *escape(content[1:])]}
        return out | {"content": rest}

    def _skip(self, text: str, turn: Turn) -> int:
        """Bytes from behind the start token to the first target of an assistant turn."""
        skip = len(turn.header.encode()) + 1
        if text.startswith(EMPTY_THINK, turn.body):
            return skip + len(EMPTY_THINK)
        if self._thinks_first and text.startswith(f"{THINK}\n", turn.body):
            return skip + len(f"{THINK}\n")
        return skip

    # ------------------------------------------------------------------------------------------- probes

    def _probe(self) -> None:
        """What kind of template is this? Refuse one that is not ChatML-like; note what it adds on its own."""
        user, answer = {"role": "user", "content": "zq0zq"}, {"role": "assistant", "content": "zq1zq"}
        text = self._plain_chat([user, answer])
        turns = read_turns(text)
        headers = [turn.header for turn in turns or []]
        if headers not in (["user", "assistant"], ["system", "user", "assistant"]) or "zq1zq" not in text:
            raise ValueError(
                f"the chat template is not ChatML-like: expected a user and an assistant message to become "
                f"{START}user\\n...{END}\\n{START}assistant\\n...{END}\\n, perhaps after a system turn; found "
                f"{text[:200]!r}. Use a Qwen chat template, or one of this form."
            )
        with_field = self._try([user, answer | {"reasoning_content": "zq2zq"}])
        if "zq2zq" in with_field:
            split = self._try([user, answer | {"content": f"{THINK}\nzq2zq\n{END_THINK}\n\nzq1zq"}])
            self.reasoning = "splits" if split == with_field else "field"
        self._thinks_first = self._try([user], prompt=True).endswith(f"{THINK}\n")
        system = {"role": "system", "content": "zq5zq"}  # other branches, which may ask for the date
        self._try([system, user, answer])
        self._try([system, user, answer], [_TOOL])
        notes = []
        if headers[0] == "system":
            notes.append("a system turn before every chat that has none")
        if EMPTY_THINK in text:
            notes.append("an empty think block in answers without reasoning")
        self.notes = tuple(notes)

    def _plain_chat(self, chat: list[dict[str, Any]]) -> str:
        try:
            return self._template(chat)
        except DateError:
            raise
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"the chat template fails on a plain chat of a user and an assistant message, "
                f"{type(error).__name__}: {error}. Check --template-kwargs, or use another template."
            ) from None

    def _try(self, chat: list[dict[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        try:
            return self._run(chat, tools, prompt=prompt)
        except Refused:
            return ""
