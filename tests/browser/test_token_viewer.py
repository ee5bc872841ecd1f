"""The token viewer in a real browser: what it shows is what the rows hold, and keyboard and mouse drive it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page
from tokenizers import Tokenizer

import pipeline.report.viewer
from pipeline.page import page as build
from pipeline.page import section
from pipeline.shards import PackedDataset, Row
from tests.browser.conftest import Visit
from tests.packed import Piece, make_packed, with_byte_tokenizer
from tests.test_viewer import ids, view


def held(page: Page) -> Any:
    """What the viewer was given."""
    return json.loads(page.locator("#data").text_content() or "")


def info(page: Page) -> str:
    return page.locator("#viewer-info").text_content() or ""


def token(page: Page) -> int:
    """Where the cursor is, as the viewer says."""
    found = re.match(r"tokens? ([\d,]+)", info(page))
    assert found, info(page)
    return int(found[1].replace(",", ""))


def open_row(page: Page, dataset: PackedDataset) -> tuple[int, Row]:
    """Choose the row with the most documents; its place in the list, and the row."""
    rows = held(page)["rows"]
    index = max(range(1, len(rows) - 1), key=lambda i: int(rows[i]["num_pieces"]))
    page.locator("#viewer-row").select_option(str(index))
    row = dataset[rows[index]["row"]]
    assert len(row.doc_ids) > 2
    return index, row


def is_shown(page: Page, index: int) -> bool:
    number = held(page)["rows"][index]["row"]
    return (page.locator("#viewer-summary").text_content() or "").startswith(f"Row {number:,}: ")


# --------------------------------------------------------------------------------- what the viewer shows


def test_the_viewer_shows_the_text_and_the_targets_of_the_rows(page: Page, dataset: PackedDataset) -> None:
    tokenizer = Tokenizer.from_file(str(dataset.path / "tokenizer" / "tokenizer.json"))
    rows = held(page)["rows"]
    assert len(rows) > 1
    for i, shown in enumerate(rows):
        page.locator("#viewer-row").select_option(str(i))
        row = dataset[shown["row"]]
        texts = page.locator("#viewer-pane .text").all_text_contents()
        for start, stop, text in zip(row.boundaries[:-1], row.boundaries[1:], texts, strict=False):
            assert text == tokenizer.decode(row.input_ids[start:stop].tolist(), skip_special_tokens=False)
        assert len(texts) == len(row.doc_ids)
        learned = page.locator("#viewer-pane .target").all_text_contents()
        places = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        wanted = [tokenizer.decode(row.input_ids[a:b].tolist(), skip_special_tokens=False) for a, b in places]
        assert learned == wanted
        summary = page.locator("#viewer-summary").text_content() or ""
        tail = len(row.input_ids) - int(row.boundaries[len(row.doc_ids)])
        assert f"{int(row.loss_mask.sum()):,} target" in summary
        assert f"{tail:,} padding" in summary
        folded = page.locator("#viewer-pane .folded")
        assert folded.count() == (tail > 0)
        if tail:
            assert f"Padding: {tail:,} token" in (folded.text_content() or "")


def test_each_document_is_labelled_with_its_number_place_tokens_and_targets(page: Page, dataset: PackedDataset) -> None:
    _, row = open_row(page, dataset)
    labels = page.locator("#viewer-pane h3").all_text_contents()
    for i, label in enumerate(labels):
        start, stop = (int(place) for place in row.boundaries[i : i + 2])
        learned = int(row.loss_mask[start:stop].sum())
        piece = f", piece {row.pieces[i]}" if row.pieces[i] else ""
        assert label.startswith(f"Document {row.doc_ids[i]:,}{piece}tokens {start:,} to {stop - 1:,} · ")
        assert label.endswith(f"{stop - start:,} tokens, {learned:,} targets")


def test_targets_are_marked_by_more_than_colour_and_line_breaks_are_seen(page: Page) -> None:
    style = "e => [getComputedStyle(e).borderBottomStyle, getComputedStyle(e).backgroundColor]"
    target = page.locator("#viewer-pane .target").first.evaluate(style)
    other = page.locator("#viewer-pane .other").first.evaluate(style)
    assert target[0] == "solid"
    assert other[0] == "none"
    assert target[1] != other[1]
    sign = page.locator("#viewer-pane .nl").first.evaluate("e => getComputedStyle(e, '::before').content")
    assert sign == '"↵"'
    control = page.locator("#viewer-pane .control").first
    assert control.text_content() == "<|im_start|>"
    assert control.evaluate("e => getComputedStyle(e).borderTopStyle") == "solid"


# ----------------------------------------------------------------------------------------- how it is driven


def test_the_keyboard_goes_through_documents_and_tokens(page: Page, dataset: PackedDataset) -> None:
    _, row = open_row(page, dataset)
    bounds = row.boundaries[: len(row.doc_ids) + 1].tolist()
    page.locator("#viewer-pane").focus()
    press = page.keyboard.press
    press("ArrowRight")
    assert token(page) == 0
    press("ArrowRight")
    assert token(page) == 1
    assert f"id {row.input_ids[1]} ·" in info(page)
    press("ArrowLeft")
    press("ArrowLeft")
    assert token(page) == 0
    for start in bounds[1:-1]:
        press("n")
        assert token(page) == start
    press("n")
    assert "last document" in info(page)
    for start in bounds[-3::-1]:
        press("p")
        assert token(page) == start
    press("p")
    assert "first document" in info(page)
    press("End")
    assert bounds[-1] - 4 <= token(page) < bounds[-1]
    press("Home")
    assert token(page) == 0


def test_the_keyboard_goes_through_runs_of_targets_and_rows(page: Page, dataset: PackedDataset) -> None:
    index, row = open_row(page, dataset)
    page.locator("#viewer-pane").focus()
    press = page.keyboard.press
    firsts = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0) == 1).tolist()
    for start in firsts:
        press("t")
        assert token(page) == start
        assert "· target ·" in info(page)
    press("t")
    assert "No targets after" in info(page)
    for start in firsts[-2::-1]:
        press("Shift+T")
        assert token(page) == start
    press("Shift+T")
    assert "No targets before" in info(page)
    press("j")
    assert is_shown(page, index + 1)
    for _ in range(index + 1):
        press("k")
    assert is_shown(page, 0)
    press("k")
    assert "first row" in info(page)
    press("r")
    assert page.evaluate("document.activeElement.id") == "viewer-row"
    press("ArrowDown")
    assert is_shown(page, 1)


def test_position_id_and_document_of_every_token_are_those_of_the_row(page: Page, dataset: PackedDataset) -> None:
    _, row = open_row(page, dataset)
    said = page.evaluate(
        """() => [...document.querySelectorAll("#viewer-pane .token")].map(token => {
            token.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, movementX: 1 }));
            return document.getElementById("viewer-info").textContent;
        })"""
    )
    seen: list[int] = []
    for line in said:
        place = len(seen)
        first = re.match(r"tokens? ([\d,]+)", line)
        numbers = re.search(r"· ids? ([\d, ]+) · ", line)
        assert first
        assert numbers
        assert int(first[1].replace(",", "")) == place
        segment = int(np.searchsorted(row.boundaries, place, side="right")) - 1
        assert line.endswith(f"document {row.doc_ids[segment]:,}, position {place - row.boundaries[segment]:,}")
        assert ("· target ·" in line) == bool(row.loss_mask[place])
        seen += [int(number) for number in numbers[1].split(", ")]
    assert seen == row.input_ids[: row.boundaries[len(row.doc_ids)]].tolist()


def test_the_mouse_does_the_same(page: Page, dataset: PackedDataset) -> None:
    index, row = open_row(page, dataset)
    tokens = page.locator("#viewer-pane .token")
    tokens.nth(1).hover()
    tokens.nth(3).hover()
    assert token(page) == 3
    assert re.search(rf" ids? {row.input_ids[3]}\b", info(page))
    tokens.nth(5).click()
    assert "cursor" in (tokens.nth(5).get_attribute("class") or "")
    for name, place in (
        ("Next document", row.boundaries[1]),
        ("Previous document", 0),
        ("Next run of targets", np.flatnonzero(row.loss_mask)[0]),
    ):
        page.get_by_role("button", name=name).click()
        assert token(page) == place
    borders = page.get_by_role("button", name="Borders between tokens")
    assert borders.get_attribute("aria-pressed") == "false"
    borders.click()
    assert borders.get_attribute("aria-pressed") == "true"
    assert tokens.first.evaluate("e => getComputedStyle(e).boxShadow") != "none"
    page.get_by_role("button", name="Next row").click()
    assert is_shown(page, index + 1)
    page.get_by_role("button", name="Previous row").click()
    assert is_shown(page, index)


def test_a_pointer_that_rests_says_nothing_of_what_slides_below_it(page: Page, dataset: PackedDataset) -> None:
    _, row = open_row(page, dataset)
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    page.locator("#viewer-pane").focus()
    box = page.locator("#viewer-pane").bounding_box()
    assert box
    page.mouse.move(box["x"] + 60, box["y"] + 90)  # the second line of a document at the top of the pane
    page.mouse.move(box["x"] + 30, box["y"] + 90)
    live = page.locator("#viewer-info")
    for start in row.boundaries[1 : len(row.doc_ids)]:
        page.keyboard.press("n")
        page.wait_for_timeout(120)  # browsers send a mouse move when what lies below it has changed
        assert token(page) == start
        assert live.get_attribute("aria-live") == "polite"
    page.locator("#viewer-pane .document").last.locator(".token").nth(3).hover()
    assert token(page) > row.boundaries[len(row.doc_ids) - 1]
    assert live.get_attribute("aria-live") == "off"
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] - 30, steps=5)
    assert token(page) == row.boundaries[len(row.doc_ids) - 1]


SCROLL = """async (document) => {
    const pane = window.document.getElementById("viewer-pane"), wanted = pane.children[document];
    const top = () => pane.getBoundingClientRect().top + pane.clientTop;
    const frame = () => new Promise(requestAnimationFrame);
    let still = 0;
    for (let tries = 0; still < 3 && tries < 300; tries++) {
        pane.scrollTop += wanted.getBoundingClientRect().top - top() + 100;
        await frame();
        await frame();
        const box = wanted.getBoundingClientRect();
        still = box.top < top() && box.bottom > top() + 1 ? still + 1 : 0;
    }
    return still === 3;
}"""
"""Scrolls into a document: again and again, because heights far away are guesses until they are drawn."""


@pytest.mark.parametrize("is_set", [False, True])
def test_documents_and_targets_are_sought_from_where_the_reader_has_scrolled(
    page: Page, dataset: PackedDataset, *, is_set: bool
) -> None:
    _, row = open_row(page, dataset)
    pane = page.locator("#viewer-pane")
    firsts = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0) == 1).tolist()
    starts = row.boundaries[: len(row.doc_ids)].tolist()
    assert len(starts) > 5

    def scroll(document: int) -> None:
        """A cursor in the first document, then the pane scrolled into another one."""
        pane.focus()
        if is_set:
            page.keyboard.press("Home")
        assert page.evaluate(SCROLL, document)

    for key, wanted in (
        ("n", starts[4]),
        ("p", starts[2]),
        ("t", next(place for place in firsts if place >= starts[3])),
        ("Shift+T", max(place for place in firsts if place < starts[3])),
    ):
        scroll(3)
        page.keyboard.press(key)
        assert token(page) == wanted, key
        page.reload()
        open_row(page, dataset)


def test_the_first_press_goes_to_the_second_document(page: Page, dataset: PackedDataset) -> None:
    _, row = open_row(page, dataset)
    page.get_by_role("button", name="Next document").click()
    assert token(page) == row.boundaries[1]


def test_caps_lock_does_not_turn_the_search_around(page: Page, dataset: PackedDataset) -> None:
    _, row = open_row(page, dataset)
    firsts = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0) == 1).tolist()
    press = """(pane, [key, shiftKey]) =>
        pane.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey, bubbles: true, cancelable: true }))"""
    pane = page.locator("#viewer-pane")
    for key, shift, wanted in (("T", False, 0), ("T", False, 1), ("t", True, 0)):
        pane.evaluate(press, [key, shift])
        assert token(page) == firsts[wanted]


def test_rows_to_look_at_open_in_the_viewer(page: Page, dataset: PackedDataset) -> None:
    links = page.locator("#rows-to-look-at a")
    assert links.count() > 6
    for i in (links.count() - 1, 1):
        number = links.nth(i).text_content()
        links.nth(i).click()
        assert (page.locator("#viewer-summary").text_content() or "").startswith(f"Row {number}: ")
        assert page.evaluate("document.activeElement.id") == "viewer-pane"
        assert page.locator("#tokens h2").is_visible()


def test_the_next_document_comes_to_the_top_of_the_pane_however_far_away(page: Page, dataset: PackedDataset) -> None:
    _, row = open_row(page, dataset)
    page.locator("#viewer-pane").focus()
    tops = []
    for _ in range(len(row.doc_ids) - 2):
        page.keyboard.press("n")
        tops.append(
            page.evaluate(
                """() => {
                    const pane = document.getElementById("viewer-pane").getBoundingClientRect();
                    const cursor = document.querySelector(".cursor").getBoundingClientRect();
                    const head = document.querySelector(".cursor").closest(".document").getBoundingClientRect();
                    return [Math.round(head.top - pane.top), cursor.bottom < pane.bottom, cursor.top > pane.top];
                }"""
            )
        )
    assert tops
    for top, above_end, below_start in tops:
        assert abs(top) <= 2
        assert above_end
        assert below_start


def small_page(path: Path, rows: list[list[Piece]], *, max_tokens: int) -> Path:
    """A page of nothing but a viewer, over a vocabulary of the 256 bytes."""
    dataset = PackedDataset.open(
        with_byte_tokenizer(make_packed(path / "d", rows, max_tokens=max_tokens, vocab_size=256))
    )
    markup, script, data = view(dataset, [(i, "because") for i in range(len(rows))])
    (path / "page.html").write_bytes(build(title="t", parts=[section("Tokens", markup)], script=script, data=data))
    return path / "page.html"


def test_text_of_a_chat_never_becomes_an_element(visit: Visit, tmp_path: Path) -> None:
    text = "</script><img src=x onerror=alert(1)><!--<script>alert(1)</script> & \"'`${1} \u202e\u2028"
    page = visit(small_page(tmp_path, [[(0, ids(text), [False] * len(ids(text)))]], max_tokens=200))
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    shown = text.replace("\u202e", "⟨U+202E⟩").replace("\u2028", "⟨U+2028⟩")
    assert page.locator("#viewer-pane .text").text_content() == shown


def test_a_viewer_without_rows_has_nothing_to_press(visit: Visit, tmp_path: Path) -> None:
    page = visit(small_page(tmp_path, [], max_tokens=8))
    for control in page.locator("#viewer button, #viewer select").all():
        assert control.is_disabled()
    page.locator("#viewer-pane").focus()
    page.keyboard.press("n")
    page.keyboard.press("ArrowRight")
    page.locator("#viewer-pane").hover()
    assert info(page) == ""


def test_of_a_row_that_is_cut_the_rest_is_said_and_the_last_document_shown_is_the_last(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.report.viewer, "MOST_IN_ROW", 5)
    pieces: list[Piece] = [(i, ids("abc"), [False, True, True]) for i in range(4)]
    page = visit(small_page(tmp_path, [pieces], max_tokens=16))
    assert page.locator("#viewer-pane .text").all_text_contents() == ["abc", "ab"]
    assert page.locator("#viewer-pane .folded").all_text_contents() == [
        "Tokens 5 to 11 are not on this page.",
        "Padding: 4 tokens, 12 to 15",
    ]
    assert page.locator("#viewer-summary").text_content() == "Row 0: 4 pieces, 12 tokens, 8 targets, 4 padding"
    page.locator("#viewer-pane").focus()
    for _ in range(3):
        page.keyboard.press("n")
    assert "last document shown" in info(page)


def test_more_different_tokens_than_two_bytes_can_number_are_shown_too(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.report.viewer, "MOST_BYTES", 10**9)
    rows = [[(i, list(range(i * 400, i * 400 + 400)), [False] * 400) for i in range(r, r + 55)] for r in (0, 55, 110)]
    page = visit(small_page(tmp_path, rows, max_tokens=22_000))
    page.locator("#viewer-row").select_option("2")
    page.locator("#viewer-pane").focus()
    page.keyboard.press("End")
    assert info(page).startswith("token 21,999 · id 65999 ·")


def test_keys_with_modifiers_and_keys_elsewhere_stay_the_browsers(page: Page) -> None:
    page.locator("#viewer-pane").focus()
    page.keyboard.press("Control+ArrowRight")
    page.keyboard.press("Alt+n")
    assert "Point at a token" in info(page)
    page.locator("nav a").first.focus()
    page.keyboard.press("n")
    assert "Point at a token" in info(page)
