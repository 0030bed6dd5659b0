"""Programs on simulated NPUs, in processes of their own. The wheel and the build are those of the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from anabatic.core.errors import AnabaticError
from e2e import warm
from suite import isolation

PROGRAMS = Path(__file__).parent / "programs"
CACHE = Path(os.environ[isolation.SIM_CACHE])


@dataclass
class Sim:
    """Runs programs through `anabatic sim`."""

    folder: Path

    def command(self, *words: str, flags: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a simulated machine."""
        line = [sys.executable, "-m", "anabatic", "sim", *flags, "--", *words]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("ANABATIC_SIM_")}
        outer = {**inherited, "ANABATIC_CACHE": str(CACHE), **variables}
        if warm.program(words) and not variables:  # some of those are read when torch is loaded
            started = warm.simulated(CACHE).start(line, outer, self.folder)
            if started is not None:
                out, err = started.communicate(timeout=800)
                return subprocess.CompletedProcess(line, started.wait(), out, err)
        return subprocess.run(line, env=outer, cwd=self.folder, capture_output=True, text=True, timeout=800)

    def python(self, code: str, *, npus: int = 1, flags: Sequence[str] = (), **variables: str) -> str:
        """Run Python code that must succeed; return what it printed."""
        file = self.folder / "program.py"
        file.write_text(textwrap.dedent(code), encoding="utf-8")
        done = self.command("python", str(file), flags=["--npus", str(npus), *flags], **variables)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    def program(self, name: str, *words: str, flags: Sequence[str] = ()) -> str:
        """Run a program of `programs/`, which must succeed; return what it printed."""
        done = self.command("python", str(PROGRAMS / name), *words, flags=flags)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()


@pytest.fixture(scope="session")
def _built() -> None:
    from anabatic_sim.libraries import native_build

    old = os.environ.get("ANABATIC_CACHE")
    os.environ["ANABATIC_CACHE"] = str(CACHE)
    try:
        native_build.prepare_build()
    except AnabaticError as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(f"no simulated NPU here: {error}")
    finally:
        os.environ.pop("ANABATIC_CACHE")
        if old is not None:
            os.environ["ANABATIC_CACHE"] = old


@pytest.fixture
def sim(_built: None, tmp_path: Path) -> Sim:
    """The simulator; skips, with the reason, where the compiler or the wheel is missing."""
    folder = tmp_path / "work"
    folder.mkdir()
    return Sim(folder)
