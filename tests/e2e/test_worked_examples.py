"""The worked examples of docs/dev/examples: each diff fits the code as it is, and its own test passes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "dev" / "examples").glob("*.diff"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_change_fits_and_its_test_passes(example: Path, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("csrc")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored)
    text = example.read_text(encoding="utf-8")
    (test,) = re.findall(r"^\+\+\+ b/(tests/unit/\S+)$", text, flags=re.M)
    (tmp_path / test).parent.mkdir(parents=True)
    applied = subprocess.run(["git", "apply", str(example)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, applied.stderr
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", test]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_shows_every_change() -> None:
    page = (ROOT / "docs" / "dev" / "examples" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(([\w-]+\.diff)\)", page)) == {path.name for path in EXAMPLES}
    assert len(EXAMPLES) == 5
