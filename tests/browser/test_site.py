"""The documentation as a site in a real browser: built from a copy, served on this machine, searched and read."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.chromium import NEEDED, started
from browser.questions import ASKED
from house import tree

pytest.importorskip("zensical", reason="zensical is not installed (it needs Python 3.11)")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = NEEDED

PATIENCE = 30
# The first results of the search, which lives in a shadow tree.
RESULTS = """
const hosts = [...document.querySelectorAll("*")].filter((element) => element.shadowRoot);
const links = hosts.flatMap((host) => [...host.shadowRoot.querySelectorAll("a[href]")]);
return links.map((link) => new URL(link.href).pathname);
"""
OPEN = """return [...document.querySelectorAll("*")].some(
    (element) => element.shadowRoot && element.shadowRoot.activeElement?.matches("input"))"""


MARKED = """
const hosts = [...document.querySelectorAll("*")].filter((element) => element.shadowRoot);
const marks = hosts.flatMap((host) => [...host.shadowRoot.querySelectorAll("mark, mark u")]);
return marks.map((mark) => mark.textContent.trim().toLowerCase());
"""


def pages_of(code: str) -> list[Path]:
    return sorted((tree.ROOT / "docs" / code).rglob("*.md"))


class Silent(http.server.SimpleHTTPRequestHandler):
    """Says nothing about each request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    docs = tmp_path_factory.mktemp("site") / "docs"
    shutil.copytree(tree.ROOT / "docs", docs, ignore=shutil.ignore_patterns("site", ".cache"))
    for code in ("en", "zh"):
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(docs / f"zensical.{code}.toml")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
    handler = functools.partial(Silent, directory=str(docs / "site"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with started(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def screen(browser: Any, width: int, scheme: str) -> None:
    """A window of so many CSS pixels, in light or dark."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


SEARCHES = {
    "en": {
        "checkpoint": "concepts/checkpoints",
        "out of memory": "guides/when-it-fails",
        "packing": "concepts/packing",
    },
    "zh": {"检查点": "concepts/checkpoints", "断点续训": "concepts/checkpoints", "显存不足": "guides/when-it-fails"},
}


@pytest.mark.parametrize("code", SEARCHES)
def test_search_finds_the_page_first(site: str, browser: Any, code: str) -> None:
    screen(browser, 1280, "light")
    browser.get(f"{site}/{code}/index.html")
    wait = WebDriverWait(browser, PATIENCE)
    browser.find_element(By.CSS_SELECTOR, ".md-search__button").click()
    wait.until(lambda driver: driver.execute_script(OPEN))
    for words, page in SEARCHES[code].items():
        field = browser.switch_to.active_element
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(words)
        expected = f"/{code}/{page}.html"
        assert wait.until(lambda driver, expected=expected: driver.execute_script(RESULTS)[:1] == [expected], words)


# Asks the site's own worker, as its field does; every answer is the list of the pages of its sections.
ASK = """
const [code, questions, done] = arguments;
const config = JSON.parse(document.getElementById("__config").textContent);
const worker = new Worker(new URL(config.search, document.baseURI));
const answers = [];
let items = [];
const next = () => worker.postMessage({type: 2, data: {input: questions[answers.length]}});
worker.onmessage = ({data}) => {
  if (data.type === 4) done("the search has failed");
  if (data.type === 3) answers.push(data.data.items.map(({id}) => items[id].location.split(/[.]html/)[0]));
  if (answers.length === questions.length) done(answers);
  else next();
};
worker.onerror = (event) => done(event.message);
fetch(new URL(`${config.base}/search.json`, document.baseURI)).then((found) => found.json()).then((index) => {
  items = index.items;
  worker.postMessage({type: 0, data: index});
});
"""


@pytest.mark.parametrize("code", ["en", "zh"])
def test_questions_lead_to_the_page_that_answers(site: str, browser: Any, code: str) -> None:
    browser.get(f"{site}/{code}/index.html")
    browser.set_script_timeout(10 * PATIENCE)
    typed = [row[1 if code == "en" else 2] for row in ASKED]
    answers = browser.execute_async_script(ASK, code, typed)
    assert isinstance(answers, list), answers
    pages = {file.relative_to(tree.ROOT / "docs" / code).with_suffix("").as_posix() for file in pages_of(code)}
    assert {page for row in ASKED for page in row[0].split()} <= pages
    assert len(answers) == len(ASKED) == 60
    missed = [
        (question, right, found[:3])
        for (right, *_), question, found in zip(ASKED, typed, answers, strict=True)
        if not set(right.split()) & set(found[:3])
    ]
    assert missed == []


def test_found_words_are_marked(site: str, browser: Any) -> None:
    """What is shown of a result holds the words of the question, one of them written in another form."""
    screen(browser, 1280, "light")
    browser.get(f"{site}/en/index.html")
    wait = WebDriverWait(browser, PATIENCE)
    browser.find_element(By.CSS_SELECTOR, ".md-search__button").click()
    wait.until(lambda driver: driver.execute_script(OPEN))
    browser.switch_to.active_element.send_keys("how do I continue after a crash")
    assert wait.until(lambda driver: {"continues", "continuing", "continued"} & set(driver.execute_script(MARKED)))


@pytest.mark.parametrize("page", ["index", "guides/launch"])
def test_the_switch_of_languages_keeps_the_page(site: str, browser: Any, page: str) -> None:
    for code, other in (("en", "zh"), ("zh", "en")):
        browser.get(f"{site}/{code}/{page}.html")
        for kind in ("a.md-select__link", "link[rel~=alternate]"):
            link = browser.find_element(By.CSS_SELECTOR, f"{kind}[hreflang={other}]")
            assert link.get_property("href") == f"{site}/{other}/{page}.html"


PAGES = ("index", "guides/plan", "guides/migration", "concepts/strategies")


@pytest.mark.parametrize(("code", "scheme", "width"), [("en", "light", 1280), ("zh", "dark", 390)])
def test_pages_fit_and_ask_nobody_else(site: str, browser: Any, code: str, scheme: str, width: int) -> None:
    screen(browser, width, scheme)
    browser.get_log("performance")
    for page in PAGES:
        browser.get(f"{site}/{code}/{page}.html")
        wide, broken = browser.execute_script(
            "return [document.documentElement.scrollWidth > innerWidth,"
            " [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)]"
        )
        assert (page, wide, broken) == (page, False, [])
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in asked if one["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if not url.startswith((site, "data:", "blob:", "chrome:"))] == []
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
