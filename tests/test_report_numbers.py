"""Every number of ``--json`` and of the page equals one counted from the shards by plain loops."""

import json
import sys
from collections import Counter, defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.assemble import piece_width
from pipeline.pack import Settings, pack
from pipeline.report.__main__ import main
from pipeline.shards import PackedDataset
from tests.chatml import SPLITS, write_tokenizer
from tests.chats import small_chats, write_parquet

T = 300
ROLES = ("system", "user", "assistant", "tool")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with system turns and tools, copies, equal openings, escaped strings, some split and some rejected."""
    root = tmp_path_factory.mktemp("numbers")
    chats: list[Any] = small_chats(40)
    chats += [chats[3], chats[3], chats[8], [*chats[5][:1], {"role": "assistant", "content": "otherwise"}]]
    system, ask = {"role": "system", "content": "be kind"}, {"role": "user", "content": "which star? " * 9}
    call = {"role": "assistant", "content": "let me look"}
    chats += [[system, ask, call, {"role": "tool", "content": "42 stars"}, {"role": "assistant", "content": f"{i}"}]
              for i in range(3)]  # fmt: skip
    chats += [[ask, call | {"content": "write <|im_end|>"}], [], [ask], [ask, *[call, ask] * 6, call]]
    chats = [chats[int(i)] for i in np.random.default_rng(1).permutation(len(chats))]
    tokenizer = write_tokenizer(root / "tok", SPLITS)
    pack(Settings(source=str(write_parquet(root / "c.parquet", chats)), tokenizer=str(tokenizer), max_tokens=T,
                  overflow="split", workers=1, out=root / "out", cache_dir=root / "cache"))  # fmt: skip
    return root / "out"


def recount(path: Path) -> dict[str, Any]:
    """The numbers again, by plain loops over rows, pieces and tokens."""
    from tokenizers import Tokenizer

    dataset, tokenizer = PackedDataset.open(path), Tokenizer.from_file(str(path / "tokenizer" / "tokenizer.json"))
    start = tokenizer.token_to_id("<|im_start|>")
    pieces: dict[tuple[int, int], tuple[int, list[int], int]] = {}
    roles: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    per_row, padding, segments, longest_segment, largest = [], 0, 0, 0, 0
    for number, row in enumerate(dataset):
        bounds = row.boundaries.tolist()
        lengths = [b - a for a, b in pairwise(bounds)]
        per_row.append(len(row.doc_ids))
        segments, longest_segment = max(segments, len(lengths)), max(longest_segment, *lengths)
        largest = max(largest, int(row.input_ids.max()))
        padding += T - bounds[len(row.doc_ids)]
        for j, doc_id in enumerate(row.doc_ids.tolist()):
            ids, mask = (column[bounds[j] : bounds[j + 1]].tolist() for column in (row.input_ids, row.loss_mask))
            pieces[doc_id, int(row.pieces[j])] = (number, ids, sum(mask))
            for turn in split_turns(ids, start):
                text = tokenizer.decode(ids[turn[0] + 1 : turn[1]], skip_special_tokens=False)
                role, _, body = text.partition("\n")
                counts = roles["tool" if role == "user" and body.startswith("<tool_response>") else role]
                counts[0] += 1
                counts[1] += turn[1] - turn[0]
                counts[2] += sum(mask[turn[0] : turn[1]])
    lengths = [len(ids) for _, ids, _ in pieces.values()]
    return {
        "pieces": pieces, "roles": dict(roles), "per_row": per_row, "lengths": lengths, "tokenizer": tokenizer,
        "totals": {"rows": len(per_row), "pieces": len(pieces), "documents": len({d for d, _ in pieces}),
                   "tokens": sum(lengths), "targets": sum(t for *_, t in pieces.values()), "padding": padding},
        "limits": {"max_segments_per_row": segments, "max_segment_tokens": longest_segment, "max_token_id": largest,
                   "sum_of_squared_lengths": sum(n * n for n in lengths)},
    }  # fmt: skip


def split_turns(ids: list[int], start: int) -> list[tuple[int, int]]:
    opens = [i for i, token in enumerate(ids) if token == start]
    return list(zip(opens, [*opens[1:], len(ids)], strict=True))


@pytest.fixture(scope="module")
def counted(packed: Path) -> dict[str, Any]:
    return recount(packed)


@pytest.fixture(scope="module")
def printed(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What ``--json`` prints, and the page."""
    import contextlib
    import io

    out, page = io.StringIO(), tmp_path_factory.mktemp("page") / "p.html"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", ["report", str(packed), "--json", "--row", "2", "--out", str(page)])
        assert main() == 0
    return json.loads(out.getvalue()), page.read_text()


