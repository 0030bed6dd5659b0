"""What tests of the studio's page do in a browser."""

from __future__ import annotations

from typing import Any

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from browser.chromium import find, texts, until


def lines(browser: Any) -> dict[str, int]:
    """Title of each plot that is shown -> how many lines it has."""
    script = """return Object.fromEntries([...document.querySelectorAll(".plot:not([hidden])")].map(
        (one) => [one.querySelector("figcaption span").innerText, one.querySelectorAll("path").length]))"""
    return browser.execute_script(script)


def choose(browser: Any, name: str) -> None:
    """Open a run from the list."""
    until(lambda: name in texts(browser, "#list .name"))
    rows = browser.find_elements(By.CSS_SELECTOR, "#list button")
    next(row for row in rows if row.text.split("\n")[0] == name).click()
    until(lambda: find(browser, "#title").text == name)


def go(browser: Any, view: str) -> None:
    """Open a part of the studio."""
    find(browser, f"#nav [data-view={view}]").click()
    until(lambda: find(browser, f"#{view}-view").is_displayed())


def fill(browser: Any, key: str, text: str) -> None:
    """Write into a field of the form."""
    area = find(browser, f"[id='f-{key}']")
    area.clear()
    area.send_keys(text, Keys.TAB)


def recipe(browser: Any) -> str:
    """The text of the recipe."""
    return find(browser, "#recipe").get_attribute("value")


def fits_the_window(browser: Any) -> bool:
    """Nothing is wider than the window."""
    return browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


def unnamed_controls(browser: Any) -> list[str]:
    """Controls that a screen reader cannot name."""
    return browser.execute_script(
        """return [...document.querySelectorAll("button, select, input, textarea, a, summary")].filter((one) =>
        one.checkVisibility({ visibilityProperty: true }) && !(one.innerText.trim() || one.ariaLabel || one.title
        || one.labels?.length || one.placeholder)).map((one) => one.outerHTML)"""
    )


def pick_entry(browser: Any, start: str) -> None:
    """Choose the entry of the open dialog that begins with a text."""
    until(lambda: any(text.startswith(start) for text in texts(browser, "#picker li button")))
    entries = browser.find_elements(By.CSS_SELECTOR, "#picker li button")
    next(entry for entry in entries if entry.text.startswith(start)).click()
    until(lambda: not find(browser, "#picker").is_displayed())
