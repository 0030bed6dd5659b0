"""Names whose import waits until they are used: `from module import name` of another package, without its cost.

`WaitingImports` is a context in which such statements of some packages bind placeholders. A placeholder imports its
module when it is called, subclassed, indexed or asked for an attribute, and then puts the real object in its place
wherever the statement had bound it. `isinstance(x, placeholder)` needs no import as long as nobody has imported the
module: no object of a class that does not exist yet can be `x`.

The context waits only for names that its table lists, functions and classes that are known not to be used while the
packages are imported. Any other statement, such as one of a version that wants another name, is an ordinary import. A
name that stands in an `except` clause or is compared by `is` does not belong in a table.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any


class DeferredName:
    """Stands for `module.name` until it is used.

    Args:
        module: module to import.
        name: what to take from it.
        namespace: globals of the module that has the placeholder, where the real object replaces it.
        prerequisites: modules to import first, because they complete what the name stands for, such as a registry.
    """

    def __init__(self, module: str, name: str, namespace: dict[str, Any], prerequisites: Sequence[str] = ()) -> None:
        self._deferred = (module, name, namespace, prerequisites)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return resolve_name(self)(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(resolve_name(self), name)

    def __getitem__(self, key: Any) -> Any:
        return resolve_name(self)[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(resolve_name(self))

    def __contains__(self, item: object) -> bool:
        return item in resolve_name(self)

    def __len__(self) -> int:
        return len(resolve_name(self))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (resolve_name(self),)

    def __instancecheck__(self, instance: object) -> bool:
        return _is_imported(self._deferred[0]) and isinstance(instance, resolve_name(self))

    def __subclasscheck__(self, subclass: type) -> bool:
        return _is_imported(self._deferred[0]) and issubclass(subclass, resolve_name(self))

    def __or__(self, other: Any) -> Any:  # of annotations that are evaluated: as if they were written as text
        return typing.Union[self._name(), other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return typing.Union[other, self._name()]  # noqa: UP007

    def __repr__(self) -> str:
        return f"<{self._name()}, not imported yet>"

    def _name(self) -> Any:
        return ".".join(self._deferred[:2])


def resolve_name(placeholder: DeferredName) -> Any:
    """Import what a placeholder stands for, put it where the placeholder was bound, and return it.

    Raises:
        ImportError: the module cannot be imported or has no such name.
    """
    module, name, namespace, prerequisites = placeholder._deferred
    for each in (*prerequisites, module):
        importlib.import_module(each)
    try:
        found = getattr(sys.modules[module], name)
    except AttributeError as error:
        raise ImportError(f"cannot import name {name!r} from {module!r}", name=module) from error
    for key, value in list(namespace.items()):
        if value is placeholder:
            namespace[key] = found
    return found


def _is_imported(module: str) -> bool:
    """Return whether a module has been imported to its end; while it is being imported, it may lack names."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


class WaitingImports:
    """Context in which `from module import name` statements of some packages bind placeholders.

    Args:
        importers: packages and modules that contain the statements.
        names: module -> the names that may wait. A statement with any other name, one of a module that is imported
            already, and one of a package that is not installed run as usual.
    """

    def __init__(self, importers: Sequence[str], names: Mapping[str, frozenset[str]]) -> None:
        self._importers, self._names = tuple(f"{importer}." for importer in importers), names

    def __enter__(self) -> WaitingImports:
        with _LOCK:
            if not _ACTIVE:
                _PREVIOUS.append(builtins.__import__)
                builtins.__import__ = _import_or_defer
            _ACTIVE.append(self)
        return self

    def __exit__(self, *unused: object) -> None:
        with _LOCK:
            _ACTIVE.remove(self)
            if not _ACTIVE:
                builtins.__import__ = _PREVIOUS.pop()

    def find_deferrable(self, name: str, importer: Mapping[str, object], fromlist: Sequence[str], level: int) -> str:
        """Return the full name of the module of a statement that may wait; empty for any other statement."""
        if not f"{importer.get('__name__', '')}.".startswith(self._importers):
            return ""
        package = str(importer.get("__package__") or "")
        module = importlib.util.resolve_name("." * level + name, package) if level else name
        names = self._names.get(module)
        if names is None or not names.issuperset(fromlist) or not _may_wait(module):
            return ""
        return module


_LOCK = threading.Lock()
_ACTIVE: list[WaitingImports] = []
"""Contexts that have been entered, of all threads: they may end in another order than they began."""
_PREVIOUS: list[Callable[..., Any]] = [builtins.__import__]
"""The import statement of Python, and the one to restore while contexts are active."""


def _import_or_defer(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """The import statement while a context is active."""
    if fromlist and globals is not None:
        for context in tuple(_ACTIVE):
            if module := context.find_deferrable(name, globals, fromlist, level):
                namespace = typing.cast("dict[str, Any]", globals)
                return SimpleNamespace(**{each: DeferredName(module, each, namespace) for each in fromlist})
    return _PREVIOUS[-1](name, globals, locals, fromlist, level)


def _may_wait(module: str) -> bool:
    """Return whether nothing has imported a module yet, and its package is there to import it later."""
    package = module.partition(".")[0]
    return module not in sys.modules and (package in sys.modules or importlib.util.find_spec(package) is not None)
