"""The reward `tests`: a program that the model has written is run in the sandbox against the row's own tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from anabatic.core.errors import DataError
from anabatic.data.scoring.questions import Question
from anabatic.rl.rollout import Rollout
from anabatic.sandbox.entry_point_tests import check_entry_point
from anabatic.sandbox.sandbox_runner import Sandbox

_CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_TEST_COLUMNS_HINT = "test and entry_point (as in HumanEval), or tests or test_list: assertions (as in MBPP)"


def extract_program(text: str, row: dict[str, Any]) -> str:
    """Return the program in an answer: its last fenced block, else all of it; a body is put behind the row's prompt."""
    fenced = _CODE_BLOCK.findall(text)
    program: str = fenced[-1] if fenced else text
    begins = row.get("prompt") if isinstance(row.get("prompt"), str) else None
    name = row.get("entry_point")
    if begins and name and not re.search(rf"^\s*(async\s+)?def\s+{re.escape(str(name))}\b", program, re.MULTILINE):
        return f"{begins}{program}"
    return program


def read_assertions(row: dict[str, Any]) -> str | None:
    """Return the row's assertions as a program, None: it has none."""
    found = row.get("tests", row.get("test_list"))
    if isinstance(found, list) and found and all(isinstance(line, str) for line in found):
        return "\n".join(found)
    return found if isinstance(found, str) and found.strip() else None


def require_tests(questions: Sequence[Question]) -> None:
    """Make sure that every row has tests.

    Raises:
        DataError: one has no tests.
    """
    for question in questions:
        row = question.row
        is_complete = isinstance(row.get("test"), str) and str(row.get("entry_point", "")).isidentifier()
        if not is_complete and read_assertions(row) is None:
            raise DataError(f"{question.id}: the row has no tests", f"the reward `tests` reads {_TEST_COLUMNS_HINT}")


def score_tests(rollout: Rollout, question: Question, sandbox: Sandbox) -> float:
    """1 where the program passes all tests of its row, else 0; one that does not end, or takes too much, has not."""
    row = question.row
    program = extract_program(rollout.text, row)
    assertions = read_assertions(row)
    prompt = row.get("prompt")
    helpers = prompt if isinstance(prompt, str) else ""
    if assertions is None:
        done = check_entry_point(sandbox, program, row["test"], row["entry_point"], helpers)
    else:
        done = sandbox.check_program(program, assertions, helpers)
    return float(done.passed)
