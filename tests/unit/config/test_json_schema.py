"""What the schema accepts and what the command accepts: the recipes of the package, defaults, and mistakes."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema_rs
import pytest

from anabatic.config.loading import command_table, json_schema, settings, shipped_recipes, validation
from anabatic.core.errors import ConfigError


def validator(command: str) -> jsonschema_rs.Draft7Validator:
    return jsonschema_rs.Draft7Validator(json_schema.make_schema(command))


@pytest.mark.parametrize("name", shipped_recipes.RECIPES)
def test_recipes_of_the_package(name: str) -> None:
    recipe = shipped_recipes.RECIPES[name]
    tree = shipped_recipes.read_recipe(name).tree
    assert list(validator(recipe.command).iter_errors(tree)) == []
    assert not validator(recipe.command).is_valid({**tree, "no_such_setting": 1})


@pytest.mark.parametrize("command", command_table.COMMANDS)
def test_defaults_are_valid(command: str) -> None:
    schema = json_schema.make_schema(command)
    assert jsonschema_rs.meta.is_valid(schema)
    cls = command_table.COMMANDS.find_row(command).import_job_class()
    assert list(jsonschema_rs.Draft7Validator(schema).iter_errors(settings.default_tree(cls))) == []


MISTAKES: list[tuple[str, Any]] = [
    ("optim.lrr", 1),
    ("optim.lr", "fast"),
    ("optim.lr", "1e"),
    ("seed", None),
    ("schedule.max_steps", 1.5),
    ("schedule.max_steps", "10"),
    ("tuner", "lorra"),
    ("train_on_inputs", "true"),
    ("data.train", [1]),
    ("data", ["a.jsonl"]),
    ("model", 3),
    ("lora.target_modules", {"a": 1}),
    ("data.columns", ["a=b"]),
]
GOOD: list[tuple[str, Any]] = [
    ("optim.lr", 1),
    ("optim.lr", "3e-4"),
    ("schedule.max_steps", None),
    ("data.train", "a.jsonl"),
    ("data.train", ["a.jsonl", "b.jsonl@2"]),
    ("data.columns", {"query": "question"}),
    ("tuner", "lora"),
]


@pytest.mark.parametrize(("key", "value"), [*MISTAKES, *GOOD])
def test_schema_and_command_agree(key: str, value: Any) -> None:
    tree: dict[str, Any] = {"model": "m", "data": {"train": ["a.jsonl"]}}
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = value
    accepted = (key, value) in GOOD
    assert validator("sft").is_valid(tree) is accepted
    cls = command_table.COMMANDS.find_row("sft").import_job_class()
    try:
        validation.check_section(copy.deepcopy(tree), cls, validation.SettingNamer())
    except ConfigError:
        assert not accepted
    else:
        assert accepted


@pytest.mark.parametrize(
    ("job", "is_valid"),
    [
        ({"depth": 3}, False),
        ({"model": {"depth": 3}}, True),
        ({"model": {"depth": "${depth}"}}, True),
        ({"model": {"depth": "three"}}, False),
    ],
)
def test_stages_are_checked_by_their_command(job: dict[str, Any], is_valid: bool) -> None:
    check = validator("run")
    assert check.is_valid({"stages": {"base": {"command": "pretrain", "job": job}}}) is is_valid
    assert not check.is_valid({"stages": {"base": {"command": "pretrian", "job": {}}}})


def test_print_needs_a_command() -> None:
    from anabatic.cli import config

    with pytest.raises(ConfigError, match="which command"):
        config.schema()
    with pytest.raises(ConfigError, match="unknown command"):
        config.schema("nope")
