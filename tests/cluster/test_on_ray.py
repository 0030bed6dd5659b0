"""A job on a Ray cluster of two machines, both raylets of this one; skipped where ray is not installed."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from anabatic.cli import app
from anabatic.core import heartbeat
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from cluster import ray_cluster
from cluster.ray_cluster import RayCluster
from e2e import command

STEPS, ENDLESS = 300, 100_000  # 300: Ray notices a lost raylet after a second, and training must not have ended


@pytest.fixture(scope="module")
def shared() -> Iterator[RayCluster]:
    """A cluster for all tests of this module."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'anabatic[ray]'")
    with ray_cluster.ray_cluster() as made:
        yield made


@pytest.fixture
def cluster(shared: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The cluster, all of it running, and the variables that let commands in."""
    shared.start()
    for name, value in shared.variables.items():
        monkeypatch.setenv(name, value)
    return shared


def train(out: Path, steps: int) -> list[str]:
    """The words of a small pretraining."""
    tokenizer = write_byte_tokenizer(out.parent / "tokenizer")
    words = f"pretrain --data stdlib:docs#60 --tokenizer {tokenizer} --out {out} --model.depth 2 --model.width 64"
    words += " --batch.seq-len 64 --batch.micro-batch-tokens 256 --batch.global-batch-tokens 512 --save.every 5"
    words += f" --schedule.max-steps {steps} --log.every 1 --device.type cpu --device.dtype fp32 --device.threads 1"
    return words.split()


def start(cluster: RayCluster, out: Path, *more: str, nodes: int = 2, steps: int = STEPS) -> command.Running:
    """Start a small pretraining on the cluster."""
    words = ["launch", "ray", "--address", cluster.address, "--nnodes", str(nodes), "--nproc", "1", *more, "--"]
    return command.start([*words, *train(out, steps)], out.parent / "cache")


def rank_on(cluster: RayCluster, number: int) -> psutil.Process:
    """The process that trains on a machine."""
    actors = cluster.machines[number].processes("ray::RayNode")  # one of a job before may be about to end
    beats = Path(tempfile.gettempdir()).glob("anabatic-*/try-*/rank-*.beat")
    beating = {told[0]: beat.stat().st_mtime for beat in beats if (told := heartbeat.read_heartbeat(beat)) is not None}
    (found,) = [  # a file that somebody has left may name a process that has got its number since
        one
        for actor in actors
        for one in actor.children(recursive=True)
        if beating.get(one.pid, 0.0) > one.create_time()
    ]
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a plain launch of two processes."""
    folder = tmp_path_factory.mktemp("plain")
    command.end(command.start(["launch", "--nproc", "2", "--", *train(folder / "run", STEPS)], folder / "cache"))
    return command.losses(folder / "run")


def test_two_machines_train_as_two_processes(cluster: RayCluster, plain: dict[int, float], tmp_path: Path) -> None:
    """Losses are those of a plain launch; devices, runtime environment and logs are as they are said to be."""
    (tmp_path / "env.yaml").write_text("env_vars: {FROM_RUNTIME_ENV: there}\n")
    out = tmp_path / "run"
    process = start(cluster, out, "--runtime-env", str(tmp_path / "env.yaml"), "--env", "FROM_OPTION=here")
    command.wait_for_step(process, out, 1)
    for number, device in enumerate(one[0] for one in ray_cluster.DEVICES):
        variables = rank_on(cluster, number).environ()
        assert variables["ASCEND_RT_VISIBLE_DEVICES"] == device
        assert (variables["FROM_RUNTIME_ENV"], variables["FROM_OPTION"]) == ("there", "here")
    said = command.end(process).err
    assert "asking Ray for 2 x (CPU 1, NPU 1), each on its own machine" in said
    for number, address in enumerate(ray_cluster.ADDRESSES):
        (line,) = [line for line in said.splitlines() if f"({address}): log in " in line]
        file, _, devices = line.partition("log in ")[2].partition(", errors in .err beside it; ")
        assert devices == f"ASCEND_RT_VISIBLE_DEVICES={ray_cluster.DEVICES[number][0]}"
        assert Path(file).with_suffix(".err").is_file()
    assert (out / "rank-1.log").is_file() and command.summary(out)["finished"] is True
    assert command.losses(out) == plain


def test_a_driver_that_is_told_to_leave(cluster: RayCluster, tmp_path: Path) -> None:
    process = start(cluster, tmp_path / "run", steps=ENDLESS)
    command.wait_for_step(process, tmp_path / "run", 2)
    process.send_signal(signal.SIGTERM)
    command.end(process, 143)
    assert list((tmp_path / "run").glob("checkpoint-*"))


def test_a_killed_rank_and_a_killed_raylet(cluster: RayCluster, plain: dict[int, float], tmp_path: Path) -> None:
    """The launcher starts the ranks again, and the driver the job, when the machine is back."""
    out = tmp_path / "run"
    process = start(cluster, out)
    command.wait_for_step(process, out, 7)
    rank_on(cluster, 1).kill()
    command.wait_for_step(process, out, 14)
    below = [below for one in cluster.machines[1].processes("ray::RayNode") for below in one.children(recursive=True)]
    cluster.machines[1].kill(ray_cluster.RAYLET)
    assert psutil.wait_procs(below, timeout=30)[1] == []
    command.wait_for(process, cluster.machines[1].has_ended)
    cluster.start()
    said = command.end(process).err
    assert "ended without a message (killed by SIGKILL)" in said
    assert f"({ray_cluster.ADDRESSES[1]}) of the Ray cluster is lost: " in said
    assert "; starting again from the newest checkpoint (1 of 3)" in said
    events = command.events(out)
    assert events.count("resume") == 2, events
    assert command.losses(out) == plain


def test_a_killed_head(cluster: RayCluster, plain: dict[int, float], tmp_path: Path) -> None:
    """The job ends with what to do, and nothing of it is left; the same command continues on the next cluster."""
    out = tmp_path / "run"
    process = start(cluster, out, "--max-restarts", "0")
    command.wait_for_step(process, out, 8)
    actors = [one for machine in cluster.machines for one in machine.processes("ray::RayNode")]
    below = [below for one in actors for below in one.children(recursive=True)]
    cluster.machines[0].kill(ray_cluster.HEAD)
    said = command.end(process, 1).err
    assert f"error: the head of the Ray cluster at {cluster.address} does not answer, after 0 restarts" in said
    assert "hint: `ray status` shows which machines are left" in said
    assert psutil.wait_procs(below, timeout=30)[1] == []
    reached = max(command.losses(out))
    for machine in cluster.machines:
        machine.end()
    cluster.start()
    command.end(start(cluster, out))
    assert reached >= 8 and command.losses(out) == plain


def shards(cache: Path) -> dict[str, bytes]:
    """Every file below a cache."""
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


@pytest.mark.parametrize("source", ["stdlib:", "task:spelling#3000"])
def test_shards_are_the_same_whoever_tokenises(cluster: RayCluster, tmp_path: Path, source: str) -> None:
    """A worker is killed at its work, too; texts and conversations."""
    words = ["data", "tokenize", source, "--tokenizer", str(write_byte_tokenizer(tmp_path / "tokenizer"))]
    local = command.start(words, tmp_path / "local")
    process = command.start([*words, "--engine", "ray", "--address", cluster.address], tmp_path / "ray")
    if source == "stdlib:":
        killed: list[psutil.Process] = []
        command.wait_for(process, lambda: bool(killed.extend(workers(cluster)) or killed))
        killed[0].kill()
    done = command.end(process)
    assert "tokenising on Ray: 2 machines, 4 cores" in done.err
    folders = [Path(line) for line in done.out.splitlines()]
    assert len(folders) == 2 and all((folder / "meta.json").is_file() for folder in folders)
    assert ("(raylet) A worker died or was killed" in done.err) == (source == "stdlib:")
    command.end(local)
    assert shards(tmp_path / "ray") == shards(tmp_path / "local")


def workers(cluster: RayCluster) -> list[psutil.Process]:
    """What tokenises a batch now."""
    return [one for machine in cluster.machines for one in machine.processes("ray::encode_batch")]


def test_a_bad_row_is_named_by_the_cluster_as_it_is_here(cluster: RayCluster, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2
    rows.append({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data", "tokenize", str(tmp_path / "rows.jsonl"), "--data.valid-fraction", "0"]
    words += ["--tokenizer", str(write_byte_tokenizer(tmp_path / "tokenizer"))]
    on_ray = command.start([*words, "--engine", "ray", "--address", cluster.address], tmp_path / "ray")
    here = command.start(words, tmp_path / "local")
    errors = [[line for line in command.end(one, 2).err.splitlines() if "error:" in line] for one in (on_ray, here)]
    assert errors[0] == errors[1] and "rows.jsonl: line 3" in errors[0][0]


def test_more_than_the_cluster_has(cluster: RayCluster, tmp_path: Path) -> None:
    done = command.end(start(cluster, tmp_path / "run", "--resource", "GPU", "--join-seconds", "1"), 1)
    assert "error: Ray did not give 2 x (CPU 1, GPU 1) within 1 s: the cluster has 2 machines" in done.err
    assert "GPU 0, 0 free" in done.err


def test_without_the_token(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cluster.variables:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_py_gcs_connect_timeout_s", "3")
    done = command.end(start(cluster, tmp_path / "run"), 2)
    assert f"error: there is no Ray cluster at {cluster.address}: " in done.err
    assert "a cluster that asks for a token needs RAY_AUTH_MODE=token" in done.err


@pytest.mark.parametrize("address", ["127.0.0.4:9", "127.0.0.4:99999"])
def test_where_no_cluster_is(tmp_path: Path, address: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    write_byte_tokenizer(tmp_path / "t")
    (tmp_path / "a.txt").write_text("a text")
    tokenize = ["data", "tokenize", tmp_path / "a.txt", "--tokenizer", tmp_path / "t", "--engine", "ray"]
    for words in (
        ["launch", "ray", "--address", address, "--", *train(tmp_path / "run", 1)],
        [*tokenize, "--address", address],
    ):
        done = command.end(command.start(words, tmp_path / "cache"), 2)
        assert f"error: there is no Ray cluster at {address}: nothing answers there\nhint: start one by" in done.err


@pytest.mark.parametrize("words", [["--env", "X"], [], ["--nproc", "x"], ["--runtime-env", "missing.yaml"]])
def test_what_is_wrong_on_the_command_line(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "good.yaml").write_text("model: m\ndata: {train: [a]}\n")
    border = ["--", "sft", "-c", str(tmp_path / "good.yaml")] if words else []
    with pytest.raises(SystemExit) as caught:
        app.main(["launch", "ray", *words, *border])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as caught:
        app.main(["launch", "ray", "--", "pretrain", "--data", "stdlib:docs", "--tokenizer", "t"])
    assert caught.value.code == 2
    assert "pip install 'anabatic[ray]'" in capsys.readouterr().err
