"""Run the tests by groups (tests/groups.toml), and say at the end what ran, what was left, and how long it took.

usage: python scripts/run_tests.py test                 what `make test` runs: checks and the quick groups
       python scripts/run_tests.py rest                 what else `make test-all` runs
       python scripts/run_tests.py all                  both, one after the other
       python scripts/run_tests.py changed [--base main]  the tests that the files that differ can affect
       python scripts/run_tests.py pick -- ARGUMENTS    pytest with these arguments, in all groups
       python scripts/run_tests.py record               keep the seconds of the last `all` in tests/seconds.json
       python scripts/run_tests.py matrix               the groups and shards as JSON, for the workflows

--jobs N   tests at a time; default: the number of cores
--shard I/N   the I-th of N parts of about the same duration
--minutes M   start no test of `rest` after so many minutes; the last lines name what was not run
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from suite import groups, record  # noqa: E402

BIN = Path(sys.executable).parent
NOTHING_SELECTED = 5
"""Exit code of pytest when there was no test to run (https://docs.pytest.org/en/stable/reference/exit-codes.html)."""
CHECKS = (("ruff", "check"), ("ruff", "format", "--check"), ("lint-imports",), ("mypy",))
TENTH = "0.1"
PYTEST = ("-m", "pytest", "--dist", "loadfile", "--no-loadscope-reorder")
END_SECONDS = 20.0
"""Seconds that an interrupted part has to end by itself."""
INTERRUPTED = 130
LEFT_OUT = ("PYTEST_ADDOPTS", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "MAKEFLAGS", "MFLAGS")
"""Variables that would change which tests run, or what they test."""


@dataclass
class Part:
    """One process beside the others: pytest over some groups, or a tool."""

    name: str
    words: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)
    shown: bool = False
    """It writes to the terminal while it runs; the others write to a file, which is shown if they fail."""
    may_be_empty: bool = False
    """It may find no test to run: a shard has not every group."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Return the file that gets its output."""
        return record.ARTIFACTS / f"{self.name}.log"

    def start(self) -> None:
        """Start it."""
        STARTED.append(self)
        environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
        output = None if self.shown else self.log.open("wb")
        self.process = subprocess.Popen(
            self.words,
            cwd=ROOT,
            env=environment | self.variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
        )

    def wait(self) -> bool:
        """Wait for its end, show what it wrote if it failed, and return whether it succeeded."""
        assert self.process is not None
        code = self.process.wait()
        passed = code == 0 or (code == NOTHING_SELECTED and self.may_be_empty)
        if not passed:
            FAILED.append(self.name if self.shown else f"{self.name} ({self.log.relative_to(ROOT)})")
        if not self.shown:
            lines = self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
            print(f"\n== {self.name}: {'passed' if passed else f'FAILED, exit code {code}'}")
            print("\n".join(lines[-1:] if passed else lines[-400:]), flush=True)
        return passed

    def end(self) -> None:
        """Let it end by itself after a signal to all processes; then end it."""
        if self.process is not None and self.process.poll() is None:
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.terminate()
                self.process.wait()


FAILED: list[str] = []
"""Names of the parts that failed, for the last line."""
STARTED: list[Part] = []


def build_pytest(
    name: str,
    chosen: Sequence[groups.Group],
    jobs: int,
    files: Sequence[str] | None = None,
    shown: bool = False,
    until: float | None = None,
) -> Part:
    """Return pytest over some groups, or over some files of them."""
    names = [group.name for group in chosen]
    words = [sys.executable, *PYTEST, "-n", str(jobs), "-q"]
    words += ["--groups", ",".join(names), *groups.folders_of(names)]
    if until is not None:
        words += ["--until", str(until)]
    if files is not None:
        listed = record.ARTIFACTS / f"{name}.files"
        listed.write_text("\n".join(files), encoding="utf-8")
        words += ["--files", str(listed)]
    variables = {record.ARTIFACT: str(record.ARTIFACTS / name)}
    if name == "quick":
        variables["ANABATIC_TEST_FUZZ"] = os.environ.get("ANABATIC_TEST_FUZZ", TENTH)
    return Part(name, words, variables, shown, may_be_empty=files is not None)


def list_test_files() -> list[str]:
    """Return the test files, relative to the project."""
    return sorted(path.relative_to(ROOT).as_posix() for path in groups.TESTS.rglob("test_*.py"))


