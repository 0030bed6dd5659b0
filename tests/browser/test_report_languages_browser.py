"""The report and the comparison in the reader's language, in a real browser: locale, switch, labels, paper."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabatic.train.report.comparison_page import write_comparison
from anabatic.train.report.page import write_run_report
from browser.chromium import NEEDED, texts, until, webdriver
from browser.test_report_browser import CONTRAST, STICKS_OUT, find, luminance, visit
from unit.fake_runs import write_training_run

pytestmark = NEEDED
HAN = re.compile(r"[\u4e00-\u9fff]")
NAMES = [
    "<img src=x onerror=window.stolen=1>",
    "a-long-name-" * 18,
    "一次训练",
    "plain",
    "b{step}",
    "c&amp;",
    "d",
    "torn",
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of a run, and the comparison of eight of which one is damaged."""
    root = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        (root / name).mkdir()
        write_training_run(root / name, steps=60)
    (root / "torn" / "metrics.jsonl").write_text('{"step": 1, "lo')
    runs = [root / name for name in NAMES]
    return {
        "run": write_run_report(root / "plain", "en"),
        "comparison": write_comparison(runs, root / "comparison.html", "en"),
    }


def ask_for(browser: Any, languages: str) -> None:
    """Let the browser ask for languages, as its settings do, and forget what was chosen."""
    agent = browser.execute_script("return navigator.userAgent")
    browser.execute_cdp_cmd("Emulation.setUserAgentOverride", {"userAgent": agent, "acceptLanguage": languages})


@pytest.fixture
def fresh(browser: Any, pages: dict[str, Path]) -> Any:
    """The browser without a chosen language, which prefers English afterwards."""
    browser.get(pages["run"].as_uri())
    browser.execute_script("localStorage.clear()")
    yield browser
    ask_for(browser, "en-US")


def read_state(browser: Any) -> tuple[str, str, list[str]]:
    """Language of the document, word of the brand, languages of the pressed buttons."""
    pressed = "return [...document.querySelectorAll('.languages [aria-pressed=true]')].map((one) => one.lang)"
    return (
        browser.execute_script("return document.documentElement.lang"),
        texts(browser, ".brand span")[0],
        browser.execute_script(pressed),
    )


@pytest.mark.parametrize(
    ("languages", "code"),
    [("zh-CN,en", "zh"), ("zh-TW", "zh"), ("en-GB,zh", "en"), ("de-DE,zh-CN", "zh"), ("de-DE", "en"), ("fr,en", "en")],
)
def test_the_browsers_languages_decide(fresh: Any, pages: dict[str, Path], languages: str, code: str) -> None:
    ask_for(fresh, languages)
    visit(fresh, pages["run"])
    assert read_state(fresh) == (code, "训练报告" if code == "zh" else "training report", [code])
    label = find(fresh, ".plot")[0].get_attribute("aria-label")
    assert label.startswith("损失（nat/token）" if code == "zh" else "Loss, nats per token")


def test_the_switch_by_keyboard_is_remembered(fresh: Any, pages: dict[str, Path]) -> None:
    visit(fresh, pages["run"])
    keys = webdriver.Keys
    webdriver.ActionChains(fresh).send_keys(keys.TAB).send_keys(keys.TAB).send_keys(keys.ENTER).perform()
    assert read_state(fresh) == ("zh", "训练报告", ["zh"])
    assert fresh.switch_to.active_element.text == "中文"
    plot = find(fresh, ".plot")[0]
    plot.send_keys(keys.END)
    tip = find(fresh, ".live .tip")[0].text.split("\n")
    assert tip[0] == "第 60 步" and "训练，平滑值" in tip
    visit(fresh, pages["comparison"])
    assert read_state(fresh) == ("zh", "训练对比", ["zh"])
    webdriver.ActionChains(fresh).send_keys(keys.TAB).send_keys(keys.SPACE).perform()
    assert read_state(fresh) == ("en", "Compared runs", ["en"])


@pytest.mark.parametrize("stored", ["not JSON", "[]", '"zh"', '{"language": "xx"}', '{"language": 7}', "null"])
def test_what_others_stored_does_no_harm(fresh: Any, pages: dict[str, Path], stored: str) -> None:
    fresh.execute_script("localStorage.setItem('anabatic.settings', arguments[0])", stored)
    visit(fresh, pages["run"])
    assert read_state(fresh)[0] == "en" and fresh.get_log("browser") == []


