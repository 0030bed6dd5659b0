"""Calls of tools on the chat page in a real browser, and their results."""

from __future__ import annotations

import json
import threading

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from anabatic.infer.engine import Engine
from anabatic_testing.random_models import build_byte_tokenizer
from browser.chat_page import ask, bodies, choose, contents, is_idle, opened, press, stored
from browser.chromium import NEEDED, find, texts, until
from browser.openai_streams import DONE, call, event, text
from unit.infer.scripted import says
from unit.infer.server.running import catalogue_of, serving

pytestmark = NEEDED


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def set_tools(page, value):
    """Type into the field of the settings."""
    if not find(page, "#settings").is_displayed():
        find(page, "#settings-open").click()
    find(page, "#tools").clear()
    find(page, "#tools").send_keys(value, Keys.TAB)


def test_calls_come_bit_by_bit_and_their_results_go_back(page, player):
    set_tools(page, json.dumps(TOOLS))
    half, rest = threading.Event(), threading.Event()
    big = "12345678901234567890"
    pieces = [
        event({"reasoning_content": "think"}),
        event({"content": "Let me see."}),
        call(0, id="c0", name="weather", arguments='{"city": "Kö'),
        half,
        call(0, arguments=f'ln", "id": {big}}}'),
        rest,
        call(1, id="c1", name="weather", arguments='{"a": [1, {}]}'),  # whole, as some servers send it
        event(finish="tool_calls"),
        DONE,
    ]
    player.plays("one", pieces, text("It rains."), text("It snows."))
    find(page, "#say").send_keys("weather?", Keys.ENTER)
    until(lambda: texts(page, ".call pre") == ['{"city": "Kö'])
    assert texts(page, ".call .name") == ["weather"]
    assert texts(page, "article textarea") == []
    find(page, ".call summary").click()
    half.set()
    until(lambda: page.execute_script("return document.querySelector('.call pre').textContent").endswith("}"))
    assert find(page, ".call").get_attribute("open") is None  # it stays as the reader has left it
    find(page, ".call summary").click()
    assert texts(page, ".call pre") == [f'{{\n  "city": "Köln",\n  "id": {big}\n}}']
    rest.set()
    until(lambda: is_idle(page))
    assert texts(page, ".call pre")[1] == '{\n  "a": [\n    1,\n    {}\n  ]\n}'
    assert texts(page, ".bad:not(:empty)") == []
    assert "without any text" not in find(page, "#log").text
    assert player.asked[0]["tools"] == TOOLS
    first, second = page.find_elements(By.CSS_SELECTOR, "article textarea")
    assert [area.get_attribute("aria-label") for area in (first, second)] == ["Result of weather"] * 2
    first.send_keys("rain")
    press(page, "Send results")
    assert find(page, "#status").text == "Each call needs a result."
    assert page.switch_to.active_element == second
    second.send_keys('{"degrees": 3}', Keys.ENTER)
    until(lambda: bodies(page)[-1] == "It rains." and is_idle(page))
    calls = [
        {
            "id": "c0",
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"city": "Köln", "id": {big}}}'},
        },
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": [1, {}]}'}},
    ]
    asked = {"role": "assistant", "content": "Let me see.", "reasoning_content": "think", "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": "c0", "content": "rain"},
        {"role": "tool", "tool_call_id": "c1", "content": '{"degrees": 3}'},
    ]
    assert player.asked[1]["messages"] == [{"role": "user", "content": "weather?"}, asked, *results]
    # Results can be edited; what came of the first ones stays as a version.
    press(page, "Edit", at=2)
    find(page, "article textarea").send_keys("!", Keys.ENTER)
    until(lambda: bodies(page)[-1] == "It snows." and is_idle(page))
    assert player.asked[2]["messages"][2]["content"] == "rain!"
    page.refresh()
    until(lambda: bodies(page)[-1:] == ["It snows."])
    press(page, "Previous version", at=2)
    assert bodies(page)[-1] == "It rains."
    player.plays("one", text("Bye."))
    ask(page, "thanks")
    sent = player.asked[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert "reasoning_content" not in sent[1]
    assert not page.get_log("browser")


def test_calls_without_results_are_not_sent(page, player):
    both = [call(None, id="x", name="weather", arguments="{"), call(None, arguments="}"), call(None, id="y", name="w")]
    player.plays("one", [*both, event(finish="tool_calls"), DONE], text("yes"))
    ask(page, "weather?")
    assert texts(page, ".call .name") == ["weather", "w"]
    assert texts(page, ".call pre") == ["{}"]
    ask(page, "something else")
    assert contents(player.asked[-1]) == ["something else"]
    assert texts(page, "article textarea") == []


def test_each_column_has_its_own_calls(page, player):
    choose(page, "#second", "two")
    player.plays(
        "one", [call(0, id="c", name="f", arguments="{}"), event(finish="tool_calls"), DONE], text("done"), text("1")
    )
    player.plays("two", text("no tool"), text("2"))
    ask(page, "q", answers=2)
    find(page, ".column textarea").send_keys("42", Keys.ENTER)
    until(lambda: "done" in texts(page, ".column .body") and is_idle(page))
    assert len(player.asked_of("two")) == 1
    ask(page, "next", answers=2)
    roles = [[message["role"] for message in player.asked_of(name)[-1]["messages"]] for name in ("one", "two")]
    assert roles == [["user", "assistant", "tool", "assistant", "user"], ["user", "assistant", "user"]]
    assert texts(page, "article.mine .body")[-1] == "next"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[{", "not JSON"),
        ('{"type": "function"}', "a list"),
        ("[null]", "tool 1 must look like"),
        ('[{"type": "function", "function": {"name": "a b"}}]', "name of tool 1"),
        (json.dumps(TOOLS * 2), "two tools are named weather"),
    ],
)
def test_tools_that_are_wrong_are_not_sent(page, player, value, said):
    set_tools(page, value)
    assert said in find(page, "#tools-problem").text
    assert find(page, "#tools").get_attribute("aria-invalid") == "true"
    find(page, "#say").send_keys("q", Keys.ENTER)
    assert said in find(page, "#status").text
    assert find(page, "#say").get_attribute("value") == "q"
    assert not player.asked


def test_a_real_server_streams_a_call_and_takes_its_result(browser, tmp_path):
    """The model calls whatever it is asked; what it gets is seen in its prompt."""
    tokenizer = build_byte_tokenizer(tmp_path)
    pieces = ("<tool_call>", '\n{"name": "wea', 'ther", "arguments": {"town": "Os', 'lo 你"}}\n', "</tool_call>")
    tokenizer.add_tokens([piece for piece in pieces if piece != "<tool_call>"])
    model = says(tokenizer, pieces, max_len=1800)
    engine = Engine(model, tokenizer, max_batch=2, max_len=1800)
    with serving(catalogue_of({"caller": (engine, model)})) as server:
        page = opened(browser, server.url)
        set_tools(page, json.dumps(TOOLS))
        ask(page, "How is it in Oslo?")
        assert texts(page, ".call .name") == ["weather"]
        assert texts(page, ".call pre") == ['{\n  "town": "Oslo 你"\n}']
        find(page, "article textarea").send_keys("4 degrees", Keys.ENTER)
        until(lambda: len(texts(page, "article.theirs")) == 2 and is_idle(page))
        assert texts(page, ".bad:not(:empty)") == []
        assert texts(page, ".call .name") == ["weather"] * 2
        first, second = (turn for turn in stored(page)[0]["turns"] if turn["role"] == "assistant")
        assert first["calls"][0]["id"] != second["calls"][0]["id"]
        browser.get("about:blank")
