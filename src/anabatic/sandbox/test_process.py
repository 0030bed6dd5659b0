"""The two processes of a judged program: the one that runs it, and the one that runs its tests on remote objects.

The tests never enter the program's process, and the program never enters theirs: it answers calls (`calls`), nothing
else. So it can neither read what is expected nor say that it has passed.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from anabatic.sandbox.remote_calls import ALLOWED_OPERATIONS, RpcPeer, call_function
from anabatic.sandbox.trusted_helpers import list_code_names, list_trusted_definitions

ProgramScope = dict[str, Any]
_SCOPE_OPERATION = "scope"


def serve_program(source: int, sink: int) -> Callable[[ProgramScope], None]:
    """Return what a program's process does once the program has run: it answers for the program's names."""

    def serve_scope(scope: ProgramScope) -> None:
        peer = RpcPeer(source, sink, {}, CallbackProxy, lambda _: os._exit(0))
        peer.operations = {
            **ALLOWED_OPERATIONS,
            _SCOPE_OPERATION: lambda names: {name: _describe_name(peer, scope, name) for name in names},
        }
        peer.serve_requests()

    return serve_scope


def _describe_name(peer: RpcPeer, scope: ProgramScope, name: str) -> list[Any]:
    if name not in scope:
        return ["missing", None]
    value = scope[name]
    if isinstance(value, ModuleType):
        return ["module", value.__name__]
    if isinstance(value, type) and issubclass(value, Exception):
        return ["exception", [[kind.__name__, kind.__module__] for kind in value.__mro__]]
    return ["value", value]


def prepare_tests(helpers: str, tests: str, source: int, sink: int) -> Callable[[ProgramScope], None]:
    """Return what the judge's process does before the tests run: their unknown names become the program's.

    Args:
        helpers: code that is trusted as the tests are, for its definitions: a task's prompt; functions that are stubs
            are the program's to define. Ignored where it is no Python.
        tests: what will run.
        source, sink: handles to the program.
    """

    def prepare_scope(scope: ProgramScope) -> None:
        peer = RpcPeer(source, sink, {"call": call_function}, RemoteObject, _exit_without_result)
        for node in list_trusted_definitions(helpers):
            exec(compile(ast.Module([node], []), "<helpers>", "exec"), scope)
        known = {*scope, *dir(builtins)}
        undefined_names = sorted(set(list_code_names(compile(tests, "<tests>", "exec"))) - known)
        found = peer.request_operation(_SCOPE_OPERATION, undefined_names)
        for name in undefined_names:  # and no other: `abs` is the tests' own
            kind, value = found[name]
            if kind == "value":
                scope[name] = value
            elif kind == "exception":
                scope[name] = peer.find_exception_class(value)
            elif kind == "module" and name == value and name in sys.stdlib_module_names:
                scope[name] = importlib.import_module(name)

    return prepare_scope


def _exit_without_result(reason: str) -> None:
    """End without a verdict: what became of the program tells the rest."""
    os.write(2, f"the program left before its last test: {reason}\n".encode(errors="replace"))
    os._exit(0)


_READABLE_DUNDERS = ("__name__", "__doc__", "__qualname__")


class RemoteObject:
    """An object of the program that is no data: a function, a class, an instance of one.

    It is equal to no data, whatever its own `__eq__` says: an answer that equals everything passes no test.
    """

    def __init__(self, peer: RpcPeer, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def number_of(self) -> int:
        """Return what the other end calls it."""
        return int(self.__dict__["_number"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _request_operation(self, "call", list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _READABLE_DUNDERS:
            raise AttributeError(name)
        return _request_operation(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _request_operation(self, "setattr", name, value)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, RemoteObject) and bool(_request_operation(value, "isinstance", self))

    def __eq__(self, other: object) -> Any:
        return _request_operation(self, "eq", other) if isinstance(other, RemoteObject) else False

    def __ne__(self, other: object) -> Any:
        return not self == other

    def __hash__(self) -> int:
        return int(_request_operation(self, "hash"))

    def __bool__(self) -> bool:
        return bool(_request_operation(self, "bool"))

    def __iter__(self) -> Any:
        return _request_operation(self, "iter")


def _request_operation(remote: RemoteObject, operation: str, *operands: object) -> Any:
    try:
        return remote.__dict__["_peer"].request_operation(operation, remote, *operands)
    except StopIteration as error:
        if operation == "next":
            raise
        # As PEP 479 has it: from a function it would end `all(map(f, cases))` of a test as if every case had passed.
        raise RuntimeError(f"the program raised StopIteration: {error}") from error


def _make_forwarder(operation: str) -> Any:
    def forward_operation(self: RemoteObject, *operands: Any) -> Any:
        return _request_operation(self, operation, *operands)

    return forward_operation


def _make_remote_only_forwarder(operation: str) -> Any:
    """Data would tell the program what is expected: `abs(answer - 1.5) < 1e-6` must not be its own to decide."""

    def forward_to_remote(self: RemoteObject, other: object) -> Any:
        return _request_operation(self, operation, other) if isinstance(other, RemoteObject) else NotImplemented

    return forward_to_remote


for _name in (
    "len",
    "str",
    "repr",
    "int",
    "float",
    "next",
    "abs",
    "neg",
    "pos",
    "getitem",
    "setitem",
    "delitem",
    "contains",
):
    setattr(RemoteObject, f"__{_name}__", _make_forwarder(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _make_remote_only_forwarder(_name))


class CallbackProxy:
    """In the program's process: a function of the test, which the program may call."""

    def __init__(self, peer: RpcPeer, number: int) -> None:
        self._peer, self._number = peer, number

    def number_of(self) -> int:
        """Return what the other end calls it."""
        return self._number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.request_operation("call", self, list(args), kwargs)
