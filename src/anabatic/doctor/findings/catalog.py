"""All verdicts, the names of the lines, and `make_result`, by which a check gives one."""

from __future__ import annotations

from typing import Any

from anabatic.core.language import LocalizedText
from anabatic.doctor.findings import hardware_table, host_table, software_table
from anabatic.doctor.findings.check_result import CheckResult, FindingType

FINDING_TYPES: dict[str, FindingType] = {
    **hardware_table.HARDWARE_FINDINGS,
    **software_table.SOFTWARE_FINDINGS,
    **host_table.HOST_FINDINGS,
}

REPORT_GROUPS: tuple[tuple[LocalizedText, dict[str, LocalizedText]], ...] = (
    (
        LocalizedText("Hardware", "硬件"),
        {
            "npu": LocalizedText("NPU", "NPU"),
            "nodes": LocalizedText("device nodes", "设备节点"),
            "driver": LocalizedText("driver", "驱动"),
            "mounts": LocalizedText("mounts", "挂载"),
            "npu-smi": LocalizedText("npu-smi", "npu-smi"),
            "chip": LocalizedText("chip", "芯片"),
            "inference": LocalizedText("chip", "芯片"),
            "health": LocalizedText("health", "健康"),
            "temperature": LocalizedText("temperature", "温度"),
            "ecc": LocalizedText("ECC", "ECC"),
            "busy": LocalizedText("in use", "占用"),
            "gpu": LocalizedText("GPU", "GPU"),
        },
    ),
    (
        LocalizedText("CANN", "CANN"),
        {
            "cann": LocalizedText("CANN", "CANN"),
            "set_env": LocalizedText("set_env.sh", "set_env.sh"),
            "toolkit": LocalizedText("toolkit", "工具包"),
            "kernels": LocalizedText("ops package", "算子包"),
            "tbe": LocalizedText("tbe", "tbe"),
        },
    ),
    (
        LocalizedText("Python", "Python"),
        {
            "python": LocalizedText("Python", "Python"),
            "torch": LocalizedText("torch", "torch"),
            "torch_npu": LocalizedText("torch_npu", "torch_npu"),
            "pair": LocalizedText("matrix", "配套"),
            "release": LocalizedText("matrix", "配套"),
            "hdk": LocalizedText("matrix", "配套"),
            "import": LocalizedText("import", "导入"),
            "triton": LocalizedText("triton", "triton"),
        },
    ),
    (
        LocalizedText("Host", "主机"),
        {
            "variables": LocalizedText("variable", "变量"),
            "memory": LocalizedText("memory", "内存"),
            "disk": LocalizedText("disk", "磁盘"),
            "shm": LocalizedText("/dev/shm", "/dev/shm"),
            "cpu": LocalizedText("CPU", "CPU"),
            "threads": LocalizedText("threads", "线程"),
            "files": LocalizedText("open files", "文件数"),
            "sandbox": LocalizedText("sandbox", "沙箱"),
            "ports": LocalizedText("ports", "端口"),
            "network": LocalizedText("network", "网络"),
            "hccn": LocalizedText("NPU network", "NPU 网络"),
            "link": LocalizedText("NPU link", "NPU 网口"),
            "time": LocalizedText("doctor", "doctor"),
        },
    ),
)
"""Groups of the report: title, and the name of each line."""


def make_result(identity: str, **values: Any) -> CheckResult:
    """Return the verdict `identity` with the values of this machine."""
    return CheckResult(FINDING_TYPES[identity], values)
