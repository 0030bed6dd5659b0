"""Colours, ticks and axes of all charts, and SVG plots: panels with lines, bands, marks and text.

The report and the pages of the server draw charts of their own, with the colours and ticks of this module. No plotting
library is needed: plans and measurements are drawn on machines that have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from anabatic.core.formatting import format_count


def compute_ticks(low: float, high: float, num_ticks: int, *, integers_only: bool = False) -> list[float]:
    """Return about `num_ticks` round numbers (1, 2, 5 x 10^n) from `low` to `high`."""
    raw = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if integers_only:
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def format_short_count(number: float) -> str:
    """Return a count for the ticks of an axis: `950`, `12K`, `1.2M`."""
    return format_count(number).replace(".0", "")


def format_step(step: float) -> str:
    """Return a number of steps for the ticks of an axis: in full up to 9,999."""
    return f"{step:,.0f}" if step < 10_000 else format_short_count(step)


LEFT, RIGHT, TOP, BOTTOM = 70, 20, 34, 48
"""Margins of the axes of a panel in pixels, for numbers and labels."""
_COLOURS = {
    "--ink": ("#1c2226", "#e7e5e0"),
    "--soft": ("#5c666d", "#9ba6ad"),
    "--line": ("#e5e2db", "#2a3238"),
    "--c1": ("#0b6b78", "#5ac4d0"),
    "--c2": ("#b4530a", "#eda35f"),
    "--c3": ("#6b4fa8", "#b3a0ea"),
    "--c4": ("#3f7d2f", "#86c26f"),
    "--c5": ("#b0286a", "#f48fbf"),
    "--c6": ("#1f5fae", "#7fb2f0"),
    "--c7": ("#7a6200", "#d9c24e"),
    "--c8": ("#4d555b", "#b9c2c8"),
}
"""Variables of style sheets: (on a light background, on a dark one); text, labels, grid, then a curve each."""
NUM_COLOURS = 8


def insert_colours(style: str) -> str:
    """Return a style sheet with the colours in place of the lines `--colours: light;` and `--colours: dark;`."""
    for column, mode in enumerate(("light", "dark")):
        colours = " ".join(f"{name}: {pair[column]};" for name, pair in _COLOURS.items())
        style = style.replace(f"--colours: {mode};", colours)
    return style


def _build_style() -> str:
    """Return the style sheet; its rules apply only within `.plot`, so a page can contain several plots."""
    colour_rules = "".join(
        f".plot .c{i}{{stroke:var(--c{i})}}"
        f".plot .full.c{i},.plot .band.c{i},.plot .faint.c{i},.plot .cell.c{i}{{fill:var(--c{i})}}\n"
        for i in range(1, NUM_COLOURS + 1)
    )
    return insert_colours(f"""
