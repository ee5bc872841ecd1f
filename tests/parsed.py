"""Pages read back: elements with their attributes and text, tables, percentages."""

import re
from html.parser import HTMLParser


class Parsed(HTMLParser):
    """Elements of a page in order, each with its attributes and its own text; every element must be closed."""

    def __init__(self, text: str | bytes) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[int] = []
        self.feed(text.decode() if isinstance(text, bytes) else text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.append("")
        if tag != "meta":
            self._open.append(len(self.found) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]] += data

    def all(self, tag: str, kind: str | None = None) -> list[dict[str, str]]:
        """Attributes of the elements of a name, and of a class; their text as "text"."""
        return [
            held | {"text": text}
            for (name, held), text in zip(self.found, self.texts, strict=True)
            if name == tag and (kind is None or kind in held.get("class", "").split())
        ]


def cells(markup: str) -> list[list[str]]:
    """Rows of the first table, its header first."""
    first = markup[markup.index("<table") : markup.index("</table>")]
    rows = re.findall(r"<tr>(.*?)</tr>", first)
    return [["".join(Parsed(cell).texts) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


def percent(text: str) -> float:
    return float(text.removesuffix("%"))
