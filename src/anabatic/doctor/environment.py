"""`anabatic env`: the variables that this machine needs, each with its reason, and those that guides set in vain."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from anabatic.core.errors import ConfigError
from anabatic.core.text import did_you_mean
from anabatic.device.table import DEVICES
from anabatic.doctor import cann, hardware, host, network, versions
from anabatic.doctor.language import Language
from anabatic.doctor.line import Text
from anabatic.doctor.machine import Machine

_DRIVER = "/usr/local/Ascend/driver/lib64"
_EXPANDABLE_DRIVER = (23, 0, 0, 0)
"""First driver with expandable segments (Ascend/pytorch docs, PYTORCH_NPU_ALLOC_CONF.md)."""


@dataclass(frozen=True)
class Setting:
    """A variable to set."""

    name: str
    value: str
    why: Text
    first: bool = False
    """The value goes before what the variable holds already."""


_CANN = Text("CANN, as its set_env.sh", "CANN，与其 set_env.sh 相同")
_LIBRARIES = ("lib64", "lib64/plugin/opskernel", "lib64/plugin/nnengine",
              "opp/built-in/op_impl/ai_core/tbe/op_tiling/lib/linux/{arch}", "tools/aml/lib64")  # fmt: skip
_PROGRAMS = ("bin", "compiler/ccec_compiler/bin", "tools/ccec_compiler/bin")
_MODULES = ("python/site-packages", "opp/built-in/op_impl/ai_core/tbe")
"""Folders that set_env.sh of CANN 8.0 to 9.0 puts before the search paths."""


def settings(machine: Machine) -> list[Setting]:
    """Return what to set on this machine; folders that a search path holds already are left out."""
    if machine.has_npu and not machine.simulated:
        return [*_cann(machine), *_npu(machine), *_threads(machine)]
    if machine.has_gpu:
        name, value = DEVICES["cuda"].alloc_env
        return [Setting(name, value, _FRAGMENTS), *_threads(machine)]
    return []


_START = Text("seconds that ranks wait for each other at the start; 120, the default, is short when one loads data",
              "各进程启动时互相等待的秒数；默认 120 秒，有进程在读数据时不够")  # fmt: skip
_FRAGMENTS = Text("segments that grow: less memory lost to fragmentation", "可扩展内存段：减少碎片浪费")


def _cann(machine: Machine) -> list[Setting]:
    found = cann.installed(machine)
    if found is None:
        return []
    root = found.root
    arch = str(machine.fact("python", dict).get("machine") or "aarch64")
    plain = {
        "ASCEND_TOOLKIT_HOME": root,
        "ASCEND_HOME_PATH": root,
        "ASCEND_OPP_PATH": f"{root}/opp",
        "ASCEND_AICPU_PATH": root,
        "TOOLCHAIN_HOME": f"{root}/toolkit",
    }
    told = [Setting(name, value, _CANN) for name, value in plain.items()]
    libraries = [f"{root}/{one.format(arch=arch)}" for one in _LIBRARIES]
    libraries += [_DRIVER, f"{_DRIVER}/common", f"{_DRIVER}/driver"]
    places = (
        ("LD_LIBRARY_PATH", libraries, Text("libraries of CANN and of the driver", "CANN 和驱动的库")),
        ("PYTHONPATH", [f"{root}/{one}" for one in _MODULES], Text("the operator compiler", "算子编译器")),
        ("PATH", [f"{root}/{one}" for one in _PROGRAMS], Text("programs of CANN", "CANN 的程序")),
    )
    for name, folders, why in places:
        held = machine.env.get(name, "").split(":")
        missing = [folder for folder in folders if folder not in held and machine.files.folder(folder)]
        if missing:
            told.append(Setting(name, ":".join(missing), why, first=True))
    return told


def _npu(machine: Machine) -> list[Setting]:
    told = []
    name, value = DEVICES["npu"].alloc_env
    driver = versions.key(hardware.driver_version(machine))
    if "PYTORCH_ALLOC_CONF" not in machine.env and (driver is None or driver >= _EXPANDABLE_DRIVER):
        told.append(Setting(name, value, _FRAGMENTS))
    if len(machine.nodes) > 1:
        told += [Setting(variable, wanted, _START) for variable, wanted in DEVICES["npu"].start_env]
        if len(useful := network.outward(machine)) > 1:
            why = Text(f"of {', '.join(useful)} the one with the default route; HCCL takes the first by name",
                       f"{', '.join(useful)} 中带默认路由的一个；HCCL 按名字取第一个")  # fmt: skip
            told += [Setting("HCCL_SOCKET_IFNAME", f"={useful[0]}", why)]
            told += [Setting(one, useful[0], why) for one in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")]
    return told


def _threads(machine: Machine) -> list[Setting]:
    if not machine.fact("cpu", dict):
        return []
    why = Text(
        "cores divided by devices, at most 8: by default each process takes all",
        "核数除以设备数，最多 8：默认每个进程占满所有核",
    )
    return [Setting("OMP_NUM_THREADS", str(host.best_threads(machine)), why)]


NOT_SET: tuple[tuple[str, Text], ...] = (
    ("ASCEND_LAUNCH_BLOCKING=1", Text(
        "no memory optimisation: the switch for debugging makes every operator wait. For memory: a smaller batch, "
        "recomputation, expandable segments",
        "不是内存优化：它是让每个算子同步等待的调试开关。省内存请用更小的批、重计算、可扩展内存段")),
    ("ASCEND_GLOBAL_LOG_LEVEL=0", Text(
        "0 is DEBUG, not ERROR, and slows training a lot; ERROR is 3 and the default",
        "0 是 DEBUG 而不是 ERROR，会大幅拖慢训练；ERROR 是 3，也是默认值")),
    ("ASCEND_SLOG_PRINT_TO_STDOUT=1", Text(
        "then no log is written to ~/ascend/log, which is where an error is looked for afterwards",
        "设了它就不再写 ~/ascend/log，而事后正要到那里查错误")),
    ("ASCEND_RT_VISIBLE_DEVICES=0,...,7", Text(
        "unset already means all; set it to choose some, ascending, without blanks",
        "不设置就是全部；只在挑选设备时设置，递增且无空格")),
    ("HCCL_WHITELIST_DISABLE=1", Text("has been the default for years", "多年来已是默认值")),
    ("HCCL_IF_IP=$(hostname -I ...)", Text(
        "the first address may be docker's; HCCL_SOCKET_IFNAME names the interface and suits every machine",
        "第一个地址可能是 docker 的；用 HCCL_SOCKET_IFNAME 指定网卡，各机器通用")),
    ("HCCL_EXEC_TIMEOUT=1800", Text(
        "is below the default of 1836 and must stay below HCCL_EVENT_TIMEOUT; raise it only for a long phase of one",
        "低于默认值 1836，且必须小于 HCCL_EVENT_TIMEOUT；只有单个进程长时间独占时才需要调大")),
    ("NCCL_TIMEOUT, CUDA_VISIBLE_DEVICES, PYTORCH_CUDA_ALLOC_CONF", Text(
        "mean nothing on an NPU: HCCL_CONNECT_TIMEOUT, ASCEND_RT_VISIBLE_DEVICES, PYTORCH_NPU_ALLOC_CONF do",
        "对 NPU 无效：应为 HCCL_CONNECT_TIMEOUT、ASCEND_RT_VISIBLE_DEVICES、PYTORCH_NPU_ALLOC_CONF")),
    ("TASK_QUEUE_ENABLE=2", Text(
        "faster where the host is the bottleneck, and takes more device memory: try it, do not assume it",
        "主机是瓶颈时更快，但占用更多设备内存：试过再用")),
    ("CPU_AFFINITY_CONF=1", Text(
        "helps some hosts, and is ignored beside taskset or a cpuset: measure first",
        "对部分主机有用，但与 taskset、cpuset 同用时无效：先测再用")),
    ("HCCL_OP_EXPANSION_MODE=AIV", Text(
        "for inference with one communicator; training has several", "适用于单通信域推理；训练有多个通信域")),
    ("HCCL_ALGO=...", Text("unset, HCCL chooses by size and topology", "不设置时 HCCL 按大小和拓扑选择")),
    ("TORCH_TRANSFER_TO_NPU=1", Text(
        "anabatic asks the device table; replacing torch.cuda hides mistakes",
        "anabatic 查设备表；替换 torch.cuda 会掩盖错误")),
)  # fmt: skip
"""What guides set and this program would not (Ascend/pytorch docs, hicann/hccl hccl_env, mstt advisor rules)."""


@dataclass(frozen=True)
class Shell:
    """How a shell sets a variable."""

    plain: Callable[[str, str], str]
    first: Callable[[str, str], str]


def _fish(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Shell] = {
    "bash": Shell(
        lambda name, value: f"export {name}={shlex.quote(value)}",
        lambda name, value: f'export {name}={shlex.quote(value)}"${{{name}:+:${name}}}"',
    ),
    "fish": Shell(
        lambda name, value: f"set -gx {name} {_fish(value)}",
        lambda name, value: f"set -gx --path {name} {' '.join(map(_fish, value.split(':')))} ${name}",
    ),
}


def render(machine: Machine, shell: str, explain: bool, language: Language) -> str:
    """Return the lines for `eval`, or a JSON object; a variable that is set already keeps its value.

    Raises:
        ConfigError: there is no such shell.
    """
    if shell not in SHELLS and shell != "json":
        known = [*SHELLS, "json"]
        raise ConfigError(
            f'--shell is "{shell}".{did_you_mean(shell, known)}', "one of bash (also for sh and zsh), fish, json"
        )
    wanted = settings(machine)
    kept = [one for one in wanted if not one.first and one.name in machine.env]
    fresh = [one for one in wanted if one not in kept]
    if shell == "json":
        return _json(machine, fresh, kept, language)
    written = SHELLS[shell]
    lines = []
    for one in fresh:
        lines += [
            f"# {getattr(one.why, language)}",
            (written.first if one.first else written.plain)(one.name, one.value),
        ]
    lines += [_note(machine, one, language) for one in kept]
    if machine.has_npu and not machine.simulated and cann.installed(machine) is None:
        lines.append(f"# {getattr(_NO_CANN, language)}")
    if not wanted:
        lines.append(f"# {getattr(_SIMULATED if machine.simulated else _NOTHING, language)}")
    if explain:
        lines += ["#", f"# {getattr(_NOT_SET, language)}"]
        lines += [f"#   {what}{getattr(_COLON, language)}{getattr(why, language)}" for what, why in NOT_SET]
    return "\n".join(lines) + "\n"


_NOTHING = Text("nothing to set: no NPU and no GPU here", "无需设置：本机没有 NPU 和 GPU")
_NO_CANN = Text(
    "nothing for CANN: none in /usr/local/Ascend or ~/Ascend; `anabatic doctor` says what to install",
    "没有 CANN 的变量：/usr/local/Ascend 和 ~/Ascend 里都没有 CANN；`anabatic doctor` 会说明该装什么",
)
_SIMULATED = Text(
    "nothing to set: `anabatic sim` sets what a simulated NPU needs",
    "无需设置：`anabatic sim` 已设好模拟 NPU 所需的变量",
)
_COLON = Text(": ", "：")
_NOT_SET = Text("not set, although guides do:", "以下不设置，尽管一些教程会设：")
_SAME, _OTHER = Text("already so", "已是该值"), Text("kept; suggested:", "保留；建议值：")


def _note(machine: Machine, one: Setting, language: Language) -> str:
    there = machine.env[one.name]
    shown = " ".join(there.split())[:200]
    return (
        f"# {one.name}={shown}  ({getattr(_SAME, language)})"
        if there == one.value
        else (f"# {one.name}={shown}  ({getattr(_OTHER, language)} {one.value})")
    )


def _json(machine: Machine, fresh: list[Setting], kept: list[Setting], language: Language) -> str:
    told = {
        "set": [
            {"name": one.name, "value": one.value, "prepend": one.first, "why": getattr(one.why, language)}
            for one in fresh
        ],
        "kept": [{"name": one.name, "value": machine.env[one.name], "suggested": one.value} for one in kept],
        "not_set": [{"what": what, "why": getattr(why, language)} for what, why in NOT_SET],
    }
    return json.dumps(told, ensure_ascii=False, indent=2) + "\n"
