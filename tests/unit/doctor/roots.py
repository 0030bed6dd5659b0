"""Machines made of small descriptions: files, variables, facts; written below a folder, read as any other root."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.doctor.check_runner import run_checks
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.target_machine import TargetMachine, open_root
from anabatic_sim import npu_smi_layout
from anabatic_sim.npu_smi_layout import ChipFamily, SmiProcess, SmiReading

GIB = 2**30
DRIVER = "/usr/local/Ascend/driver"
OLD, NEW = "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann-9.1.0"
TBE = ["attrs", "numpy", "decorator", "sympy", "cffi", "pyyaml", "pathlib2", "psutil", "protobuf", "scipy", "requests",
       "absl-py"]  # fmt: skip


@dataclass
class Description:
    """A machine on paper. A file that is None is a folder."""

    files: dict[str, str | None]
    env: dict[str, str] | None
    facts: dict[str, Any] = field(default_factory=dict)

    def but(
        self,
        files: Mapping[str, str | None] | None = None,
        gone: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        unset: tuple[str, ...] = (),
        facts: Mapping[str, Any] | None = None,
        packages: Mapping[str, str | None] | None = None,
    ) -> Description:
        """Return a changed copy; `gone` names the start of paths, a package that is None is not installed."""
        other = copy.deepcopy(self)
        other.files = (
            {path: text for path, text in other.files.items() if not path.startswith(gone)} if gone else other.files
        )
        other.files.update(files or {})
        if other.env is not None:
            other.env = {name: value for name, value in {**other.env, **(env or {})}.items() if name not in unset}
        other.facts.update(facts or {})
        for name, version in (packages or {}).items():
            other.facts["packages"].pop(name, None)
            if version:
                other.facts["packages"][name] = version
        return other

    def write(self, root: Path) -> Path:
        """Make its files below `root`."""
        own = {"/anabatic-doctor/facts.json": json.dumps(self.facts)}
        if self.env is not None:
            own["/anabatic-doctor/environ"] = "".join(f"{name}={value}\n" for name, value in self.env.items())
        for path, text in {**self.files, **own}.items():
            place = root / path.lstrip("/")
            if text is None:
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return root

    def machine(self, root: Path) -> TargetMachine:
        """Write it and look at it."""
        return open_root(self.write(root))


def lines(description: Description, root: Path) -> list[CheckResult]:
    """Return the report of a description."""
    return run_checks(description.machine(root))


def ids(found: list[CheckResult], *states: str) -> set[str]:
    """Return the verdicts of a report, of some states only when asked."""
    return {line.finding_type.id for line in found if not states or line.status in states}


def smi(
    count: int,
    name: str = "910B3",
    version: str = "25.3.rc1",
    family: ChipFamily = "A2",
    health: Mapping[int, str] | None = None,
    celsius: Mapping[int, int] | None = None,
    users: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return what `npu-smi info` says of `count` devices, as a fact."""
    readings = []
    for index in range(count):
        npu, chip = divmod(index, 2) if family == "A3" else (index, 0)
        owner = (users or {}).get(index)
        readings.append(
            SmiReading(
                npu=npu,
                chip=chip,
                logic_id=index,
                name=name,
                health=(health or {}).get(index, "OK"),
                watt=95.0,
                celsius=(celsius or {}).get(index, 40),
                bus=f"0000:C{index:X}:00.0",
                aicore=0,
                used_mib=3300,
                total_mib=65536,
                processes=(SmiProcess(4000 + index, owner, 20000),) if owner else (),
            )
        )
    return {"code": 0, "text": npu_smi_layout.format_info(readings, version, family)}


def host(memory_gib: int) -> dict[str, str | None]:
    """Return the files that every Linux has."""
    header = "  sl  local_address rem_address   st tx_queue rx_queue\n"
    total = memory_gib * 2**20
    return {
        "/proc/meminfo": f"MemTotal:       {total} kB\nMemAvailable:   {total * 9 // 10} kB\n",
        "/proc/cpuinfo": "processor\t: 0\nmodel name\t: Kunpeng-920\n",
        "/proc/net/tcp": header + "   0: 0100007F:0016 00000000:0000 0A 00000000:00000000\n",
        "/proc/net/route": "Iface\tDestination\tGateway\neth0\t00000000\t0100A8C0\n",
        "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
        "/proc/sys/net/ipv4/ip_local_reserved_ports": "60000-60031\n",
    }


