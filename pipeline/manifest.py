"""What a dataset is: its manifest, its two identities, the canonical bytes behind them.

``manifest.json`` holds exactly the canonical JSON of its content (sorted keys, no spaces, UTF-8 unescaped, no floats)
and one line break; a reader serialises again and compares bytes, then the checksum, then both identities.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

FORMAT = "packed-arrow"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"

REJECT_REASONS = (
    "no_messages", "bad_type", "invalid_json", "invalid_unicode", "unknown_role", "template_refuses",
    "template_drops_text", "no_target", "prompt_longer_than_row", "round_longer_than_row", "longer_than_row",
)  # fmt: skip
"""Why a document is not in the dataset: a closed list, part of the format."""

REJECT_KINDS = ("escaped", "rejected", "split", "truncated")
"""What a line of ``rejects.jsonl`` reports."""


class DatasetError(ValueError):
    """A dataset cannot be read, or not be written, as the format demands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a dataset is: what was asked for, what came out, and which files hold it."""

    format_version: int
    """Version of the format it was written in."""
    max_tokens: int
    """T, the length of every row in tokens."""
    fingerprint: str
    """sha256 of the canonical recipe: what was asked."""
    dataset_id: str
    """sha256 of the canonical manifest without dataset_id, created and checksum: what came out."""
    checksum: str
    """xxh3_128 of the canonical manifest without itself: damage anywhere in the file is found."""
    recipe: dict[str, Any]
    """Every setting that shapes the content, with the digests of the sources and of the tokenizer."""
    totals: dict[str, Any]
    """Counts of chats, documents, tokens and targets; nothing disappears from them."""
    limits: dict[str, Any]
    """What kernels need to know: max_segments_per_row, max_segment_tokens, max_token_id, sum_of_squared_lengths."""
    histograms: dict[str, Any]
    """piece_tokens and pieces_per_row."""
    files: dict[str, Any]
    """shards[] and others[], each with name, bytes and xxh3_128."""
    created: dict[str, Any]
    """Time, paths, milliseconds by stage, versions: no part of either identity."""

    @classmethod
    def build(cls, *, recipe: dict[str, Any], created: dict[str, Any], **content: dict[str, Any]) -> Self:
        """Complete a manifest with its version, identities and checksum.

        Args:
            recipe: as in the class; ``recipe["pack"]["max_tokens"]`` is T.
            created: as in the class.
            content: totals, limits, histograms, files.
        """
        body = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "max_tokens": recipe["pack"]["max_tokens"],
            "fingerprint": fingerprint(recipe),
            "recipe": recipe,
            **content,
        }
        body["dataset_id"] = hashlib.sha256(canonical_bytes(body)).hexdigest()
        body["created"] = created
        body["checksum"] = xxhash.xxh3_128_hexdigest(canonical_bytes(body))
        return cls(**{name: body[name] for name in cls.__dataclass_fields__})

    def to_bytes(self) -> bytes:
        """The canonical bytes, one line break after them: exactly what the file holds."""
        body = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return canonical_bytes({"format": FORMAT, **body}) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = MANIFEST) -> Self:
        """Parse and check a manifest: version, canonical form, checksum, both identities, structure.

        Raises:
            DatasetError: for anything else than what ``to_bytes`` writes.
        """
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise damaged(where, "one JSON object", f"unreadable bytes ({type(error).__name__})") from None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise damaged(where, f'"format": "{FORMAT}"', "something else")
        try:
            _refuse_floats(body)
        except TypeError:
            raise damaged(
                where, "canonical JSON", f"a float, or values nested more than {_MAX_DEPTH} levels deep"
            ) from None
        version = body.get("format_version")
        if version != FORMAT_VERSION or isinstance(version, bool):
            raise DatasetError(
                f"{where}: format_version is {version!r}; this program reads {FORMAT_VERSION}. "
                "Read it with the version of this package that wrote it, or pack again."
            )
        _check_structure(body, where)
        _check_identities(body, data, where)
        return cls(**{name: body[name] for name in cls.__dataclass_fields__})

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read ``directory/manifest.json``. Raises DatasetError where there is none or it is damaged."""
        path = directory / MANIFEST
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DatasetError(
                f"{directory} is not a packed dataset: {path} cannot be read ({error.strerror}). "
                "Make one with: python -m pipeline.pack --max-tokens 8192 --out data/packed"
            ) from None
        return cls.from_bytes(data, where=str(path))

    def all_files(self) -> list[dict[str, Any]]:
        """Every file listed: shards, then others."""
        return [*self.files["shards"], *self.files["others"]]


def canonical_bytes(value: dict[str, Any]) -> bytes:
    """JSON with sorted keys, no spaces, UTF-8 unescaped. Floats are refused: they have no one spelling."""
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def fingerprint(recipe: dict[str, Any]) -> str:
    """sha256 of a recipe: equal exactly when the same content was asked for."""
    return hashlib.sha256(canonical_bytes(recipe)).hexdigest()


