"""Runs one test of pytest in a process and a simulation of its own, and takes its reports over.

A device that has failed answers nothing more in the process that met the failure: tests with faults must not share it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from anabatic_sim import live_machine
from anabatic_sim.machine_spec import REPORT_VARIABLE, SEGMENT_VARIABLE, TRACE_VARIABLE

RESULTS_OPTION = "--npu-sim-results"
RESULTS_DESTINATION = "npu_sim_results"
"""The option as pytest's configuration names it."""
WORKER_VARIABLE = "PYTEST_XDIST_WORKER"
"""pytest-xdist sets it in its processes (`gw0`, `gw1`)."""
_DROPPED_VARIABLES = (
    SEGMENT_VARIABLE,
    REPORT_VARIABLE,
    TRACE_VARIABLE,
    WORKER_VARIABLE,
    "PYTEST_XDIST_WORKER_COUNT",
    "PYTEST_XDIST_TESTRUNUID",
    "PYTEST_CURRENT_TEST",
)
"""Variables that the new process must not inherit: it starts its own machine and is pytest's only process."""
_LAUNCHER = (
    "import sys; sys.path[:] = [folder for folder in sys.path if folder]; "
    "from anabatic_sim.standalone_command import main; sys.exit(main())"
)
"""As `python -m` would, but no module of the current folder hides one of the standard library."""
_TAIL = 4000
"""Characters of the output that are shown when there is no report."""


def make_command(flags: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the words that run `command` in a simulation."""
    return [sys.executable, "-c", _LAUNCHER, *flags, "--", *command]


class ResultWriter:
    """A plugin for the process of one test: writes each report as a line of JSON."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._path = Path(config.getoption(RESULTS_DESTINATION))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append a report, in the form in which pytest-xdist sends them."""
        row = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def run_test(item: pytest.Item, faults: Sequence[str], npus: int | None) -> None:
    """Run a test with faults on a machine like ours, or with another number of devices; report it as ours."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with live_machine.attach_machine() as machine:
        flags = ["--npus", str(npus or machine.npus), "--chip", machine.chip, "--hbm", str(machine.hbm_bytes)]
    for fault in faults:
        flags += ["--fault", fault]
    with tempfile.TemporaryDirectory(prefix="npu-sim-") as folder, tempfile.TemporaryFile("w+") as output:
        results = Path(folder) / "results.jsonl"
        line = make_command(flags, [sys.executable, "-m", "pytest", *_list_words(item, results, Path(folder))])
        inner = {name: value for name, value in os.environ.items() if name not in _DROPPED_VARIABLES}
        ended = _run_and_wait(item, line, inner, output)
        rows = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
        reports = [_load_report(item, json.loads(row)) for row in rows]
        if not any(report.when == "teardown" for report in reports):
            output.seek(0)
            text = f"{ended} before the test was reported\n{output.read()[-_TAIL:]}"
            reports.append(_make_failed_report(item, text))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _run_and_wait(item: pytest.Item, line: list[str], environment: dict[str, str], output: IO[str]) -> str:
    """Return how the simulation ended. A time limit of pytest-timeout raises inside of it."""
    folder = item.config.invocation_params.dir
    with subprocess.Popen(
        line, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    ) as process:
        try:
            return f"the simulation ended with exit code {process.wait()}"
        except pytest.fail.Exception as error:
            process.terminate()
            return str(error)
        except BaseException:
            process.terminate()
            raise


def _list_words(item: pytest.Item, results: Path, folder: Path) -> list[str]:
    """Return pytest's words: the options that were given, one test, and what must not be shared with us."""
    config = item.config
    main_words: list[str] = getattr(config, "workerinput", {}).get("mainargv", ["", *config.invocation_params.args])
    chosen = {str(word) for word in config.option.file_or_dir or ()}
    words = [word for word in map(str, main_words[1:]) if word not in chosen]
    words += [f"--rootdir={config.rootpath}", f"{RESULTS_OPTION}={results}", "-o", f"cache_dir={folder / 'cache'}"]
    words += ["-c", str(config.inipath)] if config.inipath else []
    words += ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
    words += [f"--junitxml={folder / 'junit.xml'}"] if config.getoption("xmlpath", None) else []
    return [*words, str(config.rootpath / item.nodeid)]


def _load_report(item: pytest.Item, row: dict[str, Any]) -> pytest.TestReport:
    if isinstance(where := row.get("longrepr"), list):  # of a skipped test: a tuple for pytest, a list in JSON
        row = {**row, "longrepr": tuple(where)}
    report: pytest.TestReport = item.config.hook.pytest_report_from_serializable(config=item.config, data=row)
    report.nodeid = item.nodeid
    return report


def _make_failed_report(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when="call",
    )
