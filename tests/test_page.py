"""A page loads nothing and escapes everything; its colours can be read and told apart by any sight."""

import base64
import hashlib
import itertools
import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from pipeline.page import (
    STYLE,
    Mark,
    Markup,
    Series,
    bars,
    element,
    facts,
    figure,
    flow,
    lines,
    page,
    ranked,
    section,
    shares,
    table,
    tiles,
    warning,
)  # fmt: skip
from tests.parsed import Parsed

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(1)> & \"double\" 'single'"


# ----------------------------------------------------------------------------------------------- markup


def test_text_is_escaped_in_every_piece_and_markup_is_not_escaped_again() -> None:
    h = HOSTILE
    parts = [
        section(h, h, element("b", h), note=h, id="x"), facts([(h, h)]), tiles([(h, h, h)]), warning(h),
        figure(Markup("<svg></svg>"), title=h, text=h, fallback=table([h], [[h]], caption=h)),
        bars([0, 1], [1], title=h, x_name=h, y_name=h, marks=[Mark(at=1, name=h)]),
        lines([Series(name=h, x=[1], y=[2])] * 2, title=h, x_name=h, y_name=h, marks=[Mark(at=1, name=h)]),
        shares([(h, 1)], title=h, unit=h), ranked([(h, 1)], title=h, unit=h), flow([(h, 1, h)], title=h, unit=h),
    ]  # fmt: skip
    parsed = Parsed(page(title=h, parts=parts, data=h))
    assert not parsed.all("img")
    assert [script["type"] for script in parsed.all("script")] == ["application/json"]
    assert parsed.all("h1")[0]["text"] == parsed.all("h2")[0]["text"] == parsed.all("b")[0]["text"] == h
    assert parsed.all("div", "scroll")[0]["aria-label"] == h


@given(st.text(), st.text())
def test_any_text_survives_as_content_and_as_attribute(text: str, other: str) -> None:
    text, other = (re.sub("[\r\0\ud800-\udfff]", "", held) for held in (text, other))
    parsed = Parsed(element("p", text, data_x=other))
    assert parsed.all("p") == [{"data-x": other, "text": text}]


def test_attributes_that_are_none_or_false_are_left_out() -> None:
    assert element("input", a=None, b=False, c=True, d=0, class_="x") == '<input c d="0" class="x">'


def test_rows_that_do_not_fit_the_header_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        table(["a", "b"], [["1"]], caption="c")


# ------------------------------------------------------------------------------------------------- page


def test_the_page_asks_for_nothing_and_runs_only_the_script_whose_hash_it_names() -> None:
    script = "document.title = 'é';"
    made = page(title="t", parts=[section("One", "text")], script=script, data=[1])
    parsed = Parsed(made)
    policy = next(m["content"] for m in parsed.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert [s["text"] for s in parsed.all("script") if "type" not in s] == [script]
    links = [value for _, held in parsed.found for name, value in held.items() if name in ("src", "href", "action")]
    assert links == ["#content", "#one"]
    assert b"url(" not in made
    assert b"@import" not in made


def test_without_a_script_none_may_run() -> None:
    assert b"script-src" not in page(title="t", parts=[])
    assert b"<script" not in page(title="t", parts=[])


@pytest.mark.parametrize("script", ["'</SCRIPT>'", "'<!--'"])
def test_a_script_that_would_end_early_is_our_own_mistake(script: str) -> None:
    with pytest.raises(AssertionError):
        page(title="t", parts=[], script=script)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=8,
)


@given(json_values)
@example("</script><!--<script>\u2028")
def test_data_comes_out_of_the_page_as_it_went_in(value: Any) -> None:
    made = page(title="t", parts=[], data={"held": value}).decode()
    (inner,) = re.findall(r'<script type="application/json" id="data">([^<]*)</script>', made)
    assert json.loads(inner) == {"held": value}


