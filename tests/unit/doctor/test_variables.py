"""Environment variables: each mistake of the guides, and that good values pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from unit.doctor import roots
from unit.doctor.states import State


def wrong(name: str, value: str, kind: str) -> State:
    """One variable on a healthy machine, and its verdict."""
    return State(roots.a2, {"env": {name: value}}, {f"variables.{kind}"})


_ROWS = (
    ("ASCEND_LAUNCH_BLOCKING", "1", "harmful"),
    ("ASCEND_LAUNCH_BLOCKING", "true", "raises"),
    ("TASK_QUEUE_ENABLE", "0", "harmful"),
    ("TASK_QUEUE_ENABLE", "3", "raises"),
    ("ASCEND_GLOBAL_LOG_LEVEL", "0", "harmful"),
    ("ASCEND_GLOBAL_LOG_LEVEL", "ERROR", "raises"),
    ("ASCEND_SLOG_PRINT_TO_STDOUT", "1", "harmful"),
    ("ASCEND_RT_VISIBLE_DEVICES", "", "fatal"),
    ("ASCEND_RT_VISIBLE_DEVICES", "3,2,1", "fatal"),
    ("ASCEND_RT_VISIBLE_DEVICES", "0,0", "fatal"),
    ("ASCEND_RT_VISIBLE_DEVICES", "1, 2,3", "harmful"),
    ("ASCEND_RT_VISIBLE_DEVICES", "all", "fatal"),
    ("ASCEND_RT_VISIBLE_DEVICES", "1,3,8", "harmful"),
    ("ASCEND_RT_VISIBLE_DEVICES", "8", "fatal"),
    ("ASCEND_VISIBLE_DEVICES", "0", "harmful"),
    ("CUDA_VISIBLE_DEVICES", "0", "harmful"),
    ("NPU_VISIBLE_DEVICES", "0", "harmful"),
    ("ATB_HOME_PATH", "/usr/local/Ascend/nnal/atb/gone", "harmful"),
    ("ATB_HOME_PATH", "/proc/cxx_abi_0", "harmful"),
    ("ASCEND_CUSTOM_OPP_PATH", "/opt/gone/vendors/customize", "harmful"),
    ("ASCEND_CUSTOM_OPP_PATH", "/proc:/usr", "harmful"),
    ("NCCL_TIMEOUT", "1800", "harmful"),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "harmful"),
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segment:True", "fatal"),
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:yes", "fatal"),
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64", "fatal"),
    ("PYTORCH_NPU_ALLOC_CONF", "page_size:1g,expandable_segments:False", "harmful"),
    ("PYTORCH_NO_NPU_MEMORY_CACHING", "1", "harmful"),
    ("MULTI_STREAM_MEMORY_REUSE", "4", "raises"),
    ("HCCL_CONNECT_TIMEOUT", "60", "wrong"),
    ("HCCL_CONNECT_TIMEOUT", "30m", "wrong"),
    ("HCCL_EXEC_TIMEOUT", "0", "harmful"),
    ("HCCL_EXEC_TIMEOUT", "7200", "harmful"),
    ("HCCL_BUFFSIZE", "4096", "harmful"),
    ("HCCL_BUFFSIZE", "200MB", "wrong"),
    ("HCCL_OP_EXPANSION_MODE", "AIV", "harmful"),
    ("HCCL_ALGO", "level0:NA;level1:ring", "harmful"),
    ("HCCL_WHITELIST_DISABLE", "0", "harmful"),
    ("HCCL_INTRA_ROCE_ENABLE", "0", "harmful"),
    ("HCCL_ASYNC_ERROR_HANDLING", "1", "harmful"),
    ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "0", "harmful"),
    ("INF_NAN_MODE_ENABLE", "0", "fatal"),
    ("RANK_TABLE_FILE", "/tmp/ranks.json", "harmful"),
    ("CPU_AFFINITY_CONF", "3", "wrong"),
    ("ACLNN_CACHE_LIMIT", "0", "wrong"),
    ("TORCH_TRANSFER_TO_NPU", "yes", "raises"),
    ("STREAMS_PER_DEVICE", "16", "wrong"),
)
CASES = {f"{name}={value}": wrong(name, value, kind) for name, value, kind in _ROWS}
CASES["a queue that is off"] = State(
    roots.a2, {"env": {"TASK_QUEUE_ENABLE": "0", "PER_STREAM_QUEUE": "1"}}, {"variables.harmful"}
)
CASES["bound already"] = State(
    roots.a2,
    {"env": {"CPU_AFFINITY_CONF": "2"}, "facts": {"cpu": {"count": 192, "allowed": 96}}},
    {"variables.harmful", "cpu.bound"},
)
CASES["driver too old for the allocator"] = State(
    roots.a2, {"env": {"PYTORCH_NPU_ALLOC_CONF": "pin_memory_expandable_segments:True"}}, {"variables.harmful"}
)
CASES["zero copy on the wrong chip"] = State(
    roots.a2,
    {"env": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "TORCH_HCCL_ZERO_COPY": "1"}},
    {"variables.harmful"},
)
CASES["both allocators"] = State(
    roots.a2,
    {"env": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "x"}},
    {"variables.fatal"},
)
CASES["renamed in CANN 9.2"] = State(
    roots.a3,
    {
        "files": roots.cann(roots.NEW, "9.2.0", "ascend910_93"),
        "env": {"ASCEND_SLOG_PRINT_TO_STDOUT": "0"},
        "packages": {"torch": "2.13.0+cpu", "torch-npu": "2.13.0"},
    },
    {"variables.harmful"},
)

GOOD = {
    "TORCH_NPU_LAZY_FUSION": "True",
    "ASCEND_RT_VISIBLE_DEVICES": "0,2,5",
    "TASK_QUEUE_ENABLE": "2",
    "CPU_AFFINITY_CONF": "1,npu0:0-23,npu1:24-47",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_CONNECT_TIMEOUT": "1200",
    "HCCL_EXEC_TIMEOUT": "3600",
    "HCCL_EVENT_TIMEOUT": "3700",
    "HCCL_SOCKET_IFNAME": "^docker,lo",
    "HCCL_IF_IP": "192.168.0.7",
    "HCCL_BUFFSIZE": "200",
    "ASCEND_GLOBAL_LOG_LEVEL": "3",
    "OMP_NUM_THREADS": "8",
    "CUDA_VISIBLE_DEVICES": "0",
}


@pytest.mark.parametrize("name", CASES)
def test_mistake(name: str, tmp_path: Path) -> None:
    base, change, expected = CASES[name]
    found = roots.lines(base().but(**change), tmp_path)
    assert roots.ids(found, "WARN", "FAIL") == expected
    fixes = [line.describe_fix("en") for line in found if line.finding_type.check_name == "variables"]
    assert fixes and all(fix.startswith(("export ", "unset ")) for fix in fixes)


def test_good_values_pass(tmp_path: Path) -> None:
    assert roots.ids(roots.lines(roots.a2().but(env=GOOD), tmp_path), "WARN", "FAIL") == set()


def test_masked_devices_are_not_missed(tmp_path: Path) -> None:
    seen = {"import": {"torch": "2.7.1", "torch_npu": "2.7.1", "npus": 3, "name": "Ascend910B3"}}
    found = roots.lines(roots.a2().but(env=GOOD, facts=seen), tmp_path)
    assert roots.ids(found, "WARN", "FAIL") == set()
