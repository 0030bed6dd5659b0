"""The container files name the versions that everything else here is tested with; a builder builds one in CI."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from anabatic import __version__
from house import tree

FILES = sorted((tree.ROOT / "containers").glob("*.Dockerfile"))
SIMULATOR = tree.ROOT / "containers" / "sim.Dockerfile"
"""The image for other projects' tests: it holds the package anabatic-sim, not anabatic."""


def read_steps(text: str) -> list[tuple[str, str]]:
    """Return instruction and argument of each line."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_one_file_for_each_device() -> None:
    assert [path.name for path in FILES] == ["a2.Dockerfile", "a3.Dockerfile", "cpu.Dockerfile", "sim.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_versions_and_steps(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    constraints = (tree.ROOT / "constraints.txt").read_text(encoding="utf-8")
    (torch,) = re.findall(r"^torch==(.+)$", constraints, re.M)
    assert set(re.findall(r"(?:torch(?:-npu)?==|^ARG TORCH=)([0-9.]+)", text, re.M)) == {torch}
    steps = read_steps(text)
    assert {name for name, _ in steps} <= {"ARG", "FROM", "COPY", "RUN", "USER", "WORKDIR", "ENV", "CMD"}
    for name, argument in steps:
        if name == "COPY" and not argument.startswith("--from=build "):
            source, target = argument.split()
            assert (tree.ROOT / source).exists() and target.startswith("/")
        if name == "RUN":
            assert shlex.split(argument), "the shell can read it"
    declared = {argument.partition("=")[0] for name, argument in steps if name == "ARG"}
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= declared
    if path == SIMULATOR:
        assert re.search(r"/dist/\*\.whl", text)
        return
    commands = [argument.removeprefix("pip install --no-cache-dir ") for name, argument in steps if name == "RUN"]
    lock = commands.index("--require-hashes --no-deps -r /opt/anabatic/requirements-serve.txt")
    package = commands.index("--no-deps --no-build-isolation /opt/anabatic")
    between = commands[lock + 1 : package]
    assert between and all("torch" in command for command in between)


def test_what_an_image_leaves_out() -> None:
    ignored = (tree.ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv*", "runs"} <= set(ignored)
    needed = (
        "src",
        "pyproject.toml",
        "constraints.txt",
        "requirements-serve.txt",
        "hatch_build.py",
        "README.md",
        "docs/en",
        "docs/zh",
        "LICENSE",
    )
    assert not [name for name in needed if name in ignored]


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((tree.ROOT / "charts" / "anabatic-serve" / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == __version__
