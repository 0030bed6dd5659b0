"""Checks of chips, driver, container and GPUs. Each takes a machine and yields lines."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from anabatic.core.formatting import format_spans, parse_whole
from anabatic.device import table
from anabatic.doctor import chip_names
from anabatic.doctor.checks import version_matrix
from anabatic.doctor.findings.catalog import make_result
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.target_machine import HUAWEI_PCI_VENDOR, TargetMachine

_DRIVER_FOLDER = "/usr/local/Ascend/driver"
_COMPANION_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
_CONTAINER_MOUNTS = (
    f"{_DRIVER_FOLDER}/version.info",
    "/usr/local/dcmi",
    "/etc/ascend_install.info",
    "/usr/local/bin/npu-smi",
)
"""Files that the vendor's container pages mount in addition to the libraries."""
HOT_CELSIUS = 85
"""Degrees C from which a GPU or NPU is worth a word; both throttle some ten degrees above."""


def format_docker_flags(machine: TargetMachine) -> str:
    """Return the options of docker that pass the NPUs in."""
    devices = [f"davinci{number}" for number in (machine.npu_node_numbers or range(max(machine.num_pci_npus, 1)))]
    words = [f"--device=/dev/{name}" for name in (*devices, *_COMPANION_NODES)]
    words += [f"-v {path}:{path}:ro" for path in (_DRIVER_FOLDER, *_CONTAINER_MOUNTS[1:])]
    return " ".join(words)


def check_npus(machine: TargetMachine) -> Iterator[CheckResult]:
    """Ascend chips on the PCI bus and in /dev."""
    count, nodes = machine.num_pci_npus, machine.npu_node_numbers
    if machine.is_simulated:
        yield make_result(
            "npu.simulated", count=machine.notes.get("count", "?"), name=machine.notes.get("name") or "NPU"
        )
    elif nodes:
        yield make_result("npu.ok", count=len(nodes), which=f"/dev/davinci{format_spans(nodes)}")
        if count > len(nodes) and not machine.is_container:
            yield make_result("npu.fewer", nodes=len(nodes), count=count)
    elif count and machine.is_container:
        yield make_result("npu.not_passed", count=count, flags=format_docker_flags(machine))
    elif count:
        yield make_result("npu.no_driver", count=count)
    elif present := [
        one for one in (f"{_DRIVER_FOLDER}/version.info", machine.npu_smi_path) if one and machine.files.exists(one)
    ]:
        yield make_result("npu.hidden", there=", ".join(present), flags=format_docker_flags(machine))
    else:
        yield make_result("npu.none")


def check_device_nodes(machine: TargetMachine) -> Iterator[CheckResult]:
    """The device nodes that a chip needs besides its own, and whether this user may open them."""
    if machine.is_simulated:
        yield make_result("nodes.simulated")
        return
    if not machine.npu_node_numbers:
        return
    missing = [name for name in _COMPANION_NODES if not machine.files.exists(f"/dev/{name}")]
    denied = machine.get_fact("denied", list)
    if missing:
        yield make_result(
            "nodes.missing", missing=", ".join(f"/dev/{name}" for name in missing), flags=format_docker_flags(machine)
        )
    elif denied:
        yield make_result("nodes.denied", denied=", ".join(map(str, denied)))
    else:
        yield make_result("nodes.there" if machine.facts.get("denied") is None else "nodes.ok")


def read_driver_version(machine: TargetMachine) -> str:
    """Return the version of the Ascend driver, from its file, else from npu-smi; empty when neither says."""
    info = machine.files.read_text(f"{_DRIVER_FOLDER}/version.info") or ""
    found = re.search(r"^\s*Version\s*=\s*(\S+)", info, re.M)
    version = found[1] if found and version_matrix.parse_version(found[1]) else ""
    note = str(machine.notes.get("driver", ""))
    return version or (note if version_matrix.parse_version(note) else "")


def check_driver(machine: TargetMachine) -> Iterator[CheckResult]:
    """The driver's version file."""
    version, is_installed = read_driver_version(machine), machine.files.exists(f"{_DRIVER_FOLDER}/version.info")
    if not machine.has_npu or (machine.num_pci_npus and not machine.npu_node_numbers and not is_installed):
        return
    if version and (is_installed or machine.is_simulated or not machine.is_container):
        yield make_result("driver.ok" if is_installed else "driver.smi", version=version)
    elif is_installed:
        yield make_result("driver.unreadable")
    elif machine.is_container:
        yield make_result("driver.not_mounted", flags=format_docker_flags(machine))
    else:
        yield make_result("driver.none")