def facts(cores: int, packages: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts that every machine has."""
    space = {"free": 900 * GIB, "total": 1000 * GIB, "writable": True}
    return {
        "packages": dict(packages),
        "python": {"version": "3.10.14", "path": "/usr/bin/python3", "libc": "glibc 2.35", "machine": "aarch64"},
        "cpu": {"count": cores, "allowed": cores},
        "limits": {"nofile": 65536},
        "denied": [],
        "sandbox": {"guards": {"network": "network namespace", "calls": "seccomp"}, "missing": [], "reasons": {}},
        "disk": {
            "work": {"path": "/data", **space},
            "home": {"path": "/users/a", **space},
            "shm": {"path": "/dev/shm", "free": 60 * GIB, "total": 64 * GIB},
        },
        "interfaces": {"lo": ["127.0.0.1"], "eth0": ["192.168.0.7"], "docker0": ["172.17.0.1"]},
    }


def pci(vendor: str, kind: str, device: str, count: int) -> dict[str, str | None]:
    """Return the PCI bus with `count` chips."""
    files: dict[str, str | None] = {}
    for index in range(count):
        folder = f"/sys/bus/pci/devices/0000:c{index:x}:00.0"
        files |= {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n", f"{folder}/device": f"{device}\n"}
    return files


def cann(root: str, version: str, kernel: str, arch: str = "aarch64") -> dict[str, str | None]:
    """Return a whole CANN with the operators of one chip."""
    files: dict[str, str | None] = {
        f"{root}/{arch}-linux/ascend_toolkit_install.info": f"package_name=Ascend-cann-toolkit\nversion={version}\n",
        f"{root}/lib64": None,
        f"{root}/python/site-packages": None,
        f"{root}/bin": None,
        f"{root}/opp/built-in/op_impl/ai_core/tbe/kernel/{kernel}": None,
        "/usr/local/Ascend/ascend-toolkit/set_env.sh": "# sets the variables\n",
    }
    for part in ("runtime", "compiler", "opp", "hccl"):
        files[f"{root}/{part}/version.info"] = f"Version=7.7.0.1.238\nversion_dir={version}\n"
    return files


def sourced(root: str) -> dict[str, str]:
    """Return what set_env.sh sets."""
    return {
        "ASCEND_HOME_PATH": root,
        "ASCEND_TOOLKIT_HOME": root,
        "ASCEND_OPP_PATH": f"{root}/opp",
        "LD_LIBRARY_PATH": f"{root}/lib64:{DRIVER}/lib64",
        "PYTHONPATH": f"{root}/python/site-packages:{root}/opp/built-in/op_impl/ai_core/tbe",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
    }


def nodes(count: int) -> dict[str, str | None]:
    """Return the device nodes of `count` devices."""
    names = [*(f"davinci{index}" for index in range(count)), "davinci_manager", "devmm_svm", "hisi_hdc"]
    return {f"/dev/{name}": "" for name in names}


def a2() -> Description:
    """Eight 910B3, CANN 8.3 in the old layout, everything right."""
    files = {
        **host(1500),
        **nodes(8),
        **pci("0x19e5", "0x120000", "0xd802", 8),
        **cann(OLD, "8.3.RC1", "ascend910b"),
        f"{DRIVER}/version.info": "Version=25.3.RC1\nascendhal_version=7.35.23\n",
        f"{DRIVER}/lib64": None,
        "/usr/local/Ascend/ascend-toolkit/8.3.RC1": None,
        "/etc/hccn.conf": "".join(f"address_{i}=10.20.0.{i + 2}\nnetmask_{i}=255.255.255.0\n" for i in range(8)),
    }
    known = facts(192, {"torch": "2.7.1+cpu", "torch-npu": "2.7.1", **dict.fromkeys(TBE, "1.26.4")})
    known["npu-smi"] = smi(8)
    known["ecc"] = {
        str(card): f"\tNPU ID : {card}\n\tHBM Double Bit Error Count : 0\n\tChip ID : 0\n" for card in range(8)
    }
    known["import"] = {"stage": "done", "torch": "2.7.1+cpu", "torch_npu": "2.7.1", "npus": 8, "name": "Ascend910B3"}
    known["hccn"] = {
        str(card): {"link": "link status: UP", "tls": f"dev_id:{card}, tls switch[0](0:disable, 1:enable)"}
        for card in range(8)
    }
    return Description(files, sourced(OLD), known)


def a3() -> Description:
    """A container on a 910C server (16 dies), CANN 9.1 in the new layout, everything right."""
    files = {
        **host(2000),
        **nodes(16),
        **cann(NEW, "9.1.0", "ascend910_93"),
        "/.dockerenv": "",
        f"{DRIVER}/version.info": "Version=26.1.0\n",
        f"{DRIVER}/lib64": None,
        "/usr/local/dcmi": None,
        "/etc/ascend_install.info": "Driver_Install_Path_Param=/usr/local/Ascend\n",
        "/usr/local/bin/npu-smi": "",
        "/etc/hccn.conf": "address_0=10.20.0.2\n",
    }
    known = facts(320, {"torch": "2.12.0+cpu", "torch-npu": "2.12.0", **dict.fromkeys(TBE, "1.26.4")})
    known["npu-smi"] = smi(16, "Ascend910", "26.1.0", "A3")
    known["import"] = {"stage": "done", "torch": "2.12.0", "torch_npu": "2.12.0", "npus": 16, "name": "Ascend910_9391"}
    return Description(files, sourced(NEW), known)


def gpu() -> Description:
    """Two H100."""
    files = {**host(500), "/dev/nvidia0": "", "/dev/nvidia1": "", **pci("0x10de", "0x030200", "0x2330", 2)}
    known = facts(64, {"torch": "2.13.0+cu130", "numpy": "2.2.0"})
    rows = "".join(f"{index}, NVIDIA H100 80GB HBM3, 580.65, 81559, 45, 0\n" for index in range(2))
    known["nvidia-smi"] = {"code": 0, "text": rows}
    name = "NVIDIA H100 80GB HBM3"
    known["import"] = {"stage": "done", "torch": "2.13.0+cu130", "cuda": "13.0", "gpus": 2, "name": name}
    return Description(files, {"PATH": "/usr/bin"}, known)


def cpu() -> Description:
    """A laptop."""
    known = facts(8, {"torch": "2.13.0+cpu"})
    known["import"] = {"stage": "done", "torch": "2.13.0+cpu"}
    return Description(dict(host(32)), {"PATH": "/usr/bin", "OMP_NUM_THREADS": "4"}, known)


def empty() -> Description:
    """A folder in which nothing is."""
    return Description({}, None, {})
