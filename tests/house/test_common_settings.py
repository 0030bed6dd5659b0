"""The lists of common settings: what help and `config show` show of commands that have many."""

from __future__ import annotations

from collections import Counter

import pytest

from anabatic.config.loading import command_table, common_settings, validation
from house.limits import LIMITS

MANY = LIMITS["uncommon_settings"]
"""Settings of a command beyond which its help lists the common ones alone."""


def count_settings(name: str) -> int:
    return len(list(validation.iter_settings(command_table.COMMANDS.find_row(name).import_job_class())))


def test_commands_with_many_settings_have_a_list() -> None:
    many = {name for name in command_table.COMMANDS if count_settings(name) > MANY}
    assert many <= set(common_settings.list_common_commands())


@pytest.mark.parametrize("name", common_settings.list_common_commands())
def test_common_settings_exist_once_by_task(name: str) -> None:
    tasks = common_settings.get_common_settings(name)
    keys = [key for keys in tasks.values() for key in keys]
    assert not set(keys) - {
        key for key, _ in validation.iter_settings(command_table.COMMANDS.find_row(name).import_job_class())
    }
    assert not [key for key, times in Counter(keys).items() if times > 1]
    assert 15 <= len(keys) <= 30
    sections = Counter(section for keys in tasks.values() for section in {key.partition(".")[0] for key in keys})
    assert set(sections.values()) == {1}, "YAML has each section once: leave it below one task"