.plot{{--paper:#fff;--colours: light;}}
@media(prefers-color-scheme:dark){{.plot{{--paper:#111518;--colours: dark;}}}}
.plot{{background:var(--paper);font:13px system-ui,"Noto Sans","Noto Sans CJK SC",sans-serif}}
.plot text{{fill:var(--ink)}}.plot .soft{{fill:var(--soft);font-size:12px}}
.plot .title{{font-weight:600;font-size:14px}}
.plot .grid{{stroke:var(--line);fill:none}}.plot .axis{{stroke:var(--soft);fill:none}}
{colour_rules}.plot .line{{fill:none;stroke-width:2}}.plot .thin{{fill:none;stroke-width:1.3;stroke-dasharray:5 4}}
.plot .dash{{stroke-dasharray:5 4;stroke:var(--soft);stroke-width:1.3;fill:none}}
.plot .band{{stroke:none;fill-opacity:.15}}.plot .faint{{stroke:none;fill-opacity:.45}}
.plot .cell{{stroke:var(--paper)}}.plot text.inverse{{fill:var(--paper)}}
.plot .halo{{paint-order:stroke;stroke:var(--paper);stroke-width:4px}}
.plot .ink{{stroke:var(--ink)}}.plot .hollow{{fill:var(--paper);stroke-width:1.6}}
""")


@dataclass(frozen=True)
class PlotAxis:
    """One axis of a panel.

    Attributes:
        ticks: (value, label).
        is_log: logarithmic scale.
        has_grid: grid lines at the ticks.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    is_log: bool = False
    has_grid: bool = False

    def get_fraction(self, value: float) -> float:
        """Return the position of a value on the axis, 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def make_linear_axis(
    label: str,
    high: float,
    num_ticks: int,
    write: Callable[[float], str],
    *,
    scale: float = 1.0,
    has_grid: bool = False,
) -> PlotAxis:
    """Return an axis from 0 to `high` with about `num_ticks` round numbers.

    Args:
        write: a number as text.
        scale: unit in which the numbers are round: 1024 for KiB.
    """
    ticks = [(scale * tick, write(scale * tick)) for tick in compute_ticks(0.0, high / scale, num_ticks)]
    return PlotAxis(label, 0.0, high, ticks, has_grid=has_grid)


@dataclass
class PlotPanel:
    """One pair of axes; all coordinates are values of the axes.

    Attributes:
        left, top, width, height: rectangle in the document, numbers and labels included.
        label_width: left margin for the numbers and the label of the y axis.
    """

    x: PlotAxis
    y: PlotAxis
    title: str = ""
    title_style: str = "title"
    left: float = 0.0
    top: float = 0.0
    width: float = 520.0
    height: float = 400.0
    label_width: float = LEFT
    elements: list[str] = field(default_factory=list)

    def to_pixel(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel position of a pair of values."""
        inner_width, inner_height = self.width - self.label_width - RIGHT, self.height - TOP - BOTTOM
        bottom = self.top + self.height - BOTTOM
        return self.left + self.label_width + inner_width * self.x.get_fraction(
            x
        ), bottom - inner_height * self.y.get_fraction(y)

    def draw_line(self, points: Iterable[tuple[float, float]], style: str) -> None:
        """Draw a line through points."""
        path = "L".join("{:.1f} {:.1f}".format(*self.to_pixel(x, y)) for x, y in points)
        self.elements.append(f'<path class="{style}" d="M{path}"/>')

    def draw_band(self, edges: Sequence[tuple[float, float, float]], style: str) -> None:
        """Fill the area between two lines: (x, lower y, upper y)."""
        outline = [*((x, high) for x, _, high in edges), *((x, low) for x, low, _ in reversed(edges))]
        path = "L".join("{:.1f} {:.1f}".format(*self.to_pixel(x, y)) for x, y in outline)
        self.elements.append(f'<path class="band {style}" d="M{path}z"/>')

    def draw_cell(
        self, corner: tuple[float, float], opposite: tuple[float, float], style: str, opacity: float = 1.0
    ) -> None:
        """Fill the rectangle between two corners; `opacity` is 0 to 1."""
        (x0, y0), (x1, y1) = self.to_pixel(*corner), self.to_pixel(*opposite)
        geometry = f'x="{min(x0, x1):.1f}" y="{min(y0, y1):.1f}" width="{abs(x1 - x0):.1f}" height="{abs(y1 - y0):.1f}"'
        if opacity < 1:
            self.elements.append(f'<rect {geometry} style="fill:var(--paper)"/>')
        self.elements.append(f'<rect class="cell {style}" {geometry} fill-opacity="{opacity:.3f}"/>')

    def draw_mark(self, x: float, y: float, shape: str, style: str, tooltip: str) -> None:
        """Draw a circle, square, triangle, diamond, cross, line or bar with a tooltip."""
        px, py = self.to_pixel(x, y)
        self.elements.append(_mark_element(px, py, shape, style, tooltip))

    def draw_text(self, x: float, y: float, text: str, style: str, anchor: str, offset: tuple[float, float]) -> None:
        """Write text near a point; `offset` is (pixels to the right, pixels down)."""
        px, py = self.to_pixel(x, y)
        self.elements.append(render_text(px + offset[0], py + offset[1], text, style, anchor))

    def render_panel(self) -> str:
        """Return the panel with its axes."""
        x0, y0 = self.to_pixel(self.x.low, self.y.low)
        x1, y1 = self.to_pixel(self.x.high, self.y.high)
        parts = [render_text(x0, self.top + 20, self.title, self.title_style)] if self.title else []
        for value, text in self.y.ticks:
            _, py = self.to_pixel(self.x.low, value)
            parts.append(f'<path class="grid" d="M{x0:.1f} {py:.1f}H{x1:.1f}"/>')
            parts.append(render_text(x0 - 8, py + 4, text, "soft", "end"))
        for value, text in self.x.ticks:
            px, _ = self.to_pixel(value, self.y.low)
            if self.x.has_grid:
                parts.append(f'<path class="grid" d="M{px:.1f} {y0:.1f}V{y1:.1f}"/>')
            parts.append(f'<path class="axis" d="M{px:.1f} {y0:.1f}v5"/>')
            parts.append(render_text(px, y0 + 19, text, "soft", "middle"))
        parts.append(f'<path class="axis" d="M{x0:.1f} {y1:.1f}V{y0:.1f}H{x1:.1f}"/>')
        parts.append(render_text((x0 + x1) / 2, y0 + 40, self.x.label, "", "middle"))
        if not self.y.label:
            return "\n".join([*parts, *self.elements])
        rotation = f' transform="rotate(-90 {self.left + 16:.1f} {(y0 + y1) / 2:.1f})"'
        parts.append(render_text(self.left + 16, (y0 + y1) / 2, self.y.label, "", "middle", rotation))
        return "\n".join([*parts, *self.elements])


def render_legend(rows: Sequence[tuple[str, str, str]], left: float, top: float) -> str:
    """Return the legend of rows (shape, style, text); a row without a shape is a heading."""
    parts = []
    for index, (shape, style, text) in enumerate(rows):
        y = top + 20 * index
        if shape:
            parts.append(_mark_element(left + 7, y - 4, shape, style, ""))
        parts.append(render_text(left + (20 if shape else 0), y, text, "" if shape else "soft"))
    return "\n".join(parts)


def render_document(parts: Iterable[str], width: float, height: float, title: str) -> str:
    """Return the text of the SVG file."""
    header = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width:g} {height:g}" role="img"'
    header += (
        f' width="{width:g}" height="{height:g}">\n<title>{escape(title)}</title>\n<style>{_build_style()}</style>'
    )
    return "\n".join([header, '<rect width="100%" height="100%" style="fill:var(--paper)"/>', *parts, "</svg>", ""])


def render_text(x: float, y: float, text: str, style: str, anchor: str = "start", attributes: str = "") -> str:
    """Return a text element at a pixel of the document."""
    class_attribute = f' class="{style}"' if style else ""
    return f'<text{class_attribute} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}>{escape(text)}</text>'


def _mark_element(x: float, y: float, shape: str, style: str, tooltip: str) -> str:
    shapes = {
        "circle": f"M{x - 5:.1f} {y:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
        "square": f"M{x - 4.5:.1f} {y - 4.5:.1f}h9v9h-9z",
        "triangle": f"M{x:.1f} {y - 6:.1f}l6 10h-12z",
        "cross": f"M{x - 5:.1f} {y - 5:.1f}l10 10m-10 0l10 -10",
        "diamond": f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z",
        "line": f"M{x - 7:.1f} {y:.1f}h14",
        "bar": f"M{x:.1f} {y - 8:.1f}v16",
    }
    return f'<path class="{style}" d="{shapes[shape]}"><title>{escape(tooltip)}</title></path>'
