"""A disk that fills up while a run saves, and one that cannot be written: nothing saved before is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e import command
from e2e.home import Home

Remount = Callable[[str], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Remount]]:
    """A small file system of its own, and the function that changes its options."""
    if os.geteuid():
        pytest.skip("only root may mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this machine lets nobody mount a small disk: {made.stderr.strip()}")
    yield folder, lambda options: subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True) and None
    subprocess.run(["umount", "-l", folder], check=True)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))


def last_lines(result: command.Result) -> str:
    """Return the error and its hint, which end what is said; a slow machine may find its device figures after that."""
    assert result.err.count("error: ") == 1
    lines = [line for line in result.err.splitlines() if not line.startswith("device figures come from")]
    return "\n".join(lines[-2:])


def test_a_disk_that_fills_up(home: Home, base: Path, disk: tuple[Path, Remount]) -> None:
    """First there is no room for a third checkpoint, then none for a model; with room the run comes to its end."""
    folder, remount = disk
    out = folder / "run"
    saved = size_of(base / f"checkpoint-{command.checkpoints(base)[-1]}")
    more = {"save.keep-last": 9, "eval.every": 0}

    remount(f"size={int(2.6 * saved)}")
    full = last_lines(home.anabatic(*home.pretrain(out, more=more), code=1))
    assert f"error: {out / 'checkpoint-15'} needs " in full and "are free" in full
    assert "hint: free some space or lower save.keep_last; older checkpoints are untouched" in full
    assert command.checkpoints(out) == [5, 10] and not list(out.glob(".*tmp"))

    remount(f"size={int(3.3 * saved)}")
    more = {"save.keep-last": 3, "save.every": 0, "eval.every": 0}
    full = last_lines(home.anabatic(*home.pretrain(out, more=more), code=1))
    assert f"error: no space left while writing {out}/" in full and "everything saved before is still whole" in full
    assert command.checkpoints(out) == [5, 10, 40]
    assert not (out / "final_model").exists() and not list(out.glob(".*tmp"))

    remount(f"size={20 * saved}")
    home.anabatic(*home.pretrain(out, more=more))
    assert command.losses(out) == command.losses(base)
    weights = [(run / "final_model" / "model.safetensors").read_bytes() for run in (base, out)]
    assert weights[0] == weights[1]

    remount("ro")
    refused = last_lines(home.anabatic(*home.pretrain(out, more=more), code=1))
    assert f"error: cannot write {out}: Read-only file system\nhint: choose a folder you own with --out DIR" in refused


def test_a_folder_that_nobody_may_write(home: Home) -> None:
    refused = last_lines(home.anabatic(*home.pretrain(Path("/proc/run")), code=1))
    assert "error: cannot write /proc/run: No such file or directory\nhint: choose a folder you own" in refused
