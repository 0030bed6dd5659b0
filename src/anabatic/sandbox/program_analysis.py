"""Find accesses that a solution does not need: a way to the tests that run beside it, or to their judge.

A program without such a reach is judged by its tests in its own process, as in ordinary Python (`joint_process.py`).
The analysis follows names, not values, so it allows what can be followed (`harmless_names.py`): modules of a list, as
the base of a name of theirs; attributes that lead nowhere. What cannot be seen in the source is noted while the program
runs (`attribute_guard.py`). As RestrictedPython (zope.org), but it refuses nothing: it reports.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator, Sequence

from anabatic.sandbox import harmless_names
from anabatic.sandbox.harmless_names import is_reaching_attribute

MAX_REACHES = 5
"""Most reaches that are named."""
_MAX_REACH_CHARS = 200
_REACHING_NAMES = frozenset(
    ("eval", "exec", "compile", "globals", "locals", "breakpoint", "help", "__import__", "__builtins__", "__loader__",
     "__spec__", "__annotations__", "__build_class__")
)  # fmt: skip
_REACHING_METHODS = frozenset(("__reduce__", "__reduce_ex__"))
"""Methods by which a copy sets attributes of anything."""
_STOPPABLE_LOOPS = re.compile(r"\bitertools\b|__next__")
"""Callables that a StopIteration of a function ends silently, in tests; their `map`, `filter`, `iter` do not."""
_BUILTIN_PATTERNS = frozenset(
    ("bool", "bytearray", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
)
_DECIDING_METHODS = frozenset(f"__{name}__" for name in (*harmless_names.COMPARISONS, "sub", "rsub"))
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def find_reaches(program: ast.Module, tests: str, helpers: Sequence[ast.stmt] = ()) -> list[str]:
    """Return what a program reaches for that its solution does not need, the first few; without it, tests are safe.

    Args:
        program: the parsed program.
        tests: source of its tests.
        helpers: definitions that the program and its tests share.
    """
    visitor = _ReachVisitor(program, tests, helpers)
    visitor.visit(program)
    return [one[:_MAX_REACH_CHARS] for one in dict.fromkeys(visitor.reaches)][:MAX_REACHES]


class _Bindings(ast.NodeVisitor):
    """The names of a program, taken for what they may be anywhere in it."""

    def __init__(self, program: ast.Module, helpers: Sequence[ast.stmt]) -> None:
        self.modules: dict[str, set[str]] = {}
        """Name -> paths of the modules that it may stand for."""
        self.members: set[str] = set()
        """Names that are imported from modules."""
        self.called_at_once: set[str] = set()
        self.starred: set[str] = set()
        """Modules all of whose names are imported."""
        self.classes: dict[str, list[ast.ClassDef]] = {}
        self.stored: set[str] = set()
        """Names that are bound by anything but an import, a class or a function."""
        self.own_attributes: set[str] = set()
        """Names of methods, of attributes that are stored, and of variables in class bodies."""
        self.metaclasses: set[str] = set()
        self.matches = False
        self.helpers = {node.name for node in helpers if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        for node in (program, *helpers):
            self.visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            path = alias.name if alias.asname else alias.name.partition(".")[0]
            self.modules.setdefault(alias.asname or path, set()).add(path)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes.setdefault(node.name, []).append(node)
        self.own_attributes.update(_list_body_names(node))
        if any(isinstance(base, ast.Name) and base.id == "type" for base in node.bases):
            self.metaclasses.add(node.name)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.own_attributes.add(node.name)
        self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.own_attributes.add(node.name)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.own_attributes.add(node.attr)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.stored.add(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        self.stored.add(node.arg)
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.matches = True
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if harmless_names.is_known_module(path := f"{node.module}.{alias.name}"):
                self.modules.setdefault(name, set()).add(path)
            elif alias.name == "*":
                self.starred.add(str(node.module))
                self.called_at_once |= {one for module, one in harmless_names.CALLED_AT_ONCE if module == node.module}
            elif (node.module, alias.name) in harmless_names.CALLED_AT_ONCE:
                self.called_at_once.add(name)
            else:
                self.members.add(name)


def _list_body_names(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        for one in ast.walk(statement):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                yield one.id


class _ReachVisitor(ast.NodeVisitor):
    def __init__(self, program: ast.Module, tests: str, helpers: Sequence[ast.stmt]) -> None:
        self.reaches: list[str] = []
        self._tests = tests
        self._tests_loop = _STOPPABLE_LOOPS.search(tests) is not None
        self._names = _Bindings(program, helpers)
        self._locals: list[set[str]] = []
        """Names that the functions around the node bind themselves."""
        self._reaching_names = {*_REACHING_NAMES}
        for module in self._names.starred:
            if harmless_names.is_known_module(module):
                self._reaching_names |= harmless_names.list_star_names(module)
                word, names = harmless_names.SHARED_STATE.get(module, ("", frozenset[str]()))
                self._reaching_names |= names if word in tests else set()

    def _report(self, node: ast.AST, text: str) -> None:
        line = getattr(node, "lineno", None)
        self.reaches.append(f"{text} (line {line})" if line else text)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if not harmless_names.is_known_module(alias.name):
                self._report(node, f"the module {alias.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = str(node.module)
        for alias in node.names:
            if node.level or (alias.name == "*" and not harmless_names.is_known_module(module)):
                self._report(node, f"{module}.{alias.name}")
            elif alias.name != "*" and not harmless_names.is_known_module(f"{module}.{alias.name}"):
                self._check_member(node, module, alias.name)

    def _check_member(self, node: ast.AST, module: str, name: str) -> None:
        members = harmless_names.list_members(module)
        if members is None or name not in members:
            self._report(node, f"{module}.{name}")
        word, names = harmless_names.SHARED_STATE.get(module, ("", frozenset[str]()))
        if name in names and word in self._tests:
            self._report(node, f"{module}.{name}, which its tests use")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if paths := self._resolve_modules(node.value):
            self._check_module_attribute(node, paths)
            return
        if not isinstance(node.ctx, ast.Load):
            self._check_change(node)
        self._check_read(node)
        self._visit_base(node.value, node.attr)

    def _check_module_attribute(self, node: ast.Attribute, paths: set[str]) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._report(node, f"a change of {min(paths)}.{node.attr}")
            return
        is_member_too = isinstance(node.value, ast.Name) and node.value.id in self._names.members
        for path in paths:
            if (path, node.attr) in harmless_names.CALLED_AT_ONCE:
                self._report(node, f"{path}.{node.attr} as a value")
            if not is_member_too or harmless_names.has_member(path, node.attr):
                self._check_member(node, path, node.attr)

    def _check_read(self, node: ast.Attribute) -> None:
        name = node.attr
        if is_reaching_attribute(name) and isinstance(node.ctx, ast.Load):
            self._report(node, f".{name}")
        elif name in ("__next__", "send") and self._tests_loop:
            self._report(node, "a StopIteration that may end a loop of its tests")
        elif name in ("format", "format_map") and not _is_harmless_format(node.value):
            if name not in self._names.own_attributes:
                self._report(node, f".{name} of a text that is not in the source")
        elif _is_private(node) and name not in self._names.own_attributes | harmless_names.PRIVATE_NAMES:
            self._report(node, f".{name}, which it does not define")

    def _check_change(self, node: ast.Attribute) -> None:
        base, name = node.value, node.attr
        is_own = isinstance(base, ast.Name) and base.id in ("self", "cls")
        if name == "__class__" and is_own:
            return
        if name.startswith("__") and name.endswith("__") and name not in harmless_names.WRITABLE_DUNDERS:
            self._report(node, f"a change of .{name}")
        elif isinstance(base, ast.Name) and base.id in self._names.members | self._names.helpers:
            self._report(node, f"a change of {base.id}.{name}")
        elif isinstance(base, ast.Attribute) and self._resolve_modules(base.value):
            self._report(node, f"a change of .{base.attr}.{name}")
        elif _is_class_of_another(base):
            self._report(node, f"a change of .{name} of a class that is not in the source")

    def _resolve_modules(self, node: ast.expr) -> set[str]:
        """Return the paths of the modules that an expression may stand for."""
        if isinstance(node, ast.Name):
            return set() if any(node.id in names for names in self._locals) else self._names.modules.get(node.id, set())
        if isinstance(node, ast.Attribute):
            paths = {f"{parent}.{node.attr}" for parent in self._resolve_modules(node.value)}
            return {path for path in paths if harmless_names.is_known_module(path)}
        return set()

    def visit_Name(self, node: ast.Name) -> None:
        if any(node.id in names for names in self._locals):
            return
        if node.id in self._names.modules and node.id not in self._names.members:
            if isinstance(node.ctx, ast.Load):
                self._report(node, f"the module {min(self._names.modules[node.id])} as a value")
        elif node.id in self._names.called_at_once or node.id in self._reaching_names:
            self._report(node, f"{node.id} as a value" if node.id in self._names.called_at_once else node.id)
        elif node.id in ("type", *self._names.metaclasses) and isinstance(node.ctx, ast.Load):
            self._report(node, f"{node.id} as a value")
        elif node.id in ("StopIteration", "next") and self._tests_loop:
            self._report(node, "a StopIteration that may end a loop of its tests")

    def _visit_base(self, base: ast.expr, name: str) -> None:
        if not (isinstance(base, ast.Name) and base.id == "type" and name in ("__call__", "__init__", "mro")):
            self.visit(base)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        target = node.target
        self.visit(target)
        if isinstance(target, ast.Attribute):
            self.visit(ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target))
            if target.attr == "__dict__":
                self._report(node, "a change of .__dict__")
        elif isinstance(target, ast.Name):
            self.visit(ast.copy_location(ast.Name(target.id, ast.Load()), target))
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if self._is_called_at_once(function):
            if len(node.args) != 1 or isinstance(node.args[0], ast.Starred) or node.keywords:
                self._report(node, f"{ast.unparse(function)} with a choice of attributes")
        elif isinstance(function, ast.Name) and function.id in ("type", *self._names.metaclasses):
            if len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
                self._report(node, "a class that is not in the source")
        elif isinstance(function, ast.Attribute) and function.attr in ("__setattr__", "__delattr__"):
            if not _is_harmless_set(function, node.args):
                self._report(node, f".{function.attr} of a name that is not in the source")
            self.visit(function.value)
        else:
            self._check_builtin_call(node)
            if not (isinstance(function, ast.Name) and function.id == "next"):
                self.visit(function)
        arguments: list[ast.AST] = [*node.args, *node.keywords]
        if isinstance(function, ast.Name) and function.id in ("isinstance", "issubclass"):
            arguments = [one for one in arguments if not (isinstance(one, ast.Name) and one.id == "type")]
        for part in arguments:
            self.visit(part)

    def _check_builtin_call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "open" and not _is_own_file(node):
            self._report(node, "open of a file that is not its own")
        elif name == "vars" and not node.args:
            self._report(node, "vars")
        elif name == "next" and len(node.args) == 1 and self._tests_loop:
            self._report(node, "a StopIteration that may end a loop of its tests")

    def _is_called_at_once(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Name):
            return function.id in self._names.called_at_once
        return isinstance(function, ast.Attribute) and any(
            (path, function.attr) in harmless_names.CALLED_AT_ONCE for path in self._resolve_modules(function.value)
        )

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._check_class_body(node)
        for base in node.bases:
            if not (isinstance(base, ast.Name) and base.id in ("type", *self._names.metaclasses)):
                self.visit(base)
        for keyword in node.keywords:
            if keyword.arg != "metaclass" or not isinstance(keyword.value, ast.Name):
                self.visit(keyword.value)
        for part in (*node.decorator_list, *node.body):
            self.visit(part)

    def _check_class_body(self, node: ast.ClassDef) -> None:
        for one in _walk_class_body(node):
            if isinstance(one, (ast.Import, ast.ImportFrom)):
                self._report(one, "a module as an attribute")
            elif isinstance(one, ast.Name) and one.id == "__module__" and not isinstance(one.ctx, ast.Load):
                self._report(one, "a change of __module__")
        for statement in node.body:
            for name, function in _list_methods(statement):
                if name in _REACHING_METHODS or (name == "__instancecheck__" and self._names.matches):
                    self._report(statement, name)
                if _ignores_operand(name, function):
                    self._report(statement, f"{name} that does not look at its operand")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node, node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node, [node.body])

    def _visit_function(self, node: _FunctionNode, body: Sequence[ast.AST]) -> None:
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        for decorator in decorators:
            if isinstance(decorator, ast.Attribute) and decorator.attr == "register" and _has_text_annotation(node):
                self._report(decorator, "an annotation that is evaluated")
            self.visit(decorator)
        self.visit(node.args)
        if not isinstance(node, ast.Lambda) and node.returns is not None:
            self.visit(node.returns)
        self._locals.append(_list_locals(node, body) - self._reaching_names)
        for part in body:
            self.visit(part)
        self._locals.pop()

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            if is_reaching_attribute(name) or name in ("__dict__", "format", "format_map"):
                self._report(node, f".{name}")
        if node.patterns and not self._has_known_fields(node.cls):
            self._report(node, "a pattern of a class whose fields are not in the source")
        self.generic_visit(node)

    def _has_known_fields(self, cls: ast.expr, depth: int = 0) -> bool:
        if not isinstance(cls, ast.Name) or depth > 20 or cls.id in self._names.stored:
            return False
        classes = self._names.classes.get(cls.id, [])
        if not classes:
            return cls.id in _BUILTIN_PATTERNS
        (found, *others) = classes
        return not others and not found.keywords and self._has_plain_fields(found, depth)

    def _has_plain_fields(self, node: ast.ClassDef, depth: int) -> bool:
        if any(isinstance(one, ast.Constant) and one.value == "__match_args__" for one in ast.walk(node)):
            return False
        if any(isinstance(one, ast.Name) and one.id == "__match_args__" for one in ast.walk(node)):
            return False
        if any("dataclass" not in ast.unparse(one) for one in node.decorator_list):
            return False
        known = self._names.members | {"object", "Exception"}
        return all(
            (isinstance(base, ast.Name) and base.id in known) or self._has_known_fields(base, depth + 1)
            for base in node.bases
        )


def _is_private(node: ast.Attribute) -> bool:
    return node.attr.startswith("_") and not node.attr.endswith("__") and isinstance(node.ctx, ast.Load)


def _is_class_of_another(base: ast.expr) -> bool:
    """Return whether an expression is the class of an object other than `self`."""
    if isinstance(base, ast.Attribute) and base.attr == "__class__":
        return not (isinstance(base.value, ast.Name) and base.value.id == "self")
    if isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "type":
        return not (base.args and isinstance(base.args[0], ast.Name) and base.args[0].id == "self")
    return False


def _list_locals(node: _FunctionNode, body: Sequence[ast.AST]) -> set[str]:
    """Return the names that a function binds itself, and not by an import."""
    found = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    others: set[str] = set()
    pending = list(body)
    while pending:
        one = pending.pop()
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(one.name)
            continue
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        elif isinstance(one, (ast.Import, ast.ImportFrom)):
            others.update((alias.asname or alias.name).partition(".")[0] for alias in one.names)
        elif isinstance(one, (ast.Global, ast.Nonlocal)):
            others.update(one.names)
        if not isinstance(one, ast.Lambda):
            pending.extend(ast.iter_child_nodes(one))
    return found - others


def _walk_class_body(node: ast.ClassDef) -> Iterator[ast.AST]:
    pending: list[ast.AST] = [*node.body]
    while pending:
        one = pending.pop()
        yield one
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(one))


def _has_text_annotation(node: _FunctionNode) -> bool:
    return any(
        isinstance(one, ast.Constant) and isinstance(one.value, str)
        for arg in ast.walk(node.args)
        if isinstance(arg, ast.arg) and arg.annotation is not None
        for one in ast.walk(arg.annotation)
    )


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
    return isinstance(path, ast.Constant) and isinstance(path.value, str) and not re.search(r"^/|\.\.", path.value)


def _is_harmless_set(function: ast.Attribute, args: list[ast.expr]) -> bool:
    """Return True for `super().__setattr__(...)`, and for a name in the source that is no dunder."""
    base = function.value
    if isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super":
        return True
    name = args[1] if len(args) > 1 else None
    return (
        isinstance(name, ast.Constant)
        and isinstance(name.value, str)
        and not (name.value.startswith("__") and name.value.endswith("__"))
    )


def _list_methods(statement: ast.stmt) -> Iterator[tuple[str, ast.FunctionDef | ast.Lambda | None]]:
    if isinstance(statement, ast.FunctionDef):
        yield statement.name, statement
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value if isinstance(statement.value, ast.Lambda) else None


def _ignores_operand(name: str, function: ast.FunctionDef | ast.Lambda | None) -> bool:
    """Return whether an operator decides without a look at the other value: one that is equal to everything."""
    if name not in _DECIDING_METHODS or function is None:
        return False
    parameters = [*function.args.posonlyargs, *function.args.args]
    if len(parameters) < 2:
        return False
    body = function.body if isinstance(function.body, list) else [function.body]
    nodes = [node for part in body for node in ast.walk(part)]
    if any(isinstance(node, ast.Name) and node.id in (parameters[1].arg, "NotImplemented") for node in nodes):
        return False
    return not any(isinstance(node, ast.Raise) for node in nodes)
