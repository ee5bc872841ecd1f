"""The figures of a report as one JSON object: what ``--json`` prints.

Guarantees: every number of the page and of the terminal is here unrounded, or is a sum, difference or quotient of those
that are; but not what the token viewer says of single pieces. Keys do not change within a version.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.report.figures import Figures
from pipeline.report.oddities import looks_odd
from pipeline.report.signs import RULES, choose, suspicious
from pipeline.report.strips import strips

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
        "shards": [{"rows": shard["rows"], "bytes": shard["bytes"]} for shard in manifest.files["shards"]],
        "limits": f.limits,
        "least_rows": f.least_rows,
        "histograms": f.histograms,
        "spreads": {name: asdict(found) for name, found in f.spreads.items()},
        "roles": [asdict(role) for role in f.roles],
        "ways": [asdict(way) for way in f.ways],
        "kinds": [{"kind": kind, "num": num, "doc_ids": ids} for kind, num, ids in f.kinds],
        "tool_tags": f.tool_tags,
        "identical": asdict(f.identical),
        "repeated": asdict(f.repeated),
        "signs": [{"rule": RULES[sign.name], **asdict(sign)} for sign in f.signs],
        **asdict(f.ends),
        "suspicious": _rows(suspicious(f.signs)),
        "strips": strips(f),
        "viewer": _rows(choose(f.ends, f.signs, num_rows=f.totals["rows"], asked=asked)),
    }


def _rows(rows: list[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"row": row, "why": why} for row, why in rows]
