"""The pages in a real browser, against a real server with tiny models."""

from __future__ import annotations

import time

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from anabatic.infer.engine import Engine
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from browser.chromium import NEEDED, find, texts, until
from unit.infer.scripted import says
from unit.infer.server.running import KEY, catalogue_of, serving
from unit.web_libraries import NEEDS_LIBRARIES

pytestmark = NEEDED


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    tokenizer = build_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    models = {
        name: build_random_model(len(tokenizer), seed=seed, max_len=2048) for name, seed in (("one", 0), ("two", 1))
    }
    taught = build_byte_tokenizer(tmp_path_factory.mktemp("taught"))
    taught.add_tokens(["<think>", "</think>"])
    thinking = says(taught, ["<think>", "x", "y", "</think>", "b"], 2048)
    parts = {name: (Engine(model, tokenizer, max_batch=2, max_len=2048), model) for name, model in models.items()}
    return parts | {"thinking": (Engine(thinking, taught, max_batch=2, max_len=2048), thinking)}


@pytest.fixture(scope="module")
def server(parts):
    with serving(catalogue_of(parts)) as running:
        yield running


@pytest.fixture
def page(browser, server):
    browser.get(server.url)
    browser.execute_script("localStorage.clear()")
    browser.get_log("browser")
    browser.refresh()
    until(lambda: find(browser, "#model").get_attribute("value") == "one")
    return browser


def ask(browser, text):
    """Type a question and wait for the end of its answer."""
    before = len(texts(browser, "article.theirs"))
    browser.execute_script("document.querySelector('#say').value = arguments[0]", text)
    find(browser, "#say").send_keys(Keys.ENTER)
    until(lambda: len(texts(browser, "article.theirs")) == before + 1)
    until(lambda: find(browser, "#log").get_attribute("aria-busy") == "false")
    return texts(browser, "article.theirs .body")[-1]


@pytest.fixture
def slow_steps(parts, monkeypatch):
    """A step takes the time of a large model's: an answer of 1,500 tokens is under way when the test leaves it."""
    engine = parts["one"][0]
    step = engine.step

    def step_slowly():
        time.sleep(0.02)
        step()

    monkeypatch.setattr(engine, "step", step_slowly)


WATCH = "const real = fetch; window.fetch = (...all) => { window.sent = all[1]?.body; return real(...all); }"
"""Keeps the body of what the page asks."""


def expected(server, messages, model="one"):
    answer = server.post("/v1/chat/completions", {"model": model, "messages": messages}).json()
    return answer["choices"][0]["message"]["content"]


def markdown(browser, text):
    """The HTML that the page makes of a text: it is asked through an answer that is put into its storage."""
    turns = [{"role": "assistant", "content": text, "model": text, "error": text}]
    talk = [{"id": "1", "at": 1, "title": text, "turns": turns}]
    browser.execute_script("localStorage.setItem('anabatic.talks', JSON.stringify(arguments[0]))", talk)
    browser.refresh()
    until(lambda: texts(browser, "article"))
    return find(browser, "article .body").get_attribute("innerHTML")


def test_a_conversation_is_streamed_kept_and_continued(page, server):
    said = ask(page, "Who is there? 你好")
    first = [{"role": "user", "content": "Who is there? 你好"}]
    answer = expected(server, first)
    stored = page.execute_script("return JSON.parse(localStorage.getItem('anabatic.talks'))")[0]["turns"]
    assert [turn["content"] for turn in stored] == ["Who is there? 你好", answer]
    assert said
    assert "tokens/s" in texts(page, "article.theirs .tools")[0]
    page.refresh()
    until(lambda: len(texts(page, "article")) == 2)
    ask(page, "and then?")
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
    stored = page.execute_script("return JSON.parse(localStorage.getItem('anabatic.talks'))")[0]["turns"]
    assert stored[3]["content"] == expected(server, second)
    assert texts(page, "#talks .talk") == ["Who is there? 你好"]


