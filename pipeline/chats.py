"""A chat before it is rendered: is it one, and which of its strings must not become control tokens.

What cannot be a chat is refused with a reason of the closed list. Control strings (every added token of the tokenizer,
special or not) that the chat itself contains are replaced by inert placeholders, so that no branch of a template sees
them; they are put back as plain text afterwards. Costs: nothing for chats without a ``<``.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.rows import MAX_DEPTH, TOO_DEEP
from pipeline.source import Conversation

THINK, END_THINK = "<think>", "</think>"
LEADING_THINK = re.compile(rf"(\s*){THINK}(.*?){END_THINK}", re.DOTALL)
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read
_OTHER_MEDIA = {"image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio"}


class Refused(Exception):  # noqa: N818 (control flow: it becomes a Reject)
    """A chat is rejected; ``args`` are the reason and our own words about it."""


# ------------------------------------------------------------------------------------------ is it a chat?


def checked(chat: Conversation) -> tuple[list[dict[str, Any]], Any]:
    """Messages and tools with the right types, string arguments parsed, null members dropped.

    Raises:
        Refused: they are no chat.
    """
    messages, tools = chat.messages, chat.tools
    if messages is None or messages in ([], ""):
        raise Refused("no_messages", "no messages")
    if not isinstance(messages, list):
        raise Refused("bad_type", "messages is not a list")
    if isinstance(tools, str):
        tools = _parsed(tools, "the tools column") if tools.strip() else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Refused("bad_type", "tools is not a list of objects")
    return [_checked_message(message, i) for i, message in enumerate(messages)], tools or None


def _checked_message(message: Any, i: int) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("bad_type", f"message {i} has no role")
    out = {key: value for key, value in message.items() if value is not None}
    content = out.get("content", "")
    if not isinstance(content, str | list):
        raise Refused("bad_type", f"content of message {i} is neither text nor a list")
    if isinstance(content, list):
        out["content"] = [_checked_part(part, i) for part in content]
    if "tool_calls" in out:
        if not isinstance(out["tool_calls"], list):
            raise Refused("bad_type", f"tool_calls of message {i} is not a list")
        out["tool_calls"] = [_checked_call(call, i) for call in out["tool_calls"]]
    if out["role"] == "assistant":
        reasoning = next((out[name] for name in REASONING_NAMES if name in out), "")
        if not isinstance(reasoning, str):
            raise Refused("bad_type", f"the reasoning of message {i} is not text")
        if reasoning:  # under every name, as apply_chat_template passes it
            out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    return out


def _checked_part(part: Any, i: int) -> Any:
    """Text alone: a template would write image tokens for a part that so much as has an ``image`` key."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if value is not None}
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
    other = isinstance(part, dict) and (part.get("type", "text") != "text" or bool(_OTHER_MEDIA & part.keys()))
    if not isinstance(text, str) or other:
        raise Refused("bad_type", f"a content part of message {i} is not text")
    return part


def _checked_call(call: Any, i: int) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise Refused("bad_type", f"a tool call of message {i} has no name")
    arguments = inner.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _parsed(arguments, f"arguments of a tool call of message {i}")
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        raise Refused("bad_type", f"arguments of a tool call of message {i} are not an object")
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise Refused(*TOO_DEEP) from None
    except ValueError:
        raise Refused("invalid_json", f"{what} is not JSON") from None


def texts(message: dict[str, Any]) -> list[str]:
    """Texts of a checked message's content that are not blank, stripped."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text.strip() for text in found if isinstance(text, str) and text.strip()]


def strings(value: Any, *, keys: bool = False) -> Iterator[str]:
    """Every string inside a value, and the keys of its objects if asked for."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if keys:
                yield key
            yield from strings(item, keys=keys)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item, keys=keys)


# ------------------------------------------------------------------------------------------ control strings


class ControlStrings:
    """Finds control strings: those that a text holds, and those that it could become a part of."""

    def __init__(self, control_strings: tuple[str, ...]) -> None:
        starts = {text[:n] for text in control_strings for n in range(1, len(text))}
        self.pattern = _any_of(control_strings)
        # The beginning of one at the very end could be completed by what comes next, once white space is stripped.
        # Without an end of text near, the look-ahead fails after one character: this stays linear.
        self._forbidden = re.compile(rf"{self.pattern.pattern}|(?:{_any_of(tuple(starts)).pattern})(?=\s*\Z)")
        self._triggers = tuple({text[0] for text in control_strings if text})

    def touches(self, text: str) -> bool:
        """Whether escaping would change the text."""
        for trigger in self._triggers:  # most texts hold none: a loop is quicker than any() here
            if trigger in text:
                return self._forbidden.search(text) is not None
        return False

    def replace(self, text: str, by: Callable[[re.Match[str]], str]) -> str:
        """The text with control strings, and beginnings of one at its end, replaced."""
        return self._forbidden.sub(by, text) if self.touches(text) else text


class Escape:
    """Replaces control strings in one chat's values by placeholders ``<base><number>e``: letters and digits only."""

    def __init__(self, control: ControlStrings, chat: Any) -> None:
        self._control, self._chat = control, chat
        self.originals: list[str] = []
        self.base = ""

    def __call__(self, value: Any, depth: int = 0) -> Any:
        """The value with placeholders. Raises Refused if it is nested too deeply."""
        if depth > MAX_DEPTH:
            raise Refused(*TOO_DEEP)
        if isinstance(value, str):
            return self._control.replace(value, self._placeholder)
        if isinstance(value, dict):
            return {self(k, depth + 1): self(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list):
            return [self(v, depth + 1) for v in value]
        return value

    def _placeholder(self, match: re.Match[str]) -> str:
        if not self.base:  # a hash of the chat cannot stand in the chat
            digest = hashlib.sha256(repr(self._chat).encode(errors="surrogatepass")).hexdigest()
            self.base = f"zq{digest[:24]}n"
        self.originals.append(match[0])
        return f"{self.base}{len(self.originals) - 1}e"


def restore(text: str, base: str, originals: tuple[str, ...]) -> str:
    """The text with what its placeholders stand for."""
    return re.sub(f"{base}([0-9]+)e", lambda m: originals[int(m[1])], text) if base else text


def _any_of(strings: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(strings, key=lambda s: (-len(s), s))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
