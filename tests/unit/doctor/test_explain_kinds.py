"""Kinds of faults: the answer follows from the structure of the log, not from a line that was seen before."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from anabatic.doctor import knowledge_base
from anabatic.doctor.explain import diagnosis, npu_tables, rendering
from anabatic.doctor.explain.diagnosis import LogFinding

HERE = Path(__file__).parent
KINDS: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "explain_kinds.yaml").read_text(encoding="utf-8"))
KNOWN = knowledge_base.load_knowledge()
FORMS = (
    "ModuleNotFoundError: No module named '{}'",
    "RuntimeError: No module named '{}.part'",
    "No module named '{}'",
    "RuntimeError: Failed to import x.y because of the following error: No module named '{}'",
    "importlib.metadata.PackageNotFoundError: No package metadata was found for {}",
    "The '{}>=1.2' distribution was not found and is required by this application",
    "ImportError: this feature needs {}, please pip install {}",
    "ValueError: {} is required but not installed",
    "ERROR: No matching distribution found for {}==1.2",
)
"""Ways in which programs say that a package is missing."""
CUDA_PACKAGES = (
    "flash_attn",
    "transformer_engine",
    "apex",
    "xformers",
    "bitsandbytes",
    "flashinfer",
    "nvidia-nccl-cu12",
)
TABLE = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 98.1        46                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          61354/ 65536         |
| 5     910B3               | {health:<13} | 87.9        {temp}                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          {used:<5} / 65536         |
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| 0       0                 | 12345         | python                   | 58000                   |
| No running processes found in NPU 5                                                            |
"""


def first(log: str) -> LogFinding:
    found = diagnosis.explain_text(log, KNOWN).first_cause
    assert found is not None, log
    return found


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_comes_first(name: str) -> None:
    kind = KINDS[name]
    found = diagnosis.explain_text(textwrap.dedent(kind["log"]), KNOWN).first_cause
    assert (found.entry.id if found else "none") in kind["want"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("package", CUDA_PACKAGES)
def test_a_package_without_an_npu_build_is_never_to_be_installed(form: str, package: str) -> None:
    if "module" in form and "-" in package:
        package = "nvidia.nccl"
    entry = first(f"step 1\n{form.format(package, package)}\nstep 2\n").entry
    assert entry.id in ("no-npu-build", "hf-flash-attn", "hf-quantised")
    assert all("pip install" not in entry.explanations[language].fix for language in knowledge_base.LANGUAGES)


@pytest.mark.parametrize(
    "call", ["HcclGetRootInfo(&id)", "hcclCommInitRootInfoConfig(n, &r)", "HcclCommInitClusterInfo(p)"]
)
@pytest.mark.parametrize("number", [1, 2, 4, 5, 6, 7, 9, 11, 12, 13, 14, 15, 19, 21])
def test_the_number_of_a_call_that_makes_a_group_is_a_detail(call: str, number: int) -> None:
    line = f"RuntimeError: f.ts:7 HCCL function error: {call}, error code is {number}\n"
    report = diagnosis.explain_text(line, KNOWN)
    assert [finding.entry.id for finding in report.findings][0] == "hccl-init"
    assert report.findings[1].code == f"hccl:{number}" and report.findings[1].role == "wrapper"
    collective = diagnosis.explain_text(line.replace(call, "HcclAllReduce(x)"), KNOWN).findings
    assert collective[0].code == f"hccl:{number}" and "hccl-init" not in [one.entry.id for one in collective]


def test_memory_means_the_same_in_a_call_that_makes_a_group() -> None:
    line = "RuntimeError: f.ts:7 HCCL function error: hcclCommInitRootInfo(n), error code is 3\n"
    assert first(line).entry.id == "hccl-3"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("value 0 for parameter blockDim is invalid.\n"
         "  the stride must be 1 [FUNC:OwnTiling][FILE:own.cpp][LINE:7]\n  Own do tiling failed, ret is -1.\n",
         "the stride must be 1"),
        ("  Own do tiling failed, ret is -1.\n  TraceBack\n  x is larger than y[FUNC:Check][FILE:own.cpp][LINE:7]\n",
         "x is larger than y"),
        ('  File "a.py", line 7, in f\n    assert rows > 0\nAssertionError\n', "assert rows > 0"),
        ("RuntimeError: Failed to import a.b because of the following error (look up to see its traceback):\n"
         "the frobnicator has no gloop\n", "the frobnicator has no gloop"),
        ("EI0002: the wait execution of the Notify register times out. Reason: no record\nReason: other\n", ""),
    ],
)  # fmt: skip
def test_the_line_beside_the_headline_is_shown(log: str, reason: str) -> None:
    found = diagnosis.explain_text(log, KNOWN).first_cause
    assert (found.first_sighting.reason if found else "") == reason


