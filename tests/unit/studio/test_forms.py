"""Every setting of a command is in its form exactly once, with its type, default and text."""

from __future__ import annotations

import re

import pytest

from anabatic.config.loading import command_table, settings, validation
from anabatic.core.errors import ConfigError
from anabatic_studio import forms


@pytest.mark.parametrize("command", forms.FORM_COMMANDS)
def test_the_form_has_every_setting_once(command):
    form = forms.describe_form(command)
    fields = [field for group in form["groups"] for field in group["fields"]]
    cls = command_table.COMMANDS.find_row(command).import_job_class()
    assert sorted(field["key"] for field in fields) == sorted(key for key, _ in validation.iter_settings(cls))
    defaults = settings.flatten_settings(settings.default_tree(cls))
    for field in fields:
        assert field["doc"], field["key"]
        assert re.search("[\u4e00-\u9fff]", field["zh"]), field["key"]
        assert field["kind"] in ("integer", "number", "boolean", "text", "choice", "list", "section")
        assert field["key"] not in defaults or field["default"] == defaults[field["key"]]
        assert field["kind"] != "choice" or field["default"] in (None, *field["choices"])
    assert any(group["common"] for group in form["groups"])
    for group in form["groups"]:  # the name of a section is the same in all languages
        assert bool(re.search("[\u4e00-\u9fff]", group["zh"])) is group["title"][0].isupper(), group["title"]


def test_an_unknown_command_is_refused():
    with pytest.raises(ConfigError, match="unknown command"):
        forms.describe_form("sftt")
