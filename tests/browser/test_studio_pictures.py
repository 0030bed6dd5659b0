"""Rows with pictures in the studio's preview: small copies, tokens, names that are no markup, and what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from browser.chromium import NEEDED, find, texts, until
from browser.studio_page import fits_the_window, recipe
from suite.tiny_vision import draw_shape, save_seeing_model
from unit.studio.serving import studio

pytestmark = NEEDED
HOSTILE_NAME = "<img src=x onerror=stolen=1>.png"
LOADED = "return [...document.querySelectorAll('#rows img')].map((one) => [one.naturalWidth, one.naturalHeight])"


def write_rows(folder: Path, name: str, *rows: list[str]) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": "<image>" * len(images) + "What is it?"},
                {"role": "assistant", "content": "A shape."},
            ],
            "images": images,
        }
        for images in rows
    ]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A studio in a folder with a model that sees and rows with pictures, one of them in the row itself."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "runs").mkdir()
    save_seeing_model(folder / "base")
    draw_shape(folder / "wide.png", "red", "circle", (400, 200))
    draw_shape(folder / HOSTILE_NAME, "green", "square", (64, 64))
    uri = "data:image/png;base64," + base64.b64encode((folder / "wide.png").read_bytes()).decode()
    write_rows(folder, "rows.jsonl", ["wide.png", HOSTILE_NAME], [uri])
    (folder / "page.png").write_text("<svg onload='stolen=1'/>")
    write_rows(folder, "bad.jsonl", ["page.png"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with studio(folder / "runs") as running:
            yield running


def preview(browser: Any, server: Any, file: str) -> None:
    browser.get(server.url)
    browser.execute_script("localStorage.clear()")
    browser.get(f"{server.url}/#/new?command=sft&model=base")
    until(lambda: "model: base" in recipe(browser))
    find(browser, "#recipe").send_keys(Keys.CONTROL, Keys.END)
    find(browser, "#recipe").send_keys(
        f"data: {{train: [{file}]}}\nvision: {{max_pixels: 8192}}\nbatch: {{seq_len: 128}}\n"
    )
    until(lambda: find(browser, "#submit").is_enabled())
    find(browser, "#preview").click()


def test_rows_show_their_pictures_and_tokens(browser: Any, server: Any) -> None:
    preview(browser, server, "rows.jsonl")
    until(lambda: browser.execute_script(LOADED) == [[160, 80], [64, 64], [160, 80]], seconds=90)  # it imports torch
    captions = [text.replace("\u00a0", " ") for text in texts(browser, "#rows figcaption")]
    assert captions == [
        "wide.png 400 × 200\n8 tokens",
        f"{HOSTILE_NAME} 64 × 64\n4 tokens",
        "data: 400 × 200\n8 tokens",
    ]
    sources = browser.execute_script("return [...document.querySelectorAll('#rows img')].map((one) => one.src)")
    assert all(source.startswith("data:image/jpeg;base64,") and len(source) < 20_000 for source in sources)
    assert browser.execute_script("return window.stolen") is None
    assert texts(browser, "#rows pre .learned")[0] == "A shape.<|im_end|>"
    browser.set_window_size(500, 900)
    assert fits_the_window(browser)
    browser.set_window_size(1200, 800)
    assert not [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]


def test_what_is_no_picture_is_refused_by_name(browser: Any, server: Any) -> None:
    preview(browser, server, "bad.jsonl")
    until(lambda: "not a picture" in " ".join(texts(browser, "#rows .bad")), seconds=90)
    assert "page.png" in find(browser, "#rows .bad").text and not browser.execute_script(LOADED)
    assert browser.execute_script("return window.stolen") is None
