"""Checks of chips, driver, container and GPUs. Each takes a machine and yields lines."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from anabatic.core.text import spans
from anabatic.doctor import chips, versions
from anabatic.doctor.line import Line
from anabatic.doctor.machine import HUAWEI, Machine
from anabatic.doctor.verdicts import say

_DRIVER = "/usr/local/Ascend/driver"
_COMPANIONS = ("davinci_manager", "devmm_svm", "hisi_hdc")
_MOUNTS = (f"{_DRIVER}/version.info", "/usr/local/dcmi", "/etc/ascend_install.info", "/usr/local/bin/npu-smi")
"""What the vendor's container pages mount besides the libraries."""
HOT = 85
"""Degrees C from which a GPU or NPU is worth a word; both throttle some ten degrees above."""


def flags(machine: Machine) -> str:
    """Return the options of docker that pass the NPUs in."""
    devices = [f"davinci{number}" for number in (machine.nodes or range(max(machine.npus_on_bus, 1)))]
    words = [f"--device=/dev/{name}" for name in (*devices, *_COMPANIONS)]
    words += [f"-v {path}:{path}:ro" for path in (_DRIVER, *_MOUNTS[1:])]
    return " ".join(words)


def npu(machine: Machine) -> Iterator[Line]:
    """Ascend chips on the PCI bus and in /dev."""
    count, nodes = machine.npus_on_bus, machine.nodes
    if machine.simulated:
        yield say("npu.simulated", count=machine.notes.get("count", "?"), name=machine.notes.get("name") or "NPU")
    elif nodes:
        yield say("npu.ok", count=len(nodes), which=f"/dev/davinci{spans(nodes)}")
        if count > len(nodes) and not machine.container:
            yield say("npu.fewer", nodes=len(nodes), count=count)
    elif count and machine.container:
        yield say("npu.not_passed", count=count, flags=flags(machine))
    elif count:
        yield say("npu.no_driver", count=count)
    elif there := [one for one in (f"{_DRIVER}/version.info", machine.npu_smi) if one and machine.files.exists(one)]:
        yield say("npu.hidden", there=", ".join(there), flags=flags(machine))
    else:
        yield say("npu.none")


def nodes(machine: Machine) -> Iterator[Line]:
    """The device nodes that a chip needs besides its own, and whether this user may open them."""
    if machine.simulated:
        yield say("nodes.simulated")
        return
    if not machine.nodes:
        return
    missing = [name for name in _COMPANIONS if not machine.files.exists(f"/dev/{name}")]
    denied = machine.fact("denied", list)
    if missing:
        yield say("nodes.missing", missing=", ".join(f"/dev/{name}" for name in missing), flags=flags(machine))
    elif denied:
        yield say("nodes.denied", denied=", ".join(map(str, denied)))
    else:
        yield say("nodes.there" if machine.facts.get("denied") is None else "nodes.ok")


def driver_version(machine: Machine) -> str:
    """Return the version of the Ascend driver, from its file, else from npu-smi; empty when neither says."""
    info = machine.files.text(f"{_DRIVER}/version.info") or ""
    found = re.search(r"^\s*Version\s*=\s*(\S+)", info, re.M)
    version = found[1] if found and versions.key(found[1]) else ""
    said = str(machine.notes.get("driver", ""))
    return version or (said if versions.key(said) else "")


def driver(machine: Machine) -> Iterator[Line]:
    """The driver's version file."""
    version, there = driver_version(machine), machine.files.exists(f"{_DRIVER}/version.info")
    if not machine.has_npu or (machine.npus_on_bus and not machine.nodes and not there):
        return
    if version and (there or machine.simulated or not machine.container):
        yield say("driver.ok" if there else "driver.smi", version=version)
    elif there:
        yield say("driver.unreadable")
    elif machine.container:
        yield say("driver.not_mounted", flags=flags(machine))
    else:
        yield say("driver.none")


def mounts(machine: Machine) -> Iterator[Line]:
    """What a container needs of its host."""
    if not machine.container or not machine.nodes or machine.simulated:
        return
    if not machine.files.folder(f"{_DRIVER}/lib64"):
        yield say("mounts.no_libraries", missing=f"{_DRIVER}/lib64", flags=flags(machine))
    missing = [path for path in _MOUNTS[1:] if not machine.files.exists(path)]
    if missing:
        yield say("mounts.missing", missing=", ".join(missing), flags=flags(machine))
    elif machine.files.folder(f"{_DRIVER}/lib64"):
        yield say("mounts.ok")


def soc(machine: Machine) -> str:
    """Return the SoC name, from torch, else from npu-smi; empty when nobody says."""
    told = str(machine.fact("import", dict).get("name") or "")
    return chips.soc(told if "Ascend" in told else str(machine.notes.get("name", "")))


def package(machine: Machine) -> str:
    """Return the folder of the chip's operators, by its name, else by its PCI id; empty when nobody says."""
    ids = [device for vendor, _, device in machine.pci if vendor == HUAWEI]
    by_bus = next((chips.PCI[one] for one in ids if one in chips.PCI), "")
    return chips.package(soc(machine)) or by_bus


def chip(machine: Machine) -> Iterator[Line]:
    """Which chip, and whether one trains on it."""
    if not machine.has_npu:
        return
    name, folder = soc(machine), package(machine)
    figures = chips.figures(name)
    if figures is not None:
        dtype = "bf16" if figures.bf16 else "fp16"
        yield say("chip.ok", name=name, memory=figures.memory_gib, tflops=figures.half_tflops, dtype=dtype)
    elif folder:
        yield say("chip.named", name=name or folder)
    else:
        yield say("chip.unknown")
    if folder in chips.INFERENCE:
        yield say("inference.only", name=name or folder)
    elif figures is not None and not figures.bf16:
        yield say("chip.first", name=name)


def gpu(machine: Machine) -> Iterator[Line]:
    """NVIDIA GPUs: nodes, driver, memory errors, temperature."""
    count = len(machine.gpu_nodes)
    if not count:
        if machine.gpus_on_bus and (machine.container or not machine.has_npu):
            yield say("gpu.no_driver", count=machine.gpus_on_bus)
        elif not machine.has_npu:
            yield say("gpu.none")
        return
    told = machine.fact("nvidia-smi", dict)
    if not told:
        yield say("gpu.no_smi", count=count)
    elif told.get("code") is None:
        yield say("gpu.hung")
    else:
        yield from _gpus(str(told.get("text", "")), told.get("code") == 0)


def _gpus(text: str, good: bool) -> Iterator[Line]:
    rows = [
        [cell.strip() for cell in row] for row in csv.reader(text.replace("\r", "\n").splitlines()) if len(row) == 6
    ]
    if not good or not rows:
        yield say("gpu.failed", text=" ".join(text.split())[:200] or "nothing")
        return
    yield say("gpu.ok", count=len(rows), name=rows[0][1], version=rows[0][2])
    for index, _, _, _, celsius, errors in rows:
        if errors.isdecimal() and int(errors) > 0:
            yield say("gpu.ecc", which=f"GPU {index}", errors=errors)
        if celsius.isdecimal() and int(celsius) >= HOT:
            yield say("gpu.hot", which=f"GPU {index}", celsius=celsius)
