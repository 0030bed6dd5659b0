"""Every row of the page of guides, executed: commands, settings, files and variables, on simulated NPUs.

The commands of a chapter are run once, made small, in a folder that has what they name; ANABATIC_TEST_GUIDES=all runs
the page's eight devices, its two machines and its longest pipeline, too.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anabatic.core import json_reader
from e2e.vessels import SHAPE
from npu_sim.guides import page, small, typed, world
from npu_sim.guides.page import ROOT, SAME, SPAN, Row
from npu_sim.guides.run import LATER, Done, Story, machine
from npu_sim.guides.values import VALUES, accepted

CHAPTERS = page.chapters()
ROWS = [row for chapter in CHAPTERS.values() for row in chapter.rows]
AS_IT_IS = ("monitor", "explain", "launch --check")
"""Commands of rows that need nothing more, and that the page has with more words only."""
OVER_SSH = "tests/unit/launch/test_ssh_launch.py::test_the_command_checks_a_machine_of_a_file"
ELSEWHERE = {"launch --hosts FILE": OVER_SSH, **LATER}
"""Starts of commands that need other machines, and the test that runs them."""
FIRST = "anabatic classify train -c vessel-8npu --model.path MODEL --data rows.jsonl"
"""The page's counterpart of the first command of the first guide."""
PREDICT = """from anabatic_vessels.model.trajectory_classifier import TrajectoryClassifier

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
        self._once: dict[tuple[str, str], Done] = {}
        self._kept: list[str] | None = None

    def of(self, chapter: str) -> Story:
        """Return a chapter's story, told."""
        if chapter not in self._told:
            folder = world.home(self._root / chapter, self._model, chapter)
            self._told[chapter] = Story(CHAPTERS[chapter], folder)
            self._told[chapter].tell()
        return self._told[chapter]

    def once(self, chapter: str, line: str) -> Done:
        """Run a command beside a chapter's own, once for all rows."""
        if (chapter, line) not in self._once:
            self._once[chapter, line] = self.of(chapter).run(line)
        return self._once[chapter, line]

    def kept(self) -> list[str]:
        """Return the variables that a rank gets where all those of the page are set."""
        if self._kept is None:
            folder = self.of("trajectory").folder
            (folder / "kept.py").write_text(KEPT)
            told = [Story(chapter, folder) for chapter in CHAPTERS.values()]
            variables = dict(story.variable(text) for story in told for text in story.variables)
            code, out, err = machine(["python", "kept.py"], folder, variables)
            assert code == 0, err
            self._kept = ast.literal_eval(out.splitlines()[-1])
        return self._kept


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


def is_there(test: str) -> bool:
    """True when a test's file has it, and the case in brackets."""
    path, _, name = test.partition("::")
    name, _, case = name.removesuffix("]").partition("[")
    code = (ROOT / path).read_text(encoding="utf-8")
    return f"def {name}(" in code and case in code


def command(stories: Stories, row: Row, text: str) -> None:
    """Some command of the chapter, or of another one, says what the row says, and has ended well."""
    if text.removeprefix("anabatic ") in AS_IT_IS:
        good(stories.once("trajectory", text))
        return
    elsewhere = [test for begins, test in ELSEWHERE.items() if text.removeprefix("anabatic ").startswith(begins)]
    if elsewhere:
        assert all(map(is_there, elsewhere))
        return
    order = sorted(CHAPTERS, key=lambda name: name != row.chapter)
    found = [(name, line) for name in order for line in CHAPTERS[name].lines if page.says(line, text)]
    assert found, f"no command of the page says {text}"
    done = [stories.of(name).done[line] for name, line in found if line in stories.of(name).done]
    if done:
        good(done[0])
        return
    tests = [
        test for _, line in found for begins, test in LATER.items() if " ".join(page.words_of(line)).startswith(begins)
    ]
    assert tests and all(map(is_there, tests))


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
    """The chapter's commands ran under it (that for one device: the prediction), and what starts the ranks keeps it."""
    name, _ = stories.of(row.chapter).variable(text)
    assert name not in stories.kept()


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
    done = stories.once(row.chapter, line)
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


TYPED = [(chapter, line) for chapter, lines in typed.COUNTERPARTS.items() for line in lines]


@pytest.mark.parametrize(("chapter", "line"), TYPED, ids=[f"{name}-{line}".replace(" ", "_") for name, line in TYPED])
def test_what_a_guide_has_typed(stories: Stories, chapter: str, line: str) -> None:
    """Its counterpart here has ended well; tests that run more of it exist."""
    row = typed.rows_of(line, chapter)[0]
    for here in typed.COUNTERPARTS[chapter][line]:
        if "::" in here:
            assert is_there(here)
        else:
            CHECKS[SAME.get(here) or page.kind_of(here)](stories, row, here)


def test_the_first_command_of_the_first_guide_by_every_way(stories: Stories) -> None:
    """On its own 65 rows, by itself, launched and under torchrun: the same losses on the same simulated NPUs.

    tests/e2e/test_classify.py runs it without a simulator.
    """
    story = stories.of("trajectory")
    plain, launched = (line for line in story.done if "vessel-8npu --model.path" in line)
    assert plain.startswith(FIRST) and launched.startswith("anabatic launch")
    words = small.small(page.words_of(f"{FIRST} --out runs/torchrun"))
    torchrun = ["torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc_per_node={small.DEVICES}"]
    code, _, err = machine([sys.executable, "-m", *torchrun, "-m", "anabatic", *words], story.folder, {})
    assert code == 0, err[-3000:]
    for told in (story.done[plain].err, story.done[launched].err, err):
        assert sorted(map(int, re.findall(r": ([1-9]\d*) segments", told))) == sorted(n for _, n in SHAPE.values())
    runs = [story.folder / name for name in ("runs/vessel-8npu", small.LAUNCHED, "runs/torchrun")]
    losses = [
        [row["loss"] for row in json_reader.read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]
        for run in runs
    ]
    assert len(losses[0]) == 3 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0]) and losses[2] == pytest.approx(losses[0])
