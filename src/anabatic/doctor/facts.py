"""Facts about this machine that are no file: asked all at once, each with a time limit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from anabatic.core import child
from anabatic.core.errors import AnabaticError
from anabatic.doctor import commands, probe
from anabatic.doctor.commands import Later
from anabatic.doctor.files import Files
from anabatic.doctor.installed import PACKAGES
from anabatic.doctor.machine import SMI_FOLDERS, Machine
from anabatic.monitor import npu_smi
from anabatic.sandbox import box

BUDGET = 9.0
"""Seconds for a whole run."""
_SHARE = 0.85
"""Of the budget: by then every fact is there, or it counts as not known."""
_MARGIN = 0.5
"""Seconds before that in which a program is ended, so that we can still say that it hung."""
_CORES_FOR_TWO, _ECC_SECONDS = 4, 2.5
"""With fewer cores the import goes first, as long as that much time is left for ECC."""
_DRIVER = "/usr/local/Ascend/driver"
_GPU_QUERY = "index,name,driver_version,memory.total,temperature.gpu,ecc.errors.uncorrected.volatile.total"
_MOST_CARDS = 64


class Live:
    """Facts of the machine we run on. What is slow runs in the background from the start."""

    def __init__(self, files: Files, variables: Mapping[str, str], budget: float = BUDGET) -> None:
        self.deadline = time.monotonic() + budget * _SHARE
        seconds = max(budget * _SHARE - _MARGIN, 0.1)
        machine = Machine(files, variables, self)
        self._gate = commands.Gate()
        quick = packages()
        self._known: dict[str, Any] = {"packages": quick, "python": python(), "cpu": cpu(), "limits": limits()}
        self._later: dict[str, Later[Any]] = {
            "npu-smi": Later(lambda: smi(["info"], seconds, variables)),
            "disk": Later(lambda: disks(variables)),
            "interfaces": Later(interfaces),
            "denied": Later(lambda: denied(machine)),
            "sandbox": Later(sandbox),
        }
        if machine.nodes and not machine.simulated:
            self._later["hccn"] = Later(lambda: hccn(machine.nodes, self.deadline))
        if machine.has_gpu:
            self._later["nvidia-smi"] = Later(lambda: nvidia(seconds))
        if "torch" in quick:
            parts = [name for name, has in _PARTS if has(machine, quick)][:1]
            self._later["import"] = Later(lambda: probe.run(parts, seconds, child.environment(), self._gate.reader))
            half = time.monotonic() + seconds / 2
            Later(lambda: self._let_import_go_on(half))
        if machine.has_npu:
            self._later["ecc"] = Later(lambda: self._ecc(variables))

    def _let_import_go_on(self, until: float) -> None:
        """Once npu-smi has listed the processes, but not much later when it hangs."""
        self._later["npu-smi"].get(until)
        self._gate.open()

    def _ecc(self, variables: Mapping[str, str]) -> dict[str, str]:
        """`-t ecc` of every card that `info` lists, one after the other: npu-smi wants to be alone."""
        if self._known["cpu"]["allowed"] < _CORES_FOR_TWO and "import" in self._later:
            self._later["import"].get(self.deadline - _ECC_SECONDS)
        told = self.get("npu-smi") or {}
        cards = dict.fromkeys(device.npu_id for device in npu_smi.info(str(told.get("text", ""))).devices)
        found: dict[str, str] = {}
        for card in cards:
            left = self.deadline - time.monotonic() - _MARGIN
            if left < _MARGIN:
                break
            answer = smi(["info", "-t", "ecc", "-i", str(card)], left, variables)
            if answer and answer["code"] == 0:
                found[str(card)] = answer["text"]
        return found

    def get(self, name: str) -> Any:
        """Return a fact; None when it is not known by the deadline."""
        if name in self._known:
            return self._known[name]
        return self._later[name].get(self.deadline) if name in self._later else None

    def names(self) -> list[str]:
        """Every fact that was asked for."""
        return [*self._known, *self._later]


_PARTS: tuple[tuple[str, Callable[[Machine, Mapping[str, str]], bool]], ...] = (
    ("npu", lambda machine, packages: "torch-npu" in packages),
    ("cuda", lambda machine, packages: machine.has_gpu),
)


def packages() -> dict[str, str]:
    """Name -> version of the installed ones of `PACKAGES`, from their metadata."""
    found = {}
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = str(version)
    return found


def python() -> dict[str, str]:
    """Version, path and C library of this interpreter."""
    library, version = platform.libc_ver()
    return {
        "version": platform.python_version(),
        "path": sys.executable,
        "libc": f"{library} {version}".strip(),
        "machine": platform.machine(),
    }


def cpu() -> dict[str, int]:
    """Processors of the machine, and those that this process may use."""
    return {"count": os.cpu_count() or 1, "allowed": len(os.sched_getaffinity(0))}


def limits() -> dict[str, int]:
    """Resource limits of this process; -1: none."""
    return {"nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}


def disks(variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Label -> path, free and total bytes."""
    places = {
        "work": ".",
        "tmp": variables.get("TMPDIR") or "/tmp",
        "home": variables.get("HOME") or "/",
        "shm": "/dev/shm",
    }
    found = {}
    for label, path in places.items():
        try:
            space = os.statvfs(path)
        except OSError:
            continue
        total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        found[label] = {
            "path": os.path.realpath(path),
            "free": free,
            "total": total,
            "writable": os.access(path, os.W_OK),
        }
    return found


