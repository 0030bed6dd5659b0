"""Every row of the page of guides, executed: commands, settings, files and variables, on simulated NPUs.

The commands of a chapter are run once, made small, in a folder that has what they name; ANABATIC_TEST_GUIDES=all runs
the page's eight devices, its two machines and its pipelines, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from anabatic.core import json_reader
from npu_sim.guides import page, small, world
from npu_sim.guides.page import ROOT, SPAN, Row
from npu_sim.guides.run import Done, Story, machine
from npu_sim.guides.values import VALUES, accepted

CHAPTERS = page.chapters()
ROWS = [row for chapter in CHAPTERS.values() for row in chapter.rows]
AS_IT_IS = ("doctor", "env", "monitor", "explain", "launch --check")
"""Commands of rows that need nothing more."""
ELSEWHERE = {"anabatic launch --hosts FILE": "tests/unit/launch/test_ssh_launch.py"}
"""Commands that need machines reached over ssh, and who tests them."""
PREDICT = """from anabatic.vessels.model.trajectory_classifier import TrajectoryClassifier

found = TrajectoryClassifier("runs/vessel").predict("SPD_HIGH COG_NE Passenger_Ship POINT_END")
print(found["class_name"], 0 < found["confidence"] <= 1)
"""
KEPT = """import os
from anabatic.launch.local import placement

print(sorted(placement.place_workers({"type": "npu", "bind": "off"}, 1, os.environ, False)))
"""
"""Prints what the ranks get beside what is set."""


class Stories:
    """The chapters' stories, each told when its first row is asked for."""

    def __init__(self, root: Path) -> None:
        self._root, self._model = root, world.model(root)
        self._told: dict[str, Story] = {}
        self._alone: dict[str, Done] = {}

    def of(self, chapter: str) -> Story:
        """Return a chapter's story, told."""
        if chapter not in self._told:
            folder = world.home(self._root / chapter, self._model, chapter)
            self._told[chapter] = Story(CHAPTERS[chapter], folder)
            self._told[chapter].tell()
        return self._told[chapter]

    def alone(self, line: str) -> Done:
        """Run a command that looks at the machine, once for all chapters."""
        if line not in self._alone:
            story = Story(CHAPTERS["trajectory"], self.of("trajectory").folder)
            self._alone[line] = story.run(line)
        return self._alone[line]


@pytest.fixture(scope="module")
def stories(_built: None, tmp_path_factory: pytest.TempPathFactory) -> Stories:
    return Stories(tmp_path_factory.mktemp("guides"))


def good(done: Done) -> None:
    assert done.code == 0, f"{done.line}\n{done.out[-1500:]}\n{done.err[-3000:]}"
    assert "Traceback" not in done.err


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_command_of_a_chapter_ends_well(stories: Stories, name: str) -> None:
    story = stories.of(name)
    for done in story.done.values():
        good(done)
    left_out = set(story.chapter.lines) - set(story.done)
    assert not small.ALL or not left_out


def command(stories: Stories, row: Row, text: str) -> None:
    """Some command of the chapter, or of another one, says what the row says, and has ended well."""
    if text in ELSEWHERE:
        assert "--hosts" in (ROOT / ELSEWHERE[text]).read_text(encoding="utf-8")
        return
    if text.removeprefix("anabatic ") in AS_IT_IS:
        good(stories.alone(text))
        return
    order = sorted(CHAPTERS, key=lambda name: name != row.chapter)
    found = [(name, line) for name in order for line in CHAPTERS[name].lines if page.says(line, text)]
    assert found, f"no command of the page says {text}"
    done = [stories.of(name).done[line] for name, line in found if line in stories.of(name).done]
    if not done:
        pytest.skip("ANABATIC_TEST_GUIDES=all runs it")
    good(done[0])


def option(stories: Stories, row: Row, text: str) -> None:
    command(stories, row, f"anabatic {text}")


def recipe(stories: Stories, row: Row, text: str) -> None:
    line = next(line for line in CHAPTERS[row.chapter].lines if text in line)
    good(stories.of(row.chapter).done[line])


def setting(stories: Stories, row: Row, text: str) -> None:
    """Commands of the chapter take it with the guide's value."""
    assert text in VALUES[row.chapter], f"no value for {text} in values.py"
    os.chdir(stories.of(row.chapter).folder)  # recipes and files are found from there
    assert accepted(CHAPTERS[row.chapter], text)


def file(stories: Stories, row: Row, text: str) -> None:
    """A run of the chapter has it, and in a folder lie the configurations that the row names."""
    found = list(stories.of(row.chapter).folder.rglob(text.rstrip("/")))
    assert found, f"no run has {text}"
    if text.endswith("_model"):
        named = [name for name in SPAN.findall(row.theirs) if name.endswith("_config.json")]
        assert any(all((folder / name).is_file() for name in named) for folder in found)


def variable(stories: Stories, row: Row, text: str) -> None:
    """The chapter's commands ran under it, and what starts the ranks keeps it as it is."""
    story = stories.of(row.chapter)
    name, value = story.variable(text)
    (story.folder / "kept.py").write_text(KEPT)
    code, out, err = machine(["python", "kept.py"], story.folder, {name: value})
    assert code == 0, err
    assert name not in out.splitlines()[-1]
    if row.chapter == "vessel" and name.startswith("ASCEND"):
        line = next(line for line in story.done if " predict " in line)
        good(story.run(line.replace("predictions.jsonl", "on-one.jsonl"), {name: value}))


def key(stories: Stories, row: Row, text: str) -> None:
    """Rows that were read or written have it."""
    folder = stories.of(row.chapter).folder
    read = [
        next(json_reader.read_json_lines(folder / name)) for name in ("train_dataset_demo.jsonl", "predictions.jsonl")
    ]
    assert any(text in one for one in read)


def again(stories: Stories, row: Row, text: str) -> None:
    """The same training resumes where it was: it has come to its end."""
    story = stories.of(row.chapter)
    line = next(line for line in story.done if "train " in line)
    done = story.run(line)
    good(done)
    assert "step 1/" not in done.err


def extra(stories: Stories, row: Row, text: str) -> None:
    name = text.partition("[")[2].partition("]")[0]
    assert re.search(rf"^{name} = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)


def python(stories: Stories, row: Row, text: str) -> None:
    folder = stories.of(row.chapter).folder
    (folder / "predict.py").write_text(PREDICT)
    code, out, err = machine(["python", "predict.py"], folder, {})
    assert code == 0, err
    assert out.endswith("True\n")


CHECKS: dict[str, Callable[[Stories, Row, str], None]] = {
    "command": command, "option": option, "recipe": recipe, "setting": setting, "file": file, "variable": variable,
    "key": key, "again": again, "extra": extra, "python": python,
}  # fmt: skip
CASES = [(row, item) for row in ROWS for item in row.items]
IDS = [f"{row.chapter}-{'-'.join(SPAN.findall(row.theirs)[:1])}-{item.text}".replace(" ", "_") for row, item in CASES]


@pytest.mark.parametrize(("row", "item"), CASES, ids=IDS)
def test_row(stories: Stories, row: Row, item: page.Item) -> None:
    CHECKS[item.kind](stories, row, item.text)
