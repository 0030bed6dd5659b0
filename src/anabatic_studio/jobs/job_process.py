"""Runs the command of a job and writes its exit code to a file: the job outlives the studio that started it.

`python -m anabatic_studio.jobs.job_process EXIT_FILE FOLDER COMMAND...` runs it in FOLDER. Stop signals are passed on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from anabatic.core.process_info import wait_for_exit

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: list[str]) -> int:
    """Run the command, write its exit code, and return it."""
    exit_file, folder, *command = argv
    child: subprocess.Popen[bytes] | None = None
    pending: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if child is None:
            pending.append(number)
        else:
            child.send_signal(number)

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=folder)
    for pending_number in pending:
        child.send_signal(pending_number)
    code = wait_for_exit(child)
    code = 128 - code if code < 0 else code
    temporary = Path(f"{exit_file}.{os.getpid()}")
    temporary.write_text(f"{code}\n", encoding="utf-8")
    temporary.replace(exit_file)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
