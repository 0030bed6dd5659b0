"""The studio in a real browser: jobs from recipes, pipelines, plots as files, spikes and evaluations of many runs."""

from __future__ import annotations

import json
import struct
import time
from xml.etree import ElementTree

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from browser.chromium import NEEDED, find, texts, until
from browser.studio_page import choose, fill, fits_the_window, go, lines, pick_entry, recipe, unnamed_controls
from unit.fake_runs import EVAL_RESULTS, write_training_run
from unit.studio.serving import studio

pytestmark = NEEDED
HOSTILE_NAME = "<img src=x onerror=stolen=1>&\x07]]>"
SVG = "{http://www.w3.org/2000/svg}"


def write_spikes(folder, *steps):
    rows = [{"source": f"{folder.name}.jsonl", "row": 7}]
    spike = {"reason": "spike", "loss": 9.5, "grad_norm": 40.0, "ranks": [{"rows": rows}]}
    lines = [json.dumps({"step": step, **spike}) + "\n" for step in steps]
    (folder / "bad_steps.jsonl").write_text("".join(lines), encoding="utf-8")


def write_results(folder, accuracy, name="spelling"):
    figure = {"value": accuracy, "low": accuracy - 0.03, "high": accuracy + 0.03}
    task = {"metric": "exact", "accuracy": accuracy, "chance": 0.25, "n": 200, "metrics": {"exact": figure}}
    folder.mkdir(parents=True, exist_ok=True)
    result = {"model": f"runs/{folder.name}/final_model", "tasks": {name: task}}
    (folder / "eval.json").write_text(json.dumps(result), encoding="utf-8")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    root = folder / "runs"
    for name, steps in (("first", 200), ("second", 100), (HOSTILE_NAME, 30)):
        write_training_run(root / name, steps=steps)
        settings = f"out: {json.dumps(name)}\nmodel: base\ndata: {{train: [a.jsonl]}}\n"
        settings += f"schedule: {{max_steps: {steps}}}\n"
        (root / name / "config.yaml").write_text(settings, encoding="utf-8")
    write_spikes(root / "first", 150, 170)
    write_spikes(root / "second", 40)
    write_results(root / "eval-1", 0.5)
    write_results(root / "eval-2", 0.9)
    (root / "second" / "eval.json").write_text(json.dumps(EVAL_RESULTS), encoding="utf-8")
    (folder / "words.txt").write_text("".join(f"wind {n} went up {n * 7919}\n" for n in range(300)), encoding="utf-8")
    mine = "# mine\nmodel: MODEL\nbeta: 0.3\ndata: {train: [words.txt]}\n"
    (folder / "a <b>mine.yaml").write_text(mine, encoding="utf-8")
    (folder / "pod.yaml").write_text("kind: Pod\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def server(workplace):
    with studio(workplace / "runs") as running:
        yield running


@pytest.fixture
def page(browser, server, tmp_path):
    browser.get(server.url)
    browser.execute_script("localStorage.clear()")
    browser.get(f"{server.url}/#/runs")
    browser.refresh()
    until(lambda: texts(browser, "#list .name"))
    browser.get_log("browser")
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    yield browser
    assert browser.execute_script("return window.stolen") is None
    assert not [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]


def compare(page, *names):
    choose(page, names[0])
    for name in names[1:]:
        boxes = page.find_elements(By.CSS_SELECTOR, "#list input")
        next(box for box in boxes if box.get_attribute("aria-label") == f"Compare {name}").click()
    until(lambda: texts(page, "#legend span") == list(names))


def downloaded(folder, suffix):
    until(lambda: [path for path in folder.iterdir() if path.suffix == suffix])
    (path,) = [path for path in folder.iterdir() if path.suffix == suffix]
    return path


def press_export(page, text):
    next(button for button in page.find_elements(By.CSS_SELECTOR, "#exports button") if button.text == text).click()


def test_a_job_starts_from_a_shipped_recipe(page):
    go(page, "new")
    until(lambda: "out: runs/sft-1" in recipe(page))
    find(page, "#start-from").click()
    until(lambda: texts(page, "#picker h3") == ["Recipes of anabatic", "Recipe files"])
    first = texts(page, "#picker li")[0]
    assert "demo" in first and "in five minutes" in first and "run · 2 CPU cores" in first
    pick_entry(page, "dpo")
    until(lambda: "out: runs/dpo-1" in recipe(page))
    assert find(page, "#command").get_attribute("value") == "dpo"
    assert "# Learn from pairs" in recipe(page) and "$schema" not in recipe(page)
    until(lambda: find(page, "#f-model").get_attribute("value") == "MODEL")
    until(lambda: "PAIRS.jsonl" in " ".join(texts(page, "#problems li")))
    fill(page, "beta", "0.25")
    until(lambda: "beta: 0.25" in recipe(page))
    assert "# Learn from pairs" in recipe(page)


def test_a_pipeline_is_filled_in_queued_and_leads_to_its_files(page, server, workplace):
    page.get(f"{server.url}/#/new?recipe=speedrun")
    until(lambda: texts(page, "#plan li")[:1] and texts(page, "#plan li")[0].startswith("tokenizer"))
    until(lambda: "vars.text is empty" in " ".join(texts(page, "#problems li")))
    assert texts(page, "#form legend")[0] == "Variables"
    assert not find(page, "#preview").is_displayed() and not find(page, "#copy-command").is_displayed()
    find(page, ".field[data-key='vars.text'] button").click()
    pick_entry(page, "words.txt")
    until(lambda: "text: words.txt" in recipe(page))
    fill(page, "vars.text", "")
    until(lambda: 'text: ""' in recipe(page) or "text: ''" in recipe(page))
    stage = "{command: tokenizer train, title: '<b>x</b>', job: {vocab_size: 280, data: {train: [words.txt]}}}"
    text = f"out: runs/two\nstages:\n  one: {stage}\n  two: {stage}\n"
    find(page, "#recipe").clear()
    find(page, "#recipe").send_keys(text)
    until(lambda: len(texts(page, "#plan li")) == 2 and find(page, "#submit").is_enabled())
    assert "<b>x</b>" in texts(page, "#plan li")[0]
    find(page, "#submit").click()
    until(lambda: texts(page, "#jobs b")[-1:] == ["two"])
    job = server.get("/api/jobs")["jobs"][-1]
    server.wait_for(job["id"], "finished")
    until(lambda: "[2/2] two" in find(page, "#job-log-text").text)
    find(page, f"#jobs a[href$='job={job['id']}']").click()
    until(lambda: "out: runs/run-" in recipe(page) and len(texts(page, "#plan li")) == 2)


def test_a_job_starts_from_a_file_and_from_a_run(page, server):
    go(page, "new")
    until(lambda: "out: runs/sft-1" in recipe(page))
    find(page, "#start-from").click()
    until(lambda: texts(page, "#picker li"))
    find(page, "#picker input[type=search]").send_keys("<b>mine")
    until(lambda: len(texts(page, "#picker li")) == 1)
    pick_entry(page, "a <b>mine.yaml")
    until(lambda: recipe(page).startswith("# mine"))
    assert find(page, "#command").get_attribute("value") == "dpo"
    until(lambda: find(page, "#status").text == "Started from a <b>mine.")
    find(page, "#start-from").click()
    pick_entry(page, "pod.yaml")
    until(lambda: "pod.yaml is not a recipe" in find(page, "#status").text)
    assert recipe(page).startswith("# mine")
    go(page, "runs")
    choose(page, "second")
    until(lambda: find(page, "#start-from-run").is_displayed())
    find(page, "#start-from-run").click()
    until(lambda: "max_steps: 100" in recipe(page))
    assert "model: base" in recipe(page) and "out: runs/sft-" in recipe(page)
    page.get(f"{server.url}/#/new?recipe=..%2Fnowhere")
    until(lambda: "there is no recipe" in find(page, "#status").text)
    page.get_log("browser")  # the refused requests


def test_spikes_of_every_compared_run_are_marked_in_its_colour(page):
    choose(page, "first")
    until(lambda: page.execute_script("return document.querySelectorAll('.plot.large .mark').length") == 2)
    compare(page, "first", "second")
    script = "return [...document.querySelectorAll('.plot.large .mark')].map((one) => one.getAttribute('class'))"
    until(lambda: page.execute_script(script) == ["mark c1", "mark c1", "mark c2"])
    assert "3 spikes" in find(page, ".plot.large svg").get_attribute("aria-label")
    box = find(page, ".plot.large svg")
    box.send_keys(Keys.HOME)
    for _ in range(30):
        if any("second: spike at step 40: second.jsonl#7" in text for text in texts(page, ".tip span span")):
            break
        box.send_keys(Keys.ARROW_RIGHT)
    else:
        pytest.fail("the rows of a spike were not shown")
    find(page, "[data-part=spikes]").click()
    until(lambda: "second.jsonl#7" in find(page, "#part").text)
    assert texts(page, "#part th")[:2] == ["Run", "Step"] and "first.jsonl#7" in find(page, "#part").text


def test_plots_are_saved_as_svg_that_needs_no_page(page, tmp_path):
    find(page, "#theme").send_keys("Dark")
    compare(page, "first", "second", HOSTILE_NAME)
    until(lambda: lines(page).get("Loss") == 6)
    press_export(page, "SVG")
    path = downloaded(tmp_path, ".svg")
    assert path.name == "first-and-2-more.svg"
    root = ElementTree.parse(path).getroot()
    names = [text.text for text in root.iter(f"{SVG}text")]
    assert "Loss · Steps" in names and "second · held-out" in names and any("<img src=x" in name for name in names)
    assert not [part for part in root.iter() if part.get("class") or part.get("style") or "onerror" in part.attrib]
    assert {"#ffffff", "#0b6b78", "#c2571a"} <= {value for part in root.iter() for value in part.attrib.values()}
    assert len(list(root.iter(f"{SVG}path"))) > 20
    page.get(path.as_uri())  # outside of the studio
    assert page.execute_script("return document.documentElement.getBBox().width") > 900
    page.back()
    until(lambda: texts(page, "#list .name"))


def test_one_plot_is_saved_as_png_by_keys(page, tmp_path):
    choose(page, "first")
    until(lambda: lines(page).get("Loss") == 3)
    summary = find(page, ".plot.large summary")
    assert summary.get_attribute("aria-label") == "Save Loss"
    summary.send_keys(Keys.ENTER)
    until(lambda: find(page, ".plot.large .save button").is_displayed())
    page.switch_to.active_element.send_keys(Keys.TAB)
    page.switch_to.active_element.send_keys(Keys.TAB)
    assert page.switch_to.active_element.get_attribute("aria-label") == "Save Loss as PNG"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    path = downloaded(tmp_path, ".png")
    assert path.name == "first-loss.png"
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24])[0] == 2 * 960
    until(lambda: find(page, "#status").text == "Saved first-loss.png.")
    assert not find(page, ".plot.large .save button").is_displayed()
    summary.send_keys(Keys.ENTER)
    summary.send_keys(Keys.ESCAPE)
    assert not find(page, ".plot.large .save button").is_displayed()


