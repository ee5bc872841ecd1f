"""Two packed datasets side by side: what was asked differently, and what came out.

    found = compare(measure(a), measure(b))
    found.parts(); found.numbers(); comparison_page(found, names=["data/a", "data/b"])

Guarantees: every number comes from the rows of each, but for those totals that only a manifest has.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.manifest import differing_fields
from pipeline.page import Markup, Series, facts, lines, page, section, table
from pipeline.report import sections
from pipeline.report.copies import documents
from pipeline.report.figures import Figures, histogram
from pipeline.report.sections import NOTHING, Lines, Part
from pipeline.report.wording import many

VERSION = 1
_OF_MANIFEST = ("chats_read", "tokens_rendered", "tokens_cut", "tokens_rejected", "rounds_cut")
_SPREADS = {"piece_tokens": "tokens", "pieces_per_row": "pieces per row", "target_share": "targets"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What differs between two datasets, A and B."""

    a: Figures
    """The first."""
    b: Figures
    """The second."""
    recipe: list[str]
    """Fields of the recipes that differ: name: A -> B."""
    totals: dict[str, tuple[int, int]]
    """By name; those of the rows, then those of the manifests, then rejected chats by reason."""
    limits: dict[str, tuple[int, int]]
    """What kernels meet."""
    width: int
    """Of the lengths' bars, tokens."""
    lengths: tuple[list[int], list[int]]
    """Pieces by length, equally many bars."""
    shared: tuple[int, int]
    """Documents of A that B holds token for token, and of B that A holds."""

    def numbers(self) -> dict[str, Any]:
        """Everything as ``--json`` prints it."""
        both = (self.a, self.b)
        return {
            "format": "packed-comparison", "version": VERSION,
            "dataset_id": [f.manifest.dataset_id for f in both],
            "max_tokens": [f.manifest.max_tokens for f in both],
            "recipe": self.recipe, "totals": self.totals, "limits": self.limits,
            "fill": [f.ways[0].fill for f in both],
            "lengths": {"width": self.width, "counts": self.lengths},
            "spreads": {name: [asdict(f.spreads[name]) if f.spreads else None for f in both] for name in _SPREADS},
            "shared_documents": self.shared,
        }  # fmt: skip

    def parts(self) -> list[Part]:
        """The comparison for a terminal."""
        return [
            Part(title="Recipe: what differs, A -> B", lines=self.recipe_lines()),
            Part(title="Totals, A -> B", lines=_pairs(self.totals)),
            Part(title="What kernels meet, A -> B", lines=_pairs(self.limits)),
            *(Part(title=f"Spread of {name}, A -> B", lines=self._spread(key)) for key, name in _SPREADS.items()),
            Part(title="Documents in both", lines=self.shared_lines()),
        ]

    def recipe_lines(self) -> Lines:
        """One line a field."""
        return [(name, values) for name, _, values in (line.partition(": ") for line in self.recipe)] or NOTHING

    def shared_lines(self) -> Lines:
        """How many documents lie in both, token for token."""
        of_a, of_b = self.shared
        return [
            ("of A in B", f"{of_a:,} of {many(self.a.totals['documents'], 'document')}, token for token"),
            ("of B in A", f"{of_b:,} of {self.b.totals['documents']:,}"),
        ]

    def spreads(self, key: str) -> list[tuple[str, str, str]]:
        """Mean and percentiles: name, A's, B's; "" where a dataset is empty."""
        of_a, of_b = (dict(sections.spread(f.spreads.get(key), share=key == "target_share")) for f in (self.a, self.b))
        names = list(dict.fromkeys([*of_a, *of_b]))
        return [(name, of_a.get(name, ""), of_b.get(name, "")) for name in names]

    def _spread(self, key: str) -> Lines:
        return [(name, f"{a} -> {b}") for name, a, b in self.spreads(key)]


