"""The live line, as a terminal of any width shows it and as a file keeps it."""

import contextlib
import fcntl
import io
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.training import ROOT, arguments, make_base
from trainer import liveline
from trainer.liveline import LiveLine, fit

PARTS = ["step 123/4567", "loss 1.2345", "3,506 tokens/s", "MFU 54.8%", "129.3 GiB", "2h13m left"]


class Terminal:
    """A pseudo-terminal, and the screen that one of these shows: lines wrap, nothing scrolls out of sight."""

    def __init__(self, columns: int) -> None:
        self.master, slave = os.openpty()
        self.stream = os.fdopen(slave, "w")
        self.rows = [""]
        self.column = 0
        self.resize(columns)

    def resize(self, columns: int, *, wraps_again: bool = True) -> None:
        """Another width: what is too long now is wrapped again, or cut."""
        fcntl.ioctl(self.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.columns = columns = columns or 80
        if wraps_again:
            text = self.rows.pop()
            self.rows += [text[i : i + columns] for i in range(0, len(text), columns)] or [""]
        else:
            self.rows = [row[:columns] for row in self.rows]
        self.column = min(len(self.rows[-1]), columns)

    def read(self) -> str:
        """What has arrived, put on the screen."""
        text = ""
        while select.select([self.master], [], [], 0)[0]:
            try:
                text += os.read(self.master, 65536).decode()
            except OSError:  # the other side is closed
                break
        for character in text:
            self._put(character)
        return text

    def _put(self, character: str) -> None:
        assert character >= " " or character in "\r\n", f"control character {character!r}"
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.rows.append("")
        else:
            if self.column == self.columns:
                self.rows.append("")
                self.column = 0
            row = self.rows[-1]
            self.rows[-1] = row[: self.column].ljust(self.column) + character + row[self.column + 1 :]
            self.column += 1

    def shown(self) -> list[str]:
        """Rows of the screen, without spaces at their ends."""
        return [row.rstrip() for row in self.rows]

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@contextlib.contextmanager
def on_terminal(columns: int) -> Iterator[tuple[Terminal, LiveLine]]:
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(Terminal(columns)) as terminal:
        patch.setattr(liveline, "SECONDS_BETWEEN_RENEWALS", 0.0)
        patch.setenv("TERM", "xterm-256color")
        yield terminal, LiveLine(terminal.stream)


@pytest.mark.parametrize("columns", [1, 12, 13, 14, 40, 80, 81, 300])
def test_the_line_is_renewed_in_place_within_any_width(columns: int) -> None:
    with on_terminal(columns) as (terminal, line):
        for number in (1, 99, 100_000, 3):
            parts = [f"step {number}/100000", *PARTS[1:]]
            line.renew(parts)
            terminal.read()
            assert terminal.shown() == [fit(parts, columns - 1 or 1)]
        line.close()
        terminal.read()
        assert terminal.shown()[1:] == [""]


def test_a_terminal_that_does_not_tell_its_width_is_taken_for_one_of_80_columns() -> None:
    with on_terminal(0) as (terminal, line):
        line.renew(["x" * 200])
        terminal.read()
        assert terminal.shown() == ["x" * 79]


WORDS = st.lists(st.text("abc/1", min_size=1, max_size=30), min_size=1, max_size=6)
MESSAGES = st.text("xyz ", min_size=1, max_size=70).map(str.strip).filter(bool)


@given(columns=st.integers(2, 90), events=st.lists(WORDS | MESSAGES | st.none(), max_size=12))
@example(columns=30, events=[["a" * 60], "message", ["b"], "x" * 60, None, "y" * 29])
def test_messages_stay_whole_above_the_line_and_nothing_of_a_longer_or_cleared_one_is_left(
    columns: int, events: list[list[str] | str | None]
) -> None:
    with on_terminal(columns) as (terminal, line):
        expected: list[str] = []
        live = ""
        for event in events:
            if event is None:
                line.clear()
                live = ""
            elif isinstance(event, str):
                line.say(event)
                expected += [event[i : i + columns].rstrip() for i in range(0, len(event), columns)]
            else:
                line.renew(event)
                live = fit(event, columns - 1)
            terminal.read()
            assert terminal.shown() == [*expected, live]
        line.close()
        terminal.read()
        assert terminal.shown() == [*expected, *([live] if live else []), ""]


@pytest.mark.parametrize("wraps_again", [True, False], ids=["wraps again", "cuts"])
def test_after_a_resize_the_line_fits_and_the_one_before_is_whole_or_gone(*, wraps_again: bool) -> None:
    with on_terminal(120) as (terminal, line):
        line.renew(PARTS)
        terminal.read()
        terminal.resize(50, wraps_again=wraps_again)
        before = terminal.shown()
        line.renew(PARTS)
        terminal.read()
        assert terminal.shown() == [*before, "step 123/4567  loss 1.2345  2h13m left"]
        terminal.resize(100, wraps_again=wraps_again)
        line.renew(PARTS)
        terminal.read()
        assert terminal.shown() == [*before, "  ".join(PARTS)]
        line.say("message")
        terminal.read()
        assert terminal.shown() == [*before, "message", "  ".join(PARTS)]


@given(parts=WORDS, columns=st.integers(1, 100))
def test_as_many_parts_as_fit_are_shown_whole(parts: list[str], columns: int) -> None:
    found = fit(parts, columns)
    assert len(found) <= columns
    assert found == "  ".join(parts) or len("  ".join(parts)) > columns
    if len(parts[0]) <= columns:
        shown = found.split("  ")
        assert shown in ([*parts[:kept], parts[-1]] for kept in range(1, len(parts))) or shown in (parts, parts[:1])


def test_time_left_goes_last_but_for_the_step() -> None:
    widths = {columns: fit(PARTS, columns) for columns in (200, 70, 60, 50, 30, 20, 5)}
    assert [text.count("  ") + 1 for text in widths.values()] == [6, 5, 4, 3, 2, 1, 1]
    assert widths[30] == "step 123/4567  2h13m left"
    assert widths[5] == "step "


def test_a_fast_step_is_shown_later_but_the_last_one_always(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(80) as (terminal, line):
        monkeypatch.setattr(liveline, "SECONDS_BETWEEN_RENEWALS", 1000.0)
        for number in range(1, 6):
            line.renew([f"step {number}/5"], last=number == 5)
        assert terminal.read() == "step 1/5\rstep 5/5\r\n"


def test_a_file_gets_whole_lines_and_at_the_end_the_one_that_was_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveline, "SECONDS_BETWEEN_LINES", 1000.0)
    stream = io.StringIO()
    line = LiveLine(stream)
    for number in range(1, 4):
        line.renew([f"step {number}/9", "loss 1.0"])
    line.say("message")
    line.close()
    line.close()
    assert stream.getvalue() == "step 1/9  loss 1.0\nmessage\nstep 3/9  loss 1.0\n"


def test_a_dumb_terminal_is_written_to_as_a_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(20) as (terminal, _):
        monkeypatch.setenv("TERM", "dumb")
        line = LiveLine(terminal.stream)
        line.renew(["step 1/9", "a loss of some length"])
        line.renew(["step 2/9", "a loss of some length"])
        line.close()
        assert terminal.read() == "".join(f"step {n}/9  a loss of some length\r\n" for n in (1, 2))


PATIENT = """
import sys
from trainer import liveline, train
liveline.SECONDS_BETWEEN_LINES = 1e9  # on no machine a run is that slow
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("columns", "kind"), [(40, "xterm"), (100, "dumb")])
def test_a_whole_run_on_a_terminal(tmp_path: Path, columns: int, kind: str) -> None:
    base = make_base(tmp_path)
    words = arguments(base, tmp_path / "run", "--eval-shards", str(base / "eval"), "--eval-every", "2", "--epochs", "2")
    with contextlib.closing(Terminal(columns)) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT, *words],
            cwd=ROOT, stderr=terminal.stream, env={**os.environ, "TERM": kind, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        while process.poll() is None:
            terminal.read()
            time.sleep(0.01)
        terminal.read()
        assert process.returncode == 0
        shown = terminal.shown()
    (last,) = [number for number, row in enumerate(shown) if row.startswith("step 5/5  loss ")]
    rate = "" if columns == 40 else r"[\d,]+ tokens/s  \d+\.\d GiB  "
    assert re.fullmatch(rf"step 5/5  loss \d\.\d{{4}}  {rate}0s left", shown[last])
    assert shown[last + 1].startswith("step 5: evaluation loss ")
    # Elsewhere than on a terminal what comes first stays: the evaluation before the first step.
    assert [row for row in shown if row.startswith("evaluating")] == ["evaluating row 0/3"] * (kind == "dumb")
    assert sum(row.startswith("step 4: evaluation loss ") for row in shown) == 1
    assert not [row for row in shown if re.match(r"step [1-4]/5", row)]  # each gave way to the next, or was held back
