"""Every recipe that a user may copy is good input of its command."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from operator import attrgetter
from typing import Any

import pytest

from anabatic.cli.launch.option_parsing import resolve_training_job
from anabatic.config.loading import command_table, common_settings, settings, shipped_recipes, validation, yaml_reader
from anabatic.config.loading.shipped_recipes import ShippedRecipe
from anabatic.recipes import plan_command
from anabatic.recipes.pipeline import stage_plan

RECIPES = [recipe for recipe in shipped_recipes.RECIPES.values() if not recipe.base]
OVERLAYS = [recipe for recipe in shipped_recipes.RECIPES.values() if recipe.base]
name_of = attrgetter("name")


NEAR = 1.05
"""What `plan_command` calls no faster."""
MOST = 0.9
"""Share of a device's memory that a recipe may fill by the plan, which real runs exceed by some percent."""


def test_list_holds_every_file() -> None:
    folders = {recipe.folder for recipe in shipped_recipes.RECIPES.values()}
    files = [path.relative_to(folder).as_posix() for folder in folders for path in folder.rglob("*.*")]
    assert sorted(files) == sorted(f"{name}.yaml" for name in shipped_recipes.RECIPES)


def head_of(recipe: ShippedRecipe) -> list[str]:
    """The comment at the top of the file."""
    lines = recipe.path.read_text(encoding="utf-8").splitlines()
    return [line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines)]


@pytest.mark.parametrize("recipe", shipped_recipes.RECIPES.values(), ids=name_of)
def test_head_says_how_to_use_it(recipe: ShippedRecipe) -> None:
    """One of the commands in the comment at the top is that of the list."""
    files = f"{recipe.base} -c {recipe.name}" if recipe.base else recipe.name
    given = f"run {files}" if recipe.command == "run" else f"{recipe.command} -c {files}"
    assert given in " ".join(head_of(recipe)).replace("\\ ", "")


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_recipe_is_strictly_valid(recipe: ShippedRecipe) -> None:
    job = settings.load_job(recipe.command, [recipe.name])
    if recipe.command == "run":
        supplied = {key: value or "supplied-by-the-user" for key, value in job.vars.items()}
        assert [stage.name for stage in stage_plan.plan_stages(job, supplied)] == list(job.stages)


def planned(recipe: ShippedRecipe) -> list[str]:
    """The words of the `anabatic plan` in a recipe's first lines; empty where there is none."""
    found = [line for line in head_of(recipe) if line.startswith("anabatic plan ")]
    assert len(found) <= 1, recipe.name
    return shlex.split(found[0])[2:] if found else []


def require_best(job: Any, chip: str, npus: int, nodes: int) -> None:
    """Nothing that leaves as much memory is faster than the settings of a job, by the plan."""
    place = plan_command.find_machine(job, chip, npus, nodes)
    found = plan_command.estimate_job(job, place)
    mine = found.choice
    assert mine.needed_bytes <= MOST * mine.available_bytes, "more memory than is safe"
    best = max(
        (one for one in found.fitting if one.needed_bytes <= MOST * one.available_bytes),
        key=lambda one: one.tokens_per_s,
    )
    assert best.tokens_per_s <= NEAR * mine.tokens_per_s, replace(best.setup, shape=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_settings_are_what_the_plan_finds_best(recipe: ShippedRecipe) -> None:
    """A recipe that trains and names its devices says for what, in a command that the reader can repeat."""
    words = planned(recipe)
    if not words:
        assert recipe.command == "run", "say for which model and chip the settings are: anabatic plan ... -c NAME"
        return
    border = words.index("--")
    options = dict(zip(words[:border:2], words[1:border:2], strict=True))
    assert recipe.name in words
    _, job = resolve_training_job(words[border + 1 :])
    npus, nodes = int(options.get("--npus", job.device.nproc)), int(options.get("--nodes", 1))
    assert recipe.hardware == f"{f'{nodes} x ' if nodes > 1 else ''}{npus} x Ascend {options['--chip']} (64 GB)"
    require_best(job, options["--chip"], npus, nodes)


def test_the_stages_of_the_speedrun_are_what_the_plan_finds_best() -> None:
    job = settings.load_job("run", ["speedrun"])
    supplied = {key: value or "supplied-by-the-user" for key, value in job.vars.items()}
    found = {stage.name: stage.job for stage in stage_plan.plan_stages(job, supplied)}
    require_best(found["base"], "910B3", 8, 1)
    same = [(found[name].batch, found[name].parallel.strategy) for name in ("base", "mid")]
    assert same[0] == same[1], "the same model"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=name_of)
def test_overlay_fits_the_recipe_that_it_names(overlay: ShippedRecipe) -> None:
    job = settings.load_job("run", [overlay.base, overlay.name])
    supplied = {key: value or "supplied-by-the-user" for key, value in job.vars.items()}
    stages = [stage.name for stage in stage_plan.plan_stages(job, supplied)]
    assert stages == list(settings.load_job("run", [overlay.base]).stages)


@pytest.mark.parametrize("name", command_table.COMMANDS)
def test_template_is_its_own_recipe(name: str) -> None:
    """`config show` prints a recipe whose values are the defaults."""
    cls = command_table.COMMANDS.find_row(name).import_job_class()
    tree_read = yaml_reader.parse_yaml(settings.render_template(name), "template").tree
    assert validation.check_section(tree_read, cls, validation.SettingNamer()) == settings.default_tree(cls)


@pytest.mark.parametrize("name", common_settings.list_common_commands())
def test_short_template_holds_the_common_settings(name: str) -> None:
    """`config show` prints a recipe whose values are the defaults, without `--all` too."""
    cls = command_table.COMMANDS.find_row(name).import_job_class()
    text = settings.render_common_template(name)
    values = validation.check_section(yaml_reader.parse_yaml(text, "template").tree, cls, validation.SettingNamer())
    assert settings.merge_trees(settings.default_tree(cls), values) == settings.default_tree(cls)
    tasks = common_settings.get_common_settings(name)
    found = set()
    for key, _ in validation.iter_settings(cls):
        first, _, inside = key.partition(".")
        if first in values and (not inside or inside in values[first]):
            found.add(key)
    assert found == {key for keys in tasks.values() for key in keys}
    assert [line.strip("# =") for line in text.splitlines() if line.startswith("# ====")] == list(tasks)


@pytest.mark.parametrize("name", command_table.COMMANDS)
@pytest.mark.parametrize("render", [settings.render_template, settings.render_common_template])
def test_every_setting_is_explained(name: str, render: Callable[[str], str]) -> None:
    text = render(name)
    lines = text.splitlines()
    bare = [lines[i] for i in range(1, len(lines)) if ":" in lines[i] and not lines[i].lstrip().startswith(("#", "- "))]
    bare = [line for line in bare if not lines[lines.index(line) - 1].lstrip().startswith("#")]
    assert not bare, f"write a text below these fields: {bare}"
