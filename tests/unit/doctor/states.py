"""Machines that are wrong in one way each, and the verdicts that must come of it: all of them, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unit.doctor import roots
from unit.doctor.roots import DRIVER, GIB, NEW, OLD, Description


class State(NamedTuple):
    """A base machine, what is changed, and the WARN and FAIL verdicts that it must get."""

    base: Callable[[], Description]
    change: dict[str, Any]
    verdicts: set[str]


def told(text: str, code: int | None = 1) -> dict[str, Any]:
    """npu-smi that refuses."""
    return {"facts": {"npu-smi": {"code": code, "text": text}}}


def imported(**changed: Any) -> dict[str, Any]:
    """The child that imported torch told something else."""
    return {"facts": {"import": changed}}


def space(**labels: tuple[int, int]) -> dict[str, Any]:
    """Disks: label -> (free, total)."""
    rows = {
        label: {"path": f"/{label}", "free": free, "total": total, "writable": label != "home" or free > 0}
        for label, (free, total) in labels.items()
    }
    return {"facts": {"disk": rows}}


A2, A3, GPU, CPU = roots.a2, roots.a3, roots.gpu, roots.cpu
SITE = "/usr/local/python3.11.14/lib/python3.11/site-packages"
KERNEL = "/opp/built-in/op_impl/ai_core/tbe/kernel/"
NO_NODES = ("/dev/davinci", "/dev/devmm_svm", "/dev/hisi_hdc")
CANN_82 = {**roots.cann(OLD, "8.2.RC1", "ascend910b"), f"{DRIVER}/version.info": "Version=25.2.0\n"}
ECC = "\tNPU ID : {1}\n\tHBM Single Bit Error Count : 9\n\tHBM Double Bit Error Count : {0}\n\tChip ID : 0\n"
NO_SMI = {"npu-smi": None, "hccn": None}
BUSY = {0: "python", 1: "python"}

STATES: dict[str, State] = {
    # chips, driver, container
    "healthy": State(A2, {}, set()),
    "healthy container": State(A3, {}, set()),
    "healthy gpu": State(GPU, {}, set()),
    "healthy cpu": State(CPU, {}, set()),
    "nothing known": State(roots.empty, {}, set()),
    "a mounted container without notes": State(
        lambda: Description(A3().files, None), {"files": {f"{SITE}/torch-2.12.0+cpu.dist-info/METADATA": "",
                                                          f"{SITE}/torch_npu-2.11.0.dist-info/METADATA": ""}},
        {"pair.broken", "tbe.missing"}),
    "software of an npu, no npu": State(CPU, {"files": {f"{DRIVER}/version.info": "Version=25.2.0\n"}}, {"npu.hidden"}),
    "driver not loaded": State(A2, {"gone": NO_NODES, "facts": NO_SMI}, {"npu.no_driver", "npu-smi.missing"}),
    "container without devices": State(
        A2, {"gone": (*NO_NODES, DRIVER), "files": {"/.dockerenv": ""}, "facts": NO_SMI},
        {"npu.not_passed", "npu-smi.missing"}),
    "a chip fell off": State(A2, {"gone": ("/dev/davinci7",), "facts": {"npu-smi": roots.smi(7), "import": {
        "torch": "2.7.1", "torch_npu": "2.7.1", "npus": 7, "name": "Ascend910B3"}}}, {"npu.fewer"}),
    "no manager node": State(A3, {"gone": ("/dev/davinci_manager", "/dev/hisi_hdc")}, {"nodes.missing"}),
    "not in the group": State(A2, {"facts": {"denied": ["/dev/davinci0"]}}, {"nodes.denied"}),
    "no driver file": State(A2, {"gone": (f"{DRIVER}/version.info",), "facts": {"npu-smi": None}},
                            {"driver.none", "npu-smi.missing"}),
    "driver told by npu-smi": State(A2, {"gone": (f"{DRIVER}/version.info",)}, set()),
    "driver file not mounted": State(A3, {"gone": (f"{DRIVER}/version.info",)}, {"driver.not_mounted"}),
    "driver file empty": State(A2, {"files": {f"{DRIVER}/version.info": "\n"}, "facts": {"npu-smi": None}},
                               {"driver.unreadable", "npu-smi.missing"}),
    "libraries not mounted": State(A3, {"gone": (f"{DRIVER}/lib64",)}, {"mounts.no_libraries"}),
    "dcmi not mounted": State(A3, {"gone": ("/usr/local/dcmi",)}, {"mounts.missing"}),
    # npu-smi
    "npu-smi hangs": State(A2, told("", None), {"npu-smi.hung"}),
    "chips of another container": State(A2, told(
        "dcmi model initialized failed, because the device is used. ret is -8020"), {"npu-smi.occupied"}),
    "dcmi fails": State(A2, told("dcmi module initialize failed. ret is -8005"), {"npu-smi.no_driver"}),
    "npu-smi without library": State(
        A2, told("npu-smi: error while loading shared libraries: libc_sec.so: cannot open shared object file", 127),
        {"npu-smi.no_library"}),
    "npu-smi prints garbage": State(A2, told("\x00\x1b[31m|||| 7 = = =\n"), {"npu-smi.odd"}),
    "npu-smi lists fewer": State(A2, {"facts": {"npu-smi": roots.smi(6)}}, {"npu-smi.fewer"}),
    "a chip warns": State(A2, {"facts": {"npu-smi": roots.smi(8, health={2: "Warning", 3: "Warning"})}},
                          {"health.warning"}),
    "a chip in alarm": State(A2, {"facts": {"npu-smi": roots.smi(8, health={3: "Alarm"})}}, {"health.bad"}),
    "memory errors": State(A2, {"facts": {"ecc": {
        "0": ECC.format(0, 0), "1": ECC.format(2, 1), "2": "This device does not support querying ecc."}}},
        {"ecc.bad"}),
    "ecc of another card": State(A2, {"facts": {"ecc": {"3": ECC.format(2, 0)}}}, {"ecc.other"}),
    "a hot chip": State(A2, {"facts": {"npu-smi": roots.smi(8, celsius={5: 97})}}, {"temperature.hot"}),
    "others use some": State(A2, {"facts": {"npu-smi": roots.smi(8, users=BUSY)}}, {"busy.used"}),
    "others use all": State(A2, {"facts": {"npu-smi": roots.smi(8, users=dict.fromkeys(range(8), "vllm"))}},
                            {"busy.all"}),
    "an inference card": State(
        A2, {"gone": (OLD + KERNEL,), "files": {OLD + KERNEL + "ascend310p": None}, "facts": {
            "npu-smi": roots.smi(8, "310P3", family="310P"), "import": {
                "torch": "2.7.1", "torch_npu": "2.7.1", "npus": 8, "name": "Ascend310P3"}}}, {"inference.only"}),
    "the first generation": State(
        A2, {"gone": (OLD + KERNEL,), "files": {OLD + KERNEL + "ascend910": None}, "facts": {
            "npu-smi": roots.smi(8, "910A"), "import": {
                "torch": "2.7.1", "torch_npu": "2.7.1", "npus": 8, "name": "Ascend910A"}}}, {"chip.first"}),
    # NVIDIA
    "gpu without driver": State(GPU, {"gone": ("/dev/nvidia",), **imported(torch="2.13.0+cu130", cuda="13.0")},
                                {"gpu.no_driver"}),
    "gpu without nvidia-smi": State(GPU, {"facts": {"nvidia-smi": None}}, {"gpu.no_smi"}),
    "nvidia-smi hangs": State(GPU, {"facts": {"nvidia-smi": {"code": None, "text": ""}}}, {"gpu.hung"}),
    "nvidia-smi fails": State(GPU, {"facts": {"nvidia-smi": {"code": 18, "text": "Driver/library version mismatch"}}},
                              {"gpu.failed"}),
    "gpu with memory errors and heat": State(
        GPU, {"facts": {"nvidia-smi": {"code": 0, "text": "0, NVIDIA H100, 580.65, 81559, 91, 4\n"}}},
        {"gpu.ecc", "gpu.hot"}),
    "cpu build beside a gpu": State(GPU, {"packages": {"torch": "2.13.0+cpu"}, **imported(torch="2.13.0+cpu")},
                                    {"torch.cpu_build"}),
    "gpu not seen": State(GPU, imported(torch="2.13.0+cu130", cuda="13.0", gpus=0), {"import.no_gpu"}),
    # CANN
    "no cann": State(A2, {"gone": ("/usr/local/Ascend/ascend-toolkit",), "unset": tuple(roots.sourced(OLD))},
                     {"cann.none"}),
    "cann moved away": State(A2, {"env": {"ASCEND_HOME_PATH": "/opt/cann"}}, {"cann.gone"}),
    "cann without a version": State(
        A2, {"files": {f"{OLD}/aarch64-linux/ascend_toolkit_install.info": "?", **{
            f"{OLD}/{part}/version.info": "Version=7.7\n" for part in ("runtime", "compiler", "opp", "hccl")}}},
        {"cann.no_version"}),
    "two cann installed": State(A2, {"files": roots.cann("/usr/local/Ascend/cann-9.0.0", "9.0.0", "ascend910b")},
                                {"cann.other"}),
    "not sourced": State(A2, {"unset": tuple(roots.sourced(OLD))}, {"set_env.not_sourced"}),
    "half sourced": State(A2, {"unset": ("ASCEND_OPP_PATH",)}, {"set_env.partial"}),
    "library path lost": State(A2, {"env": {"LD_LIBRARY_PATH": f"{DRIVER}/lib64"}}, {"set_env.library_path"}),
    "python path lost": State(A2, {"unset": ("PYTHONPATH",)}, {"set_env.python_path"}),
    "two cann on the path": State(
        A3, {"env": {"LD_LIBRARY_PATH": f"/usr/local/Ascend/cann-8.5.0/lib64:{NEW}/lib64:{DRIVER}/lib64"}},
        {"set_env.two"}),
    "a blank in the path": State(A2, {"env": {"LD_LIBRARY_PATH": f"{OLD}/lib64:/usr/local/Ascend/ driver/lib64"}},
                                 {"set_env.blank"}),
    "runtime only": State(A2, {"gone": (f"{OLD}/compiler",)}, {"toolkit.incomplete"}),
    "parts of two versions": State(A2, {"files": {f"{OLD}/opp/version.info": "version_dir=8.2.RC1\n"}},
                                   {"toolkit.mixed"}),
    "operators of another chip": State(A3, {"gone": (NEW + KERNEL,), "files": {NEW + KERNEL + "ascend910b": None}},
                                       {"kernels.missing"}),
    "no operators": State(A2, {"gone": (OLD + KERNEL,)}, {"kernels.missing"}),
    "compiler without attrs": State(A2, {"packages": {"attrs": None}}, {"tbe.missing"}),
    "numpy 2 with an old cann": State(
        A2, {"files": CANN_82, "packages": {"numpy": "2.1.0"}},
        {"tbe.numpy", "release.compatible"}),
    # Python, torch, torch_npu
    "python too new": State(A2, {"facts": {"python": {"version": "3.14.0", "libc": "glibc 2.39"}}}, {"python.wheel"}),
    "two distributions with the same files": State(
        A2, {"packages": {"anabatic": "0.1.0", "anabatic-sim": "0.1.0"}}, {"python.two_simulators"}),
    "libc too old": State(A2, {"facts": {"python": {"version": "3.10.2", "libc": "glibc 2.17"}}}, {"python.libc"}),
    "no torch": State(A2, {"packages": {"torch": None, "torch-npu": None}, "facts": {"import": None}},
                      {"torch.none", "torch_npu.none"}),
    "no torch on a gpu": State(GPU, {"packages": {"torch": None}, "facts": {"import": None}}, {"torch.none"}),
    "cuda build on an npu": State(A2, {"packages": {"torch": "2.7.1+cu126"}}, {"torch.cuda_build"}),
    "an old torch": State(
        A2, {"files": CANN_82, "packages": {"torch": "2.5.1+cpu", "torch-npu": "2.5.1.post1"}}, {"torch.old"}),
    "no torch_npu": State(A2, {"packages": {"torch-npu": None}, **imported(torch="2.7.1+cpu")}, {"torch_npu.none"}),
    "torch_npu of tomorrow": State(A3, {"packages": {"torch": "2.19.0+cpu", "torch-npu": "2.19.0"}},
                                   {"torch_npu.new", "release.unknown"}),
    "torch_npu without npu": State(CPU, {"packages": {"torch-npu": "2.13.0"}}, {"torch_npu.stray"}),
    "torch of another minor": State(A2, {"packages": {"torch": "2.8.0+cpu"}}, {"pair.broken"}),
    "compatible cann": State(A3, {"packages": {"torch": "2.14.0+cpu", "torch-npu": "2.14.0"}}, {"release.compatible"}),
    "torch_npu too new for cann": State(A2, {"packages": {"torch": "2.13.0+cpu", "torch-npu": "2.13.0"}},
                                        {"release.broken"}),
    "driver too old": State(A3, {"files": {f"{DRIVER}/version.info": "Version=24.1.RC3\n"}}, {"hdk.broken"}),
    "driver refused": State(A3, {"files": {f"{DRIVER}/version.info": "Version=25.0.RC1\n"}}, {"hdk.broken"}),
    "driver compatible": State(A3, {"files": {f"{DRIVER}/version.info": "Version=25.5.1\n"}}, set()),
    "driver of tomorrow": State(A3, {"files": {f"{DRIVER}/version.info": "Version=29.1.0\n"}}, {"hdk.unknown"}),
    "torch does not import": State(A2, imported(stage="torch", error="ImportError: libgomp.so.1"), {"import.torch"}),
    "torch_npu does not import": State(
        A2, imported(stage="torch_npu", torch="2.7.1", error="ImportError: libhccl.so: cannot open shared object file"),
        {"import.torch_npu", "import.autoload"}),
    "the same without autoload": State(
        A2, {"env": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
             **imported(stage="torch_npu", torch="2.7.1", error="undefined symbol: _ZN3c10")}, {"import.torch_npu"}),
    "import crashes": State(A2, imported(torch="2.7.1", signal=11), {"import.crash"}),
    "import hangs": State(A2, imported(torch="2.7.1", torch_npu="2.7.1", hung=8), {"import.hung"}),
    "silently on the cpu": State(A2, imported(torch="2.7.1", torch_npu="2.7.1", npus=0), {"import.no_device"}),
    "torch sees fewer": State(A2, imported(torch="2.7.1", torch_npu="2.7.1", npus=5, name="Ascend910B3"),
                              {"import.fewer"}),
    "cuda's triton": State(A2, {"packages": {"triton": "3.3.0"}}, {"triton.plain"}),
    "another triton-ascend": State(A2, {"packages": {"triton-ascend": "3.6.0"}}, {"triton.other"}),
    "the right triton-ascend": State(A2, {"packages": {"triton-ascend": "3.2.2", "triton": "3.2.0"}}, set()),
    # host
    "memory nearly used up": State(A2, {"files": {
        "/proc/meminfo": "MemTotal: 1572864000 kB\nMemAvailable: 1000000 kB\n"}}, {"memory.low"}),
    "container with little memory": State(A3, {"files": {"/sys/fs/cgroup/memory.max": f"{64 * GIB}\n"}},
                                          {"memory.limited"}),
    "little memory for eight": State(A2, {"files": {
        "/proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\n"}}, {"memory.small"}),
    "disk low": State(CPU, space(work=(5 * GIB, 900 * GIB)), {"disk.low"}),
    "disk full": State(CPU, space(work=(1000, 900 * GIB)), {"disk.full"}),
    "home read-only": State(
        A2, {"facts": {"disk": {"home": {"path": "/users/a", "free": 90 * GIB, "total": GIB * 99, "writable": False}}}},
        {"disk.readonly"}),
    "docker's shared memory": State(A3, space(work=(90 * GIB, 99 * GIB), shm=(2**26, 2**26)), {"shm.small"}),
    "programs are not shut in": State(A3, {"facts": {"sandbox": {
        "guards": {}, "missing": ["files"], "reasons": {"namespaces": "Operation not permitted"}}}}, set()),
    "shared memory left over": State(A3, space(work=(90 * GIB, 99 * GIB), shm=(0, 64 * GIB)), {"shm.full"}),
    "bound to a few cores": State(A2, {"facts": {"cpu": {"count": 192, "allowed": 24}}}, {"cpu.bound"}),
    "fewer cores than chips": State(A2, {"facts": {"cpu": {"count": 4, "allowed": 4}}}, {"cpu.few"}),
    "too many threads": State(A2, {"env": {"OMP_NUM_THREADS": "192"}}, {"threads.many"}),
    "threads in words": State(A2, {"env": {"OMP_NUM_THREADS": "all"}}, {"threads.wrong"}),
    "few open files": State(CPU, {"facts": {"limits": {"nofile": 1024}}}, {"files.few"}),
    "port taken": State(A2, {"files": {
        "/proc/net/tcp": "sl\n 0: 00000000:733C 00000000:0000 0A\n 1: 00000000:EA61 00000000:0000 0A\n"}},
        {"ports.used"}),
    "no such interface": State(A2, {"env": {"HCCL_SOCKET_IFNAME": "bond0"}}, {"network.interface"}),
    "another machine's address": State(A2, {"env": {"HCCL_IF_IP": "192.168.0.8"}}, {"network.address"}),
    "no network": State(A3, {"facts": {"interfaces": {"lo": ["127.0.0.1"]}}}, {"network.none"}),
    "one address twice": State(A2, {"files": {"/etc/hccn.conf": "address_0=10.0.0.2\naddress_1=10.0.0.2\n"}},
                               {"hccn.duplicate"}),
    "a port down": State(A2, {"facts": {"hccn": {
        "0": {"link": "link status: UP"}, "1": {"link": "link status: DOWN"}}}}, {"link.down"}),
    "tls differs": State(A2, {"facts": {"hccn": {
        "0": {"link": "link status: UP", "tls": "dev_id:0, tls switch[0]"},
        "1": {"link": "link status: UP", "tls": "dev_id:1, tls switch[1]"}}}}, {"link.tls"}),
    # lines that are no fault, so that every verdict is seen once
    "reserved ports unknown": State(A2, {"gone": ("/proc/sys",), "files": {
        "/proc/sys/net/ipv4/ip_local_port_range": "1024 65535"}}, {"ports.ephemeral"}),
    "no hccn.conf in a container": State(A3, {"gone": ("/etc/hccn.conf",)}, set()),
    "no hccn.conf": State(A2, {"gone": ("/etc/hccn.conf",)}, set()),
    "a chip nobody knows": State(A3, {"facts": {"npu-smi": None, "import": None}}, set()),
    "a 950": State(A3, {"gone": (NEW + KERNEL,), "files": {NEW + KERNEL + "ascend910_95": None}, "facts": {
        "npu-smi": roots.smi(16, "Ascend950PR", "26.1.0", "A3"), "import": {
            "torch": "2.12.0", "torch_npu": "2.12.0", "npus": 16, "name": "Ascend950PR_9599"}}}, set()),
    "a chip without figures": State(A3, {"gone": (NEW + KERNEL,), "files": {
        NEW + KERNEL + "ascend950": None}, "facts": {
        "npu-smi": roots.smi(16, "Ascend950DT", "26.1.0", "A3"), "import": {
            "torch": "2.12.0", "torch_npu": "2.12.0", "npus": 16, "name": "Ascend950DT_0000"}}}, set()),
    "a pod": State(A3, {"gone": ("/.dockerenv", "/usr/local/dcmi"), "files": {
        "/proc/mounts": "overlay / overlay rw,lowerdir=x 0 0\n"}}, {"mounts.missing"}),
    "health not told": State(A2, {"facts": {"npu-smi": roots.smi(8, health=dict.fromkeys(range(8), "NA"))}}, set()),
    "simulated": State(CPU, {"files": roots.cann("/opt/sim", "9.2.0", "x"), "env": {
        "ASCEND_HOME_PATH": "/opt/sim", "ANABATIC_SIM_SEGMENT": "sim-1", "TASK_QUEUE_ENABLE": "0"}, "facts": {
        "npu-smi": roots.smi(2), "import": {
            "torch": "2.13.0", "torch_npu": "2.13.0", "npus": 2, "name": "Ascend910B3"}},
        "packages": {"torch-npu": "2.13.0"}}, set()),
    "cann on a laptop": State(CPU, {"files": roots.cann(OLD, "8.3.RC1", "ascend910b")}, set()),
}  # fmt: skip
