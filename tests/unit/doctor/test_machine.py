"""The machine itself: programs that hang, files that are odd, and that nothing makes the doctor fall over."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from anabatic.core import language
from anabatic.core.errors import ConfigError
from anabatic.doctor import check_report, installed_packages, machine_facts, root_files, subprocess_runner
from anabatic.doctor.check_runner import CHECKS, get_exit_code, run_checks
from anabatic.doctor.checks import npu_status
from anabatic.doctor.checks.variable_rules import VARIABLE_RULES
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.root_files import RootFiles
from anabatic.doctor.target_machine import RecordedFacts, TargetMachine, open_root, parse_environ
from unit.doctor import roots

FACTS = (
    "packages",
    "python",
    "cpu",
    "limits",
    "npu-smi",
    "disk",
    "interfaces",
    "denied",
    "hccn",
    "ecc",
    "nvidia-smi",
    "import",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = [row.name for row in VARIABLE_RULES]
NAMES += ["ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES", "PYTORCH_NPU_ALLOC_CONF", "OMP_NUM_THREADS", "MASTER_PORT"]
NAMES += ["HCCL_SOCKET_IFNAME", "HCCL_IF_IP", "LD_LIBRARY_PATH", "HOME", "RANK_TABLE_FILE", "PYTORCH_ALLOC_CONF"]


def judged(found: list[CheckResult]) -> None:
    """The report can be shown in every form."""
    for words in ("en", "zh"):
        for width in (20, 40, 100):
            assert check_report.render_report(found, words, width, colour=True)
        json.loads(check_report.render_json(found, words, "0", "/"))
    assert get_exit_code(found, strict=True) in (0, 1, 2)


def test_an_npu_smi_that_this_user_may_not_run(tmp_path: Path) -> None:
    program = tmp_path / "npu-smi"
    program.write_text("#!/bin/sh\n")
    machine = TargetMachine(RootFiles(), {"PATH": str(tmp_path)}, RecordedFacts({}))
    machine.npu_node_numbers = [0]
    assert roots.ids(list(npu_status.check_npu_smi(machine))) == {"npu-smi.denied"}
    program.chmod(0o755)
    assert roots.ids(list(npu_status.check_npu_smi(machine))) == {"npu-smi.hung"}  # nothing was told in time


def test_packages_of_a_mounted_root_are_those_of_its_active_environment(tmp_path: Path) -> None:
    for place, version in (("opt/conda", "2.6.0"), ("data/own", "2.7.1+cpu")):
        folder = tmp_path / place / "lib/python3.10/site-packages"
        (folder / f"torch-{version}.dist-info").mkdir(parents=True)
        (folder / "torch_npu-2.6.0.post3.dist-info").mkdir()
        (folder / "not_torch-1-info").mkdir()
    (tmp_path / "proc/1").mkdir(parents=True)
    assert open_root(tmp_path).package_versions == {"torch": "2.6.0", "torch-npu": "2.6.0.post3"}
    assert not any("conda" in path for path in open_root(tmp_path).files.reads)  # nor does a bundle hold such names
    (tmp_path / "proc/1/environ").write_bytes(b"A=1\0VIRTUAL_ENV=/data/own\0")
    assert open_root(tmp_path).package_versions["torch"] == "2.7.1+cpu"
    assert open_root(tmp_path).get_fact("python", dict)["version"] == "3.10"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return roots.a3().write(tmp_path_factory.mktemp("healthy"))


FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(env=st.dictionaries(st.sampled_from(NAMES), st.text(max_size=30) | st.from_regex(r"[0-9,: ={}%-]{0,20}")))
def test_any_environment(healthy: Path, env: dict[str, str]) -> None:
    machine = open_root(healthy)
    machine.env = {**machine.env, **env}
    judged(run_checks(machine))


@FUZZ
@given(told=st.dictionaries(st.sampled_from(FACTS), JSON))
def test_any_facts(healthy: Path, told: dict[str, object]) -> None:
    machine = open_root(healthy)
    machine.facts = RecordedFacts({**{name: machine.facts.get(name) for name in FACTS}, **told})
    judged(run_checks(machine))


@FUZZ
@given(data=st.data())
def test_any_file_contents(healthy: Path, data: st.DataObject) -> None:
    class Odd(RootFiles):
        def text(self, path: str) -> str | None:
            there = super().text(path)
            if there is None or not data.draw(st.booleans()):
                return there
            drawn: str = data.draw(st.text(max_size=40) | st.just("9" * 5000) | st.just(there[: len(there) // 2]))
            return drawn

    machine = open_root(healthy)
    machine.files = Odd(str(healthy))
    judged(list(line for check in (npu_status.check_npu_smi, *CHECKS) for line in check(machine)))


def test_bytes_folders_and_pipes_in_the_place_of_files(tmp_path: Path) -> None:
    root = roots.a2().write(tmp_path)
    (root / "proc/meminfo").write_bytes(bytes(range(256)) * 9000)
    (root / "proc/net/tcp").unlink()
    os.mkfifo(root / "proc/net/tcp")
    (root / "etc/hccn.conf").unlink()
    (root / "etc/hccn.conf").mkdir()
    (root / "anabatic-doctor/facts.json").write_text("[" * 100_000)
    (root / "anabatic-doctor/environ").write_bytes(b"\xff\xfe=1\nHOME=\xff\nNOTHING\n=x\n")
    judged(run_checks(open_root(root)))


def test_collected_outputs_of_npu_smi(healthy: Path, shared_data: Path) -> None:
    samples = sorted((shared_data / "npu-smi").glob("*.txt"))
    if not samples:
        pytest.skip("the collected outputs of npu-smi are not here")
    for sample in samples:
        machine = open_root(healthy)
        machine.facts = RecordedFacts({"npu-smi": {"code": 0, "text": sample.read_text(encoding="utf-8")}})
        npu_status.record_npu_notes(machine)
        found = [
            line
            for check in (npu_status.check_npu_smi, npu_status.check_health, npu_status.check_processes)
            for line in check(machine)
        ]
        table = sample.name.startswith("info-") and not sample.name.startswith("info-vnpu")
        assert ("npu-smi.ok" in roots.ids(found)) == table, sample.name
        assert len(found) < 6  # devices with the same fault share a line
        judged(found)


def test_environ_of_the_first_process(tmp_path: Path) -> None:
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/environ").write_bytes(b"ASCEND_LAUNCH_BLOCKING=1\0HCCL_ALGO=ring\0")
    machine = open_root(tmp_path)
    assert machine.env == {"ASCEND_LAUNCH_BLOCKING": "1", "HCCL_ALGO": "ring"}
    assert roots.ids(run_checks(machine), "WARN") == {"variables.harmful"}
    assert parse_environ("A=1=2\n\nodd line\n9=x\n") == {"A": "1=2"}


@pytest.mark.process
def test_a_program_that_hangs_is_left(tmp_path: Path) -> None:
    script = tmp_path / "npu-smi"
    script.write_text("#!/bin/sh\necho half\nsleep 60 & sleep 60\n")
    script.chmod(0o755)
    started = time.monotonic()
    output = subprocess_runner.run_program([str(script)], 2.0)
    assert (output.code, output.text) == (None, "half\n")
    assert time.monotonic() - started < 30  # not the minute that it sleeps
    assert subprocess_runner.run_program([str(tmp_path / "none")], 1).code == 127


def test_a_check_that_hangs_is_reported(tmp_path: Path) -> None:
    machine = roots.cpu().machine(tmp_path)

    def hangs(machine: TargetMachine) -> list[CheckResult]:
        time.sleep(30)
        return []

    found = run_checks(machine, 1.0, [CHECKS[0], hangs])  # type: ignore[list-item]
    assert [line.finding_type.id for line in found] == ["npu.none", "time.stopped"]


def test_what_is_left_out_of_a_full_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_files, "MAX_FOLDER_NAMES", 3)
    monkeypatch.setattr(installed_packages, "_MAX_FOLDERS", 1)
    for number in range(5):
        folder = tmp_path / f"sys/bus/pci/devices/0000:{number:02x}:00.0"
        folder.mkdir(parents=True)
        for name, value in (("vendor", "0x19e5"), ("class", "0x120000"), ("device", "0xd802")):
            (folder / name).write_text(f"{value}\n")
    for place in ("a", "b"):
        (tmp_path / f"home/{place}/miniconda3/envs/x/lib/python3.11/site-packages").mkdir(parents=True)
    found = run_checks(open_root(tmp_path))
    said = [line.describe_result("en") for line in found if line.finding_type.id == "time.cut"]
    assert "/sys/bus/pci/devices: only the first 3 of 5 names were looked at" in said
    assert any("miniconda3" in line and "first 1 of" in line for line in said)


@pytest.mark.process
def test_npu_smi_on_the_path_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = roots.smi(2)["text"]
    script = tmp_path / "npu-smi"
    script.write_text(f"#!{sys.executable}\nimport os\nprint(os.environ['LC_ALL'], os.environ['LD_LIBRARY_PATH'])\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = machine_facts.run_npu_smi(["info"], 120, {"LD_LIBRARY_PATH": "/mine"})
    assert told is not None
    assert told["text"].startswith("C /mine:/usr/local/Ascend/driver/lib64")
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    told = machine_facts.run_npu_smi(["info"], 120, {})
    assert told is not None
    assert told["text"].strip() == text.strip()


@pytest.mark.process
def test_the_child_tells_how_far_it_came(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '9.9'\nclass version: cuda = None\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert machine_facts.run_import_probe([], 120, env) == {"stage": "done", "torch": "9.9", "cuda": None}
    broken = (
        "try:\n    import nothing_of_that_name\nexcept ImportError as error:\n    raise RuntimeError('x') from error\n"
    )
    (tmp_path / "torch_npu.py").write_text(broken)
    told = machine_facts.run_import_probe(["npu"], 120, env)
    assert told["stage"] == "torch_npu"
    assert told["error"] == "ModuleNotFoundError: No module named 'nothing_of_that_name'"
    (tmp_path / "torch_npu.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    assert machine_facts.run_import_probe(["npu"], 120, env)["signal"] == 11
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    assert machine_facts.run_import_probe([], 2.0, env)["hung"] == 2
    assert machine_facts.parse_probe_output('anabatic-probe:{"stage": "to\nanabatic-probe:[1]\n') == {}


@pytest.mark.process
def test_libraries_are_loaded_without_the_import(tmp_path: Path) -> None:
    told = machine_facts.run_import_probe([], 120, dict(os.environ))
    assert told["loaded"] is True and told["stage"] == "done"
    assert told["torch"] == importlib.metadata.version("torch")
    torn = tmp_path / "torch"
    (torn / "lib").mkdir(parents=True)
    for name in ("lib/libtorch_global_deps.so", f"_C.{sysconfig.get_config_var('SOABI')}.so"):
        (torn / name).write_bytes(b"not a library")
    (torn / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: file too short')\n")
    told = machine_facts.run_import_probe([], 120, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert told["error"] == "ImportError: libtorch_cpu.so: file too short" and "loaded" not in told


def test_language() -> None:
    assert language.choose_language(None, {"LANG": "zh_CN.UTF-8"}) == "zh"
    assert language.choose_language(None, {"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}) == "en"
    assert language.choose_language("zh", {}) == "zh"
    with pytest.raises(ConfigError, match='--lang is "cn"'):
        language.choose_language("cn", {})


@given(st.text(max_size=200), st.integers(8, 60))
def test_wrapping_keeps_the_words(text: str, width: int) -> None:
    shown = check_report.wrap_text(check_report.strip_control_characters(text), width)
    assert all(cell_len(line) <= width for line in shown)
    assert "".join("".join(shown).split()) == "".join(check_report.strip_control_characters(text).split())
