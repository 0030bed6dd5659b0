"""What libraries write to the standard error of a rank is kept, and explained where the rank left no message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from anabatic.core import child
from anabatic.core.errors import TRACEBACK
from anabatic.launch import native, reports

WORKER = """
import os, sys
from pathlib import Path
from anabatic.core import child
child.keep_native_output(Path(sys.argv[1]) / child.NATIVE.format(2))
sys.stderr.write("for the user\\n")
os.write(2, b"terminate called: EI0002: The wait execution of the Notify register times out.\\n")
os.abort()
"""


def test_a_library_that_takes_a_rank_down(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONFAULTHANDLER": ""}
    ran = subprocess.run([sys.executable, "-c", WORKER, tmp_path], capture_output=True, text=True, env=environment)
    assert ran.returncode < 0 and ran.stderr == "for the user\n"
    written = native.text(tmp_path, 2)
    assert written.startswith("terminate called: EI0002")
    assert "EI0002" in native.hint(written) and native.hint(written).startswith("hint: ")
    out = tmp_path / "run"
    out.mkdir()
    (out / "rank-2.log").write_text("INFO step 1\n")
    native.keep(tmp_path, [2, 3], out)
    assert (out / "rank-2.log").read_text() == f"INFO step 1\n{written}" and not (out / "rank-3.log").exists()


def test_nothing_was_written(tmp_path: Path) -> None:
    assert native.text(tmp_path, 0) == "" and native.hint("") == ""
    native.keep(tmp_path, [0], None)
    assert child.NATIVE.format(0) == "rank-0.native"


def test_a_rank_that_could_not_explain_itself(tmp_path: Path) -> None:
    told = reports.Told([0, 1], {"error: unexpected RuntimeError: error code is 507899\nhint: " + TRACEBACK: [1]})
    assert told.why() == "" and "507899" in native.explained(tmp_path, told)
    assert native.explained(tmp_path, reports.Told([0])) == ""
