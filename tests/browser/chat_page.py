"""What tests of the chat page do in a browser."""

from __future__ import annotations

from typing import Any

from selenium.webdriver.common.keys import Keys

from browser.chromium import find, texts, until


def opened(browser: Any, url: str) -> Any:
    """The page at an address, as a browser that was never there shows it."""
    browser.set_window_size(1200, 800)
    browser.get(url)
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    until(lambda: find(browser, "#model").get_attribute("value"))
    browser.get_log("browser")
    return browser


def is_idle(browser: Any) -> bool:
    """No answer is being written."""
    return find(browser, "#log").get_attribute("aria-busy") == "false"


def ask(browser: Any, question: str, answers: int = 1) -> None:
    """Type a question and wait for the end of its answers."""
    before = len(texts(browser, "article.theirs"))
    find(browser, "#say").send_keys(question, Keys.ENTER)
    until(lambda: len(texts(browser, "article.theirs")) == before + answers and is_idle(browser))


def press(browser: Any, name: str, article: str = "article", at: int = -1) -> None:
    """Press a button of an article, found by its name."""
    script = """return [...document.querySelectorAll(arguments[0])].at(arguments[1]).querySelectorAll("button")"""
    buttons = browser.execute_script(script, article, at)
    (found,) = [one for one in buttons if name in (one.text, one.get_attribute("aria-label"))]
    found.click()


def choose(browser: Any, css: str, value: str) -> None:
    """Choose an option of a select."""
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))"
    browser.execute_script(script, find(browser, css), value)


def bodies(browser: Any, css: str = "article .body") -> list[str]:
    """The texts of turns, without empty lines between their paragraphs."""
    return [one.replace("\n\n", "\n") for one in texts(browser, css)]


def stored(browser: Any) -> list[dict[str, Any]]:
    """The conversations that the browser keeps."""
    return browser.execute_script("return JSON.parse(localStorage.getItem('anabatic.talks'))")


def store(browser: Any, talks: list[dict[str, Any]]) -> None:
    """Put conversations into the browser and load the page again."""
    browser.execute_script("localStorage.setItem('anabatic.talks', JSON.stringify(arguments[0]))", talks)
    browser.refresh()


def contents(body: dict[str, Any]) -> list[str]:
    """The texts of the messages of a request."""
    return [message["content"] for message in body["messages"]]


def tab_to(browser: Any, name: str) -> Any:
    """Press Tab until the element of this name has the focus."""
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        one = browser.switch_to.active_element
        if name in (one.text, one.get_attribute("aria-label"), one.get_attribute("id")):
            return one
    raise AssertionError(f"{name} is not reached")


def accessible(browser: Any) -> list[tuple[str, str]]:
    """(role, name) of what a screen reader finds."""
    browser.execute_cdp_cmd("Accessibility.enable", {})
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [
        (node.get("role", {}).get("value"), node.get("name", {}).get("value"))
        for node in nodes
        if not node.get("ignored")
    ]
