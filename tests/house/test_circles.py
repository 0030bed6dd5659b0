"""Modules of a room know each other in one direction only: no circle of imports, nor of C++ headers.

Imports that only a type checker follows count as well: whoever reads one module of a circle must read them all. Imports
inside functions do not; they are there to start quickly.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from house import tree

CODE_SUFFIXES = (".h", ".hpp", ".cpp", ".cc")


def imported_modules(body: list[ast.stmt], modules: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """Yield (module, line) of the project's modules that a module imports outside of its functions."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                found = deeper if deeper in modules else str(node.module)
                if found in modules:
                    yield found, node.lineno
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from imported_modules(getattr(node, part, []), modules)


def find_circle(graph: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the shortest way from a node back to itself; empty where there is none."""
    found: list[list[str]] = []
    for start in graph:
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop(0)
            if start in graph[way[-1]]:
                found.append([*way, start])
                break
            new = [one for one in graph[way[-1]] if one not in seen]
            seen.update(new)
            ways += [[*way, one] for one in new]
    return min(found, key=len, default=[])


def describe(circle: list[str], graph: Mapping[str, Mapping[str, int]], files: Mapping[str, Path]) -> str:
    """Return each arrow of a circle with the line that draws it."""
    arrows = zip(circle, circle[1:], strict=False)
    return "\n".join(f"  {tree.name(files[one])}:{graph[one][other]} needs {other}" for one, other in arrows)


def module_name(path: Path) -> str:
    parts = [*path.relative_to(tree.ROOT / "src").with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_circle_of_modules() -> None:
    modules = {module_name(path): path for path in tree.sources()}
    graph = {
        name: {other: line for other, line in imported_modules(tree.parse(path).body, modules) if other != name}
        for name, path in modules.items()
    }
    circle = find_circle(graph)
    assert not circle, f"a circle of imports; move what both sides need below them:\n{describe(circle, graph, modules)}"


def test_no_circle_of_headers() -> None:
    files = {
        tree.name(path): path
        for folder in tree.PACKAGES
        for path in sorted(folder.rglob("*"))
        if path.suffix in CODE_SUFFIXES
    }
    graph: dict[str, dict[str, int]] = {}
    for name, path in files.items():
        graph[name] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if found := re.match(r'\s*#\s*include "([^"]+)"', line):
                target = (path.parent / found[1]).resolve()
                if target.is_file():
                    graph[name][tree.name(target)] = number
    circle = find_circle(graph)
    assert not circle, f"a circle of #include:\n{describe(circle, graph, files)}"


def test_a_circle_is_found_where_there_is_one() -> None:
    code = "import b\nif TYPE_CHECKING:\n    from p import c\ntry:\n    pass\nexcept ImportError:\n    import d\n"
    code += "def f():\n    import e\n"
    modules = {name: Path(f"{name}.py") for name in ("b", "p", "p.c", "d", "e")}
    assert list(imported_modules(ast.parse(code).body, modules)) == [("b", 1), ("p.c", 3), ("d", 7)]
    arrows = {"a": {"b": 1}, "b": {"c": 2, "d": 1}, "c": {"a": 3}, "d": {"b": 7}, "e": {"a": 1}}
    assert find_circle(arrows) == ["b", "d", "b"]
    assert find_circle({"a": {"b": 1}, "b": {}}) == []
