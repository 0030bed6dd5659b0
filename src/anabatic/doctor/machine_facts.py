"""Facts about this machine that are no file, queried at once with a time limit each; `import torch` is tried in a
child.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from anabatic.core import json_reader, relaunch
from anabatic.core.errors import AnabaticError
from anabatic.doctor import subprocess_runner
from anabatic.doctor.installed_packages import KNOWN_PACKAGES
from anabatic.doctor.root_files import RootFiles
from anabatic.doctor.subprocess_runner import BackgroundResult
from anabatic.doctor.target_machine import SMI_FOLDERS, TargetMachine
from anabatic.monitor.npu_smi import output_parser
from anabatic.sandbox import sandbox_runner

TIME_BUDGET_SECONDS = 9.0
"""Seconds for a whole run."""
_BUDGET_FRACTION = 0.85
"""Of the budget: by then every fact is there, or it counts as not known."""
_MARGIN_SECONDS = 0.5
"""Seconds before that in which a program is ended, so that we can still say that it hung."""
_MIN_PARALLEL_CORES, _ECC_SECONDS = 4, 2.5
"""With fewer cores the import goes first, as long as that much time is left for ECC."""
_DRIVER_FOLDER = "/usr/local/Ascend/driver"
_GPU_QUERY = "index,name,driver_version,memory.total,temperature.gpu,ecc.errors.uncorrected.volatile.total"
_MAX_CARDS = 64


class LiveFacts:
    """Facts of the machine we run on. What is slow runs in the background from the start."""

    def __init__(self, files: RootFiles, variables: Mapping[str, str], budget: float = TIME_BUDGET_SECONDS) -> None:
        self.deadline = time.monotonic() + budget * _BUDGET_FRACTION
        seconds = max(budget * _BUDGET_FRACTION - _MARGIN_SECONDS, 0.1)
        machine = TargetMachine(files, variables, self)
        self._import_gate = subprocess_runner.StartGate()
        quick = collect_package_versions()
        self._ready: dict[str, Any] = {
            "packages": quick,
            "python": describe_interpreter(),
            "cpu": count_cpus(),
            "limits": read_limits(),
        }
        self._pending: dict[str, BackgroundResult[Any]] = {
            "npu-smi": BackgroundResult(lambda: run_npu_smi(["info"], seconds, variables)),
            "disk": BackgroundResult(lambda: measure_disks(variables)),
            "interfaces": BackgroundResult(list_interface_addresses),
            "denied": BackgroundResult(lambda: find_denied_devices(machine)),
            "sandbox": BackgroundResult(probe_sandbox),
        }
        if machine.npu_node_numbers and not machine.is_simulated:
            self._pending["hccn"] = BackgroundResult(lambda: run_hccn_tool(machine.npu_node_numbers, self.deadline))
        if machine.has_gpu:
            self._pending["nvidia-smi"] = BackgroundResult(lambda: run_nvidia_smi(seconds))
        if "torch" in quick:
            parts = [name for name, has in _DEVICE_PARTS if has(machine, quick)][:1]
            self._pending["import"] = BackgroundResult(
                lambda: run_import_probe(parts, seconds, relaunch.build_child_environment(), self._import_gate.read_fd)
            )
            half = time.monotonic() + seconds / 2
            BackgroundResult(lambda: self._release_import(half))
        if machine.has_npu:
            self._pending["ecc"] = BackgroundResult(lambda: self._query_ecc(variables))

    def _release_import(self, until: float) -> None:
        """Once npu-smi has listed the processes, but not much later when it hangs."""
        self._pending["npu-smi"].wait_result(until)
        self._import_gate.open_gate()

    def _query_ecc(self, variables: Mapping[str, str]) -> dict[str, str]:
        """`-t ecc` of every card that `info` lists, one after the other: npu-smi wants to be alone."""
        if self._ready["cpu"]["allowed"] < _MIN_PARALLEL_CORES and "import" in self._pending:
            self._pending["import"].wait_result(self.deadline - _ECC_SECONDS)
        told = self.get("npu-smi") or {}
        cards = dict.fromkeys(
            device.npu_id for device in output_parser.parse_info_table(str(told.get("text", ""))).devices
        )
        found: dict[str, str] = {}
        for card in cards:
            left = self.deadline - time.monotonic() - _MARGIN_SECONDS
            if left < _MARGIN_SECONDS:
                break
            answer = run_npu_smi(["info", "-t", "ecc", "-i", str(card)], left, variables)
            if answer and answer["code"] == 0:
                found[str(card)] = answer["text"]
        return found

    def get(self, name: str) -> Any:
        """Return a fact; None when it is not known by the deadline."""
        if name in self._ready:
            return self._ready[name]
        return self._pending[name].wait_result(self.deadline) if name in self._pending else None

    def list_fact_names(self) -> list[str]:
        """Every fact that was asked for."""
        return [*self._ready, *self._pending]


_DEVICE_PARTS: tuple[tuple[str, Callable[[TargetMachine, Mapping[str, str]], bool]], ...] = (
    ("npu", lambda machine, packages: "torch-npu" in packages),
    ("cuda", lambda machine, packages: machine.has_gpu),
)


def collect_package_versions() -> dict[str, str]:
    """Name -> version of the installed ones of `KNOWN_PACKAGES`, from their metadata."""
    found = {}
    for name in KNOWN_PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = str(version)
    return found


def describe_interpreter() -> dict[str, str]:
    """Version, path and C library of this interpreter."""
    library, version = platform.libc_ver()
    return {
        "version": platform.python_version(),
        "path": sys.executable,
        "libc": f"{library} {version}".strip(),
        "machine": platform.machine(),
    }


def count_cpus() -> dict[str, int]:
    """Processors of the machine, and those that this process may use."""
    return {"count": os.cpu_count() or 1, "allowed": len(os.sched_getaffinity(0))}


def read_limits() -> dict[str, int]:
    """Resource limits of this process; -1: none."""
    return {"nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}


def measure_disks(variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
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


def list_interface_addresses() -> dict[str, list[str]]:
    """Network interface -> its IP addresses."""
    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.partition("%")[0] for one in addresses if one.family in kinds]
        for name, addresses in psutil.net_if_addrs().items()
    }


def find_denied_devices(machine: TargetMachine) -> list[str]:
    """Device nodes that this user may not open."""
    names = [f"davinci{number}" for number in machine.npu_node_numbers]
    names += [name for name in ("davinci_manager", "devmm_svm", "hisi_hdc") if os.path.exists(f"/dev/{name}")]
    return [f"/dev/{name}" for name in names if not os.access(f"/dev/{name}", os.R_OK | os.W_OK)]


def run_npu_smi(words: list[str], seconds: float, variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the output of `npu-smi`; None if it is not installed."""
    program = subprocess_runner.find_program("npu-smi", SMI_FOLDERS)
    if program is None:
        return None
    folders = [f"{_DRIVER_FOLDER}/lib64", f"{_DRIVER_FOLDER}/lib64/common", f"{_DRIVER_FOLDER}/lib64/driver"]
    path = os.pathsep.join([*filter(None, [variables.get("LD_LIBRARY_PATH")]), *folders])
    output = subprocess_runner.run_program([program, *words], seconds, {**variables, "LD_LIBRARY_PATH": path})
    return {"code": output.code, "text": output.text}