def compare(a: Figures, b: Figures) -> Comparison:
    """What differs between two datasets."""
    whole = [_whole(f) for f in (a, b)]
    width = max(f.histograms["piece_tokens"]["width"] for f in (a, b))
    counts = [histogram(f.pieces["tokens"], width)["counts"] for f in (a, b)]
    most = max(map(len, counts))
    of_a, of_b = (documents(f.pieces)["digest"] for f in (a, b))
    return Comparison(
        a=a, b=b,
        recipe=differing_fields(a.manifest.recipe, b.manifest.recipe),
        totals={name: (whole[0].get(name, 0), whole[1].get(name, 0)) for name in dict.fromkeys([*whole[0], *whole[1]])},
        limits={name: (a.limits[name], b.limits[name]) for name in a.limits},
        width=width,
        lengths=(counts[0] + [0] * (most - len(counts[0])), counts[1] + [0] * (most - len(counts[1]))),
        shared=(int(of_a.is_in(of_b.implode()).sum()), int(of_b.is_in(of_a.implode()).sum())),
    )  # fmt: skip


def _whole(f: Figures) -> dict[str, int]:
    """Every total that is a number."""
    counted = {name: num for name, num in f.totals.items() if name != "rejected"}
    reasons = {f"rejected: {reason}": num for reason, num in f.totals["rejected"].items()}
    return counted | {name: f.manifest.totals[name] for name in _OF_MANIFEST} | reasons


def _pairs(values: dict[str, tuple[int, int]]) -> Lines:
    return [(name, f"{a:,} -> {b:,}{_change(a, b)}") for name, (a, b) in values.items()]


def _change(a: int, b: int) -> str:
    return "" if a == b else f" ({b - a:+,})"


# -------------------------------------------------------------------------------------------- as a page


def comparison_page(found: Comparison, *, names: Sequence[str]) -> bytes:
    """The page's bytes; ``names`` are what A and B are called."""
    rows = [("fill", f"{found.a.ways[0].fill:.3%}", f"{found.b.ways[0].fill:.3%}", "")]
    rows += [(name, f"{a:,}", f"{b:,}", _change(a, b).strip(" ()")) for name, (a, b) in found.totals.items()]
    held = [(name, f"{a:,}", f"{b:,}", _change(a, b).strip(" ()")) for name, (a, b) in found.limits.items()]
    ids = [
        (letter, f"{name}, dataset_id {f.manifest.dataset_id}")
        for letter, name, f in zip("AB", names, (found.a, found.b), strict=True)
    ]
    header, numeric = ("", "A", "B", "B - A"), (1, 2, 3)
    parts = [
        section("Datasets", facts(ids)),
        section("Recipe", facts(found.recipe_lines()), note="Fields that differ: A -> B."),
        section("Totals", table(header, rows, caption="Totals of each", numeric=numeric)),
        section("Lengths", _lengths(found), _spread_table(found)),
        section("What kernels meet", table(header, held, caption="Limits of each", numeric=numeric)),
        section("Documents in both", facts(found.shared_lines())),
    ]
    return page(title=" and ".join(Path(name).resolve().name for name in names), parts=parts)


def _lengths(found: Comparison) -> Markup:
    def share(counts: list[int]) -> list[float]:
        return [100 * count / max(1, sum(counts)) for count in counts]

    middle = [(i + 0.5) * found.width for i in range(len(found.lengths[0]))]
    series = [Series(name=name, x=middle, y=share(counts)) for name, counts in zip("AB", found.lengths, strict=True)]
    title = f"Lengths of pieces, in steps of {many(found.width, 'token')}"
    return lines(series, title=title, x_name="tokens", y_name="% of pieces")


def _spread_table(found: Comparison) -> Markup:
    """Mean and percentiles of everything that is spread, A beside B."""
    columns = {name: {line: (a, b) for line, a, b in found.spreads(key)} for key, name in _SPREADS.items()}
    header = ["", *(f"{name}, {letter}" for name in columns for letter in "AB")]
    lines = dict.fromkeys(line for column in columns.values() for line in column)
    rows = [(line, *(text for column in columns.values() for text in column.get(line, ("", "")))) for line in lines]
    return table(header, rows, caption="Mean and percentiles of each", numeric=range(1, len(header)))
