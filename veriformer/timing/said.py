"""Numbers with units, short enough for a table."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """Such as "1.23 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{three(seconds * factor)} {unit}"
    return f"{three(seconds * 1e9)} ns"


def size(count: float) -> str:
    """Such as "256 KiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{three(count / factor)} {unit}"
    return f"{count:.0f} B"


def rate(bytes_a_second: float) -> str:
    """Such as "16 GB/s"."""
    return f"{three(bytes_a_second / 1e9, 2)} GB/s"


def percent(fraction: float) -> str:
    """Such as "34 %" or "0.17 %"."""
    return f"{three(100 * fraction, 2)} %"


def share(fraction: float) -> str:
    """Such as "0.086", or "1.9e-10" where that many zeros would be wide."""
    return f"{fraction:.1e}" if 0 < abs(fraction) < 1e-3 else three(fraction, 2)


def three(value: float, digits: int = 3) -> str:
    """A number in so many digits, never as a power of ten, without zeros at its end."""
    if not math.isfinite(value) or value == 0:
        return "-" if not math.isfinite(value) else "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
