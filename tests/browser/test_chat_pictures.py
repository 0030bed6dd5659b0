"""Pictures in the chat page: a real browser, and a real server with a tiny model that sees beside one that does not."""

from __future__ import annotations

import base64
import io
import json

import pytest
import torch
from PIL import Image
from selenium.webdriver.common.keys import Keys

from anabatic.data.vision.rule_files import read_picture_rules
from anabatic.infer.engine import Engine
from anabatic.infer.picture_prompts import make_picture_reader
from anabatic.infer.server.model_registry import ServedModel
from anabatic.models.pretrained import prepare_model
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from browser.chat_page import ask, bodies, choose, is_idle, opened, press, store, stored, tab_to
from browser.chromium import NEEDED, find, texts, until
from suite.tiny_vision import build_model, build_tokenizer, draw_shape, save_seeing_model
from unit.infer.server.running import catalogue_of, serving

pytestmark = NEEDED

WATCH = """window.sent = []; const real = fetch;
window.fetch = (...all) => { if (all[1]?.body) sent.push(all[1].body); return real(...all); }"""
"""Keeps the bodies of what the page asks."""

GIVE = """const [css, kind, names, uris, text] = arguments;
const bytes = (uri) => Uint8Array.from(atob(uri.split(",")[1]), (one) => one.charCodeAt(0));
const data = new DataTransfer();
uris.forEach((uri, at) => data.items.add(new File([bytes(uri)], names[at], { type: uri.slice(5, uri.indexOf(";")) })));
if (text) { data.setData("text/html", text); data.setData("text/plain", text); }
const given = kind === "paste" ? { clipboardData: data } : { dataTransfer: data };
const made = new (kind === "paste" ? ClipboardEvent : DragEvent)(kind, { ...given, bubbles: true, cancelable: true });
return !document.querySelector(css).dispatchEvent(made);"""
"""Pastes or drops files onto an element; returns whether the page took them."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = save_seeing_model(tmp_path_factory.mktemp("sees"))
    model, tokenizer = prepare_model(build_model(), torch.device("cpu")).eval(), build_tokenizer()
    reader = make_picture_reader(tokenizer, read_picture_rules(folder, model.config.to_dict()))
    sees = ServedModel("sees", Engine(model, tokenizer, max_batch=2, max_len=512), model, pictures=reader)
    text_tokenizer = build_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    blind = build_random_model(len(text_tokenizer), seed=0, max_len=256)
    catalogue = catalogue_of({"blind": (Engine(blind, text_tokenizer, max_batch=2, max_len=256), blind)})
    catalogue.models = [sees, *catalogue.models]
    with serving(catalogue) as running:
        yield running


@pytest.fixture
def page(browser, server):
    opened(browser, server.url).execute_script(WATCH)
    return browser


@pytest.fixture
def shape(tmp_path):
    """A file with a red square."""
    return draw_shape(tmp_path / "red.png", "red", "square")


@pytest.fixture
def photo(tmp_path):
    """A large file that does not compress, of a camera that was held upright."""
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation
    Image.effect_noise((3000, 1500), 90).convert("RGB").save(tmp_path / "photo.jpg", quality=95, exif=exif)
    return tmp_path / "photo.jpg"


def uri_of(path, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def decoded(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def until_shown(page, count):
    until(lambda: len(page.find_elements("css selector", "#pictures img")) == count)


def sent_parts(page, at=-1):
    """The content of the last message of a request."""
    return json.loads(page.execute_script("return sent.at(arguments[0])", at))["messages"][-1]["content"]


def test_picked_pictures_are_sent_and_seen_by_all_that_follows(page, server, shape):
    blue = draw_shape(shape.with_name("blue.png"), "blue", "circle", (96, 64))
    find(page, "#files").send_keys(f"{shape}\n{blue}")
    until_shown(page, 2)
    ask(page, "What is it?")
    first, second, text = sent_parts(page)
    assert text == {"type": "text", "text": "What is it?"}
    assert [decoded(one["image_url"]["url"]).convert("RGB").tobytes() for one in (first, second)] == [
        Image.open(path).tobytes() for path in (shape, blue)
    ]
    assert texts(page, "#pictures") == [""]
    assert len(page.find_elements("css selector", "article.mine img")) == 2
    assert not texts(page, "article .bad")
    question = {"role": "user", "content": [first, second, text]}
    answer = server.post("/v1/chat/completions", {"messages": [question]}).json()["choices"][0]["message"]["content"]
    assert stored(page)[0]["turns"][1]["content"] == answer

    page.refresh()
    page.execute_script(WATCH)
    until(lambda: find(page, "#model").get_attribute("value"))
    ask(page, "And now?")
    assert json.loads(page.execute_script("return sent[0]"))["messages"][0] == question
    press(page, "Edit", at=0)
    press(page, "Remove picture 1", at=0)
    find(page, "article textarea").send_keys(" Again", Keys.ENTER)
    until(lambda: bodies(page, "article.mine .body") == ["What is it? Again"] and is_idle(page))
    assert sent_parts(page) == [second, {"type": "text", "text": "What is it? Again"}]
    press(page, "Again")
    until(lambda: len(page.execute_script("return sent")) == 3 and is_idle(page))
    assert sent_parts(page) == sent_parts(page, -2)
    press(page, "Previous version", at=0)
    assert len(page.find_elements("css selector", "article.mine img")) == 2
    find(page, "article.mine img").click()
    assert find(page, "dialog.large img").get_attribute("src") == first["image_url"]["url"]
    find(page, "dialog").send_keys(Keys.ESCAPE)
    until(lambda: not page.find_elements("css selector", "dialog"))
    assert not page.get_log("browser")


def test_pasted_and_dropped_pictures_and_taking_them_away_by_keys(page, shape):
    uri = uri_of(shape)
    assert page.execute_script(GIVE, "#say", "paste", ["a.png"], [uri])
    assert page.execute_script(GIVE, "#log", "drop", ["b.png", "c.png"], [uri, uri])
    until_shown(page, 3)
    assert not page.execute_script(GIVE, "#say", "paste", ["cells.png"], [uri], "1 2")
    tab_to(page, "Remove picture 3").send_keys(Keys.ENTER)
    assert page.switch_to.active_element.get_attribute("aria-label") == "Remove picture 2"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    until_shown(page, 1)
    find(page, "#say").send_keys(Keys.ENTER)
    until(lambda: len(texts(page, "article.theirs")) == 1 and is_idle(page))
    assert [part["type"] for part in sent_parts(page)] == ["image_url"]
    choose(page, "#language", "zh")
    assert find(page, "#add").get_attribute("aria-label") == "添加图片"


def test_what_is_no_picture_is_refused_and_a_photo_is_made_smaller(page, tmp_path, photo):
    (tmp_path / "notes.png").write_text("text")
    (tmp_path / "drawing.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>')
    for name, kind in (("notes.png", "image/png"), ("drawing.svg", "image/svg+xml"), ("notes.png", "text/plain")):
        page.execute_script(GIVE, "#log", "drop", [name], [uri_of(tmp_path / name, kind)])
        until(lambda name=name: find(page, "#status").text.startswith(f"{name} is no picture that this browser reads"))
        assert "bad" in find(page, "#status").get_attribute("class")
        page.execute_script("document.querySelector('#status').textContent = ''")
    find(page, "#files").send_keys(str(photo))
    until_shown(page, 1)
    ask(page, "?")
    url = sent_parts(page)[0]["image_url"]["url"]
    assert len(url) <= 900_000
    image = decoded(url)
    assert (image.format, round(image.height / image.width, 1), dict(image.getexif())) == ("JPEG", 2, {})
    assert not texts(page, "article .bad")


def test_a_model_of_text_is_shown_none(page, shape):
    assert find(page, "#add").is_displayed()
    choose(page, "#model", "blind")
    assert not find(page, "#add").is_displayed()
    assert page.execute_script(GIVE, "#log", "drop", ["a.png"], [uri_of(shape)])
    until(lambda: find(page, "#status").text == "blind sees no pictures.")
    choose(page, "#model", "sees")
    find(page, "#files").send_keys(str(shape))
    until_shown(page, 1)
    choose(page, "#model", "blind")
    find(page, "#say").send_keys("x", Keys.ENTER)
    until(lambda: find(page, "#status").text == "blind sees no pictures.")
    assert find(page, "#say").get_attribute("value") == "x"
    choose(page, "#model", "sees")
    choose(page, "#second", "blind")
    ask(page, "", answers=2)
    assert texts(page, "article .bad") == ["blind sees no pictures"]
    page.refresh()
    until(lambda: len(texts(page, "article.theirs")) == 2)
    assert len(page.find_elements("css selector", "article.mine img")) == 1


def test_a_full_storage_keeps_the_texts_without_pictures(page, photo):
    question = {"role": "user", "content": "seen", "pictures": [0], "parent": -1}
    picture = "data:image/jpeg;base64," + "A" * 1_700_000
    rest = {"version": 2, "turns": [question], "pictures": [picture]}
    store(page, [{"id": str(at), "at": at, **rest} for at in (3, 2, 1)])
    page.execute_script(WATCH)
    until(lambda: len(page.find_elements("css selector", "article.mine img")) == 1)
    find(page, "#files").send_keys(str(photo))
    until_shown(page, 1)
    ask(page, "and this?")
    until(lambda: "pictures are not stored" in find(page, "#status").text)
    assert [[bool(one) for one in talk["pictures"]] for talk in stored(page)] == [[True, True], [True], [False]]
    page.execute_script("localStorage.setItem('anabatic.talks', '[]'); localStorage.other = 'x'.repeat(4_500_000)")
    press(page, "Again")
    until(lambda: len(page.execute_script("return sent")) == 2 and is_idle(page))
    assert [part["type"] for part in sent_parts(page)] == ["image_url", "text"]
    assert [(talk["pictures"], talk["turns"][0]["content"]) for talk in stored(page)] == [
        (["", ""], "seen"), ([""], "seen"), ([""], "seen"),
    ]  # fmt: skip
    page.execute_script("localStorage.removeItem('other')")
    page.refresh()
    until(lambda: texts(page, "article.mine .pictures") == ["Picture not stored"] * 2)
    page.execute_script(WATCH)
    press(page, "Again")
    until(lambda: page.execute_script("return sent.length") == 1 and is_idle(page))
    assert sent_parts(page) == "and this?"
