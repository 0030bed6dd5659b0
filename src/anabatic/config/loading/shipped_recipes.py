"""The recipes inside the package: what each is for, and how a name or a path given by the user becomes a file."""

from __future__ import annotations

import os
from pathlib import Path

from anabatic.config.loading import command_table, yaml_reader
from anabatic.config.loading.command_package import CommandTable, ShippedRecipe
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import align_columns, did_you_mean
from anabatic.core.paths import write_atomic

_SUFFIXES = (".yaml", ".yml")
_ONE_910B3 = "1 x Ascend 910B3 (64 GB)"
_EIGHT_910B3 = "8 x Ascend 910B3 (64 GB)"

_ROWS = (
    ShippedRecipe("demo", "run", "from plain text to a model that answers, in five minutes", "2 CPU cores"),
    ShippedRecipe("rl_demo", "run", "reinforcement learning with a small model, in a few minutes", "2 CPU cores"),
    ShippedRecipe("vision_demo", "run", "a small model learns to see pictures that are drawn", "2 CPU cores"),
    ShippedRecipe("speedrun", "run", "all stages of nanochat, depth 20", _EIGHT_910B3),
    ShippedRecipe("qwen-lora", "sft", "LoRA for any Qwen2.5 or Qwen3 (settings for 7B)", _ONE_910B3),
    ShippedRecipe("qwen-full", "sft", "full fine-tuning of any Qwen2.5 or Qwen3 (settings for 14B)", _EIGHT_910B3),
    ShippedRecipe(
        "qwen32b-lora-curriculum",
        "sft",
        "LoRA for 32B, with a curriculum from easy to hard rows",
        f"2 x {_EIGHT_910B3}",
    ),
    ShippedRecipe("long-context", "sft", "LoRA on rows of up to 32,768 tokens", _EIGHT_910B3),
    ShippedRecipe("qwen32b-32k-lora", "sft", "LoRA for 32B on rows of up to 32,768 tokens", f"2 x {_EIGHT_910B3}"),
    ShippedRecipe("qwen8b-128k-lora", "sft", "LoRA for 8B on rows of up to 131,072 tokens", _EIGHT_910B3),
    ShippedRecipe("qwen3-vl-lora", "sft", "LoRA for Qwen3-VL on rows with pictures (settings for 8B)", _ONE_910B3),
    ShippedRecipe("qwen30b-a3b-lora", "sft", "LoRA for 30B-A3B, a mixture of experts", _EIGHT_910B3),
    ShippedRecipe("qwen235b-a22b-lora", "sft", "LoRA for 235B-A22B, a mixture of experts", f"4 x {_EIGHT_910B3}"),
    ShippedRecipe("tools", "sft", "LoRA on conversations with tool calls", _ONE_910B3),
    ShippedRecipe("dpo", "dpo", "LoRA on pairs of a better and a worse answer", _ONE_910B3),
    ShippedRecipe("grpo-maths", "rl", "GRPO on questions whose answer is a number (settings for 1.5B)", _EIGHT_910B3),
    ShippedRecipe("continue-chinese", "pretrain", "continued pretraining on Chinese text", _EIGHT_910B3),
    ShippedRecipe("overlays/tiny", "run", "the stages of speedrun in two minutes", "2 CPU cores", base="speedrun"),
    ShippedRecipe("overlays/two-devices", "run", "the demo on two devices", "2 devices", base="demo"),
)

RECIPES = CommandTable(_ROWS, lambda package: package.recipes)
"""Name -> recipe, in the order of the list."""


def get_recipe(name: str) -> ShippedRecipe:
    """Return the shipped recipe called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in RECIPES:
        raise ConfigError(
            f'there is no recipe "{name}".{did_you_mean(name, RECIPES)}', "list them: anabatic recipes list"
        )
    return RECIPES[name]


def resolve_recipe(word: str | Path) -> Path:
    """Return the file that a recipe argument means: a path, or the name of a shipped recipe.

    `demo` is the shipped recipe, also where a file or folder `demo` exists; `./demo` and `demo.yaml` are files.

    Raises:
        ConfigError: it is neither.
    """
    text, path = str(word), Path(word)
    if path.suffix not in _SUFFIXES and text in RECIPES and not ("/" in text and path.is_file()):
        return RECIPES[text].path
    if path.exists():
        return path
    recipe = RECIPES.get(text.removesuffix(path.suffix if path.suffix in _SUFFIXES else "").removeprefix("recipes/"))
    if recipe is not None:
        raise ConfigError(f"{text} does not exist", f"the recipe of this name in the package: {recipe.command_line}")
    if "/" not in text and path.suffix not in _SUFFIXES:
        return get_recipe(text).path
    return path


def format_table() -> str:
    """Return the shipped recipes as aligned text, one line each."""
    rows = [("NAME", "COMMAND", "FOR", "WHAT")]
    rows += [(recipe.name, recipe.command, recipe.hardware, recipe.summary) for recipe in RECIPES.values()]
    return "\n".join(align_columns(rows)) + "\n"


def copy_recipe(name: str, target: Path, force: bool = False) -> Path:
    """Write the recipe called `name` to `target`, with its comments; into it, where that is a folder. Return the file.

    Raises:
        ConfigError: there is no such recipe, or the file exists and `force` is not set.
        Failure: it cannot be written.
    """
    recipe = get_recipe(name)
    file = target / recipe.path.name if target.is_dir() else target
    if file.exists() and not force:
        raise ConfigError(f"{file} exists", "give another file name, or --force to overwrite it")
    text = recipe.path.read_text(encoding="utf-8")
    text = text.replace(format_schema_line(recipe), format_schema_line(recipe, absolute=True), 1)
    write_atomic(file, text.encode(), f"give a file that you may write: `anabatic recipes copy {name} FILE`")
    return file


def format_schema_line(recipe: ShippedRecipe, absolute: bool = False) -> str:
    """Return the comment that makes editors check a recipe and explain its settings.

    A copy outside of the package needs the absolute path. https://github.com/redhat-developer/yaml-language-server
    """
    file = command_table.COMMANDS.find_row(recipe.command).schema_file
    path = file.as_uri() if absolute else os.path.relpath(file, recipe.path.parent)
    return f"# yaml-language-server: $schema={path}\n"


def read_recipe(word: str | Path) -> yaml_reader.YamlSource:
    """Read a recipe given as a path or as the name of a shipped one.

    Raises:
        ConfigError: as for `resolve_recipe` and `yaml_reader.read_yaml`.
    """
    return yaml_reader.read_yaml(resolve_recipe(word))
