"""The turns of a rendering: where each begins and ends, whose it is, and that no text of the chat is missing.

A turn is one ``<|im_start|>role\\n...<|im_end|>\\n`` block. Everything here is linear in the text.
"""

import json
from dataclasses import dataclass
from typing import Any

from pipeline.chats import LEADING_THINK, Refused, strings, texts
from pipeline.cut import ASSISTANT, SYSTEM, TOOL, USER

START, END = "<|im_start|>", "<|im_end|>"
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One block of a rendering; positions in characters."""

    header: str
    """Its first line, without the start token."""
    start: int
    """Of the start token."""
    body: int
    """Behind the header's line break."""
    end: int
    """Of the end-of-turn token."""


def read_turns(text: str) -> list[Turn] | None:
    """Read a rendering as blocks ``START header \\n body END \\n``; None if it is anything else."""
    turns, at = [], 0
    while at < len(text):
        end = text.find(END, at)
        line = text.find("\n", at)
        if not text.startswith(START, at) or not at < line < end or not text.startswith("\n", end + len(END)):
            return None
        if text.find(START, at + 1, end) >= 0:
            return None
        turns.append(Turn(header=text[at + len(START) : line], start=at, body=line + 1, end=end))
        at = end + len(END) + 1
    return turns


def align(turns: list[Turn], messages: list[dict[str, Any]]) -> tuple[tuple[int, ...], list[int]]:
    """Role of each turn, and the turn of each message (-1 for a blank system message that is left out).

    Consecutive tool messages are one turn; a system turn may come from the template.

    Raises:
        Refused: the turns are not those of the messages.
    """
    owners, expected = [], []
    for i, message in enumerate(messages):
        if not (message["role"] == "tool" and i and messages[i - 1]["role"] == "tool"):
            expected.append(message["role"])
        owners.append(len(expected) - 1)
    has_system = bool(turns) and turns[0].header == "system"
    if has_system and len(turns) == len(expected) + 1:
        expected.insert(0, "system")
        owners = [owner + 1 for owner in owners]
    elif expected[0] == "system" and not has_system and not texts(messages[0]):
        del expected[0]
        owners = [owner - 1 for owner in owners]
    same = len(turns) == len(expected) and all(
        turn.header == role or (role == "tool" and turn.header == "user")
        for turn, role in zip(turns, expected, strict=True)
    )
    if not same:
        unknown = any(message["role"] not in ROLES for message in messages)
        raise Refused(
            "unknown_role" if unknown else "template_drops_text", "turns of the rendering do not match the messages"
        )
    return tuple(ROLES.get(role, SYSTEM) for role in expected), owners


def check_nothing_dropped(
    text: str, turns: list[Turn], owners: list[int], messages: list[dict[str, Any]], *, tools: Any, splits: bool
) -> None:
    """Every content and tool call stands in its own turn, in order, as do tool definitions and the last reasoning.

    Args:
        text: the rendering.
        turns: its turns.
        owners: turn of each message.
        messages: what was rendered.
        tools: tool definitions, or None.
        splits: the template takes reasoning out of the content.

    Raises:
        Refused: something is missing.
    """
    at = 0
    for i, message in enumerate(messages):
        turn = turns[max(owners[i], 0)]
        needles, last = texts(message), i == len(messages) - 1
        reasoning = message.get("reasoning_content", "")
        if message["role"] == "assistant" and splits and needles and (lead := LEADING_THINK.match(needles[0])):
            reasoning, needles[0] = lead[2], needles[0][lead.end() :].strip()
        at = max(at, turn.body)
        for needle in needles:
            at = _find(text, needle, at, turn.end)
        if last and isinstance(reasoning, str):
            _find(text, reasoning.strip(), turn.body, turn.end)
        for call in (*message.get("tool_calls", ()), message.get("function_call") or {}):
            inner = call.get("function", call) if isinstance(call, dict) else call
            if isinstance(inner, dict):  # ids and the like are no text of the chat
                inner = [inner.get("name"), inner.get("arguments")]
            for needle in strings(inner, keys=True):
                _find(text, needle, turn.body, turn.end)
    for needle in strings(tools):
        _find(text, needle, 0, len(text))


def _find(text: str, needle: str, start: int, end: int) -> int:
    """Where the needle ends in text[start:end], raw or as a JSON string's inside."""
    at = text.find(needle, start, end)
    if at >= 0:
        return at + len(needle)
    for ensure_ascii in (False, True):
        form = json.dumps(needle, ensure_ascii=ensure_ascii)[1:-1]
        at = text.find(form, start, end)
        if at >= 0:
            return at + len(form)
    raise Refused("template_drops_text", "a text of the chat is missing from the rendering")
