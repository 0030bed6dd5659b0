"""Programs against their tests: HumanEval's own solutions, and answers that try to pass without being right."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabatic.core.errors import DataError, Failure
from anabatic.sandbox.entry_point_tests import check_entry_point
from anabatic.sandbox.limits import ResourceLimits
from anabatic.sandbox.sandbox_runner import Sandbox

pytestmark = pytest.mark.process


TEST = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"
PROMPT = 'def square(x: int) -> int:\n    """Return x times x."""\n'


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    try:
        made = Sandbox(ResourceLimits(seconds=20))
    except Failure as error:
        pytest.skip(f"programs cannot be isolated here: {error}")
    with made:
        yield made


@pytest.mark.parametrize(
    ("completion", "passed", "status"),
    [
        ("    return x * x\n", True, "ok"),
        ("    return x + x\n", False, "error"),
        ("    pass", False, "error"),
        ("", False, "error"),
        ("    return x *", False, "error"),
        ("    return x * x\nimport sys; sys.exit(0)\n", False, "ok"),
        ("    import os; os._exit(0)\n", False, "ok"),
        ("    raise SystemExit\n", False, "ok"),
        ("    return x * x\ndel square\n", False, "error"),
        ("    return x * x\ndef check(f): pass\n", True, "ok"),
        ("    while True: pass\n", False, "timeout"),
        ("    return x * x\nprint('x' * 10**7)\n", False, "output"),
    ],
)
def test_passes_only_what_is_right(box: Sandbox, completion: str, passed: bool, status: str) -> None:
    slow = ResourceLimits(seconds=0.3) if status == "timeout" else ResourceLimits(seconds=20)
    with Sandbox(slow) as patient:
        done = check_entry_point(patient, PROMPT + completion, TEST, "square")
    assert (done.passed, done.status) == (passed, status)
    if status == "ok":
        assert done.describe_end(box.limits) == ("ended well" if passed else "left before its last line")


def test_entry_point_is_a_name(box: Sandbox) -> None:
    with pytest.raises(DataError, match="entry_point"):
        check_entry_point(box, PROMPT, TEST, "print); (1")


def test_writing_outside_fails_and_leaves_nothing(box: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    completion = f"    open({str(tmp_path / 'left')!r}, 'w').write('x')\n    return x * x\n"
    done = check_entry_point(box, PROMPT + completion, TEST, "square")
    assert not done.passed
    assert list(tmp_path.iterdir()) == []
    inside = "    open('mine', 'w').write('x')\n    return x * x\n"
    assert check_entry_point(box, PROMPT + inside, TEST, "square").passed
    assert check_entry_point(
        box, PROMPT + "    import os; assert not os.listdir('.')\n    return x * x\n", TEST, "square"
    ).passed


def test_solutions_of_humaneval(box: Sandbox, shared_data: Path) -> None:
    with gzip.open(shared_data / "eval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        items = [json.loads(line) for line in file]
    wrong = []
    for item in items:
        own = item["prompt"]
        done = check_entry_point(box, own + item["canonical_solution"], item["test"], item["entry_point"], own)
        if not done.passed:
            wrong.append((item["task_id"], done.describe_end(box.limits)))
    assert len(items) == 164
    assert not wrong
    untouched = [check_entry_point(box, item["prompt"], item["test"], item["entry_point"]).passed for item in items[:8]]
    assert not any(untouched)
