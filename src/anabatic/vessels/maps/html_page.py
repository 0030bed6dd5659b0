"""The map as a page: one that needs nothing from outside, or folium over OpenStreetMap."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from anabatic.core.errors import Failure
from anabatic.vessels.maps.drawn_vessels import DrawnVessel, split_at_antimeridian

TEMPLATE_FOLDER = Path(__file__).parent
CLASS_COLOURS = (
    *("#1f77b4", "#e6851f", "#2f9e44", "#c0399f", "#8a63d2", "#17a2a8", "#b8860b", "#7f8c8d"),
    *("#5c6bc0", "#a0522d", "#6b8e23", "#d16d9e", "#3d8bd4", "#9c755f"),
)
"""Of classes in turn; red is left for errors."""
UNKNOWN_COLOUR = "#8d99a0"


def assign_colours(vessels: Sequence[DrawnVessel]) -> dict[str, str]:
    """Return a colour for each class on the map, the same for the same set of classes."""
    names = sorted({name for drawn in vessels for name in (drawn.truth, drawn.predicted) if name})
    found = {name: CLASS_COLOURS[place % len(CLASS_COLOURS)] for place, name in enumerate(names)}
    return {**found, "unknown": UNKNOWN_COLOUR}


def describe_map(vessels: Sequence[DrawnVessel], left_out: int) -> str:
    """One sentence on what is drawn and how much of it is right."""
    known = [drawn for drawn in vessels if drawn.predicted and drawn.truth]
    judged = [drawn for drawn in known if not drawn.was_trained_on]
    right = sum(not drawn.is_wrong for drawn in judged)
    points = sum(len(track) for drawn in vessels for track in drawn.lines)
    text = f"{len(vessels):,} vessels, {points:,} points."
    if judged:
        text += f" {right:,} of {len(judged):,} predicted rightly ({right / len(judged):.1%})."
    if len(judged) < len(known):
        text += f" {len(known) - len(judged):,} do not count: the model was trained on them."
    return text + (f" {left_out:,} more are not drawn." if left_out else "")


def render_local_page(vessels: Sequence[DrawnVessel], title: str, left_out: int) -> str:
    """Return a page that draws the tracks itself: it opens without a network, from disk."""
    rows = [
        {
            "vessel": drawn.vessel,
            "truth": drawn.truth,
            "predicted": drawn.predicted,
            "confidence": drawn.confidence,
            "shown": drawn.shown_class,
            "wrong": drawn.is_wrong,
            "lines": [line for track in drawn.lines for line in split_at_antimeridian(track)],
        }
        for drawn in vessels
    ]
    data = json.dumps({"vessels": rows, "classes": assign_colours(vessels)}, separators=(",", ":"))
    environment = Environment(loader=FileSystemLoader(TEMPLATE_FOLDER), autoescape=True, undefined=StrictUndefined)
    text = describe_map(vessels, left_out)
    return environment.get_template("map.html.j2").render(
        title=title,
        label=f"Map. {text}",
        summary=text,
        wrong=sum(drawn.is_wrong for drawn in vessels),
        predicted=any(drawn.predicted for drawn in vessels),
        data=Markup(data.replace("<", "\\u003c")),  # a name may hold </script>
        style=Markup((TEMPLATE_FOLDER / "map.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATE_FOLDER / "map.js").read_text(encoding="utf-8")),
    )


def render_folium_page(vessels: Sequence[DrawnVessel], title: str, left_out: int) -> str:
    """Return a folium page over OpenStreetMap tiles: one layer for each class and one for the errors.

    Raises:
        Failure: folium is not installed.
    """
    try:
        import folium
    except ImportError as error:
        raise Failure("folium is not installed", "pip install 'anabatic[vessels]', or --tiles none") from error
    shapes: Any = folium
    page, palette = folium.Map(tiles="OpenStreetMap", control_scale=True, prefer_canvas=True), assign_colours(vessels)
    layers: dict[str, Any] = {}
    corners = []
    for drawn in vessels:
        name = "predicted wrongly" if drawn.is_wrong else drawn.shown_class
        layer = layers.setdefault(name, folium.FeatureGroup(name=str(escape(name))))
        told = f"{drawn.vessel}: {drawn.truth or '?'}" + (f", predicted {drawn.predicted}" if drawn.predicted else "")
        for track in drawn.lines:
            for line in split_at_antimeridian(track):
                places = [(lat, lon) for lon, lat, _ in line]
                corners += [places[0], places[-1]]
                tooltip = folium.Tooltip(str(escape(told)))
                shapes.PolyLine(places, color=palette[drawn.shown_class], weight=2, tooltip=tooltip).add_to(layer)
        if drawn.is_wrong:
            end = (float(drawn.lines[-1].lat[-1]), float(drawn.lines[-1].lon[-1]))
            shapes.CircleMarker(end, radius=6, color="#b3261e", weight=2, tooltip=str(escape(told))).add_to(layer)
    for layer in layers.values():
        layer.add_to(page)
    folium.LayerControl(collapsed=False).add_to(page)
    lats, lons = zip(*corners, strict=True)
    page.fit_bounds([(min(lats), min(lons)), (max(lats), max(lons))])
    heading = f"<title>{escape(title)}</title><p style='position:fixed;z-index:999;bottom:1rem;left:50%'>"
    root: Any = page.get_root()
    root.html.add_child(folium.Element(f"{heading}{escape(describe_map(vessels, left_out))}</p>"))
    text: str = root.render()
    return text


PAGE_RENDERERS = {"none": render_local_page, "osm": render_folium_page}
