"""Two models side by side on the chat page in a real browser."""

from __future__ import annotations

import socket
import threading

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from anabatic.infer.engine import Engine
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from browser.chat_page import ask, bodies, choose, contents, is_idle, opened, press, stored
from browser.chromium import NEEDED, find, texts, until
from browser.openai_streams import DONE, event, playing, text
from e2e import command
from unit.infer.scripted import says
from unit.infer.server.running import catalogue_of, serving

pytestmark = NEEDED


def test_two_models_answer_side_by_side_each_in_its_own_conversation(page, player):
    choose(page, "#second", "two")
    release = threading.Event()
    player.plays("one", [event({"content": "one begins"}), release, *text(", one ends")], text("1b"))
    player.plays("two", [event({"content": "two begins"}), release, *text(", two ends")], text("2b"))
    find(page, "#say").send_keys("q1", Keys.ENTER)
    until(lambda: texts(page, ".column .body") == ["one begins", "two begins"])  # both at once
    assert texts(page, ".column h2") == ["one", "two"]
    left, right = (column.rect for column in page.find_elements(By.CSS_SELECTOR, ".column"))
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]
    release.set()
    until(lambda: is_idle(page))
    ask(page, "q2", answers=2)
    assert contents(player.asked_of("one")[-1]) == ["q1", "one begins, one ends", "q2"]
    assert contents(player.asked_of("two")[-1]) == ["q1", "two begins, two ends", "q2"]
    assert texts(page, "article.mine .body") == ["q1", "q2"]
    page.refresh()
    until(lambda: texts(page, ".column .body") == ["one begins, one ends", "two begins, two ends", "1b", "2b"])
    until(lambda: find(page, "#second").get_attribute("value") == "two")
    assert sum("token" in how for how in texts(page, ".column .how")) == 4
    # A question of both is edited in both; its versions are switched in both.
    player.plays("one", text("1c"))
    player.plays("two", text("2c"))
    press(page, "Edit", "article.mine")
    find(page, "article.mine textarea").send_keys("!", Keys.ENTER)
    until(lambda: texts(page, ".column .body")[2:] == ["1c", "2c"] and is_idle(page))
    press(page, "Previous version", "article.mine")
    assert texts(page, ".column .body")[2:] == ["1b", "2b"]
    # The right one goes on alone; the left one stays as a version.
    press(page, "Continue with this one", ".column")
    assert bodies(page) == ["q1", "two begins, two ends", "q2", "2b"]
    assert [find(page, css).get_attribute("value") for css in ("#model", "#second")] == ["two", ""]
    player.plays("two", text("alone"))
    ask(page, "q3")
    assert contents(player.asked[-1]) == ["q1", "two begins, two ends", "q2", "2b", "q3"]
    press(page, "Previous version", at=1)
    assert bodies(page) == ["q1", "one begins, one ends", "q2", "1b"]
    assert not page.get_log("browser")


def test_one_that_fails_leaves_the_other_alone_and_is_asked_again(page, player):
    choose(page, "#second", "two")
    release = threading.Event()
    player.plays("one", [event({"content": "slow"}), release, *text(" end")])
    player.plays("two", 503, text("now"))
    find(page, "#say").send_keys("q1", Keys.ENTER)
    until(lambda: texts(page, ".column .bad") == ["status 503 of two"])
    assert not is_idle(page)
    press(page, "Try again", ".column")
    until(lambda: texts(page, ".column .body") == ["slow", "now"])
    assert not is_idle(page)  # the left one was not disturbed
    release.set()
    until(lambda: is_idle(page))
    assert texts(page, ".column .body") == ["slow end", "now"]
    assert texts(page, ".column .versions [aria-hidden]") == ["2/2"]