def test_the_contents_list_every_section_and_two_of_one_id_are_our_own_mistake() -> None:
    parts = [section("Fill & lengths", "a"), warning("b"), section("⟨⟩", "c"), section("Last", "d", id="end")]
    made = page(title="t", parts=parts)
    links = [(a["href"], a["text"]) for a in Parsed(made).all("a")]
    assert links[1:] == [("#fill-lengths", "Fill & lengths"), ("#section", "⟨⟩"), ("#end", "Last")]
    with pytest.raises(AssertionError, match="same id"):
        page(title="t", parts=[section("A"), section("a")])


def test_a_name_that_is_no_unicode_does_not_stop_the_page() -> None:
    assert b"<h1>bad ?</h1>" in page(title="bad \udcff", parts=[])


def test_a_table_whose_corner_is_empty_has_names_of_rows() -> None:
    made = table(["", "ms"], [["CPU", "5"]], caption="c", numeric=(1,))
    assert '<tr><td></td><th class="n" scope="col">ms</th></tr>' in made
    assert '<tr><th scope="row">CPU</th><td class="n">5</td></tr>' in made
    assert "<tr><td>CPU</td><td>5</td></tr>" in table(["what", "ms"], [["CPU", "5"]], caption="c")


def test_a_picture_is_named_and_described_inside_itself_and_has_its_table_folded() -> None:
    svg = Markup('<svg viewBox="0 0 9 9"><rect/></svg>')
    made = figure(svg, title="Rows", text="What they hold.", fallback=table(["a"], [["1"]], caption="c"))
    assert '<svg role="img" viewBox="0 0 9 9"><title>Rows</title><desc>What they hold.</desc><rect/></svg>' in made
    assert made.index("<details>") < made.index("<table>")
    assert Parsed(made.replace("<rect/>", "")).all("div", "scroll")[0]["aria-label"] == "Rows"


def test_what_is_installed_holds_the_style_and_the_scripts() -> None:
    kept = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = [file.parent for name in ("pipeline", "trainer") for file in (ROOT / name).rglob("__init__.py")]
    assert len(packages) >= 5
    for package in packages:
        for file in package.glob("*.*"):
            patterns = kept["package-data"].get(".".join(package.relative_to(ROOT).parts), [])
            assert file.suffix == ".py" or any(fnmatch(file.name, pattern) for pattern in patterns), file


# ---------------------------------------------------------------------------------------------- colours


def palettes() -> list[dict[str, str]]:
    """Names and colours, light then dark."""
    blocks = re.findall(r":root \{([^}]*)\}", STYLE.read_text())
    return [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in blocks]


def linear_rgb(colour: str) -> np.ndarray:
    held = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(held <= 0.04045, held / 12.92, ((held + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it, 1 to 21."""
    dark, light = sorted(float(linear_rgb(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_text_has_a_contrast_of_4_5_and_marks_of_3(palette: dict[str, str]) -> None:
    texts = {
        "ground": ("text", "quiet", "link", "alert", "control"),
        "raised": ("text", "quiet"),
        "alert-ground": ("text", "alert"),
        "target": ("text", "quiet", "control"),
        "text": ("ground",),
    }
    marks = {"ground": ("focus", "target-line", *(f"s{i}" for i in range(1, 9)))}
    for least, pairs in ((4.5, texts), (3.0, marks)):
        for below, names in pairs.items():
            for name in names:
                assert contrast(palette[name], palette[below]) >= least, (name, below)


SIGHT = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What is left of linear RGB: Machado, Oliveira and Fernandes, 2009, severity 1."""


def cielab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (
        np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in to_xyz @ rgb.clip(0, 1) / [0.9505, 1, 1.089]
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_the_eight_colours_are_told_apart_by_any_sight(palette: dict[str, str], sight: str) -> None:
    seen = [cielab(np.array(SIGHT[sight]) @ linear_rgb(palette[f"s{i}"])) for i in range(1, 9)]
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - other) > 12
