"""Chats into documents: token ids, targets and turns, cached in blocks that know no row length.

``tokenizers`` on the whole rendering is the reference. fastokens encodes in its place; a sample of every block is
encoded by both and must be equal. Targets come from the turns' structure: a turn begins at its start token, its
first target so many bytes later, and tokens of a byte-level vocabulary have known lengths in bytes.

Costs: about 0.15 ms a chat of ultrachat's length on one core; the cache takes some 4.2 bytes a token.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.manifest import fingerprint
from pipeline.memo import read_note, write_note
from pipeline.render import END, START, MismatchError, Renderer, Rendering
from pipeline.rows import Block
from pipeline.shards import Bool, Int32, Int64, hash_file, publish
from pipeline.source import Conversation, Reject, read_block
from pipeline.tokenizer import TokenizerFiles

ENCODE_VERSION = 1
CHATS_AT_ONCE = 512
UInt8 = npt.NDArray[np.uint8]
Targets = Literal["assistant", "last", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One encoded chat."""

    doc_id: int
    """Row number in the source."""
    input_ids: Int32
    """[L] the whole rendering, never cut."""
    loss_mask: Bool
    """[L] this token is a target."""
    turn_ends: Int32
    """[turns] token behind each turn, its line break included; the last one is L."""
    roles: UInt8
    """[turns] cut's SYSTEM, USER, ASSISTANT, TOOL."""
    turn_targets: Int32
    """[turns] number of targets in each turn; they are contiguous."""
    turn_first_target: Int32
    """[turns] where they begin in the document; -1 where there are none."""


