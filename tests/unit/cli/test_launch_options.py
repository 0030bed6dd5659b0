"""What is wrong with the options of `anabatic launch` is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabatic.cli import app
from anabatic.config.sections.launch import MAX_SECONDS, LaunchSettings
from anabatic.core.errors import ConfigError
from anabatic.launch.hosts import hostfile, remote_machine, ssh_connection


def run(*words: str) -> int:
    """Run `anabatic launch` and return its exit code."""
    with pytest.raises(SystemExit) as stop:
        app.main(["launch", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "0"], "--nproc is 0"),
        (["--nproc", ""], '--nproc is ""'),
        (["--nproc", "257"], "--nproc is 257"),
        (["--nnodes", "2", "--node-rank", "0", "--master-addr", "a", "--master-port", "0"], "--master-port is 0"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv", "127.0.0.1:0"], "--master-port is 0"),
        (["--nnodes", "10000", "--master-addr", "127.0.0.1"], "--nnodes is 10000"),
        (["--join-seconds", "0.4"], "--join-seconds is 0.4"),
        (["--join-seconds", "1e300"], "--join-seconds is 1e+300"),
        (["--nnodes", "1:4", "--master-addr", "127.0.0.1", "--check"], "--check needs the place of this machine"),
        (["slurm", "--nproc", "0"], "--nproc is 0"),
        (["slurm", "--nproc", ""], '--nproc is ""'),
        (["slurm", "--max-restarts", "-3"], "--max-restarts is -3"),
        (["slurm", "--name", ""], "--name is ''"),
        (["slurm", "--name", "a\nrm -rf x"], "--name is 'a\\nrm -rf x'"),
        (["slurm", "--option", "--time=1\nrm -rf x"], "--option is '--time=1\\nrm -rf x'"),
        (["slurm", "--gres", "npu\nrm"], "--gres is 'npu\\nrm'"),
        (["k8s", "--image", "i", "--max-restarts", "-1"], "--max-restarts is -1"),
        (["k8s", "--image", "i", "--npus", "300"], "--npus is 300"),
        (["k8s", "--image", "i", "--resource", "npu"], "'npu', not a resource such as huawei.com/Ascend910"),
        (["ray", "--max-restarts", "-1"], "--max-restarts is -1"),
        (["ray", "--nproc", "0"], "--nproc is 0"),
    ],
)  # fmt: skip
def test_what_is_wrong(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pretrain", "--data.train", str(tmp_path), "--tokenizer", str(tmp_path), "--out", str(tmp_path / "run")]
    assert run(*words, "--", *command) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["error", "hint"]
    assert message.replace("--npus", "--nproc") in said[0]
    assert not (tmp_path / "run").exists()


def test_zero_in_the_environment_is_not_taken_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "0")
    assert run("--", "pretrain", "--data.train", str(tmp_path), "--tokenizer", "t", "--out", str(tmp_path / "run")) == 2
    assert "--nproc is 0" in capsys.readouterr().err


def test_machines_of_a_file_know_their_places_for_the_check() -> None:
    launch = LaunchSettings(nproc=2, min_nodes=1, max_nodes=2, master_addr="a")
    here = {
        "command": "",
        "recipe": "",
        "launch": launch,
        "nproc": None,
        "python": "p",
        "folder": "/",
        "environment": {},
    }
    host = hostfile.HostEntry("b")
    plain = [
        word
        for word in ssh_connection.list_launcher_arguments(remote_machine.RemoteJob(**here), host, 1)
        if word is not None
    ]
    assert plain[3:5] == ["--nnodes", "1:2"] and "--node-rank" not in plain
    checked = [
        word
        for word in ssh_connection.list_launcher_arguments(
            remote_machine.RemoteJob(**here, launcher_options=("--check",)), host, 1
        )
        if word is not None
    ]
    assert checked[3:7] == ["--nnodes", "1:2", "--node-rank", "1"]


def test_the_longest_wait() -> None:
    assert LaunchSettings(join_seconds=MAX_SECONDS).join_seconds == MAX_SECONDS
    with pytest.raises(ConfigError, match="2.592e"):
        LaunchSettings(join_seconds=MAX_SECONDS + 1)
