"""Two machines with addresses of their own: the same script on both, a check before the job, and what goes wrong."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from cluster.nodes import SCRIPT, Nodes, launched, two
from e2e import command
from e2e.home import STEPS, Home

PROGRAM = f"{sys.executable} -m anabatic"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two() as made:
        yield made


def script(folder: Path, options: str, words: list[object]) -> str:
    """Write the script that is started on both machines."""
    path = folder / "launch.sh"
    path.write_text(SCRIPT.format(program=PROGRAM, options=options, command=shlex.join(map(str, words))))
    return str(path)


def test_two_machines_of_two_processes(home: Home, base: Path, nodes: Nodes, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = home.pretrain(out, more={"batch.micro-batch-tokens": 128})
    file = script(tmp_path, "--check --join-seconds 100", words)
    zero, one = launched(nodes, file, {"ANABATIC_CACHE": str(home.cache)})
    assert f"{nodes.addresses[1]}  {nodes.interfaces[1]}" in zero and re.search(r"^0 - 1  [\d,]+$", zero, re.M), zero
    assert "check passed, " in zero and f"step {STEPS}/{STEPS}" in zero
    assert "starting 2 processes on each of 2 machines" in one and "step 1/" not in one
    assert {path.name for path in out.glob("rank-*.log")} == {f"rank-{rank}.log" for rank in range(4)}
    assert not list(tmp_path.glob(".anabatic-check*"))
    alone, found = command.losses(base), command.losses(out)
    assert found.keys() == alone.keys()
    assert [found[step] for step in range(1, 9)] == pytest.approx([alone[step] for step in range(1, 9)], rel=1e-3)


def test_what_differs_is_named(home: Home, nodes: Nodes, tmp_path: Path) -> None:
    for number, text in enumerate(("a" * 300, "b" * 400)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "corpus.txt").write_text(text)
    other = tmp_path / "1" / "torch-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    # torch 2.14 finds gloo among its own entry points
    (other / "entry_points.txt").write_text(metadata.distribution("torch").read_text("entry_points.txt") or "")
    words = home.pretrain(Path("run"), more={"data.train": "corpus.txt"})
    path = Path(script(tmp_path, "--check --join-seconds 100", words))
    path.write_text(path.read_text().replace("exec ", 'cd "$PLACE"; PYTHONPATH="$PLACE:$PYTHONPATH" exec '))
    places = [str(tmp_path / "0"), str(tmp_path / "1")]
    for said in launched(nodes, str(path), {"ANABATIC_CACHE": str(home.cache)}, code=2, PLACE=places):
        assert re.search(r"torch is \S+ on machine 0 and 9.9.9 on machine 1", said), said
        assert "data.train: corpus.txt has 300 bytes on machine 0 and 400 bytes on machine 1" in said
        assert "the run folder on machine 1" in said and "is not that of machine 0" in said
    assert not (tmp_path / "0" / "run").exists()


def test_wrong_addresses(home: Home, nodes: Nodes, tmp_path: Path) -> None:
    file = script(tmp_path, "--join-seconds 6", home.pretrain(tmp_path / "run"))
    variables = {"ANABATIC_CACHE": str(home.cache)}
    wrong = nodes.start(1, ["bash", file], MASTER_ADDR=nodes.nowhere, NODE_RANK="1", **variables)
    own = nodes.start(0, ["bash", file], MASTER_ADDR=nodes.addresses[1], NODE_RANK="0", **variables)
    said = command.end(own, 2).err
    assert f"--master-addr {nodes.addresses[1]} does not lead to this machine" in said
    said = command.end(wrong, 1).err
    assert f"machine 0 does not answer at {nodes.nowhere}:29500: no" in said and "frame #" not in said
