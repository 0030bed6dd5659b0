"""The part of the monitor's screen about a training run."""

from __future__ import annotations

from collections.abc import Callable

from anabatic.core.formatting import format_count, format_duration, format_size
from anabatic.core.json_reader import to_finite_number
from anabatic.monitor import value_format
from anabatic.monitor.run_reader import RunStatus
from anabatic.monitor.screen import Style, StyledLine

_MAX_SHOWN_STRAGGLERS = 3
_STATE_STYLES: dict[str, Style] = {
    "running": "good",
    "running elsewhere": "good",
    "finished": "good",
    "stopped": "warn",
    "dead": "bad",
    "not started": "dim",
}
_SHOWN_FIGURES: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("lr", lambda value: f"lr {value:.2e}"),
    ("grad_norm", lambda value: f"grad {value:.3f}"),
    ("tokens_per_s", lambda value: f"{format_count(value)} tok/s"),
    ("mfu", lambda value: f"MFU {100 * value:.1f} %"),
    ("memory_bytes", lambda value: f"mem {format_size(value)}"),
    ("data_wait", lambda value: f"wait {100 * value:.1f} %"),
    ("device_util_pct_mean", lambda value: f"util {value:.0f} %"),
    ("device_power_w_mean", lambda value: f"{value:.0f} W"),
    ("energy_wh_per_mtoken", lambda value: f"{value:.3g} Wh/Mtok"),
    ("skipped", lambda value: f"skipped {value:.0f}"),
)


def format_run_lines(run: RunStatus, width: int) -> list[StyledLine]:
    """Return the run's part of the screen."""
    step, total = to_finite_number(run.last.get("step")), run.total_steps
    head: StyledLine = [
        ("bold", "run "),
        ("", value_format.clip_text(run.name, min(len(run.name), max(width - 24, 8)))),
        ("", "  "),
    ]
    head.append((_STATE_STYLES.get(run.state, ""), run.state))
    reason_lines = [("", f"  {run.why}")] if run.why else []
    found: list[StyledLine] = [[*head, *reason_lines]]
    if step is None:
        unread = f": {run.unread} lines of metrics.jsonl are no rows" if run.unread else ""
        return [*found, [("dim", f"no row yet{unread}")]]
    percent = value_format.compute_percent(step, total)
    eta = to_finite_number(run.last.get("eta_s"))
    parts = (
        [f"step {step:.0f}"]
        if percent is None
        else [f"step {step:.0f}/{total}", value_format.format_fixed(percent, " %")]
    )
    if eta is not None and run.state.startswith("running"):
        parts.append(f"ETA {format_duration(eta)}")
    if run.age_s is not None:
        parts.append(f"last row {value_format.format_age(run.age_s)} ago")
    bar: StyledLine = (
        []
        if percent is None or width < 60
        else [("bar", value_format.draw_bar(percent, 10).replace(" ", "░")), ("", "  ")]
    )
    found.append([*bar, ("", "  ".join(parts))])
    loss, valid = to_finite_number(run.last.get("loss")), to_finite_number(run.valid.get("valid_loss"))
    words = (
        f"loss {value_format.format_fixed(loss, digits=4)}" + ("" if valid is None else f"  valid {valid:.4f}") + "  "
    )
    found.append(
        [("", words), ("bar", value_format.draw_history(run.losses, min(max(width - len(words), 0), 60)).lstrip())]
    )
    values = [
        write(known) for name, write in _SHOWN_FIGURES if (known := to_finite_number(run.last.get(name))) is not None
    ]
    slow: list[StyledLine] = [
        [("warn", value_format.clip_text(f"slow: rank {rank} ({place}), {reason}", max(width, 8)))]
        for rank, place, reason in run.stragglers[:_MAX_SHOWN_STRAGGLERS]
    ]
    return [*found, *slow, *_wrap_words(values, width)]


def _wrap_words(words: list[str], width: int) -> list[StyledLine]:
    rows: list[str] = []
    for word in words:
        if rows and len(rows[-1]) + 2 + len(word) <= width:
            rows[-1] += f"  {word}"
        else:
            rows.append(word)
    return [[("", row)] for row in rows]
