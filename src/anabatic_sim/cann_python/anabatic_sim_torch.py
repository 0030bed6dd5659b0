"""Runs when torch is imported in a simulation (entry point torch.backends): torch.compile says what is not simulated.

Inductor writes Triton kernels for the NPU, which no simulated device can run. Without this module it fails in the
middle of its lowering, with an assertion about a missing backend.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "torch._inductor.compile_fx"
_SENTENCE = (
    "torch.compile: the inductor backend is not simulated for the NPU (it writes Triton kernels): use "
    'torch.compile(backend="eager"), "aot_eager" or "npugraphs", or set TORCHDYNAMO_SUPPRESS_ERRORS=1 to run the '
    "function uncompiled"
)


def _refuse_npu(compile_fx: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_fx)
    def compile_or_refuse(model: Any, inputs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        if any(getattr(getattr(tensor, "device", None), "type", "") == "npu" for tensor in inputs):
            raise NotImplementedError(_SENTENCE)
        return compile_fx(model, inputs, *arguments, **options)

    return compile_or_refuse


class _InductorFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads inductor's entry module, then puts the check before its compiler."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # the real finders come next
        self._spec = importlib.util.find_spec(name)
        if self._spec is None or self._spec.loader is None:
            return None
        return importlib.util.spec_from_file_location(name, self._spec.origin, loader=self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._spec is not None and self._spec.loader is not None
        self._spec.loader.exec_module(module)
        module.compile_fx = _refuse_npu(module.compile_fx)  # type: ignore[attr-defined]


def prepare() -> None:
    """Watch for the import of inductor: torch itself need not load it."""
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _InductorFinder())
