"""The studio in a real browser: what was typed or chosen is kept, in whatever order the server answers."""

from __future__ import annotations

import time

import pytest
from selenium.common.exceptions import NoAlertPresentException
from selenium.webdriver.common.keys import Keys

from browser.chromium import NEEDED, find, texts, until
from browser.studio_page import choose, fill, go, recipe
from unit.fake_runs import write_training_run
from unit.studio.serving import studio

pytestmark = NEEDED

SLOW_FETCH = """const real = window.fetch;
window.fetch = async (...all) => { await new Promise((done) => setTimeout(done, 1200)); return real(...all); };"""
REFUSED = ".field[data-key='optim.lr'] .bad"
COPIES = "window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text); };"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("first", "second"):
        write_training_run(folder / "runs" / name, steps=20)
        (folder / "runs" / name / "config.yaml").write_text(f"out: {name}\nmodel: base\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with studio(folder / "runs") as running:
            yield running


@pytest.fixture
def page(browser, server):
    browser.get(server.url)
    browser.execute_script("localStorage.clear()")
    browser.get(f"{server.url}/#/new?command=sft")
    browser.refresh()
    until(lambda: "out: runs/sft-1" in recipe(browser))
    yield browser
    browser.get_log("browser")  # refused requests


def write_recipe(browser, text):
    area = find(browser, "#recipe")
    area.clear()
    area.send_keys(text)


def test_two_quick_changes_are_both_made(page):
    page.execute_script(SLOW_FETCH)
    fill(page, "model", "base")
    fill(page, "batch.seq_len", "128")
    assert "seq_len" not in recipe(page)
    until(lambda: "seq_len: 128" in recipe(page))
    assert "model: base" in recipe(page)
    assert find(page, "#f-model").get_attribute("value") == "base"
    assert find(page, "[id='f-batch.seq_len']").get_attribute("value") == "128"


def test_what_is_typed_during_a_change_stays(page):
    page.execute_script(SLOW_FETCH)
    fill(page, "model", "base")
    area = find(page, "#recipe")
    area.send_keys(Keys.CONTROL, Keys.END)
    area.send_keys("# mine\ntuner: lora")
    until(lambda: "model: base" in recipe(page))
    assert "# mine\ntuner: lora" in recipe(page)
    area.send_keys("  # and more")  # the caret is where it was
    assert "tuner: lora  # and more" in recipe(page)
    until(lambda: find(page, "#f-tuner").get_attribute("value") == "lora")
    assert "model: base" in recipe(page)


def test_a_refused_change_is_taken_back_and_explained(page):
    write_recipe(page, "out: runs/x\nmodel: base\noptim: {matrix_lr: &l 0.001, lr: *l}\n")
    until(lambda: find(page, "[id='f-optim.lr']").get_attribute("value") == "0.001")
    text = recipe(page)
    fill(page, "optim.lr", "0.5")
    until(lambda: texts(page, REFUSED) != [""] and texts(page, "#problems li") == texts(page, REFUSED))
    until(lambda: find(page, "[id='f-optim.lr']").get_attribute("value") == "0.001")
    assert recipe(page) == text and not find(page, "#submit").is_enabled()
    area = find(page, "[id='f-optim.lr']")
    area.clear()
    area.send_keys("0.7", Keys.ENTER)  # the field is still the one that is written in
    until(lambda: area.get_attribute("value") == "0.001")
    page.execute_script(
        "arguments[0].value = '#'.repeat(300000); arguments[0].dispatchEvent(new Event('input'))", find(page, "#recipe")
    )
    until(lambda: "characters" in " ".join(texts(page, "#problems li")))
    assert not find(page, "#submit").is_enabled()
    write_recipe(page, "out: runs/x\nseed: 3\n")
    until(lambda: find(page, "#f-seed").get_attribute("value") == "3")
    assert texts(page, REFUSED) == [""] and "characters" not in " ".join(texts(page, "#problems li"))


def note(page):
    return find(page, "#note-text").get_attribute("value")


def test_an_unsaved_note_stays_and_is_saved_where_it_was_typed(page, server):
    go(page, "runs")
    choose(page, "first")
    until(lambda: find(page, "#note-text").is_displayed())
    with open("runs/first/metrics.jsonl", "a", encoding="utf-8") as file:
        find(page, "#note-text").send_keys("warm up longer")
        find(page, "#find").click()
        file.write('{"step": 30, "kind": "train", "loss": 1.0}\n')  # the curves change, and the page asks again
        file.flush()
        until(lambda: any("30" in facts for facts in texts(page, "#list .fine")))
    assert note(page) == "warm up longer"
    choose(page, "second")
    until(lambda: note(page) == "")
    choose(page, "first")
    until(lambda: note(page) == "warm up longer")
    find(page, "#note-form button").click()
    until(lambda: find(page, "#status").text == "Saved.")
    end = time.monotonic() + 4  # longer than the page waits before it asks again
    while time.monotonic() < end:
        assert find(page, "#status").text == "Saved."
        time.sleep(0.2)
    until(lambda: find(page, "#status").text == "")
    saved = {row["name"]: row["note"] for row in server.get("/api/runs")["runs"]}
    assert saved["first"] == "warm up longer" and not saved["second"]
    choose(page, "second")
    choose(page, "first")
    until(lambda: note(page) == "warm up longer")


def test_the_copied_command_works_or_says_what_it_needs(page):
    page.execute_script(COPIES)

    def copied():
        return page.execute_script("return window.copied")

    fill(page, "model", "a b")
    page.execute_script(SLOW_FETCH)
    fill(page, "batch.seq_len", "128")
    find(page, "#copy-command").click()  # the change is still under way
    until(copied)
    assert copied() == ["anabatic sft --out runs/sft-1 --model 'a b' --batch.seq-len 128"]
    write_recipe(page, "out: runs/x\ncurriculum: {stages: [{until: 1.0, mix: {a: 1.0}}]}\n")
    find(page, "#copy-command").click()
    until(lambda: copied()[1:] == ["anabatic sft -c sft.yaml"])
    until(lambda: "save it as sft.yaml" in find(page, "#status").text)
    write_recipe(page, "out: [")
    find(page, "#copy-command").click()
    until(lambda: "no command to copy" in find(page, "#status").text)
    assert len(copied()) == 2


def test_an_edited_recipe_is_not_replaced_without_a_question(page):
    page.execute_script("location.hash = '#/new?recipe=dpo'")
    until(lambda: "PAIRS.jsonl" in recipe(page))
    until(lambda: find(page, "#f-model").get_attribute("value") == "MODEL")
    page.execute_script("location.hash = '#/new?recipe=dpo'")  # nothing was edited, nothing is asked
    until(lambda: find(page, "#status").text == "Started from dpo.")
    until(lambda: fill(page, "beta", "0.25") is None)  # the form may just be drawn again
    until(lambda: "beta: 0.25" in recipe(page))
    page.refresh()  # a draft of an earlier visit is the same
    until(lambda: "out: runs/sft-1" in recipe(page))
    page.execute_script("location.hash = '#/new?command=dpo'")
    until(lambda: "beta: 0.25" in recipe(page))
    page.execute_script("location.hash = '#/new?command=dpo&model=other'")
    until(lambda: "recipe of dpo" in question(page))
    page.switch_to.alert.dismiss()
    until(lambda: page.execute_script("return location.hash") == "#/new")
    assert "beta: 0.25" in recipe(page)
    page.execute_script("location.hash = '#/new?command=sft&model=other'")  # another command has a recipe of its own
    until(lambda: "model: other" in recipe(page))
    page.execute_script("location.hash = '#/new?recipe=dpo'")
    until(lambda: "recipe of dpo" in question(page))
    page.switch_to.alert.accept()
    until(lambda: "PAIRS.jsonl" in recipe(page) and "beta: 0.25" not in recipe(page))


def question(page):
    try:
        return page.switch_to.alert.text
    except NoAlertPresentException:
        return ""