def run_nvidia_smi(seconds: float) -> dict[str, Any] | None:
    """Return the output of `nvidia-smi` for each GPU, as CSV; None if it is not installed."""
    program = subprocess_runner.find_program("nvidia-smi", SMI_FOLDERS)
    if program is None:
        return None
    output = subprocess_runner.run_program(
        [program, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"], seconds
    )
    return {"code": output.code, "text": output.text}


def run_hccn_tool(cards: list[int], deadline: float) -> dict[str, Any] | None:
    """Return the network state from `hccn_tool`: card -> {link, tls}; None if it is not installed."""
    program = subprocess_runner.find_program("hccn_tool", ("/usr/local/Ascend/driver/tools", "/usr/bin"))
    if program is None:
        return None
    found: dict[str, Any] = {}
    for card in cards[:_MAX_CARDS]:
        for what in ("link", "tls"):
            left = deadline - time.monotonic()
            if left < 0.1:
                return found
            output = subprocess_runner.run_program([program, "-i", str(card), f"-{what}", "-g"], min(left, 2.0))
            found.setdefault(str(card), {})[what] = output.text.strip()[:500] if output.code == 0 else ""
    return found


def probe_sandbox() -> dict[str, Any] | None:
    """Return the isolation of programs of a model, by a trial; None if it cannot be determined."""
    try:
        found = sandbox_runner.probe_protections()
    except AnabaticError:
        return None
    return {"way": found.mode, "guards": found.guards, "missing": found.missing_guards, "reasons": found.reasons}


class QuickFacts:
    """Facts that need no other program: enough for `anabatic env`."""

    def get(self, name: str) -> Any:
        """Return a fact; None when it is not among these."""
        return _QUICK_FACTS[name]() if name in _QUICK_FACTS else None


_QUICK_FACTS: dict[str, Callable[[], Any]] = {
    "python": describe_interpreter,
    "cpu": count_cpus,
    "interfaces": list_interface_addresses,
}


def open_local_machine_quickly() -> TargetMachine:
    """Return this machine without asking other programs."""
    return TargetMachine(RootFiles(), dict(os.environ), QuickFacts())


def open_local_machine(budget: float = TIME_BUDGET_SECONDS) -> TargetMachine:
    """Return this machine."""
    files = RootFiles()
    variables = dict(os.environ)
    return TargetMachine(files, variables, LiveFacts(files, variables, budget))


_LINE_MARK = "anabatic-probe:"
_PROBE_SCRIPT = """
import ctypes, glob, importlib.metadata, importlib.util, json, os, sys
def say(**told):
    sys.__stdout__.write("\\n" + sys.argv[1] + json.dumps(told) + "\\n")
    sys.__stdout__.flush()
def trouble(error):
    while error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        error = error.__cause__ or error.__context__
    return type(error).__name__ + ": " + " ".join(str(error).split())[:500]
def load_libraries():
    found = importlib.util.find_spec("torch")
    folder = os.path.dirname(found.origin) if found and found.origin else ""
    files = [folder + "/lib/libtorch_global_deps.so", *sorted(glob.glob(folder + "/_C.*.so"))]
    needs = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing_extensions")
    if len(files) < 2 or not all(map(importlib.util.find_spec, needs)):
        return None
    try:
        for file in files:
            ctypes.CDLL(file, os.RTLD_NOW | os.RTLD_GLOBAL)
        return importlib.metadata.version("torch")
    except (OSError, ImportError):  # a library or the metadata is missing or torn: the import says what is wrong
        return None
stage = "torch"
try:
    if not sys.argv[2:] and (version := load_libraries()):
        say(stage="done", loaded=True, torch=version)
        sys.stdout.flush()
        os._exit(0)
    import torch
    say(stage=stage, torch=torch.__version__, cuda=torch.version.cuda)
    if "npu" in sys.argv[2:]:
        stage = "torch_npu"
        import torch_npu
        say(stage=stage, torch_npu=torch_npu.__version__)
        stage = "device"
        sys.stdin.read()
        count = torch.npu.device_count() if torch.npu.is_available() else 0
        say(stage=stage, npus=count, name=torch.npu.get_device_name(0) if count else "")
    elif "cuda" in sys.argv[2:]:
        stage = "device"
        sys.stdin.read()
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        say(stage=stage, gpus=count, name=torch.cuda.get_device_name(0) if count else "")
    say(stage="done")
except BaseException as error:
    say(stage=stage, error=trouble(error))
sys.stdout.flush()
os._exit(0)
"""


def run_import_probe(
    parts: list[str], seconds: float, variables: Mapping[str, str], gate: int | None = None
) -> dict[str, Any]:
    """Import torch (and `parts`: `npu` or `cuda`) in a child; return what it told, merged.

    Without parts nothing is to be asked of a device: the child resolves every symbol of torch's libraries, a tenth of
    the time of the import, and imports torch only where that fails.
    Without autoload: torch's own import and torch_npu's then fail apart. Before it uses a device the child waits for
    the end of `gate`: it must not be among the processes that npu-smi lists. Keys: `stage` reached, `torch`, `cuda`,
    `loaded` (the libraries alone), `torch_npu`, `npus` or `gpus`, `name`, `error`; `hung` or `signal` when it did not
    come to its end.
    """
    inner = {**variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    output = subprocess_runner.run_program(
        [sys.executable, "-c", _PROBE_SCRIPT, _LINE_MARK, *parts], seconds, inner, gate or subprocess.DEVNULL
    )
    facts = parse_probe_output(output.text)
    if output.code is None:
        facts["hung"] = round(seconds)
    elif output.code < 0:
        facts["signal"] = -output.code
    elif facts.get("stage") != "done" and "error" not in facts:
        facts["error"] = output.text.strip().rpartition("\n")[2][:500] or f"exit code {output.code}"
    return facts


def parse_probe_output(text: str) -> dict[str, Any]:
    """Return what the marked lines of a child's output say, later ones over earlier ones."""
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(_LINE_MARK):
            try:
                row = json_reader.loads(line[len(_LINE_MARK) :])
            except ValueError:  # cut by the end of the process
                continue
            if isinstance(row, dict):
                facts.update(row)
    return facts
