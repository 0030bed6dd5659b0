"""`torch.distributed.run` without its tracebacks: the launcher reads what the workers left (`spawn.py`).

torch is named, not imported: the module is run by name.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from anabatic.core import child

_QUIET = ("ChildFailedError", "SignalException")
"""Exceptions of torch's agent that only say: a worker failed, or a signal came."""


def main() -> None:
    """Run the agent with the arguments of this process."""
    logging.disable(logging.CRITICAL)  # `spawn` says what went wrong; the workers' logging is their own
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # schedulers send it to every process; the workers save and leave
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except Exception as error:
        if type(error).__name__ not in _QUIET:
            raise
        _name_the_failed(error)
        sys.exit(1)


def _name_the_failed(error: Any) -> None:
    """Leave the exit codes of the ranks that failed by themselves: the agent stops the others because of them.

    `ChildFailedError.failures`, torch/distributed/elastic/multiprocessing/errors/__init__.py, torch 2.13.
    """
    failures = getattr(error, "failures", None)
    if failures and child.REPORTS in os.environ:
        codes = {str(rank): failure.exitcode for rank, failure in failures.items()}
        Path(os.environ[child.REPORTS], child.FAILED).write_text(json.dumps(codes), encoding="utf-8")


def _leave_with_parent(parent: int) -> None:
    """Stop the workers when whoever started us was killed: they would hold the devices for ever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
