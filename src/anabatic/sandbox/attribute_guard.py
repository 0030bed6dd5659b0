"""Note while a program runs what its source does not show: attributes by names that are put together."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import sys
from types import FunctionType, ModuleType
from typing import Any

from anabatic.sandbox.harmless_names import WRITABLE_DUNDERS, is_reaching_attribute
from anabatic.sandbox.program_process import PROGRAM_NAME

DICT_GUARD = "__anabatic_dict__"
"""Name of the guard that replaces `X.__dict__`."""
GUARD_NAMES = ("getattr", "setattr", "delattr", "vars", DICT_GUARD)
"""Names of the guards in the namespace of a program."""
_MAX_NOTES = 5
_MAX_NOTE_CHARS = 200


class _DictRewriter(ast.NodeTransformer):
    """Lets `X.__dict__` go through a guard: of a class of Python's own it leads everywhere."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "__dict__" or not isinstance(node.ctx, ast.Load):
            return node
        call = ast.Call(ast.Name(DICT_GUARD, ast.Load()), [node.value], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def guard_namespaces(program: ast.Module) -> ast.Module:
    """Return a program whose reads of `__dict__` are guarded."""
    guarded: ast.Module = _DictRewriter().visit(program)
    return guarded


def _is_called_by_program() -> bool:
    """Return whether the program, and not its tests, has called what runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == PROGRAM_NAME or (name.startswith("<") and name not in ("<frozen importlib._bootstrap>", "<string>")):
            return name == PROGRAM_NAME
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


class AttributeGuard:
    """Functions that read and change attributes by name: they do what Python's do, and note what is reached.

    Attributes:
        reaches: what was reached for, the first few.
        foreign_classes: classes that are not the program's though they are of `__main__`: those of the tests.
    """

    def __init__(self) -> None:
        self.reaches: list[str] = []
        self.foreign_classes: list[type] = []

    def _note(self, text: str) -> None:
        if len(self.reaches) < _MAX_NOTES:
            self.reaches.append(text[:_MAX_NOTE_CHARS])

    def make_names(self) -> dict[str, Any]:
        """Return the functions, by the names that a program finds them under."""

        def guarded_getattr(value: Any, name: str, *default: Any) -> Any:
            self._check_read(value, name)
            return getattr(value, name, *default)

        def guarded_setattr(value: Any, name: str, new: Any) -> None:
            self._check_change(value, name)
            setattr(value, name, new)

        def guarded_delattr(value: Any, name: str) -> None:
            self._check_change(value, name)
            delattr(value, name)

        def guarded_vars(*values: Any) -> Any:
            if len(values) != 1 or self._leads_elsewhere(values[0]):
                self._note("a namespace that is not its own")
            return vars(*values)

        guards = (guarded_getattr, guarded_setattr, guarded_delattr, guarded_vars, guarded_vars)
        return dict(zip(GUARD_NAMES, guards, strict=True))

    def _check_read(self, value: object, name: object) -> None:
        if type(name) is not str or is_reaching_attribute(name):
            self._note(f".{name!s}" if type(name) is str else "an attribute whose name is no text")
        elif name == "__dict__" and self._leads_elsewhere(value):
            self._note("a namespace that is not its own")
        elif isinstance(value, ModuleType) or (isinstance(value, str) and name in ("format", "format_map")):
            self._note(f".{name} by its name")

    def _check_change(self, value: object, name: object) -> None:
        if type(name) is not str or (name.startswith("__") and name.endswith("__") and name not in WRITABLE_DUNDERS):
            self._note(f"a change of .{name!s}" if type(name) is str else "an attribute whose name is no text")
        elif isinstance(value, (type, ModuleType, FunctionType)) and self._leads_elsewhere(value):
            self._note(f"a change of .{name} of what is not its own")

    def _leads_elsewhere(self, value: object) -> bool:
        if isinstance(value, type):
            return value.__module__ != "__main__" or any(value is one for one in self.foreign_classes)
        if isinstance(value, FunctionType):
            return value.__code__.co_filename != PROGRAM_NAME
        return isinstance(value, ModuleType)

    def watch_dataclasses(self) -> None:
        """Note names of fields that are no names: dataclasses writes them into the code that it makes."""
        process = vars(dataclasses)["_process_class"]

        def process_checked(cls: type, *args: Any, **kwargs: Any) -> Any:
            if not _is_called_by_program():
                return process(cls, *args, **kwargs)
            names: list[object] = []
            with contextlib.suppress(NameError, AttributeError, TypeError):  # Python 3.14 evaluates them here
                names = list(cls.__dict__.get("__annotations__") or getattr(cls, "__annotations__", {}))
            if any(type(name) is not str or not name.isidentifier() for name in names):
                self._note("a field of a data class that is no name")
            if self._leads_elsewhere(cls):
                self._note("a data class of what is not its own")
            return process(cls, *args, **kwargs)

        vars(dataclasses)["_process_class"] = process_checked
