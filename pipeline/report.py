"""What a packed dataset looks like: a table here, or one HTML page beside the shards.

    python -m pipeline.report data/packed           # recipe, account, fill, lengths, targets, rejects, what looks odd
    python -m pipeline.report data/packed --html    # the same in data/packed/report.html

Guarantees: every figure comes from the rows, and where the manifest says otherwise, that is the first thing said. The
page loads nothing and runs nothing. Proves nothing: that is ``pipeline.verify``.
Costs: boundaries and masks of one shard at a time, never token ids; 40 bytes of memory a piece. Needs polars.
"""

import html
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pipeline.figures import Figures, measure
from pipeline.manifest import Manifest, differing_fields
from pipeline.shards import REPORT, PackedDataset, publish
from pipeline.summary import TOOL_TAGS_SHARE

if TYPE_CHECKING:
    import polars as pl

PERCENTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
LEAST_TARGETS, LEAST_FILL, MOST_LOST = 0.10, 0.99, 0.01  # shares beyond which something looks odd
NOTHING = [("-", "Nothing.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Show what a packed dataset looks like."""

    dataset: Annotated[Path, tyro.conf.Positional]
    """Folder that holds manifest.json."""
    html: bool = False
    """Also write the report as one self-contained page, report.html in that folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of the report."""

    title: str
    """Its heading."""
    lines: list[tuple[str, str]]
    """Names and what they are."""
    bars: dict[str, Any] | None = None
    """A histogram to draw: width and counts, bar i from i * width to (i + 1) * width - 1."""


def main() -> int:
    """The command line. Returns the exit status."""
    settings = tyro.cli(Settings, prog="python -m pipeline.report")
    try:
        dataset = PackedDataset.open(settings.dataset)
        sections = report(measure(dataset))
        print(as_text(sections))
        if settings.html:
            path = dataset.path / REPORT
            publish(path, as_html(sections, title=str(dataset.path.resolve().name)).encode())
            print(f"\n{path}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


# ---------------------------------------------------------------------------------------------- content


def report(f: Figures) -> list[Section]:
    """The whole report, what looks odd first."""
    lengths, pieces, rows = f.pieces["tokens"], f.histograms["piece_tokens"], f.histograms["pieces_per_row"]
    per_row = f.pieces["row"].value_counts()["count"]
    shares = f.pieces["targets"] * 100 / lengths
    odd = [("-", sentence) for sentence in looks_odd(f)]
    in_rows = [
        (kind, f"{num:,}; doc_ids {', '.join(map(str, ids))}{' ...' * (num > len(ids))}") for kind, num, ids in f.kinds
    ]
    made = f.manifest.created
    versions = ", ".join(f"{name} {version}" for name, version in made.get("versions", {}).items())
    return [
        Section(title="What looks odd", lines=odd or NOTHING),
        Section(title="Recipe", lines=_recipe(f.manifest)),
        Section(title="Account", lines=_account(f)),
        Section(title="Piece lengths, tokens", lines=_percentiles(lengths, "{:,.0f}"), bars=pieces),
        Section(title="Pieces per row", lines=_percentiles(per_row, "{:,.0f}"), bars=rows),
        Section(title="Targets per piece, share of its tokens", lines=_percentiles(shares, "{:.1f} %")),
        Section(title="Rejected, truncated, split, escaped", lines=in_rows or [("-", "None.")]),
        Section(title="What kernels meet", lines=_limits(f)),
        Section(title="Made", lines=[("time", made.get("time", "unknown")), ("versions", versions or "unknown"),
                                     ("dataset_id", f.manifest.dataset_id), ("fingerprint", f.manifest.fingerprint)]),
    ]  # fmt: skip


def looks_odd(f: Figures) -> Iterator[str]:
    """One plain sentence for each thing that a practitioner would look into."""
    said, found = f.manifest.totals, f.totals
    yield from (f"The manifest and the rows differ (manifest -> rows): {line}: run verify." for line in _differ(f))
    yield from (f"The account does not add up: {line}." for _, line in _equations(said, f) if "≠" in line)
    if (num := f.pieces.filter(f.pieces["targets"] == 0).height) > 0:
        yield f"Pieces without a target: {num:,}. Nothing is learned from them."
    if (share := _share(found["targets"], found["tokens"])) < LEAST_TARGETS:
        yield f"Only {share:.1%} of the tokens are targets: look at the roles of the messages and at --targets."
    fill = _share(found["tokens"], found["tokens"] + found["padding"])
    if fill < LEAST_FILL:
        above = found["rows"] - f.least_rows
        why = "no packing of these pieces needs fewer rows" if above <= 0 else f"rows above the bound: {above:,}"
        yield f"The fill is only {fill:.2%}: {why}."
    for num, whole, what in (
        (said["truncated"], said["chats_read"], "chats are truncated: a larger --max-tokens keeps their ends"),
        (said["split"], said["chats_read"], "chats are split: their later pieces lack what was said before"),
        (sum(said["rejected"].values()), said["chats_read"], "chats are rejected: the reasons are below"),
        (said["tokens_cut"], said["tokens_rendered"], "tokens are cut: a larger --max-tokens keeps more of them"),
    ):
        if (share := _share(num, whole)) > MOST_LOST:
            yield f"{share:.1%} of the {what}."
    if f.tool_tags * TOOL_TAGS_SHARE > said["chats_read"]:
        yield f"Chats with tool tags as plain text: {f.tool_tags:,}. Inline calls belong in tool_calls of the message."


def _differ(f: Figures) -> list[str]:
    """Where the manifest says something else than the rows; a histogram that it lacks is no difference."""
    said = {name: bars for name, bars in f.manifest.histograms.items() if bars}
    pairs = (
        ("totals", f.manifest.totals, f.totals),
        ("limits", f.manifest.limits, f.limits),
        ("histograms", said, f.histograms),
    )
    return [
        line
        for part, listed, found in pairs
        for name in [name for name in found if name in listed]
        for line in differing_fields(listed[name], found[name], f"{part}.{name}")[:1]
    ]


def _equations(said: dict[str, Any], f: Figures) -> list[tuple[str, str]]:
    rejected, found, max_tokens = sum(said["rejected"].values()), f.totals, f.manifest.max_tokens

    def equal(left: int, text: str, *parts: tuple[int, str]) -> str:
        sign = "=" if left == sum(number for number, _ in parts) else "≠"
        return f"{left:,} {text} {sign} " + " + ".join(f"{number:,} {name}" for number, name in parts)

    return [
        ("chats", equal(said["chats_read"], "read", (found["documents"], "packed"), (rejected, "rejected"))),
        ("tokens", equal(said["tokens_rendered"], "rendered", (found["tokens"], "in rows"),
                         (said["tokens_cut"], "cut"), (said["tokens_rejected"], "rejected"))),
        ("space", equal(said["rows"] * max_tokens, f"in {said['rows']:,} rows of {max_tokens:,}",
                        (found["tokens"], "tokens"), (found["padding"], "padding"))),
    ]  # fmt: skip


def _account(f: Figures) -> list[tuple[str, str]]:
    found, max_tokens = f.totals, f.manifest.max_tokens
    capacity, shards = found["rows"] * max_tokens, f.manifest.files["shards"]
    return [
        *_equations(f.manifest.totals, f),
        ("rows", f"{found['rows']:,} in {len(shards):,} shards, {sum(s['bytes'] for s in shards):,} bytes; no packing "
                 f"of these pieces has fewer than {f.least_rows:,}: {found['rows'] - f.least_rows:,} above that bound"),
        ("fill", f"{_share(found['tokens'], capacity):.3%}; padding {_share(found['padding'], capacity):.3%}"),
        ("pieces", f"{found['pieces']:,} of {found['documents']:,} documents"),
        ("targets", f"{found['targets']:,}, {_share(found['targets'], found['tokens']):.1%} of the tokens"),
        ("cut", f"{f.manifest.totals['rounds_cut']:,} rounds left out whole"),
    ]  # fmt: skip


def _recipe(manifest: Manifest) -> list[tuple[str, str]]:
    recipe = manifest.recipe
    tokenizer, encode, how = recipe["tokenizer"], recipe["encode"], recipe["pack"]
    sources = []
    for source in recipe["source"]:
        files = source["files"]
        size = sum(file["bytes"] or 0 for file in files)
        sources.append(("source", f"{source['id'] or 'local files'}, revision {source['revision'] or 'none'}, "
                        f"split {source['split'] or 'none'}, {len(files):,} files, {size:,} bytes, "
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


def _limits(f: Figures) -> list[tuple[str, str]]:
    limits, squared = f.limits, f.limits["sum_of_squared_lengths"]
    attention = _share(squared, f.totals["rows"] * f.manifest.max_tokens**2)
    return [
        ("segments", f"at most {limits['max_segments_per_row']:,} in a row, padding counted"),
        ("longest", f"{limits['max_segment_tokens']:,} tokens, padding counted"),
        ("largest id", f"{f.manifest.limits['max_token_id']:,} (as the manifest says)"),
        ("attention", f"sum of squared lengths {squared:,}: {attention:.1%} of what a document per full row costs"),
    ]  # fmt: skip


def _percentiles(values: "pl.Series", form: str) -> list[tuple[str, str]]:
    if not len(values):
        return [("-", "none")]
    named = {0: "least", 50: "median", 100: "most"}
    held = [(named.get(p, f"{p} %"), values.quantile(p / 100, interpolation="nearest")) for p in PERCENTILES]
    return [
        ("mean", form.replace(".0f", ".1f").format(values.mean())),
        *((name, form.format(value)) for name, value in held),
    ]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# ------------------------------------------------------------------------------------------------ shown


def as_text(sections: list[Section]) -> str:
    """The report for a terminal."""
    return "\n\n".join(
        "\n".join([section.title, *_columns(section.lines), *_text_bars(section.bars)]) for section in sections
    )


def _columns(lines: list[tuple[str, str]]) -> list[str]:
    wide = max(len(name) for name, _ in lines) + 2
    return [f"  {name:<{wide}}{text}" for name, text in lines]


def _text_bars(bars: dict[str, Any] | None) -> list[str]:
    held = _grouped(bars, most=16)
    top = max((count for _, count in held), default=0)
    return [f"{label:>17}  {count:>9,} {'█' * -(-count * 40 // top)}".rstrip() for label, count in held]


def _grouped(bars: dict[str, Any] | None, *, most: int) -> list[tuple[str, int]]:
    """At most so many bars, with their labels: neighbours are added up."""
    counts, width = (bars["counts"], bars["width"]) if bars else ([], 1)
    step = max(1, -(-len(counts) // most))
    wide = width * step
    return [
        (f"{i * width:,}" if wide == 1 else f"{i * width:,} to {i * width + wide - 1:,}", sum(counts[i : i + step]))
        for i in range(0, len(counts), step)
    ]


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem } table { border-collapse: collapse }
td { padding: .15rem 1rem .15rem 0; vertical-align: top; overflow-wrap: anywhere }
td:first-child { color: #666; white-space: nowrap }
svg { width: 100%; margin-top: 1rem } rect { fill: #4477aa } text { font-size: 12px; fill: #666 }
.odd td:last-child { color: #9a3412 }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def as_html(sections: list[Section], *, title: str) -> str:
    """The report as one page that loads and runs nothing; ``title`` is the dataset's name."""
    out = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>',
        f"<body><h1>{html.escape(title)}</h1>",
    ]
    for i, section in enumerate(sections):
        mark = " class=odd" if i == 0 and section.lines != NOTHING else ""
        out.append(f"<section{mark}><h2>{html.escape(section.title)}</h2><table>")
        out += [f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in section.lines]
        out.append("</table>" + _svg(_grouped(section.bars, most=64)) + "</section>")
    return "\n".join([*out, "</body></html>\n"])


def _svg(bars: list[tuple[str, int]]) -> str:
    """Bars of 640 by 160, a tooltip on each, the first and the last label below."""
    if not (top := max((count for _, count in bars), default=0)):
        return ""
    wide = 640 / len(bars)
    drawn = "".join(
        f'<rect x="{i * wide:.2f}" y="{176 - 160 * count / top:.2f}" width="{wide * 0.9:.2f}" '
        f'height="{160 * count / top:.2f}"><title>{label}: {count:,}</title></rect>'
        for i, (label, count) in enumerate(bars)
    )
    ends = f'<text x="0" y="192">{bars[0][0]}</text><text x="640" y="192" text-anchor="end">{bars[-1][0]}</text>'
    svg = '<svg viewBox="0 0 640 200" role="img" aria-label="histogram">'
    return f'\n{svg}<text x="0" y="12">up to {top:,}</text>{drawn}{ends}</svg>'


if __name__ == "__main__":
    sys.exit(main())
