"""Write the sample: chats in ultrachat_200k's schema, and a small tokenizer with Qwen3.5's splitting rule.

    python data/sample/make_sample.py                 writes beside this file; --out FOLDER writes elsewhere

Every chat is put together from the tables and phrases in `text/*.toml`, all of them our own: a row of a table (a
plant, a planet ...) determines what the assistant says about it, so a small model has something to learn. Held-out
chats are about pairs of rows that no training chat is about. `text/written.toml` holds chats written by hand.

Guarantees: the same chats and the same tokenizer.json on every run (a chat depends on its split and number alone;
parquet bytes also depend on the pyarrow version). Needs pyarrow and tokenizers, no network. Takes a few seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import operator
import re
import tomllib
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
SIZES = {"train": 640, "test": 64}
LONG_CHATS = {"train": {67: 12000, 259: 11500, 411: 12500, 562: 15000}, "test": {}}  # chat number -> tokens aimed at
WRITTEN_CHATS = {"train": [100, 300, 500, 600], "test": []}  # chat number of each chat in written.toml
MEDIAN_TOKENS, SIGMA = 1000, 0.45
ROUNDS, ROUND_WEIGHTS = [2, 3, 4, 5, 6, 7], [38, 33, 17, 7, 3, 2]  # a round is a question and its answer
DECOMPOSED = {"train": 3, "test": 1}  # the first French chats are stored with combining accents (NFD)
VOCABULARY = 4096
SPLIT_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The control tokens in the order of their ids; those in PLAIN are added tokens that do not count as special.
CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
]  # fmt: skip
PLAIN = set(CONTROL[14:26])

Fields = dict[str, str]
Message = dict[str, str]
Item = tuple[str, str]  # label and text of one point of an answer
BRACES = re.compile(r"\{([^{}]+)\}")
GUARD = str.maketrans("{}|", "\ue000\ue001\ue002")  # keeps braces and bars of a value away from the template
UNGUARD = str.maketrans("\ue000\ue001\ue002", "{}|")


def fill(template: str, fields: Fields, rng: Random) -> str:
    """Expand a template from the inside out: `{a|b}` is a choice, `{name}` a field, `{Name}` that with a capital."""

    def swap(match: re.Match[str]) -> str:
        body = match[1]
        if "|" in body:
            return str(rng.choice(body.split("|")))
        if body in fields:
            return fields[body].translate(GUARD)
        value = fields[body[0].lower() + body[1:]].translate(GUARD)
        return value[0].upper() + value[1:]

    while BRACES.search(template):
        template = BRACES.sub(swap, template)
    return template.translate(UNGUARD).strip()


def evaluate(formula: str, fields: Fields) -> str:
    """Integer arithmetic from left to right: with income 9 and rent 4, `income - rent * 2` gives 10."""
    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}
    words = [fields.get(word, word) for word in formula.split()]
    result = int(words[0])
    for sign, operand in zip(words[1::2], words[2::2], strict=True):
        result = operations[sign](result, int(operand))
    return str(result)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """One subject in one language, as its TOML table has it."""

    language: str
    """File name, such as `en`; programming is English too."""
    table: dict[str, Any]
    """Phrases of the subject: system, context, overview, tips, aspect[], compare[] ..."""
    common: dict[str, Any]
    """Phrases of the language: open, close, follow, json_ask ..."""
    rows: list[Fields]
    """What the subject knows: one dictionary an entity."""

    @property
    def name(self) -> str:
        return f"{self.language}/{self.table['name']}"


def read_rows(table: dict[str, Any]) -> list[Fields]:
    """The entities of a topic: from its bar-separated rows or its entity tables, with the derived columns."""
    rows: list[Fields] = [{key: value.strip("\n") for key, value in row.items()} for row in table.get("entity", [])]
    names = table.get("fields", "").split(" | ")
    for line in table.get("rows", "").strip().splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)]
        rows.append(dict(zip(names, cells, strict=True)))
    for row in rows:
        for name, formula in table.get("derive", {}).items():
            row[name] = evaluate(formula, row)
    return rows


def read_topics() -> list[Topic]:
    """All topics of `text/`, in the order of file names."""
    files = {path.stem: tomllib.loads(path.read_text("utf-8")) for path in sorted((HERE / "text").glob("*.toml"))}
    topics = []
    for stem, content in files.items():
        for table in content.get("topic", []):
            language = "en" if stem == "code" else stem
            rows = read_rows(table)
            topics.append(Topic(language=language, table=table, common=files[language]["common"], rows=rows))
    return topics


@dataclass(kw_only=True, slots=True)
class Talk:
    """One chat in the making."""

    topic: Topic
    rng: Random
    cast: list[Fields]
    """All entities of the topic; the first two are what the chat is about."""
    told: set[str] = field(default_factory=set)
    """Points made so far, as label/entity, and tips given."""
    num_extras: int = 1
    """Last entity of the cast that the talk has come to on its own."""

    def say(self, phrases: Sequence[str], fields: Fields) -> str:
        return fill(self.rng.choice(phrases), fields, self.rng)

    def phrase(self, key: str, fields: Fields) -> str:
        return self.say(self.topic.common[key], fields)

    def point(self, aspect: dict[str, Any], entity: Fields) -> Item:
        label, phrases = aspect["label"], aspect["tell"]
        self.told.add(f"{label}/{entity['name']}" if label else phrases[0])
        return label, self.say(phrases, entity)

    def listing(self, names: Sequence[str]) -> str:
        return f"{self.topic.common['comma'].join(names[:-1])}{self.topic.common['and']}{names[-1]}"


# A round is made by one of these: (talk, entity) -> question, what introduces the answer, the points it must make.
Round = tuple[str, str, list[Item]]


def ask_overview(talk: Talk, entity: Fields) -> Round:
    points = [talk.point(aspect, entity) for aspect in talk.topic.table["aspect"][:2]]
    return talk.say(talk.topic.table["overview"], entity), talk.phrase("open", entity), points


def ask_aspect(talk: Talk, entity: Fields) -> Round:
    aspects = talk.topic.table["aspect"]
    fresh = [aspect for aspect in aspects if f"{aspect['label']}/{entity['name']}" not in talk.told]
    aspect = talk.rng.choice(fresh or aspects)
    return talk.say(aspect["ask"], entity), "", [talk.point(aspect, entity)]


def ask_comparison(talk: Talk, entity: Fields) -> Round:
    if not talk.topic.table.get("compare"):
        return ask_aspect(talk, entity)
    compare = talk.rng.choice(talk.topic.table["compare"])
    other = talk.rng.choice([row for row in talk.cast if row is not entity])
    x, y = int(entity[compare["field"]]), int(other[compare["field"]])
    most, least = (entity, other) if x > y else (other, entity)
    fields = {"name": entity["name"], "other": other["name"], "most": most["name"], "least": least["name"]}
    fields |= {"x": str(x), "y": str(y), "gap": str(abs(x - y))}
    return talk.say(compare["ask"], fields), "", [("", talk.say(compare["same" if x == y else "tell"], fields))]


def ask_notes(talk: Talk, entity: Fields) -> Round:
    chosen = [entity, *talk.rng.sample([row for row in talk.cast if row is not entity], 2)]
    fields = {"list": talk.listing([row["name"] for row in chosen])}
    aspect = talk.rng.choice(talk.topic.table["aspect"])
    notes = [f"- **{row['name']}:** {talk.point(aspect, row)[1]}" for row in chosen]
    block = ("\n\n" if any("\n" in note for note in notes) else "\n").join(notes)
    return talk.phrase("notes_ask", fields), talk.phrase("notes_tell", fields), [("", block)]


def ask_json(talk: Talk, entity: Fields) -> Round:
    lines = {key: value for key, value in entity.items() if "\n" not in value}
    plain = {key: int(value) if re.fullmatch(r"-?\d+", value) else value for key, value in lines.items()}
    block = f"```json\n{json.dumps(plain, ensure_ascii=False, indent=2)}\n```"
    return talk.phrase("json_ask", entity), talk.phrase("json_tell", entity), [("", block)]


def ask_table(talk: Talk, entity: Fields) -> Round:
    chosen = [entity, *talk.rng.sample([row for row in talk.cast if row is not entity], talk.rng.choice([1, 2]))]
    fields = {"list": talk.listing([row["name"] for row in chosen])}
    columns = {"name": " "} | {key: title for key, title in talk.topic.table["table"].items() if key != "name"}
    lines = [list(columns.values()), ["---"] * len(columns)]
    lines += [[row[key].replace("|", "\\|") for key in columns] for row in chosen]
    block = ("", "\n".join("| " + " | ".join(line) + " |" for line in lines))
    return talk.phrase("table_ask", fields), talk.phrase("table_tell", fields), [block]


FIRST = ([ask_overview, ask_aspect, ask_comparison, ask_notes], [10, 4, 2, 3])
LATER = ([ask_aspect, ask_overview, ask_comparison, ask_notes, ask_json, ask_table], [9, 3, 3, 2, 2, 2])


def layout(talk: Talk, items: list[Item]) -> str:
    """Points as prose, bullets, a numbered list or headings; code blocks and tables stay on lines of their own."""
    if any("\n" in text for _, text in items):
        return "\n\n".join(text for _, text in items)
    style = talk.rng.choice(["prose", "bullets", "numbers", "headings"]) if len(items) > 2 else "prose"
    if style == "prose" or not all(label for label, _ in items):
        space = talk.topic.common["space"]
        return "\n\n".join(space.join(text for _, text in items[at : at + 3]) for at in range(0, len(items), 3))
    if style == "headings":
        return "\n\n".join(f"### {label}\n\n{text}" for label, text in items)
    marks = ["-"] * len(items) if style == "bullets" else [f"{n}." for n in range(1, len(items) + 1)]
    return "\n".join(f"{mark} **{label}:** {text}" for mark, (label, text) in zip(marks, items, strict=True))


def extras(talk: Talk, entity: Fields, lead: list[str]) -> Iterator[tuple[list[str], Fields, list[dict[str, Any]]]]:
    """What else there is to say, without end: the entity's other points (after `lead`), tips, other entities."""
    aspects = talk.topic.table["aspect"]
    yield lead, entity, [a for a in aspects if f"{a['label']}/{entity['name']}" not in talk.told]
    fresh = [{"label": "", "tell": [tip]} for tip in talk.topic.table["tips"] if tip not in talk.told]
    yield [talk.phrase("more", entity)], entity, talk.rng.sample(fresh, min(3, len(fresh)))
    lead = [talk.phrase("others", entity)]
    while True:
        talk.num_extras += 1
        about = talk.cast[talk.num_extras % len(talk.cast)]
        if about is not entity:
            yield [*lead, f"**{about['name']}**"], about, aspects
            lead = []


