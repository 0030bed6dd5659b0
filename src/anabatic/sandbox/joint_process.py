"""A program and its tests in one process, as in ordinary Python: values keep their types and identities.

What a program reaches for that its solution does not need (`program_analysis.py`) is found before a line of it runs,
and reported through a handle that is closed by then. If there is anything, passing here proves nothing.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from anabatic.sandbox import program_analysis
from anabatic.sandbox.program_process import PROGRAM_NAME, ProgramScope, TestReport
from anabatic.sandbox.trusted_helpers import list_code_names, list_trusted_definitions

TESTS_NAME = "<tests>"
"""What tracebacks call the tests."""


class JointRun:
    """One program with its tests.

    Args:
        program: source of the program.
        tests: Python that raises where the program is wrong; names that it does not define are the program's.
        helpers: definitions that the tests may use besides, as trusted as they are; a program that repeats them shares
            them, one that changes them does so for itself alone.
        prefer_program: names of built-in functions that the program defines are the program's in its tests, too.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: the program is no Python.
    """

    def __init__(self, program: str, tests: str, helpers: str, prefer_program: bool) -> None:
        tree = ast.parse(program, PROGRAM_NAME)
        self._helpers = list(list_trusted_definitions(helpers))
        self.reaches = program_analysis.find_reaches(tree, tests)
        self._guard = program_analysis.AttributeGuard()
        known = {ast.dump(node) for node in self._helpers}
        tree.body = [node for node in tree.body if ast.dump(node) not in known]
        self.program = tree if self.reaches else program_analysis.guard_namespaces(tree)
        self._tests, self._prefer_program = tests, prefer_program
        self._scope: TestScope | None = None
        self._before: dict[str, int] = {}

    def prepare_scope(self, scope: ProgramScope) -> None:
        """Give the program its built-in functions, and the helpers."""
        if not self.reaches:
            scope["__builtins__"] = self._guard.make_builtins()
        self._scope = TestScope(scope, self._prefer_program)
        for node in self._helpers:
            exec(compile(ast.Module([node], []), "<helpers>", "exec"), self._scope)
        scope.update({name: value for name, value in self._scope.items() if not name.startswith("__")})
        self._before = dict(_fingerprint(self._tests, self._scope))

    def run_tests(self, scope: ProgramScope) -> TestReport:
        """Run the tests; return what the report says of tests that passed."""
        assert self._scope is not None
        code = compile(self._tests, TESTS_NAME, "exec", dont_inherit=True)
        shadowed = {
            name for name in {*list_code_names(code)} & {*scope} & {*dir(builtins)} if not name.startswith("__")
        }
        if "unittest" in self._tests:
            sys.modules["__main__"] = _TestModule(self._scope)
        try:
            exec(code, self._scope)
        except SystemExit as end:  # as of `unittest.main()`; one of the program's is its own way out
            if end.code not in (None, 0, False) or _has_program_frame(end):
                raise
        if self._guard.reaches or self._before != dict(_fingerprint(self._tests, self._scope, self._before)):
            return "touched"
        return "shadowed" if shadowed and not self._prefer_program else ""


class TestScope(dict[str, Any]):
    """The names of the tests: their own, else Python's, else the program's as they are at the time."""

    __test__ = False  # no tests of pytest's

    def __init__(self, program: ProgramScope, prefer_program: bool) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._program, self._prefer_program = program, prefer_program

    def __missing__(self, name: str) -> Any:
        if not self._prefer_program and hasattr(builtins, name):
            raise KeyError(name)
        return self._program[name]


class _TestModule(ModuleType):
    """`__main__` as `unittest` looks at it: the tests' own names."""

    def __init__(self, scope: TestScope) -> None:
        super().__init__("__main__")
        self.__dict__["_scope"] = scope

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_scope"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __dir__(self) -> list[str]:
        return list(self.__dict__["_scope"])


def _has_program_frame(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == PROGRAM_NAME:
            return True
        trace = trace.tb_next
    return False


def _fingerprint(tests: str, scope: TestScope, before: dict[str, int] | None = None) -> Iterator[tuple[str, int]]:
    """Yield identities of what the tests use and a program could change: names of modules and classes.

    Args:
        before: the earlier one, of which only these names count: modules fill their caches.
    """
    owners: list[tuple[str, object]] = [(name, value) for name, value in scope.items() if isinstance(value, type)]
    for module in _list_imports(tests):
        owners += [(module, importlib.import_module(module))]
        owners += [
            (f"{module}.{name}", value)
            for name, value in vars(importlib.import_module(module)).items()
            if isinstance(value, type) and not name.startswith("_")
        ]
    for owner, value in owners:
        for name, item in list(vars(value).items()):
            key = f"{owner}:{name}"
            if (callable(item) and before is None) or (before and key in before):  # tests replace sys.stdout
                yield key, id(item)


def _list_imports(tests: str) -> Iterator[str]:
    """Yield the modules of Python's own that tests import."""
    for node in ast.walk(ast.parse(tests)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name for name in names if name.partition(".")[0] in sys.stdlib_module_names)
