"""What to collect next where a log does not name its cause."""

from __future__ import annotations

from anabatic.doctor import knowledge_base
from anabatic.doctor.explain.diagnosis import LogReport
from anabatic.doctor.language import Language

SYMPTOMS = ("slow", "slow-start", "hang", "memory-grows", "wrong-numbers", "killed")
"""Troubles without an error message: words that `anabatic explain` takes like a code."""
_COLLECT_STEPS: dict[str, tuple[str, str]] = {
    "plog": (
        "CANN's own log of every rank: `anabatic explain` without a name reads ~/ascend/log (plog, run and debug)",
        "各 rank 的 CANN 日志：不带参数的 `anabatic explain` 读取 ~/ascend/log（plog，run 与 debug）",
    ),
    "blocking": (
        "the Python line of the operator that failed: run once more with ASCEND_LAUNCH_BLOCKING=1",
        "出错算子所在的 Python 行：设 ASCEND_LAUNCH_BLOCKING=1 重跑一次",
    ),
    "level": (
        "more of CANN: ASCEND_GLOBAL_LOG_LEVEL=1 ASCEND_GLOBAL_EVENT_ENABLE=1 (slow: unset both afterwards)",
        "更详细的 CANN 日志：ASCEND_GLOBAL_LOG_LEVEL=1 ASCEND_GLOBAL_EVENT_ENABLE=1（很慢，之后请 unset）",
    ),
    "health": (
        "the cards: `npu-smi info` (processes, memory) and `npu-smi info -t health -i 0`",
        "设备状态：`npu-smi info`（进程、内存）与 `npu-smi info -t health -i 0`",
    ),
    "versions": (
        "chip, driver, CANN, torch and torch_npu beside each other: `anabatic doctor`",
        "芯片、驱动、CANN、torch、torch_npu 是否配套：`anabatic doctor`",
    ),
    "symptoms": (
        f"no error message at all: `anabatic explain WORD` with {', '.join(SYMPTOMS)}",
        f"完全没有报错：`anabatic explain 词`，词可为 {'、'.join(SYMPTOMS)}",
    ),
}


def suggest_next_steps(report: LogReport, language: Language) -> list[str]:
    """Return what to collect, the most telling first; empty: the log names its cause."""
    return [_COLLECT_STEPS[key][language == "zh"] for key in _choose_steps(report)]


def _choose_steps(report: LogReport) -> tuple[str, ...]:
    first = report.first_cause
    if report.is_code_lookup:
        return ()
    if first is None:
        return "plog", "level", "health", "symptoms"
    if first.entry.id.startswith(knowledge_base.UNKNOWN_EXCEPTION_PREFIX):
        return ()
    if first.role == "consequence":
        return "plog", "level", "health"
    if first.role == "wrapper" or first.entry.confidence == "low":
        return "plog", "blocking", "versions"
    return ()
