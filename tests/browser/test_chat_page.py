"""The chat page in a real browser: versions, reasoning, broken streams, hostile text, keys, roles, a phone.

The page is the real one; most streams are played by a small server, because tiny models do not write them on purpose.
"""

from __future__ import annotations

import threading

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from browser.chat_page import accessible, ask, bodies, choose, contents, is_idle, press, tab_to
from browser.chromium import NEEDED, find, texts, until
from browser.openai_streams import DONE, call, event, text

pytestmark = NEEDED


def test_versions_of_answers_and_questions_with_what_follows_each(page, player):
    player.plays("one", text("a1"), text("a2"), text("b1"), text("c1"))
    ask(page, "q1")
    press(page, "Again")
    until(lambda: bodies(page) == ["q1", "a2"] and is_idle(page))
    ask(page, "q2")
    assert contents(player.asked[-1]) == ["q1", "a2", "q2"]
    assert texts(page, ".versions [aria-hidden]") == ["2/2"]
    press(page, "Previous version", at=1)
    assert bodies(page) == ["q1", "a1"]
    assert find(page, "#status").text == "Version 1 of 2"
    press(page, "Next version", at=1)
    assert bodies(page) == ["q1", "a2", "q2", "b1"]
    press(page, "Edit", at=0)
    area = find(page, "article.mine textarea")
    area.send_keys("!", Keys.ENTER)
    until(lambda: bodies(page) == ["q1!", "c1"] and is_idle(page))
    assert contents(player.asked[-1]) == ["q1!"]
    page.refresh()
    until(lambda: bodies(page) == ["q1!", "c1"])
    press(page, "Previous version", at=0)
    assert bodies(page) == ["q1", "a2", "q2", "b1"]
    page.refresh()
    until(lambda: bodies(page) == ["q1", "a2", "q2", "b1"])


def test_an_edit_that_is_cancelled_changes_nothing(page, player):
    player.plays("one", text("a"))
    ask(page, "q")
    press(page, "Edit", at=0)
    area = find(page, "article.mine textarea")
    # Enter and Escape of a word that is being composed belong to the input method.
    for key in ("Enter", "Escape"):
        typed = "new KeyboardEvent('keydown', {key: arguments[1], isComposing: true, bubbles: true})"
        page.execute_script(f"arguments[0].dispatchEvent({typed})", area, key)
    assert area.is_displayed()
    area.send_keys("x", Keys.ESCAPE)
    assert bodies(page) == ["q", "a"]
    assert page.switch_to.active_element.text == "Edit"
    assert len(player.asked) == 1


def test_reasoning_that_a_server_left_in_the_text_is_folded(page, player):
    inside, after = threading.Event(), threading.Event()
    pieces = [
        event({"content": "\n<thi"}),
        event({"content": "nk>a\nb</th"}),
        inside,
        event({"content": "ink>\n\nanswer"}),
        after,
    ]
    player.plays("one", [*pieces, event(finish="stop"), DONE])
    find(page, "#say").send_keys("q", Keys.ENTER)
    until(lambda: bodies(page, "article.theirs .reasoning") == ["Reasoning\na\nb"])
    assert "<" not in texts(page, "article.theirs .body")[0]
    inside.set()
    until(lambda: bodies(page, "article.theirs .body") == ["Reasoning\nanswer"])
    after.set()
    until(lambda: is_idle(page))
    player.plays("one", text("<think>never", " closed"), text("<", "b> is bold"), text("2 <think> 3"), text("<thin"))
    for question, answer in (
        ("q2", "Reasoning\nnever closed"),
        ("q3", "<b> is bold"),
        ("q4", "2 <think> 3"),
        ("q5", "<thin"),
    ):
        ask(page, question)
        assert bodies(page)[-1] == answer
    assert contents(player.asked[-1]) == ["q", "answer", "q3", "<b> is bold", "q4", "2 <think> 3", "q5"]


def test_a_stream_that_breaks_keeps_what_came(page, player):
    torn = [
        [event({"content": "half"})],
        [event({"content": "half"}), "data: {not json\n\n"],
        [event({"content": "half"}), "data: null\n\n"],
    ]
    player.plays("one", *torn, [event({"content": "half"}), event(error={"message": "out of memory"})])
    for _ in torn:
        ask(page, "q")
        assert bodies(page)[-1] == "half\nThe answer broke off: the connection or the server has ended."
    ask(page, "q")
    assert bodies(page)[-1] == "half\nout of memory"
    player.plays("one", text("whole"))
    press(page, "Try again")
    until(lambda: bodies(page)[-1] == "whole" and is_idle(page))
    crlf = "".join(text("with", " CR")).replace("\n", "\r\n")
    player.plays("one", [crlf[:40], crlf[40:51], crlf[51:]])
    ask(page, "q")
    assert bodies(page)[-1] == "with CR"


