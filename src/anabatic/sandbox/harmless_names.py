"""Names that a program may use beside its tests: modules and members of them, attributes, whose uses are known.

A name is harmless if it leads to no frame, no code, no other object's namespace and no module, reads or changes no
attribute by a name that is put together, and evaluates no text.
"""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from types import ModuleType

OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor", "lshift",
    "rshift",
)  # fmt: skip
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OTHER_METHODS = (
    "init", "new", "post_init", "name", "qualname", "doc", "module", "class", "dict", "len", "str", "repr", "hash",
    "iter", "next", "contains", "getitem", "setitem", "delitem", "missing", "call", "enter", "exit", "aenter", "aexit",
    "aiter", "anext", "index", "int", "float", "complex", "bool", "abs", "neg", "pos", "invert", "round", "trunc",
    "floor", "ceil", "reversed", "format", "bytes", "copy", "slots", "members", "version", "all", "cause", "context",
    "suppress_context", "notes", "args", "origin", "mro", "bases", "base", "length_hint", "init_subclass",
    "class_getitem", "sizeof", "fspath",
)  # fmt: skip
READABLE_DUNDERS = frozenset(
    f"__{name}__"
    for name in (
        *_OTHER_METHODS, *COMPARISONS, *OPERATORS, *(f"r{name}" for name in OPERATORS),
        *(f"i{name}" for name in OPERATORS),
    )
)  # fmt: skip
WRITABLE_DUNDERS = frozenset(
    ("__name__", "__qualname__", "__doc__", "__dict__", "__cause__", "__context__", "__suppress_context__")
)
PRIVATE_NAMES = frozenset(("_asdict", "_replace", "_fields", "_make", "_field_defaults", "_value_", "_name_"))
"""Names with an underscore that belong to the interface of named tuples and enums."""
_REACHING_ATTRIBUTES = re.compile(
    r"f_(back|globals|locals|builtins|code|trace)|tb_(frame|next)|(gi|cr|ag)_(frame|code|yieldfrom|await)|func_globals"
    r"|_getframe\w*|_current_\w+|exc_info|settrace\w*|setprofile\w*|load_module|exec_module|import_module"
    r"|get_objects|get_referrers|get_referents|get_stack|print_stack|get_coro"
)
"""Frames, code objects and what leads to them or to any module, on whatever object."""
_PUBLIC_MODULES = (
    "abc", "array", "asyncio", "base64", "binascii", "bisect", "calendar", "cmath", "collections", "collections.abc",
    "colorsys", "concurrent.futures", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "enum", "fnmatch", "fractions", "functools", "graphlib", "hashlib", "heapq", "hmac", "html", "ipaddress",
    "itertools", "json", "keyword", "math", "numbers", "operator", "pprint", "queue", "random", "re", "sched",
    "secrets", "shlex", "statistics", "string", "struct", "textwrap", "threading", "time", "typing", "unicodedata",
    "urllib.parse", "uuid", "weakref", "zlib", "zoneinfo",
)  # fmt: skip
"""Modules whose public names are harmless, but for `_REACHING_MEMBERS`."""
_MODULE_MEMBERS: dict[str, frozenset[str]] = {
    "__future__": frozenset(("annotations", "division", "generator_stop", "print_function")),
    "ast": frozenset(("literal_eval",)),
    "concurrent": frozenset(),
    "io": frozenset(("BytesIO", "StringIO")),
    "os": frozenset(("cpu_count", "getcwd", "getpid", "linesep", "listdir", "name", "sep", "urandom")),
    "os.path": frozenset(("abspath", "basename", "commonpath", "commonprefix", "dirname", "exists", "isabs", "isdir",
        "isfile", "join", "normpath", "relpath", "sep", "split", "splitext")),
    "sys": frozenset(("byteorder", "exit", "float_info", "get_int_max_str_digits", "getrecursionlimit", "getsizeof",
        "hash_info", "int_info", "intern", "maxsize", "maxunicode", "platform", "set_int_max_str_digits",
        "setrecursionlimit", "stderr", "stdin", "stdout", "version", "version_info")),
    "timeit": frozenset(("default_timer",)),
    "types": frozenset(("GeneratorType", "MappingProxyType", "MethodType", "NoneType", "SimpleNamespace")),
    "urllib": frozenset(),
}  # fmt: skip
"""Module -> the harmless names of it."""
_REACHING_MEMBERS: dict[str, frozenset[str]] = {
    "asyncio": frozenset(("AbstractEventLoopPolicy", "BaseEventLoop", "DefaultEventLoopPolicy", "SelectorEventLoop",
        "all_tasks", "current_task",
        "create_subprocess_exec", "create_subprocess_shell", "new_event_loop", "set_event_loop",
        "set_event_loop_policy", "_set_running_loop")),
    "calendar": frozenset(("setfirstweekday",)),
    "concurrent.futures": frozenset(("ProcessPoolExecutor",)),
    "contextlib": frozenset(("chdir",)),
    "dataclasses": frozenset(("make_dataclass",)),
    "enum": frozenset(("global_enum", "global_enum_repr", "global_flag_repr", "global_str", "property")),
    "functools": frozenset(("update_wrapper", "WRAPPER_ASSIGNMENTS", "WRAPPER_UPDATES")),
    "hashlib": frozenset(("file_digest",)),
    "operator": frozenset(("attrgetter", "methodcaller")),
    "string": frozenset(("Formatter",)),
    "threading": frozenset(("excepthook", "getprofile", "gettrace", "setprofile", "setprofile_all_threads", "settrace",
        "settrace_all_threads")),
    "time": frozenset(("tzset",)),
    "typing": frozenset(("ForwardRef", "evaluate_forward_ref", "get_type_hints")),
    "weakref": frozenset(("WeakMethod",)),
}  # fmt: skip
"""Attributes by names that are put together, evaluated texts, frames, processes, settings that tests share."""
CALLED_AT_ONCE = frozenset(
    (("functools", "wraps"), ("contextlib", "redirect_stdout"), ("contextlib", "redirect_stderr"))
)
"""Members that are harmless where they are called, with one argument, and not as values."""
SHARED_STATE: dict[str, tuple[str, frozenset[str]]] = {
    "random": ("random", frozenset(("seed", "setstate"))),
    "decimal": ("ecimal", frozenset(("getcontext", "setcontext", "localcontext", "DefaultContext"))),
}
"""Module -> a word of tests that use it, and its names that change what those tests get."""


