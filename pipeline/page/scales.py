"""Scales of charts: where a value lies, and which round numbers are written beside it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """One axis."""

    low: float
    """Value at 0 %."""
    high: float
    """Value at 100 %, above ``low``."""
    ticks: tuple[float, ...]
    """Values to write, rising, none outside."""
    log: bool = False
    """Equal factors are equal distances."""

    def at(self, value: float) -> float:
        """Per cent of the axis, 0 to 100 for what lies on it."""
        if self.log:
            return 100 * math.log(value / self.low) / math.log(self.high / self.low)
        return 100 * (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """The ticks as text, in one form."""
        top = max((abs(tick) for tick in self.ticks), default=0.0)
        return [tick_text(tick, top=top) for tick in self.ticks]


def linear(values: Iterable[float], *, most: int = 6, rounded: bool = False, whole: bool = False) -> Scale:
    """A scale over all of some values; a single value, or what is hardly more, lies in the middle.

    Args:
        values: at least one, finite.
        most: ticks, at most.
        rounded: begin and end at a tick.
        whole: ticks are whole numbers.
    """
    held = list(values)
    low, high = min(held), max(held)
    if high - low <= 1e-9 * max(abs(low), abs(high)) or high - low < 1e-300:  # too near for ticks between them
        pad = abs(low) / 2 if abs(low) > 1e-300 else 1.0
        low, high = low - pad, high + pad
    step = max(nice_step(high - low, most=most), 1.0 if whole else 0.0)
    first, last = (math.floor(low / step), math.ceil(high / step)) if rounded else (
        math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9))  # fmt: skip
    ticks = tuple(_times(step, i) for i in range(first, last + 1))
    if rounded:
        low, high = ticks[0], ticks[-1]
    return Scale(low=low, high=high, ticks=ticks)


def logarithmic(values: Iterable[float]) -> Scale:
    """A scale over positive values, from a round number below to one above."""
    held = list(values)
    low, high = math.floor(math.log10(min(held)) + 1e-9), math.ceil(math.log10(max(held)) - 1e-9)
    if high - low < 2:  # 1, 2 and 5 of each decade; as few of them as hold every value
        fine = [_times(10.0**e, m) for e in range(low - 1, high + 2) for m in (1, 2, 5)]
        first = max(i for i, v in enumerate(fine) if v <= min(held) * (1 + 1e-9))
        last = min(i for i, v in enumerate(fine) if v >= max(held) * (1 - 1e-9))
        ticks = fine[first : max(last, first + 1) + 1]
    else:
        every = -(-(high - low) // 6)
        ticks = [10.0**e for e in range(high - -(-(high - low) // every) * every, high + 1, every)]
    return Scale(low=ticks[0], high=ticks[-1], ticks=tuple(ticks), log=True)


def nice_step(span: float, *, most: int) -> float:
    """The least of 1, 2, 5 times a power of ten that cuts ``span`` into less than ``most`` parts."""
    raw = span / (most - 1)
    exponent = math.floor(math.log10(raw))
    return next(_times(10.0**exponent, m) for m in (1, 2, 5, 10) if _times(10.0**exponent, m) >= raw * (1 - 1e-9))


def _times(step: float, count: int) -> float:
    """A multiple without the dust of binary fractions: 3 * 0.1 is 0.3."""
    return float(f"{step * count:.12g}")


def tick_text(value: float, *, top: float) -> str:
    """A tick as text; ``top``, the axis's greatest, decides the form: 20,000; 1.5M; 0.25; 2e-5."""
    if value == 0:
        return "0"
    if not 1e-3 < top < 1e15:
        exponent = math.floor(math.log10(abs(value)) + 1e-9)
        return f"{value / 10.0**exponent:.12g}e{exponent}"
    for unit, suffix in _SUFFIXES:
        if top >= unit:
            return f"{value / unit:,.12g}{suffix}"
    return f"{value:,.12f}".rstrip("0").rstrip(".")
