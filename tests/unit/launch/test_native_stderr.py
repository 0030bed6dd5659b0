"""What libraries write to the standard error of a rank is kept, and explained where the rank left no message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.core import relaunch
from anabatic.core.errors import TRACEBACK_HINT
from anabatic.launch.local import worker_reports

WORKER = """
import os, sys
from pathlib import Path
from anabatic.core import relaunch
relaunch.redirect_native_stderr(Path(sys.argv[1]) / relaunch.NATIVE_STDERR_FILE.format(2))
sys.stderr.write("for the user\\n")
os.write(2, b"terminate called: EI0002: The wait execution of the Notify register times out.\\n")
os.abort()
"""


@pytest.mark.process
def test_a_library_that_takes_a_rank_down(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONFAULTHANDLER": ""}
    ran = subprocess.run([sys.executable, "-c", WORKER, tmp_path], capture_output=True, text=True, env=environment)
    assert ran.returncode < 0 and ran.stderr == "for the user\n"
    written = worker_reports.read_stderr_tail(tmp_path, 2)
    assert written.startswith("terminate called: EI0002")
    assert "EI0002" in worker_reports.explain_stderr(written) and worker_reports.explain_stderr(written).startswith(
        "hint: "
    )
    out = tmp_path / "run"
    out.mkdir()
    (out / "rank-2.log").write_text("INFO step 1\n")
    worker_reports.append_to_rank_logs(tmp_path, [2, 3], out)
    assert (out / "rank-2.log").read_text() == f"INFO step 1\n{written}" and not (out / "rank-3.log").exists()


def test_nothing_was_written(tmp_path: Path) -> None:
    assert worker_reports.read_stderr_tail(tmp_path, 0) == "" and worker_reports.explain_stderr("") == ""
    worker_reports.append_to_rank_logs(tmp_path, [0], None)
    assert relaunch.NATIVE_STDERR_FILE.format(0) == "rank-0.native"


def test_a_rank_that_could_not_explain_itself(tmp_path: Path) -> None:
    told = worker_reports.WorkerReport(
        [0, 1], {"error: unexpected RuntimeError: error code is 507899\nhint: " + TRACEBACK_HINT: [1]}
    )
    assert told.failure_hint() == "" and "507899" in worker_reports.explain_failure(tmp_path, told)
    assert worker_reports.explain_failure(tmp_path, worker_reports.WorkerReport([0])) == ""