BLOCK_SCHEMA = pa.schema(
    [
        ("doc_id", pa.int64()),
        ("input_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.bool_())),
        ("turn_ends", pa.list_(pa.int32())),
        ("roles", pa.list_(pa.uint8())),
        ("turn_targets", pa.list_(pa.int32())),
        ("turn_first_target", pa.list_(pa.int32())),
    ]
)


class Encoder:
    """Encodes conversations with one tokenizer, template and choice of targets.

    Args:
        files: the tokenizer.
        template_kwargs: further variables for the template.
        targets: assistant (every assistant turn), last (only each chat's last one), all (every token).
        fast: use fastokens and learned shapes, checked; otherwise the references alone.

    Raises:
        ValueError: the tokenizer or the template is none that this can encode; says why.
    """

    def __init__(
        self, files: TokenizerFiles, *, template_kwargs: dict[str, Any], targets: Targets, fast: bool = True
    ) -> None:
        from tokenizers import Tokenizer

        self._files, self._targets, self._fast = files, targets, fast
        self.renderer = Renderer(
            files.template,
            special_tokens=files.special_tokens,
            control_strings=tuple(files.added_tokens),
            template_kwargs=template_kwargs,
            fast=fast,
        )
        self._reference = Tokenizer.from_str(files.json)
        self._reference.no_truncation()
        self._reference.no_padding()
        self._plain: Any = None
        self._engine: Any = None
        if fast:
            import fastokens

            self._engine = fastokens.Tokenizer.from_json_str(files.json)
            self._engine.no_truncation()
            self._engine.no_padding()
        self._token_bytes = files.token_bytes()
        self._start, self._end = files.added_tokens[START], files.added_tokens[END]

    def encode(self, chats: list[Conversation]) -> list[Document | Reject]:
        """Encode some chats. Every chat yields a Document or a rejection, and an "escaped" line where it applies.

        Raises:
            MismatchError: a fast path differs from its reference on one of them.
        """
        rendered = [(chat.doc_id, self.renderer.render(chat)) for chat in chats]
        out: list[Document | Reject] = [r for _, r in rendered if isinstance(r, Reject)]
        done = [(doc_id, r) for doc_id, r in rendered if isinstance(r, Rendering)]
        escaped = [self.renderer.escaped(r) for _, r in done]
        out += [_escaped_line(doc_id, found) for (doc_id, _), found in zip(done, escaped, strict=True) if found]
        ids, offsets = self._tokenize([r for _, r in done], escaped)
        self._check(done, escaped, ids, offsets)
        return out + self._documents(done, ids, offsets)

    def tokenize_by_reference(self, rendering: Rendering) -> list[int]:
        """Token ids of one rendering by ``tokenizers`` alone."""
        if not self.renderer.escaped(rendering):
            text = "".join(part for part, _ in self.renderer.segments(rendering))
            return list(self._reference.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for part, control in self.renderer.segments(rendering):
            ids += [self._files.added_tokens[part]] if control else self._encode_plain(part)
        return ids

    # ------------------------------------------------------------------------------------------ details

    def _tokenize(self, renderings: list[Rendering], escaped: list[list[str]]) -> tuple[Int32, Int64]:
        """Flat ids of all renderings, and [n + 1] offsets; the engine serves those without control strings as text."""
        if self._engine is None:
            parts = [np.array(self.tokenize_by_reference(r), np.int32) for r in renderings]
            return _joined(parts)
        texts = [
            "" if found else "".join(part for part, _ in self.renderer.segments(r)) if r.base else r.text
            for r, found in zip(renderings, escaped, strict=True)
        ]
        buffer, ends = self._engine.encode_batch_flat(texts)
        flat, offsets = np.frombuffer(buffer, np.int32), np.frombuffer(ends, np.int64)
        if not any(escaped):
            return flat, offsets
        return _joined(
            [
                np.array(self.tokenize_by_reference(r), np.int32) if found else flat[offsets[i] : offsets[i + 1]]
                for i, (r, found) in enumerate(zip(renderings, escaped, strict=True))
            ]
        )

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of text in which no added token is recognised."""
        if self._plain is None:
            from tokenizers import Tokenizer

            body = json.loads(self._files.json) | {"added_tokens": [], "post_processor": None}
            self._plain = Tokenizer.from_str(json.dumps(body | {"truncation": None, "padding": None}))
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def _check(self, done: list[tuple[int, Rendering]], escaped: list[list[str]], ids: Int32, offsets: Int64) -> None:
        """Compare the engine with the reference on the first two chats of every batch that it encodes."""
        if self._engine is None:
            return
        for i in [i for i, found in enumerate(escaped) if not found][:2]:
            doc_id, rendering = done[i]
            if ids[offsets[i] : offsets[i + 1]].tolist() != self.tokenize_by_reference(rendering):
                raise MismatchError(f"document {doc_id}: fastokens gives other ids than tokenizers")

    def _documents(self, done: list[tuple[int, Rendering]], ids: Int32, offsets: Int64) -> list[Document | Reject]:
        """Cut flat ids into documents and find their targets, all turns at once.

        Worked example, one turn ``<|im_start|>assistant\\nHi<|im_end|>\\n`` of tokens 12, 9, 1, 2, 10, 1 bytes: the
        start token at 0 ends at byte 12, its targets begin 10 bytes later (``assistant\\n``) at byte 22, which is where
        token 3 begins, and end with token 4; the turn ends behind token 5.
        """
        num_bytes = self._token_bytes[ids]
        ends_b = np.cumsum(num_bytes, dtype=np.int64)
        turn_starts, turn_stops = np.flatnonzero(ids == self._start), np.flatnonzero(ids == self._end)
        doc_of_turn = np.repeat(np.arange(len(done)), np.array([len(r.roles) for _, r in done], np.int64))
        in_place = len(turn_starts) == len(turn_stops) == len(doc_of_turn) and bool(
            (np.searchsorted(offsets, turn_starts, side="right") - 1 == doc_of_turn).all()
        )
        assert in_place, "the turns of the renderings are not those of the ids"
        skips = np.array([skip for _, r in done for skip in r.skips], np.int64)
        first = np.searchsorted(ends_b - num_bytes, ends_b[turn_starts] + skips)
        turn_ends = np.append(turn_starts, len(ids))[1:]
        first, num = self._choose(first, turn_starts, turn_stops, turn_ends, skips, doc_of_turn)
        mask = _runs(first[num > 0], num[num > 0], len(ids))
        starts = offsets[doc_of_turn]
        roles: UInt8 = np.array([role for _, r in done for role in r.roles], np.uint8)
        columns = (
            roles,
            (turn_ends - starts).astype(np.int32),
            num.astype(np.int32),
            np.where(num > 0, first - starts, -1).astype(np.int32),
        )
        turn_offsets = np.searchsorted(doc_of_turn, np.arange(len(done) + 1)).tolist()
        token_offsets = offsets.tolist()
        out = []
        for i, (doc_id, _) in enumerate(done):
            tokens, turns = slice(*token_offsets[i : i + 2]), slice(*turn_offsets[i : i + 2])
            out.append(_document(doc_id, ids[tokens], mask[tokens], columns, turns))
        return out

    def _choose(
        self, first: Int64, turn_starts: Int64, turn_stops: Int64, turn_ends: Int64, skips: Int64, doc_of_turn: Int64
    ) -> tuple[Int64, Int64]:
        """[turns] first target and number of targets of each turn, by ``--targets``."""
        if self._targets == "all":  # every token but a document's first
            opens = np.diff(doc_of_turn, prepend=-1) > 0
            first = turn_starts + opens
            return first, turn_ends - first
        wanted = skips >= 0
        if self._targets == "last":
            last = np.zeros(len(doc_of_turn), np.int64)
            np.maximum.at(last, doc_of_turn[wanted], np.flatnonzero(wanted))
            wanted &= last[doc_of_turn] == np.arange(len(doc_of_turn))
        return first, np.where(wanted, turn_stops + 1 - first, 0)


def _document(
    doc_id: int, ids: Int32, mask: Bool, columns: tuple[UInt8, Int32, Int32, Int32], turns: slice
) -> Document | Reject:
    """One document from its slices, positions counted from its first token; a Reject if it has no target."""
    roles, turn_ends, num, first = columns
    if not num[turns].any():
        return Reject(doc_id=doc_id, what="rejected", reason="no_target", detail="no assistant turn", tokens=len(ids))
    return Document(
        doc_id=doc_id,
        input_ids=ids,
        loss_mask=mask,
        turn_ends=turn_ends[turns],
        roles=roles[turns],
        turn_targets=num[turns],
        turn_first_target=first[turns],
    )


def _joined(parts: list[Int32]) -> tuple[Int32, Int64]:
    return np.concatenate([np.zeros(0, np.int32), *parts]), np.cumsum([0, *map(len, parts)])


def _runs(first: Int64, num: Int64, length: int) -> Bool:
    """[length] True in every run of ``num`` that begins at ``first``."""
    steps = np.zeros(length + 1, np.int8)
    np.add.at(steps, first, 1)
    np.add.at(steps, first + num, -1)
    return np.cumsum(steps[:-1], dtype=np.int8).astype(np.bool_)


# ---------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRecord:
    """What is known of a cached block: written after it, the proof that it is whole."""

    name: str
    """File name in the cache folder."""
    xxh3_128: str
    """Hash of the file."""
    num_chats: int
    """Rows of the source in the block."""
    tokens_rejected: int
    """Tokens of chats that were rendered and then rejected."""
    rejects: tuple[Reject, ...]
    """Rejected and escaped chats."""

    @classmethod
    def read(cls, folder: Path, name: str) -> "BlockRecord | None":
        """The record of the block called ``name`` if it and its block are whole, else None."""
        if (body := read_note(folder / f"{name}.json")) is None:
            return None
        try:
            rejects = tuple(Reject(**entry) for entry in body.pop("rejects"))
            record = cls(rejects=rejects, **body)
            return record if hash_file(folder / record.name) == record.xxh3_128 else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def encode_fingerprint(recipe: dict[str, Any]) -> str:
    """Names the cache: digests, split, columns, tokenizer, encode; no row length, limit, path or file name."""
    sources = [
        {
            **{key: source[key] for key in ("split", "messages_column", "tools_column")},
            # Where the hub gives no digest of what was read, its commit identifies it.
            "revision": None if digests and all(digests) else [source["id"], source["revision"]],
            "files": [file["sha256"] or file["name"] for file in source["files"]],
        }
        for source in recipe["source"]
        for digests in [[file["sha256"] for file in source["files"]]]
    ]
    tokenizer = {key: value for key, value in recipe["tokenizer"].items() if key != "model"}
    return fingerprint({"source": sources, "tokenizer": tokenizer, "encode": recipe["encode"]})


def block_name(block: Block) -> str:
    """File name of a block in the cache: its rows."""
    return f"block-{block.first_doc_id:09d}-{block.first_doc_id + block.num_rows:09d}"


def encode_block(encoder: Encoder, block: Block, folder: Path) -> BlockRecord:
    """Encode one block into ``folder``: the Arrow file first, its record last.

    Raises:
        MismatchError: a fast path differs from its reference.
        OSError: disk full and the like; nothing half-written is left.
    """
    documents: list[Document] = []
    rejects: list[Reject] = []
    chats: list[Conversation] = []

    def flush() -> None:
        for item in encoder.encode(chats):
            (rejects if isinstance(item, Reject) else documents).append(item)  # type: ignore[arg-type]
        chats.clear()

    for row in read_block(block):
        if isinstance(row, Reject):
            rejects.append(row)
        else:
            chats.append(row)
        if len(chats) == CHATS_AT_ONCE:
            flush()
    flush()
    entry = publish(folder / f"{block_name(block)}.arrow", _block_bytes(documents))
    record = BlockRecord(
        name=entry["name"],
        xxh3_128=entry["xxh3_128"],
        num_chats=block.num_rows,
        tokens_rejected=sum(r.tokens for r in rejects),
        rejects=tuple(sorted(rejects, key=lambda r: (r.doc_id, r.what))),
    )
    write_note(folder / f"{block_name(block)}.json", asdict(record))
    return record


def _block_bytes(documents: list[Document]) -> pa.Buffer:
    documents.sort(key=lambda d: d.doc_id)
    columns: list[pa.Array] = [pa.array([d.doc_id for d in documents], pa.int64())]
    for field in list(BLOCK_SCHEMA)[1:]:
        parts = [getattr(d, field.name) for d in documents]
        values = pa.array(np.concatenate(parts) if parts else [], field.type.value_type)
        offsets = np.cumsum([0, *map(len, parts)])
        large = pa.types.is_large_list(field.type)
        kind = pa.LargeListArray if large else pa.ListArray
        columns.append(kind.from_arrays(pa.array(offsets, pa.int64() if large else pa.int32()), values))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, BLOCK_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=BLOCK_SCHEMA))
    return sink.getvalue()


def open_block(folder: Path, record: BlockRecord) -> pa.RecordBatch:
    """The documents of a cached block, memory-mapped."""
    return pa.ipc.open_file(pa.memory_map(str(folder / record.name))).get_batch(0)


def token_positions(folder: Path, record: BlockRecord) -> tuple[int, int]:
    """Bytes of a cached block's file at which its flat ids and its flat mask begin."""
    with pa.memory_map(str(folder / record.name)) as file:
        whole = file.read_buffer()
    batch = pa.ipc.open_file(whole).get_batch(0)
    found = [batch.column(name).values.buffers()[1] for name in ("input_ids", "loss_mask")]
    ids, mask = (buffer.address - whole.address if buffer and buffer.size else 0 for buffer in found)
    return ids, mask


def _escaped_line(doc_id: int, found: list[str]) -> Reject:
    tools = sum("tool_" in text for text in found)
    detail = f"{len(found)} control strings as text, {tools} of them tool tags"
    return Reject(doc_id=doc_id, what="escaped", reason="", detail=detail)
