"""Write golden.json: ids and targets of small chats through Qwen's templates, derived without this project's code.

    QWEN_FIXTURES=<folder> python tests/facts/make_golden.py

Text: transformers' own rendering of what each template is to see. Ids and offsets: tokenizers. Targets: a regular
expression over the text's characters, and a token counts if its first character lies inside a span. The result was
read by eye; change it for a new template, never to make a test pass.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = {
    "qwen3": "qwen3_tokenizer",
    "qwen3_instruct_2507": "qwen3_tokenizer",
    "qwen3_5_think": "qwen3_5_tokenizer",
    "qwen3_5_nothink": "qwen3_5_tokenizer",
    "qwen3_6": "qwen3_5_tokenizer",
    "qwen3_8": "qwen3_5_tokenizer",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


PLAIN = [
    turn("system", "Be brief."),
    turn("user", "Grüß Gott! 你好?"),
    turn("assistant", "Hello, नमस्ते 👋🏽"),
    turn("user", "And now?"),
    turn("assistant", "Hello, नमस्ते 👋🏽"),
]
THINK = [
    turn("user", "1+1?"),
    turn("assistant", "<think>\nEasy.\n</think>\n\n2"),
    turn("user", "2+2?"),
    turn("assistant", "<think>\nStill easy.\n</think>\n\n4"),
]
THINK_FIELD = [
    turn("user", "1+1?"),
    turn("assistant", "2", reasoning_content="Easy."),
    turn("user", "2+2?"),
    turn("assistant", "4", reasoning_content="Still easy."),
]
CALLS = [
    turn("system", "Use the tool."),
    turn("user", "Weather in Rome and Oslo?"),
    turn("assistant", "I look.", reasoning_content="Two calls.", tool_calls=[call("Rome"), call("Oslo")]),
    turn("tool", "sunny"),
    turn("tool", "snow"),
    turn("assistant", "Rome: sunny. Oslo: snow.", reasoning_content="Both known."),
]
# name -> chat as a source holds it, tools, what qwen3_8 is to see in its place, template_kwargs
CASES: dict[str, tuple[list[dict[str, Any]], Any, list[dict[str, Any]] | None, dict[str, Any]]] = {
    "system turn, repeated answer": (PLAIN, None, None, {}),
    "one round, thinking on": (PLAIN[1:3], None, None, {"enable_thinking": True}),
    "one round, thinking off": (PLAIN[1:3], None, None, {"enable_thinking": False}),
    "think blocks in the content": (THINK, None, THINK_FIELD, {}),
    "think blocks in reasoning_content": (THINK_FIELD, None, None, {}),
    "tool calls and consecutive results": (CALLS, [WEATHER], None, {}),
}
NO_REASONING = {"qwen3_instruct_2507": ("think blocks in reasoning_content", "tool calls and consecutive results")}


def spans(text: str, prompt: str) -> list[tuple[int, int]]:
    """Targets in characters of the text."""
    found = []
    for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL):
        start, end = match.span(1)
        if text[start:end].startswith("<think>\n\n</think>\n\n"):
            start += len("<think>\n\n</think>\n\n")
        elif prompt.endswith("<think>\n") and text[start:end].startswith("<think>\n"):
            start += len("<think>\n")
        found.append((start, end))
    return found


def main() -> None:
    fixtures = Path(os.environ["QWEN_FIXTURES"])
    tokenizers = {n: Tokenizer.from_file(str(fixtures / n / "tokenizer.json")) for n in set(TEMPLATES.values())}
    facts = []
    for name, tokenizer in TEMPLATES.items():
        template = (fixtures / "chat_templates" / f"{name}.jinja").read_text("utf-8")
        for case, (messages, tools, seen, kwargs) in CASES.items():
            if case in NO_REASONING.get(name, ()):  # it would drop the last reasoning: such a chat is rejected
                messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
            given = seen if seen and name == "qwen3_8" else messages
            text = render_jinja_template([given], tools=tools, chat_template=template, **kwargs)[0][0]
            prompt = render_jinja_template(
                [[turn("user", "?")]], chat_template=template, add_generation_prompt=True, **kwargs
            )[0][0]
            encoding = tokenizers[tokenizer].encode(text, add_special_tokens=False)
            inside = spans(text, prompt)
            mask = [any(a <= offset[0] < b for a, b in inside) for offset in encoding.offsets]
            facts.append(
                {
                    "template": name, "tokenizer": tokenizer, "case": case, "messages": messages, "tools": tools,
                    "template_kwargs": kwargs, "targets": [text[a:b] for a, b in inside],
                    "ids": encoding.ids, "mask": "".join("01"[bit] for bit in mask),
                }
            )  # fmt: skip
    lines = ",\n".join(json.dumps(fact, ensure_ascii=False) for fact in facts)
    Path(__file__).with_name("golden.json").write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
