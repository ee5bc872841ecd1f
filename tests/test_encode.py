"""Small chats into documents: which tokens are targets, and where turns and their targets begin and end.

Holds for every choice of targets, for reasoning and tool calls, for chats without an answer, without anything, of
hundreds of turns and of megabytes.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.cut import ASSISTANT, SYSTEM, TOOL, USER
from pipeline.encode import Document, Encoder
from pipeline.source import Conversation, Reject
from tests.chatml import (
    SPLITS,
    chat,
    decoded,
    documents,
    encode_one,
    make_encoder,
    mask_by_offsets,
    target_texts,
    tokenizer_json,
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return make_encoder(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return make_encoder(tmp_path_factory.mktemp("splits"), SPLITS)


def test_answers_and_their_ends_of_turn_are_targets_and_nothing_else(plain: Encoder) -> None:
    messages = chat("hello", "hello", "hello", "", system="be")
    document = encode_one(plain, messages)
    assert isinstance(document, Document)
    assert target_texts(plain._files, document) == ["hello<|im_end|>", "<|im_end|>"]
    assert document.roles.tolist() == [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]
    assert document.turn_targets.tolist()[:2] == [0, 0]
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert decoded(plain._files, document.input_ids) == text
    ends = [0, *document.turn_ends.tolist()]
    turns = [decoded(plain._files, document.input_ids[a:b]) for a, b in itertools.pairwise(ends)]
    assert [turn.startswith("<|im_start|>") and turn.endswith("<|im_end|>\n") for turn in turns] == [True] * 5
    for first, num in zip(document.turn_first_target, document.turn_targets, strict=True):
        assert (first < 0) == (num == 0)
        assert document.loss_mask[first : first + num].all()
    assert document.turn_targets.sum() == document.loss_mask.sum()
    for column, dtype in (
        ("input_ids", np.int32),
        ("loss_mask", np.bool_),
        ("turn_ends", np.int32),
        ("roles", np.uint8),
    ):
        assert getattr(document, column).dtype == dtype


def test_a_token_that_begins_in_the_header_is_no_target(plain: Encoder) -> None:
    document = encode_one(plain, chat("hello", "\n\nhello"))
    assert isinstance(document, Document)
    reference = Tokenizer.from_str(tokenizer_json())
    text = decoded(plain._files, document.input_ids)
    assert document.loss_mask.tolist() == mask_by_offsets(reference, text)
    assert "\n\n" not in target_texts(plain._files, document)[0]  # the three line breaks are one token


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        ("assistant", ["one<|im_end|>", "two<|im_end|>"]),
        ("last", ["two<|im_end|>"]),
        ("all", ["user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
                 "<|im_start|>assistant\ntwo<|im_end|>\n"]),
    ],
)  # fmt: skip
def test_targets_may_be_every_answer_the_last_one_or_all_tokens(
    tmp_path: Path, targets: str, wanted: list[str]
) -> None:
    encoder = make_encoder(tmp_path, targets=targets)
    for document in documents(encoder, [chat("a", "one", "b", "two")] * 3):
        assert target_texts(encoder._files, document) == wanted
        assert document.turn_targets.sum() == document.loss_mask.sum()


def test_the_last_answer_is_each_chats_own(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path, targets="last")
    chats = [[*chat("a", "one"), {"role": "user", "content": "b"}], chat("c", "two", "d", "three")]
    found = [target_texts(encoder._files, document) for document in documents(encoder, chats)]
    assert found == [["one<|im_end|>"], ["three<|im_end|>"]]


def test_a_chat_without_an_answer_has_no_target_and_its_tokens_are_counted(plain: Encoder) -> None:
    found = encode_one(plain, [{"role": "user", "content": "alone"}])
    assert isinstance(found, Reject)
    assert (found.reason, found.what) == ("no_target", "rejected")
    assert found.tokens == len(Tokenizer.from_str(tokenizer_json()).encode("<|im_start|>user\nalone<|im_end|>\n").ids)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("chats", [[], [None], [[], "x"]])
def test_nothing_to_encode_is_no_error(tmp_path: Path, chats: list[Any], *, fast: bool) -> None:
    found = make_encoder(tmp_path, fast=fast).encode([Conversation(doc_id=i, messages=m) for i, m in enumerate(chats)])
    assert [(item.doc_id, item.what) for item in found if isinstance(item, Reject)] == [
        (i, "rejected") for i in range(len(chats))
    ]


def test_thinking_prompts_take_the_opening_tag_from_the_targets(splits: Encoder) -> None:
    why = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nsix"}
    for messages, wanted in (
        (chat("a", "one", "b", "two"), ["one<|im_end|>", "two<|im_end|>"]),
        ([*chat("a"), why], ["why\n</think>\n\nsix<|im_end|>"]),
    ):
        document = encode_one(splits, messages)
        assert isinstance(document, Document)
        assert target_texts(splits._files, document) == wanted


def test_calls_are_targets_and_results_are_not(splits: Encoder) -> None:
    messages = [
        *chat("weather?"),
        {"role": "assistant", "content": "look", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "sun"}, {"role": "tool", "content": "snow"},
        {"role": "assistant", "content": "both"},
    ]  # fmt: skip
    document = encode_one(splits, messages, [{"name": "f"}])
    assert isinstance(document, Document)
    assert document.roles.tolist() == [SYSTEM, USER, ASSISTANT, TOOL, ASSISTANT]
    assert target_texts(splits._files, document) == [
        'look\n<tool_call>\nf {"a": 1}\n</tool_call><|im_end|>',
        "both<|im_end|>",
    ]


def test_a_chat_of_four_hundred_turns_has_two_hundred_runs_of_targets(splits: Encoder) -> None:
    document = encode_one(splits, chat(*(f"{i}" for i in range(400))))
    assert isinstance(document, Document)
    assert target_texts(splits._files, document) == [f"{i}<|im_end|>" for i in range(1, 400, 2)]


def test_a_message_of_five_megabytes_without_a_space_is_encoded(plain: Encoder) -> None:
    document = encode_one(plain, chat("是" * 1_600_000, "hello"))
    assert isinstance(document, Document)
    assert target_texts(plain._files, document) == ["hello<|im_end|>"]
    assert plain._token_bytes[document.input_ids].sum() > 4_800_000


def test_a_batch_of_many_bytes_has_the_targets_of_its_chats_alone(plain: Encoder) -> None:
    chats = [chat(f"hello {i} " * (i % 7 + 1), f"there {i} " * (i % 11 + 1)) for i in range(300)]
    for document, messages in zip(documents(plain, chats), chats, strict=True):
        assert target_texts(plain._files, document) == [f"{messages[1]['content']}<|im_end|>"]