def answer(talk: Talk, entity: Fields, opening: str, points: list[Item], budget: int) -> str:
    """The answer: opening and points, then more of the subject until about `budget` characters are written."""
    parts = [opening, layout(talk, points)]
    size = sum(map(len, parts))
    title = [] if points[0][0] else [f"**{entity['name']}**"]  # a comparison or a table says nothing of its own
    for lead, about, aspects in extras(talk, entity, title):
        items: list[Item] = []
        for aspect in aspects:
            if size < budget:
                items.append(talk.point(aspect, about))
                size += len(items[-1][1])
        if items:
            parts += [*lead, layout(talk, items)]
        if size >= budget:
            break
    parts.append(talk.phrase("close", entity))
    return "\n\n".join(part for part in parts if part)


def draw_round(talk: Talk, number: int, asked: set[str]) -> tuple[Fields, Round]:
    """The entity and the contents of round `number`, something that has not been asked yet."""
    kinds, weights = LATER if number else FIRST
    while True:
        entity = talk.rng.choice([talk.cast[0], talk.cast[0], talk.cast[1]]) if number else talk.cast[0]
        kind = talk.rng.choices(kinds, weights)[0]
        if kind is not ask_overview or entity["name"] not in asked:
            round_ = kind(talk, entity)
            if round_[0] not in asked or talk.rng.random() < 0.05:
                asked |= {round_[0], entity["name"]} if kind is ask_overview else {round_[0]}
                return entity, round_


