"""Replies judged: by their text, by the generated task they answer, by running them, by the instructions they had to
follow."""

from __future__ import annotations

from collections.abc import Sequence

from anabatic.config.sections.sandbox import SandboxSettings as Settings
from anabatic.config.task import EvalTask
from anabatic.core.errors import DataError
from anabatic.data.builtin import synthetic_tasks
from anabatic.data.readers.raw_rows import RawRow
from anabatic.data.scoring import answer_extraction, ifeval
from anabatic.evals import item_records
from anabatic.evals.item_records import ItemRecord
from anabatic.evals.tasks import templates
from anabatic.evals.tasks.items import EvalItem
from anabatic.sandbox.sandbox_runner import Sandbox


def grade_replies(
    task: EvalTask, items: Sequence[EvalItem], replies: Sequence[str], settings: Settings | None = None
) -> list[ItemRecord]:
    """Return the records of the replies to items.

    Raises:
        Failure: programs are to be run, and nothing shuts them in here.
    """
    if task.check == "python":
        return _grade_by_running(task, items, replies, settings or Settings())
    return [
        item_records.make_reply_record(item, expected_answer(task, item), reply, is_correct(task, item, reply))
        for item, reply in zip(items, replies, strict=True)
    ]


def is_correct(task: EvalTask, item: EvalItem, reply: str) -> bool:
    """Tell whether one reply is right, by its text."""
    if task.check == "generated":
        return synthetic_tasks.is_reply_correct(task.data.task, item.answer, reply)
    if task.check == "instructions":
        return _follows_instructions(item, reply)
    return answer_extraction.is_correct(reply, item.answer, task.extract, task.check, task.pattern)


def require_gradable(task: EvalTask, item: EvalItem) -> None:
    """Make sure, before a model is asked, that replies to an item can be judged.

    Raises:
        DataError: its row lacks what the check needs.
    """
    if task.check in answer_extraction.MATCHERS:
        answer = expected_answer(task, item)
        if not answer_extraction.normalize_text(answer):
            said = f"answer of {task.name} is {answer!r:.60}, nothing but blanks and marks"
            raise DataError(f"{item.source_location}: {said}", "fix the row, or leave it out with `keep`")
        if task.check == "number" and answer_extraction.normalize_number(answer) is None:
            raise DataError(
                f"{item.source_location}: answer of {task.name} is {answer!r:.60}, and check: number compares numbers",
                "fix the row, or use check: equal",
            )
    if task.check == "python":
        build_program(task, item, "")
    if task.check == "instructions":
        _follows_instructions(item, "a")


def _follows_instructions(item: EvalItem, reply: str) -> bool:
    """A reply follows every instruction of its row."""
    try:
        names, settings = item.row["instruction_id_list"], item.row["kwargs"]
        if not isinstance(names, list) or not isinstance(settings, list):
            raise DataError("instruction_id_list and kwargs are not lists", "fix the row")
        return all(ifeval.check_instructions(reply, names, settings))
    except KeyError as error:
        raise DataError(
            f"{item.source_location}: the row has no {error}", "rows have instruction_id_list and kwargs"
        ) from error
    except DataError as error:
        raise DataError(f"{item.source_location}: {error}", error.hint) from error


def build_program(task: EvalTask, item: EvalItem, reply: str) -> tuple[str, str, str]:
    """Return the program, its tests and their helpers, which tell whether a reply is right.

    In the templates `reply` is the reply, `said` what was taken out of it; only the program may use them.
    """
    said = answer_extraction.extract_answer(reply, task.extract, task.pattern) or ""
    row = RawRow({**item.row, "reply": reply, "said": said}, item.source_location)
    own = RawRow(item.row, item.source_location)
    return (
        templates.fill_text(task.program, row, f"program of {task.name}"),
        templates.fill_text(task.tests, own, f"tests of {task.name}"),
        templates.fill_text(task.helpers, own, f"helpers of {task.name}"),
    )


def _grade_by_running(
    task: EvalTask, items: Sequence[EvalItem], replies: Sequence[str], settings: Settings
) -> list[ItemRecord]:
    """Right is what passes its tests (HumanEval, arXiv 2107.03374). An empty reply is not run."""
    spoken = [at for at, reply in enumerate(replies) if reply.strip()]
    programs = [build_program(task, items[at], replies[at]) for at in spoken]
    with Sandbox(settings.to_sandbox_limits(), allow_weaker=settings.allow_weaker, workers=settings.workers) as sandbox:
        outcomes = dict(zip(spoken, sandbox.check_many(programs), strict=True))
        made = []
        for at, (item, reply) in enumerate(zip(items, replies, strict=True)):
            outcome = outcomes.get(at)
            note = "an empty reply" if outcome is None else outcome.describe_end(sandbox.limits)
            passed = outcome is not None and outcome.passed
            is_judged = outcome is None or outcome.is_judged
            made.append(item_records.make_reply_record(item, "", reply, passed, note, is_judged))
    return made


def expected_answer(task: EvalTask, item: EvalItem) -> str:
    """Return the answer as it is shown to people: of a whole solution what counts."""
    return answer_extraction.extract_answer(item.answer, task.extract, task.pattern) or item.answer
