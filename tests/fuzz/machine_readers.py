"""Readers of what machines say: npu-smi, CANN's logs, /proc and /sys as the doctor sees them."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

from rich.console import Console

from anabatic.doctor import check_report, check_runner, knowledge_base, shell_environment, target_machine
from anabatic.doctor.explain import diagnosis, rendering
from anabatic.monitor.npu_smi import output_parser
from anabatic.monitor.sampler import Frame
from anabatic.monitor.sources import npu_smi_command
from fuzz.engine import Good, gzipped
from fuzz.reading import Reader
from fuzz.run_readers import show
from suite import smi_values
from unit.doctor import roots

BOARD = """\tNPU ID                         : 0
\tChip Count                     : 1

\tChip ID                        : 0
\tTemperature(C)                 : 41
\tHBM Usage Rate(%)              : 5
\tNPU Real-time Power(W)         : 93.3
"""
WATCH = "NpuID(Idx)  ChipId(Idx) Pwr(W)  Temp(C) AI Core(%)\n0           0           93.3    41      0\n"
TOPOLOGY = (
    "\t   NPU0       NPU1       CPU Affinity\n"
    "NPU0       X          HCCS       0-23\n"
    "NPU1       HCCS       X          0-23\n"
)
MAPPING = "\n".join(
    "\t" + "".join(cell.ljust(31) for cell in row) for row in (("NPU ID", "Chip ID", "Chip Logic ID"), ("0", "0", "0"))
)
PLOG = (
    "[ERROR] HCCL(2401,python):2025-01-02-03:04:05.678.901 [op_base.cc:123] [2401]errNo[0x0000000005000007] rank 3\n"
    "[ERROR] RUNTIME(2401,python):2025-01-02-03:04:06.000.001 [engine.cc:45] error code 507035\n"
    "EI0006: 2025-01-02-03:04:05.678 Getting socket times out. Reason: 1. The remote does not start\n"
    "[rank3]:[E102 03:04:07.1] torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.00 GiB\n"
    "Traceback (most recent call last):\n"
    '  File "train.py", line 3, in <module>\n    main()\n'
    "RuntimeError: ACL stream synchronize failed, error code:507018\n"
) * 3


@cache
def smi_table() -> str:
    """The table of eight devices, as the simulated npu-smi prints it, two of them at work."""
    return str(roots.smi(8, users={0: "python", 5: "vllm"})["text"])


def _outputs() -> list[Good]:
    texts = (smi_table(), BOARD, WATCH, TOPOLOGY, MAPPING)
    return [Good(f"{at}.txt", text.encode()) for at, text in enumerate(texts)]


def smi(path: Path) -> None:
    """Read an output of npu-smi, and show what it says."""
    text = path.read_bytes().decode("utf-8", "replace")
    json.dumps(smi_values.output_to_dict(output_parser.parse_output(text)))
    found = npu_smi_command.parse_snapshot(text)
    show(Frame(1, found, found.error or "", found.hint, now=1.7e9))


@cache
def machine_files() -> list[Good]:
    """Every file that the doctor looks at, of a machine of eight devices."""
    described = roots.a2()
    listed = [Good(f"root{path}", text.encode()) for path, text in described.files.items() if text]
    facts = Good("root/anabatic-doctor/facts.json", json.dumps(described.facts).encode(), "json")
    environ = "".join(f"{name}={value}\n" for name, value in (described.env or {}).items())
    return [*listed, *[facts] * len(listed), Good("root/anabatic-doctor/environ", environ.encode())]


def doctor(path: Path) -> None:
    """Look at the machine that the files describe, and say what is found."""
    root = next(one for one in path.parents if one.name == "root")
    found = check_runner.run_checks(target_machine.open_root(root), seconds=60)
    for words in ("en", "zh"):
        check_report.render_report(found, words, 80, colour=True)
        json.loads(check_report.render_json(found, words, "0", "/"))
    assert not [line for line in found if line.finding_type.id == "broken"], found
    for shell in ("bash", "json"):
        shell_environment.render_settings(target_machine.open_root(root), shell, True, "en")


def _logs() -> list[Good]:
    return [Good("plog-2401_1.log", PLOG.encode()), Good("run.log.gz", gzipped(PLOG.encode()))]


def logs(path: Path) -> None:
    """Explain a log."""
    found = diagnosis.explain_logs((str(path),), knowledge_base.load_knowledge())
    for words in ("en", "zh"):
        json.dumps(rendering.report_to_dict(found, words))
        rendering.print_report(found, words, Console(file=io.StringIO(), width=80))


SAID = {"meaning": "m", "cause": "c", "fix": "f"}
ENTRY = {"entries": [{
    "id": "own.cause", "texts": ["my own error", "it * went wrong"], "codes": ["EI0006", "507018"], "en": SAID,
    "zh": SAID, "source": "here",
}]}  # fmt: skip


def _knowledge(path: Path) -> None:
    diagnosis.explain_text(PLOG, knowledge_base.load_knowledge((path,)))


READERS = [
    Reader("npu-smi", _outputs, smi, 400),
    Reader("a machine's files", machine_files, doctor, 200),
    Reader("logs", _logs, logs, 150),
    Reader("own knowledge", lambda: [Good("own.yaml", json.dumps(ENTRY).encode(), "json")], _knowledge, 100),
]
