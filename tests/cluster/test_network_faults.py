"""Two machines whose network delays, loses or withholds packets, and whose clocks differ."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cluster.nodes import SCRIPT, Nodes, two
from cluster.wire import Wire
from e2e import command
from e2e.home import Home

STEPS, HALF = 20, 8
HANG_SECONDS = 6
PATIENT_SECONDS = 60
"""Where nothing hangs: a busy machine may be slow."""
PROGRAM = f"{sys.executable} -m anabatic"


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def nodes(wire: Wire) -> Iterator[Nodes]:
    with two(wire) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(home: Home, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the job over a cable without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with two(Wire()) as made:
        train(home, made, folder)
    return command.losses(folder / "run")


def train(
    home: Home,
    nodes: Nodes,
    folder: Path,
    happen: Callable[[], None] = lambda: None,
    hang_seconds: int = PATIENT_SECONDS,
    **own: Sequence[str],
) -> tuple[str, str]:
    """Train with a process on each machine; return what the machines said.

    Args:
        happen: is called after step `HALF`.
        own: variables of each machine.
    """
    run = folder / "run"
    words = shlex.join(map(str, home.pretrain(run, more={"schedule.max-steps": STEPS})))
    options = f"--hang-seconds {hang_seconds} --join-seconds 100 --max-restarts 5"
    file = folder / "launch.sh"
    script = SCRIPT.replace("NPROC_PER_NODE=2", "NPROC_PER_NODE=1")
    file.write_text(script.format(program=PROGRAM, options=options, command=words))
    machines = []
    for number in (0, 1):
        mine = {name: values[number] for name, values in own.items()}
        given = {"MASTER_ADDR": nodes.addresses[0], "NODE_RANK": str(number), "ANABATIC_CACHE": str(home.cache), **mine}
        machines.append(nodes.start(number, ["bash", str(file)], **given))
    command.wait_for_step(machines[0], run, HALF)
    happen()
    zero, one = (command.end(machine).err for machine in machines)
    return zero, one


def test_late_packets_and_a_short_partition(
    home: Home, undisturbed: dict[int, float], wire: Wire, nodes: Nodes, tmp_path: Path
) -> None:
    """TCP sends again what was lost: the job stands still and goes on."""

    def cut_and_slow_down() -> None:
        wire.is_cut = True
        time.sleep(HANG_SECONDS / 3)
        wire.restore()
        wire.delay = 0.05  # one way: 100 ms for an answer

    zero, one = train(home, nodes, tmp_path, cut_and_slow_down)
    assert wire.lost and command.losses(tmp_path / "run") == undisturbed and "start again" not in zero + one


def test_a_long_partition(home: Home, undisturbed: dict[int, float], wire: Wire, nodes: Nodes, tmp_path: Path) -> None:
    """Both machines find that nothing moves, and meet again when the network is back."""

    def cut() -> None:
        wire.is_cut = True
        time.sleep(2.5 * HANG_SECONDS)
        wire.restore()

    zero, one = train(home, nodes, tmp_path, cut, HANG_SECONDS)
    assert command.losses(tmp_path / "run") == undisturbed
    assert "start again" in zero + one, zero + one
    assert command.events(tmp_path / "run").count("resume") == 1


def test_lost_packets_and_clocks_that_differ(
    home: Home, undisturbed: dict[int, float], wire: Wire, nodes: Nodes, tmp_path: Path
) -> None:
    """Machine 1 is an hour ahead."""
    wire.loss = 0.01
    (tmp_path / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 3600\n")
    zero, one = train(home, nodes, tmp_path, PYTHONPATH=["", str(tmp_path)])
    assert wire.lost and command.losses(tmp_path / "run") == undisturbed and STEPS in undisturbed
    assert "start again" not in zero + one
