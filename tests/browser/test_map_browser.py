"""The map in a real browser, opened from disk without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabatic_vessels.io.track import Track
from anabatic_vessels.maps import drawn_vessels, html_page
from browser.chromium import NEEDED, started

pytestmark = NEEDED

PAINTED = """
const canvas = document.querySelector("canvas"), found = {};
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
for (let at = 0; at < pixels.length; at += 4) {
  const name = "#" + [0, 1, 2].map((part) => pixels[at + part].toString(16).padStart(2, "0")).join("");
  found[name] = (found[name] || 0) + 1;
}
return found;
"""


def track(vessel: str, lon: float, label: str) -> Track:
    steps = np.arange(30)
    same = np.full(30, 10.0)
    return Track(vessel, "a", 1_577_836_800 + 60 * steps, 50 + 0.003 * steps, lon + 0 * same, same, same, same, label)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drawn = drawn_vessels.draw_tracks(
        [track("one", 0.0, "Cargo"), track("two", 0.1, "Tanker"), track("three", 0.05, "Cargo")]
    )
    rows = [
        {"vessel": name, "predicted_class": 0, "class_name": "Cargo", "probabilities": [0.7, 0.3]} for name in drawn
    ]
    drawn_vessels.add_predictions(drawn, rows)
    path = tmp_path_factory.mktemp("map") / "map.html"
    path.write_text(html_page.render_local_page(list(drawn.values()), "A map", 0), encoding="utf-8")
    return path


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with started(tmp_path / "profile") as driver:
        yield driver


def painted(browser: Any) -> dict[str, int]:
    """How many pixels have which colour, once the page has drawn."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    found: dict[str, int] = browser.execute_script(PAINTED)
    return found


def test_tracks_legend_list_and_search(page: Path, browser: Any) -> None:
    cargo, tanker = html_page.CLASS_COLOURS[:2]
    browser.get(page.as_uri())
    assert painted(browser)[cargo] > 50
    assert tanker not in painted(browser)  # the wrong one has the colour of what was predicted
    assert painted(browser).get("#b3261e", 0) > 5
    rows = [one.text for one in browser.find_elements("css selector", ".list li")]
    assert rows == [
        "one\nCargo, predicted Cargo (70 %)",
        "two\nTanker, predicted Cargo (70 %)",
        "three\nCargo, predicted Cargo (70 %)",
    ]
    browser.find_element("id", "only").click()
    assert [one.text.splitlines()[0] for one in browser.find_elements("css selector", ".list li")] == ["two"]
    browser.find_element("id", "only").click()
    browser.find_element("id", "find").send_keys("thr")
    browser.find_element("css selector", ".list button").click()
    assert painted(browser)[cargo] > 500  # zoomed to it, drawn thick
    browser.find_element("css selector", ".legend input").click()
    assert cargo not in painted(browser)
    browser.set_window_size(480, 800)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert [row for row in browser.get_log("browser") if row["level"] == "SEVERE"] == []
