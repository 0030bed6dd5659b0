"""The process in which a user's reward functions run: it can be ended when one does not return. Standard library only.

Started as `python -m anabatic.rl.reward_worker_main FILE`; reads a JSON line `[function, arguments]` and writes one,
either `{"value": ...}` or `{"error": "..."}`. The first line that it writes tells whether the file could be loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from typing import Any

from anabatic.core import relaunch

_MAX_TEXT_CHARS = 1 << 20
"""Letters of a text that a function may return."""
_MAX_ERROR_CHARS = 500
"""Characters of an error that are kept with an answer."""


def main(file: str) -> None:
    """Serve until the input ends, or the training does."""
    relaunch.ignore_group_signals()  # they are meant for the training, which still needs answers to end a step
    relaunch.die_with_parent()
    calls, out = _separate_streams()
    served = os.getpid()
    try:
        module = _load_module(file)
    except BaseException as error:
        _write_answer(out, {"error": _describe_error(error)})
        return
    _write_answer(out, {"value": [name for name in vars(module) if callable(vars(module)[name])]})
    for line in calls:
        name, arguments = json.loads(line)
        try:
            answer = {"value": _to_json_value(getattr(module, name)(*arguments))}
        except (Exception, SystemExit) as error:
            answer = {"error": _describe_error(error)}
        if os.getpid() != served:  # a copy that the function has forked must not answer, too
            os._exit(0)
        _write_answer(out, answer)


def _separate_streams() -> tuple[Any, Any]:
    """Return the streams of calls and answers; what the user's code reads is empty, what it prints is no answer."""
    calls, out = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return calls, out


def _load_module(file: str) -> Any:
    if not file.endswith(".py"):
        return importlib.import_module(file)
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    spec = importlib.util.spec_from_file_location("anabatic_rewards", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _to_json_value(value: Any) -> Any:
    """Return what JSON can hold: numbers of other libraries become Python's."""
    if isinstance(value, str) and len(value) > _MAX_TEXT_CHARS:
        raise ValueError(f"a text of {len(value):,} letters was returned, {_MAX_TEXT_CHARS:,} at most are taken")
    if value is None or isinstance(value, str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{type(value).__name__} was returned, no number and no text: {value!r:.60}") from error


def _describe_error(error: BaseException) -> str:
    """Return kind, text and line of what a user's code has raised."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" (line {frames[-1].lineno} of {os.path.basename(frames[-1].filename)})" if frames else ""
    message = str(error)
    return f"{type(error).__name__}: {message[:_MAX_ERROR_CHARS]}{'...' if len(message) > _MAX_ERROR_CHARS else ''}{at}"


def _write_answer(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
