"""A package that is missing is answered with the command that installs it."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from anabatic.core import extras
from anabatic.core.errors import ConfigError


class Missing:
    """A finder for which one package is not installed, or fails while it is imported."""

    def __init__(self, name: str, error: ImportError | None) -> None:
        self.name, self.error = name, error

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.name:
            return None
        raise self.error or ModuleNotFoundError(f"No module named '{fullname}'", name=fullname.partition(".")[0])


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> object:
    """A function that removes a package from this process."""

    def remove(name: str, error: ImportError | None = None) -> None:
        for loaded in [each for each in sys.modules if each.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setattr(sys, "meta_path", [Missing(name, error), *sys.meta_path])

    return remove


@pytest.mark.parametrize("top", extras.OPTIONAL_PACKAGES)
def test_missing_package_names_its_extra(top: str, without: object) -> None:
    without(top)  # type: ignore[operator]
    with pytest.raises(ConfigError) as raised:
        extras.import_optional(top, "this")
    distribution, extra = extras.OPTIONAL_PACKAGES[top]
    assert str(raised.value) == f"this needs {distribution}, which is not installed"
    assert raised.value.hint == (f"pip install 'anabatic[{extra}]'" if extra else f"pip install {distribution}")


def test_part_of_a_missing_package(without: object) -> None:
    without("h3")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"^cells needs h3, which is not installed$") as raised:
        extras.import_optional("h3.api.basic_int", "cells", "or use motion")
    assert raised.value.hint == "pip install 'anabatic[vessels]', or use motion"


@pytest.mark.parametrize(
    "error", [ImportError("libh3.so: cannot open"), ModuleNotFoundError("No module named 'cffi'", name="cffi")]
)
def test_broken_package_says_why(error: ImportError, without: object) -> None:
    without("h3", error)  # type: ignore[operator]
    with pytest.raises(ConfigError) as raised:
        extras.import_optional("h3", "cells")
    assert str(raised.value) == f"cells needs h3, which cannot be imported: {error}"
    assert raised.value.hint == "pip install --force-reinstall h3"


def test_installed_module_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", module)
    assert extras.import_optional("ray", "this") is module


@pytest.mark.parametrize(
    ("file", "command"),
    [("uv-receipt.toml", "uv tool install --force"), ("pipx_metadata.json", "pipx install --force")],
)
def test_environment_of_a_tool_gets_the_command_of_the_tool(
    file: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert extras.format_install_command("fastapi") == "pip install 'anabatic[serve]'"
    (tmp_path / file).write_text("")
    assert extras.format_install_command("fastapi") == f"{command} 'anabatic[serve]'"
