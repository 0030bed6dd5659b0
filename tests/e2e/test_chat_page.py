"""The chat page in a real browser: versions of turns, two models side by side, calls of tools, what breaks in a stream.

The page is the real one; most streams are played by a small server, because tiny models do not write them on purpose.
"""

from __future__ import annotations

import json
import threading

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from anabatic.infer.engine import Engine
from anabatic.testing.random_models import build_byte_tokenizer, build_random_model
from e2e.browser import NEEDED, find, texts, until
from e2e.openai_streams import DONE, call, event, playing, text
from unit.infer.server.running import catalogue_of, serving

pytestmark = NEEDED

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture
def player(browser):
    with playing() as one:
        yield one
        browser.get("about:blank")


@pytest.fixture
def page(browser, player):
    return opened(browser, player.url)


def opened(browser, url):
    """The page at an address, as a browser that was never there shows it."""
    browser.set_window_size(1200, 800)
    browser.get(url)
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    until(lambda: find(browser, "#model").get_attribute("value"))
    browser.get_log("browser")
    return browser


def is_idle(browser):
    return find(browser, "#log").get_attribute("aria-busy") == "false"


def ask(browser, question, answers=1):
    """Type a question and wait for the end of its answers."""
    before = len(texts(browser, "article.theirs"))
    find(browser, "#say").send_keys(question, Keys.ENTER)
    until(lambda: len(texts(browser, "article.theirs")) == before + answers and is_idle(browser))


def press(browser, name, article="article", at=-1):
    """Press a button of an article, found by its name."""
    script = """return [...document.querySelectorAll(arguments[0])].at(arguments[1]).querySelectorAll("button")"""
    buttons = browser.execute_script(script, article, at)
    (found,) = [one for one in buttons if name in (one.text, one.get_attribute("aria-label"))]
    found.click()


def choose(browser, css, value):
    """Choose an option of a select."""
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))"
    browser.execute_script(script, find(browser, css), value)


def bodies(browser, css="article .body"):
    """The texts of turns, without empty lines between their paragraphs."""
    return [one.replace("\n\n", "\n") for one in texts(browser, css)]


def stored(browser):
    return browser.execute_script("return JSON.parse(localStorage.getItem('anabatic.talks'))")


def store(browser, talks):
    browser.execute_script("localStorage.setItem('anabatic.talks', JSON.stringify(arguments[0]))", talks)
    browser.refresh()


def contents(body):
    return [message["content"] for message in body["messages"]]


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


def test_conversations_of_the_list_format_become_trees(page, player):
    how = {"tokens": 3, "seconds": 2, "first": 1, "end": "stop"}
    turns = [
        {"role": "user", "content": "old"},
        {"role": "assistant", "content": "yes", "model": "m", "reasoning": "why", "how": how},
        {"role": "user", "content": "lost"},
        {"role": "assistant", "content": "", "error": "broken"},
    ]
    talks = [
        {"id": "1", "at": 2, "title": "t", "turns": turns},
        {"id": "2", "at": 1, "title": "u", "turns": turns[:1]},
    ]
    store(page, talks)
    until(lambda: texts(page, "#talks .talk") == ["t", "u"])
    assert bodies(page) == ["old", "Reasoning\nyes", "lost", "broken"]
    assert "2.0 tokens/s" in texts(page, "article .how")[1]
    player.plays("one", text("new"), text("newer"))
    ask(page, "next")
    assert contents(player.asked[-1]) == ["old", "yes", "next"]
    first, second = stored(page)
    assert first["version"] == second["version"] == 2
    assert [{key: turn[key] for key in before} for before, turn in zip(turns, first["turns"], strict=False)] == turns
    assert [turn["parent"] for turn in first["turns"]] == [-1, 0, 1, 2, 3, 4]
    press(page, "Again", at=1)
    until(lambda: len(bodies(page)) == 2 and is_idle(page))
    press(page, "Previous version", at=1)
    assert bodies(page)[-1] == "new"


def test_damaged_trees_are_left_out_and_those_of_a_newer_page_are_kept(page, player):
    turn = {"role": "user", "content": "x"}
    damaged = [
        [{**turn, "parent": 0}],
        [{**turn, "parent": "-1"}],
        [{**turn, "parent": 5}],
        [{**turn, "parent": -1, "role": "tool", "results": [None]}],
        [{**turn, "parent": -1, "role": "assistant", "calls": [{"id": 1}]}],
        [{**turn, "parent": -1, "role": "toString"}],
    ]
    odd = {"role": "assistant", "content": "fine", "model": 3, "reasoning": {}, "error": [], "how": {"tokens": "x"}}
    talks = [{"id": str(at), "version": 2, "turns": turns} for at, turns in enumerate(damaged)]
    talks += [
        {
            "id": "odd",
            "version": 2,
            "next": "0",
            "turns": [{**turn, "parent": -1, "beside": "1", "next": 9}, {**odd, "parent": 0}],
        }
    ]
    newer = {"id": "n", "version": 3, "of": "a later page"}
    store(page, [*talks, newer])
    until(lambda: bodies(page) == ["x", "fine"])
    player.plays("one", text("yes"))
    ask(page, "more")
    assert [talk["id"] for talk in stored(page)] == ["odd", "n"]
    assert stored(page)[-1] == newer
    assert not page.get_log("browser")


def test_a_full_storage_drops_the_oldest_and_never_what_is_open(page, player):
    turns = [{"role": "user", "content": "x" * 1_200_000}, {"role": "assistant", "content": "short"}]
    store(page, [{"id": str(at), "at": at + 1, "title": f"t{at}", "turns": turns} for at in (3, 2, 1, 0)])
    until(lambda: len(texts(page, "#talks li")) == 4)
    page.execute_script("document.querySelectorAll('#talks .talk')[3].click()")
    player.plays("one", text("y" * 900_000))
    press(page, "Again")
    until(lambda: is_idle(page) and "oldest conversations were forgotten" in find(page, "#status").text)
    assert [talk["title"] for talk in stored(page)] == ["t0", "t3", "t2"]
    player.plays("one", text("z" * 5_500_000))
    press(page, "Again")
    until(lambda: is_idle(page) and "not stored" in find(page, "#status").text)
    assert len(stored(page)) == 3


def test_another_tab_shows_what_this_one_wrote(page, player):
    player.plays("one", text("a1"), text("a2"))
    ask(page, "q")
    mine = page.current_window_handle
    page.switch_to.new_window("tab")
    try:
        page.get(player.url)
        until(lambda: bodies(page) == ["q", "a1"])
        press(page, "Again")
        until(lambda: bodies(page) == ["q", "a2"] and is_idle(page))
        page.close()
    finally:
        page.switch_to.window(mine)
    until(lambda: bodies(page) == ["q", "a2"])
    press(page, "Previous version")
    assert bodies(page) == ["q", "a1"]


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


def tab_to(page, name):
    """Press Tab until the element of this name has the focus."""
    for _ in range(60):
        page.switch_to.active_element.send_keys(Keys.TAB)
        one = page.switch_to.active_element
        if name in (one.text, one.get_attribute("aria-label"), one.get_attribute("id")):
            return one
    raise AssertionError(f"{name} is not reached")


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


def accessible(page):
    """(role, name) of what a screen reader finds."""
    page.execute_cdp_cmd("Accessibility.enable", {})
    nodes = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [
        (node.get("role", {}).get("value"), node.get("name", {}).get("value"))
        for node in nodes
        if not node.get("ignored")
    ]


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
