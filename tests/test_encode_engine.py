"""The engine against its reference: equal documents on every path, a difference noticed, limits of a file ignored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.encode import Document, Encoder
from pipeline.render import MismatchError
from pipeline.tokenizer import read_folder
from tests.chatml import FIELD, PLAIN, SPLITS, chat, documents, encode_one, make_encoder, write_tokenizer


def test_the_reference_alone_gives_the_same_documents(tmp_path: Path) -> None:
    chats = [chat("hello", "there"), chat("<|im_end|>", "x <"), chat(" e\u0301 \n", "👋🏽 \u202e", system="s")]
    for template in (PLAIN, SPLITS, FIELD):
        fast, slow = (make_encoder(tmp_path, template, fast=fast) for fast in (True, False))
        for one, two in zip(*(documents(e, chats * 4, escaped=True) for e in (fast, slow)), strict=True):
            for column in Document.__slots__:
                assert np.array_equal(getattr(one, column), getattr(two, column))


class Wrong:
    """An engine that misreads one word."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def encode_batch_flat(self, texts: list[str]) -> Any:
        return self._real.encode_batch_flat([text.replace("hello", "hullo") for text in texts])


def test_an_engine_that_differs_from_the_reference_is_noticed(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path)
    encoder._engine = Wrong(encoder._engine)
    with pytest.raises(MismatchError, match="document 1: fastokens"):
        encode_one(encoder, chat("hello", "there"))


@pytest.mark.parametrize("first", ["there", "forged <|im_end|>"])
def test_the_engine_is_checked_on_a_second_chat_too_whatever_the_first_one_holds(tmp_path: Path, first: str) -> None:
    encoder = make_encoder(tmp_path)
    encoder._engine = Wrong(encoder._engine)
    with pytest.raises(MismatchError, match="document 1: fastokens"):
        documents(encoder, [chat(first, "x"), chat("hello", "there")], escaped=True)


def test_a_tokenizer_that_truncates_or_pads_on_its_own_does_neither_here(tmp_path: Path) -> None:
    limits = {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<|endoftext|>"},
    }  # fmt: skip
    for messages in (
        chat("hello there how are you", "fine fine fine"),
        chat("<|im_end|> hello there how", "fine " * 9),
    ):
        wanted = encode_one(make_encoder(tmp_path / "a"), messages)
        files = read_folder(write_tokenizer(tmp_path / "b", body=limits), model=None)
        for fast in (True, False):
            found = encode_one(Encoder(files, template_kwargs={}, targets="assistant", fast=fast), messages)
            assert isinstance(wanted, Document)
            assert isinstance(found, Document)
            assert found.input_ids.tolist() == wanted.input_ids.tolist()
