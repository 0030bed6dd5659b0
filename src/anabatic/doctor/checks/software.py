"""Checks of Python, torch and torch_npu, and of what belongs together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from anabatic.core.language import LocalizedText
from anabatic.doctor.checks import cann, hardware, version_matrix
from anabatic.doctor.findings.catalog import make_result
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.target_machine import TargetMachine

_TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def format_install_command(torch: str, wheel: str) -> str:
    """Return the commands that install a pair of torch and torch_npu."""
    return f"pip install torch=={torch} --index-url {_TORCH_CPU_INDEX} && pip install torch-npu=={wheel}"


def suggest_install_command(machine: TargetMachine) -> str:
    """Return the commands for the pair that suits the CANN here, with the torch here where one exists."""
    found = cann.find_active_cann(machine)
    release, torch = (
        found.version if found else "",
        version_matrix.get_base_version(machine.package_versions.get("torch", "")),
    )
    fitting = version_matrix.list_wheels(release, torch) if torch and not _is_too_old(torch) else []
    any_release = [
        one
        for row in version_matrix.TORCH_NPU_RELEASES
        for one in row.wheels
        if version_matrix.get_base_version(one) == torch
    ]
    chosen = (fitting or version_matrix.list_supported_wheels(release) or any_release or ["2.9.0"])[0]
    return format_install_command(version_matrix.get_base_version(chosen), chosen)


def _is_too_old(torch: str) -> bool:
    return (version_matrix.parse_version(torch) or (9, 0, 0, 0)) < (
        version_matrix.parse_version(version_matrix.OLDEST_TORCH) or ()
    )


def check_python(machine: TargetMachine) -> Iterator[CheckResult]:
    """The interpreter and the C library."""
    python_facts = machine.get_fact("python", dict)
    version, libc = str(python_facts.get("version", "")), str(python_facts.get("libc", ""))
    found = version_matrix.parse_version(version)
    if found is None:
        yield make_result("python.unknown")
        return
    wheel = machine.package_versions.get("torch-npu", "") or (
        machine.package_versions.get("torch", "") if machine.has_npu else ""
    )
    line = ".".join(version_matrix.get_base_version(wheel).split(".")[:2])
    first, last = version_matrix.PYTHON_RANGES.get(line, (0, 99))
    old = re.fullmatch(r"glibc (\d+)\.(\d+).*", libc)
    if not first <= found[1] <= last:
        best = min(last, 11)
        yield make_result("python.wheel", version=version, wheel=wheel, first=first, last=last, best=best)
    elif (
        old
        and machine.has_npu
        and (int(old[1]), int(old[2])) < (2, 28)
        and (version_matrix.parse_version(line) or (0,)) >= (2, 7)
    ):
        yield make_result("python.libc", libc=libc)
    else:
        yield make_result("python.ok", version=version, libc=libc or LocalizedText("libc unknown", "libc 未知"))
    if {"anabatic", "anabatic-sim"} <= machine.package_versions.keys():
        yield make_result("python.two_simulators")


def check_torch(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check the version of torch, and that its build fits the devices."""
    version = machine.package_versions.get("torch", "")
    if not machine.package_versions:
        yield make_result("torch.unknown")
    elif not version:
        command = (
            suggest_install_command(machine) if machine.has_npu else f"pip install torch --index-url {_TORCH_CPU_INDEX}"
        )
        yield make_result("torch.none", command="pip install torch" if machine.has_gpu else command)
    elif machine.has_npu and _is_cuda_build(machine, version):
        yield make_result("torch.cuda_build", version=version, torch=version_matrix.get_base_version(version))
    elif machine.has_gpu and not machine.has_npu and "+cpu" in version:
        yield make_result("torch.cpu_build", version=version)
    else:
        yield _check_torch_age(version)


def _check_torch_age(version: str) -> CheckResult:
    if _is_too_old(version):
        return make_result("torch.old", version=version, oldest=version_matrix.OLDEST_TORCH)
    if version_matrix.get_base_version(version) not in version_matrix.TESTED_TORCH:
        return make_result("torch.untried", version=version, tried=", ".join(version_matrix.TESTED_TORCH))
    return make_result("torch.ok", version=version)


def _is_cuda_build(machine: TargetMachine, version: str) -> bool:
    return "+cu" in version or bool(machine.get_fact("import", dict).get("cuda"))


