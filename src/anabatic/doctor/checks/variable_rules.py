"""The environment variables of the Ascend stack: what may stand in them, and the values that do harm.

Sources: hicann/runtime and hicann/hccl `env_vars`, Ascend/pytorch docs and OptionsManager.cpp, mstt advisor rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from anabatic.core.language import LocalizedText
from anabatic.doctor.findings.check_result import Status


@dataclass(frozen=True)
class ValueRule:
    """Rule for the values of a variable."""

    is_valid: Callable[[str], bool]
    expected: LocalizedText


def match_integer(low: int, high: int) -> ValueRule:
    """Whole numbers from `low` to `high`."""
    text = LocalizedText(f"a whole number from {low} to {high} is expected", f"应为 {low} 到 {high} 的整数")
    return ValueRule(lambda value: re.fullmatch(r"\d{1,12}", value) is not None and low <= int(value) <= high, text)


def match_one_of(*words: str) -> ValueRule:
    """One of a few words."""
    listed = ", ".join(words)
    return ValueRule(lambda value: value in words, LocalizedText(f"one of {listed} is expected", f"应为 {listed} 之一"))


def match_pattern(pattern: str, en: str, zh: str) -> ValueRule:
    """Text of a form."""
    return ValueRule(lambda value: re.fullmatch(pattern, value) is not None, LocalizedText(en, zh))


ANY_VALUE = ValueRule(lambda value: True, LocalizedText("", ""))


@dataclass(frozen=True)
class HarmfulValue:
    """A value that is allowed and still wrong for training."""

    pattern: str
    """A regular expression for the whole value."""
    reason: LocalizedText
    status: Status = "WARN"
    replacement: str = ""
    """The value to set; empty: unset it."""


@dataclass(frozen=True)
class VariableRule:
    """One row."""

    name: str
    value_rule: ValueRule = ANY_VALUE
    raises_on_invalid: bool = False
    """torch_npu throws when the value does not fit."""
    harmful_values: tuple[HarmfulValue, ...] = ()
    replacement: str = ""
    """Value to set instead of an invalid one; empty: unset it."""


_ZERO_OR_ONE = match_one_of("0", "1")
_LEFT_ON_REASON = LocalizedText(
    "a switch for debugging that was left on; it slows every step", "调试开关忘了关，拖慢每一步"
)
_OLD_NAME = "TORCH_HCCL_ASYNC_ERROR_HANDLING"
_INT32_MAX = 2147483647

VARIABLE_RULES: tuple[VariableRule, ...] = (
    VariableRule(
        "ASCEND_LAUNCH_BLOCKING",
        _ZERO_OR_ONE,
        True,
        (
            HarmfulValue(
                "1",
                LocalizedText(
                    "a debugging switch: every operator waits for the device, and it saves no memory",
                    "调试开关：每个算子都同步等待，并不能节省内存",
                ),
            ),
        ),
    ),
    VariableRule(
        "TASK_QUEUE_ENABLE",
        match_one_of("0", "1", "2"),
        True,
        (
            HarmfulValue(
                "0",
                LocalizedText("operators are launched one by one, without the queue", "关闭了下发队列，算子逐个下发"),
                replacement="1",
            ),
        ),
    ),
    VariableRule("PER_STREAM_QUEUE", _ZERO_OR_ONE),
    VariableRule(
        "CPU_AFFINITY_CONF",
        match_pattern(
            r"(mode:)?[012](,(force:[01]|npu\d+:\d+-\d+|npu_affine:[01]))*",
            "MODE[,force:1][,npuN:A-B][,npu_affine:1] with MODE 0, 1 or 2 is expected",
            "应为 MODE[,force:1][,npuN:A-B][,npu_affine:1]，MODE 为 0、1 或 2",
        ),
    ),
    VariableRule(
        "PYTORCH_NO_NPU_MEMORY_CACHING",
        harmful_values=(
            HarmfulValue("[^0].*", LocalizedText("no caching allocator: very slow", "关闭了缓存分配器：非常慢")),
        ),
    ),
    VariableRule(
        "MULTI_STREAM_MEMORY_REUSE",
        match_one_of("0", "1", "2", "3"),
        True,
        (HarmfulValue("2", LocalizedText("not recommended by its vendor", "厂商不推荐"), replacement="1"),),
    ),
    VariableRule("OOM_SNAPSHOT_ENABLE", match_one_of("0", "1", "2")),
    VariableRule("HCCL_CONNECT_TIMEOUT", match_integer(120, 7200), harmful_values=(), replacement="1200"),
    VariableRule(
        "HCCL_EXEC_TIMEOUT",
        match_integer(0, _INT32_MAX),
        harmful_values=(
            HarmfulValue(
                "0",
                LocalizedText("ranks wait for a dead one for ever", "有进程死亡时其他进程会永远等待"),
                replacement="1836",
            ),
        ),
    ),
    VariableRule("HCCL_EVENT_TIMEOUT", match_integer(0, _INT32_MAX)),
    VariableRule(
        "HCCL_WHITELIST_DISABLE",
        _ZERO_OR_ONE,
        harmful_values=(
            HarmfulValue(
                "0",
                LocalizedText(
                    "needs HCCL_WHITELIST_FILE; the default is 1 today", "需要 HCCL_WHITELIST_FILE；现在默认是 1"
                ),
            ),
        ),
    ),
    VariableRule("HCCL_SOCKET_FAMILY", match_one_of("AF_INET", "AF_INET6")),
    VariableRule("HCCL_IF_BASE_PORT", match_integer(1024, 65520)),
    VariableRule(
        "HCCL_BUFFSIZE",
        match_integer(1, _INT32_MAX),
        harmful_values=(
            HarmfulValue(
                r"\d{4,}",
                LocalizedText(
                    "MB, and each communicator takes twice that from the device",
                    "单位 MB，每个通信域占用两倍的设备内存",
                ),
                replacement="200",
            ),
        ),
    ),
    VariableRule("P2P_HCCL_BUFFSIZE", match_integer(0, _INT32_MAX)),
    VariableRule(
        "HCCL_OP_EXPANSION_MODE",
        match_one_of("HOST", "HOST_TS", "AI_CPU", "AICPU_CacheDisable", "AIV", "AICPU_TS", "CCU_MS", "CCU_SCHED"),
        harmful_values=(
            HarmfulValue("AIV", LocalizedText("for inference with one communicator only", "只适用于单通信域的推理")),
        ),
    ),
    VariableRule("HCCL_DETERMINISTIC", match_one_of("false", "true", "strict")),
    VariableRule(
        "HCCL_ALGO",
        harmful_values=(
            HarmfulValue(
                ".+",
                LocalizedText(
                    "a fixed algorithm; unset, HCCL chooses by size and topology",
                    "固定了算法；不设置时 HCCL 会按大小和拓扑选择",
                ),
            ),
        ),
    ),
    VariableRule("HCCL_INTRA_ROCE_ENABLE", _ZERO_OR_ONE),
    VariableRule("HCCL_INTRA_PCIE_ENABLE", _ZERO_OR_ONE),
    VariableRule("HCCL_RDMA_TIMEOUT", match_integer(5, 20)),
    VariableRule("HCCL_RDMA_RETRY_CNT", match_integer(1, 7)),
    VariableRule("HCCL_RDMA_TC", match_integer(0, 255)),
    VariableRule("HCCL_RDMA_SL", match_integer(0, 7)),
    VariableRule("HCCL_ENTRY_LOG_ENABLE", _ZERO_OR_ONE, harmful_values=(HarmfulValue("1", _LEFT_ON_REASON),)),
    VariableRule("HCCL_DIAGNOSE_ENABLE", _ZERO_OR_ONE, harmful_values=(HarmfulValue("1", _LEFT_ON_REASON),)),
    VariableRule(
        _OLD_NAME,
        match_one_of("0", "1", "2", "3"),
        True,
        (
            HarmfulValue(
                "0",
                LocalizedText("a job whose peer died hangs instead of ending", "对端死亡时任务会挂住而不退出"),
                replacement="1",
            ),
        ),
    ),
    VariableRule(
        "HCCL_ASYNC_ERROR_HANDLING",
        harmful_values=(HarmfulValue(".*", LocalizedText(f"the old name of {_OLD_NAME}", f"{_OLD_NAME} 的旧名")),),
    ),
    VariableRule(
        "TORCH_HCCL_BLOCKING_WAIT",
        _ZERO_OR_ONE,
        harmful_values=(
            HarmfulValue(
                "1",
                LocalizedText(
                    "no watchdog: every collective waits on the host", "没有看门狗：每次集合通信都在主机上等待"
                ),
            ),
        ),
    ),
    VariableRule("TORCH_HCCL_DESYNC_DEBUG", _ZERO_OR_ONE, harmful_values=(HarmfulValue("1", _LEFT_ON_REASON),)),
    VariableRule("TORCH_HCCL_ZERO_COPY", _ZERO_OR_ONE),
    VariableRule(
        "ASCEND_GLOBAL_LOG_LEVEL",
        match_one_of("0", "1", "2", "3", "4"),
        True,
        (
            HarmfulValue(
                "[01]",
                LocalizedText(
                    "0 is DEBUG and 1 is INFO (ERROR is 3, the default): logs slow training a lot",
                    "0 是 DEBUG，1 是 INFO（ERROR 是 3，即默认值）：日志会大幅拖慢训练",
                ),
                replacement="3",
            ),
        ),
    ),
    VariableRule("ASCEND_GLOBAL_EVENT_ENABLE", _ZERO_OR_ONE),
    VariableRule(
        "ASCEND_SLOG_PRINT_TO_STDOUT",
        _ZERO_OR_ONE,
        harmful_values=(
            HarmfulValue(
                "1",
                LocalizedText(
                    "logs go to the terminal and no longer to ~/ascend/log, where they are needed later",
                    "日志只打到终端，不再写入 ~/ascend/log，事后无从查起",
                ),
            ),
        ),
    ),
    VariableRule("HOST_CACHE_CAPACITY", match_integer(0, _INT32_MAX)),
    VariableRule("ACLNN_CACHE_LIMIT", match_integer(1, 10_000_000)),
    VariableRule("ACL_OP_COMPILER_CACHE_MODE", match_one_of("enable", "disable", "force")),
    VariableRule("ACL_OP_INIT_MODE", match_one_of("0", "1", "2")),
    VariableRule("INF_NAN_MODE_ENABLE", _ZERO_OR_ONE),
    VariableRule("COMBINED_ENABLE", _ZERO_OR_ONE),
    VariableRule("TORCH_DEVICE_BACKEND_AUTOLOAD", _ZERO_OR_ONE),
    VariableRule(
        "TORCH_TRANSFER_TO_NPU",
        _ZERO_OR_ONE,
        True,
        (
            HarmfulValue(
                "1",
                LocalizedText(
                    "replaces torch.cuda by torch.npu everywhere and hides mistakes; anabatic needs none of it",
                    "到处用 torch.npu 替换 torch.cuda，会掩盖错误；anabatic 不需要",
                ),
            ),
        ),
    ),
    VariableRule("TORCH_NPU_FALLBACK_CPU_DISABLE", _ZERO_OR_ONE),
    VariableRule("TORCHINDUCTOR_NPU_BACKEND", match_one_of("default", "mlir", "dvm", "ascendc")),
    VariableRule("STREAMS_PER_DEVICE", match_one_of("8", "32")),
    VariableRule("ACL_DEVICE_SYNC_TIMEOUT", match_integer(1, _INT32_MAX)),
    VariableRule("AUTO_USE_UC_MEMORY", _ZERO_OR_ONE),
    VariableRule("FORCE_OVERFLOW_CHECK", _ZERO_OR_ONE),
    VariableRule(
        "NPU_ASD_ENABLE",
        harmful_values=(
            HarmfulValue(
                "[^0].*",
                LocalizedText(
                    "silent-error detection takes 1.5 GB and 2 % (and is NPU_ASD_CONFIG since TorchNPU 7.1)",
                    "静默错误检测占用 1.5 GB 和 2% 时间（TorchNPU 7.1 起改名 NPU_ASD_CONFIG）",
                ),
            ),
        ),
    ),
)

STACK_PREFIX = re.compile(
    r"(ASCEND|HCCL|P2P_HCCL|TORCH|PYTORCH|ACL|NPU|NCCL|OMP|ATB|CANN|RANK_TABLE|HCCN|GLOO|TP_SOCKET)"
)
"""Start of the names that belong to this stack."""