def differing_fields(a: Any, b: Any, prefix: str = "") -> list[str]:
    """Lines ``path: a -> b`` for every leaf in which two recipes differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [line for k in keys for line in differing_fields(a.get(k), b.get(k), f"{prefix}.{k}".lstrip("."))]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [line for i, (x, y) in pairs for line in differing_fields(x, y, f"{prefix}[{i}]")]
    return [] if a == b else [f"{prefix}: {a!r} -> {b!r}"]


def damaged(where: str, expected: str, found: str) -> DatasetError:
    """The error for a file that does not hold what the manifest or the format says."""
    return DatasetError(
        f"{where}: expected {expected}, found {found}. The dataset is damaged or incomplete: "
        "restore the file, or delete the directory and pack again (encoded blocks in the cache are reused)."
    )


_MAX_DEPTH = 100  # levels; Python's own limit depends on who calls


def _refuse_floats(value: Any, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise TypeError(f"nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, float):
        raise TypeError(f"{value!r}: a float has no canonical spelling; store an integer in a smaller unit")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_floats(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item, depth + 1)


_STRUCTURE: dict[str, type] = {
    "max_tokens": int, "fingerprint": str, "dataset_id": str, "checksum": str, "recipe": dict, "totals": dict,
    "limits": dict, "histograms": dict, "files": dict, "created": dict,
}  # fmt: skip
_TOTALS: dict[str, type] = dict.fromkeys(
    ("chats_read", "documents", "truncated", "split", "escaped", "pieces", "rows", "targets", "rounds_cut",
     "tokens_rendered", "tokens", "tokens_cut", "tokens_rejected", "padding"), int,
) | {"rejected": dict}  # fmt: skip
_LIMITS: dict[str, type] = dict.fromkeys(
    ("max_segments_per_row", "max_segment_tokens", "max_token_id", "sum_of_squared_lengths"), int
)
_SHARD_FIELDS: dict[str, type] = {"name": str, "rows": int, "pieces": int, "tokens": int, "targets": int, "bytes": int,
                                  "xxh3_128": str}  # fmt: skip
_OTHER_FIELDS: dict[str, type] = {"name": str, "bytes": int, "xxh3_128": str}
_OTHER_NAME = re.compile(r"rejects\.jsonl|tokenizer/[A-Za-z0-9_][A-Za-z0-9_.-]*")


def _check_structure(body: dict[str, Any], where: str) -> None:
    extra = body.keys() - _STRUCTURE.keys() - {"format", "format_version"}
    if extra:
        raise damaged(where, "no other fields", f"{sorted(extra)[:5]}")
    _check_fields(body, _STRUCTURE, where)
    if not 2 <= body["max_tokens"] < 2**31:
        raise damaged(where, "max_tokens from 2 to 2**31 - 1", str(body["max_tokens"]))
    _check_fields(body["totals"], _TOTALS, f"{where}: totals")
    _check_fields(body["limits"], _LIMITS, f"{where}: limits")
    _check_fields(body["files"], {"shards": list, "others": list}, f"{where}: files")
    for i, entry in enumerate(body["files"]["shards"]):
        _check_fields(entry, _SHARD_FIELDS, f"{where}: files.shards[{i}]")
        if entry["rows"] >= 2**31:
            raise damaged(where, f"fewer than 2**31 rows in shard {i}", str(entry["rows"]))
        if entry["name"] != f"shard-{i:05d}.arrow":
            raise damaged(where, f"shard {i} named shard-{i:05d}.arrow", repr(entry["name"]))
    for i, entry in enumerate(body["files"]["others"]):
        _check_fields(entry, _OTHER_FIELDS, f"{where}: files.others[{i}]")
        if not _OTHER_NAME.fullmatch(entry["name"]):  # a name is joined to the directory: it must stay inside
            raise damaged(where, "rejects.jsonl or tokenizer/NAME", repr(entry["name"]))


def _check_fields(body: Any, fields: dict[str, type], where: str) -> None:
    if not isinstance(body, dict):
        raise damaged(where, "an object", type(body).__name__)
    for name, kind in fields.items():
        value = body.get(name)
        no_count = isinstance(value, bool) or (isinstance(value, int) and not 0 <= value < 2**63)
        if not isinstance(value, kind) or no_count:
            raise damaged(where, f"{name} of type {kind.__name__}", repr(value)[:80])


def _check_identities(body: dict[str, Any], data: bytes, where: str) -> None:
    try:
        if canonical_bytes(body) + b"\n" != data:
            raise damaged(where, "canonical JSON", "other bytes")
    except (TypeError, UnicodeEncodeError):
        raise damaged(where, "canonical JSON", "a float or a lone surrogate") from None
    without = {k: v for k, v in body.items() if k != "checksum"}
    identity = {k: v for k, v in without.items() if k not in ("dataset_id", "created")}
    for name, found in (
        ("checksum", xxhash.xxh3_128_hexdigest(canonical_bytes(without))),
        ("fingerprint", fingerprint(body["recipe"])),
        ("dataset_id", hashlib.sha256(canonical_bytes(identity)).hexdigest()),
    ):
        if body[name] != found:
            raise damaged(where, f"{name} {found}", body[name])