def check_torch_npu(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check the version of torch_npu, and that it is for this torch."""
    wheel, torch = machine.package_versions.get("torch-npu", ""), machine.package_versions.get("torch", "")
    if not machine.package_versions:
        yield make_result("torch_npu.unknown")
        return
    if not wheel:
        yield (
            make_result("torch_npu.none", command=suggest_install_command(machine))
            if machine.has_npu
            else make_result("torch_npu.unneeded")
        )
        return
    release = version_matrix.find_release(wheel)
    if not machine.has_npu:
        yield make_result("torch_npu.stray", version=wheel)
    elif release is None:
        yield make_result("torch_npu.new", version=wheel)
    else:
        yield make_result("torch_npu.ok", version=wheel, release=release.name)
    if torch:
        same = version_matrix.get_base_version(torch) == version_matrix.get_base_version(wheel)
        command = "" if same else suggest_install_command(machine)
        yield make_result("pair.ok" if same else "pair.broken", torch=torch, wheel=wheel, command=command)


def check_version_matrix(machine: TargetMachine) -> Iterator[CheckResult]:
    """torch_npu with CANN, CANN with the driver."""
    found, wheel = cann.find_active_cann(machine), machine.package_versions.get("torch-npu", "")
    if found is None or not found.version or not machine.has_npu:
        return
    release = version_matrix.find_release(wheel)
    if wheel:
        match = version_matrix.match_torch_npu_with_cann(wheel, found.version)
        required_cann = release.cann if release else "?"
        yield make_result(
            f"release.{match}",
            wheel=wheel,
            cann=found.version,
            wanted=required_cann,
            command=suggest_install_command(machine),
        )
    if driver := hardware.read_driver_version(machine):
        match = version_matrix.match_cann_with_driver(found.version, driver)
        required_cann = version_matrix.format_drivers(found.version) or "?"
        yield make_result(f"hdk.{match}", cann=found.version, driver=driver, wanted=required_cann)


def check_imports(machine: TargetMachine) -> Iterator[CheckResult]:
    """Report of a child process that imported torch and torch_npu."""
    import_facts = machine.get_fact("import", dict)
    if not import_facts:
        if not machine.files.is_live:
            yield make_result("import.unknown")
        return
    what = "`import torch`" if not import_facts.get("torch") else "`import torch_npu`"
    if import_facts.get("torch_npu"):
        what = "torch.npu.is_available()"
    if import_facts.get("signal"):
        yield make_result("import.crash", what=what, signal=import_facts["signal"])
    elif import_facts.get("hung"):
        yield make_result("import.hung", what=what, seconds=import_facts["hung"])
    elif import_facts.get("error"):
        yield from _explain_import_failure(machine, import_facts)
    else:
        yield from _check_import_result(machine, import_facts)


def _explain_import_failure(machine: TargetMachine, import_facts: dict[str, Any]) -> Iterator[CheckResult]:
    error = str(import_facts["error"])
    if not import_facts.get("torch"):
        yield make_result("import.torch", error=error, command=_suggest_reinstall(machine))
        return
    yield make_result("import.torch_npu", error=error, fix=_suggest_import_fix(machine, error))
    if import_facts.get("stage") == "torch_npu" and machine.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        yield make_result("import.autoload")


def _suggest_reinstall(machine: TargetMachine) -> str:
    if machine.has_npu:
        return suggest_install_command(machine)
    version = machine.package_versions.get("torch", "")
    index = f" --index-url {_TORCH_CPU_INDEX}" if "+cpu" in version else ""
    return f"pip install --force-reinstall torch=={version_matrix.get_base_version(version)}{index}"


def _suggest_import_fix(machine: TargetMachine, error: str) -> str:
    rows = (
        (r"libhccl|libascendcl|libge_|libgraph|ASCEND_\w+ environment", f"source {cann.find_set_env_script(machine)}"),
        (r"libatb", "source /usr/local/Ascend/nnal/atb/set_env.sh"),
        (r"libascend_hal|libdrv", "export LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64:$LD_LIBRARY_PATH"),
        (r"torch_npu\._C", "cd ~  (a folder named torch_npu lies in the current one)"),
        (r"np\.float_|NumPy 2", "pip install 'numpy<2'"),
        (r"static TLS", "export LD_PRELOAD=PATH_OF_THAT_LIBGOMP"),
        (r"Unsupported soc", "install a newer torch_npu: this one does not know the chip"),
    )
    return next((fix for pattern, fix in rows if re.search(pattern, error)), suggest_install_command(machine))


def _check_import_result(machine: TargetMachine, import_facts: dict[str, Any]) -> Iterator[CheckResult]:
    version, name = str(import_facts.get("torch", "?")), str(import_facts.get("name", ""))
    if import_facts.get("torch_npu") and machine.has_npu:
        count = import_facts.get("npus") or 0
        if not count:
            yield make_result(
                "import.no_device", fix="unset ASCEND_RT_VISIBLE_DEVICES ; npu-smi info ; ls ~/ascend/log/debug/plog"
            )
            return
        yield make_result("import.npu", torch_npu=import_facts["torch_npu"], count=count, name=name)
        visible = machine.env.get("ASCEND_RT_VISIBLE_DEVICES")
        if machine.npu_node_numbers and count != len(machine.npu_node_numbers) and visible is None:
            yield make_result("import.fewer", count=count, nodes=len(machine.npu_node_numbers))
    elif machine.has_gpu and import_facts.get("cuda") and "gpus" in import_facts:
        if import_facts["gpus"]:
            yield make_result("import.gpu", torch=version, count=import_facts["gpus"], name=name)
        else:
            yield make_result("import.no_gpu", torch=version, cuda=import_facts["cuda"])
    else:
        yield make_result("import.loads" if import_facts.get("loaded") else "import.ok", torch=version)


def check_triton(machine: TargetMachine) -> Iterator[CheckResult]:
    """The compiler that torch.compile needs on an NPU."""
    packages = machine.package_versions
    if not machine.has_npu or not packages.get("torch-npu"):
        return
    ascend, plain, torch = (
        packages.get("triton-ascend"),
        packages.get("triton"),
        version_matrix.get_base_version(packages.get("torch", "")),
    )
    required = version_matrix.TRITON_ASCEND_VERSIONS.get(torch)
    if plain and not ascend:
        yield make_result("triton.plain", version=plain)
    elif ascend and required and version_matrix.get_base_version(ascend) != required:
        yield make_result("triton.other", version=ascend, torch=torch, wanted=required)
    elif ascend:
        yield make_result("triton.ok", version=ascend)
    else:
        yield make_result("triton.none")
