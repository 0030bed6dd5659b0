"""Checks of the environment: each variable by its row, and those that only make sense together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from anabatic.core.formatting import parse_whole
from anabatic.core.language import LocalizedText
from anabatic.doctor.checks import cann, hardware, version_matrix
from anabatic.doctor.checks.variable_rules import STACK_PREFIX, VARIABLE_RULES, VariableRule
from anabatic.doctor.findings.catalog import make_result
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.target_machine import TargetMachine

_MAX_SHOWN_CHARS = 60
"""Characters of a value that a line shows."""


def check_variables(machine: TargetMachine) -> Iterator[CheckResult]:
    """All of them; one line when nothing is wrong."""
    if not machine.is_env_known:
        yield make_result("variables.unknown")
        return
    known = {row.name: row for row in VARIABLE_RULES}
    wrong: list[CheckResult] = []
    for name, value in sorted(machine.env.items()):
        if name in known and not (machine.is_simulated and name == "TASK_QUEUE_ENABLE"):
            wrong += _check_variable(known[name], value)
    for check in _COMBINED_CHECKS:
        wrong += check(machine)
    count = sum(STACK_PREFIX.match(name) is not None for name in machine.env)
    yield from wrong or [make_result("variables.ok", count=count)]


def _format_command(name: str, instead: str) -> str:
    return f"export {name}={instead}" if instead else f"unset {name}"


def _check_variable(row: VariableRule, value: str) -> Iterator[CheckResult]:
    excerpt = value[:_MAX_SHOWN_CHARS]
    if not row.value_rule.is_valid(value):
        identity = "variables.raises" if row.raises_on_invalid else "variables.wrong"
        yield make_result(
            identity,
            name=row.name,
            value=excerpt,
            expected=row.value_rule.expected,
            command=_format_command(row.name, row.replacement),
        )
        return
    for harm in row.harmful_values:
        if re.fullmatch(harm.pattern, value, re.S):
            yield make_result(
                "variables.harmful",
                name=row.name,
                value=excerpt,
                why=harm.reason,
                command=_format_command(row.name, harm.replacement),
            )
            return


def _make_harm_result(
    name: str, machine: TargetMachine, en: str, zh: str, command: str, fatal: bool = False
) -> CheckResult:
    value = machine.env.get(name, "")[:_MAX_SHOWN_CHARS]
    identity = "variables.fatal" if fatal else "variables.harmful"
    return make_result(identity, name=name, value=value, why=LocalizedText(en, zh), command=command)


def _check_visible_devices(machine: TargetMachine) -> Iterator[CheckResult]:
    """ASCEND_RT_VISIBLE_DEVICES (hicann/runtime; torch_npu `_device_count_ascend_hal`)."""
    name = "ASCEND_RT_VISIBLE_DEVICES"
    if (value := machine.env.get(name)) is None or not machine.has_npu:
        return
    if not value:
        yield _make_harm_result(
            name, machine, "an empty list hides every device", "空列表会隐藏所有设备", f"unset {name}", True
        )
        return
    read = re.match(r"\d{1,4}(,\d{1,4})*", value)
    ids = [int(one) for one in read[0].split(",")] if read else []
    clean = ",".join(str(one) for one in sorted(set(map(int, re.findall(r"\d{1,4}", value)))))
    count = len(machine.npu_node_numbers) or machine.notes.get("count") or 0
    if not read or read[0] != value:
        yield _make_harm_result(
            name,
            machine,
            f"reading stops at the first odd character: devices {ids or 'none'}",
            f"遇到非法字符就停止解析：设备为 {ids or '空'}",
            f"export {name}={clean or 0}",
            not ids,
        )
    elif ids != sorted(set(ids)):
        yield _make_harm_result(
            name,
            machine,
            "ids must ascend without repeats, else torch sees 0 devices",
            "编号必须递增且不重复，否则 torch 看到 0 个设备",
            f"export {name}={clean}",
            True,
        )
    elif count and ids[-1] >= count:
        good = ",".join(str(one) for one in ids if one < count)
        yield _make_harm_result(
            name,
            machine,
            f"there are {count} devices, 0 to {count - 1}; reading stops at the first id above",
            f"只有 {count} 个设备，编号 0 到 {count - 1}；遇到更大的编号就停止解析",
            f"export {name}={good}" if good else f"unset {name}",
            not good,
        )


def _check_foreign_names(machine: TargetMachine) -> Iterator[CheckResult]:
    """Names of another stack, which mean nothing on an NPU."""
    if not machine.has_npu or machine.has_gpu:
        return
    for name, correct_name in _FOREIGN_NAMES:
        if name in machine.env and correct_name not in machine.env:
            value = machine.env[name]
            instead = (
                f"export {correct_name}={value[:_MAX_SHOWN_CHARS]}"
                if correct_name != "HCCL_CONNECT_TIMEOUT"
                else f"export {correct_name}=1200"
            )
            yield _make_harm_result(
                name,
                machine,
                f"has no meaning on an NPU; there it is {correct_name}",
                f"对 NPU 无效；对应的是 {correct_name}",
                f"unset {name} ; {instead}",
            )


_FOREIGN_NAMES = (
    ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    ("NPU_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"),
    ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"),
    ("NCCL_TIMEOUT", "HCCL_CONNECT_TIMEOUT"),
)

_ALLOCATOR_KEYS = {
    "expandable_segments": r"(?i)true|false", "max_split_size_mb": r"\d+", "garbage_collection_threshold": r"0?\.\d+",
    "base_addr_aligned_kb": r"\d|1[0-6]", "page_size": "1g", "segment_size_mb": r"\d+", "large_segment_size_mb": r"\d+",
    "roundup_power2_divisions": r".+", "multi_stream_lazy_reclaim": r"(?i)true|false",
    "pinned_use_background_threads": r"(?i)true|false", "pin_memory_expandable_segments": r"(?i)true|false",
    "pinned_mem_register": r"(?i)true|false", "per_process_memory_fraction": r"[01]?\.?\d*",
    "throw_on_npumalloc_oom": r"(?i)true|false", "pinned_max_round_threshold_mb": r"\d+",
    "pinned_max_cached_size_mb": r"\d+", "max_non_split_rounding_mb": r"\d+",
    "release_lock_on_npumalloc": r"(?i)true|false",
}  # fmt: skip
"""Key -> what its value looks like (Ascend/pytorch docs, PYTORCH_NPU_ALLOC_CONF.md)."""


def _check_allocator(machine: TargetMachine) -> Iterator[CheckResult]:
    name, value = "PYTORCH_NPU_ALLOC_CONF", machine.env.get("PYTORCH_NPU_ALLOC_CONF")
    if value is None:
        return
    if "PYTORCH_ALLOC_CONF" in machine.env:
        yield _make_harm_result(
            name,
            machine,
            "PYTORCH_ALLOC_CONF is set as well: TorchNPU 26.2 raises with both",
            "同时设置了 PYTORCH_ALLOC_CONF：TorchNPU 26.2 会报错",
            f"unset {name}",
            True,
        )
    pairs = [pair.partition(":") for pair in re.split(r",(?![^\[]*\])", value) if pair]
    odd = [key for key, _, word in pairs if not re.fullmatch(_ALLOCATOR_KEYS.get(key.strip(), r"(?!)"), word.strip())]
    keys = {key.strip() for key, _, word in pairs}
    expand = any(key.strip() == "expandable_segments" and word.strip().lower() == "true" for key, _, word in pairs)
    good = f"export {name}=expandable_segments:True"
    if odd:
        yield _make_harm_result(
            name,
            machine,
            f"{odd[0]} is no key of it, or its value is wrong",
            f"{odd[0]} 不是合法的键，或值有误",
            good,
            True,
        )
    elif expand and keys & {"max_split_size_mb", "garbage_collection_threshold"}:
        yield _make_harm_result(
            name,
            machine,
            "expandable_segments does not go with max_split_size_mb or garbage_collection_threshold",
            "expandable_segments 不能与 max_split_size_mb 或 garbage_collection_threshold 同用",
            good,
            True,
        )
    elif "page_size" in keys and len(keys) > 1:
        yield _make_harm_result(name, machine, "page_size goes with no other key", "page_size 不能与其他键同用", good)


def _check_hccl_timeouts(machine: TargetMachine) -> Iterator[CheckResult]:
    """HCCL_EVENT_TIMEOUT must be longer than HCCL_EXEC_TIMEOUT (Ascend/pytorch docs; defaults 1868 and 1836)."""
    timeouts = [machine.env.get(name, "") for name in ("HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT")]
    execute, event = (
        default if (number := parse_whole(word, 12)) is None else number
        for word, default in zip(timeouts, (1836, 1868), strict=True)
    )
    if any(timeouts) and execute and event and event <= execute:
        name = "HCCL_EXEC_TIMEOUT" if timeouts[0] else "HCCL_EVENT_TIMEOUT"
        yield _make_harm_result(
            name,
            machine,
            f"HCCL_EVENT_TIMEOUT ({event} s) must be longer than HCCL_EXEC_TIMEOUT ({execute} s)",
            f"HCCL_EVENT_TIMEOUT（{event} 秒）必须大于 HCCL_EXEC_TIMEOUT（{execute} 秒）",
            f"export HCCL_EVENT_TIMEOUT={execute + 32}",
        )


def _check_hccl_intra(machine: TargetMachine) -> Iterator[CheckResult]:
    """HCCL_INTRA_* : both 1, or only a 0, is illegal (hccl_env)."""
    switches = {name: machine.env.get(name) for name in ("HCCL_INTRA_ROCE_ENABLE", "HCCL_INTRA_PCIE_ENABLE")}
    values = list(switches.values())
    if values == ["1", "1"] or ("0" in values and None in values) or values == ["0", "0"]:
        name = next(one for one, value in switches.items() if value is not None)
        yield _make_harm_result(
            name,
            machine,
            "exactly one of HCCL_INTRA_ROCE_ENABLE and HCCL_INTRA_PCIE_ENABLE may be 1",
            "HCCL_INTRA_ROCE_ENABLE 与 HCCL_INTRA_PCIE_ENABLE 只能有一个为 1",
            "unset HCCL_INTRA_ROCE_ENABLE HCCL_INTRA_PCIE_ENABLE",
        )


def _check_paths(machine: TargetMachine) -> Iterator[CheckResult]:
    for name, en, zh in _PATH_VARIABLES:
        value = machine.env.get(name)
        if value and not machine.files.exists(value):
            yield _make_harm_result(name, machine, en, zh, f"unset {name}")


_PATH_VARIABLES = (
    ("RANK_TABLE_FILE", "there is no such file: left over from another job", "文件不存在：可能是旧任务残留"),
    ("HCCL_WHITELIST_FILE", "there is no such file", "文件不存在"),
    ("OOM_SNAPSHOT_PATH", "there is no such folder: no snapshot is written", "目录不存在：不会写快照"),
    ("TORCH_ACL_INIT_CONFIG_PATH", "there is no such file", "文件不存在"),
    (
        "ATB_HOME_PATH",
        "there is no such folder: NNAL was removed or replaced (libatb.so is not found)",
        "目录不存在：NNAL 被删除或更换（找不到 libatb.so）",
    ),
    ("ASCEND_PROCESS_LOG_PATH", "there is no such folder", "目录不存在"),
)


def _check_custom_operators(machine: TargetMachine) -> Iterator[CheckResult]:
    """Custom operators stand before CANN's own: those of another version fail with 561002 (hicann/runtime docs)."""
    name = "ASCEND_CUSTOM_OPP_PATH"
    places = [place for place in machine.env.get(name, "").split(":") if place]
    gone = [place for place in places if not machine.files.exists(place)]
    if gone:
        left = ":".join(place for place in places if place not in gone)
        yield _make_harm_result(
            name,
            machine,
            f"there is no {gone[0]}",
            f"{gone[0]} 不存在",
            f"export {name}={left}" if left else f"unset {name}",
        )
    elif len(places) > 1:
        yield _make_harm_result(
            name,
            machine,
            "several sets of custom operators: the first that has an operator is used, whatever its version",
            "多套自定义算子：使用最先找到的，不论版本",
            f"export {name}={places[0]}",
        )


