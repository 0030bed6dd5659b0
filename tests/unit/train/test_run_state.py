"""The host numbers of a checkpoint: written and read, by this version, earlier ones and newer ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.core.errors import CheckpointError
from anabatic.train.checkpoint.run_state import RUN_STATE_VERSION, RunState, TrainProgress

HERE = Path("runs/a/checkpoint-3")


def test_what_is_written_is_read() -> None:
    progress = TrainProgress(step=3, tokens=99, loader={"micro_batch": 6}, dropped=[2], best={"step": 2})
    state = RunState(progress, {"optim.lr": 0.1}, {"schedule.max_steps": 9}, 4, {"command": "sft"})
    assert RunState.from_json(json.loads(json.dumps(state.to_json())), HERE) == state


def test_a_checkpoint_from_before_there_were_versions_is_read() -> None:
    old = {"progress": {"step": 3, "best": {}, "stale": 1}, "identity": {}, "sizes": {"optim.lr": 1}, "world_size": 2}
    state = RunState.from_json(old, HERE)
    assert (state.progress.step, state.progress.stale, state.progress.rewinds, state.world_size) == (3, 1, 0, 2)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"version": RUN_STATE_VERSION + 1}, "has version 2, this program reads up to 1"),
        ({"version": "2"}, "has version 2"),
        ({"progress": {"step": 3, "furlongs": 1}}, "counts furlongs, which this version does not support"),
    ],
)
def test_a_newer_one_is_refused_by_name(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        RunState.from_json(tree, HERE)
    assert str(HERE) in str(caught.value) and "resume with the version that wrote it" in caught.value.hint
