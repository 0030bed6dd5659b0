"""The report in a real browser: opened from disk, read on a desk and on a phone, in light and in dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.train.report.page import write_pipeline_report
from browser.chromium import NEEDED, webdriver
from unit.fake_runs import HOSTILE_TEXT, write_jsonl, write_pipeline_run

pytestmark = NEEDED

# What sticks out of the window or of its own box; boxes that scroll or cut a name on purpose are left out.
STICKS_OUT = """
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const style = getComputedStyle(element);
  if (element.closest("svg, script, .scroll") || !element.getClientRects().length) continue;
  const box = element.getBoundingClientRect();
  if (box.right > innerWidth + 0.5 || box.left < -0.5) found.push(element.outerHTML.slice(0, 120));
  if (element.scrollWidth > element.clientWidth + 1 && style.display !== "inline"
      && style.textOverflow !== "ellipsis" && !element.closest(".plot, .bar"))
    found.push("wide: " + element.outerHTML.slice(0, 120));
}
if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");
return found;
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    job = write_pipeline_run(out, steps=200)
    row = {"step": 200, "kind": "sample", "prompt": HOSTILE_TEXT, "text": HOSTILE_TEXT + "x" * 500}
    with open(out / "base" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    said = [{"role": "user", "content": HOSTILE_TEXT}, {"role": "assistant", "content": "<img src=x onerror=alert(1)>"}]
    write_jsonl(out / "eval" / "chat.jsonl", said)
    return write_pipeline_report(out, job)


def visit(browser: Any, report: Path, width: int = 1280, scheme: str = "light") -> None:
    """Open the report in a window of `width` CSS pixels."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(report.as_uri())


def find(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def test_no_errors_and_no_requests(browser: Any, report: Path) -> None:
    visit(browser, report)
    requests = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            requests.append(message["params"]["request"]["url"])
    assert report.as_uri() in requests
    own = (report.as_uri(), "data:", "chrome://")  # the last: the browser's first page, which a busy machine loads late
    assert [url for url in requests if not url.startswith(own)] == []
    assert browser.get_log("browser") == []
    assert browser.execute_script("return [window.stolen, document.images.length]") == [None, 0]
    assert browser.title == "From text to a chatting model · anabatic"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out(browser: Any, report: Path, width: int) -> None:
    visit(browser, report, width)
    assert browser.execute_script("return innerWidth") == width
    browser.execute_script("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert browser.execute_script(STICKS_OUT) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_values_under_the_pointer(browser: Any, report: Path, width: int) -> None:
    visit(browser, report, width)
    plot = find(browser, ".plot")[0]
    assert not find(browser, ".live")
    mouse = webdriver.ActionChains(browser)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    mouse.move_to_element(plot).perform()
    (tip,) = find(browser, ".live .tip")
    lines = tip.text.split("\n")
    assert lines[0] in ("step 99", "step 100", "step 101")
    assert [line for line in lines if not line[0].isdigit()][1:] == [
        "training, measured",
        "training, smoothed",
        "held out",
    ]
    assert all(float(line) > 0 for line in lines[1:] if line[0].isdigit())
    assert browser.execute_script(STICKS_OUT) == []
    left = find(browser, "h1")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", left)
    mouse.move_to_element(left).perform()
    assert not find(browser, ".live")


def test_the_values_by_keyboard(browser: Any, report: Path) -> None:
    visit(browser, report)
    plot = find(browser, ".plot")[0]
    keys = webdriver.Keys
    for key, step in ((keys.END, "step 200"), (keys.HOME, "step 1"), (keys.ARROW_RIGHT, "step 5")):
        plot.send_keys(key)
        assert find(browser, ".live .tip")[0].text.split("\n")[0] == step
    plot.send_keys(keys.ESCAPE)
    assert not find(browser, ".live")


def test_samples_one_moment_at_a_time(browser: Any, report: Path) -> None:
    visit(browser, report)
    sample = find(browser, ".sample")[0]
    buttons = sample.find_elements("css selector", "button")
    assert [button.text for button in buttons] == ["25", "50", "75", "100", "125", "150", "175", "200"]
    before = sample.find_element("css selector", ".on").text
    browser.execute_script("arguments[0].click()", buttons[0])
    assert sample.find_element("css selector", ".on").text != before
    assert [button.get_attribute("aria-pressed") for button in buttons] == ["true"] + ["false"] * 7
    shown = [text.is_displayed() for text in sample.find_elements("css selector", ".texts > div")]
    assert shown == [True] + [False] * 7


def luminance(colour: list[float]) -> float:
    """WCAG 2 relative luminance of an sRGB colour, channels 0..255."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const solid = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = rgb(getComputedStyle(at).backgroundColor);
    if (colour.length === 3) return colour;
  }
  return rgb(getComputedStyle(document.body).backgroundColor);
};
return [...document.querySelectorAll("body *")]
  .filter((element) => !element.closest("script, svg") && element.getClientRects().length
    && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .map((element) => [rgb(getComputedStyle(element).color).slice(0, 3), solid(element), element.outerHTML.slice(0, 90)]);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(browser: Any, report: Path, scheme: str) -> None:
    visit(browser, report, scheme=scheme)
    pairs = browser.execute_script(CONTRAST)
    assert len(pairs) > 200
    paper = luminance(
        browser.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    )
    assert paper > 0.8 if scheme == "light" else paper < 0.05
    weak = []
    for colour, ground, element in pairs:
        light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
        if (light + 0.05) / (dark + 0.05) < 4.5:  # WCAG 2.2 AA
            weak.append((element, colour, ground))
    assert weak == []
