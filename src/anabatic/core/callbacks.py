"""Callbacks of a training: the user's code, called after logged steps, evaluations and checkpoints."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from anabatic.core import plugins
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.formatting import did_you_mean

METHODS = ("on_start", "on_step", "on_eval", "on_save", "on_end")


class StopTraining(Exception):
    """Raised by a callback: the training ends as early stopping ends it, with a checkpoint and the final model."""


class Callback:
    """Base of callbacks; a class with some of these methods will do.

    They are called in the main process (rank 0) between two steps: the devices wait until they return. What they raise
    ends the training; the same command continues from its newest checkpoint.
    """

    def on_start(self, folder: Path, config: dict[str, Any]) -> None:
        """The training starts or continues: its run folder and its settings."""

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """A step was logged, every `log.every` steps: a row of `metrics.jsonl` of the kind `train`."""

    def on_eval(self, step: int, metrics: dict[str, Any]) -> None:
        """The held-out data was evaluated: a row of the kind `eval`."""

    def on_save(self, step: int, path: Path) -> None:
        """The checkpoint of a step is whole on the disk, at the next step border after that."""

    def on_end(self, step: int) -> None:
        """The training has come to its end, and the final model is written."""


GIVEN_CALLBACKS: ContextVar[tuple[Any, ...]] = ContextVar("callbacks", default=())
"""Objects that the caller of a training adds to its callbacks (`use_callbacks`)."""


@contextmanager
def use_callbacks(callbacks: Sequence[Any]) -> Iterator[None]:
    """Add objects to the callbacks of the trainings that this block runs in this process."""
    token = GIVEN_CALLBACKS.set((*GIVEN_CALLBACKS.get(), *callbacks))
    try:
        yield
    finally:
        GIVEN_CALLBACKS.reset(token)


def require_callback(callback: Any, name: str) -> Any:
    """Return the callback, made if it is a class.

    Raises:
        ConfigError: it has none of the methods, or cannot be made without arguments.
    """
    if not any(callable(getattr(callback, method, None)) for method in METHODS):
        near = did_you_mean(next((key for key in dir(callback) if key.startswith("on")), ""), METHODS)
        raise ConfigError(f"{name} is no callback: it has none of {', '.join(METHODS)}.{near}", "see anabatic.Callback")
    if not isinstance(callback, type):
        return callback
    try:
        return callback()
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"the callback {name} cannot be made: {_describe(error)}", "it gets no arguments") from error


class CallbackList:
    """The callbacks of one training.

    Args:
        specs: `FILE.py:NAME`, `MODULE:NAME` or the name of a plug-in of the group `anabatic.callbacks`.

    Raises:
        ConfigError: one cannot be loaded.
    """

    def __init__(self, specs: Sequence[str]) -> None:
        self._callbacks = [(spec, require_callback(_load_callback(spec), spec)) for spec in specs]
        self._callbacks += [(type(one).__name__, one) for one in GIVEN_CALLBACKS.get()]
        self.stop_reason = ""
        """Why one of them wishes to stop; empty: none does."""

    def __len__(self) -> int:
        return len(self._callbacks)

    def call_method(self, method: str, step: int, *arguments: Any) -> None:
        """Call a method of each that has it.

        Raises:
            Failure: one raised.
        """
        for name, callback in self._callbacks:
            function = getattr(callback, method, None)
            if function is None:
                continue
            try:
                function(*arguments)
            except StopTraining as request:
                self.stop_reason = f"{name}: {request}" if str(request) else name
            except Exception as error:  # the user's code may raise anything
                raise Failure(
                    f"the callback {name} failed in {method} after step {step}: {_describe(error)}",
                    "fix it; the same command continues from the newest checkpoint",
                ) from error


def require_callback_source(spec: str) -> None:
    """Make sure, without importing it, that there is a plug-in or a file of this name.

    Raises:
        ConfigError: there is none.
    """
    where, colon, _ = spec.rpartition(":")
    if where.endswith(".py") and not Path(where).expanduser().is_file():
        raise ConfigError(f"{where}: no such file", "give FILE.py:NAME or MODULE:NAME")
    if not colon and plugins.find_plugin("anabatic.callbacks", spec) is None:
        known = plugins.list_plugins("anabatic.callbacks")
        installed = f"installed are {', '.join(known)}; or " if known else ""
        message = f'there is no callback "{spec}".{did_you_mean(spec, known)}'
        raise ConfigError(message, f"{installed}give FILE.py:NAME or MODULE:NAME")


def _load_callback(spec: str) -> Any:
    require_callback_source(spec)
    where, colon, name = spec.rpartition(":")
    if not colon:
        return plugins.load_plugin("anabatic.callbacks", spec)
    try:
        module = _load_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"the callback {spec} cannot be loaded: {_describe(error)}", f"fix {where}") from error
    if not hasattr(module, name):
        near = did_you_mean(name, [key for key in vars(module) if not key.startswith("_")])
        raise ConfigError(f"{where} has no {name}.{near}", "give FILE.py:NAME or MODULE:NAME")
    return getattr(module, name)


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"anabatic_callbacks_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # of a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")
