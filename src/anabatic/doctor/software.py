"""Checks of Python, torch and torch_npu, and of what belongs together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from anabatic.doctor import cann, hardware, versions
from anabatic.doctor.line import Line, Text
from anabatic.doctor.machine import Machine
from anabatic.doctor.verdicts import say

_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def install(torch: str, wheel: str) -> str:
    """Return the commands that install a pair of torch and torch_npu."""
    return f"pip install torch=={torch} --index-url {_CPU_INDEX} && pip install torch-npu=={wheel}"


def pair_for(machine: Machine) -> str:
    """Return the commands for the pair that suits the CANN here, with the torch here where one exists."""
    found = cann.installed(machine)
    release, torch = found.version if found else "", versions.base(machine.packages.get("torch", ""))
    fitting = versions.wheels(release, torch) if torch and not _old(torch) else []
    any_release = [one for row in versions.RELEASES for one in row.wheels if versions.base(one) == torch]
    chosen = (fitting or versions.supported(release) or any_release or ["2.9.0"])[0]
    return install(versions.base(chosen), chosen)


def _old(torch: str) -> bool:
    return (versions.key(torch) or (9, 0, 0, 0)) < (versions.key(versions.OLDEST) or ())


def python(machine: Machine) -> Iterator[Line]:
    """The interpreter and the C library."""
    told = machine.fact("python", dict)
    version, libc = str(told.get("version", "")), str(told.get("libc", ""))
    found = versions.key(version)
    if found is None:
        yield say("python.unknown")
        return
    wheel = machine.packages.get("torch-npu", "") or (machine.packages.get("torch", "") if machine.has_npu else "")
    line = ".".join(versions.base(wheel).split(".")[:2])
    first, last = versions.PYTHONS.get(line, (0, 99))
    old = re.fullmatch(r"glibc (\d+)\.(\d+).*", libc)
    if not first <= found[1] <= last:
        best = min(last, 11)
        yield say("python.wheel", version=version, wheel=wheel, first=first, last=last, best=best)
    elif old and machine.has_npu and (int(old[1]), int(old[2])) < (2, 28) and (versions.key(line) or (0,)) >= (2, 7):
        yield say("python.libc", libc=libc)
    else:
        yield say("python.ok", version=version, libc=libc or Text("libc unknown", "libc 未知"))


def torch(machine: Machine) -> Iterator[Line]:
    """Which torch, and whether its build fits the devices."""
    version = machine.packages.get("torch", "")
    if not machine.packages:
        yield say("torch.unknown")
    elif not version:
        command = pair_for(machine) if machine.has_npu else f"pip install torch --index-url {_CPU_INDEX}"
        yield say("torch.none", command="pip install torch" if machine.has_gpu else command)
    elif machine.has_npu and _cuda_build(machine, version):
        yield say("torch.cuda_build", version=version, torch=versions.base(version))
    elif machine.has_gpu and not machine.has_npu and "+cpu" in version:
        yield say("torch.cpu_build", version=version)
    else:
        yield _age(version)


def _age(version: str) -> Line:
    if _old(version):
        return say("torch.old", version=version, oldest=versions.OLDEST)
    if versions.base(version) not in versions.TRIED:
        return say("torch.untried", version=version, tried=", ".join(versions.TRIED))
    return say("torch.ok", version=version)


def _cuda_build(machine: Machine, version: str) -> bool:
    return "+cu" in version or bool(machine.fact("import", dict).get("cuda"))


def torch_npu(machine: Machine) -> Iterator[Line]:
    """Which torch_npu, and whether it is for this torch."""
    wheel, torch = machine.packages.get("torch-npu", ""), machine.packages.get("torch", "")
    if not machine.packages:
        yield say("torch_npu.unknown")
        return
    if not wheel:
        yield say("torch_npu.none", command=pair_for(machine)) if machine.has_npu else say("torch_npu.unneeded")
        return
    release = versions.release_of(wheel)
    if not machine.has_npu:
        yield say("torch_npu.stray", version=wheel)
    elif release is None:
        yield say("torch_npu.new", version=wheel)
    else:
        yield say("torch_npu.ok", version=wheel, release=release.name)
    if torch:
        same = versions.base(torch) == versions.base(wheel)
        command = "" if same else pair_for(machine)
        yield say("pair.ok" if same else "pair.broken", torch=torch, wheel=wheel, command=command)


def matrix(machine: Machine) -> Iterator[Line]:
    """torch_npu with CANN, CANN with the driver."""
    found, wheel = cann.installed(machine), machine.packages.get("torch-npu", "")
    if found is None or not found.version or not machine.has_npu:
        return
    release = versions.release_of(wheel)
    if wheel:
        match = versions.torch_npu_with_cann(wheel, found.version)
        wanted = release.cann if release else "?"
        yield say(f"release.{match}", wheel=wheel, cann=found.version, wanted=wanted, command=pair_for(machine))
    if driver := hardware.driver_version(machine):
        match = versions.cann_with_driver(found.version, driver)
        wanted = versions.drivers(found.version) or "?"
        yield say(f"hdk.{match}", cann=found.version, driver=driver, wanted=wanted)


def imports(machine: Machine) -> Iterator[Line]:
    """What a child that imported torch and torch_npu told."""
    told = machine.fact("import", dict)
    if not told:
        if not machine.files.live:
            yield say("import.unknown")
        return
    what = "`import torch`" if not told.get("torch") else "`import torch_npu`"
    if told.get("torch_npu"):
        what = "torch.npu.is_available()"
    if told.get("signal"):
        yield say("import.crash", what=what, signal=told["signal"])
    elif told.get("hung"):
        yield say("import.hung", what=what, seconds=told["hung"])
    elif told.get("error"):
        yield from _failed(machine, told)
    else:
        yield from _imported(machine, told)


def _failed(machine: Machine, told: dict[str, Any]) -> Iterator[Line]:
    error = str(told["error"])
    if not told.get("torch"):
        yield say("import.torch", error=error, command=_again(machine))
        return
    yield say("import.torch_npu", error=error, fix=_remedy(machine, error))
    if told.get("stage") == "torch_npu" and machine.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        yield say("import.autoload")


def _again(machine: Machine) -> str:
    if machine.has_npu:
        return pair_for(machine)
    version = machine.packages.get("torch", "")
    index = f" --index-url {_CPU_INDEX}" if "+cpu" in version else ""
    return f"pip install --force-reinstall torch=={versions.base(version)}{index}"


def _remedy(machine: Machine, error: str) -> str:
    rows = (
        (r"libhccl|libascendcl|libge_|libgraph|ASCEND_\w+ environment", f"source {cann.script(machine)}"),
        (r"libatb", "source /usr/local/Ascend/nnal/atb/set_env.sh"),
        (r"libascend_hal|libdrv", "export LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64:$LD_LIBRARY_PATH"),
        (r"torch_npu\._C", "cd ~  (a folder named torch_npu lies in the current one)"),
        (r"np\.float_|NumPy 2", "pip install 'numpy<2'"),
        (r"static TLS", "export LD_PRELOAD=PATH_OF_THAT_LIBGOMP"),
        (r"Unsupported soc", "install a newer torch_npu: this one does not know the chip"),
    )
    return next((fix for pattern, fix in rows if re.search(pattern, error)), pair_for(machine))


def _imported(machine: Machine, told: dict[str, Any]) -> Iterator[Line]:
    version, name = str(told.get("torch", "?")), str(told.get("name", ""))
    if told.get("torch_npu") and machine.has_npu:
        count = told.get("npus") or 0
        if not count:
            yield say(
                "import.no_device", fix="unset ASCEND_RT_VISIBLE_DEVICES ; npu-smi info ; ls ~/ascend/log/debug/plog"
            )
            return
        yield say("import.npu", torch_npu=told["torch_npu"], count=count, name=name)
        visible = machine.env.get("ASCEND_RT_VISIBLE_DEVICES")
        if machine.nodes and count != len(machine.nodes) and visible is None:
            yield say("import.fewer", count=count, nodes=len(machine.nodes))
    elif machine.has_gpu and told.get("cuda") and "gpus" in told:
        if told["gpus"]:
            yield say("import.gpu", torch=version, count=told["gpus"], name=name)
        else:
            yield say("import.no_gpu", torch=version, cuda=told["cuda"])
    else:
        yield say("import.ok", torch=version)


def triton(machine: Machine) -> Iterator[Line]:
    """The compiler that torch.compile needs on an NPU."""
    packages = machine.packages
    if not machine.has_npu or not packages.get("torch-npu"):
        return
    ascend, plain, torch = (
        packages.get("triton-ascend"),
        packages.get("triton"),
        versions.base(packages.get("torch", "")),
    )
    wanted = versions.TRITON.get(torch)
    if plain and not ascend:
        yield say("triton.plain", version=plain)
    elif ascend and wanted and versions.base(ascend) != wanted:
        yield say("triton.other", version=ascend, torch=torch, wanted=wanted)
    elif ascend:
        yield say("triton.ok", version=ascend)
    else:
        yield say("triton.none")