def test_again_edit_another_model_and_forget(page, server):
    ask(page, "one")
    page.find_elements(By.CSS_SELECTOR, "article.theirs .tools button")[1].click()
    until(lambda: find(page, "#log").get_attribute("aria-busy") == "false" and len(texts(page, "article")) == 2)
    page.find_elements(By.CSS_SELECTOR, "article.mine .tools button")[1].click()
    area = find(page, "article.mine textarea")
    area.clear()
    area.send_keys("two")
    find(page, "#model").send_keys("two")
    area.send_keys(Keys.ENTER)
    until(lambda: texts(page, "article.mine .body") == ["two"])
    until(lambda: find(page, "#log").get_attribute("aria-busy") == "false")
    turns = page.execute_script("return JSON.parse(localStorage.getItem('anabatic.talks'))")[0]["turns"]
    assert [(turn["parent"], turn["content"]) for turn in turns if turn["role"] == "user"] == [(-1, "one"), (-1, "two")]
    assert turns[-1]["content"] == expected(server, [{"role": "user", "content": "two"}], "two")
    assert len(texts(page, "article")) == 2
    find(page, "#new").click()
    assert texts(page, "article") == []
    page.execute_script("document.querySelector('#talks .icon').click()")
    assert texts(page, "#talks li") == []


def test_reasoning_is_folded_and_not_sent_again(page, server):
    find(page, "#model").send_keys("thinking")
    assert ask(page, "one").split() == ["Reasoning", "b"]
    box = find(page, "article.theirs details.reasoning")
    assert box.get_attribute("open") is None
    find(page, "article.theirs summary").click()
    assert texts(page, "article.theirs .body")[0].split() == ["Reasoning", "xy", "b"]
    (talk,) = page.execute_script("return JSON.parse(localStorage.getItem('anabatic.talks'))")
    assert [talk["turns"][1][key] for key in ("content", "reasoning")] == ["b", "xy"]
    page.execute_script(WATCH)
    ask(page, "two")
    sent = page.execute_script("return JSON.parse(window.sent).messages")
    assert [message["content"] for message in sent] == ["one", "b", "two"]
    assert page.execute_script("return getComputedStyle(document.querySelector('summary')).cursor") == "pointer"
    assert not page.get_log("browser")


def test_a_question_whose_answer_never_came_is_not_asked_again(page):
    turns = [
        {"role": "user", "content": "lost"},
        {"role": "assistant", "content": "", "error": "The server cannot be reached."},
        {"role": "user", "content": "answered"},
        {"role": "assistant", "content": "yes"},
    ]
    page.execute_script(
        "localStorage.setItem('anabatic.talks', JSON.stringify(arguments[0]))",
        [{"id": "1", "at": 1, "title": "t", "turns": turns}],
    )
    page.refresh()
    until(lambda: len(texts(page, "article")) == 4)
    assert "without any text" not in find(page, "#log").text
    page.execute_script(WATCH)
    ask(page, "next")
    sent = page.execute_script("return JSON.parse(window.sent).messages")
    assert [message["content"] for message in sent] == ["answered", "yes", "next"]


@pytest.mark.usefixtures("slow_steps")
def test_an_answer_can_be_stopped(page, server):
    find(page, "#settings-open").click()
    for name, value in (("max_tokens", "1500"), ("system", "Be long.")):
        find(page, f"#{name}").send_keys(value, Keys.TAB)
    find(page, "#say").send_keys("continue", Keys.ENTER)
    until(lambda: find(page, "#stop").is_displayed() and texts(page, "article.theirs .body")[0])
    find(page, "#stop").click()
    until(lambda: "stopped" in texts(page, "article.theirs .tools")[0])
    until(lambda: not server.catalogue.engines[0].is_busy)
    assert find(page, "#send").is_displayed()


def test_errors_are_told_and_can_be_tried_again(browser, parts):
    with serving(catalogue_of(parts), keys=[KEY]) as running:
        browser.get(running.url)
        until(lambda: "asks for a key" in find(browser, "#status").text)
        find(browser, "#settings-open").click()
        find(browser, "#key").send_keys(KEY, Keys.TAB)
        until(lambda: find(browser, "#model").get_attribute("value") == "one")
        ask(browser, "x " * 2000)
        assert "at most 2048 fit" in texts(browser, "article.theirs .bad")[0]
    find(browser, "#new").click()
    ask(browser, "is anybody there?")
    assert texts(browser, "article.theirs .bad") == ["The server cannot be reached."]