def interfaces() -> dict[str, list[str]]:
    """Network interface -> its IP addresses."""
    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.partition("%")[0] for one in addresses if one.family in kinds]
        for name, addresses in psutil.net_if_addrs().items()
    }


def denied(machine: Machine) -> list[str]:
    """Device nodes that this user may not open."""
    names = [f"davinci{number}" for number in machine.nodes]
    names += [name for name in ("davinci_manager", "devmm_svm", "hisi_hdc") if os.path.exists(f"/dev/{name}")]
    return [f"/dev/{name}" for name in names if not os.access(f"/dev/{name}", os.R_OK | os.W_OK)]


def smi(words: list[str], seconds: float, variables: Mapping[str, str]) -> dict[str, Any] | None:
    """What `npu-smi` prints; None: there is no such program."""
    program = commands.find("npu-smi", SMI_FOLDERS)
    if program is None:
        return None
    folders = [f"{_DRIVER}/lib64", f"{_DRIVER}/lib64/common", f"{_DRIVER}/lib64/driver"]
    path = os.pathsep.join([*filter(None, [variables.get("LD_LIBRARY_PATH")]), *folders])
    output = commands.run([program, *words], seconds, {**variables, "LD_LIBRARY_PATH": path})
    return {"code": output.code, "text": output.text}


def nvidia(seconds: float) -> dict[str, Any] | None:
    """What `nvidia-smi` says of each GPU, as CSV; None: there is no such program."""
    program = commands.find("nvidia-smi", SMI_FOLDERS)
    if program is None:
        return None
    output = commands.run([program, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"], seconds)
    return {"code": output.code, "text": output.text}


def hccn(cards: list[int], deadline: float) -> dict[str, Any] | None:
    """What `hccn_tool` says of each card's network: card -> {link, tls}; None: there is no such program."""
    program = commands.find("hccn_tool", ("/usr/local/Ascend/driver/tools", "/usr/bin"))
    if program is None:
        return None
    found: dict[str, Any] = {}
    for card in cards[:_MOST_CARDS]:
        for what in ("link", "tls"):
            left = deadline - time.monotonic()
            if left < 0.1:
                return found
            output = commands.run([program, "-i", str(card), f"-{what}", "-g"], min(left, 2.0))
            found.setdefault(str(card), {})[what] = output.text.strip()[:500] if output.code == 0 else ""
    return found


def sandbox() -> dict[str, Any] | None:
    """What keeps programs of a model in, tried; None: it cannot be found out."""
    try:
        found = box.protections()
    except AnabaticError:
        return None
    return {"way": found.way, "guards": found.guards, "missing": found.missing, "reasons": found.reasons}


class Quick:
    """Facts that need no other program: enough for `anabatic env`."""

    def get(self, name: str) -> Any:
        """Return a fact; None when it is not among these."""
        return _QUICK[name]() if name in _QUICK else None


_QUICK: dict[str, Callable[[], Any]] = {"python": python, "cpu": cpu, "interfaces": interfaces}


def quick() -> Machine:
    """Return this machine without asking other programs."""
    return Machine(Files(), dict(os.environ), Quick())


def live(budget: float = BUDGET) -> Machine:
    """Return this machine."""
    files = Files()
    variables = dict(os.environ)
    return Machine(files, variables, Live(files, variables, budget))
