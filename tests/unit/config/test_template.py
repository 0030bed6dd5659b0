"""Commented recipes: every setting explained, and equal to the defaults when read back."""

from __future__ import annotations

import dataclasses

import pytest

from anabatic.config import check, commands, load, template, yaml_file
from anabatic.core.errors import ConfigError


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_template_reads_back_as_the_defaults(name: str) -> None:
    text = template.template(name)
    cls = commands.get(name).job_class()
    tree = yaml_file.parse(text, "template").tree
    assert tree == load.defaults(cls)
    assert check.section(tree, cls, check.Where("template: ")) == tree
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_setting_is_explained(name: str) -> None:
    def classes(cls: type) -> list[type]:
        inner = [hint for hint in check.hints(cls).values() if dataclasses.is_dataclass(hint)]
        return [cls, *(found for hint in inner for found in classes(hint))]

    for cls in classes(commands.get(name).job_class()):
        docs = template.field_docs(cls)
        for field, hint in check.hints(cls).items():
            assert docs.get(field) or dataclasses.is_dataclass(hint), f"{cls.__name__}.{field} has no docstring"
        assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("), f"{cls.__name__} has no docstring"


def test_a_filled_template_builds() -> None:
    tree = yaml_file.parse(template.template("pretrain"), "t").tree
    tree["tokenizer"] = "tok"
    tree["data"]["train"] = ["stdlib:"]
    job = load.build("pretrain", tree, "t")
    assert job == load.build("pretrain", {"tokenizer": "tok", "data": {"train": ["stdlib:"]}}, "t")


def test_choices_are_listed() -> None:
    assert "Choices: fail, skip." in template.template("sft")


def test_unknown_command() -> None:
    with pytest.raises(ConfigError, match="unknown command"):
        template.template("sfft")
