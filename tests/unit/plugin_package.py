"""A package with plug-ins of every group, as pip leaves it in a folder."""

from __future__ import annotations

from pathlib import Path

CODE = """
import json
from pathlib import Path


class Told(list):
    # Also written beside this file, for tests of other processes.

    def append(self, one):
        super().append(one)
        with open(Path(__file__).with_name("told.jsonl"), "a") as file:
            file.write(json.dumps(one) + "\\n")


told = Told()


class Recorder:
    def on_step(self, step, metrics):
        told.append(("step", step, metrics["loss"]))

    def on_save(self, step, path):
        told.append(("save", step, Path(path).name))


class Tracker:
    def __init__(self, folder, name, config, resumed_step):
        told.append(("open", name))

    def log_numbers(self, step, values):
        told.append(("numbers", step, values))

    def log_text(self, step, name, text):
        told.append(("text", step, text))

    def close(self):
        told.append(("close",))


def vowels(text, row):
    return sum(letter in "aeiou" for letter in text)


def read_lines(path):
    for line in Path(path).read_text().splitlines():
        if line == "broken":
            raise ValueError("a broken line")
        yield {"query": line, "response": line.upper()}


def task_file():
    return Path(__file__).with_name("made.yaml")


nothing = 3
"""
ENTRY_POINTS = """
[anabatic.callbacks]
recorder = made_plugin:Recorder
absent = made_plugin:Absent
nothing = made_plugin:nothing

[anabatic.sinks]
made = made_plugin:Tracker

[anabatic.rewards]
vowels = made_plugin:vowels

[anabatic.readers]
.lines = made_plugin:read_lines
.txt = made_plugin:read_lines

[anabatic.tasks]
made = made_plugin:task_file
none = made_plugin:nothing
"""
TASK = """
data: {files: [rows.jsonl]}
prompt: "{{ question }}"
choices: "{{ choices }}"
answer: "{{ answer }}"
"""


def write_entry_points(folder: Path, name: str, entry_points: str = ENTRY_POINTS) -> None:
    """Write what pip notes of a package."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def install_package(folder: Path) -> None:
    """Write the package `made-plugin` with its module `made_plugin`."""
    write_entry_points(folder, "made-plugin")
    (folder / "made_plugin.py").write_text(CODE)
    (folder / "made.yaml").write_text(TASK)