def _check_atb_abi(machine: TargetMachine) -> Iterator[CheckResult]:
    """Torch from 2.7 on has the C++ ABI 1; NNAL brings both, and its set_env.sh asks the torch that is there."""
    name, torch = "ATB_HOME_PATH", version_matrix.parse_version(machine.package_versions.get("torch", ""))
    if machine.env.get(name, "").rstrip("/").endswith("cxx_abi_0") and torch and torch >= (2, 7):
        yield _make_harm_result(
            name,
            machine,
            "is for the old C++ ABI, torch from 2.7 on has the new one: undefined symbol _ZN3atb",
            "为旧 C++ ABI，而 torch 2.7 起使用新 ABI：会报 undefined symbol _ZN3atb",
            f"unset {name} ; source /usr/local/Ascend/nnal/atb/set_env.sh --cxx_abi=1",
        )


def _check_inf_nan_mode(machine: TargetMachine) -> Iterator[CheckResult]:
    """INF_NAN_MODE_ENABLE=0 raises on A2 and A3 (NpuVariables.cpp)."""
    off = machine.env.get("INF_NAN_MODE_ENABLE") == "0" and machine.env.get("INF_NAN_MODE_FORCE_DISABLE") != "1"
    if off and hardware.detect_ops_folder(machine) in ("ascend910b", "ascend910_93"):
        yield _make_harm_result(
            "INF_NAN_MODE_ENABLE",
            machine,
            "raises on this chip, which always has Inf and NaN",
            "本芯片始终使用 Inf/NaN，设为 0 会报错",
            "unset INF_NAN_MODE_ENABLE",
            True,
        )


