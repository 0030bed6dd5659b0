"""Every recipe that a user may copy is good input of its command."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabatic.cli.launch.option_parsing import resolve_training_job
from anabatic.config.loading import command_table, common_settings, settings, validation, yaml_reader
from anabatic.recipes import plan_command
from anabatic.recipes.pipeline import stage_plan
from house import tree

RECIPES = sorted((tree.ROOT / "recipes").glob("*.yaml"))
OVERLAYS = sorted((tree.ROOT / "recipes" / "overlays").glob("*.yaml"))


NEAR = 1.05
"""What `plan_command` calls no faster."""
MOST = 0.9
"""Share of a device's memory that a recipe may fill by the plan, which real runs exceed by some percent."""


def command_of(recipe: Path) -> str:
    """The command a recipe is for: named in its first lines as `anabatic COMMAND ... FILE`, else `run`."""
    head = [line for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    named = [name for name in command_table.COMMANDS if any(f"anabatic {name} " in line for line in head)]
    assert named, f"{tree.name(recipe)}: say in a comment at the top how to run it (anabatic COMMAND ...)"
    return max(named, key=len)


@pytest.mark.parametrize("recipe", RECIPES, ids=tree.name)
def test_recipe_is_strictly_valid(recipe: Path) -> None:
    name = command_of(recipe)
    job = settings.load_job(name, [recipe])
    if name == "run":
        supplied = {key: value or "supplied-by-the-user" for key, value in job.vars.items()}
        assert [stage.name for stage in stage_plan.plan_stages(job, supplied)] == list(job.stages)


def planned(recipe: Path) -> list[str]:
    """The words of the `anabatic plan` in a recipe's first lines; empty where there is none."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    found = [line.lstrip("# ") for line in lines if line.startswith("#   anabatic plan ")]
    assert len(found) <= 1, tree.name(recipe)
    return shlex.split(found[0])[2:] if found else []


def require_best(job: Any, chip: str, npus: int, nodes: int) -> None:
    """Nothing that leaves as much memory is faster than the settings of a job, by the plan."""
    place = plan_command.resolve_cluster_size(job, chip, npus, nodes)
    found = plan_command.estimate_job(job, place)
    mine = found.choice
    assert mine.needed_bytes <= MOST * mine.available_bytes, "more memory than is safe"
    best = max(
        (one for one in found.fitting if one.needed_bytes <= MOST * one.available_bytes),
        key=lambda one: one.tokens_per_s,
    )
    assert best.tokens_per_s <= NEAR * mine.tokens_per_s, replace(best.setup, shape=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES, ids=tree.name)
def test_settings_are_what_the_plan_finds_best(recipe: Path) -> None:
    """A recipe that trains and names its devices says for what, in a command that the reader can repeat."""
    words = planned(recipe)
    if not words:
        assert command_of(recipe) == "run", "say for which model and chip the settings are: anabatic plan ... FILE"
        return
    border = words.index("--")
    options = dict(zip(words[:border:2], words[1:border:2], strict=True))
    assert f"recipes/{recipe.name}" in words
    words = [str(recipe) if word == f"recipes/{recipe.name}" else word for word in words[border + 1 :]]
    _, job = resolve_training_job(words)
    npus = int(options.get("--npus", job.device.nproc))
    require_best(job, options["--chip"], npus, int(options.get("--nodes", 1)))


def test_the_stages_of_the_speedrun_are_what_the_plan_finds_best() -> None:
    job = settings.load_job("run", [tree.ROOT / "recipes" / "speedrun.yaml"])
    supplied = {key: value or "supplied-by-the-user" for key, value in job.vars.items()}
    found = {stage.name: stage.job for stage in stage_plan.plan_stages(job, supplied)}
    require_best(found["base"], "910B3", 8, 1)
    same = [(found[name].batch, found[name].parallel.strategy) for name in ("base", "mid")]
    assert same[0] == same[1], "the same model"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=tree.name)
def test_overlay_fits_the_recipe_that_it_names(overlay: Path) -> None:
    first = overlay.read_text(encoding="utf-8").splitlines()[0]
    (recipe,) = [path for path in RECIPES if tree.name(path) in first]
    job = settings.load_job("run", [recipe, overlay])
    supplied = {key: value or "supplied-by-the-user" for key, value in job.vars.items()}
    assert [stage.name for stage in stage_plan.plan_stages(job, supplied)] == list(
        settings.load_job("run", [recipe]).stages
    )


@pytest.mark.parametrize("name", command_table.COMMANDS)
def test_template_is_its_own_recipe(name: str) -> None:
    """`config show` prints a recipe whose values are the defaults."""
    cls = command_table.get_command(name).import_job_class()
    tree_read = yaml_reader.parse_yaml(settings.render_template(name), "template").tree
    assert validation.check_section(tree_read, cls, validation.SettingNamer()) == settings.default_tree(cls)


@pytest.mark.parametrize("name", common_settings.list_common_commands())
def test_short_template_holds_the_common_settings(name: str) -> None:
    """`config show` prints a recipe whose values are the defaults, without `--all` too."""
    cls = command_table.get_command(name).import_job_class()
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
