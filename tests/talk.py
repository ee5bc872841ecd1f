"""Rows of turns laid down by hand, with a byte-level tokenizer that knows ChatML's tokens and U+FFFD."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.forge import forge
from tests.packed import Piece, make_packed

ADDED = ("<|im_start|>", "<|im_end|>", "<tool_response>", "<|endoftext|>")
Turn = tuple[list[int], list[bool]]


@cache
def tokenizer() -> Tokenizer:
    """Every byte, U+FFFD as one token, alone and behind a space, and ADDED."""
    held = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ï¿", "ï¿½", "Ġï¿½"]
    merges = [("ï", "¿"), ("ï¿", "½"), ("Ġ", "ï¿½")]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(held)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ADDED])
    return made


def ids(text: str) -> list[int]:
    """Token ids of a text; control strings are their tokens."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def turn(role: str, text: str) -> Turn:
    """One turn; what an assistant says, and its end token, are targets."""
    header, body, rest = ids(f"<|im_start|>{role}\n"), ids(f"{text}<|im_end|>"), ids("\n")
    held = role == "assistant"
    return header + body + rest, [False] * len(header) + [held] * len(body) + [False] * len(rest)


def document(doc_id: int, *turns: Turn) -> Piece:
    """A document of these turns."""
    return doc_id, [i for turn in turns for i in turn[0]], [m for turn in turns for m in turn[1]]


def chat(doc_id: int, question: str, answer: str) -> Piece:
    """A document of one question and one answer."""
    return document(doc_id, turn("user", question), turn("assistant", answer))


def make_talk(root: Path, rows: Sequence[Sequence[Piece]], /, *, max_tokens: int, **settings: Any) -> Path:
    """A dataset of these rows with this tokenizer; ``rejects`` is its rejects.jsonl, the rest goes to ``forge``."""
    plain = make_packed(root / "plain", rows, max_tokens=max_tokens, pad_token_id=ids("<|endoftext|>")[0])
    files = {"tokenizer/tokenizer.json": tokenizer().to_str().encode()}
    files["rejects.jsonl"] = settings.pop("rejects", b"")
    return forge(plain, root / "talk", files=files, **settings)
