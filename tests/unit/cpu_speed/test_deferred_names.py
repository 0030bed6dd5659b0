"""Imports that wait: what is bound, when the module is imported, and which statements run as usual."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anabatic.cpu_speed.quick_imports import DeferredName, WaitingImports, resolve_name

HEAVY = """
class Shape:
    sides = 4

def area(side):
    return side * side

REGISTRY = {}
"""
NAMES = {"heavy_library.shapes": frozenset({"Shape", "area", "Missing"}), "absent_library": frozenset({"thing"})}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A heavy package, and a folder for the package that imports it."""
    for package, files in {
        "heavy_library": {
            "__init__": "",
            "shapes": HEAVY,
            "filler": "from .shapes import REGISTRY\nREGISTRY['a'] = 1\n",
        },
        "light_library": {"__init__": ""},
    }.items():
        (tmp_path / package).mkdir()
        for name, text in files.items():
            (tmp_path / package / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("heavy_library", "light_library"))]:
        del sys.modules[name]


def import_light(folder: Path, text: str, package: str = "light_library") -> Any:
    (folder / "light_library" / "user.py").write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    with WaitingImports((package,), NAMES):
        return importlib.import_module("light_library.user")


def is_heavy_imported() -> bool:
    return "heavy_library.shapes" in sys.modules


def test_module_is_imported_at_the_first_call_and_replaces_the_placeholder(folder: Path) -> None:
    user = import_light(folder, "from heavy_library.shapes import area as compute, Shape\n")
    assert isinstance(user.compute, DeferredName)
    assert not is_heavy_imported()
    assert user.compute(3) == 9
    assert user.compute is sys.modules["heavy_library.shapes"].area
    assert isinstance(user.Shape, DeferredName)
    assert user.Shape.sides == 4
    assert user.Shape is sys.modules["heavy_library.shapes"].Shape


def test_isinstance_imports_nothing_and_finds_objects_of_a_module_that_others_imported(folder: Path) -> None:
    user = import_light(
        folder,
        "from heavy_library.shapes import Shape\n"
        "def is_shape(thing):\n    return isinstance(thing, Shape)\n"
        "def is_either(thing):\n    return isinstance(thing, (int, Shape))\n",
    )
    assert not user.is_shape(3)
    assert user.is_either(3)
    assert not is_heavy_imported()
    shape = importlib.import_module("heavy_library.shapes").Shape()
    assert user.is_shape(shape)
    assert user.is_either(shape)


def test_subclass_check_and_subclass_of_a_placeholder(folder: Path) -> None:
    user = import_light(
        folder, "from heavy_library.shapes import Shape\ndef is_kind(kind):\n    return issubclass(kind, Shape)\n"
    )
    assert not user.is_kind(int)
    assert not is_heavy_imported()
    user = import_light_again(folder, "from heavy_library.shapes import Shape\nclass Square(Shape):\n    pass\n")
    assert user.Square.__mro__[1] is sys.modules["heavy_library.shapes"].Shape


def import_light_again(folder: Path, text: str) -> ModuleType:
    del sys.modules["light_library.user"]
    return import_light(folder, text)


def test_annotations_that_are_evaluated(folder: Path) -> None:
    user = import_light(
        folder,
        "from heavy_library.shapes import Shape\ndef f(a: Shape | None, b: int | Shape) -> 'Shape | int': ...\n",
    )
    assert set(user.f.__annotations__) == {"a", "b", "return"}
    assert not is_heavy_imported()


@pytest.mark.parametrize(
    "statement",
    [
        "from heavy_library.shapes import area, REGISTRY",  # a name that the table lacks
        "from heavy_library.filler import REGISTRY",  # a module that the table lacks
        "import heavy_library.shapes",
    ],
)
def test_other_statements_run_as_usual(folder: Path, statement: str) -> None:
    user = import_light(folder, statement + "\n")
    assert is_heavy_imported()
    assert not any(isinstance(value, DeferredName) for value in vars(user).values())


def test_other_importers_are_left_alone(folder: Path) -> None:
    user = import_light(folder, "from heavy_library.shapes import area\n", package="light")
    assert user.area is sys.modules["heavy_library.shapes"].area


def test_module_that_is_imported_already_is_used_at_once(folder: Path) -> None:
    area = importlib.import_module("heavy_library.shapes").area
    assert import_light(folder, "from heavy_library.shapes import area\n").area is area


def test_package_that_is_not_installed_fails_at_once(folder: Path) -> None:
    user = import_light(folder, "try:\n    from absent_library import thing\nexcept ImportError:\n    thing = None\n")
    assert user.thing is None


def test_name_that_the_module_lacks_fails_when_it_is_used(folder: Path) -> None:
    user = import_light(folder, "from heavy_library.shapes import Missing\n")
    with pytest.raises(ImportError, match=r"cannot import name 'Missing' from 'heavy_library\.shapes'"):
        user.Missing()


def test_prerequisites_complete_a_registry_before_it_is_read(folder: Path) -> None:
    namespace: dict[str, Any] = {}
    registry = DeferredName("heavy_library.shapes", "REGISTRY", namespace, ("heavy_library.filler",))
    namespace["registry"] = registry
    assert "heavy_library.filler" not in sys.modules
    assert "a" in registry
    assert namespace["registry"] == {"a": 1}
    assert (len(registry), list(registry), registry["a"]) == (1, ["a"], 1)
    assert resolve_name(registry) is sys.modules["heavy_library.shapes"].REGISTRY
    assert repr(registry) == "<heavy_library.shapes.REGISTRY, not imported yet>"


def test_import_statement_is_restored_after_an_error(folder: Path) -> None:
    before = builtins.__import__
    with pytest.raises(ZeroDivisionError):
        import_light(folder, "1 / 0\n")
    assert builtins.__import__ is before


def test_contexts_may_end_in_another_order_than_they_began() -> None:
    """As those of two threads do."""
    before = builtins.__import__
    one, two = WaitingImports(("one",), NAMES), WaitingImports(("two",), NAMES)
    one.__enter__()
    two.__enter__()
    one.__exit__()
    assert builtins.__import__ is not before
    two.__exit__()
    assert builtins.__import__ is before
