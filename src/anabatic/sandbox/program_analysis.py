"""What a program reaches for that a solution does not need: a way to the tests that run beside it, or to their judge.

A program without such a reach is judged by its tests in its own process, as in ordinary Python (`joint_process.py`).
The analysis follows names, not values, so it allows what can be followed: modules of a list, as the base of a name of
theirs; attributes that lead to no frame, no other object's namespace and no code. What cannot be seen in the source is
guarded while the program runs (`AttributeGuard`). As RestrictedPython (zope.org), but it refuses nothing: it reports.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import string
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

DICT_GUARD = "__anabatic_dict__"
"""Name of the guard that stands in for `X.__dict__`."""
_MAX_REACHES = 5
"""Most reaches that are named."""
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor", "lshift",
    "rshift",
)  # fmt: skip
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OTHER_METHODS = (
    "init", "new", "post_init", "name", "qualname", "doc", "module", "class", "dict", "len", "str", "repr", "hash",
    "iter", "next", "contains", "getitem", "setitem", "delitem", "missing", "call", "enter", "exit", "aenter",
    "aexit", "aiter", "anext", "index", "int", "float", "complex", "bool", "abs", "neg", "pos", "invert", "round",
    "trunc", "floor", "ceil", "reversed", "format", "bytes", "copy", "deepcopy", "annotations", "slots", "members",
    "version", "all", "cause", "context", "suppress_context", "args", "origin", "mro", "bases", "base", "length_hint",
    "init_subclass", "class_getitem", "setattr", "delattr", "sizeof", "fspath",
)  # fmt: skip
_BINARY_METHODS = frozenset(
    f"__{name}__" for name in (*_COMPARISONS, *_OPERATORS, *(f"r{name}" for name in _OPERATORS))
)
_READABLE_DUNDERS = _BINARY_METHODS | {
    f"__{name}__" for name in (*_OTHER_METHODS, *(f"i{name}" for name in _OPERATORS))
}
_WRITABLE_DUNDERS = frozenset(("__name__", "__qualname__", "__doc__", "__dict__", "__class__"))
_REACHING_ATTRIBUTES = re.compile(
    r"f_(back|globals|locals|builtins|code|trace)|tb_(frame|next)|(gi|cr|ag)_(frame|code|yieldfrom|await)|func_globals"
    r"|_getframe\w*|_current_\w+|exc_info|settrace\w*|setprofile\w*|load_module|exec_module|import_module"
    r"|get_objects|get_referrers|get_referents|get_stack|print_stack|get_coro"
)
"""Frames, code objects and what leads to them or to any module, on whatever object."""
_REACHING_NAMES = frozenset(
    ("eval", "exec", "compile", "globals", "locals", "breakpoint", "help", "__import__", "__builtins__", "__loader__",
     "__spec__")
)  # fmt: skip
_PUBLIC_MODULES = (
    "abc", "array", "asyncio", "base64", "binascii", "bisect", "calendar", "cmath", "collections", "collections.abc",
    "colorsys", "concurrent.futures", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "enum", "fnmatch", "fractions", "functools", "graphlib", "hashlib", "heapq", "hmac", "html", "ipaddress",
    "itertools", "json", "keyword", "math", "numbers", "operator", "pprint", "queue", "random", "re", "sched",
    "secrets", "shlex", "statistics", "string", "struct", "textwrap", "threading", "time", "typing", "unicodedata",
    "urllib.parse", "uuid", "weakref", "zlib", "zoneinfo",
)  # fmt: skip
"""Modules whose public names lead nowhere, but for `_REACHING_MEMBERS`."""
_MODULE_MEMBERS: dict[str, frozenset[str]] = {
    "__future__": frozenset(("annotations", "division", "generator_stop", "print_function")),
    "ast": frozenset(("literal_eval",)),
    "concurrent": frozenset(),
    "io": frozenset(("BytesIO", "StringIO")),
    "os": frozenset(("cpu_count", "environ", "getcwd", "getpid", "linesep", "listdir", "name", "sep", "urandom")),
    "os.path": frozenset(("abspath", "basename", "commonpath", "commonprefix", "dirname", "exists", "isabs", "isdir",
        "isfile", "join", "normpath", "relpath", "sep", "split", "splitext")),
    "pathlib": frozenset(("PurePath", "PurePosixPath", "PureWindowsPath")),
    "sys": frozenset(("argv", "byteorder", "exit", "float_info", "get_int_max_str_digits", "getrecursionlimit",
        "getsizeof", "hash_info", "int_info", "intern", "maxsize", "maxunicode", "platform", "set_int_max_str_digits",
        "setrecursionlimit", "stderr", "stdin", "stdout", "version", "version_info")),
    "timeit": frozenset(("default_timer",)),
    "types": frozenset(("GeneratorType", "MappingProxyType", "MethodType", "NoneType", "SimpleNamespace")),
    "urllib": frozenset(),
}  # fmt: skip
"""Module -> the names of it that lead nowhere."""
_REACHING_MEMBERS: dict[str, frozenset[str]] = {
    "asyncio": frozenset(("create_subprocess_exec", "create_subprocess_shell")),
    "concurrent.futures": frozenset(("ProcessPoolExecutor",)),
    "functools": frozenset(("update_wrapper", "WRAPPER_ASSIGNMENTS", "WRAPPER_UPDATES")),
    "hashlib": frozenset(("file_digest",)),
    "operator": frozenset(("attrgetter", "methodcaller")),
    "string": frozenset(("Formatter",)),
    "threading": frozenset(("excepthook", "getprofile", "gettrace", "setprofile", "setprofile_all_threads", "settrace",
        "settrace_all_threads")),
    "typing": frozenset(("ForwardRef", "evaluate_forward_ref", "get_type_hints")),
}  # fmt: skip
"""Attributes by names that are put together, evaluated texts, frames, processes."""
_SHARED_STATE: dict[str, tuple[str, frozenset[str]]] = {
    "random": ("random", frozenset(("seed", "setstate"))),
    "decimal": ("ecimal", frozenset(("getcontext", "setcontext", "localcontext", "DefaultContext"))),
}
"""Module -> a word of tests that use it, and its names that change what those tests get."""
_STOPPABLE_LOOPS = re.compile(
    r"\b(map|filter|starmap|takewhile|dropwhile|filterfalse|accumulate|groupby|iter|islice|chain)\b"
)
"""Iterators that a StopIteration of a function ends, as if they were through (no generator, PEP 479, does)."""
_BUILTIN_PATTERNS = frozenset(
    ("bool", "bytearray", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
)


def find_reaches(program: ast.Module, tests: str) -> list[str]:
    """Return what a program reaches for that its solution does not need, the first few; without it, tests are safe.

    Args:
        program: the parsed program.
        tests: source of its tests.
    """
    visitor = _ReachVisitor(program, tests)
    visitor.visit(program)
    return list(dict.fromkeys(visitor.reaches))[:_MAX_REACHES]


def is_reaching_attribute(name: str) -> bool:
    """Return whether an attribute may lead to a frame, a namespace, code or a module."""
    if name.startswith("__") and name.endswith("__"):
        return name not in _READABLE_DUNDERS
    return _REACHING_ATTRIBUTES.fullmatch(name) is not None


@lru_cache
def _list_public_names(module: str) -> frozenset[str]:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [name for name in vars(loaded) if not name.startswith("_")]
    safe = (name for name in names if not isinstance(getattr(loaded, name, None), ModuleType))
    return frozenset(safe) - _REACHING_MEMBERS.get(module, frozenset())


def _list_members(module: str) -> frozenset[str] | None:
    """Return the names of a module that lead nowhere; None: the module itself does."""
    if module in _MODULE_MEMBERS:
        return _MODULE_MEMBERS[module]
    return _list_public_names(module) if module in _PUBLIC_MODULES else None


def _is_known_module(path: str) -> bool:
    return path in _MODULE_MEMBERS or path in _PUBLIC_MODULES


class _ReachVisitor(ast.NodeVisitor):
    """Collects reaches; names are taken for what they may be anywhere in the program."""

    def __init__(self, program: ast.Module, tests: str) -> None:
        self.reaches: list[str] = []
        self._tests = tests
        self._tests_loop = _STOPPABLE_LOOPS.search(tests) is not None
        self._modules: dict[str, str] = {}
        """Name -> path of the module that it may stand for."""
        self._wraps: set[str] = set()
        """Names that may be functools.wraps."""
        self._reaching_names = {*_REACHING_NAMES}
        self._classes: dict[str, list[ast.ClassDef]] = {}
        for node in ast.walk(program):
            if isinstance(node, ast.ClassDef):
                self._classes.setdefault(node.name, []).append(node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._bind_imports(node)

    def _report(self, node: ast.AST, text: str) -> None:
        line = getattr(node, "lineno", None)
        self.reaches.append(f"{text} (line {line})" if line else text)

    def _bind_imports(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                self._modules[alias.asname or path] = path
            elif _is_known_module(path := f"{node.module}.{alias.name}"):
                self._modules[alias.asname or alias.name] = path
            elif (node.module, alias.name) == ("functools", "wraps"):
                self._wraps.add(alias.asname or alias.name)
            elif alias.name == "*":
                self._bind_all(str(node.module))

    def _bind_all(self, module: str) -> None:
        self._reaching_names |= _REACHING_MEMBERS.get(module, frozenset())
        word, names = _SHARED_STATE.get(module, ("", frozenset[str]()))
        if word in self._tests:
            self._reaching_names |= names
        if module == "functools":
            self._wraps.add("wraps")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if not _is_known_module(alias.name):
                self._report(node, f"the module {alias.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = str(node.module)
        members = None if node.level else _list_members(module)
        for alias in node.names:
            if alias.name == "*" and module in _PUBLIC_MODULES and not node.level:
                continue  # what is used of it is looked at by its name
            if not _is_known_module(f"{module}.{alias.name}"):
                self._check_member(node, module, alias.name, members)

    def _check_member(self, node: ast.AST, module: str, name: str, members: frozenset[str] | None) -> None:
        if members is None or name not in members:
            self._report(node, f"{module}.{name}")
        word, names = _SHARED_STATE.get(module, ("", frozenset[str]()))
        if name in names and word in self._tests:
            self._report(node, f"{module}.{name}, which its tests use")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._resolve_module(node.value)
        if path is not None:
            if isinstance(node.ctx, ast.Load):
                self._check_member(node, path, node.attr, _list_members(path))
                if (path, node.attr) == ("functools", "wraps"):
                    self._report(node, "functools.wraps as a value")
            else:
                self._report(node, f"a change of {path}.{node.attr}")
            return
        if isinstance(node.ctx, ast.Load):
            if is_reaching_attribute(node.attr):
                self._report(node, f".{node.attr}")
        elif node.attr.startswith("__") and node.attr.endswith("__") and node.attr not in _WRITABLE_DUNDERS:
            self._report(node, f"a change of .{node.attr}")
        if node.attr in ("format", "format_map") and not _is_harmless_format(node.value):
            self._report(node, f".{node.attr} of a text that is not in the source")
        self.visit(node.value)

    def _resolve_module(self, node: ast.expr) -> str | None:
        """Return the path of the module that an expression stands for."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute) and (parent := self._resolve_module(node.value)) is not None:
            path = f"{parent}.{node.attr}"
            return path if _is_known_module(path) else None
        return None

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._modules:
            if isinstance(node.ctx, ast.Load):
                self._report(node, f"the module {self._modules[node.id]} as a value")
        elif node.id in self._wraps or node.id in self._reaching_names:
            self._report(node, node.id)

    def visit_Call(self, node: ast.Call) -> None:
        function: ast.expr | None = node.func
        if self._is_wraps(node.func):
            if len(node.args) != 1 or isinstance(node.args[0], ast.Starred) or node.keywords:
                self._report(node, "functools.wraps with a choice of attributes")
            function = None
        elif isinstance(function, ast.Name) and function.id == "open":
            if not _is_own_file(node):
                self._report(node, "open of a file that is not its own")
        elif isinstance(function, ast.Name) and function.id == "vars" and not node.args:
            self._report(node, "vars")
        elif isinstance(function, ast.Name) and function.id == "next" and len(node.args) == 1 and self._tests_loop:
            self._report(node, "a StopIteration that may end a loop of its tests")
        elif isinstance(function, ast.Attribute) and not _is_harmless_set(function, node.args):
            self._report(node, f".{function.attr} of a name that is not in the source")
        if function is not None:
            self.visit(function)
        for part in (*node.args, *node.keywords):
            self.visit(part)

    def _is_wraps(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Name):
            return function.id in self._wraps
        return (
            isinstance(function, ast.Attribute)
            and function.attr == "wraps"
            and self._resolve_module(function.value) == "functools"
        )

    def visit_Raise(self, node: ast.Raise) -> None:
        named = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if isinstance(named, ast.Name) and named.id == "StopIteration" and self._tests_loop:
            self._report(node, "a StopIteration that may end a loop of its tests")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self._report(statement, "a module as an attribute")
            for name, function in _list_methods(statement):
                if _ignores_operand(name, function):
                    self._report(statement, f"{name} that does not look at its operand")
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            if is_reaching_attribute(name):
                self._report(node, f".{name}")
        if node.patterns and not self._has_known_fields(node.cls):
            self._report(node, "a pattern of a class whose fields are not in the source")
        self.generic_visit(node)

    def _has_known_fields(self, cls: ast.expr, depth: int = 0) -> bool:
        if not isinstance(cls, ast.Name) or depth > 20:
            return False
        classes = self._classes.get(cls.id, [])
        if not classes:
            return cls.id in _BUILTIN_PATTERNS
        return len(classes) == 1 and not classes[0].keywords and self._has_plain_body(classes[0], depth)

    def _has_plain_body(self, node: ast.ClassDef, depth: int) -> bool:
        if any(isinstance(one, ast.Constant) and one.value == "__match_args__" for one in ast.walk(node)):
            return False
        if any(isinstance(one, ast.Name) and one.id == "__match_args__" for one in ast.walk(node)):
            return False
        bases = (base for base in node.bases if not (isinstance(base, ast.Name) and base.id in ("object", "Exception")))
        return all(self._has_known_fields(base, depth + 1) for base in bases)


