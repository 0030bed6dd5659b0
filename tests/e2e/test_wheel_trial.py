"""Python functions, chat page and studio where nothing but the package and the extra `serve` is needed.

ANABATIC_TEST_WHEEL=/path/to/python runs the same in an environment that holds the wheel alone (`make test-wheel`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabatic.infer.web.pages import load_libraries
from e2e import wheel_trial

WHEEL = os.environ.get("ANABATIC_TEST_WHEEL")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of everything in `wheel_trial.py`."""
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    variables = {**os.environ, "ANABATIC_CACHE": str(folder / "cache")}
    line = [WHEEL or sys.executable, Path(wheel_trial.__file__), folder]
    done = subprocess.run(line, capture_output=True, text=True, timeout=550, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_package_is_the_one_to_be_tried(tried: dict[str, Any]) -> None:
    assert (str(ROOT / "src") in tried["package"]) != bool(WHEEL)


def test_python_functions_and_a_report_of_two_runs(tried: dict[str, Any]) -> None:
    found = tried["python"]
    assert found["steps"][0] == 1 and found["steps"][-1] == 3
    assert found["losses"][-1] < 20 and isinstance(found["answer"], str)
    assert found["compared"] == "<!doctype html>"


@pytest.mark.parametrize("name", ["serve", "studio"])
def test_pages_and_their_libraries(tried: dict[str, Any], name: str) -> None:
    pages = tried[name]["pages"]
    assert set(pages.values()) == {200}, (pages, tried[name]["log"])
    assert tried[name]["code"] in (0, 143), tried[name]["log"]
    if WHEEL or load_libraries():
        assert any(path.endswith(".js") for path in pages)


def test_the_server_answers_and_the_studio_trains(tried: dict[str, Any]) -> None:
    assert tried["serve"]["used"] in ("length", "stop")  # four tokens, or fewer
    state, log = tried["studio"]["used"]
    assert state == "finished", log