@NEEDS_LIBRARIES
def test_text_of_a_model_never_becomes_html(page):
    html = markdown(page, "<img src=x onerror=stolen=1> **bold <b>x</b>** [a](javascript:stolen=1) [b](https://b.org/)")
    assert "<img" not in html
    assert "<strong>bold &lt;b&gt;x&lt;/b&gt;</strong>" in html
    assert 'href="javascript' not in html
    assert 'href="https://b.org/"' in html
    assert page.execute_script("return [window.stolen, document.images.length]") == [None, 0]
    assert not page.get_log("browser")
    # The policy, should the page ever fail: a program that is not the page's own is not run, and nothing is fetched.
    page.execute_script(
        "const one = document.createElement('script'); one.text = 'stolen = 1'; document.body.append(one)"
    )
    assert page.execute_script("return window.stolen") is None
    assert len(page.get_log("browser")) == 1


def test_what_repeats_itself_without_end_is_still_shown(page):
    for text in ("> " * 6000 + "deep", "\n".join("  " * depth + "- x" for depth in range(1000))):
        markdown(page, text)
        assert page.execute_script("return document.querySelectorAll('blockquote, ul').length") < 100
    assert not page.get_log("browser")


@pytest.mark.usefixtures("slow_steps")
def test_whoever_leaves_the_page_has_stopped_the_answer(page):
    find(page, "#settings-open").click()
    find(page, "#max_tokens").send_keys("1500", Keys.TAB)
    find(page, "#say").send_keys("continue", Keys.ENTER)
    until(lambda: texts(page, "article.theirs .body")[0])
    page.refresh()
    until(lambda: "stopped" in texts(page, "article.theirs .tools")[0])
    assert texts(page, "article.theirs .bad") == []


def test_what_others_left_in_the_storage_does_not_break_the_page(page):
    for talks in ("{", '{"a": 1}', '[null, {"turns": 1}, {"turns": [{"role": "system", "content": 2}]}]'):
        page.execute_script("localStorage.setItem('anabatic.talks', arguments[0])", talks)
        page.execute_script("localStorage.setItem('anabatic.settings', arguments[0])", '{"language": "toString"}')
        page.refresh()
        assert texts(page, "#new") == ["New conversation"]
        assert texts(page, "#talks li") == []


@NEEDS_LIBRARIES
def test_markdown(page):
    text = (
        "# Head\n\nA *b* `c*d*` ~~e~~ f_g_h\nnext\n\n- x\n  - y\n- z\n\n3. three\n4. four\n\n> quoted\n\n"
        "| a | b |\n|---|--:|\n| 1 | `x\\|y` |\n\n```python\nprint('<b>')\n\n# no head\n```\n\n---\n\n```\nopen"
    )
    html = markdown(page, text)
    for piece in (
        "<h3>Head</h3>",
        "<em>b</em>",
        "<code>c*d*</code>",
        "<del>e</del>",
        "f_g_h<br>next",
        "<li>z</li>",
        '<ol start="3"><li>three</li><li>four</li></ol>',
        "<blockquote><p>quoted</p></blockquote>",
        '<td class="right"><code>x|y</code></td>',
        "print('&lt;b&gt;')\n\n# no head",
        "<hr>",
        "<code>open</code>",
    ):
        assert piece in html


def test_languages_colours_and_a_narrow_window(page):
    find(page, "#language").send_keys("中文")
    assert texts(page, "#new") == ["新对话"]
    assert page.execute_script("return document.documentElement.lang") == "zh-Hans"
    find(page, "#theme").send_keys("深色")
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 24)"
    page.set_window_size(420, 800)
    try:
        assert not find(page, "#new").is_displayed()
        find(page, "#side-open").click()
        until(lambda: find(page, "#new").is_displayed())
        assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        page.set_window_size(1200, 800)
