"""`--device.nproc N`: the same command again in N processes, through the elastic agent of torch.

The agent (`torch.distributed.run --standalone`) picks a free port, sets RANK, LOCAL_RANK and WORLD_SIZE, and
stops the others when one fails. It runs in a session of its own: a signal reaches it once, from here. Each
worker leaves its message and exit code in a folder that is read here, so that the user sees the cause and not
the agent's traceback, and sees it once when all ranks say the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from anabatic.core import child, log
from anabatic.core.errors import DeviceError

SAVE_SECONDS = 600
"""The agent kills workers that take longer than this to save after a signal."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run(command: str, recipe: str, nproc: int) -> int:
    """Run `anabatic COMMAND` in `nproc` processes and return the exit code.

    Args:
        command: for example `pretrain`.
        recipe: the resolved settings, as YAML.
        nproc: processes on this machine.

    Raises:
        DeviceError: a process ended without a message, for example killed for its memory.
    """
    with tempfile.TemporaryDirectory(prefix="anabatic-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(recipe, encoding="utf-8")
        arguments = [
            sys.executable,
            "-m",
            "anabatic.launch.agent",
            "--standalone",
            f"--nproc-per-node={nproc}",
        ]
        arguments += ["-m", "anabatic", *command.split(), "-c", str(folder / "job.yaml")]
        log.info(f"starting {nproc} processes")
        code = _wait(arguments, _environment(folder, nproc))
        return _outcome(folder, nproc, code)


def _environment(reports: Path, nproc: int) -> dict[str, str]:
    variables = child.environment()
    variables[child.REPORTS] = str(reports)
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    variables.setdefault("OMP_NUM_THREADS", str(threads))
    variables.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
    return variables


def _wait(arguments: list[str], variables: dict[str, str]) -> int:
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # All but Ctrl-C arrive as SIGTERM: the agent dies of SIGUSR1, and the workers of SIGHUP.
        wish = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        agent.send_signal(wish if len(received) == 1 else signal.SIGKILL)

    agent = subprocess.Popen(arguments, env=variables, start_new_session=True)
    old: dict[signal.Signals, Any] = {}
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            old[number] = signal.signal(number, forward)
    try:
        code = agent.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _outcome(folder: Path, nproc: int, code: int) -> int:
    """Show each different message once; return the workers' own exit code rather than the agent's."""
    messages: dict[str, list[int]] = {}
    codes: dict[int, int] = {}
    for rank in range(nproc):
        error = folder / f"rank-{rank}.error"
        ended = folder / f"rank-{rank}.code"
        if error.is_file():
            messages.setdefault(error.read_text(encoding="utf-8"), []).append(rank)
        if ended.is_file():
            codes[rank] = int(ended.read_text(encoding="utf-8"))
    for text, ranks in messages.items():
        who = "" if len(ranks) == nproc else f"[rank {', '.join(map(str, ranks))}] "
        sys.stderr.write(f"{who}{text}\n")
    failed = [ended for ended in codes.values() if ended]
    if failed:
        return max(failed, key=lambda ended: ended not in (1, 130))
    if len(codes) == nproc:
        return 0
    if messages or not code:
        return code
    silent = _silent(folder, nproc, codes, code)
    how = ", ".join(sorted({_ending(ended) for ended in silent.values()}))
    raise DeviceError(
        f"rank {', '.join(map(str, silent))} of {nproc} ended without a message ({how})",
        "killed from outside, for example for its memory: see `dmesg`, and rank-N.log in the run folder",
    )


def _silent(folder: Path, nproc: int, codes: dict[int, int], code: int) -> dict[int, int]:
    """Return exit codes of the ranks that failed first where the agent could say so, else of all that left nothing."""
    named = folder / child.FAILED
    if named.is_file():
        return {int(rank): ended for rank, ended in json.loads(named.read_text(encoding="utf-8")).items()}
    return {rank: code for rank in range(nproc) if rank not in codes}


def _ending(code: int) -> str:
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, -code)}" if code < 0 else f"exit code {code}"
