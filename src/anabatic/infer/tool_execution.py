"""The python tool: code in an answer is run in the sandbox, and its output becomes part of the answer.

When a request's last token closes a call (`<|python_end|>`), the code since `<|python_start|>` is run, and
`<|output_start|>OUTPUT<|output_end|>` is given to the request: tokens that the model reads and has not chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from anabatic.config.sections.sandbox import SandboxSettings as Settings
from anabatic.core.errors import DataError
from anabatic.data.chat.python_tool import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START
from anabatic.data.tokenizer.hf_folder import get_python_tool_ids
from anabatic.infer.request import Request
from anabatic.infer.text_stream import decode_tokens
from anabatic.sandbox.limits import ProgramOutcome
from anabatic.sandbox.sandbox_runner import Sandbox

_DISPLAY_SIGNS = {PYTHON_START: "`", PYTHON_END: "`", OUTPUT_START: " → ", OUTPUT_END: ""}


class PythonTool:
    """Answers calls, those of a step side by side.

    Args:
        sandbox: where the code runs, each call in its own program; whoever made it closes it.
        tokenizer: of the model.

    Attributes:
        num_calls: so far.

    Raises:
        DataError: the tokenizer has no tokens for calls.
    """

    def __init__(self, sandbox: Sandbox, tokenizer: Any) -> None:
        ids = get_python_tool_ids(tokenizer)
        if ids is None:
            raise DataError(
                f"{tokenizer.name_or_path} has no tokens for calls ({PYTHON_START}, {PYTHON_END}, ...)",
                "use a tokenizer of ours, trained with `anabatic tokenizer train`, or leave the tool out",
            )
        self._start_id, self._end_id, self._output_start_id, self._output_end_id = ids
        self._sandbox, self._tokenizer = sandbox, tokenizer
        self._added_tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self.num_calls = 0

    def run_calls(self, requests: Sequence[Request]) -> None:
        """Run the calls that the last tokens of requests have closed, and give them the output.

        Answers of a given form call nothing.

        Raises:
            Failure: as `Sandbox.run`.
        """
        codes = {
            request: code
            for request in requests
            if not request.finish_reason
            and request.constraint is None
            and (code := self.extract_code(request.ids)) is not None
        }
        if not codes:
            return
        self.num_calls += len(codes)
        for request, text in zip(codes, run_cells(self._sandbox, list(codes.values())), strict=True):
            request.append_given_tokens([self._output_start_id, *self._encode_output(text), self._output_end_id])

    def extract_code(self, ids: Sequence[int]) -> str | None:
        """Return the code of the call that the last token closes, None: it closes none."""
        if not ids or ids[-1] != self._end_id:
            return None
        for at in range(len(ids) - 2, -1, -1):
            if ids[at] in (self._end_id, self._output_start_id):
                return None
            if ids[at] == self._start_id:
                return decode_tokens(self._tokenizer, list(ids[at + 1 : -1]))
        return None

    def _encode_output(self, text: str) -> list[int]:
        """Return the tokens of an output: what looks like a special token in it is plain text."""
        parts = [text]
        for token in self._added_tokens:
            split = (part.split(token) for part in parts)
            parts = [piece for pieces in split for piece in _join_split_token(pieces, token)]
        encoded = self._tokenizer(parts, add_special_tokens=False)["input_ids"] if text else []
        return [token for ids in encoded for token in ids]


@contextmanager
def open_python_tool(enabled: bool, settings: Settings, tokenizer: Any) -> Iterator[PythonTool | None]:
    """Yield the tool of a model, None where it is not wanted or the tokenizer has no tokens for calls.

    Raises:
        Failure: programs cannot be isolated on this machine.
    """
    if not enabled or get_python_tool_ids(tokenizer) is None:
        yield None
        return
    limits, workers = settings.to_sandbox_limits(), settings.workers
    with Sandbox(limits, allow_weaker=settings.allow_weaker, workers=workers) as sandbox:
        yield PythonTool(sandbox, tokenizer)


def format_for_display(piece: str) -> str:
    """Return a piece of an answer as people read it: `12 * 3` → 36. A token is never split over two pieces."""
    for token, sign in _DISPLAY_SIGNS.items():
        piece = piece.replace(token, sign)
    return piece


def _join_split_token(pieces: list[str], token: str) -> list[str]:
    """Put the token back between the pieces, in two halves that no tokenizer takes for it."""
    half = len(token) // 2
    parts = [pieces[0]]
    for piece in pieces[1:]:
        parts[-1] += token[:half]
        parts.append(token[half:] + piece)
    return parts


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
