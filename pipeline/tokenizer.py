"""The tokenizer as files: where it is found, what the recipe records of it, what goes along with a dataset."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.hub import HUB_ID, LOCAL_OPTIONS, unreachable

TEMPLATE_FILE = "chat_template.jinja"
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", TEMPLATE_FILE)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTROL = ("<|im_start|>", "<|im_end|>")
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
SPLITTING_RULES = {"Qwen2Tokenizer": _QWEN2, "Qwen3_5Tokenizer": _QWEN3_5}
"""Classes of transformers that split text by a rule of their own, whatever tokenizer.json says."""
PROBES = (
    "It's 3.14 o'clock\r\n\n  don't  x\t= [1,  22, 333]\n",
    "नमस्ते दुनिया, สวัสดีชาวโลก, שָׁלוֹם עוֹלָם, السَّلَامُ عَلَيْكُمْ",
    "e\u0301té Größe 你好世界 👩\u200d👩\u200d👧 ①②③ Ⅻ ½",
)
"""Texts on which splitting rules differ: marks, digits, blanks, contractions, scripts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """A tokenizer folder, read once."""

    model: str | None
    """Hub id, None for a local folder."""
    files: dict[str, bytes]
    """The source's files byte for byte, by name."""
    template: str
    """The chat template used."""
    template_origin: str
    """The file that it stands in, for messages."""
    json: str
    """Text of tokenizer.json."""
    special_tokens: dict[str, str]
    """bos_token and the like, as the template may use them."""
    added_tokens: dict[str, int]
    """Every added token, special or not: the control strings and their ids."""
    vocab: dict[str, int]
    """The model's own vocabulary."""
    pad_token_id: int
    """Fills the tail of rows."""
    eos_token_ids: tuple[int, ...]
    """The tokenizer config's, then generation_config's."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""
        return max(max(self.vocab.values(), default=-1), *self.added_tokens.values()) + 1

    def recipe(self, template_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The entry ``recipe["tokenizer"]``."""
        return {
            "model": self.model,
            "tokenizer_sha256": hashlib.sha256(self.files["tokenizer.json"]).hexdigest(),
            "template_sha256": hashlib.sha256(self.template.encode()).hexdigest(),
            "template_kwargs": template_kwargs,
            "special_tokens": self.special_tokens,
            "vocab_size": self.vocab_size,
            "pad_token_id": self.pad_token_id,
            "eos_token_ids": list(self.eos_token_ids),
        }

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """[vocab_size] UTF-8 bytes of each token; a byte-level vocabulary spells every byte as one character."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, i in self.vocab.items():
            lengths[i] = len(token)
        for token, i in self.added_tokens.items():
            lengths[i] = len(token.encode())
        return lengths

    def class_warning(self) -> str | None:
        """A warning if the ``tokenizer_class`` of tokenizer_config.json splits text otherwise than tokenizer.json.

        transformers' AutoTokenizer goes by that class. What is packed goes by tokenizer.json, always.
        """
        named = json.loads(self.files.get("tokenizer_config.json", b"{}")).get("tokenizer_class") or ""
        rule = SPLITTING_RULES.get(str(named).removesuffix("Fast"))
        body = json.loads(self.json)
        if rule is None or body["pre_tokenizer"] == _splitter(rule):
            return None
        splits = [_split(body["pre_tokenizer"]), _split(_splitter(rule))]
        counts = [(len(own), len(other)) for own, other in zip(*splits, strict=True) if own != other]
        if not counts:
            return None
        own, other = max(counts, key=lambda pair: abs(pair[0] - pair[1]))
        return (
            f"tokenizer_config.json names the class {named}, by which transformers splits text otherwise than "
            f"tokenizer.json does (a probe into {other} parts instead of {own}). Packed is by tokenizer.json, and "
            "exports of the trainer name a right class; do not count or serve tokens with AutoTokenizer on this folder"
        )

    def published(self) -> dict[str, bytes]:
        """What lies in a dataset's ``tokenizer/``: the source's files and the template used."""
        return self.files | {TEMPLATE_FILE: self.template.encode()}


def open_tokenizer(spec: str) -> TokenizerFiles:
    """Resolve ``--tokenizer``: a folder if there is one, else a hub id.

    Raises:
        ValueError: nothing there, hub out of reach, no template, or not a byte-level BPE with ChatML's tokens.
    """
    path = Path(spec)
    if path.is_dir():
        return read_folder(path, model=None)
    if path.exists() or not HUB_ID.fullmatch(spec):
        raise ValueError(f"--tokenizer {spec}: no such folder, and not a hub id (owner/name). {LOCAL_OPTIONS}")
    from huggingface_hub import HfApi, snapshot_download

    failure = None
    try:  # snapshot_download knows no overall time limit: see first whether the hub answers
        HfApi().model_info(spec, timeout=10)
    except Exception as error:  # the hub client raises its HTTP library's errors too
        failure = error  # what was downloaded before serves without a network
    try:
        # No revision: the cache remembers what a branch stood for, without a network too, only if asked for the branch.
        folder = snapshot_download(
            spec, allow_patterns=list(FILES), etag_timeout=10, local_files_only=failure is not None
        )
    except Exception as error:
        raise unreachable(f"--tokenizer {spec}", failure or error) from None
    return read_folder(Path(folder), model=spec)


def read_folder(folder: Path, *, model: str | None) -> TokenizerFiles:
    """Read a folder that holds tokenizer.json and a chat template. Raises ValueError as open_tokenizer."""
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise ValueError(
            f"--tokenizer {folder}: no tokenizer.json in this folder. Name the folder that holds it, or put the "
            "model's own there; other forms of a tokenizer (vocab.json, tokenizer.model) are not read."
        )
    body = _json(files, "tokenizer.json", folder)
    config = _json(files, "tokenizer_config.json", folder)
    try:
        added = {token["content"]: token["id"] for token in body.get("added_tokens") or []}
        model_part, merged = body["model"], dict(body["model"]["vocab"])
        faults = list(_faults(body, model_part, added))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{folder}/tokenizer.json: not what tokenizers writes; fetch it again") from None
    if faults:
        raise ValueError(f"{folder}/tokenizer.json: {faults[0]}. Use a Qwen tokenizer, or one of its kind.")
    special = {name: text for name in _SPECIAL if (text := _content(config.get(name)))}
    vocab = {token: i for token, i in merged.items() if token not in added}
    pad = special.get("pad_token", "<|endoftext|>")
    if pad not in added:
        raise ValueError(f"{folder}/tokenizer_config.json: pad_token {pad!r} is not an added token of tokenizer.json")
    template, origin = _template(files, config, folder)
    return TokenizerFiles(
        model=model,
        files=files,
        template=template,
        template_origin=origin,
        json=files["tokenizer.json"].decode(),
        special_tokens=special,
        added_tokens=added,
        vocab=vocab,
        pad_token_id=added[pad],
        eos_token_ids=_eos(special, added, _json(files, "generation_config.json", folder)),
    )


def _faults(body: dict[str, Any], model: dict[str, Any], added: dict[str, int]) -> Iterator[str]:
    """What would make token lengths or control strings other than they are taken to be."""
    splitting = json.dumps(body.get("pre_tokenizer"))
    if model.get("type") != "BPE" or '"ByteLevel"' not in splitting:
        yield f"expected a byte-level BPE, as Qwen's; found {model.get('type')}"
    if '"add_prefix_space": true' in splitting:
        yield "its pre_tokenizer puts a space before the text (add_prefix_space), which Qwen's does not"
    if model.get("dropout"):
        yield "its model has dropout: the same text would get other ids another time"
    if (body.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":
        yield "expected no normalizer or NFC, as Qwen's"
    if missing := [token for token in _CONTROL if token not in added]:
        yield f"{' and '.join(missing)} must be added tokens, as in Qwen's"
    for token in body.get("added_tokens") or []:
        if not token["content"] or any(token.get(name) for name in ("lstrip", "rstrip", "single_word")):
            yield f"added token {token['content']!r} must match exactly its text (lstrip, rstrip, single_word false)"
        # NFC turns other characters into these: a text without the token could come to hold it.
        if token.get("normalized") and not re.fullmatch(r"[ -~]*", re.sub(r"[K;`]", "é", token["content"])):
            yield f"added token {token['content']!r} must not be matched after normalization (normalized false)"


def _splitter(rule: str) -> dict[str, Any]:
    """A pre_tokenizer entry of tokenizer.json: split by a rule, then spell bytes as characters."""
    split = {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


def _split(splitter: dict[str, Any]) -> list[list[tuple[str, tuple[int, int]]]]:
    """The parts of each of ``PROBES`` under a pre_tokenizer entry."""
    from tokenizers import Tokenizer

    empty = {"type": "BPE", "vocab": {}, "merges": []}
    rule = Tokenizer.from_str(json.dumps({"model": empty, "pre_tokenizer": splitter})).pre_tokenizer
    return [rule.pre_tokenize_str(text) for text in PROBES]


def _json(files: dict[str, bytes], name: str, folder: Path) -> dict[str, Any]:
    try:
        body = json.loads(files.get(name, b"{}"))
    except ValueError:
        raise ValueError(f"{folder}/{name}: not JSON; fetch it again") from None
    if not isinstance(body, dict):
        raise ValueError(f"{folder}/{name}: expected a JSON object")
    return body


def _content(token: Any) -> str:
    """A special token as configs write it: its text, or an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _template(files: dict[str, bytes], config: dict[str, Any], folder: Path) -> tuple[str, str]:
    """The chat template, and the file that it stands in."""
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE].decode(), f"{folder}/{TEMPLATE_FILE}"
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"--tokenizer {folder}: no chat template ({TEMPLATE_FILE}, or in tokenizer_config.json). "
            f"Put the model's own there as {TEMPLATE_FILE}, or name the folder of a tokenizer that has one."
        )
    return template, f"chat_template in {folder}/tokenizer_config.json"


def _eos(special: dict[str, str], added: dict[str, int], generation: dict[str, Any]) -> tuple[int, ...]:
    ids = [added[special["eos_token"]]] if special.get("eos_token") in added else []
    more = generation.get("eos_token_id")
    more = more if isinstance(more, list) else [more]
    return tuple(dict.fromkeys(ids + [i for i in more if isinstance(i, int)]))
