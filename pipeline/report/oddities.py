"""What a practitioner would look into: where manifest and rows differ, what was lost, what is unusual.

Guarantees: one plain sentence for each, in the same order every time.
"""

from collections.abc import Iterator

from pipeline.manifest import differing_fields
from pipeline.report.figures import Figures
from pipeline.report.wording import many, share
from pipeline.summary import TOOL_TAGS_SHARE

LEAST_TARGETS, LEAST_FILL, MOST_LOST = 0.10, 0.99, 0.01  # shares beyond which something looks odd


def looks_odd(f: Figures) -> Iterator[str]:
    """One plain sentence for each thing that a practitioner would look into."""
    said, found = f.manifest.totals, f.totals
    yield from (f"The manifest and the rows differ (manifest -> rows): {line}: run verify." for line in _differ(f))
    yield from (f"The account does not add up: {line}." for _, line in equations(f) if "≠" in line)
    if (num := f.pieces.filter(f.pieces["targets"] == 0).height) > 0:
        yield f"Pieces without a target: {num:,}. Nothing is learned from them."
    if (part := share(found["targets"], found["tokens"])) < LEAST_TARGETS:
        yield f"Only {part:.1%} of the tokens are targets: look at the roles of the messages and at --targets."
    fill = share(found["tokens"], found["tokens"] + found["padding"])
    if fill < LEAST_FILL and found["padding"] >= f.manifest.max_tokens:  # less is what is left of the last row
        above = found["rows"] - f.least_rows
        why = "no packing of these pieces needs fewer rows" if above <= 0 else f"rows above the bound: {above:,}"
        yield f"The fill is only {fill:.2%}: {why}."
    for num, whole, what in (
        (found["truncated"], said["chats_read"], "chats are truncated: a larger --max-tokens keeps their ends"),
        (found["split"], said["chats_read"], "chats are split: their later pieces lack what was said before"),
        (sum(found["rejected"].values()), said["chats_read"], "chats are rejected: the reasons are below"),
        (said["tokens_cut"], said["tokens_rendered"], "tokens are cut: a larger --max-tokens keeps more of them"),
        (f.identical.num_spare, found["documents"], "documents are copies of another one: they weigh more in training"),
    ):
        if (part := share(num, whole)) > MOST_LOST:
            yield f"{part:.1%} of the {what}."
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


def equations(f: Figures) -> list[tuple[str, str]]:
    """Chats, tokens and space: that each adds up, or by a ≠ that it does not."""
    said, found, max_tokens = f.manifest.totals, f.totals, f.manifest.max_tokens

    def equal(left: int, text: str, *parts: tuple[int, str]) -> str:
        sign = "=" if left == sum(number for number, _ in parts) else "≠"
        return f"{left:,} {text} {sign} " + " + ".join(f"{number:,} {name}" for number, name in parts)

    rejected = sum(found["rejected"].values())
    return [
        ("chats", equal(said["chats_read"], "read", (found["documents"], "packed"), (rejected, "rejected"))),
        ("tokens", equal(said["tokens_rendered"], "rendered", (found["tokens"], "in rows"),
                         (said["tokens_cut"], "cut"), (said["tokens_rejected"], "rejected"))),
        ("space", equal(said["rows"] * max_tokens, f"in {many(said['rows'], 'row')} of {max_tokens:,}",
                        (found["tokens"], "tokens"), (found["padding"], "padding"))),
    ]  # fmt: skip
