"""Rooms import downwards only, and heavy libraries stay in the rooms that need them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from house import tree

LIGHT_ROOMS = {"core", "sandbox", "config", "cli", "launch", "sim", "doctor", "monitor", "convert", ""}
HEAVY = {"torch", "torch_npu", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow"}
AGENT_MODULES = {"src/anabatic/launch/machine_rendezvous.py", "src/anabatic/launch/local/reporting_agent.py"}
"""They derive from classes of torch, and only torch's agent, a process of its own, imports them."""
ON_DEMAND = {
    "peft",
    "datasets",
    "pandas",
    "wandb",
    "swanlab",
    "tensorboard",
    "sklearn",
    "accelerate",
    "ray",
}


@pytest.mark.process
def test_import_linter() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([lint, "--no-cache"], cwd=tree.ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def at_import(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Yield (line, top package) of what a module imports when it is imported itself."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from at_import(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(node, part, []))


def test_light_rooms_import_no_heavy_library() -> None:
    found = [
        f"{tree.name(path)}:{line} imports {package}"
        for path in tree.sources()
        if tree.room(path) in LIGHT_ROOMS and tree.name(path) not in AGENT_MODULES
        for line, package in at_import(tree.parse(path).body)
        if package in HEAVY
    ]
    assert not found, "import it inside the function that needs it:\n  " + "\n  ".join(found)


def test_optional_libraries_are_imported_on_demand() -> None:
    found = [
        f"{tree.name(path)}:{line} imports {package}"
        for path in tree.sources()
        for line, package in at_import(tree.parse(path).body)
        if package in ON_DEMAND
    ]
    assert not found, "import it inside the function that needs it:\n  " + "\n  ".join(found)


def test_imports_are_seen_at_every_depth() -> None:
    code = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ntry:\n    from d.e import f\n"
    code += "finally:\n    import g\ndef h():\n    import i\nclass J:\n    import k\n"
    assert [package for _, package in at_import(ast.parse(code).body)] == ["a", "c", "d", "g", "k"]
