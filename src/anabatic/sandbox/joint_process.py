"""A program and its tests in one process, as in ordinary Python: values keep their types and identities.

What a program reaches for that its solution does not need (`program_analysis.py`) is found before a line of it runs,
and reported through a handle that is closed by then. If there is anything, passing here proves nothing.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from anabatic.sandbox import attribute_guard, program_analysis
from anabatic.sandbox.program_process import PROGRAM_NAME, ProgramScope, TestReport
from anabatic.sandbox.trusted_helpers import list_code_names, list_trusted_definitions

TESTS_NAME = "<tests>"
"""Name of the tests in tracebacks."""
_HELPERS_NAME = "<helpers>"
_LOADER_NAMES = ("load_tests", "setUpModule", "tearDownModule")
"""Names by which `unittest` lets a module choose its tests: only the tests' own count."""


class JointRun:
    """One program with its tests.

    Args:
        source: of the program.
        tests: Python that raises where the program is wrong; names that it does not define are the program's.
        helpers: definitions that the tests may use besides, as trusted as they are; a program that repeats them shares
            them, one that changes them does so for itself alone.
        prefer_program: names of built-in functions that the program defines are the program's in its tests, too.

    Attributes:
        reaches: what the program reaches for.
        shares: program and tests bind the same names, or one uses what the other binds: in one namespace, as ordinary
            Python's, they may pass where they fail apart.
        program: what is run; None: the source as it is, which is nested too deeply to be looked at.

    Raises:
        SyntaxError, ValueError: the program is no Python.
    """

    def __init__(self, source: str, tests: str, helpers: str, prefer_program: bool) -> None:
        self._tests, self._prefer_program = tests, prefer_program
        self._helpers: list[ast.stmt] = []
        self._guard = attribute_guard.AttributeGuard()
        self.program: ast.Module | None = None
        self.shares = False
        self._rebound: set[str] = set()
        """Names of the program that its functions bind anew."""
        try:
            self._helpers = [node for node in list_trusted_definitions(helpers) if not _is_future(node)]
            self.reaches = self._read_program(source)
        except (RecursionError, MemoryError):
            self.reaches = ["more nesting than can be looked at"]
        self._scope: TestScope | None = None
        self._watch: _ChangeWatch | None = None

    def _read_program(self, source: str) -> list[str]:
        tree = ast.parse(source, PROGRAM_NAME)
        known = {ast.dump(node) for node in self._helpers}
        tree.body = [node for node in tree.body if ast.dump(node) not in known]
        defined = {getattr(node, "name", None) for node in self._helpers} - {None}
        redefines = any(getattr(node, "name", None) in defined for node in tree.body)
        self.shares = redefines or bool({*_list_names(tree)} & {*_list_bound(ast.parse(self._tests))})
        self._rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        reaches = program_analysis.find_reaches(tree, self._tests, self._helpers)
        self.program = tree if reaches else attribute_guard.guard_namespaces(tree)
        return reaches

    def prepare_scope(self, scope: ProgramScope) -> None:
        """Give the program the guards of attributes, and the helpers."""
        self._scope = TestScope(scope, self._guard.foreign_classes)
        for node in self._helpers:
            code = compile(ast.Module([node], []), _HELPERS_NAME, "exec", dont_inherit=True)
            try:
                exec(code, self._scope)
            except Exception:  # an example of the prompt that needs what is still to be written
                continue
        own = {name: value for name, value in self._scope.items() if not name.startswith("__")}
        self._guard.foreign_classes += [value for value in own.values() if isinstance(value, type)]
        scope.update(own)
        if not self.reaches:
            scope.update(self._guard.make_names())
            self._guard.watch_dataclasses()
            self._watch = _ChangeWatch(self._tests, own, self._guard.foreign_classes)

    def run_tests(self, scope: ProgramScope) -> TestReport:
        """Run the tests; return what the report says of tests that passed."""
        assert self._scope is not None
        code = compile(self._tests, TESTS_NAME, "exec", dont_inherit=True)
        guards = attribute_guard.GUARD_NAMES if self._watch is not None else ()
        used = {name for name in {*list_code_names(code)} & {*scope} - {*guards} if not name.startswith("__")}
        shadowed = used & {*dir(builtins)}
        prefer = self._prefer_program or shadowed == used  # of a task whose answer is called as a function of Python's
        if self.reaches:  # it may bind what it likes, by `globals()`
            self._rebound |= {name for name, value in scope.items() if not callable(value)}
        self._scope.take_names(prefer, self._rebound)
        sys.argv[:] = [TESTS_NAME]
        sys.modules["__main__"] = _TestModule(self._scope, scope)
        try:
            exec(code, self._scope)
        except SystemExit as end:
            trace = sys.exc_info()[2]
            is_good = type(end) is SystemExit and end.code in (None, 0, False)
            if not is_good or not (_has_run_unittest(trace) or _is_own_exit(trace, self._tests, scope)):
                raise
        if self._guard.reaches or (self._watch is not None and self._watch.has_changed()):
            return "touched"
        return "shadowed" if shadowed and not prefer else ""


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _has_run_unittest(trace: TracebackType | None) -> bool:
    """Return whether `unittest.main` has ended the tests, with at least one test."""
    innermost, count = "", 0
    while trace is not None:
        frame = trace.tb_frame
        innermost = frame.f_code.co_filename
        if innermost == PROGRAM_NAME:
            return False
        if frame.f_code.co_name == "runTests" and innermost.endswith("unittest/main.py"):
            count = frame.f_locals["self"].result.testsRun
        trace = trace.tb_next
    return innermost.endswith("unittest/main.py") and count > 0