def select_shard(files: Sequence[str], shard: tuple[int, int]) -> list[str]:
    """Return the files of one shard: longest first, each to the shard that has the least so far."""
    known = record.read_record()
    loads = [0.0] * shard[1]
    chosen: list[str] = []
    for file in sorted(files, key=lambda name: (-known.seconds_of(name), name)):
        least = loads.index(min(loads))
        loads[least] += known.seconds_of(file)
        if least == shard[0] - 1:
            chosen.append(file)
    return chosen


def run_quick(jobs: int, files: Sequence[str] | None, checks: bool) -> bool:
    """Run the checks and the quick groups at the same time."""
    parts = [Part("check-" + "-".join(words), [str(BIN / words[0]), *words[1:]]) for words in CHECKS] if checks else []
    chosen = [group for group in groups.read_groups() if group.is_quick]
    tests = build_pytest("quick", chosen, jobs, files, shown=True)
    tests.start()
    passed = True
    for part in parts:  # one after the other: beside the tests they would only wait for cores
        part.start()
        passed &= part.wait()
    return tests.wait() and passed


def run_rest(jobs: int, files: Sequence[str] | None, minutes: int | None) -> bool:
    """Run what the quick part has left: what computes with all workers, what waits in one process beside them."""
    until = None if minutes is None else time.time() + 60 * minutes
    left = [group for group in groups.read_groups() if not group.is_quick or group.name == "fuzz"]
    waiting = build_pytest("waiting", [group for group in left if group.session == "waiting"], 1, files, until=until)
    chosen = [group for group in left if group.session == "main"]
    main = build_pytest(
        "rest", chosen, jobs + 2, files, shown=True, until=until
    )  # half of their time is spent in waiting
    waiting.start()
    main.start()
    passed = main.wait()
    return waiting.wait() and passed


def run_changed(base: str, jobs: int) -> int:
    """Run the quick tests that changed files can affect, and name the others."""
    from suite import changed

    started = time.monotonic()
    names = changed.list_changes(base)
    quick, others = changed.split_quick(changed.TestGraph().find_affected(names))
    print(f"{len(names)} files differ from {base}; they can affect {changed.describe(quick)} of make test")
    if others:
        print(f"and {changed.describe(others)} of make test-all, which are not run: {', '.join(others[:4])} ...")
    if not quick:
        return 0
    chosen = [group for group in groups.read_groups() if group.is_quick]
    tests = build_pytest("quick", chosen, jobs, quick, shown=True)
    tests.start()
    passed = tests.wait()
    report(started, left=False)
    return 0 if passed else 1


def start_simulator() -> Part:
    """Compile the simulator into the user's cache, as its first use does, so that tests find it."""
    part = Part("simulator", [str(BIN / "anabatic"), "sim", "--", "true"])
    part.start()
    return part


def report(started: float, left: bool) -> None:
    """Print what ran: tests, seconds and CPU seconds by group, the longest tests, and what was left out."""
    measured = record.read_artifacts()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcomes = Counter(one.outcome for one in measured)
    by_group: dict[str, list[record.Measured]] = defaultdict(list)
    for one in measured:
        by_group[one.group].append(one)
    print(f"\n{'group':<10}{'tests':>8}{'wall s':>9}{'CPU s':>8}")
    for name, tests in sorted(by_group.items()):
        print(f"{name:<10}{len(tests):>8,}{sum(o.seconds for o in tests):>9,.0f}{sum(o.cpu for o in tests):>8,.0f}")
    longest = sorted(measured, key=lambda one: -one.seconds)[:5]
    print("longest: " + ", ".join(f"{one.test.removeprefix('tests/')} {one.seconds:.0f} s" for one in longest))
    wall, cpu = (time.monotonic() - started) / 60, (used.ru_utime + used.ru_stime) / 60
    counts = ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(outcomes.items()))
    if left:
        rest = [group.name for group in groups.read_groups() if not group.is_quick]
        fuzz = ", and nine tenths of fuzz" if "ANABATIC_TEST_FUZZ" not in os.environ else ""
        print(f"left to make test-all: {', '.join(rest)}{fuzz}")
    omitted = [one.test for one in measured if one.group == "smoke" and one.outcome == "skipped"]
    for test in omitted:
        print(f"left out here: {test.removeprefix('tests/')} (its reason is above, in the short test summary)")
    if not_run := sorted({one.file for one in measured if one.outcome == record.NOT_RUN}):
        print(f"NOT RUN, the time was up: {outcomes[record.NOT_RUN]:,} tests of {', '.join(not_run)}")
    print(f"{counts}, {wall:.1f} minutes, {cpu:.1f} CPU minutes", flush=True)
    if FAILED:
        print(f"FAILED: {', '.join(FAILED)}", flush=True)


