"""Write docs/*/assets/*.svg: the logo, and boxes and arrows from scripts/diagrams.yaml in both languages.

usage: python scripts/gen_diagrams.py [--check]     --check only says whether the pictures are current

A picture is a list of boxes `at: [x, y, width, height]` in units of ten pixels, each with an English and a Chinese
text, and a list of arrows between boxes that have an `id`. Rooms, shares and segments are drawn from shorter lists.
A text that is wider than its box is an error, so no picture holds one.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from html import escape
from pathlib import Path
from typing import Any

import yaml

from anabatic.core.logo import LOGO_SVG

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "scripts" / "diagrams.yaml"
LANGUAGES = ("en", "zh")
UNIT = 10
SIZE, SMALL, LINE = 14, 12, 17
"""Pixels: the first line of a box, the others, and from line to line."""
WIDTHS = {"ijl|.,:;'!": 0.28, "ft()[]/-r ": 0.36, "mwMW@%": 0.9}
"""Widths of characters by the size of the letters, a little wider than Arial's and DejaVu's mean."""
STYLE = """
svg { --paper: #fff; --ink: #1c2430; --dim: #5a6675; --line: #9aa7b6; --soft: #e6eefb; --edge: #4a76c9;
  --strong: #2f5fb8; --a: #cfe0fb; --b: #fde3c2; --c: #d5efd6; --d: #ecd9f5; --empty: #eef0f3; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { svg { --paper: #12151b; --ink: #e7ebf1; --dim: #a3adba; --line: #5d6978;
  --soft: #1d2c49; --edge: #6f9bee; --strong: #3c6fcf; --a: #27426f; --b: #6b4a1d; --c: #265032; --d: #51345f;
  --empty: #262b33; --bad: #ff8a7a; } }
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei",
  Arial, sans-serif; fill: var(--ink); text-anchor: middle; }
