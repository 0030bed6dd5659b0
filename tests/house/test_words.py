"""Device names stay in the rooms that know devices; nothing unfinished, silent or local is committed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from house import tree

DEVICE_ROOMS = {"device", "doctor", "monitor", "sim", "launch", "plan"}
DEVICE_WORD = re.compile(r"\b(npu|cuda|hccl|nccl)\b")

# Written with brackets so that this file does not find itself.
LOCAL = {
    "a path of one machine": [r"/(w[o]rk|f[a]rm|r[o]ot|h[o]me/\w+)/", r"/t[m]p/w\b"],
    "the host of a package registry": [
        r"python[h]osted",
        r"p[y]pi\.org",
        r"registry[.]n[p]m",
        r"deb[.]d[e]bian",
    ],
    "how the work was organised": [
        r"\b(this|another|previous|last|next) s[e]ssion\b",
        r"\bi[s]sues? (#?\d+|show)\b",
    ],
    "the tool it was written with": [r"(?i)\b(cl[a]ude|anthr[o]pic|ch[a]tgpt|c[o]pilot|llm ag[e]nt)\b"],
    "something unfinished": [r"\b(TO[D]O|FIX[M]E|X[X]X)\b"],
}


def device_words(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, word) of device names in texts that are values, and in attribute names."""
    skipped = tree.docstrings(module) | choices(module)
    for node in tree.walk(module):
        if isinstance(node, ast.Attribute) and DEVICE_WORD.fullmatch(node.attr):
            yield node.lineno, node.attr
            continue
        value = node.value if isinstance(node, ast.Constant) and id(node) not in skipped else None
        if isinstance(node, ast.Constant) and isinstance(value, str) and (match := DEVICE_WORD.search(value)):
            yield node.lineno, match.group()


def choices(module: ast.Module) -> set[int]:
    """Return the ids of the constants inside `Literal[...]`."""
    literals = (
        node
        for node in tree.walk(module)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "typing.Literal")
    )
    return {id(inner) for node in literals for inner in ast.walk(node)}


def test_device_words() -> None:
    found = [
        f"{tree.name(path)}:{line}: {word}"
        for path in tree.sources()
        if tree.room(path) not in DEVICE_ROOMS
        for line, word in device_words(tree.parse(path))
    ]
    assert not found, "only the device table may know this; ask it:\n  " + "\n  ".join(found)


def test_device_words_are_found() -> None:
    code = 'def f(x: Literal["npu"]):\n    "cuda"\n    torch.cuda.empty()\n    return "npu:0", f"{x} nccl"\n'
    assert sorted(word for _, word in device_words(ast.parse(code))) == ["cuda", "nccl", "npu"]


@pytest.mark.parametrize("what", LOCAL)
def test_nothing_local_is_committed(what: str) -> None:
    patterns = [re.compile(one) for one in LOCAL[what]]
    found = []
    for path in tree.tracked():
        for number, line in enumerate((tree.text(path) or "").splitlines(), 1):
            if any(pattern.search(line) for pattern in patterns):
                found.append(f"{tree.name(path)}:{number}: {line.strip()[:90]}")
    assert not found, f"{what}:\n  " + "\n  ".join(found)


def swallowed(module: ast.Module) -> Iterator[int]:
    """Yield the lines of handlers that catch everything, or that catch and do nothing."""
    for node in tree.walk(module):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None or all(isinstance(one, ast.Pass) for one in node.body):
                yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            everything = {"Exception", "BaseException"} & {ast.unparse(one) for one in node.args}
            yield from [node.lineno] * len(everything)


def test_no_error_is_swallowed() -> None:
    found = [f"{tree.name(path)}:{line}" for path in tree.sources() for line in swallowed(tree.parse(path))]
    assert not found, "name the error and act on it (contextlib.suppress(Name) where doing nothing is right):\n  " + (
        "\n  ".join(found)
    )


def public(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the public functions, classes and methods without a docstring.

    A method that is explained once in the module (in a base class or a sibling) needs no second explanation.
    """
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    module = tree.parse(path)
    explained = {n.name for n in tree.walk(module) if isinstance(n, kinds) and ast.get_docstring(n)}
    for node in module.body:
        inner = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []
        if isinstance(node, kinds) and not node.name.startswith("_") and ast.get_docstring(node) is None:
            yield node.lineno, node.name
        for one in inner:
            if isinstance(one, kinds) and not one.name.startswith("_") and one.name not in explained:
                yield one.lineno, one.name


def test_public_names_have_docstrings() -> None:
    found = [f"{tree.name(path)}:{line} {name}" for path in tree.sources() for line, name in public(path)]
    found += [tree.name(path) for path in tree.sources() if ast.get_docstring(tree.parse(path)) is None]
    assert not found, "say in a line what it is for:\n  " + "\n  ".join(found)
