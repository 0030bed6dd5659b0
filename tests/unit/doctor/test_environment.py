"""`anabatic env`: what a shell makes of it, that a second time adds nothing, and that the doctor agrees."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from anabatic.core.errors import ConfigError
from anabatic.doctor import shell_environment
from anabatic.doctor.check_runner import run_checks
from anabatic.doctor.shell_environment import DISCOURAGED_SETTINGS
from anabatic.doctor.target_machine import TargetMachine
from unit.doctor import roots


def bare(tmp_path: Path) -> TargetMachine:
    """A healthy machine on which nobody sourced anything."""
    return roots.a2().but(unset=tuple(roots.sourced(roots.OLD))).machine(tmp_path)


def evaluated(shell: str, lines: str, env: dict[str, str]) -> dict[str, str]:
    """Return the variables after a shell has evaluated `lines`."""
    run = subprocess.run([shell, "-c", f"{lines}\nenv -0"], env=env, capture_output=True, text=True, check=True)
    assert not run.stderr
    return dict(pair.split("=", 1) for pair in run.stdout.split("\0") if pair)


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "sh", "zsh", "fish"])
def test_a_shell_evaluates_it(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    machine = bare(tmp_path)
    outer = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/mine with blank"}
    machine.env = dict(outer)
    kind = "fish" if shell == "fish" else "bash"
    for explain in (False, True):
        inner = evaluated(shell, shell_environment.render_settings(machine, kind, explain, "en"), outer)
        assert inner["ASCEND_OPP_PATH"] == f"{roots.OLD}/opp"
        assert inner["LD_LIBRARY_PATH"] == f"{roots.OLD}/lib64:{roots.DRIVER}/lib64:/mine with blank"
        assert inner["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
        assert inner["HCCL_CONNECT_TIMEOUT"] == "1200"
        assert inner["OMP_NUM_THREADS"] == "8"
        machine.env = inner
        again = shell_environment.render_settings(machine, kind, explain, "en")
        assert all(line.startswith("#") for line in again.splitlines())
        machine.env = dict(outer)


def test_the_doctor_is_content_with_it(tmp_path: Path) -> None:
    machine = bare(tmp_path)
    machine.env = {"PATH": "/usr/bin"}
    assert "set_env.not_sourced" in roots.ids(run_checks(machine), "FAIL")
    told = json.loads(shell_environment.render_settings(machine, "json", False, "en"))
    machine.env = {"PATH": "/usr/bin", **{row["name"]: row["value"] for row in told["set"]}}
    assert roots.ids(run_checks(machine), "WARN", "FAIL") == set()


def test_what_a_user_set_is_kept(tmp_path: Path) -> None:
    machine = roots.a2().but(env={"HCCL_CONNECT_TIMEOUT": "600\nx", "PYTORCH_ALLOC_CONF": "y"}).machine(tmp_path)
    machine.env = {**machine.env, "HCCL_CONNECT_TIMEOUT": "600\nrm -r"}
    told = shell_environment.render_settings(machine, "bash", False, "en")
    assert "# HCCL_CONNECT_TIMEOUT=600 rm -r  (kept; suggested: 1200)" in told
    assert "PYTORCH_NPU_ALLOC_CONF" not in told  # beside PYTORCH_ALLOC_CONF it would be an error


def test_several_interfaces(tmp_path: Path) -> None:
    faces = {"lo": ["127.0.0.1"], "bond0": ["10.0.0.7"], "eth0": ["192.168.0.7"], "docker0": ["172.17.0.1"]}
    told = shell_environment.render_settings(
        roots.a2().but(facts={"interfaces": faces}).machine(tmp_path), "bash", False, "zh"
    )
    assert "export HCCL_SOCKET_IFNAME==eth0" in told or "export HCCL_SOCKET_IFNAME='=eth0'" in told
    assert "export GLOO_SOCKET_IFNAME=eth0" in told


def test_an_old_driver_has_no_expandable_segments(tmp_path: Path) -> None:
    made = roots.a2().but(files={f"{roots.DRIVER}/version.info": "Version=22.0.4\n"})
    assert "expandable" not in shell_environment.render_settings(made.machine(tmp_path), "bash", False, "en")


@pytest.mark.parametrize("base", [roots.gpu, roots.cpu, roots.empty])
def test_other_machines(base: object, tmp_path: Path) -> None:
    assert callable(base)
    machine = base().machine(tmp_path)
    told = shell_environment.render_settings(machine, "bash", True, "zh")
    assert "ASCEND_HOME_PATH" not in told
    assert all(name in told for name, _ in DISCOURAGED_SETTINGS)
    json.loads(shell_environment.render_settings(machine, "json", True, "zh"))


def test_a_shell_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='--shell is "fishy". Did you mean "fish"'):
        shell_environment.render_settings(roots.cpu().machine(tmp_path), "fishy", False, "en")
