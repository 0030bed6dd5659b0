"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from unit.doctor import roots
from unit.doctor.states import STATES

pytestmark = pytest.mark.process


def typed(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `anabatic WORDS`."""
    env = {**os.environ, "LC_ALL": "C", "COLUMNS": "80", **variables}
    return subprocess.run(
        [sys.executable, "-m", "anabatic", *words], capture_output=True, text=True, env=env, timeout=240, check=False
    )


def root(name: str, folder: Path) -> Path:
    """Write one of the states."""
    base, change, _ = STATES[name]
    return base().but(**change).write(folder)


@pytest.mark.parametrize(
    ("state", "words", "code"),
    [
        ("healthy", ["--strict"], 0),
        ("two cann installed", [], 0),
        ("two cann installed", ["--strict"], 2),
        ("not sourced", ["--strict"], 1),
    ],
)
def test_exit_codes(state: str, words: list[str], code: int, tmp_path: Path) -> None:
    run = typed("doctor", "--root", root(state, tmp_path), *words)
    assert run.returncode == code, run.stdout + run.stderr
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert "\x1b" not in run.stdout
    assert run.stderr == ""


def test_json_in_chinese(tmp_path: Path) -> None:
    run = typed("doctor", "--root", root("not sourced", tmp_path), "--json", LC_ALL="zh_CN.UTF-8")
    told = json.loads(run.stdout)
    assert told["counts"]["FAIL"] == 1
    (line,) = (row for row in told["lines"] if row["status"] == "FAIL")
    assert line["id"] == "set_env.not_sourced"
    assert line["found"].startswith("未设置")
    assert line["fix"] == "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def test_this_machine_and_its_bundle(tmp_path: Path) -> None:
    run = typed("doctor", "--json", "--bundle", tmp_path / "out.tar.gz", HF_TOKEN="hf_abcdefghijklmnopqrstuvwxyz")
    assert run.returncode in (0, 1), run.stderr
    ids = {row["id"] for row in json.loads(run.stdout)["lines"]}
    assert ids & {"import.ok", "import.loads", "import.npu", "import.gpu", "import.hung"}
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        file = tar.extractfile("anabatic-bundle/anabatic-doctor/environ")
        assert file is not None
        assert "HF_TOKEN=[removed]" in file.read().decode()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["doctor", "--root", "/nowhere"], "--root is /nowhere, which is no folder"),
        (["doctor", "--lang", "cn"], '--lang is "cn"'),
        (["doctor", "--stric"], 'unknown option "--stric". Did you mean "--strict"?'),
        (["env", "--shell", "tcsh"], '--shell is "tcsh"'),
    ],
)
def test_mistakes(words: list[str], error: str) -> None:
    run = typed(*words)
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {error}")
    assert "hint: " in run.stderr
    assert run.stdout == ""


def test_env(tmp_path: Path) -> None:
    run = typed("env", "--root", roots.a2().but(unset=tuple(roots.sourced(roots.OLD))).write(tmp_path), "--lang", "zh")
    assert run.returncode == 0
    assert f"export ASCEND_OPP_PATH={roots.OLD}/opp" in run.stdout
    assert "# 算子编译器" in run.stdout
