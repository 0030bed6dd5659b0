"""A call of the python tool: the code runs as a cell of a notebook does, and what it shows is the answer."""

from __future__ import annotations

from collections.abc import Sequence

from anabatic.sandbox.limits import ProgramOutcome
from anabatic.sandbox.sandbox_runner import Sandbox

MAX_ANSWER_CHARS = 2000
"""Characters of an answer at most."""
_CELL_FILE = "cell.py"
_CELL_PROGRAM = f"""\
import ast, linecache
code = open({_CELL_FILE!r}, encoding="utf-8").read().strip()
linecache.cache["<cell>"] = (len(code), None, code.splitlines(True), "<cell>")
tree = ast.parse(code, "<cell>")
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
scope = {{"__name__": "__main__"}}
exec(compile(tree, "<cell>", "exec"), scope)
value = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)
if value is not None:
    print(value)
"""


def run_cells(sandbox: Sandbox, codes: Sequence[str]) -> list[str]:
    """Return what each piece of code prints, and the value of its last line where that is an expression.

    An error is its last line, as Python says it: `ZeroDivisionError: division by zero`.

    Raises:
        Failure: as `Sandbox.run`.
    """
    files = [{_CELL_FILE: code} for code in codes]
    return [_format_outcome(done, sandbox) for done in sandbox.run_many([_CELL_PROGRAM] * len(codes), files)]


def _format_outcome(done: ProgramOutcome, sandbox: Sandbox) -> str:
    text = done.stdout.strip()
    if not done.is_ok:
        text = f"{text}\n{done.describe_end(sandbox.limits)}".strip()
    return text if len(text) <= MAX_ANSWER_CHARS else f"{text[:MAX_ANSWER_CHARS]}..."
