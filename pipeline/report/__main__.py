"""What a packed dataset looks like: a table here, and one HTML page beside the shards.

    python -m pipeline.report data/packed                  # prints the table, writes data/packed/report.html
    python -m pipeline.report data/packed --row 12         # row 12 is in the page's token viewer too
    python -m pipeline.report data/packed --json           # the same numbers as JSON; no page unless --out names one
    python -m pipeline.report data/packed data/packed-2k   # what differs; --out FILE writes it as a page

Guarantees: every figure comes from the rows, and where the manifest says otherwise, that is the first thing said. The
page loads nothing, and runs nothing but its own viewer. Proves nothing: that is ``pipeline.verify``.
Costs: 40 ns a token on one core, a few seconds to start; memory as in ``pipeline.report.figures``. Needs polars.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from pipeline.report.compare import compare, comparison_page
from pipeline.report.figures import measure
from pipeline.report.numbers import numbers
from pipeline.report.page import dataset_page
from pipeline.report.sections import Lines, Part, parts
from pipeline.report.signs import check_asked
from pipeline.shards import REPORT, PackedDataset, publish


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Show what a packed dataset looks like, or how two of them differ."""

    dataset: Annotated[Path, tyro.conf.Positional]
    """Folder that holds manifest.json."""
    other: Annotated[Path | None, tyro.conf.Positional] = None
    """Another one, to compare it with."""
    out: Path | None = None
    """File of the page: report.html in the dataset's folder unless given; without it a comparison has no page."""
    json: bool = False
    """Print the numbers as JSON and nothing else; a page is written only where --out says so."""
    row: Annotated[tuple[int, ...], tyro.conf.UseAppendAction] = ()
    """A row that the page's token viewer shows beside its own choice; may be given several times."""


def main() -> int:
    """The command line. Returns the exit status."""
    settings = tyro.cli(Settings, prog="python -m pipeline.report")
    try:
        hear()
        if settings.other is None:
            _report(settings)
        else:
            _compare(settings, settings.other)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def _report(settings: Settings) -> None:
    dataset = PackedDataset.open(settings.dataset)
    check_asked(settings.row, len(dataset))
    found = measure(dataset)
    _print(numbers(found, asked=settings.row) if settings.json else parts(found))
    out = settings.out or (None if settings.json else dataset.path / REPORT)
    if out is not None:
        _write(out, dataset_page(dataset, found, asked=settings.row), quiet=settings.json)


def _compare(settings: Settings, other: Path) -> None:
    if settings.row:
        raise ValueError("--row is for the report of one dataset: a comparison has no token viewer. Leave it out.")
    paths = settings.dataset, other
    found = compare(*(measure(PackedDataset.open(path)) for path in paths))
    _print(found.numbers() if settings.json else found.parts())
    if settings.out is not None:
        _write(settings.out, comparison_page(found, names=[str(path) for path in paths]), quiet=settings.json)


def _print(content: dict[str, Any] | list[Part]) -> None:
    print(as_text(content) if isinstance(content, list) else json.dumps(content, ensure_ascii=False, indent=1))


def _write(path: Path, page: bytes, *, quiet: bool) -> None:
    try:
        publish(path, page)
    except OSError as error:
        raise ValueError(
            f"the page cannot be written to {path} ({error.strerror}). --out FILE writes it to another place."
        ) from None
    if not quiet:
        print(f"\n{path}  {len(page) / 1e6:.2f} MB")


# ----------------------------------------------------------------------------------------- as text


def as_text(parts: list[Part]) -> str:
    """The report for a terminal."""
    return "\n\n".join("\n".join([part.title, *_columns(part.lines), *_text_bars(part.bars)]) for part in parts)


def _columns(lines: Lines) -> list[str]:
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


if __name__ == "__main__":
    sys.exit(main())
