"""The studio in a real browser: runs, a job from the form to its model, a chat with it, and what goes wrong."""

from __future__ import annotations

import json
import time

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from browser.chromium import NEEDED, find, texts, until
from browser.studio_page import choose, fill, fits_the_window, go, lines, recipe, unnamed_controls
from suite.fake_runs import HOSTILE_TEXT, write_training_run
from unit.studio.serving import TOKEN, studio

pytestmark = NEEDED
ROLES = ("user", "assistant")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a model, rows and runs, as the working directory."""
    folder = tmp_path_factory.mktemp("workplace")
    tokenizer = build_byte_tokenizer(folder / "base")
    build_random_model(len(tokenizer), max_len=512).save_pretrained(folder / "base")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} + 1?"},
                {"role": "assistant", "content": f"It is {n + 1}."},
            ]
        }
        for n in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    root = folder / "runs"
    for name, steps in (("first", 200), ("group/second", 100), ("<img src=x onerror=stolen=1>", 20)):
        write_training_run(root / name, steps=steps)
        (root / name / "config.yaml").write_text(
            f"out: {json.dumps(name)}\nmodel: base\noptim: {{lr: {steps / 1e6}}}\nschedule: {{max_steps: {steps}}}\n",
            encoding="utf-8",
        )
    (root / "first" / "rank-0.log").write_text(f"{HOSTILE_TEXT}\nthe last line\n", encoding="utf-8", errors="replace")
    spike = {
        "step": 150,
        "reason": "spike",
        "loss": 9.5,
        "grad_norm": 40.0,
        "ranks": [{"rows": [{"source": "a", "row": 7}]}],
    }
    (root / "first" / "bad_steps.jsonl").write_text(json.dumps(spike) + "\n", encoding="utf-8")
    growing = root / "growing" / "metrics.jsonl"
    growing.parent.mkdir()
    row = {"step": 1, "time": time.time(), "kind": "train", "loss": 5.0}
    growing.write_text(json.dumps(row) + '\n{"step": 2, "lo', encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def server(workplace):
    with studio(workplace / "runs") as running:
        yield running


def test_a_folder_without_runs_leads_to_a_recipe(browser, tmp_path):
    (tmp_path / "runs").mkdir()
    with studio(tmp_path / "runs") as empty:
        browser.get(empty.url)
        until(lambda: find(browser, "#welcome").is_displayed())
        assert not find(browser, "#run-controls").is_displayed()
        find(browser, "#welcome-recipe").click()
        until(lambda: "demo" in " ".join(texts(browser, "dialog .choices li")))


@pytest.fixture
def page(browser, server):
    browser.get(server.url)
    browser.execute_script("localStorage.clear()")
    browser.get(f"{server.url}/#/runs")
    browser.refresh()
    until(lambda: texts(browser, "#list .name"))
    browser.get_log("browser")
    yield browser
    assert not [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]


def test_runs_are_listed_compared_and_kept_in_the_address(page):
    assert set(texts(page, "#list .name")) == {"first", "group/second", "growing", "<img src=x onerror=stolen=1>"}
    choose(page, "group/second")
    until(lambda: lines(page).get("Loss") == 3)
    assert {"Learning rate", "Tokens per second", "Memory"} <= lines(page).keys()
    assert "Device power" not in lines(page)
    find(page, "#list input[aria-label='Compare first']").click()
    until(lambda: texts(page, "#legend span") == ["group/second", "first"])
    until(lambda: lines(page).get("Loss") == 4)
    until(lambda: "optim.lr" in texts(page, ".comparison th[scope=row]"))
    assert texts(page, ".comparison th[scope=row]")[:2] == ["optim.lr", "schedule.max_steps"]
    assert "0.0002" in texts(page, ".comparison td") and "model" not in texts(page, ".comparison th")
    assert texts(page, ".comparison td.best")
    page.refresh()
    until(lambda: texts(page, "#legend span") == ["group/second", "first"] and lines(page).get("Loss") == 4)
    find(page, ".plot.large svg").send_keys(Keys.ARROW_LEFT)
    assert texts(page, ".tip > b")[0].startswith("Steps 19")
    find(page, "#find").send_keys("GROUP")
    assert texts(page, "#list .name") == ["group/second"]
    assert page.execute_script("return window.stolen") is None


def test_a_run_is_followed_while_it_writes(page, workplace):
    choose(page, "growing")
    until(lambda: texts(page, ".plot.large figcaption b") == ["5"])
    with open(workplace / "runs" / "growing" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(f'ss": 4, "kind": "train", "time": {time.time()}}}\n')
        file.write('{"step": 3, "kind": "sample", "prompt": "p", "text": "<b>t"}\n')
    until(lambda: texts(page, ".plot.large figcaption b") == ["4"])
    until(lambda: texts(page, ".sample pre"))
    assert texts(page, ".sample pre") == ["<b>t"]
    assert find(page, "#title").text == "growing"


def test_samples_logs_spikes_notes_and_the_rest_of_a_run(page, server):
    choose(page, "first")
    until(lambda: find(page, "#about").is_displayed() and texts(page, ".sample"))
    shown = {}
    for part in ("events", "checkpoints", "logs", "config", "spikes"):
        find(page, f"[data-part={part}]").click()
        until(lambda part=part: find(page, f"[data-part={part}]").get_attribute("aria-pressed") == "true")
        until(lambda: find(page, "#part").text not in shown.values())
        shown[part] = find(page, "#part").text
    assert "gradient norm not finite" in shown["events"]
    assert "<script>window.stolen" in shown["logs"] and shown["logs"].endswith("the last line")
    assert "max_steps: 200" in shown["config"]
    assert "a#7" in shown["spikes"]
    assert page.execute_script("return document.querySelectorAll('.plot.large .mark').length") == 1
    assert page.execute_script("return window.stolen") is None
    find(page, "#note-text").send_keys("<b>good</b> run")
    find(page, "#note-tags").send_keys("keep, #best, keep")
    find(page, "#note-form button").click()
    until(lambda: find(page, "#status").text == "Saved.")
    page.refresh()
    until(lambda: find(page, "#note-text").get_attribute("value") == "<b>good</b> run")
    find(page, "#find").send_keys("#bes")
    assert texts(page, "#list .name") == ["first"]
    assert "#keep #best" in texts(page, "#list .fine")[0]
    row = next(row for row in server.get("/api/runs")["runs"] if row["name"] == "first")
    server.post(f"/api/runs/{row['id']}/note", {"text": "", "tags": []})


def test_the_form_is_the_recipe(page):
    go(page, "new")
    until(lambda: "out: runs/sft-1" in recipe(page))
    fill(page, "model", "base")
    fill(page, "batch.seq_len", "128")
    until(lambda: "seq_len: 128" in recipe(page))
    area = find(page, "#recipe")
    area.send_keys(Keys.END, "\n# mine\ntuner: lora")
    until(lambda: find(page, "#f-tuner").get_attribute("value") == "lora")
    until(lambda: "data.train is empty" in " ".join(texts(page, "#problems li")))
    assert not find(page, "#submit").is_enabled()
    fill(page, "data.train", "nowhere.jsonl")
    until(lambda: "nowhere.jsonl" in " ".join(texts(page, "#problems li")))
    find(page, ".field[data-key='data.train'] button").click()
    until(lambda: "chats.jsonl" in " ".join(texts(page, "#picker li")))
    assert "config.json" not in " ".join(texts(page, "#picker li"))
    find(page, "#picker input[type=search]").send_keys("chats")
    find(page, "#picker li input").click()
    page.find_elements(By.CSS_SELECTOR, "#picker > .row button")[-1].click()
    until(lambda: "chats.jsonl" in recipe(page))
    fill(page, "data.train", "chats.jsonl")
    until(lambda: texts(page, "#problems li") == ["The recipe is valid."])
    assert "# mine" in recipe(page) and find(page, "#submit").is_enabled()
    until(lambda: texts(page, "#plan .figures dd"))
    assert find(page, ".memory-bar").get_attribute("aria-label").startswith("trained weights")
    find(page, "#f-train_on_inputs").click()
    until(lambda: "train_on_inputs: true" in recipe(page))
    find(page, "#f-train_on_inputs").click()
    until(lambda: "train_on_inputs" not in recipe(page))
    area.send_keys("\nbatchh: 3")
    until(lambda: "line" in " ".join(texts(page, "#problems li")) and "batchh" in " ".join(texts(page, "#problems li")))
    find(page, "#find-setting").send_keys("recompute")
    until(lambda: "Optimizer and schedule" not in texts(page, "#form fieldset:not([hidden]) > legend"))
    page.refresh()
    until(lambda: "batchh: 3" in recipe(page))  # a draft survives


def test_a_job_from_the_form_to_a_chat_with_its_model(page, server):
    page.execute_script("localStorage.clear()")
    page.get(f"{server.url}/#/new?command=sft&model=base")
    until(lambda: "model: base" in recipe(page))
    text = recipe(page)
    out = next(line for line in text.splitlines() if line.startswith("out:")).partition(" ")[2]
    settings = "data: {train: [chats.jsonl]}\nbatch: {seq_len: 128}\nschedule: {max_steps: 8}\nsave: {every: 4}\n"
    find(page, "#recipe").send_keys(Keys.CONTROL, Keys.END)
    find(page, "#recipe").send_keys(settings)
    until(lambda: find(page, "#submit").is_enabled())
    find(page, "#preview").click()
    until(lambda: "<|im_start|>user" in " ".join(texts(page, "#rows .context")), seconds=90)  # it imports torch
    assert texts(page, "#rows pre .learned")[0] == "It is 1.<|im_end|>"
    find(page, "#job-name").send_keys("<b>tiny</b>")
    find(page, "#submit").click()
    until(lambda: "running" in " ".join(texts(page, "#jobs td")))
    assert "<b>tiny</b>" in texts(page, "#jobs b")
    job = server.get("/api/jobs")["jobs"][-1]
    server.wait_for(job["id"], "finished")
    until(lambda: "wrote" in find(page, "#job-log-text").text and "finished" in find(page, "#job-log-title").text)
    find(page, "#jobs a[href^='#/runs/']").click()
    until(lambda: find(page, "#title").text == out.removeprefix("runs/") and lines(page).get("Loss"))
    go(page, "models")
    until(lambda: f"{out}/final_model" in " ".join(texts(page, "#models td")))
    for model in (f"{out}/final_model", "base"):
        find(page, "#find-model").clear()
        find(page, "#find-model").send_keys(model)
        until(lambda model=model: texts(page, "#models tbody tr td:first-child") == [model])
        page.execute_script("document.querySelector('#models button').click()")  # the list is drawn again all the time
    until(lambda: [row["state"] for row in server.get("/api/servers")["servers"]] == ["ready"] * 2, seconds=120)
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#servers a")) == 2)
    find(page, "#servers a").click()
    until(lambda: find(page, "#model").get_attribute("value"))
    options = texts(page, "#model option")
    assert options == [f"{out}/final_model", "base"]
    find(page, "#second").send_keys("base")  # both answer, each through its own server
    find(page, "#say").send_keys("What is 3 + 1?", Keys.ENTER)
    until(lambda: texts(page, ".column h2") == options and find(page, "#log").get_attribute("aria-busy") == "false")
    assert all("token" in how for how in texts(page, ".column .how"))
    find(page, "a.other").click()
    until(lambda: texts(page, "#nav a"))
    go(page, "models")
    until(lambda: texts(page, "#servers .plain"))
    find(page, "#servers .plain").click()
    until(lambda: texts(page, "#servers tbody b") == ["base"])
    server.post("/api/servers/stop", {"name": "base"})


def test_keys_alone_reach_everything(page):
    page.execute_script("document.body.focus()")
    reached = []
    for _ in range(40):
        page.switch_to.active_element.send_keys(Keys.TAB)
        element = page.switch_to.active_element
        reached.append(element.get_attribute("data-view") or element.get_attribute("id") or element.tag_name)
        if reached[-1] == "new":
            element.send_keys(Keys.ENTER)
            break
    until(lambda: find(page, "#new-view").is_displayed())
    assert unnamed_controls(page) == []


def test_a_phone_chinese_and_dark(page):
    find(page, "#language").send_keys("中文")
    until(lambda: texts(page, "#nav a")[0] == "训练")
    page.execute_script("location.hash = '#/new?command=sft'")
    until(lambda: "模型与数据" in texts(page, "#form fieldset:not([hidden]) > legend"))
    assert "运行目录" in find(page, "#d-out").text
    find(page, "#theme").send_keys("深色")
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 24)"
    page.set_window_size(420, 800)
    try:
        for view in ("runs", "new", "queue", "models", "devices"):
            page.execute_script(f"location.hash = '#/{view}'")
            until(lambda view=view: find(page, f"#{view}-view").is_displayed())
            time.sleep(0.3)
            assert fits_the_window(page), view
        page.execute_script("location.hash = '#/models'")  # a row is a card: no column is so narrow that words break
        until(lambda: page.find_elements(By.CSS_SELECTOR, "#models td"))
        cells = page.find_elements(By.CSS_SELECTOR, "#models td")
        assert min(cell.size["width"] for cell in cells if cell.text) > 300
        assert not find(page, "#nav").is_displayed()
        find(page, "#side-open").click()
        until(lambda: find(page, "#nav").is_displayed())
    finally:
        page.set_window_size(1200, 800)


def test_devices_are_shown(page):
    go(page, "devices")
    until(lambda: "CPUs" in " ".join(texts(page, "#devices td")))
    assert texts(page, "#devices .meter")


def test_a_token_is_asked_for_and_the_server_may_go_away(browser, tmp_path):
    write_training_run(tmp_path / "one", steps=5)
    with studio(tmp_path, token=TOKEN) as running:
        browser.get(running.url)
        browser.execute_script("localStorage.clear()")
        browser.refresh()
        until(lambda: "asks for its token" in find(browser, "#status").text)
        assert texts(browser, "#list li") == []
        assert browser.switch_to.active_element.get_attribute("id") == "key"
        browser.switch_to.active_element.send_keys("wrong", Keys.TAB)
        until(lambda: browser.switch_to.active_element.get_attribute("id") != "key")
        time.sleep(3.5)  # it asks again, and does not take the focus again
        assert browser.switch_to.active_element.get_attribute("id") != "key"
        find(browser, "#key").clear()
        find(browser, "#key").send_keys(TOKEN, Keys.TAB)
        until(lambda: texts(browser, "#list .name") == ["one"])
        assert not find(browser, "#settings").is_displayed()
        browser.execute_script("localStorage.clear()")
        browser.refresh()
        until(lambda: texts(browser, "#list .name") == ["one"])  # the cookie
    until(lambda: find(browser, "#status").text == "The server cannot be reached.")
    assert texts(browser, "#list .name") == ["one"]
    browser.get_log("browser")
