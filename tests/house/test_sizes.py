"""Files, functions, classes, ladders and commands stay small enough to read."""

from __future__ import annotations

import ast
from pathlib import Path

from anabatic.config.loading import command_table, validation
from house import tree

FILE, FUNCTION, STORY, CLASS, ARMS, FIELDS = 600, 100, 150, 320, 5, 123


def report(found: list[str]) -> str:
    """Return what pytest shows when something is too large."""
    return "too large, split it:\n  " + "\n  ".join(found)


def test_files() -> None:
    counts = {tree.name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in tree.python_files()}
    found = [f"{name}: {lines} lines, at most {FILE}" for name, lines in counts.items() if lines > FILE]
    assert not found, report(found)


def limit(path: Path, node: ast.AST) -> int:
    """A recipe's `run` and the loop's `fit` tell a whole story and may be longer."""
    function = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
    if isinstance(node, ast.ClassDef):
        return CLASS
    story = function == "fit" or (function == "run" and tree.room(path) == "recipes")
    return STORY if story else FUNCTION


def test_functions_and_classes() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = []
    for path in tree.sources():
        for node in tree.nodes(path):
            if isinstance(node, kinds):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > limit(path, node):
                    found.append(f"{tree.name(path)}:{node.lineno} {node.name}: {lines}, at most {limit(path, node)}")
    assert not found, report(found)


def arms(node: ast.If) -> int:
    """Count the conditions of an if/elif ladder."""
    count = 1
    while len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        node = node.orelse[0]
        count += 1
    return count


def test_ladders() -> None:
    found = []
    for path in tree.sources():
        ladders = (node for node in tree.nodes(path) if isinstance(node, ast.If))
        found += [f"{tree.name(path)}:{node.lineno}: {arms(node)} arms" for node in ladders if arms(node) > ARMS]
    assert not found, "write a table instead of a ladder:\n  " + "\n  ".join(found)


def test_settings_per_command() -> None:
    counts = {
        name: len(list(validation.iter_settings(row.import_job_class())))
        for name, row in command_table.COMMANDS.items()
    }
    found = [f"{name}: {count} settings, at most {FIELDS}" for name, count in counts.items() if count > FIELDS]
    assert not found, report(found)


def test_arms_are_counted() -> None:
    node = ast.parse("if a: pass\nelif b: pass\nelif c: pass\nelse: pass").body[0]
    assert isinstance(node, ast.If)
    assert arms(node) == 3
