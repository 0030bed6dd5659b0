"""Files, functions, classes, ladders and commands stay small enough to read."""

from __future__ import annotations

import ast
from pathlib import Path

from anabatic.config.loading import command_table, validation
from house import tree
from house.limits import LIMITS, ROWS


def report(found: list[str]) -> str:
    """Return what pytest shows when something is too large."""
    return "too large, split it:\n  " + "\n  ".join(found)


def test_files() -> None:
    counts = {tree.name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in tree.python_files()}
    most = LIMITS["file_lines"]
    found = [f"{name}: {lines} lines, at most {most}" for name, lines in counts.items() if lines > most]
    assert not found, report(found)


def limit(path: Path, node: ast.AST) -> int:
    """A recipe's `run` and the loop's `fit` tell a whole story and may be longer."""
    function = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
    if isinstance(node, ast.ClassDef):
        return LIMITS["class_lines"]
    story = function == "fit" or (function == "run" and tree.room(path) == "recipes")
    return LIMITS["story_lines"] if story else LIMITS["function_lines"]


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
        found += [
            f"{tree.name(path)}:{node.lineno}: {arms(node)} arms" for node in ladders if arms(node) > LIMITS["branches"]
        ]
    assert not found, "write a table instead of a ladder:\n  " + "\n  ".join(found)


APART = ("vision.", "rollout.")
"""Sections that a capability brings: who does not use it does not read them."""


def test_settings_per_command() -> None:
    counts = {
        name: sum(not key.startswith(APART) for key, _ in validation.iter_settings(row.import_job_class()))
        for name, row in command_table.COMMANDS.items()
    }
    most = LIMITS["command_settings"]
    found = [f"{name}: {count} settings, at most {most}" for name, count in counts.items() if count > most]
    assert not found, report(found)


def test_lines_of_the_trainer() -> None:
    own = [path for path in tree.sources() if tree.SRC in path.parents]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own)
    most = sum(LIMITS[name] for name in ("main_lines", "vision_lines", "engine_lines", "format_lines"))
    assert lines <= most, f"{lines:,} lines of Python: delete before you add"


def test_pages_print_the_limits() -> None:
    text = (tree.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    missing = [row for row in (f"| {row['about']} | {row['value']:,} |" for row in ROWS) if row not in text]
    assert not missing, "CONTRIBUTING.md needs:\n" + "\n".join(missing)
    for language in ("en", "zh"):
        page = (tree.ROOT / "docs" / language / "concepts" / "architecture.md").read_text(encoding="utf-8")
        assert f" {LIMITS['command_settings']}" in page, (
            "the table of plan and code says how many settings a command has"
        )
    for name, command in (("test_minutes", "test"), ("test_all_minutes", "test-all")):
        line = next(
            line
            for line in (tree.ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
            if line.startswith(f"{command}: ")
        )
        assert f"{LIMITS[name]} minutes" in line


def test_arms_are_counted() -> None:
    node = ast.parse("if a: pass\nelif b: pass\nelif c: pass\nelse: pass").body[0]
    assert isinstance(node, ast.If)
    assert arms(node) == 3
