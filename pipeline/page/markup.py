"""Pieces of a page: text that is escaped once, elements, lists, tables, figures.

Guarantees: what is not ``Markup`` is escaped wherever it is put in, so no text of a chat, a path or a log can become
an element. Imports nothing of the project.
"""

import html
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Self

Attribute = str | int | float | bool | None
_VOID = {"br", "meta", "input", "link"}


class Markup(str):
    """HTML as it goes into the page. Any other text is escaped where it meets one."""

    __slots__ = ()

    @classmethod
    def of(cls, *parts: str) -> Self:
        """Parts end to end, escaped unless they are Markup. Line breaks and quotes in text are kept."""
        return cls("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


class Section(Markup):
    """A section that a page's contents can name."""

    __slots__ = ("heading", "link")
    heading: str
    """Not escaped."""
    link: str
    """The id of the section."""


def element(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """One element: ``element("td", "a < b", class_="n", aria_label="x")``.

    Args:
        name: the element's name.
        children: escaped unless they are Markup.
        attributes: None and False are left out, True has no value; ``_`` becomes ``-``, one at the end goes.
    """
    out = [f"<{name}"]
    for key, value in attributes.items():
        if value is not None and value is not False:
            held = (
                "" if value is True else f'="{html.escape(f"{value:g}" if isinstance(value, float) else str(value))}"'
            )
            out.append(f" {key.rstrip('_').replace('_', '-')}{held}")
    return Markup("".join([*out, ">", Markup.of(*children), "" if name in _VOID else f"</{name}>"]))


def section(title: str, *parts: str, note: str = "", id: str | None = None) -> Section:  # noqa: A002
    """A heading, a note below it, and what belongs there; a page's contents list it.

    Args:
        title: the heading.
        parts: Markup as it is; text becomes a paragraph.
        note: one quiet sentence or two below the heading.
        id: where links go; made of the title unless given.
    """
    held = [part if isinstance(part, Markup) else element("p", part) for part in parts if part]
    link = id or re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
    notes = [element("p", note, class_="note")] if note else []
    made = Section(element("section", element("h2", title), *notes, *held, id=link))
    made.heading, made.link = title, link
    return made


def facts(lines: Iterable[tuple[str, str]]) -> Markup:
    """A list of names and what they are."""
    return element("dl", *(element("div", element("dt", name), element("dd", text)) for name, text in lines),
                   class_="facts")  # fmt: skip


def tiles(values: Iterable[tuple[str, str, str]]) -> Markup:
    """The headline numbers: name, value, a small note or ""."""
    made = (
        element("div", element("dt", name), element("dd", value), *([element("dd", note)] if note else []))
        for name, value, note in values
    )
    return element("dl", *made, class_="tiles")


def warning(text: str) -> Markup:
    """One thing that the reader should look into."""
    return element("p", element("strong", "Look into this: "), text, class_="warning", role="note")


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, numeric: Collection[int] = ()
) -> Markup:
    """A table in a box of its own, which scrolls where the screen is narrow.

    Args:
        header: names of the columns; where the first is "", the first cell of each row is the row's name.
        rows: as many cells each; Markup or text.
        caption: what the table shows, above it.
        numeric: columns that are aligned to the right, counted from 0.
    """

    def line(row: Sequence[str], *scopes: str | None) -> Markup:
        """A row; the scope of its first cell and of the others. A cell with one is a heading."""
        assert len(row) == len(header), (row, header)
        held = [(cell, scopes[min(i, 1)], "n" if i in numeric else None) for i, cell in enumerate(row)]
        return element("tr", *(element("th" if s else "td", cell, class_=c, scope=s) for cell, s, c in held))

    has_names = header[0] == ""
    body = element("tbody", *(line(row, "row" if has_names else None, None) for row in rows))
    head = element("thead", line(header, None if has_names else "col", "col"))
    return scrolling(element("table", element("caption", caption), head, body), caption)


def scrolling(inner: Markup, name: str) -> Markup:
    """A box that scrolls sideways rather than the page.

    No tab stop of its own, since most of them hold all that is in them: Chromium from 130 on and Firefox let the
    keyboard into a box that does scroll. In Safari it scrolls by pointer and touch alone.
    """
    return element("div", inner, class_="scroll", role="group", aria_label=name)


def figure(
    svg: Markup,
    *,
    title: str,
    text: str = "",
    fallback: Markup | None = None,
    legend: Markup | None = None,
    below: Markup | None = None,
    fluid: bool = False,
) -> Markup:
    """A picture with its caption, named for screen readers, and the same as a table.

    Args:
        svg: the picture; must begin with its ``<svg`` element.
        title: what it shows: caption, and name of the picture.
        text: a sentence below the title: also the picture's description.
        fallback: the same numbers as a table, folded.
        legend: what the colours mean, above the picture.
        below: what belongs right below the picture.
        fluid: the picture fits any width by itself; otherwise it scrolls in its own box where it is too wide.
    """
    assert svg.startswith("<svg"), svg[:40]
    opening, _, rest = svg.partition(">")
    names = Markup.of(element("title", title), element("desc", text) if text else "")
    named = Markup(f'<svg role="img"{opening[4:]}>{names}{rest}')
    caption = element("figcaption", element("strong", title), *([" ", element("span", text)] if text else []))
    box = element("div", named, class_="plot") if fluid else scrolling(named, title)
    folded = element("details", element("summary", "As a table"), fallback) if fallback else None
    return element("figure", caption, *(part for part in (legend, box, below, folded) if part))
