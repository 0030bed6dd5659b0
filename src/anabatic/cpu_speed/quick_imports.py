"""transformers and torch's checkpoints without what a job does not use: compilers, sharded tensors, solvers, trainers.

All of it hangs on `transformers.modeling_utils` and takes more than half of a start. While that module is imported,
`install_quick_imports` makes names of `_MODEL_NAMES` wait until they are used (`deferred_names.py`), and records what
the decorators of `torch.compiler` ask of `torch._dynamo` until something imports it. Nothing is replaced: whoever uses
a name gets the real one. A version of transformers outside of `_KNOWN_MAJOR`, or one that wants other names, is
imported as usual.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from anabatic.cpu_speed.deferred_names import DeferredName, WaitingImports

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
