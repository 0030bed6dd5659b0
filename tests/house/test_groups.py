"""Tests have a group and a price: who may start processes and take long, and where the table of groups is repeated."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from house import tree
from suite import groups, plugin, record

TESTS = tree.ROOT / "tests"
CONTRIBUTING = (tree.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WORKFLOWS = tree.ROOT / ".github" / "workflows"


def test_every_file_is_in_a_group() -> None:
    lost = [tree.name(path) for path in TESTS.rglob("test_*.py") if groups.find_group(tree.name(path)) is None]
    assert not lost, "add their folder to tests/groups.toml"


def test_rows_of_the_table_are_sound() -> None:
    rows = groups.read_groups()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.command in ("test", "test-all") and row.session in ("main", "waiting"), row.name
        assert row.pythons in ("each", "one"), row.name
        assert not row.folder or list((TESTS / row.folder).glob("**/test_*.py")), f"{row.name}: its folder has no tests"
        assert row.processes or row.is_quick, f"{row.name}: what starts no process belongs to make test"


def test_contributing_repeats_the_table() -> None:
    for row in groups.read_groups():
        line = f"| `{row.name}` | {row.about} | `make {row.command}` |"
        assert line in CONTRIBUTING, f"CONTRIBUTING.md needs this row:\n{line}"


def test_workflows_read_the_table() -> None:
    text = (WORKFLOWS / "ci.yml").read_text(encoding="utf-8")
    assert "scripts/run_tests.py matrix" in text and "fromJSON" in text


def test_the_marker_moves_tests_of_quick_folders_alone() -> None:
    """Elsewhere processes may start anyway, and no session would collect the folder for the group `process`."""
    for file, name in (
        ("unit/core/test_paths.py", "process"),
        ("e2e/test_dpo.py", "e2e"),
        ("smoke/test_train.py", "smoke"),
    ):
        group = groups.find_group(f"tests/{file}", {groups.PROCESS})
        assert group is not None and group.name == name


def is_marked(path: Path, function: str) -> bool:
    """Whether a test function, or its whole file, has the marker `process`."""
    for node in tree.parse(path).body:
        own = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function
        decorators = node.decorator_list if own else []  # type: ignore[attr-defined]
        whole = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        texts = [ast.unparse(one) for one in decorators] + ([ast.unparse(node.value)] if whole else [])  # type: ignore[attr-defined]
        if any("mark.process" in text for text in texts):
            return True
    return False


def test_what_takes_long_is_left_to_test_all() -> None:
    """By the seconds of the last recorded run, which has all cases of fuzz; no test asserts a time of its own."""
    dear = []
    for test, (seconds, _) in record.read_record().tests.items():
        file, _, function = test.partition("::")
        path, group = tree.ROOT / file, groups.find_group(file)
        priced = path.is_file() and group is not None and not group.processes and group.name != "fuzz"
        if priced and not is_marked(path, re.sub(r"\[.*", "", function)):
            dear.append(f"{test}: {seconds:.1f} s")
    assert not dear, "make them faster, or mark them with @pytest.mark.process:\n  " + "\n  ".join(dear)


def test_the_record_knows_the_files() -> None:
    """A few new files may wait for the next record; a record of another time tells nothing."""
    known = record.read_record().files
    files = {tree.name(path) for path in TESTS.rglob("test_*.py")}
    assert len(files - known.keys()) <= 0.1 * len(files), "make test-all, then make test-record"


def test_the_page_shows_the_record() -> None:
    assert record.TABLE.read_text(encoding="utf-8") == record.render_table(record.read_record())


def start_program() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def start_fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def start_spawned() -> None:
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()


@pytest.mark.parametrize("start", [start_program, start_fork, start_spawned, lambda: os.system("true")])
def test_no_process_starts_here(start: Callable[[], None], request: pytest.FixtureRequest) -> None:
    with pytest.raises(plugin.ProcessRefused, match="mark it with @pytest.mark.process"):
        start()
    plugin.allow_tried_process(request.node)


@pytest.mark.process
@pytest.mark.parametrize("start", [start_program, start_spawned])
def test_marked_tests_start_processes(start: Callable[[], None], request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("process") is not None
    start()  # raises ProcessRefused in a test without the marker, as above


def test_shards_are_a_partition() -> None:
    sys.path.insert(0, str(tree.ROOT / "scripts"))
    try:
        import run_tests
    finally:
        sys.path.pop(0)
    files = run_tests.list_test_files()
    shards = [run_tests.select_shard(files, (number, 4)) for number in (1, 2, 3, 4)]
    assert sorted(file for shard in shards for file in shard) == files and all(shards)
    known = record.read_record()
    loads = [sum(known.seconds_of(file) for file in shard) for shard in shards]
    assert max(loads) < 1.2 * min(loads) + max(wall for wall, _ in known.files.values())


@pytest.mark.process
def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    """After the given time no test starts, and what is kept of it is neither a passed nor a skipped test."""
    words = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "tests/house/test_versions.py"]
    for until, expected in ((1.0, {record.NOT_RUN}), (time.time() + 600, {"passed"})):
        environment = os.environ | {record.ARTIFACT: str(tmp_path / "timed")}
        subprocess.run([*words, "--until", str(until)], cwd=tree.ROOT, env=environment, check=True, capture_output=True)
        [kept] = tmp_path.iterdir()
        lines = kept.read_text(encoding="utf-8").splitlines()
        assert {record.Measured(**json.loads(line)).outcome for line in lines} == expected
        kept.unlink()
