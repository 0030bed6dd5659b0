"""The screen: a line per die, the processes below, in any width from 40 cells up. Pure: figures in, lines out."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.cells import cell_len

from anabatic.monitor import figures
from anabatic.monitor.figures import clip, fixed, percent
from anabatic.monitor.sampler import Frame
from anabatic.monitor.snapshot import Device, Process, Snapshot, cards, key

Style = str
Line = list[tuple[Style, str]]
"""(style, text) of each part; the styles are the keys of `COLOURS`."""
COLOURS = {"": "", "dim": "2", "bold": "1", "good": "32", "warn": "33", "bad": "31", "bar": "36", "memory": "35"}
"""SGR codes."""
_HEALTH: dict[str | None, Style] = {"OK": "good", "Warning": "warn", "Alarm": "bad", "Critical": "bad", None: "dim"}
OLD_SECONDS = 10.0
"""A reading that is older is marked."""
NARROWEST = 40
_ROOM_FOR_USERS = 60
_LEAST_ID, _LONGEST_NAME = 4, 12
_FINE = (None, "OK", "NA")


@dataclass
class History:
    """The last utilisations of every device, for the small curves."""

    length: int = 120
    values: dict[tuple[int, int | None], deque[float | None]] = field(default_factory=dict)
    number: int = 0

    def add(self, frame: Frame) -> None:
        """Take in a frame once; a failed reading is a gap."""
        if frame.number == self.number:
            return
        self.number = frame.number
        for device in frame.snapshot.devices:
            past = self.values.setdefault((device.npu_id, device.chip_id), deque(maxlen=self.length))
            past.append(None if frame.problem else device.util_pct)


@dataclass(frozen=True)
class Column:
    """A column of the table of devices.

    Attributes:
        least: the smallest width.
        rank: columns of a higher rank go first when the screen is narrow.
        most: the width it may grow to.
    """

    title: str
    least: int
    rank: int
    cell: Callable[[Row, int], tuple[Style, str]]
    most: int = 0
    right: bool = False


@dataclass(frozen=True)
class Row:
    """What a cell may ask about."""

    device: Device
    label: str
    told: bool
    """The power of its card stands on another die."""
    past: Sequence[float | None]


def _power(row: Row, width: int) -> tuple[Style, str]:
    if row.device.power_w is None and row.told:
        return "dim", "card"
    return "", fixed(row.device.power_w, "W", 1)


def _health(row: Row, width: int) -> tuple[Style, str]:
    health = row.device.health
    return _HEALTH.get(health, "dim"), health or figures.NONE


def _share(row: Row) -> float | None:
    return percent(row.device.used_mb, row.device.total_mb)


_COLUMNS = (
    Column("id", 4, 0, lambda row, width: ("bold", row.label)),
    Column("name", 7, 5, lambda row, width: ("", row.device.name or figures.NONE), most=16),
    Column("health", 8, 1, _health),
    Column("power", 7, 3, _power, right=True),
    Column("temp", 4, 2, lambda row, width: ("", fixed(row.device.temp_c, "C")), right=True),
    Column("util", 4, 0, lambda row, width: ("", fixed(row.device.util_pct, "%")), right=True),
    Column("", 5, 4, lambda row, width: ("bar", figures.bar(row.device.util_pct, width)), most=20),
    Column(
        "memory", 11, 0, lambda row, width: ("", figures.memory(row.device.used_mb, row.device.total_mb)), right=True
    ),
    Column("", 5, 6, lambda row, width: ("memory", figures.bar(_share(row), width)), most=20),
    Column("history", 8, 7, lambda row, width: ("bar", figures.history(row.past, width, 100.0)), most=30, right=True),
)
_UTIL_TITLES = {"aicore": "AICore", "npu": "NPU", "gpu": "GPU", "cpu": "CPU", "own": "util"}


def _widths(width: int, past: bool, needs: Mapping[str, int]) -> dict[int, int]:
    """Return the width of each column that is shown, by its place; without `past` there is no history to show.

    Args:
        needs: what the texts of a column take, by its title.
    """
    shown = {
        place: replace(column, least=max(column.least, needs.get(column.title, 0)))
        for place, column in enumerate(_COLUMNS)
        if past or column.title != "history"
    }
    while len(shown) > 1 and sum(column.least for column in shown.values()) + len(shown) - 1 > width:
        worst = max(shown, key=lambda place: (shown[place].rank, place))
        del shown[worst]
    widths = {place: column.least for place, column in shown.items()}
    spare = width - sum(widths.values()) - len(widths) + 1
    growing = [place for place, column in shown.items() if column.most]
    while spare > 0 and growing:
        for place in list(growing):
            if spare > 0 and widths[place] < shown[place].most:
                widths[place] += 1
                spare -= 1
            elif widths[place] >= shown[place].most:
                growing.remove(place)
    return widths


def _cells(cells: Sequence[tuple[Style, str, int, bool]]) -> Line:
    line: Line = []
    for style, text, width, right in cells:
        clipped = clip(text, width)
        if right and len(text) < width:
            clipped = clipped.rstrip().rjust(width)
        line += [(style, clipped), ("", " ")]
    return line[:-1]


def _labels(snapshot: Snapshot, counts: Mapping[int, int]) -> list[str]:
    return [key(device.npu_id, device.chip_id, counts) for device in snapshot.devices]


def _id_width(snapshot: Snapshot, counts: Mapping[int, int]) -> int:
    """Cards of a 300I Duo are called 15360 and the like."""
    return max([_LEAST_ID, *map(len, _labels(snapshot, counts))])


def device_lines(snapshot: Snapshot, history: History, width: int, counts: Mapping[int, int]) -> list[Line]:
    """Return the heading and a line per device; `counts` are the devices of each card, hidden ones too."""
    named = min(max((cell_len(device.name or "") for device in snapshot.devices), default=0), _LONGEST_NAME)
    needs = {"id": _id_width(snapshot, counts), "name": named}
    widths = _widths(width, any(len(past) > 1 for past in history.values.values()), needs)
    powered = {device.npu_id for device in snapshot.devices if device.power_w is not None}
    util = next((device.util_kind for device in snapshot.devices if device.util_kind), None)
    memory = next((device.memory_kind for device in snapshot.devices if device.total_mb), "memory")
    titles = {"util": _UTIL_TITLES.get(util or "", "util"), "memory": memory}
    head = [
        ("dim", titles.get(_COLUMNS[place].title, _COLUMNS[place].title), wide, _COLUMNS[place].right)
        for place, wide in widths.items()
    ]
    lines = [_heading(head)]
    for device, label in zip(snapshot.devices, _labels(snapshot, counts), strict=True):
        row = Row(
            device,
            label,
            device.npu_id in powered,
            history.values.get((device.npu_id, device.chip_id), ()),
        )
        cells = []
        for place, wide in widths.items():
            style, text = _COLUMNS[place].cell(row, wide)
            cells.append(("dim" if text == figures.NONE else style, text, wide, _COLUMNS[place].right))
        lines.append(_cells(cells))
    return lines


def _heading(cells: list[tuple[Style, str, int, bool]]) -> Line:
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
    return _cells(short)


def process_lines(snapshot: Snapshot, width: int, most: int | None, counts: Mapping[int, int]) -> list[Line]:
    """Return the heading and a line per process; at most `most` lines. Narrow screens leave the user out."""
    if not snapshot.processes:
        return [[("dim", "no processes")]] if snapshot.source not in ("psutil", "torch") else []
    named = max(len(each.user or figures.NONE) for each in snapshot.processes)
    user = min(max(named, 4), 12) if width >= _ROOM_FOR_USERS else 0
    widths = (_id_width(snapshot, counts), 8, *((user,) if user else ()), 7)
    widths += (max(width - sum(widths) - len(widths), 8),)
    right = (False, True, *((False,) if user else ()), True, False)

    def line(words: Sequence[str | None], style: Style) -> Line:
        kept = words if user else (*words[:2], *words[3:])
        texts = [word or figures.NONE for word in kept]
        styles = ["dim" if text == figures.NONE else style for text in texts]
        return _cells(list(zip(styles, texts, widths, right, strict=True)))

    lines = [line(("id", "pid", "user", "memory", "command"), "dim")]
    for each in snapshot.processes:
        memory = figures.NONE if each.mem_mb is None else f"{figures.gib(each.mem_mb)}G"
        lines.append(
            line((key(each.npu_id, each.chip_id, counts), str(each.pid), each.user, memory, _command(each)), "")
        )
    if most is not None and len(lines) > most:
        hidden = len(lines) - max(most, 1) + 1
        lines = [*lines[: max(most, 1) - 1], [("dim", f"… {hidden} more")]]
    return lines


def _command(process: Process) -> str:
    if process.command:
        return process.command
    return f"{process.name or ''} (not visible here)".strip()


def head_line(frame: Frame, shown: int, width: int) -> list[Line]:
    """Return the title, and what is wrong."""
    snapshot, age = frame.snapshot, frame.age()
    devices = len(snapshot.devices)
    parts = [
        f"{shown} of {devices} devices" if shown != devices else f"{devices} device{'s' if devices != 1 else ''}",
        f"{snapshot.source} {snapshot.driver_version or ''}".strip(),
        figures.clock(snapshot.taken_at),
    ]
    title: Line = [("bold", "anabatic monitor"), ("", "  ")]
    if snapshot.error is None and (frame.problem or age > OLD_SECONDS):
        title.append(("warn", f"{figures.ago(age)} old  "))
    lines = [fit([*title, ("", "  ".join(parts))], width)]
    for style, word, text in (
        ("bad", "error: ", frame.problem),
        ("warn", "hint: ", frame.hint if frame.problem else ""),
    ):
        lines += _paragraph(style, word, text, width)
    return lines + [fit([("dim", f"note: {note}")], width) for note in snapshot.notes[:3]]


def _ill(shown: Snapshot, width: int) -> list[Line]:
    """Return what to type about the first NPU that is not well."""
    ill = next((one for one in shown.devices if one.kind == "npu" and one.health not in _FINE), None)
    if ill is None:
        return []
    return _paragraph("warn", f"{ill.health}: ", f"`npu-smi info -t health -i {ill.npu_id}` says why", width)


def _paragraph(style: Style, word: str, text: str, width: int) -> list[Line]:
    """Return a text that is too important to be cut."""
    clean = figures.clip(text, cell_len(text))
    rows = textwrap.wrap(f"{word}{clean}", width, subsequent_indent="  ") if text else []
    return [
        [(style, row[: len(word)]), ("", row[len(word) :])] if not place else [("", row)]
        for place, row in enumerate(rows)
    ]


def sum_line(shown: Snapshot) -> Line:
    """Return mean utilisation, memory and power of all; what is not known of any is n/a."""
    known = [each.util_pct for each in shown.devices if each.util_pct is not None]
    used = [each.used_mb for each in shown.devices if each.used_mb is not None]
    total = [each.total_mb for each in shown.devices if each.total_mb is not None]
    watts = [each.power_w for each in shown.devices if each.power_w is not None]
    words = (
        f"mean {fixed(sum(known) / len(known) if known else None, '%')}",
        figures.memory(sum(used) if used else None, sum(total) if total else None),
        fixed(sum(watts) if watts else None, "W"),
    )
    return [("dim", "all  " + "  ".join(words))]


def fit(line: Line, width: int) -> Line:
    """Return what fits into `width` cells."""
    fitted: Line = []
    for style, text in line:
        if width <= 0:
            break
        part = clip(text, min(width, max(cell_len(text), 0)))
        fitted.append((style, part))
        width -= cell_len(part)
    return fitted


def render(
    frame: Frame, shown: Snapshot, history: History, width: int, height: int | None, run: Sequence[Line] = ()
) -> list[Line]:
    """Return the whole screen.

    Args:
        frame: what is known; `shown` its snapshot after filters.
        run: lines about a training run, which stand above the devices.
        width: cells; below `NARROWEST` lines are cut by the terminal.
        height: lines; None: as many as it takes.
    """
    width = max(width, NARROWEST)
    counts = cards(frame.snapshot)
    lines = head_line(frame, len(shown.devices), width) + _ill(shown, width)
    if run:
        lines += [[], *(fit(line, width) for line in run)]
    if shown.devices:
        total = [*([[]] if run else []), sum_line(shown)] if len(shown.devices) > 1 else []
        devices: list[Line] = [*total, [], *device_lines(shown, history, width, counts)]
        room = None if height is None else max(height - len(lines), 2)
        if room is not None and len(devices) > room:
            devices = [*devices[: room - 1], [("dim", f"… {len(devices) - room + 1} more devices")]]
        lines += devices
        left = None if height is None else height - len(lines) - 1
        if left is None or left > 1:
            lines += [[], *process_lines(shown, width, left, counts)]
    return lines


def waiting(seconds: float, width: int) -> list[Line]:
    """Return the screen before the first reading."""
    title: Line = [("bold", "anabatic monitor"), ("", f"  waiting for the first reading, {seconds:.0f} s")]
    return [fit(title, max(width, NARROWEST)), [("dim", "q ends it")]]


def paint(line: Line, colour: bool) -> str:
    """Return a line as text, with the codes of its colours when wished, without blanks at its end."""
    if not colour:
        return "".join(text for _, text in line).rstrip()
    parts = (f"\x1b[{COLOURS[style]}m{text}\x1b[0m" if COLOURS[style] else text for style, text in line)
    return "".join(parts).rstrip()
