"""Every recipe that a user may copy is good input of its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabatic.config import check, commands, load, template, yaml_file
from anabatic.recipes import stages
from house import tree

RECIPES = sorted((tree.ROOT / "recipes").glob("*.yaml"))
OVERLAYS = sorted((tree.ROOT / "recipes" / "overlays").glob("*.yaml"))


def command_of(recipe: Path) -> str:
    """The command a recipe is for: named in its first lines as `anabatic COMMAND ... FILE`, else `run`."""
    head = [line for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    named = [name for name in commands.COMMANDS if any(f"anabatic {name} " in line for line in head)]
    assert named, f"{tree.name(recipe)}: say in a comment at the top how to run it (anabatic COMMAND ...)"
    return max(named, key=len)


@pytest.mark.parametrize("recipe", RECIPES, ids=tree.name)
def test_recipe_is_strictly_valid(recipe: Path) -> None:
    name = command_of(recipe)
    job = load.load(name, [recipe])
    if name == "run":
        supplied = {key: value or "supplied-by-the-user" for key, value in job.vars.items()}
        assert [stage.name for stage in stages.plan(job, supplied)] == list(job.stages)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=tree.name)
def test_overlay_fits_the_recipe_that_it_names(overlay: Path) -> None:
    first = overlay.read_text(encoding="utf-8").splitlines()[0]
    (recipe,) = [path for path in RECIPES if tree.name(path) in first]
    job = load.load("run", [recipe, overlay])
    supplied = {key: value or "supplied-by-the-user" for key, value in job.vars.items()}
    assert [stage.name for stage in stages.plan(job, supplied)] == list(load.load("run", [recipe]).stages)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_template_is_its_own_recipe(name: str) -> None:
    """`config show` prints a recipe whose values are the defaults."""
    cls = commands.get(name).job_class()
    tree_read = yaml_file.parse(template.template(name), "template").tree
    assert check.section(tree_read, cls, check.Where()) == load.defaults(cls)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_setting_is_explained(name: str) -> None:
    text = template.template(name)
    lines = text.splitlines()
    bare = [lines[i] for i in range(1, len(lines)) if ":" in lines[i] and not lines[i].lstrip().startswith(("#", "- "))]
    bare = [line for line in bare if not lines[lines.index(line) - 1].lstrip().startswith("#")]
    assert not bare, f"write a text below these fields: {bare}"
