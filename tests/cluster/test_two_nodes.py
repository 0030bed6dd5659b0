"""A job that divides tokens, experts and weights over two machines loses one, and continues on the other alone."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from cluster.nodes import SCRIPT, two
from e2e import command
from e2e.home import SHORT, Home, Options
from e2e.test_context import require_equal
from e2e.test_expert_parallel import mixture as mixture

OVER_BOTH: Options = {"parallel.context": 2, "parallel.expert": 2, "parallel.strategy": "zero3"}
"""Of 2 x 2 processes: experts are divided within a machine, and their weights sharded over both."""
ON_ONE: Options = {"parallel.expert": 2, "parallel.strategy": "zero2"}
LOST = 7
"""The step after which machine 1 is lost."""


def test_a_lost_machine_and_another_layout(home: Home, mixture: Path, tmp_path: Path) -> None:
    more: Options = {"optim.router-aux-loss": 0.01}
    one, out, script = tmp_path / "one", tmp_path / "run", tmp_path / "launch.sh"
    words = shlex.join(map(str, home.sft(out, mixture, more={**more, **OVER_BOTH})))
    script.write_text(
        SCRIPT.format(program=f"{sys.executable} -m anabatic", options="--join-seconds 40", command=words)
    )
    with two() as nodes:
        given = {"MASTER_ADDR": nodes.addresses[0], "ANABATIC_CACHE": str(home.cache)}
        machines = [nodes.start(number, ["bash", str(script)], NODE_RANK=str(number), **given) for number in (0, 1)]
        command.wait_for_step(machines[0], out, LOST)
        command.kill(machines[1])
        said = command.end(machines[0], 1).err
        command.end(machines[1], -9)
    assert "context parallelism: 2 processes share the tokens of a batch" in said
    assert "expert parallelism: 2 processes share the experts of 2 layers" in said and "strategy zero3" in said
    reached = max(command.losses(out))
    assert LOST <= reached < SHORT and 5 in command.checkpoints(out)
    resumed, _ = home.together(home.sft(out, mixture, 2, {**more, **ON_ONE}), home.sft(one, mixture, more=more))
    assert re.search(r"continuing from \S+/checkpoint-(5|10): step", resumed.err), resumed.err
    assert command.events(out).count("resume") == 1
    alone, found = command.losses(one), command.losses(out)
    assert list(found) == list(alone) == list(range(1, SHORT + 1))
    assert list(found.values()) == pytest.approx(list(alone.values()), rel=1e-6)  # 5e-8 was measured
    require_equal(one, out, "model.safetensors")