def write_chat(topic: Topic, rng: Random, cast: list[Fields], num_tokens: int, num_rounds: int) -> list[Message]:
    """One chat of `num_rounds` rounds and about `num_tokens` tokens about the first two entities of `cast`."""
    talk, messages, asked = Talk(topic=topic, rng=rng, cast=cast), [], set[str]()
    if rng.random() < 0.12 and num_rounds < 7:  # at most 14 messages
        messages.append({"role": "system", "content": talk.say(topic.table["system"], cast[0])})
    left = num_tokens * topic.common["chars_per_token"]
    thanks = num_rounds > 2 and rng.random() < 0.25
    for number in range(num_rounds):
        if thanks and number == num_rounds - 1:
            question, reply = talk.phrase("thanks", {}), talk.phrase("welcome", {})
        else:
            entity, (question, opening, points) = draw_round(talk, number, asked)
            prefix = talk.say(topic.table["context"], entity) if number == 0 else talk.phrase("follow", entity)
            budget = left / (num_rounds - number - (thanks and number < num_rounds - 1)) * rng.uniform(0.75, 1.2)
            reply = answer(talk, entity, opening, points, int(budget) - len(question) - len(prefix))
            question = (prefix + topic.common["space"] + question).strip()
        left -= len(question) + len(reply)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return messages


