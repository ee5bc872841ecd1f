"""What a packed dataset looks like: a table here, and one HTML page beside the shards.

    python -m pipeline.report data/packed                  # prints the table, writes data/packed/report.html
    python -m pipeline.report data/packed --row 12         # row 12 is in the page's token viewer too
    python -m pipeline.report data/packed --json           # the same numbers as JSON; no page unless --out names one
    python -m pipeline.report data/packed data/packed-2k   # what differs; --out FILE writes it as a page

Guarantees: every figure comes from the rows and from ``rejects.jsonl``, but for those that only the manifest knows
(chats read, tokens rendered, cut and rejected, rounds cut); where the manifest says otherwise than the rows, that is
the first thing said. The page is written before anything is printed; it loads nothing, and runs nothing but its own
viewer. Proves nothing: that is ``pipeline.verify``.
Costs: 40 ns a token on one core, a few seconds to start; memory as in ``pipeline.report.figures``. Needs polars.
"""

from pipeline.interrupt import hear, quiet_imports

if __name__ == "__main__":
    quiet_imports("\ninterrupted")

import json
import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from pipeline.cli import refuse_repeats
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
    refuse_repeats(Settings)
    try:
        hear()
        if settings.other is None:
            _report(settings)
        else:
            _compare(settings, settings.other)
        sys.stdout.flush()
    except BrokenPipeError:  # as behind head: who reads has seen enough, and the page is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
    out = settings.out or (None if settings.json else dataset.path / REPORT)
    _check_place(out, dataset)
    found = measure(dataset)
    written = _write(out, dataset_page(dataset, found, asked=settings.row)) if out else ""
    _print(numbers(found, asked=settings.row) if settings.json else parts(found), written)


def _compare(settings: Settings, other: Path) -> None:
    if settings.row:
        raise ValueError("--row is for the report of one dataset: a comparison has no token viewer. Leave it out.")
    paths = settings.dataset, other
    datasets = [PackedDataset.open(path) for path in paths]
    _check_place(settings.out, *datasets)
    found = compare(*map(measure, datasets))
    names = [str(path) for path in paths]
    written = _write(settings.out, comparison_page(found, names=names)) if settings.out else ""
    _print(found.numbers() if settings.json else found.parts(), written)


def _check_place(out: Path | None, *datasets: PackedDataset) -> None:
    """Refuse a place inside a dataset's folder, where a page would replace a file of it or be a foreign one."""
    for folder in (dataset.path.resolve() for dataset in datasets):
        if out is not None and out.resolve().is_relative_to(folder) and out.resolve() != folder / REPORT:
            raise ValueError(
                f"--out {out}: in a dataset's folder a page is called {REPORT}; any other name there is a file of the "
                f"dataset, or damage to verify. Name a file outside of {folder}, or leave --out out."
            )


def _print(content: dict[str, Any] | list[Part], written: str) -> None:
    if isinstance(content, dict):
        print(json.dumps(content, indent=1))
        return
    encoding = sys.stdout.encoding or "utf-8"
    text = as_text(content, width=shutil.get_terminal_size((100, 24)).columns) + written
    print(text.encode(encoding, errors="replace").decode(encoding))


def _write(path: Path, page: bytes) -> str:
    """Write it; what is said of that."""
    try:
        publish(path, page)
    except OSError as error:
        raise ValueError(
            f"the page cannot be written to {path} ({error.strerror}). --out FILE writes it to another place."
        ) from None
    return f"\n\n{path}  {len(page) / 1e6:.2f} MB"


# ----------------------------------------------------------------------------------------- as text


def as_text(parts: list[Part], *, width: int = 100) -> str:
    """The report for a terminal of so many columns; what is one word, as an identity, is never broken."""
    return "\n\n".join(
        "\n".join([part.title, *_columns(part.lines, width), *_text_bars(part.bars, width)]) for part in parts
    )


def _columns(lines: Lines, width: int) -> list[str]:
    wide = max(len(name) for name, _ in lines) + 2
    wrapped = [
        (name, textwrap.wrap(text, max(20, width - wide - 2), break_long_words=False, break_on_hyphens=False) or [""])
        for name, text in lines
    ]
    return [f"  {name if i == 0 else '':<{wide}}{line}" for name, held in wrapped for i, line in enumerate(held)]


def _text_bars(bars: dict[str, Any] | None, width: int) -> list[str]:
    held = _grouped(bars, most=16)
    top = max((count for _, count in held), default=0)
    longest = max(8, min(40, width - 29))
    return [f"{label:>17}  {count:>9,} {'█' * -(-count * longest // top)}".rstrip() for label, count in held]


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