def _check_container_mask(machine: TargetMachine) -> Iterator[CheckResult]:
    name = "ASCEND_VISIBLE_DEVICES"
    if name in machine.env and machine.has_npu and not machine.is_container:
        yield _make_harm_result(
            name,
            machine,
            "is read by the container runtime, not by a program",
            "由容器运行时读取，程序不看它",
            f"export ASCEND_RT_VISIBLE_DEVICES={machine.env[name][:_MAX_SHOWN_CHARS]}",
        )


def _check_renamed(machine: TargetMachine) -> Iterator[CheckResult]:
    """ASCEND_SLOG_PRINT_TO_STDOUT is deprecated from CANN 9.2.0 (hicann/runtime)."""
    found, name = cann.find_active_cann(machine), "ASCEND_SLOG_PRINT_TO_STDOUT"
    if machine.env.get(name) == "0" and found and (version_matrix.parse_version(found.version) or (0,)) >= (9, 2):
        yield _make_harm_result(
            name,
            machine,
            "is called ASCEND_LOG_PRINT_TO_STDOUT since CANN 9.2",
            "CANN 9.2 起改名 ASCEND_LOG_PRINT_TO_STDOUT",
            f"unset {name}",
        )


def _check_task_queue(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check features of the task queue (Ascend/pytorch docs, PER_STREAM_QUEUE.md and TORCH_NPU_LAZY_FUSION.md)."""
    env = machine.env
    if env.get("TASK_QUEUE_ENABLE") != "0" and env.get("ASCEND_LAUNCH_BLOCKING") != "1":
        return
    for name, on in (("PER_STREAM_QUEUE", "1"), ("TORCH_NPU_LAZY_FUSION", "True")):
        if env.get(name) == on:
            yield _make_harm_result(
                name,
                machine,
                "needs the task queue, which is switched off here",
                "依赖任务下发队列，而这里关闭了它",
                "unset TASK_QUEUE_ENABLE ASCEND_LAUNCH_BLOCKING",
            )


def _check_cpu_affinity(machine: TargetMachine) -> Iterator[CheckResult]:
    """A process whose cores are restricted already is not bound (CPU_AFFINITY_CONF.md)."""
    name, cpu_facts = "CPU_AFFINITY_CONF", machine.get_fact("cpu", dict)
    value, count, allowed = machine.env.get(name, ""), cpu_facts.get("count"), cpu_facts.get("allowed")
    is_bound = re.match(r"(mode:)?[12]", value) and "force:1" not in value
    if is_bound and isinstance(count, int) and isinstance(allowed, int) and allowed < count:
        yield _make_harm_result(
            name,
            machine,
            f"is ignored: {allowed} of {count} cores are allowed here already (taskset, cpuset)",
            f"不起作用：进程已被限制在 {count} 核中的 {allowed} 核（taskset、cpuset）",
            f"export {name}={value[:_MAX_SHOWN_CHARS]},force:1",
        )


_ALLOCATOR_REQUIREMENTS: tuple[tuple[str, str, str], ...] = (
    ("expandable_segments:true", "23.0.0", ""),
    ("page_size", "25.0.RC1", "8.1.RC1"),
    ("pin_memory_expandable_segments:true", "25.5.0", "8.5.0"),
    ("pinned_mem_register:true", "26.0.RC1", ""),
)
"""Key of the allocator -> oldest driver and oldest CANN (PYTORCH_NPU_ALLOC_CONF.md)."""


def _check_allocator_versions(machine: TargetMachine) -> Iterator[CheckResult]:
    name = "PYTORCH_NPU_ALLOC_CONF"
    value = machine.env.get(name, "").lower()
    found = cann.find_active_cann(machine)
    installed = (
        version_matrix.parse_version(hardware.read_driver_version(machine)),
        found.version_key if found else None,
    )
    for key, *requirements in _ALLOCATOR_REQUIREMENTS:
        minimum = [version_matrix.parse_version(one) for one in requirements]
        old = any(have and want and have < want for have, want in zip(installed, minimum, strict=True))
        if old and re.search(rf"(^|,)\s*{re.escape(key)}", value):
            needs = f"driver {requirements[0]}" + (f", CANN {requirements[1]}" if requirements[1] else "")
            yield _make_harm_result(name, machine, f"{key} needs {needs}", f"{key} 需要 {needs}", f"unset {name}")


def _check_zero_copy(machine: TargetMachine) -> Iterator[CheckResult]:
    """TORCH_HCCL_ZERO_COPY: A3 with expandable segments only (Ascend/pytorch docs)."""
    name, grows = "TORCH_HCCL_ZERO_COPY", "expandable_segments:true"
    allocator_settings = machine.env.get("PYTORCH_NPU_ALLOC_CONF", "") + machine.env.get("PYTORCH_ALLOC_CONF", "")
    good = hardware.detect_ops_folder(machine) in ("", "ascend910_93") and grows in allocator_settings.lower()
    if machine.env.get(name) == "1" and not good:
        yield _make_harm_result(
            name,
            machine,
            "works on a 910C with expandable_segments:True only",
            "只在 910C 且 expandable_segments:True 时有效",
            f"unset {name}",
        )


_COMBINED_CHECKS: tuple[Callable[[TargetMachine], Iterator[CheckResult]], ...] = (
    _check_visible_devices,
    _check_foreign_names,
    _check_allocator,
    _check_hccl_timeouts,
    _check_hccl_intra,
    _check_paths,
    _check_custom_operators,
    _check_atb_abi,
    _check_inf_nan_mode,
    _check_container_mask,
    _check_renamed,
    _check_task_queue,
    _check_cpu_affinity,
    _check_allocator_versions,
    _check_zero_copy,
)
