"""The page of a dataset: well formed, inert, right at one row, at none and at 100,000."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from pipeline.report.__main__ import as_text
from pipeline.report.figures import measure
from pipeline.report.numbers import numbers
from pipeline.report.page import dataset_page
from pipeline.report.sections import parts
from pipeline.shards import PackedDataset, ShardRows, rows_per_shard
from tests.forge import Rows, forge, make_dataset
from tests.packed import make_packed, small_recipe, with_byte_tokenizer, write_dataset
from tests.parsed import cells
from tests.talk import chat, make_talk, tokenizer


class Tags(HTMLParser):
    """Names, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        self.open += [] if tag in ("meta", "input", "br", "link") else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)


def page_of(path: Path) -> str:
    dataset = PackedDataset.open(path)
    return dataset_page(dataset, measure(dataset)).decode()


def test_the_page_loads_nothing_and_is_well_formed(tmp_path: Path) -> None:
    page = page_of(make_dataset(tmp_path))
    tags = Tags(page)
    assert tags.open == []
    assert not {"link", "img", "iframe", "object"} & set(tags.names)
    assert tags.names.count("script") == 2  # the viewer and its data
    links = [value for name, value in tags.attributes if name in ("src", "href", "xlink:href", "action")]
    ids = {value for name, value in tags.attributes if name == "id"}
    assert links
    assert all(value and value.startswith("#") and value[1:] in ids for value in links)
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert "url(" not in page
    assert "@import" not in page
    assert len(page.encode()) < 3e6


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)></title>\"'&<!--"


def test_hostile_text_of_chats_names_and_recipes_stays_text(tmp_path: Path) -> None:
    rows = [[chat(0, EVIL, EVIL)]]
    path = make_talk(tmp_path, rows, max_tokens=400, body=lambda body: body["recipe"]["tokenizer"].update(model=EVIL))
    evil = path.rename(tmp_path / "<img src=x onerror=alert(1)>")
    page = page_of(evil)
    tags = Tags(page)
    assert tags.names.count("script") == 2
    assert "img" not in tags.names
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    text = "".join(tags.text)
    assert evil.name in text
    assert EVIL in text


def test_hostile_tokens_of_a_tokenizer_stay_text(tmp_path: Path) -> None:
    body = json.loads(tokenizer().to_str())
    number = max(token["id"] for token in body["added_tokens"]) + 1
    body["added_tokens"].append(body["added_tokens"][0] | {"id": number, "content": EVIL})

    def use(rows: Rows) -> None:
        rows[0]["input_ids"][9] = number

    path = make_talk(tmp_path, [[chat(0, "why?", "because")]], max_tokens=80)
    evil = forge(path, tmp_path / "d", rows=use, files={"tokenizer/tokenizer.json": json.dumps(body).encode()})
    page = page_of(evil)
    tags = Tags(page)
    assert tags.names.count("script") == 2
    assert "img" not in tags.names
    assert EVIL not in page
    assert EVIL in json.loads(page.split('id="data">')[1].split("</script>")[0])["texts"]


def test_a_dataset_without_rows_has_a_report(tmp_path: Path) -> None:
    path = with_byte_tokenizer(make_packed(tmp_path / "d", [], max_tokens=10))
    f = measure(PackedDataset.open(path))
    assert f.totals["rows"] == f.totals["documents"] == f.least_rows == 0
    assert "0 in 0 shards" in as_text(parts(f))
    assert json.loads(json.dumps(numbers(f, asked=[])))["viewer"] == []
    assert Tags(page_of(path)).open == []


def test_what_left_on_the_way_from_chats_to_targets_is_told_step_by_step(tmp_path: Path) -> None:
    lines = (
        b'{"detail":"9 of 99 tokens kept in 1 pieces","doc_id":1,"reason":"","what":"truncated"}\n'
        b'{"detail":"99 of 99 tokens kept in 2 pieces","doc_id":2,"reason":"","what":"split"}\n'
        b'{"detail":"99 of 99 tokens kept in 2 pieces","doc_id":3,"reason":"","what":"split"}\n'
        b'{"detail":"","doc_id":7,"reason":"no_target","what":"rejected"}\n'
    )
    rows = [[chat(i, "why?", "because")] for i in range(7)]
    num, targets = len(rows[0][0][1]), sum(rows[0][0][2])
    totals = {"chats_read": 10, "tokens_rendered": 2000, "tokens_cut": 70, "tokens_rejected": 300}
    path = make_talk(tmp_path, rows, max_tokens=80, rejects=lines, body=lambda body: body["totals"].update(totals))
    flow = page_of(path).split('id="from-chats-to-targets"')[1].split("</section>")[0]
    chats, tokens, places, kinds = (cells(f"<table{part}") for part in flow.split("<table")[1:])
    assert [row[:1] + row[2:] for row in chats[1:]] == [
        ["read", "10", "100.0%", ""],
        ["packed", "7", "70.0%", "rejected: 1 no_target"],
        ["packed whole", "4", "40.0%", "1 truncated, 2 split into several"],
    ]
    assert [row[:1] + row[2:] for row in tokens[1:]] == [
        ["rendered", "2,000", "100.0%", ""],
        ["of packed chats", "1,700", "85.0%", "of rejected chats: 300"],
        ["in rows", f"{7 * num}", f"{7 * num / 2000:.1%}", "cut from documents longer than a row: 70"],
        ["targets", f"{7 * targets}", f"{7 * targets / 2000:.1%}", f"read, not predicted: {7 * (num - targets)}"],
    ]
    assert [row[:2] for row in places[1:]] == [
        ["targets", f"{7 * targets}"], ["other tokens", f"{7 * (num - targets)}"], ["padding", f"{7 * (80 - num)}"],
        ["all", "560"],
    ]  # fmt: skip
    assert kinds[1:] == [["rejected: no_target", "1", "7"], ["split", "2", "2, 3"], ["truncated", "1", "1"]]