def _is_own_exit(trace: TracebackType | None, tests: str, program: ProgramScope) -> bool:
    """Return whether the last line of the tests is what has ended them: `sys.exit()` or `exit()`."""
    last = ast.parse(tests).body[-1]
    if not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and trace is not None):
        return False
    name = ast.unparse(last.value.func)
    while trace.tb_next is not None:
        trace = trace.tb_next
    is_last = trace.tb_frame.f_code.co_filename == TESTS_NAME and trace.tb_lineno >= last.lineno
    return is_last and name in ("exit", "quit", "sys.exit") and name.partition(".")[0] not in program


class TestScope(dict[str, Any]):
    """The names of the tests: their own, else Python's, else the program's.

    Those that functions of the program bind anew are read as they are at the time. What tests reset (a counter, a
    cache) or replace (`input`) at their outermost level is reset for the program, too; other values stay theirs, or a
    program that guesses a name would read what is expected.

    Args:
        program: names of the program.
        classes: receives the classes that are made here.
    """

    __test__ = False  # no tests of pytest's

    def __init__(self, program: ProgramScope, classes: list[type]) -> None:
        own = {**vars(builtins), **_make_guarded_loops(), "__build_class__": _make_class_builder(classes)}
        super().__init__(__name__="__main__", __builtins__=own)
        self._program, self._prefer_program, self._is_running = program, False, False
        self._rebound: set[str] = set()

    def take_names(self, prefer_program: bool, rebound: set[str]) -> None:
        """Take the program's names when it has run: a class body finds no others (LOAD_NAME asks no `__missing__`).

        Args:
            prefer_program: its names come before Python's.
            rebound: names that are not taken, but read as they are at the time.
        """
        self._prefer_program, self._rebound = prefer_program, rebound
        for name, value in self._program.items():
            if name not in self and name not in rebound and not name.startswith("__") and not self._is_pythons(name):
                dict.__setitem__(self, name, value)
        self._is_running = True

    def __missing__(self, name: str) -> Any:
        if self._is_pythons(name):
            raise KeyError(name)
        return self._program[name]

    def __setitem__(self, name: str, value: Any) -> None:
        resets = type(value) in _RESETTING_TYPES and not value
        if self._is_running and resets and name in self._rebound:
            self._program[name] = value
            self.pop(name, None)
            return
        dict.__setitem__(self, name, value)
        replaces = type(value) is FunctionType and hasattr(builtins, name)
        if self._is_running and ((resets and name in self._program) or replaces):
            self._program[name] = value

    def _is_pythons(self, name: str) -> bool:
        return name in attribute_guard.GUARD_NAMES or (not self._prefer_program and hasattr(builtins, name))


_RESETTING_TYPES = (int, float, str, bool, list, dict, set, tuple, type(None))


def _make_guarded_loops() -> dict[str, Callable[..., Any]]:
    """Return `map`, `filter` and `iter` as generators: a StopIteration of a function does not end them (PEP 479)."""

    def guarded_map(function: Callable[..., Any], *iterables: Any) -> Iterator[Any]:
        for arguments in zip(*iterables, strict=False):
            yield function(*arguments)

    def guarded_filter(function: Callable[..., Any] | None, iterable: Any) -> Iterator[Any]:
        for value in iterable:
            if value if function is None else function(value):
                yield value

    def call_until(function: Callable[..., Any], sentinel: object) -> Iterator[Any]:
        while (value := function()) != sentinel:
            yield value

    def guarded_iter(value: Any, *sentinel: object) -> Iterator[Any]:
        return call_until(value, *sentinel) if sentinel else iter(value)

    return {"map": guarded_map, "filter": guarded_filter, "iter": guarded_iter}