def test_evaluations_stand_side_by_side(page):
    choose(page, "eval-1")
    until(lambda: texts(page, "#evaluation th[scope=row]"))
    assert not find(page, "#start-from-run").is_displayed() and find(page, "#status").text == ""
    compare(page, "eval-1", "eval-2", "second")
    until(lambda: "counting" in " ".join(texts(page, "#evaluation th[scope=row]")))
    rows = {row.split("\n")[0]: row for row in texts(page, "#evaluation tbody tr")}
    assert "chance 25.0 % / 0.4 %, 200 items" in rows["spelling"]
    assert "50.0 % (47.0 – 53.0)" in rows["spelling"] and "runs/eval-2/final_model" in " ".join(rows.values())
    assert rows.keys() >= {"Bits per byte", "spelling", "counting"}
    find(page, "#list input[aria-label='Compare second']").click()
    until(lambda: texts(page, "#evaluation td.best") == ["90.0 % (87.0 – 93.0)"])
    find(page, "#evaluation summary").click()
    until(lambda: not find(page, "#evaluation table").is_displayed())


def test_a_checkpoint_becomes_a_model_by_a_job(page, workplace, server):
    folder = workplace / "runs" / "first" / "checkpoint-100"
    folder.mkdir()
    page.refresh()
    choose(page, "first")
    until(lambda: find(page, "[data-part=checkpoints]").is_displayed())
    page.get(
        f"{server.url}/#/new?command=checkpoint%20export&checkpoint=runs%2Ffirst%2Fcheckpoint-100&out=runs%2Ffirst-100"
    )
    until(lambda: "checkpoint: runs/first/checkpoint-100" in recipe(page) and "out: runs/first-100" in recipe(page))
    assert find(page, "#command").get_attribute("value") == "checkpoint export"
    folder.rmdir()