def check_container_mounts(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check what a container needs from its host."""
    if not machine.is_container or not machine.npu_node_numbers or machine.is_simulated:
        return
    if not machine.files.is_dir(f"{_DRIVER_FOLDER}/lib64"):
        yield make_result("mounts.no_libraries", missing=f"{_DRIVER_FOLDER}/lib64", flags=format_docker_flags(machine))
    missing = [path for path in _CONTAINER_MOUNTS[1:] if not machine.files.exists(path)]
    if missing:
        yield make_result("mounts.missing", missing=", ".join(missing), flags=format_docker_flags(machine))
    elif machine.files.is_dir(f"{_DRIVER_FOLDER}/lib64"):
        yield make_result("mounts.ok")


def detect_soc_name(machine: TargetMachine) -> str:
    """Return the SoC name, from torch, else from npu-smi; empty when nobody says."""
    soc_name = str(machine.get_fact("import", dict).get("name") or "")
    return chip_names.normalize_soc_name(soc_name if "Ascend" in soc_name else str(machine.notes.get("name", "")))


def detect_ops_folder(machine: TargetMachine) -> str:
    """Return the folder of the chip's operators, by its name, else by its PCI id; empty when nobody says."""
    ids = [device for vendor, _, device in machine.pci_devices if vendor == HUAWEI_PCI_VENDOR]
    by_bus = next((chip_names.OPS_FOLDERS_BY_PCI_ID[one] for one in ids if one in chip_names.OPS_FOLDERS_BY_PCI_ID), "")
    return chip_names.find_ops_folder(detect_soc_name(machine)) or by_bus


def check_chip(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check the chip, and that it can train."""
    if not machine.has_npu:
        return
    name, folder = detect_soc_name(machine), detect_ops_folder(machine)
    figures = table.find_chip(name)
    if figures is not None:
        dtype = "bf16" if figures.has_bf16 else "fp16"
        yield make_result("chip.ok", name=name, memory=figures.memory_gib, tflops=figures.half_tflops, dtype=dtype)
    elif folder:
        yield make_result("chip.named", name=name or folder)
    else:
        yield make_result("chip.unknown")
    if folder in chip_names.INFERENCE_ONLY:
        yield make_result("inference.only", name=name or folder)
    elif figures is not None and not figures.has_bf16:
        yield make_result("chip.first", name=name)


def check_gpus(machine: TargetMachine) -> Iterator[CheckResult]:
    """NVIDIA GPUs: nodes, driver, memory errors, temperature."""
    count = len(machine.gpu_node_names)
    if not count:
        if machine.num_pci_gpus and (machine.is_container or not machine.has_npu):
            yield make_result("gpu.no_driver", count=machine.num_pci_gpus)
        elif not machine.has_npu:
            yield make_result("gpu.none")
        return
    gpu_facts = machine.get_fact("nvidia-smi", dict)
    if not gpu_facts:
        yield make_result("gpu.no_smi", count=count)
    elif gpu_facts.get("code") is None:
        yield make_result("gpu.hung")
    else:
        yield from _check_gpu_rows(str(gpu_facts.get("text", "")), gpu_facts.get("code") == 0)


def _check_gpu_rows(text: str, good: bool) -> Iterator[CheckResult]:
    rows = [
        [cell.strip() for cell in row] for row in csv.reader(text.replace("\r", "\n").splitlines()) if len(row) == 6
    ]
    if not good or not rows:
        yield make_result("gpu.failed", text=" ".join(text.split())[:200] or "nothing")
        return
    yield make_result("gpu.ok", count=len(rows), name=rows[0][1], version=rows[0][2])
    for index, _, _, _, celsius, errors in rows:
        if parse_whole(errors):
            yield make_result("gpu.ecc", which=f"GPU {index}", errors=errors)
        if (parse_whole(celsius) or 0) >= HOT_CELSIUS:
            yield make_result("gpu.hot", which=f"GPU {index}", celsius=celsius)
