"""The agent on every machine of `--hosts`: describes the machine, starts the launcher, forwards signals, cleans up.

The source of this file is sent through ssh's standard input and run by `python -c`, so that a machine without the
package, or with another version of it, can report that. Standard library only, in the syntax of Python 3.8.
The command line holds only the path of Python: settings and environment come through standard input, one JSON value
per line: the request, the job, then signal numbers. When the input ends, the connection is lost, and the job ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

ANSWER_PREFIX = "anabatic-here "
"""Prefix of the answer line; a login shell may print other lines before it."""
SAVE_TIMEOUT_SECONDS = 660.0
"""Seconds a job gets to save when the connection is lost: more than the agent grants its workers."""
_VERSION_PROBE = (
    "import json, anabatic, importlib.metadata as m\n"
    "def v(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return None\n"
    "print(json.dumps({'version': anabatic.__version__, 'torch': v('torch')}))\n"
)
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer the request, then run the requested job to its end."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the process that holds the connection may block signals
    request = json.loads(sys.stdin.readline())
    os.environ.update(request["environment"])
    answer = _check_machine(request)
    sys.stdout.write(ANSWER_PREFIX + json.dumps(answer) + "\n")
    sys.stdout.flush()
    job_line = sys.stdin.readline()
    if job_line:
        os._exit(
            _run_launcher(json.loads(job_line))
        )  # a thread still reads standard input: Python's own way out would abort


def _check_machine(request: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about this machine; `problem` names what would keep the job from starting."""
    answer = {"problem": "", "detail": "", "python": platform.python_version(), "loopback": False}
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # random(4): one per boot of the kernel
        answer["boot"] = file.read().strip()
    try:
        os.chdir(request["folder"])
    except OSError as error:
        return {**answer, "problem": "folder", "detail": error.strerror}
    probe = subprocess.run([sys.executable, "-c", _VERSION_PROBE], stdin=subprocess.DEVNULL, capture_output=True)
    if probe.returncode:
        stderr_lines = probe.stderr.decode("utf-8", "replace").strip().splitlines()
        return {
            **answer,
            "problem": "package",
            "detail": stderr_lines[-1] if stderr_lines else "it ends without a word",
        }
    answer.update(json.loads(probe.stdout.decode("utf-8").splitlines()[-1]))
    if request["master"]:
        answer.update(_check_rendezvous(request["master"], request["port"], request["first"]))
    return answer


def _check_rendezvous(master: str, port: int, first: bool) -> dict[str, Any]:
    """Check that this machine can resolve machine 0 and, on machine 0, that the port is free."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        return {"problem": "name", "detail": error.strerror}
    if not first:
        return {"loopback": str(address[0]) == "::1" or str(address[0]).startswith("127.")}
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return {"problem": "port", "detail": error.strerror}
    return {}


def _run_launcher(job: dict[str, Any]) -> int:
    """Run the launcher; return its exit code in the convention of shells."""
    folder = tempfile.mkdtemp(prefix="anabatic-")
    try:
        recipe = os.path.join(folder, "job.yaml")
        with open(recipe, "w", encoding="utf-8") as file:
            file.write(job["recipe"])
        command = [
            sys.executable,
            "-m",
            "anabatic",
            *(recipe if argument is None else argument for argument in job["words"]),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(signum, lambda signum, frame: _send_signal(process, signal.SIGTERM))
        threads = [
            threading.Thread(target=_copy_output, args=pair) for pair in ((process.stdout, 1), (process.stderr, 2))
        ]
        for thread in threads:
            thread.start()
        threading.Thread(target=_forward_signals, args=(process,), daemon=True).start()
        code = _wait_for_exit(process)
        for thread in threads:
            thread.join()
        return 128 - code if code < 0 else min(code, 254)  # 255 is the code of ssh's own failure
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Wait in steps, like `anabatic.core.process_info.wait_for_exit`: a handler may run late otherwise."""
    while True:
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            continue


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _send_signal(process: subprocess.Popen[bytes], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signum)


def _forward_signals(process: subprocess.Popen[bytes]) -> None:
    """Forward signals; end the job when the connection is lost."""
    for line in sys.stdin:
        _send_signal(process, int(line))
    _send_signal(process, signal.SIGTERM)
    time.sleep(SAVE_TIMEOUT_SECONDS)
    _send_signal(process, signal.SIGKILL)


def _copy_output(source: Any, target_fd: int) -> None:
    """Copy the job's output; a job that saves must not die because the reader is gone."""
    closed = False
    while True:
        block = os.read(source.fileno(), 65536)
        if not block:
            return
        while block and not closed:
            try:
                block = block[os.write(target_fd, block) :]
            except OSError:
                closed = True


if __name__ == "__main__":
    main()
