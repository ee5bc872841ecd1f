"""The report of real packed chats in a real browser: it opens clean, fits every screen and paper, and can be read."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Page

from pipeline.shards import REPORT, PackedDataset
from tests.browser.conftest import Scheme, Visit
from tests.test_page import contrast


@pytest.fixture
def report(dataset: PackedDataset) -> Path:
    """Where the page lies."""
    return dataset.path / REPORT


def test_the_page_is_small_and_opens_without_a_complaint_or_a_request(page: Page, report: Path) -> None:
    assert report.stat().st_size < 3_000_000
    assert page.locator("h1").text_content() == "packed"
    assert page.locator("#viewer-pane .document").count() > 0


@pytest.mark.parametrize("width", [360, 375, 768, 1280, 1600])
def test_the_page_never_scrolls_sideways(visit: Visit, report: Path, width: int) -> None:
    page = visit(report, width=width)
    for details in page.locator("details").all():
        details.evaluate("element => element.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main *, header *")]
            .filter(e => !e.closest(".scroll, svg, #viewer-pane, noscript, caption, option"))
            .filter(e => e.getClientRects().length)
            .filter(e => e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1)
            .map(e => e.outerHTML.slice(0, 90))"""
    )
    assert outside == []


def test_headings_pictures_and_controls_have_names_in_order(page: Page) -> None:
    assert page.locator("html").get_attribute("lang") == "en"
    levels = [int(name[1]) for name in page.locator("h1, h2, h3").evaluate_all("all => all.map(e => e.tagName)")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    pictures = page.locator('svg[role="img"]')
    assert pictures.count() >= 3
    for picture in pictures.all():
        assert picture.locator("> title").text_content()
        figure = picture.locator("xpath=ancestor::figure")
        assert figure.locator("table").count() >= 1
    bare = page.locator("svg:not([role=img]):not([aria-hidden=true]):not(svg[role=img] *)")
    assert bare.count() == 0
    for control in page.locator("button, select, [tabindex='0']").all():
        assert control.evaluate("e => e.getAttribute('aria-label') || (e.labels && e.labels[0].textContent)")
    links = page.locator("nav a").evaluate_all("all => all.map(e => e.getAttribute('href'))")
    assert links == page.locator("main > section").evaluate_all("all => all.map(e => '#' + e.id)")


def hexadecimal(colour: str) -> str:
    """A colour as the browser says it, as #rrggbb."""
    text = colour.strip()
    return text if text[0] == "#" else "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", text)[:3])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_against_what_lies_behind_it(visit: Visit, report: Path, scheme: Scheme) -> None:
    page = visit(report, scheme=scheme)
    pairs = page.evaluate(
        """() => {
            const behind = e => {
                for (; e; e = e.parentElement) {
                    const colour = getComputedStyle(e).backgroundColor;
                    if (colour !== "rgba(0, 0, 0, 0)") return colour;
                }
                return "none";
            };
            const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            const pairs = new Set();
            while (walker.nextNode()) {
                const e = walker.currentNode.parentElement;
                if (!walker.currentNode.textContent.trim() || !e.getClientRects().length) continue;
                const style = getComputedStyle(e);
                pairs.add(JSON.stringify([e instanceof SVGElement ? style.fill : style.color, behind(e)]));
            }
            return [...pairs].map(JSON.parse);
        }"""
    )

    assert len(pairs) > 5
    assert {pair[1] for pair in pairs} >= {"rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)"}
    for text, ground in pairs:
        assert contrast(hexadecimal(text), hexadecimal(ground)) >= 4.5, (text, ground)


@pytest.mark.parametrize("width", [375, 1280])
def test_text_in_charts_is_at_least_12_pixels_high(visit: Visit, report: Path, width: int) -> None:
    page = visit(report, width=width)
    sizes = page.locator("svg text").evaluate_all(
        """all => all.map(e => parseFloat(getComputedStyle(e).fontSize) * (e.ownerSVGElement.viewBox.baseVal?.width
            ? e.ownerSVGElement.getBoundingClientRect().width / e.ownerSVGElement.viewBox.baseVal.width : 1))"""
    )
    assert sizes
    assert min(sizes) >= 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_targets_and_padding_of_a_strip_stand_out_and_other_tokens_are_lighter(
    visit: Visit, report: Path, scheme: Scheme
) -> None:
    page = visit(report, scheme=scheme)
    drawn = page.locator(".strips path").evaluate_all(
        """all => all.map(e => {
            const style = getComputedStyle(e);
            return [e.getAttribute("class"), style.fill, style.stroke, style.fillOpacity, style.opacity];
        })"""
    )
    ground = hexadecimal(page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ground')"))
    seen = {kind: stroke if fill == "none" else fill for kind, fill, stroke, *_ in drawn if "other" not in kind}
    assert len(seen) == len(set(seen.values())) >= 4
    assert {(float(inside), float(whole)) for kind, _, _, inside, whole in drawn if "other" in kind} == {(0.6, 1.0)}
    assert {(float(inside), float(whole)) for kind, _, _, inside, whole in drawn if kind in seen} == {(1.0, 1.0)}
    for colour in seen.values():
        assert contrast(hexadecimal(colour), ground) >= 3
    places = page.locator(".places .parts rect").evaluate_all("all => all.map(e => getComputedStyle(e).fill)")
    assert places[2] == seen["padding"]


def test_numbers_of_bars_stand_at_the_right_edge_and_captions_are_whole_on_a_phone(visit: Visit, report: Path) -> None:
    page = visit(report, width=375)
    rows = page.locator(".ranked:not(.flow) tbody td.n").evaluate_all(
        "all => all.map(e => [e.getBoundingClientRect().right, e.closest('.scroll').getBoundingClientRect().right])"
    )
    assert rows
    assert all(abs(number - edge) <= 1 for number, edge in rows)
    captions = page.locator("caption").evaluate_all(
        "all => all.filter(e => e.offsetWidth > 1).map(e => [e.getBoundingClientRect().right, e.textContent])"
    )
    assert captions
    assert [text for right, text in captions if right > 375] == []


def test_on_paper_there_is_no_navigation_and_nothing_is_cut_off_at_the_side(visit: Visit, report: Path) -> None:
    page = visit(report, width=760, scheme="dark")
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    assert page.locator("#viewer .bar").is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 760
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_without_scripts_all_but_the_viewer_is_there(visit: Visit, report: Path) -> None:
    page = visit(report, java_script_enabled=False)
    assert "python -m pipeline.verify" in page.locator("noscript p").inner_text()
    assert page.locator("figure").count() >= 3


def test_nothing_moves_by_itself_where_less_motion_is_asked_for(visit: Visit, report: Path) -> None:
    page = visit(report, reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


def test_the_first_tab_shows_a_link_to_the_content_and_focus_can_be_seen(page: Page) -> None:
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    assert skip.evaluate("e => e === document.activeElement")
    assert skip.bounding_box()["x"] >= 0
    assert skip.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'content'")  # the browser goes there in its own time