@pytest.mark.parametrize(
    ("prefix", "role"),
    [("WARNING ", "notice"), ("(Worker pid=7) WARNING ", "notice"), ("(Worker pid=7) ERROR ", "cause")],
)
def test_a_warning_of_a_process_is_a_note(prefix: str, role: str) -> None:
    log = f"{prefix}11-20 10:42:34 x.py:7] Failed to import own: libown.so: cannot open shared object file\n"
    assert first(log).role == role


@pytest.mark.parametrize(
    ("health", "temp", "used", "codes"),
    [
        ("OK", 41, 3354, []),
        ("Alarm", 41, 3354, ["npu-table-health"]),
        ("Warning", 41, 3354, ["npu-table-warning"]),
        ("OK", 97, 3354, ["npu-table-hot"]),
        ("OK", 41, 60354, ["npu-table-memory"]),
        ("Critical", 97, 60354, ["npu-table-health", "npu-table-hot", "npu-table-memory"]),
    ],
)
def test_a_pasted_table_is_read(health: str, temp: int, used: int, codes: list[str]) -> None:
    log = "my job hangs:\n" + TABLE.format(health=health, temp=temp, used=used)
    findings = diagnosis.explain_text(log, KNOWN).findings
    assert [finding.code for finding in findings] == codes
    for finding in findings:
        assert finding.first_sighting.line == 7 and finding.first_sighting.reason.startswith("NPU 5: health ")
        assert f"{used} of 65536 MB used, no process listed" in finding.first_sighting.reason


def test_tables_of_healthy_machines_say_nothing(shared_data: Path) -> None:
    paths = sorted((shared_data / "npu-smi").glob("info-910b*.txt"))
    if not paths:
        pytest.skip("no tables beside the checkout")
    for path in paths:
        block = path.read_bytes()
        if b"Warning" not in block and b"Alarm" not in block:
            assert [fault.code for fault in npu_tables.find_table_faults(block) if "health" in fault.code] == []


def test_own_entries_name_packages_and_frames(tmp_path: Path) -> None:
    said = '{meaning: "It failed.", cause: "Night.", fix: "Wait."}'
    own = tmp_path / "own.yaml"
    own.write_text(
        f'entries:\n  - id: our-package\n    packages: ["our-*"]\n    en: {said}\n'
        f'  - id: our-loader\n    instead_of: ["python:ValueError"]\n    above: ["in our_load"]\n    en: {said}\n'
    )
    known = knowledge_base.load_knowledge((own,))
    missing = diagnosis.explain_text("ModuleNotFoundError: No module named 'our_tools.x'\n", known).first_cause
    assert missing is not None and missing.entry.id == "our-package"
    frames = 'Traceback (most recent call last):\n  File "a.py", line 7, in {}\n    x()\nValueError: bad\n'
    for name, entry in (("our_load", "our-loader"), ("other", "python:ValueError")):
        found = diagnosis.explain_text(frames.format(name), known).first_cause
        assert found is not None and found.entry.id == entry


def test_what_stands_beside_is_in_both_reports(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("  Own do tiling failed, ret is -1.\n  x is larger than y[FUNC:Check][FILE:own.cpp][LINE:7]\n")
    report = diagnosis.explain_logs((str(path),), KNOWN)
    assert rendering.report_to_dict(report, "en")["first"]["seen"][0]["beside"] == "x is larger than y"
    console = Console(file=io.StringIO(), width=120, highlight=False)
    rendering.print_report(report, "en", console)
    assert "beside it     x is larger than y" in console.file.getvalue()