def test_one_or_both_answers_are_stopped(page, player):
    never = threading.Event()
    choose(page, "#second", "one")  # the same model twice
    for word in ("left", "right", "left", "right"):
        player.plays("one", [event({"content": word}), never, DONE])
    try:
        find(page, "#say").send_keys("q1", Keys.ENTER)
        until(lambda: sorted(texts(page, ".column .body")) == ["left", "right"])
        assert texts(page, ".column h2") == ["one · 1", "one · 2"]
        press(page, "Stop", ".column", 0)
        until(lambda: "stopped" in texts(page, ".column .how")[0])
        assert "stopped" not in texts(page, ".column .how")[1]
        find(page, "#say").send_keys(Keys.ESCAPE)
        until(lambda: is_idle(page) and "stopped" in texts(page, ".column .how")[1])
        find(page, "#say").send_keys("q2", Keys.ENTER)
        until(lambda: len([one for one in texts(page, ".column .body") if one]) == 4)
        page.refresh()  # whoever leaves stops both
        until(lambda: ["stopped" in how for how in texts(page, ".column .how")] == [True] * 4)
        assert texts(page, ".bad:not(:empty)") == []
    finally:
        never.set()


def test_real_models_answer_side_by_side(browser, tmp_path):
    tokenizer = build_byte_tokenizer(tmp_path)
    models = {name: build_random_model(len(tokenizer), seed=seed, max_len=2048) for name, seed in (("a", 0), ("b", 1))}
    parts = {name: (Engine(model, tokenizer, max_batch=2, max_len=2048), model) for name, model in models.items()}
    with serving(catalogue_of(parts)) as server:
        page = opened(browser, server.url)
        choose(page, "#second", "b")
        ask(page, "one", answers=2)
        ask(page, "two", answers=2)
        turns = stored(page)[0]["turns"]
        for name in "ab":
            first, second = [turn["content"] for turn in turns if turn.get("model") == name]
            messages = [{"role": "user", "content": "one"}]
            for answer, question in ((first, "two"), (second, None)):
                body = {"model": name, "messages": messages}
                message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
                assert answer == message["content"]
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        browser.get("about:blank")


def test_names_stay_in_view_while_long_answers_are_scrolled(page, player):
    player.models = ["one", "two" + "2" * 400]
    page.refresh()
    until(lambda: len(texts(page, "#second option")) == 3)
    choose(page, "#second", player.models[1])
    for name in player.models:
        player.plays(name, text("line\n\n" * 100))
    ask(page, "q", answers=2)
    assert page.execute_script("return document.querySelector('#log').scrollTop") > 1000
    top = find(page, "#log").rect["y"]
    heads = [one.rect for one in page.find_elements(By.CSS_SELECTOR, ".column h2")]
    assert all(abs(head["y"] - top) < 5 for head in heads)
    assert all(head["height"] < 90 for head in heads)


def test_a_server_that_dies_in_mid_answer_is_told_in_both_columns(browser):
    with playing() as player:
        page = opened(browser, player.url)
        choose(page, "#second", "two")
        end = threading.Event()
        for name in ("one", "two"):
            player.plays(name, [event({"content": f"{name} began"}), end])  # the connection closes without an end
        find(page, "#say").send_keys("q", Keys.ENTER)
        until(lambda: texts(page, ".column .body") == ["one began", "two began"])
        end.set()
        until(lambda: is_idle(page))
        assert all("broke off" in body for body in texts(page, ".column .body"))
    ask(page, "q2", answers=2)
    assert texts(page, ".column .bad")[2:] == ["The server cannot be reached."] * 2


def test_a_real_server_is_killed_in_mid_answer(browser, tmp_path):
    """`anabatic serve` with a model that never ends, and nothing left of it from one moment to the next."""
    tokenizer = build_byte_tokenizer(tmp_path / "tokenizer")
    model = says(tokenizer, ["x", "y"], max_len=2048, endless=True)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", tmp_path / "model", "--port", port, "--device.type", "cpu", "--sampling.max-new-tokens", 1900]
    process = command.start(words, tmp_path / "cache")
    try:
        command.wait_for(process, lambda: is_listening(port))
        page = opened(browser, f"http://127.0.0.1:{port}/")
        choose(page, "#second", find(page, "#model").get_attribute("value"))
        find(page, "#say").send_keys("q", Keys.ENTER)
        until(lambda: all(texts(page, ".column .body")) and len(texts(page, ".column")) == 2)
    finally:
        command.kill(process)
        command.end(process, None)
    until(lambda: is_idle(page))
    assert all("xy" in body and "broke off" in body for body in texts(page, ".column .body"))
    press(page, "Try again", ".column", 0)
    until(lambda: "The server cannot be reached." in texts(page, ".column .body")[0] and is_idle(page))
    assert "broke off" in texts(page, ".column .body")[1]
    browser.get("about:blank")


def is_listening(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