def write_record() -> int:
    """Keep the seconds of the last whole run in the repository."""
    measured = record.read_artifacts()
    files = {one.file for one in measured}
    missing = [file for file in list_test_files() if file not in files]
    failed = [one.test for one in measured if one.outcome == "failed"]
    if missing or failed or not record.WHOLE.exists():
        first = f"{len(failed)} tests failed, {failed[0]} among them" if failed else "it did not come to its end"
        why = f"{len(missing)} files are missing, {missing[0]} among them" if missing else first
        print(f"error: the last run is not a whole one: {why}")
        print("hint: make test-all, then this command again")
        return 2
    record.write_record(record.build_record(measured, _describe_machine()))
    print(f"written: {record.RECORD.relative_to(ROOT)}, {record.TABLE.relative_to(ROOT)}")
    return 0


def _describe_machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return f"{names[0] if names else platform.machine()}, {cores} cores, Python {platform.python_version()}"


def print_matrix() -> int:
    """Print what the workflows run: groups for each Python, and shards of everything."""
    each = [group.name for group in groups.read_groups() if group.pythons == "each"]
    print(json.dumps({"each_python": ",".join(each), "shards": [f"{number}/4" for number in range(1, 5)]}))
    return 0


def parse_shard(text: str) -> tuple[int, int]:
    """Return I and N of `I/N`.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise argparse.ArgumentTypeError(f"SHARD is {text!r}, not I/N with 1 <= I <= N\nhint: make test-all SHARD=2/4")
    return int(first), int(second)


def parse_number(name: str, text: str) -> int:
    """Return the value of a variable of make that is a number from 0.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{name} is {text!r}, not a number from 0\nhint: make test-rest {name}=4")
    return int(text)


class Parser(argparse.ArgumentParser):
    """One that says what is wrong as the commands of the package do."""

    def error(self, message: str) -> NoReturn:
        """Print the error and end."""
        self.exit(2, f"error: {message.partition(': ')[2] or message}\n")


def run_pick(arguments: Sequence[str], jobs: int) -> int:
    """Run pytest with arguments of the user; nothing is measured, and an earlier measurement stays."""
    if not arguments or arguments[0] == "--":
        print("error: PYTEST_ARGS names no test\nhint: make test PYTEST_ARGS='tests/unit -k loader -x'")
        return 2
    part = Part("pytest", [sys.executable, *PYTEST, "-n", str(jobs), *arguments], shown=True)
    part.start()
    assert part.process is not None
    return part.process.wait()


def run_command(given: argparse.Namespace) -> int:
    """Run one of the commands and return its exit code."""
    started = time.monotonic()
    if given.command == "pick":
        return run_pick(given.arguments, given.jobs)
    if given.command in ("test", "all", "changed"):
        shutil.rmtree(record.ARTIFACTS, ignore_errors=True)
    record.ARTIFACTS.mkdir(parents=True, exist_ok=True)
    record.WHOLE.unlink(missing_ok=True)
    for path in record.ARTIFACTS.glob("*.jsonl"):
        if not path.name.startswith("quick-"):  # of the `test` before this `rest`
            path.unlink()
    if given.command == "changed":
        return run_changed(given.base, given.jobs)
    files = select_shard(list_test_files(), given.shard) if given.shard else None
    passed = True
    simulator = start_simulator() if given.command != "test" else None
    if given.command in ("test", "all"):
        passed &= run_quick(given.jobs, files, checks=given.shard is None or given.shard[0] == 1)
    if simulator is not None:
        if not simulator.wait():
            print("tests on simulated NPUs are skipped, with the reason")
            FAILED[:] = [name for name in FAILED if not name.startswith(simulator.name)]
        passed &= run_rest(given.jobs, files, given.minutes)
    report(started, left=given.command == "test")
    if passed and files is None and given.minutes is None and given.command != "test":
        record.WHOLE.touch()
    return 0 if passed else 1


def main() -> int:
    """Read the command line and run one command."""
    parser = Parser(usage=str(__doc__).partition("usage: ")[2])
    parser.add_argument("command", choices=("test", "rest", "all", "changed", "pick", "record", "matrix"))
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--jobs", type=partial(parse_number, "JOBS"), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shard", type=parse_shard)
    parser.add_argument("--minutes", type=partial(parse_number, "MINUTES"))
    parser.add_argument("--base", default="main")
    given = parser.parse_args()
    started = time.monotonic()
    try:
        if given.command in ("record", "matrix"):
            return write_record() if given.command == "record" else print_matrix()
        return run_command(given)
    except groups.SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}\nhint: rm -rf build", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        for part in STARTED:
            part.end()
        print(f"\nerror: interrupted after {time.monotonic() - started:.0f} s", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
