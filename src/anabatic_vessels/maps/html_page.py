"""The map as an HTML page: self-contained, or folium with OpenStreetMap tiles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from anabatic.core import extras
from anabatic.core.logo import FAVICON_URL, INLINE_LOGO
from anabatic_vessels.maps.drawn_vessels import DrawnVessel, split_at_antimeridian

TEMPLATE_FOLDER = Path(__file__).parent
CLASS_COLOURS = (
    *("#1f77b4", "#e6851f", "#2f9e44", "#c0399f", "#8a63d2", "#17a2a8", "#b8860b", "#7f8c8d"),
    *("#5c6bc0", "#a0522d", "#6b8e23", "#d16d9e", "#3d8bd4", "#9c755f"),
)
"""Colours of classes, in order; red is reserved for errors."""
UNKNOWN_COLOUR = "#8d99a0"


def assign_colours(vessels: Sequence[DrawnVessel]) -> dict[str, str]:
    """Return the colour of each class on the map; deterministic for a set of classes."""
    names = sorted({name for vessel in vessels for name in (vessel.truth, vessel.predicted) if name})
    colours = {name: CLASS_COLOURS[index % len(CLASS_COLOURS)] for index, name in enumerate(names)}
    return {**colours, "unknown": UNKNOWN_COLOUR}


def describe_map(vessels: Sequence[DrawnVessel], num_left_out: int) -> str:
    """Return a summary: number of vessels and points, and the accuracy."""
    labelled = [vessel for vessel in vessels if vessel.predicted and vessel.truth]
    scored = [vessel for vessel in labelled if not vessel.was_trained_on]
    num_right = sum(not vessel.is_wrong for vessel in scored)
    points = sum(len(track) for vessel in vessels for track in vessel.lines)
    text = f"{len(vessels):,} vessels, {points:,} points."
    if scored:
        text += f" {num_right:,} of {len(scored):,} predicted rightly ({num_right / len(scored):.1%})."
    if len(scored) < len(labelled):
        text += f" {len(labelled) - len(scored):,} do not count: the model was trained on them."
    return text + (f" {num_left_out:,} more are not drawn." if num_left_out else "")


def render_local_page(vessels: Sequence[DrawnVessel], title: str, num_left_out: int) -> str:
    """Return a self-contained page that works offline."""
    rows = [
        {
            "vessel": vessel.vessel,
            "truth": vessel.truth,
            "predicted": vessel.predicted,
            "confidence": vessel.confidence,
            "shown": vessel.shown_class,
            "wrong": vessel.is_wrong,
            "lines": [line for track in vessel.lines for line in split_at_antimeridian(track)],
        }
        for vessel in vessels
    ]
    data = json.dumps({"vessels": rows, "classes": assign_colours(vessels)}, separators=(",", ":"))
    environment = Environment(loader=FileSystemLoader(TEMPLATE_FOLDER), autoescape=True, undefined=StrictUndefined)
    text = describe_map(vessels, num_left_out)
    return environment.get_template("map.html.j2").render(
        title=title,
        logo=Markup(INLINE_LOGO),
        favicon=Markup(FAVICON_URL),
        label=f"Map. {text}",
        summary=text,
        wrong=sum(vessel.is_wrong for vessel in vessels),
        predicted=any(vessel.predicted for vessel in vessels),
        data=Markup(data.replace("<", "\\u003c")),  # a name may contain </script>
        style=Markup((TEMPLATE_FOLDER / "map.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATE_FOLDER / "map.js").read_text(encoding="utf-8")),
    )


def render_folium_page(vessels: Sequence[DrawnVessel], title: str, num_left_out: int) -> str:
    """Return a folium page with OpenStreetMap tiles: one layer per class and one for the errors.

    Raises:
        ConfigError: folium is not installed.
    """
    folium = extras.import_optional("folium", "--tiles osm", "or use --tiles none")
    page, palette = folium.Map(tiles="OpenStreetMap", control_scale=True, prefer_canvas=True), assign_colours(vessels)
    layers: dict[str, Any] = {}
    corners = []
    for vessel in vessels:
        name = "predicted wrongly" if vessel.is_wrong else vessel.shown_class
        layer = layers.setdefault(name, folium.FeatureGroup(name=str(escape(name))))
        label = f"{vessel.vessel}: {vessel.truth or '?'}" + (
            f", predicted {vessel.predicted}" if vessel.predicted else ""
        )
        for track in vessel.lines:
            for line in split_at_antimeridian(track):
                positions = [(lat, lon) for lon, lat, _ in line]
                corners += [positions[0], positions[-1]]
                tooltip = folium.Tooltip(str(escape(label)))
                folium.PolyLine(positions, color=palette[vessel.shown_class], weight=2, tooltip=tooltip).add_to(layer)
        if vessel.is_wrong:
            end = (float(vessel.lines[-1].lat[-1]), float(vessel.lines[-1].lon[-1]))
            folium.CircleMarker(end, radius=6, color="#b3261e", weight=2, tooltip=str(escape(label))).add_to(layer)
    for layer in layers.values():
        layer.add_to(page)
    folium.LayerControl(collapsed=False).add_to(page)
    lats, lons = zip(*corners, strict=True)
    page.fit_bounds([(min(lats), min(lons)), (max(lats), max(lons))])
    heading = f"<title>{escape(title)}</title><p style='position:fixed;z-index:999;bottom:1rem;left:50%'>"
    root: Any = page.get_root()
    root.html.add_child(folium.Element(f"{heading}{escape(describe_map(vessels, num_left_out))}</p>"))
    text: str = root.render()
    return text


PAGE_RENDERERS = {"none": render_local_page, "osm": render_folium_page}
