"""A machine that comes late to a job on several machines that has ended does not wait for the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.config.sections.launch import LaunchSettings
from anabatic.launch.local import spawn

RECIPE = "device: {type: cpu}\nseed: 1\n"
TWO = LaunchSettings(min_nodes=2, max_nodes=2, node_rank=1, master_addr="127.0.0.1", join_seconds=1.0)


def ended(folder: Path, recipe: str = RECIPE, finished: bool = True) -> Path:
    (folder / "final_model").mkdir()
    (folder / "config.yaml").write_text(recipe)
    (folder / "summary.json").write_text(json.dumps({"finished": finished}))
    return folder


def test_nothing_is_left_to_do(tmp_path: Path) -> None:
    assert spawn.run("pretrain", RECIPE, TWO, ended(tmp_path)) == 0


@pytest.mark.parametrize(("recipe", "finished"), [("device: {type: cpu}\nseed: 2\n", True), (RECIPE, False)])
def test_another_job_or_one_that_goes_on_is_not_finished(tmp_path: Path, recipe: str, finished: bool) -> None:
    folder = spawn.RunFolder(ended(tmp_path, recipe, finished))
    assert not spawn._is_finished(folder, RECIPE)


def test_a_folder_without_a_run_is_not_finished(tmp_path: Path) -> None:
    assert not spawn._is_finished(spawn.RunFolder(tmp_path), RECIPE)