def _is_harmless_format(node: ast.expr) -> bool:
    """Return whether a text whose `format` is called is in the source, and reaches for no attribute."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return False
    return not any(is_reaching_attribute(name) for name in _list_format_attributes(node.value))


def _list_format_attributes(text: str) -> Iterator[str]:
    try:
        for _, field, spec, _ in string.Formatter().parse(text):
            yield from re.findall(r"\.(\w+)", field or "")
            yield from _list_format_attributes(spec) if spec else ()
    except ValueError:  # no format; it raises where it is called
        return


def _is_own_file(node: ast.Call) -> bool:
    path = node.args[0] if node.args else None
    return isinstance(path, ast.Constant) and isinstance(path.value, str) and not path.value.startswith("/")


def _is_harmless_set(function: ast.Attribute, args: list[ast.expr]) -> bool:
    """Return False for a call of `__setattr__` but that of `super()`, and those with a harmless name in the source."""
    base = function.value
    if function.attr not in ("__setattr__", "__delattr__"):
        return True
    if isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super":
        return True
    name = args[1] if len(args) > 1 else None
    return (
        isinstance(name, ast.Constant)
        and isinstance(name.value, str)
        and not (name.value.startswith("__") and name.value.endswith("__"))
    )


def _list_methods(statement: ast.stmt) -> Iterator[tuple[str, ast.FunctionDef | ast.Lambda]]:
    if isinstance(statement, ast.FunctionDef):
        yield statement.name, statement
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value


def _ignores_operand(name: str, function: ast.FunctionDef | ast.Lambda) -> bool:
    """Return whether an operator decides without a look at the other value: one that is equal to everything."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    if name not in _BINARY_METHODS or len(parameters) < 2:
        return False
    other = parameters[1].arg
    body = function.body if isinstance(function.body, list) else [function.body]
    nodes = [node for part in body for node in ast.walk(part)]
    if any(isinstance(node, ast.Name) and node.id in (other, "NotImplemented") for node in nodes):
        return False
    return not any(isinstance(node, ast.Raise) for node in nodes)