def is_reaching_attribute(name: str) -> bool:
    """Return whether an attribute may lead to a frame, a namespace, code or a module."""
    if name.startswith("__") and name.endswith("__"):
        return name not in READABLE_DUNDERS
    return _REACHING_ATTRIBUTES.fullmatch(name) is not None


def is_known_module(path: str) -> bool:
    """Return whether some names of a module are harmless."""
    return path in _MODULE_MEMBERS or path in _PUBLIC_MODULES


def list_members(module: str) -> frozenset[str] | None:
    """Return the harmless names of a module; None: it has none."""
    if module in _MODULE_MEMBERS:
        return _MODULE_MEMBERS[module]
    return _list_public_names(module) if module in _PUBLIC_MODULES else None


def list_star_names(module: str) -> frozenset[str]:
    """Return the names that `from MODULE import *` brings and that are not harmless."""
    loaded = importlib.import_module(module)
    brought = getattr(loaded, "__all__", None)
    if brought is None:
        brought = [name for name in vars(loaded) if not name.startswith("_")]
    return frozenset(brought) - (list_members(module) or frozenset())


def has_member(module: str, name: str) -> bool:
    """Return whether a module has a name, harmless or not."""
    return hasattr(importlib.import_module(module), name)


@lru_cache
def _list_public_names(module: str) -> frozenset[str]:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [name for name in vars(loaded) if not name.startswith("_")]
    safe = (name for name in names if not isinstance(getattr(loaded, name, None), ModuleType))
    return frozenset(safe) - _REACHING_MEMBERS.get(module, frozenset())
