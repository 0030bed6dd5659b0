"""The commands of a chapter, run one after the other on a simulated machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.nodes import two
from e2e import warm
from npu_sim.conftest import CACHE
from npu_sim.guides import small
from npu_sim.guides.page import Chapter, says, words_of
from npu_sim.guides.small import with_option

LATER = {"launch --check --nnodes 2": "tests/cluster/test_npu_nodes.py::test_the_recipe_for_two_machines"}
"""Commands that take long, and the test that runs the same in small; ANABATIC_TEST_GUIDES=all runs them here, too."""
PLANNED = "run speedrun"
"""A pipeline that is planned only, unless everything is asked for: tests/e2e/test_speedrun.py runs it."""

LONGEST = 900
"""Seconds after which a command counts as hung."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    line: str
    code: int
    out: str
    err: str


@dataclass
class Story:
    """A chapter whose commands have been run in their own folder."""

    chapter: Chapter
    folder: Path
    done: dict[str, Done] = field(default_factory=dict)

    def tell(self) -> None:
        """Run the page's commands in their order; those for two machines last, because not every machine can be two."""
        everywhere = dict(self.variable(text) for text in self.variables if not text.endswith("=0"))
        on_one = dict(self.variable(text) for text in self.variables if text.endswith("=0"))
        for line in sorted(self.chapter.lines, key=lambda line: "--nnodes" in line):
            words = " ".join(words_of(line))
            variables = {**everywhere, **on_one} if " predict " in line else everywhere
            if words.startswith(PLANNED) and not small.ALL:
                self.done[line] = self.run(f"{line} --dry-run", variables)
            elif small.ALL or not words.startswith(tuple(LATER)):
                self.done[line] = self.run(line, variables)

    @property
    def variables(self) -> list[str]:
        """The variables that the chapter says are the same here, some with a value."""
        return [item.text for row in self.chapter.rows for item in row.items if item.kind == "variable"]

    def variable(self, text: str) -> tuple[str, str]:
        """Return name and value; of devices no more than there are."""
        name, _, value = text.partition("=")
        devices = value.split(",") if value else map(str, range(8))
        return name, ",".join(list(devices)[: int(small.DEVICES)])

    def run(self, line: str, variables: Mapping[str, str] | None = None) -> Done:
        """Run one command, made small."""
        words = [sys.executable, "-m", "anabatic", *small.small(words_of(line))]
        how = two_machines if "--nnodes" in words else machine
        code, out, err = how(words, self.folder, variables or {})
        return Done(line, code, out, err)

    def of(self, asked: str) -> list[str]:
        """Return the page's commands that say what a row says."""
        return [line for line in self.chapter.lines if says(line, asked)]


def machine(words: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a program on a simulated machine of as many devices as the page's commands have; return code and output."""
    line = [sys.executable, "-m", "anabatic", "sim", "--npus", small.DEVICES, "--", *words]
    if words[3:4] == ["sim"]:
        line = words
    outer = environment(folder, variables)
    if (started := warm.simulated(CACHE).start(line, outer, folder)) is not None:
        out, err = started.communicate(timeout=LONGEST)
        return started.wait(), out, err
    return cold(line, folder, variables)


def cold(line: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a program as a user's shell does."""
    done = subprocess.run(
        line,
        env=environment(folder, variables),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    return done.returncode, done.stdout, done.stderr


def environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a command; its home is the chapter's folder, where CANN's logs lie."""
    return {**os.environ, "ANABATIC_CACHE": str(CACHE), "HOME": str(folder), **variables}


def two_machines(words: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a command of `launch` on two machines of two devices each, with their own rank and the first's address."""
    words = with_option(with_option(words, "--nproc", "2"), "--out", "runs/two-machines")
    script = ["#!/bin/bash"]
    with two() as nodes:
        for number, devices in enumerate(("0,1", "2,3")):
            here = with_option(with_option(words, "--node-rank", str(number)), "--master-addr", nodes.addresses[0])
            line = shlex.join(nodes.words(number, here))
            script.append(f"ASCEND_RT_VISIBLE_DEVICES={devices} {line} & pids[{number}]=$!")
        script.append('wait "${pids[0]}"; zero=$?; wait "${pids[1]}"; exit $((zero + $?))')
        (folder / "both.sh").write_text("\n".join(script))
        line = [sys.executable, "-m", "anabatic", "sim", "--npus", "4", "--", "bash", "both.sh"]
        return cold(line, folder, variables)
