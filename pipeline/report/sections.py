"""The parts of a report as names and what they are: printed in a terminal, and in the page beside its pictures.

Guarantees: every figure comes from ``pipeline.report.figures`` or, where only that knows it, from the manifest; a
recipe that lacks a field is an error that names it.
"""

import json
from dataclasses import dataclass
from typing import Any

from pipeline.manifest import Manifest, damaged
from pipeline.report.copies import Copies
from pipeline.report.figures import Figures, Spread
from pipeline.report.oddities import equations, looks_odd
from pipeline.report.scan import OPENING
from pipeline.report.signs import to_look_at
from pipeline.report.wording import listed, many, share

Lines = list[tuple[str, str]]
NOTHING: Lines = [("-", "Nothing.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the report."""

    title: str
    """Its heading."""
    lines: Lines
    """Names and what they are."""
    bars: dict[str, Any] | None = None
    """A histogram to draw: width and counts, bar i from i * width to (i + 1) * width - 1."""


def parts(f: Figures) -> list[Part]:
    """The whole report, what looks odd first."""
    pieces, rows = f.histograms["piece_tokens"], f.histograms["pieces_per_row"]
    odd = [("-", sentence) for sentence in looks_odd(f)]
    return [
        Part(title="What looks odd", lines=odd or NOTHING),
        Part(title="Recipe", lines=recipe(f.manifest)),
        Part(title="Account", lines=account(f)),
        Part(title="Piece lengths, tokens", lines=spread(f.spreads.get("piece_tokens")), bars=pieces),
        Part(title="Pieces per row", lines=spread(f.spreads.get("pieces_per_row")), bars=rows),
        Part(title="Targets per piece, share of its tokens", lines=spread(f.spreads.get("target_share"), share=True)),
        Part(title="By role", lines=roles(f)),
        Part(title="Against other ways to fill rows", lines=ways(f)),
        Part(title="The same more than once", lines=copies(f)),
        Part(title="Rows to look at", lines=_rows(f) or NOTHING),
        Part(title="Rejected, truncated, split, escaped", lines=kinds(f)),
        Part(title="What kernels meet", lines=limits(f)),
        Part(title="Made", lines=identity(f.manifest)),
    ]  # fmt: skip


def identity(manifest: Manifest) -> Lines:
    """Which dataset, when it was made and with what."""
    made = manifest.created
    versions = ", ".join(f"{name} {version}" for name, version in _dict(made.get("versions")).items())
    return [
        ("dataset_id", manifest.dataset_id), ("fingerprint", manifest.fingerprint),
        ("time", str(made.get("time", "unknown"))), ("versions", versions or "unknown"),
    ]  # fmt: skip


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def recipe(manifest: Manifest) -> Lines:
    """What was asked for.

    Raises:
        DatasetError: the recipe lacks a field, or holds another type.
    """
    try:
        return _recipe(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged("manifest.json", "a recipe with every field", f"another ({error!r:.80})") from None


def _recipe(manifest: Manifest) -> Lines:
    recipe = manifest.recipe
    tokenizer, encode, how = recipe["tokenizer"], recipe["encode"], recipe["pack"]
    sources = []
    for source in recipe["source"]:
        files = source["files"]
        size = sum(file["bytes"] or 0 for file in files)
        sources.append(("source", f"{source['id'] or 'local files'}, revision {source['revision'] or 'none'}, "
                        f"split {source['split'] or 'none'}, {many(len(files), 'file')}, {size:,} bytes, "
                        f"limit {source['limit'] or 'none'}"))  # fmt: skip
    kwargs = json.dumps(tokenizer["template_kwargs"], ensure_ascii=False, sort_keys=True)
    return [
        *(sources or [("source", "none")]),
        ("tokenizer", f"{tokenizer['model'] or 'local'}, {tokenizer['vocab_size']:,} ids, "
                      f"sha256 {tokenizer['tokenizer_sha256'][:12]}, template {tokenizer['template_sha256'][:12]}"),
        ("template", f"arguments {kwargs}"),
        ("targets", f"{encode['targets']}, encoding version {encode['version']}"),
        ("packing", f"T = {manifest.max_tokens:,}, overflow {how['overflow']}, seed {how['seed']}, "
                    f"algorithm {how['algorithm']}, compression {recipe['shards']['compression'] or 'none'}"),
    ]  # fmt: skip


def account(f: Figures) -> Lines:
    """What became of every chat, token and place."""
    found, max_tokens = f.totals, f.manifest.max_tokens
    capacity, shards = found["rows"] * max_tokens, f.manifest.files["shards"]
    files = f"{many(len(shards), 'shard')}, {sum(shard['bytes'] for shard in shards):,} bytes"
    return [
        *equations(f),
        ("rows", f"{found['rows']:,} in {files}; no packing of these pieces has fewer than {f.least_rows:,}: "
                 f"{found['rows'] - f.least_rows:,} above that bound"),
        ("fill", f"{share(found['tokens'], capacity):.3%}; padding {share(found['padding'], capacity):.3%}"),
        ("pieces", f"{found['pieces']:,} of {many(found['documents'], 'document')}"),
        ("targets", f"{found['targets']:,}, {share(found['targets'], found['tokens']):.1%} of the tokens"),
        ("cut", f"{many(f.manifest.totals['rounds_cut'], 'round')} left out whole"),
    ]  # fmt: skip


def spread(found: Spread | None, *, share: bool = False) -> Lines:
    """Mean and percentiles; as percentages if they are shares."""
    if found is None:
        return [("-", "none")]
    whole, mean = ("{:.1%}", "{:.1%}") if share else ("{:,.0f}", "{:,.1f}")
    named = {0: "least", 50: "median", 100: "most"}
    return [
        ("mean", mean.format(found.mean)),
        *((named.get(p, f"{p}%"), whole.format(value)) for p, value in found.percentiles.items()),
    ]


def roles(f: Figures) -> Lines:
    """Turns, tokens and targets of each role."""
    tokens, targets = f.totals["tokens"], f.totals["targets"]
    return [
        (role.name, f"{many(role.turns, 'turn')}; {many(role.tokens, 'token')}, {share(role.tokens, tokens):.1%} of "
                    f"all; {many(role.targets, 'target')}, {share(role.targets, role.tokens):.1%} of its tokens, "
                    f"{share(role.targets, targets):.1%} of all targets")
        for role in f.roles
    ] or NOTHING  # fmt: skip


def ways(f: Figures) -> Lines:
    """What other ways to lay the same pieces into rows cost."""
    return [
        (
            way.name,
            f"{many(way.rows, 'row')}, {way.padding:,} of padding, fill {way.fill:.3%}, {many(way.cut, 'piece')} cut",
        )
        for way in f.ways
    ]


def copies(f: Figures) -> Lines:
    """Identical documents, and those that open alike."""

    def said(found: Copies) -> str:
        largest = (
            f"; {group.num_documents:,} times {many(group.tokens, 'token')}, doc_ids "
            + listed(group.doc_ids, group.num_documents)
            for group in found.largest[:2]
        )
        return "".join([copied(found), *largest])

    return [("identical", said(f.identical)), (f"same {OPENING} tokens", said(f.repeated))]


def copied(found: Copies) -> str:
    """How many documents occur more than once."""
    if not found.num_groups:
        return "none"
    return (
        f"{found.num_documents:,} documents in {many(found.num_groups, 'group')}, {found.num_spare:,} beyond the first "
        f"of each with {many(found.spare_tokens, 'token')}"
    )


def _rows(f: Figures) -> Lines:
    rows = [(kind, f"row {row:,}: {why}") for kind, row, why in to_look_at(f.ends, f.signs)]
    return rows + [(sign.name, f"rows with this sign: {sign.num_rows:,}") for sign in f.signs if sign.num_rows]


def kinds(f: Figures) -> Lines:
    """What happened to chats that are not packed as they were."""
    return [(kind, f"{num:,}; doc_ids {listed(ids, num)}") for kind, num, ids in f.kinds] or [("-", "None.")]


def limits(f: Figures) -> Lines:
    """What kernels must hold, and what attention costs."""
    held, squared = f.limits, f.limits["sum_of_squared_lengths"]
    attention = share(squared, f.totals["rows"] * f.manifest.max_tokens**2)
    return [
        ("segments", f"at most {held['max_segments_per_row']:,} in a row, padding counted"),
        ("longest", f"{held['max_segment_tokens']:,} tokens, padding counted"),
        ("largest id", f"{held['max_token_id']:,}"),
        ("attention", f"sum of squared lengths {squared:,}: {attention:.1%} of what a document per full row costs"),
    ]  # fmt: skip
