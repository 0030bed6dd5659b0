"""The two processes of a judged program: the one that runs it, and the one that runs its tests.

The tests never enter the program's process, and the program never enters theirs: it answers calls (`calls`), nothing
else. So it can neither read what is expected nor say that it has passed.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

from anabatic.sandbox.remote_calls import ALLOWED_OPERATIONS, RpcPeer, call_function
from anabatic.sandbox.remote_objects import CallbackProxy, RemoteObject

ProgramScope = dict[str, Any]
_DEFINITION_NODES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
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
        for node in _trusted_definitions(helpers):
            exec(compile(ast.Module([node], []), "<helpers>", "exec"), scope)
        known = {*scope, *dir(builtins)}
        undefined_names = sorted(set(_collect_names(compile(tests, "<tests>", "exec"))) - known)
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


def _trusted_definitions(helpers: str) -> Iterator[ast.stmt]:
    try:
        body = ast.parse(helpers).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from (node for node in body if isinstance(node, _DEFINITION_NODES) and not _is_stub(node))


def _is_stub(node: ast.stmt) -> bool:
    """A function that says what it is to do, and does nothing."""
    silent = (ast.Pass, ast.Import, ast.ImportFrom)
    return isinstance(node, ast.FunctionDef) and all(
        isinstance(one, silent) or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        for one in node.body
    )


def _collect_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _collect_names(inner)
