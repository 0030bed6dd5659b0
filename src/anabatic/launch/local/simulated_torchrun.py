"""`torchrun` inside of `anabatic sim`: torch's own, whose ranks are forked from one process that has imported torch.

Importing torch, torch_npu and transformers takes seconds of CPU time in each rank, and a simulated machine has more
ranks than cores. The server (`forkserver`) executes in advance what the program would import first. Ranks whose output
is redirected, and those of `--no-python`, start as always; `python -m torch.distributed.run` is untouched.
"""

from __future__ import annotations

import ast
import atexit
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anabatic.launch.local.forkserver import Forkserver

_PRELOADED_PACKAGES = ("torch", "torch_npu", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "numpy")
"""Packages whose import neither starts threads nor depends on the rank."""


_ALWAYS_IMPORTED = ("torch", "torch.distributed", "torch._dynamo")
"""The last one by the first step of every optimizer of torch 2.13 (`torch._disable_dynamo`)."""
_IMPORTED_LATER = {"transformers": "transformers.modeling_utils"}
"""Package -> what it imports when it makes its first model."""


def list_program_imports(source: str) -> list[str]:
    """Return what a program imports before it does anything else, from the known packages: `module` or `module:name`.

    What these packages import on demand comes last.

    Args:
        source: text of the program; one that does not parse imports nothing.
    """
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    found: list[str] = []
    for statement in statements:
        if isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            found += [f"{statement.module}:{alias.name}" for alias in statement.names if alias.name != "*"]
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
            break
    known = {name: name.replace(":", ".").partition(".")[0] for name in found}
    later = [_IMPORTED_LATER[package] for package in dict.fromkeys(known.values()) if package in _IMPORTED_LATER]
    return [name for name, package in known.items() if package in _PRELOADED_PACKAGES] + later


def _read_program(arguments: Any) -> str:
    if arguments.module or arguments.no_python or arguments.run_path:
        return ""
    try:
        return Path(arguments.training_script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""  # Python reports it when the ranks start


def _fork_ranks(server: Forkserver) -> None:
    """Patch `SubprocessHandler._popen` of torch 2.13 (elastic/multiprocessing) to fork the ranks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start = SubprocessHandler._popen

    def fork_or_popen(handler: SubprocessHandler, args: Sequence[str], environment: dict[str, str]) -> Any:
        is_python = tuple(args[:2]) == (sys.executable, "-u") and not (handler._stdout or handler._stderr)
        forked = server.fork_worker(args[2:], environment, is_program=True) if is_python else None
        return start(handler, tuple(args), environment) if forked is None else forked

    SubprocessHandler._popen = fork_or_popen  # type: ignore[assignment, method-assign]


def main() -> None:
    """Run torchrun with the arguments of this process."""
    from torch.distributed import run

    arguments = run.parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]
    if arguments.nproc_per_node != "1":
        server = Forkserver(",".join([*_ALWAYS_IMPORTED, *list_program_imports(_read_program(arguments))]))
        atexit.register(server.close)
        _fork_ranks(server)
    run.main(sys.argv[1:])


if __name__ == "__main__":
    main()
