"""A job on a Ray cluster of two nodes, both on this machine; skipped where ray is not installed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from anabatic.cli import app
from anabatic.testing.tiny_corpora import write_byte_tokenizer
from e2e import command

NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of the cluster."""
    utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    made: Any = utils.Cluster(initialize_head=True, head_node_args=NODE)
    made.add_node(**NODE)
    yield made.address
    made.shutdown()


def start(cluster: str, out: Path, *more: str, nodes: int = 2, steps: int = 12) -> command.Running:
    """Start a small pretraining on the cluster."""
    tokenizer = write_byte_tokenizer(out.parent / "tokenizer")
    words = [
        "launch",
        "ray",
        "--address",
        cluster,
        "--nnodes",
        str(nodes),
        "--nproc",
        "1",
        *more,
        "--",
        "pretrain",
        "--data",
        "stdlib:docs#60",
        "--tokenizer",
        str(tokenizer),
        "--out",
        str(out),
        "--model.depth",
        "2",
        "--model.width",
        "64",
        "--batch.seq-len",
        "64",
        "--batch.micro-batch-tokens",
        "256",
        "--batch.global-batch-tokens",
        "512",
        "--schedule.max-steps",
        str(steps),
        "--log.every",
        "1",
        "--device.type",
        "cpu",
        "--device.threads",
        "1",
    ]
    return command.start(words, out.parent / "cache")


def test_two_nodes(cluster: str, tmp_path: Path) -> None:
    done = command.end(start(cluster, tmp_path / "run", "--resource", "none"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"] is True
    assert (tmp_path / "run" / "rank-1.log").is_file()
    assert "asking Ray for 2 x (CPU 1), each on its own machine" in done.err


def test_a_driver_that_is_told_to_leave(cluster: str, tmp_path: Path) -> None:
    process = start(cluster, tmp_path / "run", "--resource", "none", steps=100_000)
    command.wait_for_step(process, tmp_path / "run", 2)
    process.send_signal(signal.SIGTERM)
    command.end(process, 143)
    assert list((tmp_path / "run").glob("checkpoint-*"))


def test_a_node_that_is_lost_ends_the_job_and_leaves_nothing_behind(cluster: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(cluster, out, "--resource", "none", steps=100_000)
    command.wait_for_step(process, out, 2)
    actors = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"][:1] == ["ray::Node"]]
    assert len(actors) == 2
    below = [child for actor in actors for child in actor.children(recursive=True)]
    actors[1].kill()
    done = command.end(process, 1)
    assert "of the Ray cluster is lost" in done.err and "Traceback" not in done.err
    assert psutil.wait_procs(below, timeout=60)[1] == []


def test_more_than_the_cluster_has(cluster: str, tmp_path: Path) -> None:
    done = command.end(start(cluster, tmp_path / "run", "--join-seconds", "1"), 1)
    assert "error: Ray did not give 2 x (CPU 1, NPU 1) within 1 s: the cluster has 2 machines" in done.err
    assert "NPU 0, 0 free" in done.err


@pytest.mark.parametrize("words", [["--env", "X"], [], ["--nproc", "x"]])
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
