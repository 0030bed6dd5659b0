"""Packages of commands: those of this distribution and a stranger's are found, named and started in one way."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabatic.cli import command_tree
from anabatic.cli.app import render_help
from anabatic.config.loading import command_package, command_table, shipped_recipes
from anabatic.config.loading.command_package import CommandTable
from anabatic.core import plugins
from unit.plugin_package import write_entry_points

CODE = '''
from dataclasses import dataclass
from pathlib import Path
from anabatic.config.loading.command_package import TRAIN, Command, CommandEntry, CommandPackage, ShippedRecipe


@dataclass(kw_only=True)
class WeatherJob:
    """Forecast the weather."""

    city: str = "Uppsala"
    """Where."""


def run(job):
    print(f"{job.city}: rain")
    return 0


JOB = Command("weather", "made_weather:WeatherJob", "made_weather:run", "Forecast it.", positional_setting="city")
PACKAGE = CommandPackage(
    commands=(JOB,),
    entries=(CommandEntry("weather", group=TRAIN, example="Uppsala"),),
    recipes=(ShippedRecipe("rainy", "weather", "rain", "any", folder=Path(__file__).parent),),
)
CLASH = CommandPackage(commands=(Command("sft mine", "made_weather:WeatherJob", "made_weather:run", "Mine."),))
NUMBER = 3
'''

LOAD = command_package.load_packages
"""As it is, also while a test has replaced it."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "made_weather.py").write_text(CODE)
    (folder / "rainy.yaml").write_text("city: Bergen\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(command_table, "COMMANDS", renew(command_table.COMMANDS))
    monkeypatch.setattr(command_tree, "COMMANDS", renew(command_tree.COMMANDS))
    monkeypatch.setattr(shipped_recipes, "RECIPES", renew(shipped_recipes.RECIPES))
    clear()
    yield folder
    sys.modules.pop("made_weather", None)
    clear()


def renew(table: CommandTable[command_package.Row]) -> CommandTable[command_package.Row]:
    """The same table, which has not looked for packages yet."""
    return CommandTable(table._own.values(), table._select_rows)


def clear() -> None:
    plugins._read_entry_points.cache_clear()
    LOAD.cache_clear()


def test_a_package_adds_a_command_its_help_and_a_recipe(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_entry_points(site, "made-weather", "[anabatic.commands]\nweather = made_weather:PACKAGE\n")
    assert "weather    Forecast it." in render_help("")
    name, rest = command_tree.find_command(["weather", "Oslo"])
    command, line = command_tree.parse_command(name, rest)
    assert command.run(line) == 0 and capsys.readouterr().out == "Oslo: rain\n"
    assert shipped_recipes.read_recipe("rainy").tree == {"city": "Bergen"}


def test_packages_are_looked_for_only_for_words_that_are_not_ours(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("packages were looked for")

    monkeypatch.setattr(command_package, "load_packages", fail)
    assert command_tree.split_name(["sft", "--model", "x"]) == ("sft", ["--model", "x"])
    assert command_tree.find_command(["data", "check", "rows.jsonl"]) == ("data check", ["rows.jsonl"])
    assert "sft words" not in command_table.COMMANDS
    mine = site / "mine.yaml"
    mine.touch()
    assert shipped_recipes.resolve_recipe(mine) == mine


@pytest.mark.parametrize(
    ("value", "warning"),
    [
        ("made_weather:CLASH", 'two packages have a command or recipe "sft": that of the later one is left out'),
        ("made_weather:NUMBER", 'the plug-in "weather" of anabatic.commands is a int, not a CommandPackage'),
        ("made_weather:ABSENT", "AttributeError: module 'made_weather' has no attribute 'ABSENT'"),
        ("made_nothing:PACKAGE", "ModuleNotFoundError: No module named 'made_nothing'"),
    ],
)
def test_a_bad_package_is_left_out(site: Path, value: str, warning: str, caplog: pytest.LogCaptureFixture) -> None:
    write_entry_points(site, "made-weather", f"[anabatic.commands]\nweather = {value}\n")
    with caplog.at_level(logging.WARNING, logger="anabatic"):
        logging.getLogger("anabatic").propagate = True
        names = list(command_table.COMMANDS)
    assert warning in caplog.text and "weather" not in names and "classify train" in names


def test_guests_are_here() -> None:
    assert {"classify train", "studio"} <= set(command_table.COMMANDS)
    assert {"sim status", "classify map"} <= set(command_tree.COMMANDS)
    assert command_table.import_served_classifier().__name__ == "TrajectoryClassifier"
    assert command_table.COMMANDS.find_row("classify train").schema_file.parent.parent.name == "config"
