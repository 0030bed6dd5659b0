"""A folder for one writer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.core.errors import Failure
from anabatic.core.paths import lock_folder, write_atomic

HOLD = """
import sys, time
from pathlib import Path
from anabatic.core.paths import lock_folder, write_atomic
with lock_folder(Path(sys.argv[1]), "test"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.process
def test_the_second_writer_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    with pytest.raises(Failure, match="another training run works in"), lock_folder(tmp_path, "training run"):
        pass
    first.kill()
    first.wait()
    first.stdout.close()
    with lock_folder(tmp_path, "training run"):
        assert (tmp_path / ".lock").exists()


def test_only_files_are_replaced(tmp_path: Path) -> None:
    """A rename over a device, as of /dev/null by root, would take it from every other program."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "to-pipe"
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path, Path("."), Path("/proc/self/fd/1")):
        with pytest.raises(Failure, match="is no regular file"):
            write_atomic(path, "text")
    assert pipe.is_fifo() and link.is_symlink()


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    for text in ("first", "second"):
        write_atomic(link, text)
        assert link.is_symlink() and (tmp_path / "file").read_text() == text
