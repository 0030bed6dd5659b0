"""The tests that changed files can affect: by the imports of the package, of the tests and of their helpers.

The graph is import-linter's (grimp), with one more kind of edge: a text such as "anabatic.rl.rewards:run" in a table
counts as an import. The two tables of commands would join everything with everything, so their texts count only for
tests that run those commands, by the words that a test file has: `home.sft(...)`, `"eval"`.

What this cannot see: programs that a test writes as text, and files that are found by a pattern.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

from suite.groups import ROOT, TESTS, SuiteError, find_group
from suite.record import read_record

PACKAGE = "anabatic"
SOURCES = ROOT / "src"
PACKAGES = tuple(sorted(path.name for path in SOURCES.glob(f"{PACKAGE}*") if path.is_dir()))
"""The main package and its guests."""
TABLES = frozenset(
    {f"{PACKAGE}.config.loading.command_table", f"{PACKAGE}.cli.command_tree"}
    | {f"{guest}.command_package" for guest in PACKAGES if guest != PACKAGE}
)
"""Modules whose texts name those of every command."""
MODULE_TEXT = re.compile(rf"{PACKAGE}(_\w+)?(\.\w+)+(:\w+)?")
EVERYTHING = (
    "pyproject.toml",
    "constraints.txt",
    "requirements-dev.txt",
    "tests/conftest.py",
    "tests/suite/",
    "tests/groups.toml",
)
"""What can affect every test."""
READ_BY_HOUSE = (
    "src/", "docs/", "scripts/", "benchmarks/", "examples/", "charts/", "containers/", "packaging/", ".github/", ".ci/",
)  # fmt: skip
"""Folders whose files the house tests read."""
READ_BY_TESTS = ("charts/", "containers/", "packaging/", "examples/", "scripts/", "benchmarks/")
"""Folders whose files tests name by their path: whose text has the name of the file or its folder is affected."""
RUNNERS = frozenset({"e2e.command", "e2e.home", "e2e.fixtures", "e2e.warm", f"{PACKAGE}.cli.app", PACKAGE})
"""Who imports one of these may run commands."""
SHARED = frozenset({"e2e.home", "e2e.fixtures", "e2e.command", "e2e.warm"})
"""Helpers that name every command; the tests decide which of them run."""
FIRST_COMMANDS = frozenset({"tokenizer", "pretrain"})
"""What the shared home is made with."""


def list_changes(base: str) -> list[str]:
    """Return the files that differ from where this branch left `base`, with those that git does not know yet.

    Raises:
        SuiteError: git does not know `base`.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            refs = [ref for ref in ("origin/main", "HEAD") if ref != base and _is_commit(ref)]
            hint = f"make test-changed BASE={refs[0]}" if refs else "make test"
            raise SuiteError(f"git {' '.join(words)}: {done.stderr.strip().splitlines()[0]}", hint)
        return done.stdout

    start = git("merge-base", "--end-of-options", base, "HEAD").strip()
    known = git("diff", "--name-only", "--no-renames", "-z", start)  # of what was renamed, both names
    new = git("ls-files", "--others", "--exclude-standard", "-z")
    return sorted({name for name in (known + new).split("\0") if name})


