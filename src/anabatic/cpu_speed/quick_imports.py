"""transformers and torch's checkpoints without what a job does not use: compilers, sharded tensors, solvers, trainers.

All of it hangs on `transformers.modeling_utils` and takes more than half of a start. While that module is imported,
`install_quick_imports` makes names of `_MODEL_NAMES` wait until they are used (`WaitingImports`), and records what
the decorators of `torch.compiler` ask of `torch._dynamo` until something imports it. Nothing is replaced: whoever uses
a name gets the real one. A version of transformers outside of `_KNOWN_MAJOR`, or one that wants other names, is
imported as usual.

A placeholder imports its module when it is called, subclassed, indexed or asked for an attribute, and then puts the
real object wherever the statement had bound it. `isinstance(x, placeholder)` needs no import while nobody has imported
the module: no object of a class that does not exist yet can be `x`. Only names that a table lists wait, functions and
classes that are known not to be used during the import; none that an `except` clause or an `is` looks at.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

_LOCK = threading.Lock()
_ACTIVE: list[WaitingImports] = []
"""Contexts that have been entered, of all threads: they may end in another order than they began."""
_PREVIOUS: list[Callable[..., Any]] = [builtins.__import__]
"""The import statement of Python, and the one to restore while contexts are active."""
_KNOWN_MAJOR = "5"
_HEAVY_MODULE = "transformers.modeling_utils"
_SCANNER = "transformers.utils.import_utils"
"""Module that reads all files of transformers' models for the names that they export."""
_COMPANIONS = ("transformers.generation.utils",)
"""Modules that every language model imports and that hang on the same heavy ones."""
_DECLARATION = "\n__all__"
_DYNAMO = "torch._dynamo"
_MODEL_NAMES = {
    module: frozenset(names.split())
    for module, names in {
        "accelerate": "PartialState dispatch_model init_empty_weights",
        "accelerate.hooks": "AlignDevicesHook add_hook_to_module remove_hook_from_module",
        "accelerate.utils": (
            "extract_model_from_parallel get_balanced_memory get_max_memory infer_auto_device_map reduce"
        ),
        "accelerate.utils.modeling": "clean_device_map get_max_layer_size",
        "scipy.optimize": "linear_sum_assignment",
        "torch._dynamo._trace_wrapped_higher_order_op": "TransformGetItemToIndex",
        "torch.distributed._composable.fsdp": "fully_shard",
        "torch.distributed._functional_collectives": "all_to_all_single_autograd wait_tensor",
        "torch.distributed.fsdp": "CPUOffloadPolicy FullyShardedDataParallel MixedPrecisionPolicy",
        "torch.distributed.tensor": "DTensor Partial Replicate Shard distribute_tensor",
        "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset",
        "torch.distributed.tensor.placement_types": "Shard _StridedShard",
        "transformers.distributed.checkpoint": (
            "_get_resolved_distributed_checkpoint_files _load_model_checkpoint_distributed"
            " _save_model_checkpoint_distributed consolidate_distributed_checkpoint get_distributed_checkpoint_dir"
        ),
        "transformers.distributed.expert_parallel": "apply_expert_parallelism",
        "transformers.distributed.tensor_parallel": (
            "apply_tensor_parallelism gather_state_dict_for_save get_kv_heads_per_rank verify_tp_plan"
        ),
    }.items()
}
"""Module -> functions and classes of it that the modules of transformers bind when they are imported and use later."""
_CHECKPOINT_NAMES = {
    module: frozenset(names.split())
    for module, names in {
        "torch.distributed._functional_collectives": "AsyncCollectiveTensor",
        "torch.distributed.elastic.agent.server.api": "_get_fq_hostname",
        "torch.distributed.fsdp._shard_utils": "_create_chunk_sharded_tensor",
        "torch.distributed.tensor": "DTensor Replicate _DTensorSpec distribute_tensor",
        "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset",
    }.items()
}
"""The same for checkpoints."""
_CHECKPOINTS = "torch.distributed.checkpoint"
_CHECKPOINT_IMPORTERS = (_CHECKPOINTS, "torch.distributed._state_dict_utils")
_REGISTRY = ("transformers.distributed.mixin", "transformers.distributed.parallel_utils", "ALL_PARALLEL_STYLES")
"""Module that reads a registry, module that has it, and its name."""
_REGISTRY_WRITERS = ("transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel")
"""Modules that fill the registry when they are imported."""


