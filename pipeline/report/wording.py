"""How a report words its numbers: "1 row" and "2 rows", shares, the first few of many."""

from collections.abc import Sequence


def many(num: int, one: str) -> str:
    """A number and what it counts: "1 row", "1,019 rows"."""
    return f"{num:,} {one}{'s' * (num != 1)}"


def share(part: int, whole: int) -> float:
    """part / whole, 0 of nothing."""
    return part / whole if whole else 0.0


def listed(doc_ids: Sequence[int], num: int) -> str:
    """The first of ``num`` doc_ids: "3, 8, 9 …"."""
    return ", ".join(map(str, doc_ids)) + " …" * (num > len(doc_ids))