class _DictRewriter(ast.NodeTransformer):
    """Lets `X.__dict__` go through a guard: of a class of Python's own it leads everywhere."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "__dict__" or not isinstance(node.ctx, ast.Load):
            return node
        call = ast.Call(ast.Name(DICT_GUARD, ast.Load()), [node.value], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def guard_namespaces(program: ast.Module) -> ast.Module:
    """Return a program whose reads of `__dict__` are guarded."""
    guarded: ast.Module = _DictRewriter().visit(program)
    return guarded


class AttributeGuard:
    """Built-in functions that read and change attributes by name: they do what Python's do, and note what is reached.

    Attributes:
        reaches: what was reached for, the first few.
    """

    def __init__(self) -> None:
        self.reaches: list[str] = []

    def _note(self, text: str) -> None:
        if len(self.reaches) < _MAX_REACHES:
            self.reaches.append(text)

    def make_builtins(self) -> dict[str, Any]:
        """Return the built-in names for a program."""
        note = self._note

        def guarded_getattr(value: Any, name: str, *default: Any) -> Any:
            if is_reaching_attribute(str(name)):
                note(f".{name}")
            return getattr(value, name, *default)

        def guarded_setattr(value: Any, name: str, new: Any) -> None:
            if str(name).startswith("__") and str(name).endswith("__") and name not in _WRITABLE_DUNDERS:
                note(f"a change of .{name}")
            setattr(value, name, new)

        def guarded_vars(*values: Any) -> Any:
            if len(values) != 1 or _leads_elsewhere(values[0]):
                note("a namespace that is not its own")
            return vars(*values)

        guards: dict[str, Callable[..., Any]] = {
            "getattr": guarded_getattr,
            "setattr": guarded_setattr,
            "vars": guarded_vars,
            DICT_GUARD: guarded_vars,
        }
        return {**vars(builtins), **guards}


def _leads_elsewhere(value: object) -> bool:
    if isinstance(value, type):
        return value.__module__ != "__main__"
    return isinstance(value, (ModuleType, FunctionType))
