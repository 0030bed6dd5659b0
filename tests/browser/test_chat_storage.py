"""Conversations of the chat page in a real browser's storage: older formats, damage, limits, two tabs."""

from __future__ import annotations

from browser.chat_page import ask, bodies, contents, is_idle, press, store, stored
from browser.chromium import NEEDED, find, texts, until
from browser.openai_streams import text

pytestmark = NEEDED


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


def test_a_conversation_that_another_tab_forgets_while_it_is_edited(page, player):
    player.plays("one", text("a"), text("b"))
    ask(page, "q")
    press(page, "Edit", at=0)
    mine = page.current_window_handle
    page.switch_to.new_window("tab")
    try:
        page.get(player.url)
        until(lambda: bodies(page) == ["q", "a"])
        find(page, "#talks .icon").click()
        until(lambda: stored(page) == [])
        page.close()
    finally:
        page.switch_to.window(mine)
    until(lambda: texts(page, "#talks li") == texts(page, "article") == [])
    ask(page, "new")
    assert bodies(page) == ["new", "b"]
    assert contents(player.asked[-1]) == ["new"]
    assert not page.get_log("browser")
