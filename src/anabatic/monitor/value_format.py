"""Format values: `n/a` for an unknown value, bars, small histories."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

NOT_AVAILABLE = "n/a"
_BAR_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HISTORY_LEVELS = "▁▂▃▄▅▆▇█"


def format_fixed(value: float | None, unit: str = "", digits: int = 0) -> str:
    """Return a number with its unit."""
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f}{unit}"


def compute_percent(used: float | None, total: float | None) -> float | None:
    """Return the share in percent; None where either is unknown or there is nothing to share."""
    return None if used is None or not total else 100 * used / total


def format_gib(mebi: float | None) -> str:
    """Return MiB as a short number of GiB."""
    if mebi is None:
        return NOT_AVAILABLE
    return f"{mebi / 1024:.1f}" if mebi < 102_400 else f"{mebi / 1024:.0f}"


def format_memory(used_mb: float | None, total_mb: float | None) -> str:
    """Return `33.1/64.0G`."""
    return NOT_AVAILABLE if used_mb is None and total_mb is None else f"{format_gib(used_mb)}/{format_gib(total_mb)}G"


def draw_bar(fraction: float | None, width: int) -> str:
    """Return a bar of `width` cells for 0 to 100 percent."""
    if fraction is None or width < 1:
        return " " * width
    eighths = round(min(max(fraction, 0.0), 100.0) / 100 * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BAR_EIGHTHS[rest] if rest else "")).ljust(width)


def draw_history(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Return the last `width` values as a line of blocks, scaled to `top` (the largest value without one).

    A value that was not known is a gap.
    """
    recent = list(values)[-width:] if width > 0 else []
    known = [value for value in recent if value is not None]
    low = 0.0 if top is not None else min(known, default=0.0)
    high = top if top is not None else max(known, default=0.0)
    span = high - low or 1.0
    cells = [
        " " if value is None else _HISTORY_LEVELS[min(max(int((value - low) / span * 7.999), 0), 7)] for value in recent
    ]
    return "".join(cells).rjust(max(width, 0))


def clip_text(text: str, width: int) -> str:
    """Return `text` in exactly `width` cells; what does not fit ends in `…`, what is no text is a `?`."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    if cell_len(clean) > width:
        return set_cell_size(clean, max(width - 1, 0)) + "…" * min(width, 1)
    return set_cell_size(clean, max(width, 0))


def format_age(seconds: float) -> str:
    """Return `0.4 s`, `12 s`, `3 min`, `2 h` or `5 d`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size, up_to in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < up_to:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def format_clock(moment: float) -> str:
    """Return a Unix time as the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