def test_new_parts_on_a_phone_in_chinese_and_without_a_mouse(page):
    assert unnamed_controls(page) == []
    find(page, "#language").send_keys("中文")
    until(lambda: texts(page, "#nav a")[0] == "训练")
    page.set_window_size(420, 800)
    try:
        page.execute_script("location.hash = '#/new?recipe=demo'")
        until(lambda: texts(page, "#plan li") and "阶段" in texts(page, "#plan h2"))
        assert fits_the_window(page)
        find(page, "#start-from").send_keys(Keys.ENTER)
        until(lambda: "五分钟内" in " ".join(texts(page, "#picker li")))
        assert fits_the_window(page)
        assert find(page, "#picker").get_attribute("aria-label") == "从配方开始…"
        find(page, "#picker input[type=search]").send_keys("强化", Keys.TAB)
        page.switch_to.active_element.send_keys(Keys.ENTER)
        until(lambda: "out: runs/rl_demo-1" in recipe(page))
        page.execute_script("location.hash = '#/runs'")
        until(lambda: find(page, "#runs-view").is_displayed())
        time.sleep(0.5)
        assert fits_the_window(page) and unnamed_controls(page) == []
    finally:
        page.set_window_size(1200, 800)


def test_the_page_goes_on_after_the_server_was_away(browser, tmp_path):
    write_training_run(tmp_path / "one", steps=5)
    with studio(tmp_path) as running:
        port = int(running.url.rpartition(":")[2])
        browser.get(f"{running.url}/#/new?recipe=demo")
        until(lambda: texts(browser, "#plan li"))
    fill(browser, "title", "Written while it was away")
    until(lambda: find(browser, "#status").text == "The server cannot be reached.")
    text = recipe(browser)
    with studio(tmp_path, port=port) as running:
        fill(browser, "title", "Written after it came back")
        until(lambda: "Written after it came back" in recipe(browser))
        assert find(browser, "#status").text == "" and recipe(browser) != text
        go(browser, "runs")
        until(lambda: texts(browser, "#list .name") == ["one"])
    browser.get_log("browser")
