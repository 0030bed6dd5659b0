"""No test sees the clone's folder, the user's home, caches or variables, nor what the demo and a studio left there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.core.paths import get_cache_root
from house import tree
from suite import isolation
from unit.fake_runs import write_training_run

SAMPLE = (
    "tests/e2e/test_bad_input.py",
    "tests/smoke/test_commands.py",
    "tests/unit/core/test_paths.py",
    "tests/unit/config/test_load.py",
    "tests/unit/hub/test_model_download.py",
    "tests/unit/studio/test_run_browser.py",
)
"""Tests that look for runs, recipes, models and caches where a user has them."""
VARIABLES = {
    "ANABATIC_DEBUG": "1",
    "ANABATIC_API_KEYS": "trap",
    "ASCEND_RT_VISIBLE_DEVICES": "7",
    "CUDA_VISIBLE_DEVICES": "",
    "GOMP_SPINCOUNT": "1",
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HF_TOKEN": "trap",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "ALL_PROXY": "http://127.0.0.1:9",
    "LANG": "de_DE.UTF-8",
    "LC_ALL": "zh_CN.UTF-8",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "OMP_NUM_THREADS": "7",
    "PYTHONHASHSEED": "1",
    "PYTHONOPTIMIZE": "",
    "RANK": "3",
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "TORCH_LOGS": "all",
    "TRANSFORMERS_VERBOSITY": "debug",
    "WORLD_SIZE": "4",
}
"""What users and schedulers set, with values that change what programs do."""
HOME_FILES = (
    ".bashrc",
    ".gitconfig",
    ".netrc",
    ".ssh/config",
    ".config/anabatic/config.yaml",
    ".config/pip/pip.conf",
    ".cache/huggingface/token",
    ".anabatic/studio.sqlite3",
)
"""Files of a home; each is a pipe that nobody writes to, so that whoever opens it hangs until the limit of its test."""


def test_a_test_starts_in_an_empty_folder_with_an_empty_home() -> None:
    assert list(Path.cwd().iterdir()) == [] and list(Path.home().iterdir()) == []
    assert not get_cache_root().exists() and tree.ROOT not in Path.cwd().parents


def test_only_named_variables_are_seen() -> None:
    kept = isolation.clean_variables({**VARIABLES, "PATH": "/bin", "ANABATIC_TEST_SEED": "1"}, has_device=False)
    assert kept == {"PATH": "/bin", "ANABATIC_TEST_SEED": "1"}
    assert not VARIABLES.keys() & os.environ.keys() - isolation.FIXED.keys()


def set_traps(clone: Path, home: Path) -> None:
    """Leave in a clone what the demo, a training and a studio leave, and pipes in a home."""
    for name in ("demo/base", "demo/sft", "mine", "sft", "base"):
        write_training_run(clone / "runs" / name, steps=3)
    (clone / "runs" / ".studio").mkdir()
    for name in ("runs/demo/pipeline.jsonl", "anabatic.yaml", "recipe.yaml", "config.yaml", "model", "rows.jsonl"):
        (clone / name).write_text("trap: [")
    for name in HOME_FILES:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(home / name)
    shards = home / ".cache" / "anabatic" / "shards"
    shards.mkdir(parents=True)
    os.mkfifo(shards / "manifest.json")


@pytest.mark.process
@pytest.mark.timeout(600)
def test_traps_are_not_stepped_on(tmp_path: Path) -> None:
    """The same tests pass in a clone where everything has been used, with a home and variables full of traps."""
    clone, home = tmp_path / "clone", tmp_path / "home"
    for file in tree.tracked():
        copy = clone / file.relative_to(tree.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    set_traps(clone, home)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "ANABATIC_TEST_"))}
    kept = {key: value for key, value in kept.items() if key not in isolation.FIXED}
    # The clone's own sources are tested, with the packages of this environment.
    variables = {**kept, **VARIABLES, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", *SAMPLE]
    done = subprocess.run(words, cwd=clone, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert sorted(path.name for path in (clone / "runs").iterdir()) == [".studio", "base", "demo", "mine", "sft"]
