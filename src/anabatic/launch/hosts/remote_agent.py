"""What runs on every machine of `--hosts`: says who it is, starts the launcher there, hands signals on, cleans up.

The text of this file travels through ssh's standard input and is run by `python -c`, so that a machine without our
package, or with another version of it, can say so by itself. Standard library only, in the words of Python 3.8.
Nothing but the path of Python stands in a command line: settings and environment come through standard input, one
JSON value a line: who, job, then numbers of signals. When the input ends, the connection is lost, and the job ends.
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
"""Begins the line that answers; a login shell may print other lines before it."""
SAVE_TIMEOUT_SECONDS = 660.0
"""Seconds for a job to save itself when the connection is lost: more than the agent grants its workers."""
_VERSION_PROBE = (
    "import json, anabatic, importlib.metadata as m\n"
    "def v(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return None\n"
    "print(json.dumps({'version': anabatic.__version__, 'torch': v('torch')}))\n"
)
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer, then run the job that is asked for, to its end."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whoever carries the connection holds signals back
    who = json.loads(sys.stdin.readline())
    os.environ.update(who["environment"])
    answer = _check_machine(who)
    sys.stdout.write(ANSWER_PREFIX + json.dumps(answer) + "\n")
    sys.stdout.flush()
    asked = sys.stdin.readline()
    if asked:
        os._exit(
            _run_launcher(json.loads(asked))
        )  # a thread still reads standard input: Python's own way out would abort


def _check_machine(who: dict[str, Any]) -> dict[str, Any]:
    """What is to be known before anything starts; `problem` names what would keep it from starting."""
    answer = {"problem": "", "detail": "", "python": platform.python_version(), "loopback": False}
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # random(4): one a start of the kernel
        answer["boot"] = file.read().strip()
    try:
        os.chdir(who["folder"])
    except OSError as error:
        return {**answer, "problem": "folder", "detail": error.strerror}
    probe = subprocess.run([sys.executable, "-c", _VERSION_PROBE], stdin=subprocess.DEVNULL, capture_output=True)
    if probe.returncode:
        said = probe.stderr.decode("utf-8", "replace").strip().splitlines()
        return {**answer, "problem": "package", "detail": said[-1] if said else "it ends without a word"}
    answer.update(json.loads(probe.stdout.decode("utf-8").splitlines()[-1]))
    if who["master"]:
        answer.update(_check_rendezvous(who["master"], who["port"], who["first"]))
    return answer


def _check_rendezvous(master: str, port: int, first: bool) -> dict[str, Any]:
    """Whether this machine can find machine 0 and, on machine 0, whether the port is free."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(master, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        return {"problem": "name", "detail": error.strerror}
    if not first:
        return {"loopback": str(place[0]) == "::1" or str(place[0]).startswith("127.")}
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return {"problem": "port", "detail": error.strerror}
    return {}


def _run_launcher(job: dict[str, Any]) -> int:
    """Run the launcher; return its exit code as shells count."""
    folder = tempfile.mkdtemp(prefix="anabatic-")
    try:
        recipe = os.path.join(folder, "job.yaml")
        with open(recipe, "w", encoding="utf-8") as file:
            file.write(job["recipe"])
        words = [sys.executable, "-m", "anabatic", *(recipe if word is None else word for word in job["words"])]
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: _send_signal(child, signal.SIGTERM))
        copies = [threading.Thread(target=_copy_output, args=pair) for pair in ((child.stdout, 1), (child.stderr, 2))]
        for copy in copies:
            copy.start()
        threading.Thread(target=_forward_signals, args=(child,), daemon=True).start()
        code = child.wait()
        for copy in copies:
            copy.join()
        return 128 - code if code < 0 else min(code, 254)  # 255 is what ssh says when it has failed itself
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _send_signal(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _forward_signals(child: subprocess.Popen[bytes]) -> None:
    """Hand signals on; end the job when the connection is lost."""
    for line in sys.stdin:
        _send_signal(child, int(line))
    _send_signal(child, signal.SIGTERM)
    time.sleep(SAVE_TIMEOUT_SECONDS)
    _send_signal(child, signal.SIGKILL)


def _copy_output(source: Any, number: int) -> None:
    """Copy what the job prints; a job that saves itself must not die because nobody reads any more."""
    gone = False
    while True:
        block = os.read(source.fileno(), 65536)
        if not block:
            return
        while block and not gone:
            try:
                block = block[os.write(number, block) :]
            except OSError:
                gone = True


if __name__ == "__main__":
    main()
