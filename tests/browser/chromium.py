"""A headless Chromium for tests of pages, which are skipped where there is none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
exceptions = pytest.importorskip("selenium.common.exceptions")

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

NEEDED = [
    pytest.mark.skipif(
        not (PROGRAM and DRIVER), reason="no chromium here (Debian: apt-get install chromium chromium-driver)"
    ),
]
"""Marks of a module whose tests need the browser."""

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,800",
)


@contextmanager
def started(profile: Path) -> Iterator[Any]:
    """A driver whose browser keeps its files in `profile`."""
    options = webdriver.ChromeOptions()
    options.binary_location = PROGRAM
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The driver's path is given, or selenium would look for one on the network.
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def find(browser: Any, css: str) -> Any:
    """The first element that a selector matches."""
    return browser.find_element("css selector", css)


def texts(browser: Any, css: str) -> list[str]:
    """The texts of all elements that a selector matches."""
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText.trim())"
    return browser.execute_script(script, css)


def until(true: Callable[[], Any], seconds: float = 30) -> None:
    """Wait for a condition; an element that the page has just replaced is looked for again."""
    end = time.monotonic() + seconds
    while True:
        try:
            if true():
                return
        except exceptions.StaleElementReferenceException:
            pass
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
