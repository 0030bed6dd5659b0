"""Typing the commands of a page one after the other, in a folder with stand-ins."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anabatic.cli import command_tree, job_command
from anabatic.cli.launch import option_parsing
from anabatic.config.loading import command_table, settings
from anabatic.core.errors import AnabaticError
from anabatic_testing.multiprocess import find_free_port
from e2e import command
from house import tree
from pages import blocks, stand
from pages.how import ALL, How, how, sized
from suite import isolation

PROGRAM = f'#!/bin/sh\nexec {sys.executable} -m anabatic "$@"\n'
CACHE = Path(os.environ[isolation.SIM_CACHE])
PORT = "8000"
"""Where the pages' servers listen."""


RUN: set[frozenset[str]] = set()
"""Commands that have run here: what differs from one of them in names alone is read, unless ANABATIC_TEST_DOCS=all."""
NAMES = {"--model", "-m", "--model.path", "--tokenizer", "--data", "--data.train", "--data.valid", "--out", "-o", "-p"}
"""Options whose values are names and texts of the example."""


def alike(text: str) -> list[str]:
    """Return the words of a command without names of files, runs and models."""
    words = shlex.split(text)
    return [word for before, word in zip(["", *words], words, strict=False) if before not in NAMES]


def written(words: list[str]) -> list[str]:
    """Return where a command writes: what it says, else the default of a training."""
    said = [words[words.index(option) + 1] for option in ("--out", "-o") if option in words]
    names = [name for name in command_table.COMMANDS if words[: len(name.split())] == name.split()]
    row = command_table.COMMANDS.find_row(max(names, key=len)) if names else None
    return said or (
        [settings.default_tree(row.import_job_class())["out"]] if row and row.is_training and "-c" not in words else []
    )


