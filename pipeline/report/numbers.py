"""The figures of a report as one JSON object: what ``--json`` prints.

Guarantees: every number of the page is here, unrounded; keys do not change within a version.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.report.figures import Figures
from pipeline.report.oddities import looks_odd
from pipeline.report.signs import RULES, choose, suspicious
from pipeline.report.strips import strip_rows

VERSION = 1


def numbers(f: Figures, *, asked: Sequence[int]) -> dict[str, Any]:
    """Everything, as lists, dicts, strings and numbers; ``asked`` are the rows that ``--row`` names."""
    manifest = f.manifest
    return {
        "format": "packed-report",
        "version": VERSION,
        "dataset_id": manifest.dataset_id,
        "fingerprint": manifest.fingerprint,
        "max_tokens": manifest.max_tokens,
        "created": manifest.created,
        "recipe": manifest.recipe,
        "looks_odd": list(looks_odd(f)),
        "manifest_totals": manifest.totals,
        "totals": f.totals,
        "limits": f.limits,
        "least_rows": f.least_rows,
        "histograms": f.histograms,
        "spreads": {name: {"mean": s.mean, "percentiles": s.at} for name, s in f.spreads.items()},
        "roles": [asdict(role) for role in f.roles],
        "ways": [asdict(way) for way in f.ways],
        "kinds": [{"kind": kind, "num": num, "doc_ids": ids} for kind, num, ids in f.kinds],
        "tool_tags": f.tool_tags,
        "identical": asdict(f.identical),
        "repeated": asdict(f.repeated),
        "signs": [
            {"name": s.name, "rule": RULES[s.name], "num_rows": s.num_rows, "rows": _rows(s.rows)} for s in f.signs
        ],
        "longest": _rows(f.ends.longest),
        "shortest": _rows(f.ends.shortest),
        "suspicious": _rows(suspicious(f.signs)),
        "strips": strip_rows(f.totals["rows"]),
        "viewer": _rows(choose(f.ends, f.signs, num_rows=f.totals["rows"], asked=asked)),
    }


def _rows(rows: list[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"row": row, "why": why} for row, why in rows]