def test_hostile_names_and_contents_stay_text(page, player):
    evil = '<img src=x onerror="window.stolen=1">'
    name = f"{evil}\u202e" + "n" * 300
    player.models = [name, "two"]
    page.refresh()
    until(lambda: find(page, "#model").get_attribute("value") == name)
    choose(page, "#second", name)
    fence = "`" * 5
    deltas = [
        call(10**9, id=evil, name=evil + "w" * 500, arguments=f"{fence}\n{evil}"),
        call(-1, id="__proto__", name="constructor", arguments='{"__proto__": "' + "x" * 3000 + '"}'),
        event({"tool_calls": {"index": 0}}),
        event({"tool_calls": [None, 3, {"function": 4}], "content": [evil]}),
        event({"content": f"<think>{evil}</think>{evil}"}),
        event(finish="tool_calls"),
        DONE,
    ]
    player.plays(name, deltas, deltas)
    ask(page, evil, answers=2)
    assert page.execute_script("return [window.stolen, document.images.length]") == [None, 0]
    for width in (1200, 390):
        page.set_window_size(width, 800)
        assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        fits = "(one) => one.scrollWidth <= one.clientWidth + 1"
        assert page.execute_script(f"return [...document.querySelectorAll('#log .column')].every({fits})")
    assert evil in texts(page, ".call .name")[0]
    page.refresh()
    until(lambda: len(texts(page, ".column")) == 2)
    assert page.execute_script("return [window.stolen, document.images.length]") == [None, 0]
    assert not page.get_log("browser")


def test_keys_alone_reach_versions_columns_and_results(page, player):
    player.plays("one", text("a1"), text("a2"))
    ask(page, "q")
    tab_to(page, "Again").send_keys(Keys.ENTER)
    until(lambda: bodies(page) == ["q", "a2"] and is_idle(page))
    assert page.switch_to.active_element.get_attribute("id") == "say"
    tab_to(page, "Previous version").send_keys(Keys.ENTER)
    assert bodies(page) == ["q", "a1"]
    assert page.switch_to.active_element.get_attribute("aria-label") == "Next version"  # the other cannot be pressed
    page.switch_to.active_element.send_keys(Keys.SPACE)
    assert bodies(page) == ["q", "a2"]
    tab_to(page, "second").send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    player.plays("one", [call(0, id="c", name="f", arguments="{}"), event(finish="tool_calls"), DONE], text("got it"))
    player.plays("two", text("2"))
    tab_to(page, "say").send_keys("q2", Keys.ENTER)
    until(lambda: texts(page, ".column textarea") and is_idle(page))
    tab_to(page, "Result of f").send_keys("7", Keys.ENTER)
    until(lambda: "got it" in texts(page, ".column .body") and is_idle(page))
    tab_to(page, "Continue with this one").send_keys(Keys.ENTER)
    assert bodies(page)[-1] == "got it"
    assert texts(page, ".column") == []


def test_roles_and_names_for_a_screen_reader(page, player):
    player.plays(
        "one", text("a1"), text("a2"), [call(0, id="c", name="f", arguments="{}"), event(finish="tool_calls"), DONE]
    )
    player.plays("two", text("2"))
    ask(page, "q")
    press(page, "Again")
    until(lambda: bodies(page) == ["q", "a2"] and is_idle(page))
    choose(page, "#second", "two")
    ask(page, "q2", answers=2)
    found = accessible(page)
    for wanted in (
        ("log", "Conversation"),
        ("combobox", "Model"),
        ("combobox", "Compare with"),
        ("group", "Versions"),
        ("button", "Previous version"),
        ("button", "Next version"),
        ("article", "You"),
        ("article", "one"),
        ("article", "two"),
        ("textbox", "Result of f"),
        ("button", "Send results"),
        ("button", "Continue with this one"),
        ("status", ""),
    ):
        assert wanted in found, wanted
    assert ("StaticText", "Version 2 of 2") in found
    assert ("StaticText", "2/2") not in found
    assert all(name for role, name in found if role in ("button", "combobox", "textbox", "article"))


def test_chinese_dark_and_a_phone(page, player):
    choose(page, "#language", "zh")
    choose(page, "#theme", "dark")
    choose(page, "#second", "two")
    player.plays("one", text("长" * 400), text("再"))
    player.plays("two", [call(0, id="c", name="f", arguments="{}"), event(finish="tool_calls"), DONE])
    ask(page, "问题", answers=2)
    press(page, "重新回答", ".column", 0)
    until(lambda: texts(page, ".column .body")[0] == "再" and is_idle(page))
    assert texts(page, ".typing label span") == ["f 的结果"]
    assert "用这个回答继续" in texts(page, ".column .tools")[-1]
    assert (
        page.execute_script("return getComputedStyle(document.querySelector('.column')).backgroundColor")
        == "rgb(24, 29, 33)"
    )
    page.set_window_size(390, 800)
    upper, lower = (column.rect for column in page.find_elements(By.CSS_SELECTOR, ".column"))
    assert upper["x"] == lower["x"]
    assert upper["y"] + upper["height"] < lower["y"]
    for axis in ("Width", "Height"):
        assert page.execute_script(f"return document.documentElement.scroll{axis} <= window.inner{axis}")
    press(page, "上一个版本", ".column", 0)
    assert texts(page, ".column .body")[0] == "长" * 400
