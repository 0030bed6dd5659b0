"""A recipe argument is a path, or the name of a recipe in the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.cli import recipes as command
from anabatic.config.loading import settings, shipped_recipes
from anabatic.config.loading.command_package import RECIPE_FOLDER
from anabatic.core.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hint_of(word: str) -> tuple[str, str]:
    with pytest.raises(ConfigError) as raised:
        shipped_recipes.resolve_recipe(word)
    return str(raised.value), raised.value.hint


def test_name_is_the_recipe_of_the_package(folder: Path) -> None:
    assert shipped_recipes.resolve_recipe("demo") == RECIPE_FOLDER / "demo.yaml"
    (folder / "demo").mkdir()
    (folder / "demo.yaml").write_text("title: mine\n")
    assert shipped_recipes.resolve_recipe("demo") == RECIPE_FOLDER / "demo.yaml"
    assert shipped_recipes.resolve_recipe("overlays/tiny") == RECIPE_FOLDER / "overlays" / "tiny.yaml"


@pytest.mark.parametrize("word", ["demo.yaml", "./demo", "overlays/tiny", "plain"])
def test_path_is_the_file(folder: Path, word: str) -> None:
    path = folder / word
    path.parent.mkdir(exist_ok=True)
    path.write_text("title: mine\n")
    assert shipped_recipes.read_recipe(word).tree == {"title": "mine"}


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("recipes/demo.yaml", "anabatic run demo"),
        ("demo.yaml", "anabatic run demo"),
        ("recipes/qwen-lora.yaml", "anabatic sft -c qwen-lora"),
        ("recipes/overlays/tiny.yaml", "anabatic run speedrun -c overlays/tiny"),
    ],
)
def test_missing_file_of_a_known_name_has_the_command(word: str, line: str) -> None:
    message, hint = hint_of(word)
    assert message == f"{word} does not exist"
    assert hint.endswith(f": {line}")


def test_misspelt_name_has_the_nearest() -> None:
    message, hint = hint_of("qwn-lora")
    assert 'Did you mean "qwen-lora"?' in message
    assert hint.endswith("anabatic recipes list")


@pytest.mark.parametrize("word", ["../demo", "overlays/../demo", "", "/etc", "demo/"])
def test_no_other_way_leads_into_the_package(word: str) -> None:
    with pytest.raises(ConfigError):
        shipped_recipes.read_recipe(word)


def test_settings_load_by_name() -> None:
    job = settings.load_job("sft", ["qwen-lora"])
    assert (job.tuner, job.lora.r) == ("lora", 8)


def test_copy_is_the_file_and_overwrites_only_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.copy("demo")
    assert capsys.readouterr().out == "demo.yaml\n"
    first, _, rest = (RECIPE_FOLDER / "demo.yaml").read_text(encoding="utf-8").partition("\n")
    copied, _, unchanged = (folder / "demo.yaml").read_text(encoding="utf-8").partition("\n")
    assert first == "# yaml-language-server: $schema=../schemas/run.json" and unchanged == rest
    assert copied == f"# yaml-language-server: $schema={(RECIPE_FOLDER.parent / 'schemas/run.json').as_uri()}"
    (folder / "demo.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"demo\.yaml exists"):
        command.copy("demo")
    assert (folder / "demo.yaml").read_text() == "mine"
    command.copy("demo", Path("demo.yaml"), force=True)
    assert (folder / "demo.yaml").read_text(encoding="utf-8") == f"{copied}\n{rest}"
    (folder / "sub").mkdir()
    assert shipped_recipes.copy_recipe("overlays/tiny", Path("sub")) == Path("sub/tiny.yaml")


def test_show_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    command.show("speedrun")
    assert capsys.readouterr().out == (RECIPE_FOLDER / "speedrun.yaml").read_text(encoding="utf-8")


def test_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    command.list_recipes()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(shipped_recipes.RECIPES)
    command.list_recipes(json_=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(shipped_recipes.RECIPES)
    assert rows[0]["command"] == "run" and rows[0]["hardware"] == "2 CPU cores"
