"""The screen: a line per die, the processes below, in any width from 40 cells up. Pure: figures in, lines out."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.cells import cell_len

from anabatic.monitor import value_format
from anabatic.monitor.sampler import Frame
from anabatic.monitor.snapshot import (
    DeviceProcess,
    DeviceReading,
    Snapshot,
    count_devices_per_card,
    format_device_label,
)
from anabatic.monitor.value_format import clip_text, compute_percent, format_fixed

Style = str
StyledLine = list[tuple[Style, str]]
"""(style, text) of each part; the styles are the keys of `STYLE_CODES`."""
STYLE_CODES = {"": "", "dim": "2", "bold": "1", "good": "32", "warn": "33", "bad": "31", "bar": "36", "memory": "35"}
"""SGR codes."""
_HEALTH_STYLES: dict[str | None, Style] = {
    "OK": "good",
    "Warning": "warn",
    "Alarm": "bad",
    "Critical": "bad",
    None: "dim",
}
STALE_SECONDS = 10.0
"""A reading that is older is marked."""
MIN_WIDTH = 40
_MIN_USER_WIDTH = 60
_MIN_ID_WIDTH, _MAX_NAME_WIDTH = 4, 12
_HEALTHY = (None, "OK", "NA")


@dataclass
class UtilizationHistory:
    """The last utilisations of every device, for the small curves."""

    max_values: int = 120
    values: dict[tuple[int, int | None], deque[float | None]] = field(default_factory=dict)
    last_frame_number: int = 0

    def add_frame(self, frame: Frame) -> None:
        """Take in a frame once; a failed reading is a gap."""
        if frame.number == self.last_frame_number:
            return
        self.last_frame_number = frame.number
        for device in frame.snapshot.devices:
            past = self.values.setdefault((device.npu_id, device.chip_id), deque(maxlen=self.max_values))
            past.append(None if frame.problem else device.util_pct)


@dataclass(frozen=True)
class DeviceColumn:
    """A column of the table of devices.

    Attributes:
        min_width: the smallest width.
        drop_rank: columns of a higher rank go first when the screen is narrow.
        max_width: the width it may grow to.
    """

    title: str
    min_width: int
    drop_rank: int
    render_cell: Callable[[ScreenRow, int], tuple[Style, str]]
    max_width: int = 0
    is_right_aligned: bool = False


@dataclass(frozen=True)
class ScreenRow:
    """Data that a cell can show."""

    device: DeviceReading
    label: str
    has_card_power: bool
    """The power of its card stands on another die."""
    history: Sequence[float | None]


def _render_power(row: ScreenRow, width: int) -> tuple[Style, str]:
    if row.device.power_w is None and row.has_card_power:
        return "dim", "card"
    return "", format_fixed(row.device.power_w, "W", 1)


def _render_health(row: ScreenRow, width: int) -> tuple[Style, str]:
    health = row.device.health
    return _HEALTH_STYLES.get(health, "dim"), health or value_format.NOT_AVAILABLE


def _compute_memory_percent(row: ScreenRow) -> float | None:
    return compute_percent(row.device.used_mb, row.device.total_mb)


_DEVICE_COLUMNS = (
    DeviceColumn("id", 4, 0, lambda row, width: ("bold", row.label)),
    DeviceColumn("name", 7, 5, lambda row, width: ("", row.device.name or value_format.NOT_AVAILABLE), max_width=16),
    DeviceColumn("health", 8, 1, _render_health),
    DeviceColumn("power", 7, 3, _render_power, is_right_aligned=True),
    DeviceColumn("temp", 4, 2, lambda row, width: ("", format_fixed(row.device.temp_c, "C")), is_right_aligned=True),
    DeviceColumn("util", 4, 0, lambda row, width: ("", format_fixed(row.device.util_pct, "%")), is_right_aligned=True),
    DeviceColumn("", 5, 4, lambda row, width: ("bar", value_format.draw_bar(row.device.util_pct, width)), max_width=20),
    DeviceColumn(
        "memory",
        11,
        0,
        lambda row, width: ("", value_format.format_memory(row.device.used_mb, row.device.total_mb)),
        is_right_aligned=True,
    ),
    DeviceColumn(
        "",
        5,
        6,
        lambda row, width: ("memory", value_format.draw_bar(_compute_memory_percent(row), width)),
        max_width=20,
    ),
    DeviceColumn(
        "history",
        8,
        7,
        lambda row, width: ("bar", value_format.draw_history(row.history, width, 100.0)),
        max_width=30,
        is_right_aligned=True,
    ),
)
_UTIL_TITLES = {"aicore": "AICore", "npu": "NPU", "gpu": "GPU", "cpu": "CPU", "own": "util"}


def _fit_column_widths(width: int, past: bool, needs: Mapping[str, int]) -> dict[int, int]:
    """Return the width of each column that is shown, by its place; without `past` there is no history to show.

    Args:
        needs: what the texts of a column take, by its title.
    """
    shown = {
        place: replace(column, min_width=max(column.min_width, needs.get(column.title, 0)))
        for place, column in enumerate(_DEVICE_COLUMNS)
        if past or column.title != "history"
    }
    while len(shown) > 1 and sum(column.min_width for column in shown.values()) + len(shown) - 1 > width:
        worst = max(shown, key=lambda place: (shown[place].drop_rank, place))
        del shown[worst]
    widths = {place: column.min_width for place, column in shown.items()}
    spare = width - sum(widths.values()) - len(widths) + 1
    growing = [place for place, column in shown.items() if column.max_width]
    while spare > 0 and growing:
        for place in list(growing):
            if spare > 0 and widths[place] < shown[place].max_width:
                widths[place] += 1
                spare -= 1
            elif widths[place] >= shown[place].max_width:
                growing.remove(place)
    return widths


def _join_cells(cells: Sequence[tuple[Style, str, int, bool]]) -> StyledLine:
    line: StyledLine = []
    for style, text, width, right in cells:
        clipped = clip_text(text, width)
        if right and len(text) < width:
            clipped = clipped.rstrip().rjust(width)
        line += [(style, clipped), ("", " ")]
    return line[:-1]


def _make_labels(snapshot: Snapshot, counts: Mapping[int, int]) -> list[str]:
    return [format_device_label(device.npu_id, device.chip_id, counts) for device in snapshot.devices]


def _get_id_width(snapshot: Snapshot, counts: Mapping[int, int]) -> int:
    """Cards of a 300I Duo are called 15360 and the like."""
    return max([_MIN_ID_WIDTH, *map(len, _make_labels(snapshot, counts))])


def render_devices(
    snapshot: Snapshot, history: UtilizationHistory, width: int, counts: Mapping[int, int]
) -> list[StyledLine]:
    """Return the heading and a line per device; `counts` are the devices of each card, hidden ones too."""
    name_width = min(max((cell_len(device.name or "") for device in snapshot.devices), default=0), _MAX_NAME_WIDTH)
    needs = {"id": _get_id_width(snapshot, counts), "name": name_width}
    widths = _fit_column_widths(width, any(len(past) > 1 for past in history.values.values()), needs)
    powered = {device.npu_id for device in snapshot.devices if device.power_w is not None}
    util = next((device.util_kind for device in snapshot.devices if device.util_kind), None)
    memory = next((device.memory_kind for device in snapshot.devices if device.total_mb), "memory")
    titles = {"util": _UTIL_TITLES.get(util or "", "util"), "memory": memory}
    head = [
        (
            "dim",
            titles.get(_DEVICE_COLUMNS[place].title, _DEVICE_COLUMNS[place].title),
            wide,
            _DEVICE_COLUMNS[place].is_right_aligned,
        )
        for place, wide in widths.items()
    ]
    lines = [_render_heading(head)]
    for device, label in zip(snapshot.devices, _make_labels(snapshot, counts), strict=True):
        row = ScreenRow(
            device,
            label,
            device.npu_id in powered,
            history.values.get((device.npu_id, device.chip_id), ()),
        )
        cells = []
        for place, wide in widths.items():
            style, text = _DEVICE_COLUMNS[place].render_cell(row, wide)
            cells.append(
                (
                    "dim" if text == value_format.NOT_AVAILABLE else style,
                    text,
                    wide,
                    _DEVICE_COLUMNS[place].is_right_aligned,
                )
            )
        lines.append(_join_cells(cells))
    return lines


def _render_heading(cells: list[tuple[Style, str, int, bool]]) -> StyledLine:
    """A heading takes the room of the empty one beside it: a number and its bar share one."""
    merged: list[tuple[Style, str, int, bool]] = []
    for style, title, wide, right in cells:
        if not title and merged:
            before = merged[-1]
            merged[-1] = (before[0], before[1], before[2] + 1 + wide, False)
        else:
            merged.append((style, title, wide, right))
    short = [
        (one[0], "util" if len(one[1]) > one[2] and one[1] in _UTIL_TITLES.values() else one[1], *one[2:])
        for one in merged
    ]
    return _join_cells(short)


def render_processes(
    snapshot: Snapshot, width: int, max_rows: int | None, counts: Mapping[int, int]
) -> list[StyledLine]:
    """Return the heading and a line per process; at most `max_rows` lines. Narrow screens leave the user out."""
    if not snapshot.processes:
        return [[("dim", "no processes")]] if snapshot.source not in ("psutil", "torch") else []
    user_width = max(len(each.user or value_format.NOT_AVAILABLE) for each in snapshot.processes)
    user = min(max(user_width, 4), 12) if width >= _MIN_USER_WIDTH else 0
    widths = (_get_id_width(snapshot, counts), 8, *((user,) if user else ()), 7)
    widths += (max(width - sum(widths) - len(widths), 8),)
    right = (False, True, *((False,) if user else ()), True, False)

    def make_line(words: Sequence[str | None], style: Style) -> StyledLine:
        kept = words if user else (*words[:2], *words[3:])
        texts = [word or value_format.NOT_AVAILABLE for word in kept]
        styles = ["dim" if text == value_format.NOT_AVAILABLE else style for text in texts]
        return _join_cells(list(zip(styles, texts, widths, right, strict=True)))

    lines = [make_line(("id", "pid", "user", "memory", "command"), "dim")]
    for each in snapshot.processes:
        memory = value_format.NOT_AVAILABLE if each.mem_mb is None else f"{value_format.format_gib(each.mem_mb)}G"
        lines.append(
            make_line(
                (
                    format_device_label(each.npu_id, each.chip_id, counts),
                    str(each.pid),
                    each.user,
                    memory,
                    _format_command(each),
                ),
                "",
            )
        )
    if max_rows is not None and len(lines) > max_rows:
        hidden = len(lines) - max(max_rows, 1) + 1
        lines = [*lines[: max(max_rows, 1) - 1], [("dim", f"… {hidden} more")]]
    return lines


def _format_command(process: DeviceProcess) -> str:
    if process.command:
        return process.command
    return f"{process.name or ''} (not visible here)".strip()


def render_head(frame: Frame, num_shown: int, width: int) -> list[StyledLine]:
    """Return the title, and what is wrong."""
    snapshot, age = frame.snapshot, frame.get_age()
    devices = len(snapshot.devices)
    parts = [
        f"{num_shown} of {devices} devices"
        if num_shown != devices
        else f"{devices} device{'s' if devices != 1 else ''}",
        f"{snapshot.source} {snapshot.driver_version or ''}".strip(),
        value_format.format_clock(snapshot.taken_at),
    ]
    title: StyledLine = [("bold", "anabatic monitor"), ("", "  ")]
    if snapshot.error is None and (frame.problem or age > STALE_SECONDS):
        title.append(("warn", f"{value_format.format_age(age)} old  "))
    lines = [fit_line([*title, ("", "  ".join(parts))], width)]
    for style, word, text in (
        ("bad", "error: ", frame.problem),
        ("warn", "hint: ", frame.hint if frame.problem else ""),
    ):
        lines += _wrap_paragraph(style, word, text, width)
    return lines + [fit_line([("dim", f"note: {note}")], width) for note in snapshot.notes[:3]]


def _render_unhealthy(snapshot: Snapshot, width: int) -> list[StyledLine]:
    """Return what to type about the first NPU that is not well."""
    ill = next((one for one in snapshot.devices if one.kind == "npu" and one.health not in _HEALTHY), None)
    if ill is None:
        return []
    return _wrap_paragraph("warn", f"{ill.health}: ", f"`npu-smi info -t health -i {ill.npu_id}` says why", width)


def _wrap_paragraph(style: Style, word: str, text: str, width: int) -> list[StyledLine]:
    """Return a text that is too important to be cut."""
    clean = value_format.clip_text(text, cell_len(text))
    rows = textwrap.wrap(f"{word}{clean}", width, subsequent_indent="  ") if text else []
    return [
        [(style, row[: len(word)]), ("", row[len(word) :])] if not place else [("", row)]
        for place, row in enumerate(rows)
    ]


def render_totals(snapshot: Snapshot) -> StyledLine:
    """Return mean utilisation, memory and power of all; what is not known of any is n/a."""
    known = [each.util_pct for each in snapshot.devices if each.util_pct is not None]
    used = [each.used_mb for each in snapshot.devices if each.used_mb is not None]
    total = [each.total_mb for each in snapshot.devices if each.total_mb is not None]
    watts = [each.power_w for each in snapshot.devices if each.power_w is not None]
    words = (
        f"mean {format_fixed(sum(known) / len(known) if known else None, '%')}",
        value_format.format_memory(sum(used) if used else None, sum(total) if total else None),
        format_fixed(sum(watts) if watts else None, "W"),
    )
    return [("dim", "all  " + "  ".join(words))]


def fit_line(line: StyledLine, width: int) -> StyledLine:
    """Return what fits into `width` cells."""
    fitted: StyledLine = []
    for style, text in line:
        if width <= 0:
            break
        part = clip_text(text, min(width, max(cell_len(text), 0)))
        fitted.append((style, part))
        width -= cell_len(part)
    return fitted


def render_screen(
    frame: Frame,
    snapshot: Snapshot,
    history: UtilizationHistory,
    width: int,
    height: int | None,
    run: Sequence[StyledLine] = (),
) -> list[StyledLine]:
    """Return the whole screen.

    Args:
        frame: what is known; `snapshot` its snapshot after filters.
        run: lines about a training run, which stand above the devices.
        width: cells; below `MIN_WIDTH` lines are cut by the terminal.
        height: lines; None: as many as it takes.
    """
    width = max(width, MIN_WIDTH)
    counts = count_devices_per_card(frame.snapshot)
    lines = render_head(frame, len(snapshot.devices), width) + _render_unhealthy(snapshot, width)
    if run:
        lines += [[], *(fit_line(line, width) for line in run)]
    if snapshot.devices:
        total = [*([[]] if run else []), render_totals(snapshot)] if len(snapshot.devices) > 1 else []
        devices: list[StyledLine] = [*total, [], *render_devices(snapshot, history, width, counts)]
        room = None if height is None else max(height - len(lines), 2)
        if room is not None and len(devices) > room:
            devices = [*devices[: room - 1], [("dim", f"… {len(devices) - room + 1} more devices")]]
        lines += devices
        left = None if height is None else height - len(lines) - 1
        if left is None or left > 1:
            lines += [[], *render_processes(snapshot, width, left, counts)]
    return lines


def render_waiting(seconds: float, width: int) -> list[StyledLine]:
    """Return the screen before the first reading."""
    title: StyledLine = [("bold", "anabatic monitor"), ("", f"  waiting for the first reading, {seconds:.0f} s")]
    return [fit_line(title, max(width, MIN_WIDTH)), [("dim", "q ends it")]]


def colorize_line(line: StyledLine, colour: bool) -> str:
    """Return a line as text, with the codes of its colours when wished, without blanks at its end."""
    if not colour:
        return "".join(text for _, text in line).rstrip()
    parts = (f"\x1b[{STYLE_CODES[style]}m{text}\x1b[0m" if STYLE_CODES[style] else text for style, text in line)
    return "".join(parts).rstrip()