def _is_commit(ref: str) -> bool:
    words = ["git", "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 0


class TestGraph:
    """Which test file depends on which module of the package."""

    def __init__(self) -> None:
        try:
            self._graph = grimp.build_graph(*PACKAGES, cache_dir=str(ROOT / ".import_linter_cache"))
        except grimp.exceptions.SourceSyntaxError as error:
            raise SuiteError(str(error), "fix it first: what imports the file is not known") from error
        self._commands: dict[str, set[str]] = {}
        for module in sorted(self._graph.modules):
            path = _module_path(module)
            for text in _texts(path) if path else ():
                target = text.partition(":")[0]
                if target not in self._graph.modules or module in TABLES:
                    continue
                if target != module:
                    self._graph.add_import(importer=module, imported=target)
        for table in TABLES:
            if (path := _module_path(table)) is not None:  # helpers of tests have no commands
                self._read_commands(path)

    def _read_commands(self, path: Path) -> None:
        for call in (node for node in ast.walk(_parse(path)) if isinstance(node, ast.Call)):
            texts = [
                node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            modules = {text.partition(":")[0] for text in texts if MODULE_TEXT.fullmatch(text)}
            if modules and texts and re.fullmatch(r"[a-z][a-z -]*", texts[0]):
                self._commands.setdefault(texts[0].split()[0], set()).update(modules & self._graph.modules)

    def find_affected(self, changed: Iterable[str]) -> list[str]:
        """Return the test files that can be affected by these files of the project."""
        names = set(changed)
        tests = sorted(path for path in TESTS.rglob("test_*.py"))
        if any(name.startswith(EVERYTHING) for name in names):
            return [_relative(path) for path in tests]
        modules = {module for name in names for module in self._modules_of(name)}
        reached = set(modules)
        for module in modules:
            reached |= self._graph.find_downstream_modules(module)
        whole = any(
            name.startswith(("src/", "docs/", "scripts/", "benchmarks/", ".github/")) or "/" not in name
            for name in names
        )
        return [_relative(path) for path in tests if self._is_affected(path, names, reached, whole)]

    def _is_affected(self, test: Path, changed: set[str], reached: set[str], whole: bool) -> bool:
        files = {test, *_helpers(test)}
        if any(_relative(file) in changed for file in files) or self._reads(test, changed):
            return True
        group = find_group(_relative(test))
        if group is not None and group.name == "house":
            return whole or any(name.startswith("tests/") for name in changed)
        return not reached.isdisjoint(self._dependencies(test, {file for file in files if file.is_file()}))

    def _reads(self, test: Path, changed: set[str]) -> bool:
        """Return whether a test reads a changed file that is no module: data beside it, or of a folder it names."""
        beside = _relative(test.parent) + "/"
        if any(name.startswith(beside) and not name.endswith(".py") for name in changed):
            return True
        named = {
            part for name in changed if name.startswith(READ_BY_TESTS) for part in (name.split("/")[0], Path(name).stem)
        }
        return bool(named & _words(test))

    def _dependencies(self, test: Path, files: set[Path]) -> set[str]:
        imported = {name for file in files for name in _imports(file)}
        found = {module for name in imported if (module := self._known(name))}
        if imported & RUNNERS:
            own = {word for file in files if _test_module(file) not in SHARED for word in _words(file)}
            named = {name for name in self._commands if name in own} or set(self._commands)
            shared = FIRST_COMMANDS if imported & SHARED else frozenset()
            found |= {module for name in named | shared for module in self._commands[name]}
            found.add(f"{PACKAGE}.cli.app")
        return found

    def _known(self, name: str) -> str:
        """Return the module that a dotted name is, or is in; empty: none of the package."""
        while name and name not in self._graph.modules:
            name = name.rpartition(".")[0]
        return name if name not in PACKAGES else ""

    def _modules_of(self, name: str) -> list[str]:
        """Return the module of a file, or, for what is not Python, those of its folder."""
        path = ROOT / name
        if not path.is_relative_to(SOURCES):
            return []
        parts = list(path.relative_to(SOURCES).with_suffix("").parts)
        module = ".".join(parts).removesuffix(".__init__")
        if path.suffix == ".py":
            return [module] if module in self._graph.modules else []
        while parts:
            parts.pop()
            package = ".".join(parts)
            if package in self._graph.modules and package not in PACKAGES:
                inside = {one for one in self._graph.modules if one.rpartition(".")[0] == package}
                return sorted({package, *inside})
        return sorted(self._graph.modules)


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module_path(module: str) -> Path | None:
    base = SOURCES / Path(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@functools.cache
def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        where = f"{_relative(path)}, line {error.lineno}: {error.msg}"
        raise SuiteError(where, "fix it first: what it imports is not known") from error


@functools.cache
def _texts(path: Path) -> frozenset[str]:
    constants = (node.value for node in ast.walk(_parse(path)) if isinstance(node, ast.Constant))
    return frozenset(value for value in constants if isinstance(value, str) and MODULE_TEXT.fullmatch(value))


@functools.cache
def _words(path: Path) -> frozenset[str]:
    """Return the texts and attributes of a file, among which are the commands that it runs."""
    found = set()
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(node.value.split())
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return frozenset(found)


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports, wherever in it, and the modules that its texts name."""
    found = {text.partition(":")[0] for text in _texts(path)}
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def _test_module(path: Path) -> str:
    return ".".join(path.relative_to(TESTS).with_suffix("").parts)


def _conftests(test: Path) -> Iterator[Path]:
    for folder in test.parents:
        if folder == TESTS:
            return
        if (folder / "conftest.py").is_file():
            yield folder / "conftest.py"


@functools.cache
def _folders() -> frozenset[str]:
    return frozenset(path.name for path in TESTS.iterdir() if path.is_dir())


@functools.cache
def _helpers(test: Path) -> frozenset[Path]:
    """Return the files of tests/ that a test imports, directly or not, and the conftest.py of its folders."""
    found: set[Path] = set()
    waiting = [test, *_conftests(test)]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in _imports(path):
            file = TESTS / Path(*name.split(".")).with_suffix(".py")
            if TESTS / "suite" in file.parents or name.split(".")[0] not in _folders():
                continue
            if file.is_file():
                waiting.append(file)
            else:
                found.add(file)  # a helper that was removed affects who imports it
    return frozenset(found - {test})


def split_quick(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files of the quick groups, and the others.

    Raises:
        SuiteError: one is in no group.
    """
    quick, others = [], []
    for file in files:
        group = find_group(file)
        if group is None:
            raise SuiteError(f"{file} is in no group", "add its folder to tests/groups.toml")
        (quick if group.is_quick else others).append(file)
    return quick, others


def describe(files: Iterable[str]) -> str:
    """Return how many files these are and their recorded seconds."""
    listed, known = list(files), read_record()
    return f"{len(listed)} files, {sum(known.seconds_of(file) for file in listed):,.0f} s"
