"""Recipes that a new job starts from: shipped ones, files, settings of a run."""

from __future__ import annotations

import pytest

from anabatic.config.loading import settings, shipped_recipes, yaml_reader
from anabatic.core.errors import ConfigError, DataError
from anabatic_studio import forms, pickers, recipe_sources


@pytest.mark.process
@pytest.mark.parametrize("name", shipped_recipes.RECIPES)
def test_a_shipped_recipe_has_its_command_and_its_comments(name):
    found = recipe_sources.read_shipped_recipe(name)
    recipe = shipped_recipes.get_recipe(name)
    assert found["command"] == recipe.command in forms.FORM_COMMANDS
    assert found["name"] == name.rpartition("/")[2]
    assert "yaml-language-server" not in found["text"] and "\n# " in found["text"]
    assert recipe_sources.detect_command(found["text"]) == recipe.command
    files = [recipe.base, name] if recipe.base else [name]
    assert settings.parse_job(recipe.command, found["text"], "recipe") == settings.load_job(recipe.command, files)


@pytest.mark.process
def test_an_overlay_keeps_the_comments_of_its_base():
    found = recipe_sources.read_shipped_recipe("overlays/tiny")
    assert "Laid over speedrun" in found["text"] and "The NanoChat speedrun" in found["text"]


def test_there_is_no_such_recipe():
    with pytest.raises(ConfigError, match="no recipe"):
        recipe_sources.read_shipped_recipe("../demo")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("model: a\ndata: {train: [b]}\n", "sft"),
        ("tokenizer: t\nmodel: {depth: 4}\n", "pretrain"),
        ("stages: {a: {command: sft, job: {}}}\n", "run"),
        ("model: a\ntasks: [piqa]\n", "eval"),
        ("# yaml-language-server: $schema=file:///x/classify-train.json\nmodel: a\n", "classify train"),
        ("# yaml-language-server: $schema=../schemas/rm-rf.json\nbeta: 0.1\nmodel: a\n", "dpo"),
        ("apiVersion: v1\nkind: Pod\n", ""),
        ("- a\n", ""),
        ("", ""),
        ("a: [\n", ""),
    ],
)
def test_the_command_of_a_recipe(text, command):
    assert recipe_sources.detect_command(text) == command


@pytest.mark.parametrize("command", ["sft", "dpo", "reward", "pretrain", "eval"])
def test_the_settings_of_a_run_make_a_job_without_defaults(command):
    text = "out: o\ndata: {train: [x]}\n" + (
        "tokenizer: t\nmodel: {depth: 3}\n" if command == "pretrain" else "model: a\n"
    )
    job = settings.parse_job(command, text, "recipe")
    found = recipe_sources.make_recipe(settings.dump_job(job), "", "name")
    assert found["command"] == command
    assert settings.parse_job(command, found["text"], "recipe") == job
    assert settings.flatten_settings(yaml_reader.parse_yaml(found["text"], "recipe").tree).keys() <= {
        "out",
        "data.train",
        "tokenizer",
        "model",
        "model.depth",
    }


def test_a_run_without_settings_is_an_error():
    with pytest.raises(ConfigError, match=r"first has no settings"):
        recipe_sources.make_recipe("", "sft-like", "first")


def test_files_that_are_no_recipes(tmp_path):
    (tmp_path / "pod.yaml").write_text("kind: Pod\n", encoding="utf-8")
    (tmp_path / "large.yaml").write_text("# x\n" * (recipe_sources.MAX_RECIPE_BYTES // 2), encoding="utf-8")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, error in (("pod", ConfigError), ("large", DataError), ("binary", DataError), ("missing", DataError)):
        with pytest.raises(error, match=name):
            recipe_sources.read_recipe_file(tmp_path / f"{name}.yaml")


def test_yaml_files_are_listed_and_run_folders_and_links_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "sub/b.yml", "runs/r/config.yaml", ".hidden/c.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("model: a\n", encoding="utf-8")
    (tmp_path / "runs" / "r" / "metrics.jsonl").touch()
    (tmp_path / "link.yaml").symlink_to("/etc/hostname")
    assert list(pickers.list_recipe_files([tmp_path])) == ["a.yaml", "sub/b.yml"]