@dataclass
class Visit:
    """A reader of one page: the folder, what was exported, the server that runs."""

    folder: Path
    cache: Path
    variables: dict[str, str] = field(default_factory=dict)
    server: command.Running | None = None
    port: int = 0
    said: dict[str, stand.Told] = field(default_factory=dict)
    """Command -> what it printed."""

    def type(self, one: blocks.Command) -> None:
        """Do with a command what the table says.

        Raises:
            AssertionError: it does not work.
        """
        row = how(one.text)
        ways = {
            "run": self._run,
            "dry": self._dry,
            "plan": self._plan,
            "read": self._read,
            "shell": self._shell,
            "curl": self._curl,
            "program": self._has_options,
            "serve": self._serve,
            "metrics": self._metrics,
            "sim": self._sim,
        }
        if row.way in ways:
            key = frozenset(alike(one.text))
            again = key in RUN and row.way == "run" and not one.text.startswith("export ")
            (self._read if (row.costly or again) and not ALL else ways[row.way])(one.text, row)
            RUN.add(key)

    def leave(self) -> None:
        """End the server, as a reader does with Ctrl-C."""
        server, self.server = self.server, None
        if server is not None:
            server.send_signal(signal.SIGINT)
            told = command.end(server, None)
            assert told.code in (0, 130), told.err

    def _run(self, text: str, row: How) -> None:
        """In a process, with a training of two steps."""
        if text.startswith("export "):
            self.variables.update(word.split("=", 1) for word in shlex.split(text)[1:])
            return
        for theirs, ours in row.here:
            text = re.sub(rf"{theirs}\b", ours, text)
        words = self._words(text)
        for place in written(words):  # what stands there would be continued
            self._remove(self.folder / place)
        self._told(text, sized(words), row)

    def _told(self, text: str, words: Sequence[str], row: How) -> None:
        told = stand.end(stand.run(words, self.folder, {**self.variables, **dict(row.variables)}, self.cache))
        self.said[text] = told
        assert told.code in row.codes, f"exit code {told.code}\n{told.out}\n{told.err}"
        if ">" in shlex.split(text):
            (self.folder / shlex.split(text)[-1]).write_text(told.out, encoding="utf-8")

    def _dry(self, text: str, row: How) -> None:
        """Every stage is checked, none is begun."""
        words = self._words(text)
        self._told(text, [*words, *(["--dry-run"] if "--dry-run" not in words else [])], row)

    def _plan(self, text: str, row: How) -> None:
        """On paper, where no folder stands for a published model."""
        models, aside = self.folder / "Qwen", self.folder / "aside"
        models.rename(aside)
        try:
            self._told(text, self._words(text), row)
        finally:
            aside.rename(models)

    def _remove(self, path: Path) -> None:
        assert path.resolve().is_relative_to(self.folder.resolve()), path
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)

    def _words(self, text: str) -> list[str]:
        """Return the words behind `anabatic`; globs are opened. Variables in front are for what is only read."""
        words = shlex.split(text)
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            assert how(text).way == "read", f"{words[0]} is lost"
            words.pop(0)
        assert words[0] == "anabatic", f"{words[0]} is not a program the pages use"
        words = words[1 : words.index(">") if ">" in words else None]
        return [name for word in words for name in self._named(word)]

    def _named(self, word: str) -> list[str]:
        if re.fullmatch(r"[\w/.-]*\*[\w/.*-]*", word):
            return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.glob(word))
        return [word]

    def _read(self, text: str, row: How) -> None:
        """Words, options, values, recipes: everything up to the work itself."""
        words = self._words(text)
        name, rest = command_tree.find_command(words)
        _, line = command_tree.parse_command(name, rest)
        inner = words[words.index("--") + 1 :] if "--" in words else []
        if inner[:1] == ["anabatic"]:
            self._read(shlex.join(inner), row)
        elif inner and words[0] in ("launch", "plan", "bench") and words[:2] != ["bench", "compare"]:
            os.chdir(self.folder)
            made_up = words[0] == "bench" and "--length" in words  # rows that take the place of data
            option_parsing.resolve_training_job([*inner, *(["--data.train", "stdlib:"] if made_up else [])])
        if command_tree.is_job(command_tree.COMMANDS[name]):
            options = job_command.read_job_options(name, line)
            os.chdir(self.folder)
            settings.load_job(name, options.files, options.tree)

    def _shell(self, text: str, row: How) -> None:
        """As it stands, by bash."""
        self._program(["bash", "-ec", text], {"PATH": f"{self._programs()}:{os.environ['PATH']}"})

    def _programs(self) -> Path:
        """Return a folder in which `anabatic` is a program."""
        programs = self.folder / "bin"
        if not programs.exists():
            programs.mkdir()
            (programs / "anabatic").write_text(PROGRAM)
            (programs / "anabatic").chmod(0o755)
        return programs

    def _curl(self, text: str, row: How) -> None:
        if shutil.which("curl") is None:
            print("no curl here")
            return
        if self.server is None:
            self._serve("anabatic serve runs/demo/sft", row)  # the page began it elsewhere
        asked = text.replace(f":{PORT}", f":{self.port}").replace("curl ", "curl -sS --fail-with-body ")
        self._program(["bash", "-ec", asked], {})

    def _program(self, line: Sequence[str], variables: dict[str, str]) -> None:
        outer = {**os.environ, "ANABATIC_CACHE": str(self.cache), **variables}
        done = subprocess.run(line, cwd=self.folder, env=outer, capture_output=True, text=True, timeout=900)
        self.said[line[-1]] = stand.Told(done.returncode, done.stdout, done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr

    def _serve(self, text: str, row: How) -> None:
        self.leave()
        self.port = find_free_port()
        words = [*self._words(text), "--port", str(self.port)]
        self.server = stand.run(words, self.folder, self.variables, self.cache)
        address = f"http://127.0.0.1:{self.port}/health"
        command.wait_for(self.server, lambda: _answers(address))

    def _metrics(self, text: str, row: How) -> None:
        """An exporter: it is asked once."""
        self.leave()
        words = self._words(text)
        self.port = find_free_port()
        at = words.index("--prom") + 1
        words[at] = words[at].rpartition(":")[0] + f":{self.port}"
        self.server = stand.run(words, self.folder, self.variables, self.cache)
        command.wait_for(self.server, lambda: _answers(f"http://127.0.0.1:{self.port}/metrics"))
        self.leave()

    def _has_options(self, text: str, row: How) -> None:
        """A program of `benchmarks/`: its options are in its source, or in that of a module beside it."""
        _, file, *words = shlex.split(text)
        source = (tree.ROOT / file).read_text(encoding="utf-8")
        beside = {
            tree.ROOT / "benchmarks" / f"{name}.py" for name in re.findall(r"^(?:import|from) (\w+)", source, re.M)
        }
        source += "".join(path.read_text(encoding="utf-8") for path in beside if path.is_file())
        missing = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
        assert not missing, f"{file} has no {missing}"

    def _sim(self, text: str, row: How) -> None:
        """On simulated devices, where the wheel can be had."""
        if not simulator():
            self._read(text, row)
            return
        path = f"{self._programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._program(["bash", "-ec", text], {"PATH": path, "ANABATIC_CACHE": str(CACHE)})


@functools.cache
def simulator() -> bool:
    """True where simulated devices can be had; they are built if need be."""
    from anabatic_sim.libraries import native_build

    own = os.environ.get("ANABATIC_CACHE", "")
    os.environ["ANABATIC_CACHE"] = str(CACHE)
    try:
        native_build.prepare_build()
    except AnabaticError as error:
        print(f"no simulated NPU here: {error}")
        return False
    finally:
        os.environ["ANABATIC_CACHE"] = own
    return True


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def pages() -> list[Path]:
    """Return the pages with commands."""
    return [page for page in blocks.ENGLISH if lines(page)]


def lines(page: Path) -> list[blocks.Command]:
    """Return the commands of a page."""
    return [one for block in blocks.blocks(page) if block.language == "bash" for one in blocks.commands(block)]


def title(page: Path) -> str:
    """Return how a page is named in a test."""
    return tree.name(page).removeprefix("docs/en/").removesuffix(".md")
