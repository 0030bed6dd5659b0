"""Test the entry point of a program, as HumanEval does (Chen et al. 2021, arXiv 2107.03374)."""

from __future__ import annotations

from anabatic.core.errors import DataError
from anabatic.sandbox.limits import ProgramOutcome
from anabatic.sandbox.sandbox_runner import Sandbox


def check_entry_point(sandbox: Sandbox, program: str, test: str, entry_point: str, prompt: str = "") -> ProgramOutcome:
    """Run `program`; `test`, which defines `check(candidate)`, runs elsewhere and checks the program's `entry_point`.

    `ProgramOutcome.passed` holds the result.

    Args:
        sandbox: where they run.
        program: the prompt and what the model made of it.
        test: the item's own tests.
        entry_point: name of the function that is tested.
        prompt: functions that the prompt defines whole are taken from here: the program cannot change them.

    Raises:
        DataError: `entry_point` is not a valid name.
        Failure: as `Sandbox.run`.
    """
    if not entry_point.isidentifier():
        raise DataError(f"entry_point is {entry_point!r}", "give the name of the function that is tested")
    return sandbox.check_program(program, f"{test}\n\ncheck({entry_point})\n", prompt)
