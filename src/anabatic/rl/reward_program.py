"""The process in which a user's reward functions run: it can be ended when one does not return. Standard library only.

Started as `python -m anabatic.rl.reward_program FILE`; reads a JSON line `[function, arguments]` and writes one, either
`{"value": ...}` or `{"error": "..."}`. The first line that it writes tells whether the file could be loaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from typing import Any

from anabatic.core import child


def main(file: str) -> None:
    """Serve until the input ends, or the training does."""
    child.die_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's code prints is no answer of ours
    try:
        module = _load(file)
    except BaseException as error:
        _write(out, {"error": _where(error)})
        return
    _write(out, {"value": [name for name in vars(module) if callable(vars(module)[name])]})
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": _plain(getattr(module, name)(*arguments))}
        except Exception as error:
            answer = {"error": _where(error)}
        _write(out, answer)


def _load(file: str) -> Any:
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    spec = importlib.util.spec_from_file_location("anabatic_rewards", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _plain(value: Any) -> Any:
    """Return what JSON can hold: numbers of other libraries become Python's."""
    if value is None or isinstance(value, str):
        return value
    return float(value)


def _where(error: BaseException) -> str:
    """Return kind, text and line of what a user's code has raised."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" (line {frames[-1].lineno} of {os.path.basename(frames[-1].filename)})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


def _write(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
