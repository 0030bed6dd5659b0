"""One machine as the checks see it: files, environment, and facts that are no file."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from anabatic.core import json_text
from anabatic.doctor import installed
from anabatic.doctor.files import Files

OWN = "/anabatic-doctor"
"""Folder of a bundle with what is no file of the machine: `environ` and `facts.json`."""
SIMULATION = "ANABATIC_SIM_SEGMENT"
"""Variable that `anabatic sim` gives its command."""
SMI_FOLDERS = ("/usr/local/bin", "/usr/local/sbin", "/usr/local/Ascend/driver/tools")
"""Where npu-smi lies when PATH does not name its folder."""
HUAWEI, NVIDIA = "0x19e5", "0x10de"
"""PCI vendors."""
_ACCELERATOR, _DISPLAY = "0x12", "0x03"
"""PCI classes: processing accelerators, display controllers."""


class Facts(Protocol):
    """What is known besides files; the live one asks, a recorded one remembers."""

    def get(self, name: str) -> Any:
        """Return a JSON value; None: not known, or no answer in time."""


class Recorded:
    """Facts out of a bundle."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        """Return what was noted."""
        return self._values.get(name)


class Seen:
    """Facts of a root that is no bundle: what its files tell, looked for when it is first asked for.

    Args:
        files: of its own, for a bundle holds all that was looked at.
    """

    def __init__(self, files: Files, env: Mapping[str, str]) -> None:
        self._files, self._env = files, env

    @functools.cached_property
    def _values(self) -> dict[str, Any]:
        return installed.facts(self._files, self._env)

    def get(self, name: str) -> Any:
        """Return what was found."""
        return self._values.get(name)


@dataclass
class Machine:
    """Files, environment and facts. Rooted elsewhere than at `/` nothing is executed."""

    files: Files
    env: Mapping[str, str]
    facts: Facts
    env_known: bool = True
    notes: dict[str, Any] = field(default_factory=dict)
    """What one check found out and others use."""

    def fact(self, name: str, kind: type) -> Any:
        """Return a fact of the type `kind`, an empty one when it is not known."""
        value = self.facts.get(name)
        return value if isinstance(value, kind) else kind()

    @property
    def simulated(self) -> bool:
        """Whether its NPUs are simulated."""
        return bool(self.env.get(SIMULATION))

    @functools.cached_property
    def container(self) -> bool:
        """Whether it is a container (docker, podman, containerd, Kubernetes)."""
        marks = (self.files.exists("/.dockerenv"), self.files.exists("/run/.containerenv"))
        told = "container" in self.env or "KUBERNETES_SERVICE_HOST" in self.env
        groups, mounts = (self.files.text(path) or "" for path in ("/proc/1/cgroup", "/proc/mounts"))
        layered = re.search(r"^overlay / overlay ", mounts, re.M) is not None
        return any(marks) or told or layered or re.search(r"docker|kubepods|containerd|libpod", groups) is not None

    @functools.cached_property
    def nodes(self) -> list[int]:
        """Numbers of /dev/davinciN."""
        names = self.files.names("/dev", "davinci[0-9]*")
        return sorted(int(name[7:]) for name in names if name[7:].isdecimal() and len(name) < 12)

    @functools.cached_property
    def pci(self) -> list[tuple[str, str, str]]:
        """(vendor, class, device) of everything on the PCI bus, as sysfs writes them."""
        folder = "/sys/bus/pci/devices"
        found = []
        for name in self.files.names(folder):
            vendor = (self.files.text(f"{folder}/{name}/vendor") or "").strip()
            if vendor in (HUAWEI, NVIDIA):
                kind, device = (self.files.text(f"{folder}/{name}/{one}") or "" for one in ("class", "device"))
                found.append((vendor, kind.strip(), device.strip()))
        return found

    @property
    def npus_on_bus(self) -> int:
        """Ascend chips on the PCI bus."""
        return sum(vendor == HUAWEI and kind.startswith(_ACCELERATOR) for vendor, kind, _ in self.pci)

    @property
    def gpus_on_bus(self) -> int:
        """NVIDIA chips on the PCI bus."""
        return sum(vendor == NVIDIA and kind.startswith(_DISPLAY) for vendor, kind, _ in self.pci)

    @property
    def has_npu(self) -> bool:
        """Whether there are Ascend NPUs, real or simulated, usable or not."""
        return bool(self.nodes or self.npus_on_bus or self.simulated)

    @functools.cached_property
    def npu_smi(self) -> str:
        """The path of npu-smi, whether this user may run it or not; empty: there is none."""
        folders = [one for one in self.env.get("PATH", "").split(":") if one.startswith("/")]
        paths = (f"{folder}/npu-smi" for folder in dict.fromkeys([*folders, *SMI_FOLDERS]))
        return next((path for path in paths if self.files.exists(path)), "")

    @functools.cached_property
    def gpu_nodes(self) -> list[str]:
        """Names of /dev/nvidiaN."""
        return self.files.names("/dev", "nvidia[0-9]*")

    @property
    def has_gpu(self) -> bool:
        """Whether there are NVIDIA GPUs, usable or not."""
        return bool(self.gpu_nodes or self.gpus_on_bus)

    @property
    def packages(self) -> dict[str, str]:
        """Name -> version of the Python packages that matter here."""
        return {str(name): str(version) for name, version in self.fact("packages", dict).items()}


def parse_environ(text: str) -> dict[str, str]:
    """Return the variables of lines NAME=VALUE; a line without a name is left out."""
    pairs = (line.partition("=") for line in text.split("\n"))
    return {name: value for name, _, value in pairs if re.fullmatch(r"[A-Za-z_]\w*", name)}


def rooted(root: str | os.PathLike[str]) -> Machine:
    """Return the machine whose files lie below `root`: a mounted container or an unpacked bundle."""
    files = Files(os.fspath(root))
    stored = files.text(f"{OWN}/environ")
    environ = stored if stored is not None else files.text("/proc/1/environ")
    try:
        facts = json_text.loads(files.text(f"{OWN}/facts.json") or "{}")
    except ValueError:
        facts = {}
    variables = parse_environ(environ or "")
    if facts and isinstance(facts, dict):
        return Machine(files, variables, Recorded(facts), environ is not None)
    own = Files(files.root)
    own.cut = files.cut
    return Machine(files, variables, Seen(own, variables), environ is not None)
