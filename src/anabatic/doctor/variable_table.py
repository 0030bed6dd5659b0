"""The environment variables of the Ascend stack: what may stand in them, and the values that do harm.

Sources: hicann/runtime and hicann/hccl `env_vars`, Ascend/pytorch docs and OptionsManager.cpp, mstt advisor rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from anabatic.doctor.line import Status, Text


@dataclass(frozen=True)
class Values:
    """What a variable may hold."""

    fits: Callable[[str], bool]
    expected: Text


def number(low: int, high: int) -> Values:
    """Whole numbers from `low` to `high`."""
    text = Text(f"a whole number from {low} to {high} is expected", f"应为 {low} 到 {high} 的整数")
    return Values(lambda value: re.fullmatch(r"\d{1,12}", value) is not None and low <= int(value) <= high, text)


def one_of(*words: str) -> Values:
    """One of a few words."""
    listed = ", ".join(words)
    return Values(lambda value: value in words, Text(f"one of {listed} is expected", f"应为 {listed} 之一"))


def shaped(pattern: str, en: str, zh: str) -> Values:
    """Text of a form."""
    return Values(lambda value: re.fullmatch(pattern, value) is not None, Text(en, zh))


ANY = Values(lambda value: True, Text("", ""))


@dataclass(frozen=True)
class Harm:
    """A value that is allowed and still wrong for training."""

    value: str
    """A regular expression for the whole value."""
    why: Text
    status: Status = "WARN"
    instead: str = ""
    """The value to set; empty: unset it."""


@dataclass(frozen=True)
class Variable:
    """One row."""

    name: str
    values: Values = ANY
    raises: bool = False
    """torch_npu throws when the value does not fit."""
    harms: tuple[Harm, ...] = ()
    instead: str = ""
    """What to set when the value does not fit; empty: unset it."""


_SWITCH = one_of("0", "1")
_LEFT_ON = Text("a switch for debugging that was left on; it slows every step", "调试开关忘了关，拖慢每一步")
_OLD_NAME = "TORCH_HCCL_ASYNC_ERROR_HANDLING"
_BIG = 2147483647

VARIABLES: tuple[Variable, ...] = (
    Variable("ASCEND_LAUNCH_BLOCKING", _SWITCH, True, (
        Harm("1", Text("a debugging switch: every operator waits for the device, and it saves no memory",
                       "调试开关：每个算子都同步等待，并不能节省内存")),)),
    Variable("TASK_QUEUE_ENABLE", one_of("0", "1", "2"), True, (
        Harm("0", Text("operators are launched one by one, without the queue", "关闭了下发队列，算子逐个下发"),
             instead="1"),)),
    Variable("PER_STREAM_QUEUE", _SWITCH),
    Variable("CPU_AFFINITY_CONF", shaped(
        r"(mode:)?[012](,(force:[01]|npu\d+:\d+-\d+|npu_affine:[01]))*",
        "MODE[,force:1][,npuN:A-B][,npu_affine:1] with MODE 0, 1 or 2 is expected",
        "应为 MODE[,force:1][,npuN:A-B][,npu_affine:1]，MODE 为 0、1 或 2")),
    Variable("PYTORCH_NO_NPU_MEMORY_CACHING", harms=(
        Harm("[^0].*", Text("no caching allocator: very slow", "关闭了缓存分配器：非常慢")),)),
    Variable("MULTI_STREAM_MEMORY_REUSE", one_of("0", "1", "2", "3"), True, (
        Harm("2", Text("not recommended by its vendor", "厂商不推荐"), instead="1"),)),
    Variable("OOM_SNAPSHOT_ENABLE", one_of("0", "1", "2")),
    Variable("HCCL_CONNECT_TIMEOUT", number(120, 7200), harms=(), instead="1200"),
    Variable("HCCL_EXEC_TIMEOUT", number(0, _BIG), harms=(
        Harm("0", Text("ranks wait for a dead one for ever", "有进程死亡时其他进程会永远等待"), instead="1836"),)),
    Variable("HCCL_EVENT_TIMEOUT", number(0, _BIG)),
    Variable("HCCL_WHITELIST_DISABLE", _SWITCH, harms=(
        Harm("0", Text("needs HCCL_WHITELIST_FILE; the default is 1 today",
                       "需要 HCCL_WHITELIST_FILE；现在默认是 1")),)),
    Variable("HCCL_SOCKET_FAMILY", one_of("AF_INET", "AF_INET6")),
    Variable("HCCL_IF_BASE_PORT", number(1024, 65520)),
    Variable("HCCL_BUFFSIZE", number(1, _BIG), harms=(
        Harm(r"\d{4,}", Text("MB, and each communicator takes twice that from the device",
                             "单位 MB，每个通信域占用两倍的设备内存"), instead="200"),)),
    Variable("P2P_HCCL_BUFFSIZE", number(0, _BIG)),
    Variable("HCCL_OP_EXPANSION_MODE", one_of(
        "HOST", "HOST_TS", "AI_CPU", "AICPU_CacheDisable", "AIV", "AICPU_TS", "CCU_MS", "CCU_SCHED"), harms=(
        Harm("AIV", Text("for inference with one communicator only", "只适用于单通信域的推理")),)),
    Variable("HCCL_DETERMINISTIC", one_of("false", "true", "strict")),
    Variable("HCCL_ALGO", harms=(
        Harm(".+", Text("a fixed algorithm; unset, HCCL chooses by size and topology",
                        "固定了算法；不设置时 HCCL 会按大小和拓扑选择")),)),
    Variable("HCCL_INTRA_ROCE_ENABLE", _SWITCH),
    Variable("HCCL_INTRA_PCIE_ENABLE", _SWITCH),
    Variable("HCCL_RDMA_TIMEOUT", number(5, 20)),
    Variable("HCCL_RDMA_RETRY_CNT", number(1, 7)),
    Variable("HCCL_RDMA_TC", number(0, 255)),
    Variable("HCCL_RDMA_SL", number(0, 7)),
    Variable("HCCL_ENTRY_LOG_ENABLE", _SWITCH, harms=(Harm("1", _LEFT_ON),)),
    Variable("HCCL_DIAGNOSE_ENABLE", _SWITCH, harms=(Harm("1", _LEFT_ON),)),
    Variable(_OLD_NAME, one_of("0", "1", "2", "3"), True, (
        Harm("0", Text("a job whose peer died hangs instead of ending",
                       "对端死亡时任务会挂住而不退出"), instead="1"),)),
    Variable("HCCL_ASYNC_ERROR_HANDLING", harms=(
        Harm(".*", Text(f"the old name of {_OLD_NAME}", f"{_OLD_NAME} 的旧名")),)),
    Variable("TORCH_HCCL_BLOCKING_WAIT", _SWITCH, harms=(
        Harm("1", Text("no watchdog: every collective waits on the host", "没有看门狗：每次集合通信都在主机上等待")),)),
    Variable("TORCH_HCCL_DESYNC_DEBUG", _SWITCH, harms=(Harm("1", _LEFT_ON),)),
    Variable("TORCH_HCCL_ZERO_COPY", _SWITCH),
    Variable("ASCEND_GLOBAL_LOG_LEVEL", one_of("0", "1", "2", "3", "4"), True, (
        Harm("[01]", Text("0 is DEBUG and 1 is INFO (ERROR is 3, the default): logs slow training a lot",
                          "0 是 DEBUG，1 是 INFO（ERROR 是 3，即默认值）：日志会大幅拖慢训练"), instead="3"),)),
    Variable("ASCEND_GLOBAL_EVENT_ENABLE", _SWITCH),
    Variable("ASCEND_SLOG_PRINT_TO_STDOUT", _SWITCH, harms=(
        Harm("1", Text("logs go to the terminal and no longer to ~/ascend/log, where they are needed later",
                       "日志只打到终端，不再写入 ~/ascend/log，事后无从查起")),)),
    Variable("HOST_CACHE_CAPACITY", number(0, _BIG)),
    Variable("ACLNN_CACHE_LIMIT", number(1, 10_000_000)),
    Variable("ACL_OP_COMPILER_CACHE_MODE", one_of("enable", "disable", "force")),
    Variable("ACL_OP_INIT_MODE", one_of("0", "1", "2")),
    Variable("INF_NAN_MODE_ENABLE", _SWITCH),
    Variable("COMBINED_ENABLE", _SWITCH),
    Variable("TORCH_DEVICE_BACKEND_AUTOLOAD", _SWITCH),
    Variable("TORCH_TRANSFER_TO_NPU", _SWITCH, True, (
        Harm("1", Text("replaces torch.cuda by torch.npu everywhere and hides mistakes; anabatic needs none of it",
                       "到处用 torch.npu 替换 torch.cuda，会掩盖错误；anabatic 不需要")),)),
    Variable("TORCH_NPU_FALLBACK_CPU_DISABLE", _SWITCH),
    Variable("TORCHINDUCTOR_NPU_BACKEND", one_of("default", "mlir", "dvm", "ascendc")),
    Variable("STREAMS_PER_DEVICE", one_of("8", "32")),
    Variable("ACL_DEVICE_SYNC_TIMEOUT", number(1, _BIG)),
    Variable("AUTO_USE_UC_MEMORY", _SWITCH),
    Variable("FORCE_OVERFLOW_CHECK", _SWITCH),
    Variable("NPU_ASD_ENABLE", harms=(
        Harm("[^0].*", Text("silent-error detection takes 1.5 GB and 2 % (and is NPU_ASD_CONFIG since TorchNPU 7.1)",
                            "静默错误检测占用 1.5 GB 和 2% 时间（TorchNPU 7.1 起改名 NPU_ASD_CONFIG）")),)),
)  # fmt: skip

FAMILY = re.compile(r"(ASCEND|HCCL|P2P_HCCL|TORCH|PYTORCH|ACL|NPU|NCCL|OMP|ATB|CANN|RANK_TABLE|HCCN|GLOO|TP_SOCKET)")
"""Start of the names that belong to this stack."""
