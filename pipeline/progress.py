"""Progress of a long stage on stderr: done, rate, time left. One line, rewritten on a terminal."""

import sys
import time


class Progress:
    """Counts towards ``total`` units and prints at most twice a second (every ten seconds into a file)."""

    def __init__(self, stage: str, total: int, unit: str) -> None:
        self._stage, self._total, self._unit = stage, total, unit
        self._started = self._printed = time.monotonic()
        self._done = 0
        self._terminal = sys.stderr.isatty()

    def add(self, count: int) -> None:
        """Count, and print if it is time."""
        self._done += count
        now = time.monotonic()
        if now - self._printed >= (0.5 if self._terminal else 10):
            self._printed = now
            rate = self._done / max(now - self._started, 1e-9)
            left = (self._total - self._done) / max(rate, 1e-9)
            self._print(f"{self._done:,} of {self._total:,} {self._unit}, {rate:,.0f} a second, {left:,.0f} s left")

    def close(self) -> float:
        """Print the stage's last line; return its seconds."""
        seconds = time.monotonic() - self._started
        self._print(f"{self._done:,} {self._unit} in {seconds:.1f} s", end="\n")
        return seconds

    def _print(self, text: str, *, end: str = "") -> None:
        start, clear = ("\r", "\x1b[K") if self._terminal else ("", "")
        end = end or ("" if self._terminal else "\n")
        print(f"{start}{self._stage:<8} {text}{clear}", end=end, file=sys.stderr, flush=True)
