"""Find helpers that tests take from the task: definitions of the prompt that the program need not be asked for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType

_DEFINITION_NODES = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign),
    ast.Try,
)


def list_trusted_definitions(helpers: str) -> Iterator[ast.stmt]:
    """Yield the definitions of a task's prompt; its stubs are the program's. None where it is no Python."""
    try:
        body = ast.parse(helpers).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from (node for node in body if isinstance(node, _DEFINITION_NODES) and not _is_stub(node))


def _is_stub(node: ast.stmt) -> bool:
    """A function that says what it is to do, and does nothing."""
    silent = (ast.Pass, ast.Import, ast.ImportFrom)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and all(
        isinstance(one, silent) or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        for one in node.body
    )


def list_code_names(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, with those of the functions in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from list_code_names(inner)
