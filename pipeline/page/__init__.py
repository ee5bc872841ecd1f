"""One self-contained page: the kit that reports of datasets and of runs are made with.

    page(title="packed", parts=[section("Lengths", bars(edges, counts, title=..., x_name=..., y_name=...))]) -> bytes

Guarantees: the page loads nothing, and runs nothing but a script given here (held to its hash by the page's own content
security policy). Readable in light and dark, on a phone of 360 px, on paper, by keyboard and by screen readers. What is
not Markup is escaped. The same arguments give the same bytes. Imports nothing of the project but its own pieces.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.page.charts import Mark, Series, bars, flow, lines, ranked, shares
from pipeline.page.markup import Markup, Section, element, facts, figure, scrolling, section, table, tiles, warning

__all__ = [
    "Mark", "Markup", "Series", "bars", "element", "facts", "figure", "flow", "lines", "page", "ranked", "scrolling",
    "section", "shares", "table", "tiles", "warning",
]  # fmt: skip

STYLE = Path(__file__).with_name("page.css")


def page(*, title: str, parts: Iterable[Markup], script: str = "", data: Any = None) -> bytes:
    """The page's bytes, UTF-8.

    Args:
        title: heading and window title.
        parts: sections, listed in the page's contents, and whatever else goes between them.
        script: JavaScript that runs at the end of the page; it reads ``data`` from the element with the id "data".
        data: anything that JSON holds.
    """
    held = list(parts)
    sections = [part for part in held if isinstance(part, Section)]
    ids = [part.link for part in sections]
    assert len(set(ids)) == len(ids), f"two sections have the same id: {ids}"
    links = [element("li", element("a", part.heading, href=f"#{part.link}")) for part in sections]
    nav = element("nav", element("ul", *links), aria_label="Contents") if links else ""
    body = element(
        "body",
        element("a", "Skip to the content", href="#content", class_="skip"),
        element("header", element("h1", title), nav),
        element("main", *held, id="content", tabindex="-1"),
        *_scripts(script, data),
    )
    whole = element("html", _head(title, script), body, lang="en")
    return f"<!doctype html>\n{whole}\n".encode(errors="replace")


def _head(title: str, script: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    if script:
        policy += f"; script-src 'sha256-{digest}'"
    return element(
        "head",
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(STYLE.read_text(encoding="utf-8"))),
    )


def _scripts(script: str, data: Any) -> list[Markup]:
    """Data as JSON in which no ``<`` can end the element, then the script."""
    assert not re.search("</script|<!--", script, re.IGNORECASE), "the script would end early"
    out = []
    if data is not None:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        out.append(element("script", Markup(text), type="application/json", id="data"))
    if script:
        out.append(Markup(f"<script>{script}</script>"))
    return out