def _make_class_builder(classes: list[type]) -> Callable[..., type]:
    build: Callable[..., type] = vars(builtins)["__build_class__"]

    def build_and_record(*args: Any, **kwargs: Any) -> type:
        made = build(*args, **kwargs)
        classes.append(made)
        return made

    return build_and_record


class _TestModule(ModuleType):
    """`__main__` as `unittest` looks at it: the tests' own names, and the program's for those who patch them."""

    def __init__(self, scope: TestScope, program: ProgramScope) -> None:
        super().__init__("__main__")
        self.__dict__.update(_scope=scope, _program=program)

    def __getattr__(self, name: str) -> Any:
        scope, program = self.__dict__["_scope"], self.__dict__["_program"]
        if dict.__contains__(scope, name):
            return scope[name]
        if name in program and name not in _LOADER_NAMES:
            return program[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: object) -> None:
        own = dict.__contains__(self.__dict__["_scope"], name)
        self.__dict__["_scope" if own else "_program"][name] = value

    def __delattr__(self, name: str) -> None:
        own = dict.__contains__(self.__dict__["_scope"], name)
        self.__dict__["_scope" if own else "_program"].pop(name)

    def __dir__(self) -> list[str]:
        return list(self.__dict__["_scope"])


class _ChangeWatch:
    """Looks whether what tests use is as it was: functions of modules and classes, and constants of the helpers.

    Args:
        tests: their source; what they assign themselves does not count.
        helpers: names that program and tests share.
        classes: classes of the helpers and, later, of the tests.
    """

    def __init__(self, tests: str, helpers: dict[str, Any], classes: list[type]) -> None:
        tree = ast.parse(tests)
        self._modules = [builtins, *_import_modules(tree)]
        self._assigned = set(_list_assigned(tree))
        self._classes = classes
        self._helper_classes = {id(one) for one in classes}
        self._helpers = {name: value for name, value in helpers.items() if type(value) in (dict, list, set, bytearray)}
        self._before = self._collect()

    def has_changed(self) -> bool:
        """Return whether something is not as it was."""
        after = self._collect()
        known = {key: after.get(key) for key in self._before}
        return known != self._before or any(self._has_functions_of_program(one) for one in self._classes)

    def _collect(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: repr(value) for name, value in self._helpers.items()}
        for module in self._modules:
            for name, value in list(vars(module).items()):
                if name in self._assigned or name.startswith("_"):
                    continue
                if callable(value):
                    found[f"{module.__name__}.{name}"] = _Same(value)
                if isinstance(value, type):
                    found[f"{module.__name__}.{name}:"] = self._list_attributes(value)
        for one in self._classes:
            if id(one) in self._helper_classes:
                found[f"{id(one)}:"] = self._list_attributes(one)
        return found

    def _list_attributes(self, owner: type) -> dict[str, _Same]:
        """Return the attributes of a class; new ones count, too. Figures of a helper's class are its own to count."""
        is_helper = id(owner) in self._helper_classes
        return {
            name: _Same(value)
            for name, value in list(vars(owner).items())
            if name not in self._assigned and not name.startswith("_abc_") and (callable(value) or not is_helper)
        }

    def _has_functions_of_program(self, owner: type) -> bool:
        return any(
            isinstance(value, FunctionType) and value.__code__.co_filename == PROGRAM_NAME
            for name, value in list(vars(owner).items())
            if name not in self._assigned
        )


class _Same:
    """A value that is equal to itself alone; it is kept, so that no other takes its place in memory."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _import_modules(tests: ast.Module) -> Iterator[ModuleType]:
    """Yield the modules of Python's own that tests import; some are there on other systems alone."""
    for node in ast.walk(tests):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if name.partition(".")[0] in sys.stdlib_module_names:
                with contextlib.suppress(ImportError):
                    yield importlib.import_module(name)


def _list_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name


def _list_bound(tests: ast.Module) -> Iterator[str]:
    """Yield the names that tests bind or delete at their outermost level."""
    for statement in tests.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
        elif isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.For, ast.With)):
            yield from (one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and _is_bound(one))


def _is_bound(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def run_in_one_namespace(tests: str) -> Callable[[ProgramScope], None]:
    """Return what runs tests in the namespace of the program, as in ordinary Python; passing there is no proof."""

    def run_tests(scope: ProgramScope) -> None:
        exec(compile(tests, TESTS_NAME, "exec", dont_inherit=True), scope)

    return run_tests


def _list_assigned(tests: ast.Module) -> Iterator[str]:
    """Yield the names of attributes that tests set, or name in a text as `mock.patch` takes it."""
    for node in ast.walk(tests):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield node.value.rpartition(".")[2]
