"""All verdicts, the names of the lines, and `say`, by which a check gives one."""

from __future__ import annotations

from typing import Any

from anabatic.doctor import verdicts_hardware, verdicts_host, verdicts_software
from anabatic.doctor.line import Line, Text, Verdict

VERDICTS: dict[str, Verdict] = {
    **verdicts_hardware.VERDICTS,
    **verdicts_software.VERDICTS,
    **verdicts_host.VERDICTS,
}

GROUPS: tuple[tuple[Text, dict[str, Text]], ...] = (
    (Text("Hardware", "硬件"), {
        "npu": Text("NPU", "NPU"), "nodes": Text("device nodes", "设备节点"), "driver": Text("driver", "驱动"),
        "mounts": Text("mounts", "挂载"), "npu-smi": Text("npu-smi", "npu-smi"), "chip": Text("chip", "芯片"),
        "inference": Text("chip", "芯片"), "health": Text("health", "健康"), "temperature": Text("temperature", "温度"),
        "ecc": Text("ECC", "ECC"), "busy": Text("in use", "占用"), "gpu": Text("GPU", "GPU"),
    }),
    (Text("CANN", "CANN"), {
        "cann": Text("CANN", "CANN"), "set_env": Text("set_env.sh", "set_env.sh"), "toolkit": Text("toolkit", "工具包"),
        "kernels": Text("ops package", "算子包"), "tbe": Text("tbe", "tbe"),
    }),
    (Text("Python", "Python"), {
        "python": Text("Python", "Python"), "torch": Text("torch", "torch"),
        "torch_npu": Text("torch_npu", "torch_npu"),
        "pair": Text("matrix", "配套"), "release": Text("matrix", "配套"), "hdk": Text("matrix", "配套"),
        "import": Text("import", "导入"), "triton": Text("triton", "triton"),
    }),
    (Text("Host", "主机"), {
        "variables": Text("variable", "变量"), "memory": Text("memory", "内存"), "disk": Text("disk", "磁盘"),
        "shm": Text("/dev/shm", "/dev/shm"), "cpu": Text("CPU", "CPU"), "threads": Text("threads", "线程"),
        "files": Text("open files", "文件数"), "sandbox": Text("sandbox", "沙箱"),
        "ports": Text("ports", "端口"), "network": Text("network", "网络"),
        "hccn": Text("NPU network", "NPU 网络"), "link": Text("NPU link", "NPU 网口"), "time": Text("doctor", "doctor"),
    }),
)  # fmt: skip
"""Groups of the report: title, and the name of each line."""


def say(identity: str, **values: Any) -> Line:
    """Return the verdict `identity` with the values of this machine."""
    return Line(VERDICTS[identity], values)
