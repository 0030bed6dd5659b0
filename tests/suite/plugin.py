"""What pytest does here beyond its own: groups, who may start processes, the order of files, seconds of each test."""

from __future__ import annotations

import json
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import sys
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from suite import isolation
from suite.groups import ROOT, Group, SuiteError, find_group, read_groups
from suite.record import ARTIFACT, NOT_RUN, Measured, read_record

STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
"""Events of Python's audit hooks (PEP 578) by which a process starts."""
HARMLESS = frozenset({"git", "uname", "ldconfig"})
"""Programs that any test may start: `git ls-files` lists the project, Python's own `platform` asks the others."""
_GROUP = pytest.StashKey[Group]()
_OUTCOME = pytest.StashKey[str]()
_CALL = pytest.StashKey[float]()
_STARTED = pytest.StashKey[str]()
"""What a test of a group without processes tried to start."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of scripts/run_tests.py."""
    parser.addoption("--groups", help="run the tests of these groups of tests/groups.toml alone: house,unit")
    parser.addoption("--files", help="run these files alone: a file with a path in each line")
    parser.addoption("--until", type=float, help="start no test after this time, in seconds since the epoch")


def pytest_configure(config: pytest.Config) -> None:
    """Make each group a marker, so that `-m "unit or house"` works, and watch who starts processes.

    Raises:
        pytest.UsageError: the table, the record or the option `--groups` is wrong.
    """
    try:
        for group in read_groups():
            config.addinivalue_line("markers", f"{group.name}: {group.about}")
        read_record()
    except SuiteError as error:
        raise pytest.UsageError(str(error)) from error
    _chosen_groups(config)
    sys.addaudithook(_watch)
    _watch_multiprocessing()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out, without importing them, that have no test of the chosen groups."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    name = _relative(collection_path)
    if (files := _chosen_files(config)) is not None and name not in files:
        return True
    if (chosen := _chosen_groups(config)) is None:
        return None
    group = find_group(name)
    if group is None or group.name in chosen:
        return None
    marked = [one.name for one in read_groups() if not one.folder and one.name in chosen]
    text = collection_path.read_text(encoding="utf-8") if marked and not group.processes else ""
    return None if any(f"mark.{one}" in text for one in marked) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its group, keep the chosen ones, skip devices that are not here, longest files first.

    Raises:
        pytest.UsageError: a test is in no group.
    """
    chosen = _chosen_groups(config)
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        name = _relative(item.path)
        group = find_group(name, {marker.name for marker in item.iter_markers()})
        if group is None:
            raise pytest.UsageError(f"{name} is in no group: add its folder to tests/groups.toml")
        item.stash[_GROUP] = group
        item.add_marker(group.name)
        if group.processes and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # commands, one after the other, on a slow machine
        (kept if chosen is None or group.name in chosen else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
    record = read_record()
    kept.sort(key=lambda item: (-record.seconds_of(_relative(item.path)), _relative(item.path)))
    items[:] = kept
    for kind in ("npu", "cuda"):
        marked = [item for item in items if item.get_closest_marker(kind)]
        if marked and not _has_device(kind):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"no {kind} device here"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file stay on one worker and share its fixtures; files go out in the order of the collection."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Leave the folder in which pytest was started."""
    with isolation.outer_place():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a test with its fixtures, and let it start processes only if its group may."""
    start, cpu = time.monotonic(), _cpu_seconds()
    _Watch.item = item
    try:
        result = yield
    finally:
        _Watch.item = None
    if prefix := os.environ.get(ARTIFACT):
        seconds, used = round(time.monotonic() - start, 3), round(max(_cpu_seconds() - cpu, 0.0), 3)
        call, outcome = item.stash.get(_CALL, 0.0), item.stash.get(_OUTCOME, "passed")
        measured = Measured(item.nodeid, item.stash[_GROUP].name, seconds, call, used, outcome)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        with open(f"{prefix}-{worker}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(measured)) + "\n")
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out, before its fixtures are made, what there is no time for."""
    until = item.config.getoption("--until")
    if until and time.time() > until:
        item.stash[_OUTCOME] = NOT_RUN
        pytest.skip("the time is up")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember how the test ended, and how long it took without its fixtures."""
    report = yield
    tried = item.stash.get(_STARTED, "")
    if report.when == "call" and report.passed and tried:  # it was refused, and the code under test has caught that
        report.outcome, report.longrepr = "failed", tried
    if report.when == "call":
        item.stash[_CALL] = round(report.duration, 3)
    if report.outcome != "passed":
        item.stash.setdefault(_OUTCOME, report.outcome)
    return report


class ProcessRefused(RuntimeError):
    """A test tried to start a process and may not."""


def allow_tried_process(item: pytest.Item) -> None:
    """Forget a start that was refused: for the tests of the refusal itself."""
    item.stash[_STARTED] = ""


class _Watch:
    """The test that runs, if one does."""

    item: pytest.Item | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event not in STARTS or (item := _Watch.item) is None or item.stash[_GROUP].processes:
        return
    program = str(args[0]) if event == "subprocess.Popen" else event
    if not _is_harmless(program):
        _refuse(item, program)


def _is_harmless(program: str) -> bool:
    """Return whether it is one of the programs that any test may start, from where the system has it."""
    name = os.path.basename(program)
    return name in HARMLESS and program in (name, shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin"))


def _refuse(item: pytest.Item, program: str) -> None:
    name = item.stash[_GROUP].name
    item.stash[_STARTED] = (
        f"a test of the group {name} starts a process ({program}): mark it with @pytest.mark.process, "
        "which leaves it to make test-all (tests/groups.toml)"
    )
    raise ProcessRefused(item.stash[_STARTED])


def _watch_multiprocessing() -> None:
    """`multiprocessing` starts its processes, and its trackers and servers, by functions without an audit event."""
    start, spawn = multiprocessing.process.BaseProcess.start, multiprocessing.util.spawnv_passfds

    def refuse() -> None:
        if (item := _Watch.item) is not None and not item.stash[_GROUP].processes:
            _refuse(item, "multiprocessing")

    def watched_start(process: multiprocessing.process.BaseProcess) -> None:
        refuse()
        start(process)

    def watched_spawn(*args: Any) -> int:
        refuse()
        return int(spawn(*args))

    multiprocessing.process.BaseProcess.start = watched_start  # type: ignore[method-assign]
    multiprocessing.util.spawnv_passfds = watched_spawn


def _cpu_seconds() -> float:
    """CPU seconds of this process, of its ended children, and of the living ones (servers that fork programs)."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children():
        try:
            used = child.cpu_times()
        except psutil.Error:  # it has ended meanwhile, and is counted above the next time
            continue
        total += used.user + used.system + used.children_user + used.children_system
    return total


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def _chosen_groups(config: pytest.Config) -> frozenset[str] | None:
    names = config.getoption("--groups")
    if not names:
        return None
    chosen = frozenset(str(names).split(","))
    if unknown := chosen - {group.name for group in read_groups()}:
        known = ", ".join(group.name for group in read_groups())
        raise pytest.UsageError(f"--groups names {', '.join(sorted(unknown))}\nhint: groups are {known}")
    return chosen


def _chosen_files(config: pytest.Config) -> frozenset[str] | None:
    path = config.getoption("--files")
    return frozenset(Path(path).read_text(encoding="utf-8").split()) if path else None


def _has_device(kind: str) -> bool:
    import torch

    module = getattr(torch, kind, None)  # torch.npu exists only where torch_npu is installed
    return module is not None and bool(module.is_available())
