"""The actor that runs the launcher in one bundle of a Ray cluster, and ends it when nobody asks for it any more.

Ray hides other jobs' devices (it sets ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES in a bundle: docs.ray.io,
"Accelerator Support"); the launcher supervises the processes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from anabatic.core import relaunch

LEASE_SECONDS = 20.0
"""A launcher that no driver has polled for so long is asked to save and exit."""
END_SECONDS = 30.0
"""A launcher that no driver has polled for so long is killed."""
_DEVICE_VARIABLES = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_LAUNCHER_SCRIPT = """
import os, sys
from anabatic.core import relaunch
relaunch.tie_to_parent()
os.execv(sys.executable, [sys.executable, "-m", "anabatic", *sys.argv[1:]])
"""
"""Runs the launcher so that it ends with the actor: Ray ends actors whose driver was killed."""


class RayNode:
    """Actor that runs the launcher in one bundle."""

    def __init__(self) -> None:
        self._launcher: subprocess.Popen[bytes] | None = None
        self._temp_folder = tempfile.TemporaryDirectory(prefix="anabatic-")
        self._polled = time.monotonic()

    def find_endpoint(self) -> tuple[str, int]:
        """Return the machine's address in Ray, and a free port on it."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(probe.getsockname()[1])

    def start(self, launch: list[str], command: list[str], recipe: str, env: dict[str, str]) -> dict[str, str]:
        """Start `anabatic launch` with the recipe in a temporary file.

        Returns:
            `log`: the file that Ray keeps of its output; `devices`: what Ray lets it see, as a variable.
        """
        path = Path(self._temp_folder.name) / "job.yaml"
        path.write_text(recipe, encoding="utf-8")
        variables = {**relaunch.build_child_environment(), **env}
        if "OMP_NUM_THREADS" not in env:
            variables.pop("OMP_NUM_THREADS", None)  # Ray's value is for one task; the launcher divides the cores
        argv = [sys.executable, "-c", _LAUNCHER_SCRIPT, "launch", *launch, "--", *command, "-c", str(path)]
        self._polled = time.monotonic()
        self._launcher = subprocess.Popen(argv, env=variables)
        threading.Thread(target=self._end_without_driver, name="lease", daemon=True).start()
        devices = [f"{name}={variables[name]}" for name in _DEVICE_VARIABLES if variables.get(name)]
        return {"log": os.readlink("/proc/self/fd/1"), "devices": ", ".join(devices)}

    def poll(self) -> int | None:
        """Return the launcher's exit code; None while it runs."""
        self._polled = time.monotonic()
        return None if self._launcher is None else self._launcher.poll()

    def stop(self) -> None:
        """Ask the launcher's processes to save and exit."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.terminate()

    def _end_without_driver(self) -> None:
        launcher, is_told = self._launcher, False
        assert launcher is not None
        while launcher.poll() is None:
            silence = time.monotonic() - self._polled
            if silence > END_SECONDS:
                launcher.kill()
            elif silence > LEASE_SECONDS and not is_told:
                is_told = True
                launcher.terminate()
            time.sleep(0.5)
