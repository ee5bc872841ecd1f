"""The report of one dataset as a page: pictures and tables of its figures, and the token viewer.

    data = dataset_page(dataset, figures, asked=[12])

Guarantees: every number comes from ``pipeline.report.figures`` (chats read, tokens rendered, cut and rejected, rounds
cut: from the manifest), as the terminal's and ``--json``'s do; no network, and no script but the viewer's.
"""

from collections.abc import Collection, Sequence
from typing import Any

from pipeline.page import Mark, Markup, bars, element, facts, flow, page, ranked, section, shares, table, tiles, warning
from pipeline.report import sections
from pipeline.report.copies import Copies
from pipeline.report.figures import Figures
from pipeline.report.oddities import looks_odd
from pipeline.report.scan import OPENING
from pipeline.report.signs import RULES, choose, to_look_at
from pipeline.report.strips import picture, strips
from pipeline.report.viewer import viewer
from pipeline.report.wording import listed, many, share
from pipeline.shards import PackedDataset


def dataset_page(dataset: PackedDataset, f: Figures, *, asked: Sequence[int] = ()) -> bytes:
    """The page's bytes; ``asked`` are the rows that ``--row`` names."""
    chosen = choose(f.ends, f.signs, num_rows=len(dataset), asked=asked)
    shown, script, data = viewer(dataset, f.tokenizer, chosen)
    drawn = strips(f)
    parts = [
        _overview(f),
        section("Identity and recipe", facts([*sections.identity(f.manifest), *sections.recipe(f.manifest)])),
        _waterfall(f),
        _lengths(f),
        _per_row(f),
        section("Rows as strips", picture(dataset, drawn), note=_strips_note(len(drawn), len(dataset))),
        _ways(f),
        _roles(f),
        _copies(f),
        _rows(f, {row for row, _ in chosen}),
        section("Tokens", shown, note="The rows asked for, the rows to look at, then those that training takes first "
                "with seed 0. python -m pipeline.report DATASET --row N adds any other."),
        section("What kernels meet", facts(sections.limits(f))),
    ]  # fmt: skip
    return page(title=dataset.path.resolve().name, parts=parts, script=script, data=data)


def _overview(f: Figures) -> Markup:
    found = f.totals
    fill = f.ways[0].fill
    size = f"of {f.manifest.max_tokens:,} tokens; no packing needs fewer than {f.least_rows:,}"
    values = [
        ("Rows", f"{found['rows']:,}", size),
        ("Documents", f"{found['documents']:,}", f"{many(sum(found['rejected'].values()), 'chat')} rejected"),
        ("Tokens", _short(found["tokens"]), f"{share(found['tokens'], found['documents']):,.0f} a document"),
        ("Targets", f"{share(found['targets'], found['tokens']):.1%}", f"{found['targets']:,} tokens"),
        ("Fill", f"{fill:.3%}", f"{found['padding']:,} of padding"),
    ]
    odd = [warning(sentence) for sentence in looks_odd(f)]
    return section("Overview", tiles(values), *odd, "" if odd else "Nothing looks odd.")


def _short(num: int) -> str:
    """1234567 is 1.23 M."""
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if num >= size:
            return f"{num / size:.2f} {unit}"
    return f"{num:,}"


def _waterfall(f: Figures) -> Markup:
    said, found = f.manifest.totals, f.totals
    packed = said["tokens_rendered"] - said["tokens_rejected"]
    rejected = ", ".join(f"{num:,} {reason}" for reason, num in found["rejected"].items())
    shortened = f"{found['truncated']:,} truncated, {found['split']:,} split into several"
    chats = [
        ("read", said["chats_read"], ""),
        ("packed", found["documents"], f"rejected: {rejected or 'none'}"),
        ("packed whole", found["documents"] - found["truncated"] - found["split"], shortened),
    ]
    tokens = [
        ("rendered", said["tokens_rendered"], ""),
        ("of packed chats", packed, f"of rejected chats: {said['tokens_rejected']:,}"),
        ("in rows", found["tokens"], f"cut from documents longer than a row: {said['tokens_cut']:,}"),
        ("targets", found["targets"], f"read, not predicted: {found['tokens'] - found['targets']:,}"),
    ]
    space = [("targets", found["targets"]), ("other tokens", found["tokens"] - found["targets"]),
             ("padding", found["padding"])]  # fmt: skip
    kinds = [(kind, f"{num:,}", listed(ids, num)) for kind, num, ids in f.kinds]
    named = table(("what", "documents", "doc_ids"), kinds, caption="What happened to chats", numeric=(1,))
    return section(
        "From chats to targets",
        flow(chats, title="Chats", unit="chats"),
        flow(tokens, title="Tokens", unit="tokens"),
        element("div", shares(space, title=f"Places in {many(found['rows'], 'row')}", unit="tokens"), class_="places"),
        named if f.kinds else Markup(),
    )


_LOW_BARS = "Bars too low to be seen are drawn a little higher; the table tells their counts."


def _histogram(held: dict[str, Any], *, title: str, x_name: str, y_name: str, marks: Sequence[Mark] = ()) -> Markup:
    edges = [i * held["width"] for i in range(len(held["counts"]) + 1)]
    return bars(edges, held["counts"], title=title, x_name=x_name, y_name=y_name, marks=marks, whole=True)