def test_the_switch_works_without_storage(fresh: Any, pages: dict[str, Path]) -> None:
    refuse = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }})"
    script = fresh.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": refuse})
    try:
        visit(fresh, pages["run"])
        find(fresh, ".languages button")[1].click()
        assert read_state(fresh) == ("zh", "训练报告", ["zh"]) and fresh.get_log("browser") == []
    finally:
        fresh.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def read_tree(browser: Any, has: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Nodes of the accessibility tree that are not ignored, once they are what `has` asks for: it is built beside the
    page."""
    nodes: list[dict[str, Any]] = []

    def is_there() -> bool:
        tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        nodes[:] = [node for node in tree if not node["ignored"]]
        return has(nodes)

    until(is_there)
    return nodes


@pytest.mark.parametrize("name", ["run", "comparison"])
def test_without_its_program_the_page_is_whole(fresh: Any, pages: dict[str, Path], name: str) -> None:
    ask_for(fresh, "zh-CN")
    title = "Compared runs" if name == "comparison" else "training report"
    fresh.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        visit(fresh, pages[name])
        tree = read_tree(fresh, lambda nodes: any(node.get("name", {}).get("value") == title for node in nodes))
    finally:
        fresh.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert not any(node.get("role", {}).get("value") == "button" and node["name"]["value"] == "中文" for node in tree)


@pytest.mark.parametrize("name", ["run", "comparison"])
def test_the_accessibility_tree_is_in_one_language(fresh: Any, pages: dict[str, Path], name: str) -> None:
    ask_for(fresh, "zh-CN")
    visit(fresh, pages[name])
    nodes = read_tree(fresh, lambda found: sum(node["role"]["value"] in ("image", "img") for node in found) >= 6)
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if "name" in node]
    charts = [label for role, label in named if role in ("image", "img")]
    assert len(charts) >= 6 and all(HAN.search(label) for label in charts)
    assert ("group", "语言") in named
    headings = [label for role, label in named if role == "heading"]
    if name == "comparison":
        assert headings == ["8 次训练的对比", "最终指标", "曲线", "不同的设置"]
        assert ("region", "最终指标") in named and ("list", "训练") in named
        columns = [label for role, label in named if role == "columnheader"]
        assert columns[0] == "指标" and len(columns) >= 9 and NAMES[0] in columns[1]
    else:
        assert headings[0] == "plain"


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("languages", ["en", "zh-CN"])
@pytest.mark.parametrize("name", ["run", "comparison"])
def test_nothing_sticks_out(fresh: Any, pages: dict[str, Path], name: str, languages: str, width: int) -> None:
    ask_for(fresh, languages)
    visit(fresh, pages[name], width)
    assert fresh.execute_script("return [window.stolen, document.images.length]") == [None, 0]
    fresh.execute_script("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert fresh.execute_script(STICKS_OUT) == [] and fresh.get_log("browser") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_comparison_is_readable_and_its_colours_differ(fresh: Any, pages: dict[str, Path], scheme: str) -> None:
    visit(fresh, pages["comparison"], scheme=scheme)
    for colour, ground, element in fresh.execute_script(CONTRAST):
        light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, element  # WCAG 2.2 AA
    badges = "return [...document.querySelectorAll('.runs i')].map((one) => getComputedStyle(one).backgroundColor)"
    assert len(set(fresh.execute_script(badges))) == len(NAMES)
    lines = (
        "return [...document.querySelector('.big').querySelectorAll('path.line')]"
        ".map((one) => getComputedStyle(one).stroke)"
    )
    strokes = fresh.execute_script(lines)
    assert len(strokes) == len(set(strokes)) == len(NAMES) - 1  # the damaged run has no curve


@pytest.mark.parametrize("width", [360, 1280])
def test_long_names_stay_inside_the_values_under_the_pointer(fresh: Any, pages: dict[str, Path], width: int) -> None:
    visit(fresh, pages["comparison"], width)
    plot = find(fresh, ".plot")[0]
    plot.send_keys(webdriver.Keys.END)
    (tip,) = find(fresh, ".live .tip")
    assert NAMES[0] in tip.text and tip.text.startswith("step 60")
    assert fresh.execute_script(STICKS_OUT) == []
    figures = tip.find_elements("css selector", "span > b")
    right = tip.rect["x"] + tip.rect["width"]
    assert len(figures) == len(NAMES) - 1
    assert all(float(one.text) > 0 and one.rect["x"] + one.rect["width"] <= right for one in figures)


def test_the_wide_table_scrolls_by_keyboard_under_its_names(fresh: Any, pages: dict[str, Path]) -> None:
    visit(fresh, pages["comparison"], 390)
    table = find(fresh, "#figures .scroll")[0]
    first = find(fresh, "#figures tbody th")[0]
    left = first.rect["x"]
    table.send_keys(webdriver.Keys.ARROW_RIGHT * 3)
    until(lambda: fresh.execute_script("return arguments[0].scrollLeft", table) > 0)
    assert abs(first.rect["x"] - left) < 1


@pytest.mark.parametrize("name", ["run", "comparison"])
def test_on_paper(fresh: Any, pages: dict[str, Path], name: str) -> None:
    visit(fresh, pages[name], scheme="dark")
    fresh.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not find(fresh, ".languages")[0].is_displayed()
        assert find(fresh, ".brand svg")[0].is_displayed() and find(fresh, ".plot")[0].is_displayed()
        colours = "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
        ink, paper = (
            luminance([float(part) for part in re.findall(r"[\d.]+", text)[:3]])
            for text in fresh.execute_script(colours)
        )
        assert ink < 0.05 and paper > 0.9
        printed = base64.b64decode(fresh.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
        assert printed.startswith(b"%PDF-")
    finally:
        fresh.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