Printed = tuple[dict[str, Any], str]


class Tables(HTMLParser):
    """Cells of every table of a page, by its caption; names and values of its lists and tiles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.lists: list[str] = []
        self._text, self._rows = "", [[""]]
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._text = "" if tag in ("td", "th", "caption", "dt", "dd") else self._text
        if tag == "tr":
            self._rows.append([])

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self._rows = []
            self.tables[self._text] = self._rows
        elif tag in ("td", "th"):
            self._rows[-1].append(self._text)
        elif tag in ("dt", "dd"):
            self.lists.append(self._text)


@pytest.fixture(scope="module")
def page(printed: Printed) -> Tables:
    return Tables(printed[1])


# ----------------------------------------------------------------------------------------------- totals


def test_totals_and_limits(counted: dict[str, Any], printed: Printed, page: Tables) -> None:
    found, totals = printed[0], counted["totals"]
    assert {name: found["totals"][name] for name in totals} == totals
    assert found["limits"] == counted["limits"]
    path = Path(found["created"]["paths"]["out"]) / "rejects.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = Counter(line["what"] for line in lines)
    assert {name: found["totals"][name] for name in ("truncated", "split", "escaped")} == {
        name: kinds[name] for name in ("truncated", "split", "escaped")
    }
    assert min(kinds["split"], kinds["escaped"], kinds["rejected"]) > 0
    assert f"{totals['rows']:,}" in page.lists
    assert page.lists[page.lists.index("Tokens") + 1] == f"{totals['tokens']:,}"
    assert found["shards"] == [
        {"rows": totals["rows"], "bytes": (path.parent / "shard-00000.arrow").stat().st_size},
    ]
    assert f"{totals['targets'] / totals['tokens']:.1%}" in page.lists
    assert f"{totals['tokens'] / (totals['rows'] * T):.3%}" in page.lists
    assert f"{counted['limits']['max_token_id']:,}" in page.lists


def test_the_waterfall(counted: dict[str, Any], printed: Printed, page: Tables) -> None:
    said, totals = printed[0]["manifest_totals"], counted["totals"]
    chats = {row[0]: row[2] for row in page.tables["Chats"][1:]}
    rejected = sum(said["rejected"].values())
    assert chats["read"] == f"{totals['documents'] + rejected:,}"
    assert chats["packed"] == f"{totals['documents']:,}"
    tokens = {row[0]: row[2] for row in page.tables["Tokens"][1:]}
    assert tokens["in rows"] == f"{totals['tokens']:,}"
    assert tokens["targets"] == f"{totals['targets']:,}"
    assert tokens["rendered"] == f"{totals['tokens'] + said['tokens_cut'] + said['tokens_rejected']:,}"
    places = {row[0]: row[1] for row in page.tables[f"Places in {totals['rows']:,} rows"][1:]}
    assert places["padding"] == f"{totals['padding']:,}"
    assert places["other tokens"] == f"{totals['tokens'] - totals['targets']:,}"
    kinds = {row[0]: row[1] for row in page.tables["What happened to chats"][1:]}
    assert kinds["split"] == f"{printed[0]['totals']['split']:,}"
    assert kinds == {entry["kind"]: f"{entry['num']:,}" for entry in printed[0]["kinds"]}


def test_histograms_and_spreads(counted: dict[str, Any], printed: Printed, page: Tables) -> None:
    found, lengths, per_row = printed[0], counted["lengths"], counted["per_row"]
    width = piece_width(T)
    for name, wide, values in (("piece_tokens", width, lengths), ("pieces_per_row", 1, per_row)):
        bars = Counter(value // wide for value in values)
        assert found["histograms"][name] == {"width": wide, "counts": [bars[i] for i in range(max(bars) + 1)]}
    shares = [targets / len(ids) for _, ids, targets in counted["pieces"].values()]
    for name, values in (("piece_tokens", lengths), ("pieces_per_row", per_row), ("target_share", shares)):
        spread, ordered = found["spreads"][name], sorted(values)
        assert spread["mean"] == pytest.approx(sum(values) / len(values), rel=1e-12)
        for p, value in spread["percentiles"].items():
            at = int(p) / 100 * (len(ordered) - 1)
            assert value in (ordered[int(at)], ordered[-(-int(p) * (len(ordered) - 1) // 100)])
        assert (spread["percentiles"]["0"], spread["percentiles"]["100"]) == (ordered[0], ordered[-1])
        assert {type(value) for value in spread["percentiles"].values()} == {type(values[0])}  # 164, not 164.0
    drawn = page.tables["Lengths of pieces"][1:]
    assert sum(int(row[-1].replace(",", "")) for row in drawn) == len(lengths)
    listed = {row[0]: row[1:] for row in page.tables["Mean and percentiles, over pieces and over rows"][1:]}
    assert listed["most"] == [f"{max(lengths):,}", f"{max(per_row):,}", f"{max(shares):.1%}"]
    assert listed["mean"][0] == f"{sum(lengths) / len(lengths):,.1f}"


# ------------------------------------------------------------------------------------------ fill and roles


def test_other_ways_to_fill_rows(counted: dict[str, Any], printed: Printed, page: Tables) -> None:
    total, rows = counted["totals"]["tokens"], counted["totals"]["rows"]
    cut = at = 0
    for key in sorted(counted["pieces"]):
        length = len(counted["pieces"][key][1])
        cut += at // T != (at + length - 1) // T
        at += length
    expected = [
        ("these rows", rows, 0), ("one piece a row", len(counted["pieces"]), 0),
        ("concatenation", -(-total // T), cut),
    ]  # fmt: skip
    assert printed[0]["ways"] == [
        {"name": name, "rows": num, "padding": num * T - total, "cut": cut, "fill": total / (num * T)}
        for name, num, cut in expected
    ]
    assert page.tables["What each would cost"][1:] == [
        [name, f"{num:,}", f"{num * T - total:,}", f"{total / (num * T):.3%}", f"{cut:,}"]
        for name, num, cut in expected
    ]


def test_roles(counted: dict[str, Any], printed: Printed, page: Tables) -> None:
    roles, targets = counted["roles"], counted["totals"]["targets"]
    assert set(roles) == set(ROLES)
    found = {role["name"]: [role["turns"], role["tokens"], role["targets"]] for role in printed[0]["roles"]}
    assert found == roles
    assert {row[0]: row[1:] for row in page.tables["Turns and targets"][1:]} == {
        role: [f"{turns:,}", f"{held:,}", f"{held / tokens:.1%}", f"{held / targets:.1%}"]
        for role, (turns, tokens, held) in roles.items()
    }
    assert [row[:2] for row in page.tables["Tokens by role"][1:-1]] == [
        [role["name"], f"{role['tokens']:,}"] for role in printed[0]["roles"]
    ]


# ------------------------------------------------------------------------------------------- the same again


def groups(documents: dict[int, Any]) -> list[list[int]]:
    """doc_ids that have the same value, each group and all groups by doc_id; None is like nothing."""
    held: defaultdict[Any, list[int]] = defaultdict(list)
    for doc_id in sorted(documents):
        if documents[doc_id] is not None:
            held[documents[doc_id]].append(doc_id)
    return sorted(ids for ids in held.values() if len(ids) > 1)


def test_identical_and_repeated_documents(counted: dict[str, Any], printed: Printed, page: Tables) -> None:
    pieces, tokenizer = counted["pieces"], counted["tokenizer"]
    whole = {doc_id: tuple(tuple(pieces[key][1]) for key in sorted(pieces) if key[0] == doc_id) for doc_id, _ in pieces}
    same = groups(whole)
    user = [tokenizer.token_to_id("<|im_start|>"), *tokenizer.encode("user").ids]
    first = {min(d for d in whole if whole[d] == value) for value in whole.values()}
    openings = {}
    for doc_id in first:
        ids = list(whole[doc_id][0])
        at = next(i for i in range(len(ids)) if ids[i : i + len(user)] == user)
        openings[doc_id] = tuple(ids[at : at + 64]) if len(ids) - at >= 64 else None
    for name, found, expected in (("identical", printed[0]["identical"], same),
                                  ("repeated", printed[0]["repeated"], groups(openings))):  # fmt: skip
        assert expected, name
        tokens = {doc_id: sum(map(len, whole[doc_id])) for doc_id in whole}
        assert found["num_groups"] == len(expected)
        assert found["num_documents"] == sum(map(len, expected))
        assert found["num_spare"] == sum(len(ids) - 1 for ids in expected)
        assert found["spare_tokens"] == sum(tokens[doc_id] for ids in expected for doc_id in ids[1:])
        ranked = sorted(expected, key=lambda ids: (-len(ids), -tokens[ids[0]], ids[0]))[:5]
        assert [(g["num_documents"], g["doc_ids"], g["tokens"], g["row"]) for g in found["largest"]] == [
            (len(ids), ids[:5], tokens[ids[0]], pieces[ids[0], min(n for d, n in pieces if d == ids[0])][0])
            for ids in ranked
        ]
    caption = next(name for name in page.tables if name.startswith("Identical documents: largest"))
    assert len(page.tables[caption]) == 1 + len(printed[0]["identical"]["largest"])


# ------------------------------------------------------------------------------------------------- rows


def test_rows_to_look_at(counted: dict[str, Any], printed: Printed, page: Tables) -> None:
    found, num_rows = printed[0], counted["totals"]["rows"]
    of_row: defaultdict[int, list[int]] = defaultdict(list)
    targets: Counter[int] = Counter()
    for row, ids, num in counted["pieces"].values():
        of_row[row].append(len(ids))
        targets[row] += num
    longest = sorted(range(num_rows), key=lambda row: (-max(of_row[row]), row))[:6]
    shortest = sorted(range(num_rows), key=lambda row: (sum(of_row[row]), min(of_row[row]), row))[:6]
    assert [entry["row"] for entry in found["longest"]] == longest
    assert [entry["row"] for entry in found["shortest"]] == shortest
    assert [entry["values"] for entry in found["longest"]] == [[max(of_row[row])] for row in longest]
    assert [entry["values"] for entry in found["shortest"]] == [[sum(of_row[r]), min(of_row[r])] for r in shortest]
    fewest = min(range(num_rows), key=lambda row: (targets[row] / sum(of_row[row]), row))
    share = targets[fewest] / sum(of_row[fewest])
    why = f"the least of all rows: {share:.1%} targets"
    assert found["extreme"][0] == {"row": fewest, "why": why, "values": [share]}
    listed = page.tables["Longest, shortest, suspicious, extreme"][1:]
    kinds = ("longest", "shortest", "suspicious", "extreme")
    every = [(kind, entry) for kind in kinds for entry in found[kind][:6]]
    assert listed == [[f"{entry['row']:,}", kind, entry["why"]] for kind, entry in every]
    assert found["viewer"][0] == {"row": 2, "why": found["viewer"][0]["why"]}
    assert found["viewer"][0]["why"].startswith("asked for")
    shown = {entry["row"] for entry in found["viewer"]}
    assert {entry["row"] for _, entry in every} <= shown
    assert {row[0]: row[2] for row in page.tables["Signs"][1:]} == {
        sign["name"]: f"{sign['num_rows']:,}" for sign in found["signs"]
    }


def test_strips(counted: dict[str, Any], printed: Printed, page: Tables) -> None:
    targets: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for row, ids, num in counted["pieces"].values():
        targets[row] += num
        tokens[row] += len(ids)
    rows = [row["row"] for row in printed[0]["strips"]]
    expected = [(row, counted["per_row"][row], targets[row], T - tokens[row]) for row in rows]
    assert [tuple(row.values()) for row in printed[0]["strips"]] == expected
    assert page.tables["The rows of the picture"][1:] == [[f"{number:,}" for number in row] for row in expected]
