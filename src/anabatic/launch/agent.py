"""`torch.distributed.run` without its tracebacks: the launcher reads what the workers left (`spawn.py`).

torch is named, not imported: the module is run by name.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import threading
import time

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
        sys.exit(1)


def _leave_with_parent(parent: int) -> None:
    """Stop the workers when whoever started us was killed: they would hold the devices for ever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
