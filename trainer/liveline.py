"""Progress on stderr: one line that is renewed in place on a terminal, whole lines now and then in a file.

    with closing(LiveLine(sys.stderr)) as line:
        line.renew(["step 1/8", "loss 2.0000", "7s left"])
        line.say("something that stays")

Guarantees: on a terminal the line is never longer than the terminal is wide, of whatever width and resized too, leaves
nothing of a longer one behind, and stands below every message; in a file every line is whole, one each 10 s and the
last. No colours and no control sequences but the carriage return; TERM=dumb is written to as a file is.
Costs: a few microseconds a step; a terminal's line is renewed at most ten times a second.
"""

import contextlib
import math
import os
import time
from collections.abc import Sequence
from typing import TextIO

SECONDS_BETWEEN_LINES = 10.0
"""How often progress is printed where it goes into a file."""

SECONDS_BETWEEN_RENEWALS = 0.1
"""How often a terminal's line is renewed."""

USUAL_COLUMNS = 80
"""Width of a terminal that does not tell its own."""


class LiveLine:
    """One line of progress on ``stream``, and messages above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._parts: Sequence[str] = ()
        self._pending = False
        self._printed = -math.inf
        self._shown = 0

    def renew(self, parts: Sequence[str], *, last: bool = False) -> None:
        """Show ``parts`` in place of the former ones, if it is time to; the last ones always.

        Args:
            parts: words without line breaks, each one column wide a character.
            last: nothing comes after them.
        """
        self._parts, self._pending = parts, True
        pause = SECONDS_BETWEEN_RENEWALS if self._on_terminal else SECONDS_BETWEEN_LINES
        if last or time.monotonic() - self._printed >= pause:
            self._show()
            if last:
                self._end()

    def say(self, text: str) -> None:
        """Print a message of its own; a terminal's line goes on below it."""
        renewed = self._shown > 0
        self._leave_wrapped()
        blank = f"\r{' ' * self._shown}\r" if self._shown else ""
        self._shown = 0
        print(blank + text, file=self._stream, flush=True)
        if renewed:
            self._show()

    def clear(self) -> None:
        """Take the line away; what was not shown yet is not shown any more."""
        self._pending = False
        self._leave_wrapped()
        if self._shown:
            self._stream.write(f"\r{' ' * self._shown}\r")
            self._stream.flush()
            self._shown = 0

    def close(self) -> None:
        """Show what is not shown yet and end the line."""
        if self._pending:
            self._show()
        self._end()

    def _show(self) -> None:
        self._printed, self._pending = time.monotonic(), False
        if self._on_terminal:
            self._leave_wrapped()
            text = fit(self._parts, self._columns())
            self._stream.write(("\r" if self._shown else "") + text.ljust(self._shown))  # at once: nothing flickers
            self._stream.flush()
            self._shown = len(text)
        else:
            print("  ".join(self._parts), file=self._stream, flush=True)

    def _leave_wrapped(self) -> None:
        """Begin below a line that a terminal, narrower by now, has wrapped or cut: which of both cannot be told."""
        if self._shown > self._columns():
            self._end()

    def _end(self) -> None:
        if self._shown:
            print(file=self._stream, flush=True)
            self._shown = 0

    def _columns(self) -> int:
        """Columns that can be written to without the cursor leaving the line."""
        columns = 0
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(self._stream.fileno()).columns
        return max(1, (columns or USUAL_COLUMNS) - 1)


def fit(parts: Sequence[str], columns: int) -> str:
    """As many parts as fit, the first and the last ones rather than those between them; one alone is cut.

    Worked example, 9 columns: ``aaa bb cc dd`` (two spaces between parts) becomes ``aaa  dd``.
    """
    left = list(parts)
    while len(left) > 1 and len("  ".join(left)) > columns:
        del left[max(1, len(left) - 2)]
    return "  ".join(left)[:columns]