def _lengths(f: Figures) -> Markup:
    mark = Mark(at=f.manifest.max_tokens, name=f"T = {f.manifest.max_tokens:,}")
    drawn = _histogram(f.histograms["piece_tokens"], title="Lengths of pieces", x_name="tokens", y_name="pieces",
                       marks=[mark])  # fmt: skip
    note = f"A piece is a document, or a part of one that was split over rows. {_LOW_BARS}"
    return section("Lengths", drawn, _spread(f), note=note)


def _spread(f: Figures) -> Markup:
    """Mean and percentiles side by side."""
    if not f.spreads:
        return Markup()
    names = ("piece_tokens", "pieces_per_row", "target_share")
    columns = [dict(sections.spread(f.spreads[name], share=name == "target_share")) for name in names]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    header = ("", "tokens", "pieces in a row", "targets of its tokens")
    return table(header, rows, caption="Mean and percentiles, over pieces and over rows", numeric=(1, 2, 3))


def _per_row(f: Figures) -> Markup:
    drawn = _histogram(f.histograms["pieces_per_row"], title="Pieces in a row", x_name="pieces", y_name="rows")
    return section("Pieces per row", drawn, note=_LOW_BARS)


def _strips_note(num: int, num_rows: int) -> str:
    return "All rows." if num == num_rows else f"{num} of {num_rows:,} rows, evenly spaced from the first to the last."


def _ways(f: Figures) -> Markup:
    total, max_tokens, pieces = f.totals["tokens"], f.manifest.max_tokens, f.totals["pieces"]
    rows = [(way.name, f"{way.rows:,}", f"{way.padding:,}", f"{way.fill:.3%}", f"{way.cut:,}") for way in f.ways]
    text = (
        f"The same {total:,} tokens in rows of T = {max_tokens:,}. Fill is tokens / (rows × T), padding rows × T − "
        f"tokens. One piece a row takes a row for each of the {pieces:,} pieces. Concatenation lays them end to end in "
        "their order and cuts every T tokens: tokens / T rows, rounded up; a piece is cut if its first and its last "
        "token fall into different rows."
    )
    header = ("way", "rows", "padding", "fill", "pieces cut")
    return section(
        "Against other ways to fill rows",
        ranked([(way.name, way.rows) for way in f.ways], title="Rows needed", unit="rows"),
        table(header, rows, caption="What each would cost", numeric=(1, 2, 3, 4)),
        note=text,
    )


def _roles(f: Figures) -> Markup:
    rows = [
        (role.name, f"{role.turns:,}", f"{role.targets:,}", f"{share(role.targets, role.tokens):.1%}",
         f"{share(role.targets, f.totals['targets']):.1%}")
        for role in f.roles
    ]  # fmt: skip
    header = ("role", "turns", "targets", "of its tokens", "of all targets")
    drawn = shares([(role.name, role.tokens) for role in f.roles], title="Tokens by role", unit="tokens")
    note = (
        "A turn belongs to the role in its header, <|im_start|>role and a line break, and reaches to the next one; the "
        "header counts. A user turn that begins with <tool_response> is a tool's."
    )
    return section("By role", drawn, table(header, rows, caption="Turns and targets", numeric=range(1, 5)),
                   note=note)  # fmt: skip


def _copies(f: Figures) -> Markup:
    note = (
        "Identical: the same token ids throughout (compared by xxh3_128). Repeated: documents that differ, yet share "
        f"the {OPENING} token ids from the first user turn on (from the beginning where there is none); of identical "
        f"documents the first counts, and those with fewer than {OPENING} tokens from there on are left out. Tokens "
        "and row are those of a group's first document."
    )
    return section("The same more than once", *_group("Identical documents", f.identical),
                   *_group("Repeated openings", f.repeated), note=note)  # fmt: skip


def _group(name: str, found: Copies) -> list[Markup]:
    if not found.num_groups:
        return [facts([(name, sections.copied(found))])]
    rows = [
        (f"{g.num_documents:,}", f"{g.tokens:,}", f"{g.row:,}", listed(g.doc_ids, g.num_documents))
        for g in found.largest
    ]
    caption = f"{name}: largest of {many(found.num_groups, 'group')}"
    header = ("documents", "tokens", "row", "doc_ids")
    return [facts([(name, sections.copied(found))]), table(header, rows, caption=caption, numeric=(0, 1, 2))]


def _rows(f: Figures, shown: Collection[int]) -> Markup:
    """Those that the viewer shows are links into it."""
    rows = [(_opens(row) if row in shown else f"{row:,}", kind, why) for kind, row, why in to_look_at(f.ends, f.signs)]
    signs = [(sign.name, RULES[sign.name], f"{sign.num_rows:,}") for sign in f.signs]
    note = (
        "Longest: rows with the longest pieces. Shortest: rows with the fewest tokens, of equal ones those with the "
        "shortest piece. Suspicious: rows with one of the signs below, and no others; the worst row of each sign, then "
        "the second of each, and so on. Extreme: the fewest targets, the most of one token; some row always has them."
    )
    return section(
        "Rows to look at",
        table(("row", "kind", "why"), rows, caption="Longest, shortest, suspicious, extreme", numeric=(0,)),
        table(("sign", "meaning", "rows"), signs, caption="Signs", numeric=(2,)),
        note=note,
    )


def _opens(row: int) -> Markup:
    return element("a", f"{row:,}", href="#tokens", data_row=row, title="Show its tokens")
