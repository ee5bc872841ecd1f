"""The page of a real run, trained for some steps on the sample, in a real browser."""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest

from pipeline.pack import Settings as PackSettings
from pipeline.pack import pack
from tests.browser.conftest import Visit
from tests.traces import two_steps
from trainer import train
from trainer.report.__main__ import main

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "sample"
SECTIONS = ["glance", "loss", "gradient", "speed", "steps", "time", "memory", "kernels", "numbers", "run"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps with evaluations and a trace."""
    root = tmp_path_factory.mktemp("run")
    for split, name in (("train_sft", "packed"), ("test_sft", "held")):
        pack(PackSettings(source=str(SAMPLE), tokenizer=str(SAMPLE), split=split, max_tokens=256, limit=40, workers=1,
                          out=root / name, cache_dir=root / "cache"))  # fmt: skip
    arguments = {"shards": root / "packed", "eval-shards": root / "held", "rows-per-step": 1, "steps": 8, "lr": 2e-3,
                 "warmup-steps": 2, "eval-every": 4, "trace": 2, "out": root / "first"}  # fmt: skip
    assert train.main([word for name, value in arguments.items() for word in (f"--{name}", str(value))]) == 0
    return root / "first"


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    assert main([str(run)]) == 0
    return run / "report.html"


@pytest.fixture(scope="module")
def compared(run: Path) -> Path:
    """The same run and a copy of it that has another name, on one page."""
    second = run.with_name("second")
    shutil.copytree(run, second, ignore=shutil.ignore_patterns("checkpoints", "export"))
    out = run.with_name("compared.html")
    assert main([str(run), str(second), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def traced(run: Path) -> Path:
    """The run with two traces of a GPU, before and after."""
    out, paths = run.with_name("traced.html"), [run.with_name(name) for name in ("before.json", "after.json")]
    for path, events in zip(paths, (two_steps(), two_steps()[:6]), strict=True):
        path.write_text(json.dumps(events))
    assert main([str(run), "--trace", *map(str, paths), "--out", str(out)]) == 0
    return out


def test_the_page_of_a_real_run_opens_without_a_fault_and_has_every_section(visit: Visit, page: Path) -> None:
    opened = visit(page)
    assert [s.get_attribute("id") for s in opened.locator("main > section").all()] == SECTIONS
    assert opened.locator(".tiles dd").nth(0).inner_text() == "finished"
    assert opened.locator("svg[role=img]").count() >= 8
    for link in opened.locator("nav a").all():
        assert opened.locator(str(link.get_attribute("href"))).count() == 1


@pytest.mark.parametrize("width", [360, 375, 768, 1280, 1920])
def test_no_page_scrolls_sideways(visit: Visit, page: Path, compared: Path, traced: Path, width: int) -> None:
    for path in (page, compared, traced):
        opened = visit(path, width=width)
        opened.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert opened.evaluate("document.documentElement.scrollWidth") <= width


def test_everything_fits_on_paper(visit: Visit, page: Path, compared: Path, traced: Path) -> None:
    for path in (page, compared, traced):
        opened = visit(path, width=720)  # A4 without its margins
        opened.emulate_media(media="print")
        assert opened.evaluate("document.documentElement.scrollWidth") <= 720


def test_no_text_of_a_picture_is_cut_off_or_lies_on_another(visit: Visit, page: Path, traced: Path) -> None:
    for path, width in product((page, traced), (375, 1280)):
        overlaps = visit(path, width=width).evaluate("""() => {
            const found = []
            for (const svg of document.querySelectorAll("svg.chart")) {
                const texts = [...svg.querySelectorAll("text")].filter(t => getComputedStyle(t).display !== "none")
                const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()])
                for (const [name, box] of boxes)
                    if (box.left < 0 || box.right > innerWidth) found.push(`${name} is cut off`)
                for (const [i, [a, one]] of boxes.entries()) for (const [b, two] of boxes.slice(i + 1))
                    if (Math.min(one.right, two.right) - Math.max(one.left, two.left) > 1
                        && Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top) > 5) found.push(`${a} on ${b}`)
            }
            return found
        }""")
        assert overlaps == []


def test_the_picture_of_a_step_fills_its_width_on_any_screen(visit: Visit, traced: Path) -> None:
    for width in (375, 1280):
        opened = visit(traced, width=width)
        lane = opened.locator("#time svg.chart > rect").first.bounding_box()
        box = opened.locator("#time figure").bounding_box()
        assert lane is not None
        assert box is not None
        assert lane["width"] > box["width"] - 130
        assert lane["x"] + lane["width"] <= box["x"] + box["width"]


def test_dark_and_light_and_paper_differ_and_each_has_its_colours(visit: Visit, page: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = visit(page), visit(page, scheme="dark")
    assert light.evaluate(ground) == "rgb(255, 255, 255)"
    assert dark.evaluate(ground) != "rgb(255, 255, 255)"
    dark.emulate_media(media="print")
    assert dark.evaluate(ground) in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")
    assert not dark.locator("nav").is_visible()


def test_the_numbers_behind_a_chart_open_by_keyboard(visit: Visit, page: Path) -> None:
    opened = visit(page)
    summary = opened.locator("#loss summary").first
    assert not opened.locator("#loss details table").first.is_visible()
    summary.focus()
    opened.keyboard.press("Enter")
    assert opened.locator("#loss details table").first.is_visible()


def test_two_runs_are_told_apart_in_the_legend(visit: Visit, compared: Path) -> None:
    opened = visit(compared)
    assert opened.locator("#loss .legend").first.locator("li").all_inner_texts() == ["first", "second"]
    assert opened.locator("#glance thead th").all_inner_texts() == ["first", "second"]


def test_the_keyboard_reaches_the_boxes_that_scroll_and_no_others(visit: Visit, compared: Path) -> None:
    opened = visit(compared, width=375)
    wide = opened.evaluate("""() => [...document.querySelectorAll(".scroll")].filter(
        e => e.scrollWidth > e.clientWidth && e.checkVisibility()).map(e => e.ariaLabel)""")
    reached = []
    for _ in range(100):
        opened.keyboard.press("Tab")
        reached += opened.evaluate("""() => [document.activeElement].filter(
            e => e.className === "scroll").map(e => e.ariaLabel)""")
    assert "Seconds of the first step, and percentiles of the others" in wide
    assert reached[: len(wide)] == wide
