"""Commented recipes: every setting explained, and equal to the defaults when read back."""

from __future__ import annotations

import dataclasses

import pytest

from anabatic.config.loading import command_table, settings, validation, yaml_reader
from anabatic.core.errors import ConfigError


@pytest.mark.parametrize("name", command_table.COMMANDS)
def test_template_reads_back_as_the_defaults(name: str) -> None:
    text = settings.render_template(name)
    cls = command_table.COMMANDS.find_row(name).import_job_class()
    tree = yaml_reader.parse_yaml(text, "template").tree
    assert tree == settings.default_tree(cls)
    assert validation.check_section(tree, cls, validation.SettingNamer("template: ")) == tree
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("name", command_table.COMMANDS)
def test_every_setting_is_explained(name: str) -> None:
    def classes(cls: type) -> list[type]:
        inner = [hint for hint in validation.field_types(cls).values() if dataclasses.is_dataclass(hint)]
        return [cls, *(found for hint in inner for found in classes(hint))]

    for cls in classes(command_table.COMMANDS.find_row(name).import_job_class()):
        docs = settings.field_docs(cls)
        for field, hint in validation.field_types(cls).items():
            assert docs.get(field) or dataclasses.is_dataclass(hint), f"{cls.__name__}.{field} has no docstring"
        assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("), f"{cls.__name__} has no docstring"


def test_a_filled_template_builds() -> None:
    tree = yaml_reader.parse_yaml(settings.render_template("pretrain"), "t").tree
    tree["tokenizer"] = "tok"
    tree["data"]["train"] = ["stdlib:"]
    job = settings.build_job("pretrain", tree, "t")
    assert job == settings.build_job("pretrain", {"tokenizer": "tok", "data": {"train": ["stdlib:"]}}, "t")


def test_choices_are_listed() -> None:
    assert "Choices: fail, skip." in settings.render_template("sft")


def test_unknown_command() -> None:
    with pytest.raises(ConfigError, match="unknown command"):
        settings.render_template("sfft")
