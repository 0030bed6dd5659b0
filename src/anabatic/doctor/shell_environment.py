"""`anabatic env`: the variables that this machine needs, each with its reason, and those that guides set in vain."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.core.language import Language, LocalizedText
from anabatic.device.table import DEVICES
from anabatic.doctor.checks import cann, hardware, host, network, version_matrix
from anabatic.doctor.target_machine import TargetMachine

_DRIVER_LIBRARIES = "/usr/local/Ascend/driver/lib64"
_MIN_EXPANDABLE_DRIVER = (23, 0, 0, 0)
"""First driver with expandable segments (Ascend/pytorch docs, PYTORCH_NPU_ALLOC_CONF.md)."""


@dataclass(frozen=True)
class EnvSetting:
    """A variable to set."""

    name: str
    value: str
    reason: LocalizedText
    is_prepended: bool = False
    """The value goes before what the variable holds already."""


_CANN_REASON = LocalizedText("CANN, as its set_env.sh", "CANN，与其 set_env.sh 相同")
_LIBRARY_FOLDERS = ("lib64", "lib64/plugin/opskernel", "lib64/plugin/nnengine",
              "opp/built-in/op_impl/ai_core/tbe/op_tiling/lib/linux/{arch}", "tools/aml/lib64")  # fmt: skip
_PROGRAM_FOLDERS = ("bin", "compiler/ccec_compiler/bin", "tools/ccec_compiler/bin")
_MODULE_FOLDERS = ("python/site-packages", "opp/built-in/op_impl/ai_core/tbe")
"""Folders that set_env.sh of CANN 8.0 to 9.0 puts before the search paths."""


def list_settings(machine: TargetMachine) -> list[EnvSetting]:
    """Return what to set on this machine; folders that a search path holds already are left out."""
    if machine.has_npu and not machine.is_simulated:
        return [*_list_cann_settings(machine), *_list_npu_settings(machine), *_list_thread_settings(machine)]
    if machine.has_gpu:
        name, value = DEVICES["cuda"].alloc_env
        return [EnvSetting(name, value, _EXPANDABLE_SEGMENTS_REASON), *_list_thread_settings(machine)]
    return []


_CONNECT_TIMEOUT_REASON = LocalizedText(
    "seconds that ranks wait for each other at the start; 120, the default, is short when one loads data",
    "各进程启动时互相等待的秒数；默认 120 秒，有进程在读数据时不够",
)
_EXPANDABLE_SEGMENTS_REASON = LocalizedText(
    "segments that grow: less memory lost to fragmentation", "可扩展内存段：减少碎片浪费"
)


def _list_cann_settings(machine: TargetMachine) -> list[EnvSetting]:
    found = cann.find_active_cann(machine)
    if found is None:
        return []
    root = found.root
    arch = str(machine.get_fact("python", dict).get("machine") or "aarch64")
    plain = {
        "ASCEND_TOOLKIT_HOME": root,
        "ASCEND_HOME_PATH": root,
        "ASCEND_OPP_PATH": f"{root}/opp",
        "ASCEND_AICPU_PATH": root,
        "TOOLCHAIN_HOME": f"{root}/toolkit",
    }
    settings = [EnvSetting(name, value, _CANN_REASON) for name, value in plain.items()]
    libraries = [f"{root}/{one.format(arch=arch)}" for one in _LIBRARY_FOLDERS]
    libraries += [_DRIVER_LIBRARIES, f"{_DRIVER_LIBRARIES}/common", f"{_DRIVER_LIBRARIES}/driver"]
    places = (
        ("LD_LIBRARY_PATH", libraries, LocalizedText("libraries of CANN and of the driver", "CANN 和驱动的库")),
        (
            "PYTHONPATH",
            [f"{root}/{one}" for one in _MODULE_FOLDERS],
            LocalizedText("the operator compiler", "算子编译器"),
        ),
        ("PATH", [f"{root}/{one}" for one in _PROGRAM_FOLDERS], LocalizedText("programs of CANN", "CANN 的程序")),
    )
    for name, folders, reason in places:
        entries = machine.env.get(name, "").split(":")
        missing = [folder for folder in folders if folder not in entries and machine.files.is_dir(folder)]
        if missing:
            settings.append(EnvSetting(name, ":".join(missing), reason, is_prepended=True))
    return settings


def _list_npu_settings(machine: TargetMachine) -> list[EnvSetting]:
    settings = []
    name, value = DEVICES["npu"].alloc_env
    driver = version_matrix.parse_version(hardware.read_driver_version(machine))
    if "PYTORCH_ALLOC_CONF" not in machine.env and (driver is None or driver >= _MIN_EXPANDABLE_DRIVER):
        settings.append(EnvSetting(name, value, _EXPANDABLE_SEGMENTS_REASON))
    if len(machine.npu_node_numbers) > 1:
        settings += [
            EnvSetting(variable, required, _CONNECT_TIMEOUT_REASON) for variable, required in DEVICES["npu"].start_env
        ]
        if len(useful := network.list_outward_interfaces(machine)) > 1:
            reason = LocalizedText(
                f"of {', '.join(useful)} the one with the default route; HCCL takes the first by name",
                f"{', '.join(useful)} 中带默认路由的一个；HCCL 按名字取第一个",
            )
            settings += [EnvSetting("HCCL_SOCKET_IFNAME", f"={useful[0]}", reason)]
            settings += [EnvSetting(one, useful[0], reason) for one in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")]
    return settings


def _list_thread_settings(machine: TargetMachine) -> list[EnvSetting]:
    if not machine.get_fact("cpu", dict):
        return []
    reason = LocalizedText(
        "cores divided by devices, at most 8: by default each process takes all",
        "核数除以设备数，最多 8：默认每个进程占满所有核",
    )
    return [EnvSetting("OMP_NUM_THREADS", str(host.recommend_threads(machine)), reason)]


DISCOURAGED_SETTINGS: tuple[tuple[str, LocalizedText], ...] = (
    ("ASCEND_LAUNCH_BLOCKING=1", LocalizedText(
        "no memory optimisation: the switch for debugging makes every operator wait. For memory: a smaller batch, "
        "recomputation, expandable segments",
        "不是内存优化：它是让每个算子同步等待的调试开关。省内存请用更小的批、重计算、可扩展内存段")),
    ("ASCEND_GLOBAL_LOG_LEVEL=0", LocalizedText(
        "0 is DEBUG, not ERROR, and slows training a lot; ERROR is 3 and the default",
        "0 是 DEBUG 而不是 ERROR，会大幅拖慢训练；ERROR 是 3，也是默认值")),
    ("ASCEND_SLOG_PRINT_TO_STDOUT=1", LocalizedText(
        "then no log is written to ~/ascend/log, which is where an error is looked for afterwards",
        "设了它就不再写 ~/ascend/log，而事后正要到那里查错误")),
    ("ASCEND_RT_VISIBLE_DEVICES=0,...,7", LocalizedText(
        "unset already means all; set it to choose some, ascending, without blanks",
        "不设置就是全部；只在挑选设备时设置，递增且无空格")),
    ("HCCL_WHITELIST_DISABLE=1", LocalizedText("has been the default for years", "多年来已是默认值")),
    ("HCCL_IF_IP=$(hostname -I ...)", LocalizedText(
        "the first address may be docker's; HCCL_SOCKET_IFNAME names the interface and suits every machine",
        "第一个地址可能是 docker 的；用 HCCL_SOCKET_IFNAME 指定网卡，各机器通用")),
    ("HCCL_EXEC_TIMEOUT=1800", LocalizedText(
        "is below the default of 1836 and must stay below HCCL_EVENT_TIMEOUT; raise it only for a long phase of one",
        "低于默认值 1836，且必须小于 HCCL_EVENT_TIMEOUT；只有单个进程长时间独占时才需要调大")),
    ("NCCL_TIMEOUT, CUDA_VISIBLE_DEVICES, PYTORCH_CUDA_ALLOC_CONF", LocalizedText(
        "mean nothing on an NPU: HCCL_CONNECT_TIMEOUT, ASCEND_RT_VISIBLE_DEVICES, PYTORCH_NPU_ALLOC_CONF do",
        "对 NPU 无效：应为 HCCL_CONNECT_TIMEOUT、ASCEND_RT_VISIBLE_DEVICES、PYTORCH_NPU_ALLOC_CONF")),
    ("TASK_QUEUE_ENABLE=2", LocalizedText(
        "faster where the host is the bottleneck, and takes more device memory: try it, do not assume it",
        "主机是瓶颈时更快，但占用更多设备内存：试过再用")),
    ("CPU_AFFINITY_CONF=1", LocalizedText(
        "helps some hosts, and is ignored beside taskset or a cpuset: measure first",
        "对部分主机有用，但与 taskset、cpuset 同用时无效：先测再用")),
    ("HCCL_OP_EXPANSION_MODE=AIV", LocalizedText(
        "for inference with one communicator; training has several", "适用于单通信域推理；训练有多个通信域")),
    ("HCCL_ALGO=...", LocalizedText("unset, HCCL chooses by size and topology", "不设置时 HCCL 按大小和拓扑选择")),
    ("TORCH_TRANSFER_TO_NPU=1", LocalizedText(
        "anabatic asks the device table; replacing torch.cuda hides mistakes",
        "anabatic 查设备表；替换 torch.cuda 会掩盖错误")),
)  # fmt: skip
"""Variables in guides that this program never sets (Ascend/pytorch docs, hicann/hccl hccl_env, mstt advisor rules)."""


@dataclass(frozen=True)
class ShellSyntax:
    """Return the shell line that sets a variable."""

    format_set: Callable[[str, str], str]
    format_prepend: Callable[[str, str], str]


def _quote_fish(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, ShellSyntax] = {
    "bash": ShellSyntax(
        lambda name, value: f"export {name}={shlex.quote(value)}",
        lambda name, value: f'export {name}={shlex.quote(value)}"${{{name}:+:${name}}}"',
    ),
    "fish": ShellSyntax(
        lambda name, value: f"set -gx {name} {_quote_fish(value)}",
        lambda name, value: f"set -gx --path {name} {' '.join(map(_quote_fish, value.split(':')))} ${name}",
    ),
}


def render_settings(machine: TargetMachine, shell: str, explain: bool, language: Language) -> str:
    """Return the lines for `eval`, or a JSON object; a variable that is set already keeps its value.

    Raises:
        ConfigError: there is no such shell.
    """
    if shell not in SHELLS and shell != "json":
        known = [*SHELLS, "json"]
        raise ConfigError(
            f'--shell is "{shell}".{did_you_mean(shell, known)}', "one of bash (also for sh and zsh), fish, json"
        )
    required = list_settings(machine)
    kept = [one for one in required if not one.is_prepended and one.name in machine.env]
    fresh = [one for one in required if one not in kept]
    if shell == "json":
        return _format_json(machine, fresh, kept, language)
    written = SHELLS[shell]
    lines = []
    for one in fresh:
        lines += [
            f"# {getattr(one.reason, language)}",
            (written.format_prepend if one.is_prepended else written.format_set)(one.name, one.value),
        ]
    lines += [_format_kept(machine, one, language) for one in kept]
    if machine.has_npu and not machine.is_simulated and cann.find_active_cann(machine) is None:
        lines.append(f"# {getattr(_NO_CANN_INSTALLED, language)}")
    if not required:
        lines.append(f"# {getattr(_NOTHING_WHEN_SIMULATED if machine.is_simulated else _NOTHING_TO_SET, language)}")
    if explain:
        lines += ["#", f"# {getattr(_DISCOURAGED_HEADING, language)}"]
        lines += [
            f"#   {what}{getattr(_COLON, language)}{getattr(reason, language)}" for what, reason in DISCOURAGED_SETTINGS
        ]
    return "\n".join(lines) + "\n"


_NOTHING_TO_SET = LocalizedText("nothing to set: no NPU and no GPU here", "无需设置：本机没有 NPU 和 GPU")
_NO_CANN_INSTALLED = LocalizedText(
    "nothing for CANN: none in /usr/local/Ascend or ~/Ascend; `anabatic doctor` says what to install",
    "没有 CANN 的变量：/usr/local/Ascend 和 ~/Ascend 里都没有 CANN；`anabatic doctor` 会说明该装什么",
)
_NOTHING_WHEN_SIMULATED = LocalizedText(
    "nothing to set: `anabatic sim` sets what a simulated NPU needs",
    "无需设置：`anabatic sim` 已设好模拟 NPU 所需的变量",
)
_COLON = LocalizedText(": ", "：")
_DISCOURAGED_HEADING = LocalizedText("not set, although guides do:", "以下不设置，尽管一些教程会设：")
_ALREADY_SET, _KEPT_SUGGESTED = (
    LocalizedText("already so", "已是该值"),
    LocalizedText("kept; suggested:", "保留；建议值："),
)


def _format_kept(machine: TargetMachine, one: EnvSetting, language: Language) -> str:
    current = machine.env[one.name]
    excerpt = " ".join(current.split())[:200]
    return (
        f"# {one.name}={excerpt}  ({getattr(_ALREADY_SET, language)})"
        if current == one.value
        else (f"# {one.name}={excerpt}  ({getattr(_KEPT_SUGGESTED, language)} {one.value})")
    )


def _format_json(machine: TargetMachine, fresh: list[EnvSetting], kept: list[EnvSetting], language: Language) -> str:
    settings = {
        "set": [
            {"name": one.name, "value": one.value, "prepend": one.is_prepended, "why": getattr(one.reason, language)}
            for one in fresh
        ],
        "kept": [{"name": one.name, "value": machine.env[one.name], "suggested": one.value} for one in kept],
        "not_set": [{"what": what, "why": getattr(reason, language)} for what, reason in DISCOURAGED_SETTINGS],
    }
    return json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