.s { font-size: 12px; fill: var(--dim); } .t { font-size: 14px; } .h { font-size: 14px; font-weight: 600; }
.l { text-anchor: start; } .on .s, .on .h, .on .t { fill: #fff; } .bad { fill: var(--bad); }
rect { fill: var(--paper); stroke: var(--line); stroke-width: 1.2; }
.soft rect { fill: var(--soft); stroke: var(--edge); } .on rect { fill: var(--strong); stroke: var(--strong); }
.group rect { fill: none; stroke-dasharray: 5 4; } .text rect { fill: none; stroke: none; }
.a rect { fill: var(--a); } .b rect { fill: var(--b); } .c rect { fill: var(--c); } .d rect { fill: var(--d); }
.empty rect { fill: var(--empty); } .lent rect { fill: url(#hatch); stroke: var(--edge); }
path { fill: none; stroke: var(--dim); stroke-width: 1.5; } .bad path { stroke: var(--bad); stroke-dasharray: 5 4; }
.soft path { stroke: var(--edge); stroke-dasharray: 5 4; } marker path { fill: var(--dim); stroke: none; }
#hatch path { stroke: var(--edge); stroke-width: 1; } #hatch rect { fill: var(--paper); stroke: none; }
""".strip()
DEFS = """<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker>
<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">
<rect width="6" height="6"/><path d="M0 6 6 0"/></pattern></defs>"""


def width_of(text: str, size: float, bold: bool) -> float:
    """Pixels that a line takes, rather too many than too few."""
    units = 0.0
    for letter in text:
        wide = unicodedata.east_asian_width(letter) in "WF"
        latin = next(
            (width for letters, width in WIDTHS.items() if letter in letters), 0.7 if letter.isupper() else 0.56
        )
        units += 1.0 if wide else latin
    return units * size * (1.06 if bold else 1.0)


def said(item: dict[str, Any], code: str) -> list[str]:
    """The lines of a text: `text` stands for both languages."""
    text = item.get(code, item.get("text", ""))
    return str(text).split("\n") if text else []


def box(item: dict[str, Any], code: str) -> str:
    """One box: the first of several lines is its title; the title of a group stands at its upper left."""
    x, y, width, height = (UNIT * number for number in item["at"])
    look, lines = item.get("look", "plain"), said(item, code)
    left = look == "group" or item.get("left", False)
    top = y + 18 if look == "group" else y + height / 2 - LINE * (len(lines) - 1) / 2 + 4.5
    parts = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{min(6, height / 4):g}"/>']
    for number, line in enumerate(lines):
        title = number == 0 and (len(lines) > 1 or look == "group") and not item.get("small", False)
        kind = "h" if title else "s" if number or item.get("small", False) else "t"
        size = SMALL if kind == "s" else SIZE
        room = width - (4 if item.get("small", False) else 12)
        if (needed := width_of(line, size, title)) > room or len(lines) * LINE > height + 6:
            raise SystemExit(f"error: {line!r} ({code}) takes {needed:.0f} of {room:g} pixels, {len(lines)} lines")
        start = (
            f'class="{kind} l" x="{x + (10 if look == "group" else 6):g}"'
            if left
            else f'class="{kind}" x="{x + width / 2:g}"'
        )
        parts.append(f'<text {start} y="{top + number * LINE:g}">{escape(line)}</text>')
    return f'<g class="{look}">{"".join(parts)}</g>'


def arrow(item: dict[str, Any], boxes: dict[str, list[float]], code: str) -> str:
    """One arrow: straight where the boxes stand beside or above each other, else through the points of `via`."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = (boxes[item["from"]], boxes[item["to"]])
    across = max(ax, bx) < min(ax + aw, bx + bw)
    shift = item.get("shift", 0)
    if via := item.get("via"):
        points = [edge((ax, ay, aw, ah), via[0]), *via, edge((bx, by, bw, bh), via[-1])]
    elif across:
        middle = (max(ax, bx) + min(ax + aw, bx + bw)) / 2 + shift
        points = [(middle, ay + ah), (middle, by)] if ay < by else [(middle, ay), (middle, by + bh)]
    else:
        middle = (max(ay, by) + min(ay + ah, by + bh)) / 2 + shift
        points = [(ax + aw, middle), (bx, middle)] if ax < bx else [(ax, middle), (bx + bw, middle)]
    drawn = " ".join(f"{x * UNIT:g} {y * UNIT:g}" for x, y in points)
    both = ' marker-start="url(#tip)"' if item.get("both") else ""
    parts = [f'<path d="M{drawn}"{both} marker-end="url(#tip)"/>']
    x, y = item.get("label", [sum(p[0] for p in points[:2]) / 2, sum(p[1] for p in points[:2]) / 2 - 0.6])
    for number, line in enumerate(said(item, code)):
        kind = "s bad" if item.get("look") == "bad" else "s"
        parts.append(f'<text class="{kind}" x="{x * UNIT:g}" y="{y * UNIT + number * LINE:g}">{escape(line)}</text>')
    return f'<g class="{item.get("look", "plain")}">{"".join(parts)}</g>'


def edge(at: tuple[float, ...], point: list[float]) -> tuple[float, float]:
    """Where the straight line from a point meets the box: beside, above or below it."""
    x, y, width, height = at
    if x < point[0] < x + width:
        return point[0], y if point[1] < y else y + height
    return (x if point[0] < x else x + width), point[1]


def rooms(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The layers of pyproject.toml, a row each; rooms that start without torch are marked."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r'"([^"]+)"', re.findall(r"^layers = \[(.*?)^\]", text, re.M | re.S)[0])
    light = set(re.findall(r"anabatic\.(\w+)", re.findall(r"^source_modules = \[(.*?)\]", text, re.M)[0])) | {"cli"}
    boxes = []
    for row, layer in enumerate(layers):
        names = re.split(r" [:|] ", layer)
        width = (70 - (len(names) - 1)) / len(names)
        if missing := [name for name in names if name not in spec["notes"]]:
            raise SystemExit(f"error: no note on the room {missing[0]} in {SOURCE.name}: add it under rooms.notes")
        for column, name in enumerate(names):
            at = [1 + column * (width + 1), 1 + row * 5, width, 4.2]
            notes = {code: f"{name}\n{spec['notes'][name][code]}" for code in LANGUAGES}
            boxes.append({"at": at, "look": "soft" if name in light else "plain", **notes})
    return boxes


def shares(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of four devices holds of weights, gradients and optimizer state, by strategy: a bar each."""
    boxes, bar = [], 10
    for row, strategy in enumerate(spec["strategies"]):
        top = 7.5 + row * 7.6
        boxes.append({"at": [1, top - 0.6, 15, 6.4], "look": "text", "left": True, **strategy["says"]})
        for place in range(5):
            host = place == 4
            left = 16 + place * (bar + 0.9) + (1 if host else 0)
            held = strategy["host" if host else "device"] if host or place < strategy.get("devices", 4) else []
            for line, (kind, share) in enumerate(zip("abc", held, strict=False)):
                at = [left, top + line * 1.9, bar, 1.5]
                boxes.append({"at": at, "look": "empty"})
                if lent := 0 if host else strategy.get("lent", {}).get(kind, 0):
                    boxes.append({"at": [left, at[1], bar * lent, 1.5], "look": "lent"})
                if share:
                    start = 0 if host or share == 1 else bar * share * place
                    boxes.append({"at": [left + start, at[1], bar * share, 1.5], "look": kind})
    return boxes


def segments(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows padded to the longest, the same rows in one flat batch with positions, and who sees whom."""
    boxes, cell, flat = [], 2.6, 0
    lengths, looks = spec["lengths"], "abcd"
    (px, py), (fx, fy), (mx, my) = spec["padded"], spec["flat"], spec["mask"]
    for row, length in enumerate(lengths):
        for place in range(max(lengths)):
            look = looks[row] if place < length else "empty"
            boxes.append({"at": [px + place * cell, py + row * 3.2, cell, cell], "look": look})
        for place in range(length):
            at = [fx + (flat + place) * cell, fy, cell, cell]
            boxes.append({"at": at, "look": looks[row], "text": str(place), "small": True})
        flat += length
    size = 1.5
    owner = [row for row, length in enumerate(lengths) for _ in range(length)]
    for row in range(flat):
        for column in range(flat):
            look = looks[owner[row]] if column <= row and owner[column] == owner[row] else "empty"
            boxes.append({"at": [mx + column * size, my + row * size, size, size], "look": look})
    return boxes


KINDS = {"rooms": rooms, "shares": shares, "segments": segments}


def drawn(spec: dict[str, Any], code: str) -> str:
    """The whole picture as SVG."""
    kind = KINDS.get(spec.get("kind", ""))
    items = [*(kind(spec) if kind else []), *spec.get("boxes", [])]
    items.sort(key=lambda item: item.get("look") != "group")
    places = {item["id"]: item["at"] for item in items if "id" in item}
    width, height = (UNIT * number for number in spec["size"])
    title = escape(spec["title"][code])
    frame = f'width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {frame} role="img">'
    paper = f'<rect {frame} rx="8" style="stroke: none"/>'
    lines = [head, f"<title>{title}</title>", f"<style>{STYLE}</style>", DEFS, paper]
    lines += [box(item, code) for item in items]
    lines += [arrow(item, places, code) for item in spec.get("arrows", [])]
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    specs = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    pictures = {
        ROOT / "docs" / code / "assets" / f"{name}.svg": drawn(spec, code)
        for code in LANGUAGES
        for name, spec in specs.items()
    } | {ROOT / "docs" / code / "assets" / "logo.svg": LOGO_SVG for code in LANGUAGES}
    stale = [path for path, new in pictures.items() if not path.exists() or path.read_text(encoding="utf-8") != new]
    checks = "--check" in sys.argv[1:]
    for path in [] if checks else stale:
        path.write_text(pictures[path], encoding="utf-8")
    names = ", ".join(path.relative_to(ROOT).as_posix() for path in stale)
    print(f"{'stale' if checks else 'written'}: {names}" if stale else "all current")
    return int(bool(stale) and checks)


if __name__ == "__main__":
    sys.exit(main())