class DeferredName:
    """Stands for `module.name` until it is used.

    Args:
        module: module to import.
        name: what to take from it.
        namespace: globals of the module that has the placeholder, where the real object replaces it.
        prerequisites: modules to import first, because they complete what the name stands for, such as a registry.
    """

    def __init__(self, module: str, name: str, namespace: dict[str, Any], prerequisites: Sequence[str] = ()) -> None:
        self._deferred = (module, name, namespace, prerequisites)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return resolve_name(self)(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(resolve_name(self), name)

    def __getitem__(self, key: Any) -> Any:
        return resolve_name(self)[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(resolve_name(self))

    def __contains__(self, item: object) -> bool:
        return item in resolve_name(self)

    def __len__(self) -> int:
        return len(resolve_name(self))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (resolve_name(self),)

    def __instancecheck__(self, instance: object) -> bool:
        return _is_imported(self._deferred[0]) and isinstance(instance, resolve_name(self))

    def __subclasscheck__(self, subclass: type) -> bool:
        return _is_imported(self._deferred[0]) and issubclass(subclass, resolve_name(self))

    def __or__(self, other: Any) -> Any:  # of annotations that are evaluated: as if they were written as text
        return typing.Union[self._name(), other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return typing.Union[other, self._name()]  # noqa: UP007

    def __repr__(self) -> str:
        return f"<{self._name()}, not imported yet>"

    def _name(self) -> Any:
        return ".".join(self._deferred[:2])


def resolve_name(placeholder: DeferredName) -> Any:
    """Import what a placeholder stands for, put it where the placeholder was bound, and return it.

    Raises:
        ImportError: the module cannot be imported or has no such name.
    """
    module, name, namespace, prerequisites = placeholder._deferred
    for each in (*prerequisites, module):
        importlib.import_module(each)
    try:
        found = getattr(sys.modules[module], name)
    except AttributeError as error:
        raise ImportError(f"cannot import name {name!r} from {module!r}", name=module) from error
    for key, value in list(namespace.items()):
        if value is placeholder:
            namespace[key] = found
    return found


def _is_imported(module: str) -> bool:
    """Return whether a module has been imported to its end; while it is being imported, it may lack names."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


class WaitingImports:
    """Context in which `from module import name` statements of some packages bind placeholders.

    Args:
        importers: packages and modules that contain the statements.
        names: module -> the names that may wait. A statement with any other name, one of a module that is imported
            already, and one of a package that is not installed run as usual.
    """

    def __init__(self, importers: Sequence[str], names: Mapping[str, frozenset[str]]) -> None:
        self._importers, self._names = tuple(f"{importer}." for importer in importers), names

    def __enter__(self) -> WaitingImports:
        with _LOCK:
            if not _ACTIVE:
                _PREVIOUS.append(builtins.__import__)
                builtins.__import__ = _import_or_defer
            _ACTIVE.append(self)
        return self

    def __exit__(self, *unused: object) -> None:
        with _LOCK:
            _ACTIVE.remove(self)
            if not _ACTIVE:
                builtins.__import__ = _PREVIOUS.pop()

    def find_deferrable(self, name: str, importer: Mapping[str, object], fromlist: Sequence[str], level: int) -> str:
        """Return the full name of the module of a statement that may wait; empty for any other statement."""
        if not f"{importer.get('__name__', '')}.".startswith(self._importers):
            return ""
        package = str(importer.get("__package__") or "")
        module = importlib.util.resolve_name("." * level + name, package) if level else name
        names = self._names.get(module)
        if names is None or not names.issuperset(fromlist) or not _may_wait(module):
            return ""
        return module


def _import_or_defer(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """The import statement while a context is active."""
    if fromlist and globals is not None:
        for context in tuple(_ACTIVE):
            if module := context.find_deferrable(name, globals, fromlist, level):
                namespace = typing.cast("dict[str, Any]", globals)
                return SimpleNamespace(**{each: DeferredName(module, each, namespace) for each in fromlist})
    return _PREVIOUS[-1](name, globals, locals, fromlist, level)


def _may_wait(module: str) -> bool:
    """Return whether nothing has imported a module yet, and its package is there to import it later."""
    package = module.partition(".")[0]
    return module not in sys.modules and (package in sys.modules or importlib.util.find_spec(package) is not None)


def install_quick_imports() -> None:
    """Make the first import of transformers' models a quick one; without effect after it."""
    if _HEAVY_MODULE in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(_HEAVY_MODULE, _import_quickly))
    if _SCANNER not in sys.modules:
        sys.meta_path.insert(0, _Finder(_SCANNER, _scan_quickly))


def import_checkpoints() -> Any:
    """Import and return `torch.distributed.checkpoint`."""
    if _CHECKPOINTS in sys.modules:
        return importlib.import_module(_CHECKPOINTS)  # which waits, while another thread imports it
    with WaitingImports(_CHECKPOINT_IMPORTERS, _CHECKPOINT_NAMES):
        return importlib.import_module(_CHECKPOINTS)


class _Finder(MetaPathFinder):
    """Finds one module, once, and has a function execute it."""

    def __init__(self, module: str, execute: Callable[[Callable[[], None]], None]) -> None:
        self._module, self._execute = module, execute

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ExecutedBy(spec, spec.loader, self._execute)
        return spec


class _ExecutedBy(Loader):
    """The loader of a module, with a function around the execution of the module."""

    def __init__(self, spec: ModuleSpec, loader: Loader, execute: Callable[[Callable[[], None]], None]) -> None:
        self._spec, self._loader, self._execute = spec, loader, execute

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader  # whoever looks later finds the usual one
        self._execute(lambda: self._loader.exec_module(module))


def _import_quickly(execute: Callable[[], None]) -> None:
    version = str(getattr(sys.modules.get("transformers"), "__version__", ""))
    if version.partition(".")[0] != _KNOWN_MAJOR:
        execute()
        return
    torch = importlib.import_module("torch")  # of which this room knows nothing before

    with WaitingImports(("transformers",), _MODEL_NAMES), _record_dynamo_marks(torch):
        execute()
        for companion in _COMPANIONS:
            if importlib.util.find_spec(companion) is not None:
                importlib.import_module(companion)
    reader, owner, name = _REGISTRY
    namespace = vars(sys.modules[reader]) if reader in sys.modules else {}
    if name in namespace and not sys.modules.keys() & set(_REGISTRY_WRITERS):
        namespace[name] = DeferredName(owner, name, namespace, _REGISTRY_WRITERS)


def _scan_quickly(execute: Callable[[], None]) -> None:
    """Execute the scanner and make it read 1,700 files once instead of twice, and of each only the part that counts.

    Its cache holds 128 of 550 folders, and it tests every line of a file that has one declaration.
    """
    execute()
    scanner = sys.modules[_SCANNER]
    scan = getattr(getattr(scanner, "create_import_structure_from_path", None), "__wrapped__", None)
    fetch = getattr(scanner, "fetch__all__", None)
    if scan is None or fetch is None:
        return

    def fetch_exported_names(file_content: str) -> Any:
        if file_content.count(_DECLARATION) == 1 and not file_content.startswith(_DECLARATION[1:]):
            file_content = file_content[file_content.index(_DECLARATION) + 1 :]
        return fetch(file_content)

    scanner.__dict__.update(create_import_structure_from_path=functools.cache(scan), fetch__all__=fetch_exported_names)


class _DynamoMarks:
    """Stands for `torch._dynamo` while functions are only marked for it; the marks are made when it is imported."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._marks: list[tuple[str, Any]] = []

    def allow_in_graph(self, function: Any) -> Any:
        """Record the mark `torch._dynamo.allow_in_graph`."""
        return self._record("allow_in_graph", function)

    def assume_constant_result(self, function: Any) -> Any:
        """Record the mark `torch._dynamo.assume_constant_result`."""
        return self._record("assume_constant_result", function)

    def disable(self, function: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
        """Do as `torch.compiler.disable`, with the decorator that torch itself uses while it is imported."""
        return self._torch._disable_dynamo(function, recursive)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_DYNAMO), name)

    def _record(self, mark: str, function: Any) -> Any:
        self._marks.append((mark, function))
        return function

    def make_marks(self, execute: Callable[[], None]) -> None:
        """Execute `torch._dynamo`, then make the recorded marks."""
        execute()
        for mark, function in self._marks:
            getattr(sys.modules[_DYNAMO], mark)(function)


@contextmanager
def _record_dynamo_marks(torch: Any) -> Iterator[None]:
    """Record marks for `torch._dynamo` until something imports it."""
    if _DYNAMO in sys.modules or not hasattr(torch, "_disable_dynamo"):
        yield
        return
    marks = _DynamoMarks(torch)
    names = ("allow_in_graph", "assume_constant_result", "disable")
    previous = {name: getattr(torch.compiler, name) for name in names}
    recorders = {name: getattr(marks, name) for name in names}
    finder = _Finder(_DYNAMO, marks.make_marks)
    sys.meta_path.insert(0, finder)
    torch._dynamo = marks
    vars(torch.compiler).update(recorders)
    try:
        yield
    finally:
        for name, function in previous.items():
            if vars(torch.compiler)[name] is recorders[name]:  # a backend may have put its own there
                setattr(torch.compiler, name, function)
        if vars(torch).get("_dynamo") is marks:
            del torch._dynamo
