"""The commands of a chapter, run one after the other on a simulated machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from e2e import warm
from npu_sim.conftest import CACHE
from npu_sim.guides import small
from npu_sim.guides.page import Chapter, says, words_of

LATER = ("run recipes/", "launch --check --nnodes 2", "sim --npus 8 -- python -m pytest", "bench train")
"""Commands of the page that take a while, or start cold: ANABATIC_TEST_GUIDES=all runs them, the rest runs always."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    line: str
    code: int
    out: str
    err: str


@dataclass
class Story:
    """A chapter whose commands have been run in a folder of their own."""

    chapter: Chapter
    folder: Path
    done: dict[str, Done] = field(default_factory=dict)

    def tell(self) -> None:
        """Run the page's commands in their order."""
        variables = dict(self.variable(text) for text in self.variables if not text.endswith("=0"))
        for line in self.chapter.lines:
            words = words_of(line)
            if small.ALL or not " ".join(words).startswith(LATER):
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
        code, out, err = machine(words, self.folder, variables or {})
        return Done(line, code, out, err)

    def of(self, asked: str) -> list[str]:
        """Return the page's commands that say what a row says."""
        return [line for line in self.chapter.lines if says(line, asked)]


def machine(words: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a program on a simulated machine of as many devices as the page's commands have; return code and output."""
    line = [sys.executable, "-m", "anabatic", "sim", "--npus", small.DEVICES, "--", *words]
    if words[3:4] == ["sim"]:
        line = words
    outer = {**os.environ, "ANABATIC_CACHE": str(CACHE), "HOME": str(folder), **variables}
    if (started := warm.simulated(CACHE).start(line, outer, folder)) is not None:
        out, err = started.communicate(timeout=800)
        return started.wait(), out, err
    done = subprocess.run(
        line, env=outer, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=800
    )
    return done.returncode, done.stdout, done.stderr
