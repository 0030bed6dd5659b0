"""One machine as the checks see it: files, environment, and facts that are no file."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from anabatic.core import json_reader
from anabatic.core.formatting import parse_whole
from anabatic.doctor import installed_packages
from anabatic.doctor.root_files import RootFiles

BUNDLE_FOLDER = "/anabatic-doctor"
"""Folder of a bundle with what is no file of the machine: `environ` and `facts.json`."""
SIMULATION_VARIABLE = "ANABATIC_SIM_SEGMENT"
"""Variable that `anabatic sim` gives its command."""
SMI_FOLDERS = ("/usr/local/bin", "/usr/local/sbin", "/usr/local/Ascend/driver/tools")
"""Locations of npu-smi outside PATH."""
HUAWEI_PCI_VENDOR, NVIDIA_PCI_VENDOR = "0x19e5", "0x10de"
"""PCI vendors."""
_ACCELERATOR_PCI_CLASS, _DISPLAY_PCI_CLASS = "0x12", "0x03"
"""PCI classes: processing accelerators, display controllers."""


class FactSource(Protocol):
    """Facts in addition to files: asked on a live machine, remembered in a recorded one."""

    def get(self, name: str) -> Any:
        """Return a JSON value; None: not known, or no answer in time."""


class RecordedFacts:
    """Facts out of a bundle."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        """Return what was noted."""
        return self._values.get(name)


class RootFacts:
    """Facts of a root that is no bundle: what its files tell, looked for when it is first asked for.

    Args:
        files: of its own, for a bundle holds all that was looked at.
    """

    def __init__(self, files: RootFiles, env: Mapping[str, str]) -> None:
        self._files, self._env = files, env

    @functools.cached_property
    def _collected_facts(self) -> dict[str, Any]:
        return installed_packages.collect_root_facts(self._files, self._env)

    def get(self, name: str) -> Any:
        """Return what was found."""
        return self._collected_facts.get(name)


@dataclass
class TargetMachine:
    """Files, environment and facts. Rooted elsewhere than at `/` nothing is executed."""

    files: RootFiles
    env: Mapping[str, str]
    facts: FactSource
    is_env_known: bool = True
    notes: dict[str, Any] = field(default_factory=dict)
    """Facts that one check finds and others use."""

    def get_fact(self, name: str, kind: type) -> Any:
        """Return a fact of the type `kind`, an empty one when it is not known."""
        value = self.facts.get(name)
        return value if isinstance(value, kind) else kind()

    @property
    def is_simulated(self) -> bool:
        """True if its NPUs are simulated."""
        return bool(self.env.get(SIMULATION_VARIABLE))

    @functools.cached_property
    def is_container(self) -> bool:
        """True if it is a container (docker, podman, containerd, Kubernetes)."""
        marks = (self.files.exists("/.dockerenv"), self.files.exists("/run/.containerenv"))
        is_marked = "container" in self.env or "KUBERNETES_SERVICE_HOST" in self.env
        groups, mounts = (self.files.read_text(path) or "" for path in ("/proc/1/cgroup", "/proc/mounts"))
        layered = re.search(r"^overlay / overlay ", mounts, re.M) is not None
        return any(marks) or is_marked or layered or re.search(r"docker|kubepods|containerd|libpod", groups) is not None

    @functools.cached_property
    def npu_node_numbers(self) -> list[int]:
        """Numbers of /dev/davinciN."""
        names = self.files.list_names("/dev", "davinci[0-9]*")
        return sorted(number for name in names if (number := parse_whole(name[7:], 4)) is not None)

    @functools.cached_property
    def pci_devices(self) -> list[tuple[str, str, str]]:
        """(vendor, class, device) of everything on the PCI bus, as sysfs writes them."""
        folder = "/sys/bus/pci/devices"
        found = []
        for name in self.files.list_names(folder):
            vendor = (self.files.read_text(f"{folder}/{name}/vendor") or "").strip()
            if vendor in (HUAWEI_PCI_VENDOR, NVIDIA_PCI_VENDOR):
                kind, device = (self.files.read_text(f"{folder}/{name}/{one}") or "" for one in ("class", "device"))
                found.append((vendor, kind.strip(), device.strip()))
        return found

    @property
    def num_pci_npus(self) -> int:
        """Ascend chips on the PCI bus."""
        return sum(
            vendor == HUAWEI_PCI_VENDOR and kind.startswith(_ACCELERATOR_PCI_CLASS)
            for vendor, kind, _ in self.pci_devices
        )

    @property
    def num_pci_gpus(self) -> int:
        """NVIDIA chips on the PCI bus."""
        return sum(
            vendor == NVIDIA_PCI_VENDOR and kind.startswith(_DISPLAY_PCI_CLASS) for vendor, kind, _ in self.pci_devices
        )

    @property
    def has_npu(self) -> bool:
        """True if there are Ascend NPUs, real or simulated, usable or not."""
        return bool(self.npu_node_numbers or self.num_pci_npus or self.is_simulated)

    @functools.cached_property
    def npu_smi_path(self) -> str:
        """The path of npu-smi, whether this user may run it or not; empty: there is none."""
        folders = [one for one in self.env.get("PATH", "").split(":") if one.startswith("/")]
        paths = (f"{folder}/npu-smi" for folder in dict.fromkeys([*folders, *SMI_FOLDERS]))
        return next((path for path in paths if self.files.exists(path)), "")

    @functools.cached_property
    def gpu_node_names(self) -> list[str]:
        """Names of /dev/nvidiaN."""
        return self.files.list_names("/dev", "nvidia[0-9]*")

    @property
    def has_gpu(self) -> bool:
        """True if there are NVIDIA GPUs, usable or not."""
        return bool(self.gpu_node_names or self.num_pci_gpus)

    @property
    def package_versions(self) -> dict[str, str]:
        """Name -> version of the Python packages that matter here."""
        return {str(name): str(version) for name, version in self.get_fact("packages", dict).items()}


def parse_environ(text: str) -> dict[str, str]:
    """Return the variables of lines NAME=VALUE; a line without a name is left out."""
    pairs = (line.partition("=") for line in text.split("\n"))
    return {name: value for name, _, value in pairs if re.fullmatch(r"[A-Za-z_]\w*", name)}


def open_root(root: str | os.PathLike[str]) -> TargetMachine:
    """Return the machine whose files are below `root`: a mounted container or an unpacked bundle."""
    files = RootFiles(os.fspath(root))
    stored = files.read_text(f"{BUNDLE_FOLDER}/environ")
    environ = stored if stored is not None else files.read_text("/proc/1/environ")
    try:
        facts = json_reader.loads(files.read_text(f"{BUNDLE_FOLDER}/facts.json") or "{}")
    except ValueError:
        facts = {}
    variables = parse_environ(environ or "")
    if facts and isinstance(facts, dict):
        return TargetMachine(files, variables, RecordedFacts(facts), environ is not None)
    root_files = RootFiles(files.root)
    root_files.truncated_folders = files.truncated_folders
    return TargetMachine(files, variables, RootFacts(root_files, variables), environ is not None)
