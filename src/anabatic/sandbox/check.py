"""Does a program do what its tests ask? As HumanEval has it (Chen et al. 2021, arXiv 2107.03374)."""

from __future__ import annotations

from anabatic.core.errors import DataError
from anabatic.sandbox.box import Sandbox
from anabatic.sandbox.limits import Outcome


def check_program(sandbox: Sandbox, program: str, test: str, entry_point: str) -> Outcome:
    """Run `program`, then `test`, which defines `check(candidate)`, then the check of the program's `entry_point`.

    `Outcome.passed` tells the result: exit code 0 alone is not enough, for a program may leave before it is tested.
    Program and tests share an interpreter: a result that lies about being equal to everything passes.

    Args:
        sandbox: where it runs.
        program: the prompt and what the model made of it.
        test: the item's own tests.
        entry_point: name of the function that is tested.

    Raises:
        DataError: `entry_point` is no name.
        Failure: as `Sandbox.run`.
    """
    if not entry_point.isidentifier():
        raise DataError(f"entry_point is {entry_point!r}", "give the name of the function that is tested")
    return sandbox.run(f"{program}\n\n{test}\n\ncheck({entry_point})\n")