def test_one_row_is_drawn(tmp_path: Path) -> None:
    path = make_talk(tmp_path, [[chat(0, "why?", "because")]], max_tokens=80)
    page = page_of(path)
    num = len(chat(0, "why?", "because")[1])
    assert "All rows." in page
    (bar,) = re.findall(
        r'<rect class="s1"[^>]*><title>([^<]*)</title>', page.split('id="lengths"')[1].split("</figure>")[0]
    )
    assert bar == f"{num}: 1"
    assert f"T = {80}" in page


@pytest.mark.parametrize("max_tokens", [16, 1000, 131072])
def test_every_row_length_is_drawn(tmp_path: Path, max_tokens: int) -> None:
    piece = (0, [5] * (max_tokens // 2), [False] + [True] * (max_tokens // 2 - 1))
    path = with_byte_tokenizer(make_packed(tmp_path / "d", [[piece], [piece]], max_tokens=max_tokens))
    page = page_of(path)
    assert Tags(page).open == []
    strips = page.split('class="strips"')[1].split("</svg>")[0]
    left, wide = 20, 960
    starts = {float(x) for x in re.findall(r"M([\d.]+) ", strips)}
    assert left in starts  # the document
    assert left + wide / 2 + 0.5 in starts  # the padding
    assert len(page) < 3e6


# ---------------------------------------------------------------------------------------- a large dataset


NUM_ROWS, T = 100_000, 32


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """100,000 rows of 32 tokens, two pieces each but the last; with the first's lengths and all targets."""
    rng = np.random.default_rng(0)
    first = rng.integers(2, T - 2, NUM_ROWS)
    second = T - first
    second[-1] -= 1
    mask = rng.random((NUM_ROWS, T)) < 0.3
    mask[np.arange(NUM_ROWS), first] = mask[:, 0] = False
    mask[-1, -1] = False
    input_ids = rng.integers(0, 256, (NUM_ROWS, T)).astype(np.int32)
    lengths = np.stack([first, second], axis=1)

    def shards() -> Iterator[ShardRows]:
        for start in range(0, NUM_ROWS, rows_per_shard(T)):
            part = slice(start, start + rows_per_shard(T))
            num = len(first[part])
            yield ShardRows(
                input_ids=input_ids[part], loss_mask=mask[part], piece_lengths=lengths[part].reshape(-1),
                row_offsets=np.arange(num + 1) * 2, doc_ids=np.arange(2 * start, 2 * (start + num)),
                pieces=np.zeros(2 * num, np.int32),
            )  # fmt: skip

    recipe = small_recipe(max_tokens=T, vocab_size=300, pad_token_id=0, eos_token_ids=[1], model=None,
                          tokenizer_sha256="0" * 64)  # fmt: skip
    names = ("truncated", "split", "escaped", "rounds_cut", "tokens_cut", "tokens_rejected")
    tokens = int(lengths.sum())
    totals = dict.fromkeys(names, 0) | {
        "chats_read": 2 * NUM_ROWS, "documents": 2 * NUM_ROWS, "rejected": {}, "pieces": 2 * NUM_ROWS, "rows": NUM_ROWS,
        "targets": int(mask.sum()), "tokens_rendered": tokens, "tokens": tokens, "padding": NUM_ROWS * T - tokens,
    }  # fmt: skip
    limits = {"max_segments_per_row": 3, "max_segment_tokens": int(lengths.max()), "max_token_id": int(input_ids.max()),
              "sum_of_squared_lengths": int((lengths**2).sum())}  # fmt: skip
    path = write_dataset(
        tmp_path_factory.mktemp("large") / "d", shards(), recipe=recipe, tokenizer=tokenizer().to_str().encode(),
        totals=totals, limits=limits, histograms={},
    )  # fmt: skip
    return path, lengths, mask


def test_a_hundred_thousand_rows_are_counted_and_drawn(large: tuple[Path, np.ndarray, np.ndarray]) -> None:
    path, lengths, mask = large
    dataset = PackedDataset.open(path)
    f = measure(dataset)
    assert f.totals == {name: dataset.manifest.totals[name] for name in f.totals}
    assert f.limits == dataset.manifest.limits
    counts = np.bincount(lengths.reshape(-1)).tolist()
    assert f.histograms["piece_tokens"] == {"width": 1, "counts": counts}
    assert f.histograms["pieces_per_row"] == {"width": 1, "counts": [0, 0, NUM_ROWS]}
    assert f.rows["targets"].to_list() == mask.sum(axis=1).tolist()
    page = dataset_page(dataset, f, asked=[99_999]).decode()
    drawn = re.findall(r"<title>(\d+): ([0-9,]+)</title>", page.split('id="lengths"')[1].split("</figure>")[0])
    assert {int(low): int(num.replace(",", "")) for low, num in drawn} == {
        i: num for i, num in enumerate(counts) if num
    }
    assert f"<dd>{lengths.sum() / 1e6:.2f} M</dd>" in page
    assert "64 of 100,000 rows, evenly spaced from the first to the last." in page
    assert len(page) < 3e6