def draw_chat(topics: list[Topic], split: str, number: int, attempt: int) -> tuple[Topic, list[Message]]:
    """Chat `number` of a split: topic, entities, length and rounds from its own random numbers."""
    rng = Random(f"{split}/{number}/{attempt}")
    deck = topics + [topic for topic in topics if topic.language == "en"]  # English twice, every language often
    topic = deck[number % len(deck)]
    while True:  # an eighth of all pairs of entities is kept for the held-out chats
        cast = rng.sample(topic.rows, len(topic.rows))
        pair = "/".join(sorted([cast[0]["name"], cast[1]["name"]]))
        if (zlib.crc32(f"{topic.name}/{pair}".encode()) % 8 == 0) == (split == "test"):
            break
    num_tokens = LONG_CHATS[split].get(number) or round(MEDIAN_TOKENS * math.exp(SIGMA * rng.gauss(0, 1)))
    num_rounds = 7 if number in LONG_CHATS[split] else rng.choices(ROUNDS, ROUND_WEIGHTS)[0]
    return topic, write_chat(topic, rng, cast, num_tokens, num_rounds)


def first_prompt(messages: list[Message]) -> str:
    return next(message["content"] for message in messages if message["role"] == "user")


def make_split(topics: list[Topic], split: str, seen: set[str]) -> list[list[Message]]:
    """All chats of a split; no two chats of the sample start with the same prompt."""
    written = tomllib.loads((HERE / "text" / "written.toml").read_text("utf-8"))["chat"]
    by_hand = dict(zip(WRITTEN_CHATS[split], written, strict=False))
    chats, num_decomposed = [], 0
    for number in range(SIZES[split]):
        drawn = (draw_chat(topics, split, number, attempt) for attempt in itertools.count())
        topic, messages = next(chat for chat in drawn if first_prompt(chat[1]) not in seen)
        if number in by_hand:
            turns = enumerate(by_hand[number]["turns"])
            messages = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in turns]
        elif topic.language == "fr" and num_decomposed < DECOMPOSED[split]:
            num_decomposed += 1
            messages = [message | {"content": unicodedata.normalize("NFD", message["content"])} for message in messages]
        seen.add(first_prompt(messages))
        chats.append(messages)
    return chats


def make_chats() -> dict[str, list[list[Message]]]:
    """Both splits: name -> chats -> messages."""
    seen: set[str] = set()
    return {split: make_split(read_topics(), split, seen) for split in SIZES}


def write_parquet(path: Path, chats: list[list[Message]]) -> None:
    """One file in ultrachat_200k's schema; prompt_id is the SHA-256 of the prompt, as there."""
    message = pa.struct([pa.field("content", pa.string()), pa.field("role", pa.string())])
    schema = pa.schema([("prompt", pa.string()), ("prompt_id", pa.string()), ("messages", pa.list_(message))])
    prompts = [first_prompt(messages) for messages in chats]
    ids = [hashlib.sha256(prompt.encode()).hexdigest() for prompt in prompts]
    table = pa.table({"prompt": prompts, "prompt_id": ids, "messages": chats}, schema=schema)
    encoding = {"compression": "zstd", "compression_level": 15, "use_dictionary": ["messages.list.element.role"]}
    pq.write_table(table, path, version="2.6", store_schema=False, row_group_size=1000, **encoding)


def train_tokenizer(chats: list[list[Message]]) -> str:
    """tokenizer.json: byte-level BPE of `chats` with Qwen3.5's splitting rule; all bytes, merges, control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_RULE), behavior="isolated")
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(**byte_level)])
    tokenizer.post_processor = processors.ByteLevel(**byte_level)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, size = sorted(pre_tokenizers.ByteLevel.alphabet()), VOCABULARY - len(CONTROL)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    texts = (text for messages in chats for m in messages for text in (f"{m['role']}\n", m["content"]))
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == size
    for content in CONTROL:  # one by one, so that ids follow the order
        token = AddedToken(content, normalized=False, special=content not in PLAIN)
        tokenizer.add_tokens([token]) if content in PLAIN else tokenizer.add_special_tokens([token])
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1) + "\n"


TOKENIZER_CONFIG = {
    "add_bos_token": False, "add_prefix_space": False, "bos_token": None, "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 262144, "pad_token": "<|endoftext|>",
    "split_special_tokens": False, "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None,
}  # fmt: skip


def main() -> None:
    """Write both parquet files, tokenizer.json and tokenizer_config.json (chat_template.jinja is written by hand)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: beside this script)")
    out, chats = parser.parse_args().out, make_chats()
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in chats.items():
        write_parquet(out / f"{split}_sft-00000-of-00001.parquet", rows)
    (out / "tokenizer.json").write_text(train_tokenizer(chats["train"]), "utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n", "utf-8")
    print(f"wrote {', '.join(f'{len(rows)} {split}' for split, rows in chats.items())} chats and a tokenizer to {out}")


if __name__ == "__main__":
    main()
