"""No command ends in a missing module where only the base dependencies are installed.

ANABATIC_TEST_BARE=/path/to/python runs the same in an environment that holds the wheel alone (`make test-wheel`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.loading import command_table
from e2e import bare

BARE = os.environ.get("ANABATIC_TEST_BARE")
ROOT = Path(__file__).resolve().parents[2]


def normal(name: str) -> str:
    """Return a distribution's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed() -> set[str]:
    """The distributions that `pip install anabatic` brings."""
    from packaging.requirements import Requirement

    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.M | re.S)
    assert listed
    waiting = re.findall(r'^ *"([^"]+)"', listed.group(1), re.M)
    found: set[str] = set()
    while waiting:
        one = Requirement(waiting.pop())
        name = normal(one.name)
        if name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            waiting += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
    return found


def hidden() -> list[str]:
    """Top-level modules that are installed here and that `pip install anabatic` does not bring."""
    keep = needed() | {"anabatic", "pip", "setuptools"}
    kept, others = set[str](), set[str]()
    for one in importlib.metadata.distributions():  # before Python 3.11 `packages_distributions` knows a part of them
        tops = {path.parts[0].partition(".")[0] for path in one.files or [] if path.suffix in (".py", ".so")}
        (kept if normal(one.metadata["Name"]) in keep else others).update(tops)
    return sorted(name for name in others - kept if name.isidentifier())


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of everything in `bare.py`."""
    python, names = (BARE, []) if BARE else (sys.executable, hidden())
    assert BARE or {"fastapi", "starlette", "h3", "sklearn", "pytest"} <= set(names)
    assert not {"torch", "numpy", "yaml", "transformers", "huggingface_hub", "jinja2"} & set(names)
    folder = tmp_path_factory.mktemp("bare")
    line = [python, Path(bare.__file__), folder, *names]
    variables = {**os.environ, "ANABATIC_CACHE": str(folder / "cache")}
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_all_modules_but_the_server_import(tried: dict[str, Any]) -> None:
    expected = (*bare.SERVER, *bare.PYTEST_PLUGIN)
    assert not {name: why for name, why in tried["modules"].items() if not name.startswith(expected)}


def test_every_command_of_the_table_is_tried() -> None:
    asked = {one.strip() for part in bare.HELP.strip().splitlines() for one in part.split("|")}
    assert not set(command_table.COMMANDS) - asked
    tried = [f"{line} " for line in (*bare.WORKS, *bare.HINTS)]
    rest = set(command_table.COMMANDS) - {"run", "bench infer", "bench collective", "bench io"}  # as others do
    assert not [name for name in rest if not any(line.startswith(f"{name} ") for line in tried)]


def test_nothing_ends_in_a_missing_module(tried: dict[str, Any]) -> None:
    told = {line: end["err"] + end["out"] for line, end in tried["commands"].items()}
    assert not {line: said for line, said in told.items() if re.search(r"ModuleNotFound|ImportError|Traceback", said)}


def test_what_needs_nothing_more_works(tried: dict[str, Any]) -> None:
    ends = tried["commands"]
    lines = [line for line in ends if line not in bare.HINTS and line != "doctor"]  # which judges this machine
    assert not {line: ends[line] for line in lines if ends[line]["code"] != 0}


def test_what_needs_more_says_what(tried: dict[str, Any]) -> None:
    wrong = {}
    for line, extra in bare.HINTS.items():
        end = tried["commands"][line]
        if end["code"] not in (1, 2) or f"hint: pip install 'anabatic[{extra}]'" not in end["err"]:
            wrong[line] = end
    assert not wrong
