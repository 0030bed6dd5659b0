"""Replies judged: by their text, by the generated task they answer, by running them, by what they were told to obey."""

from __future__ import annotations

from collections.abc import Sequence

from anabatic.config.sandbox import Sandbox as Settings
from anabatic.config.task import EvalTask
from anabatic.core.errors import DataError
from anabatic.data import answers, instructions, tasks
from anabatic.data.raw_rows import RawRow
from anabatic.evals import records, template
from anabatic.evals.items import Item
from anabatic.evals.records import Record
from anabatic.sandbox.box import Sandbox


def judge(
    task: EvalTask, items: Sequence[Item], replies: Sequence[str], settings: Settings | None = None
) -> list[Record]:
    """Return the records of the replies to items.

    Raises:
        Failure: programs are to be run, and nothing shuts them in here.
    """
    if task.check == "python":
        return _by_running(task, items, replies, settings or Settings())
    return [
        records.of_reply(item, wanted(task, item), reply, is_right(task, item, reply))
        for item, reply in zip(items, replies, strict=True)
    ]


def is_right(task: EvalTask, item: Item, reply: str) -> bool:
    """Tell whether one reply is right, by its text."""
    if task.check == "generated":
        return tasks.score(task.data.task, item.answer, reply)
    if task.check == "instructions":
        return _follows(item, reply)
    return answers.is_right(reply, item.answer, task.extract, task.check, task.pattern)


def require_judged(task: EvalTask, item: Item) -> None:
    """Make sure, before a model is asked, that replies to an item can be judged.

    Raises:
        DataError: its row lacks what the check needs.
    """
    if task.check in answers.CHECK:
        answer = wanted(task, item)
        if not answers.normalised(answer):
            said = f"answer of {task.name} is {answer!r:.60}, nothing but blanks and marks"
            raise DataError(f"{item.place}: {said}", "mend the row, or leave it out with `keep`")
        if task.check == "number" and answers.canonical(answer) is None:
            raise DataError(
                f"{item.place}: answer of {task.name} is {answer!r:.60}, and check: number compares numbers",
                "mend the row, or use check: equal",
            )
    if task.check == "python":
        program_of(task, item, "")
    if task.check == "instructions":
        _follows(item, "a")


def _follows(item: Item, reply: str) -> bool:
    """A reply follows every instruction of its row."""
    try:
        names, settings = item.row["instruction_id_list"], item.row["kwargs"]
        if not isinstance(names, list) or not isinstance(settings, list):
            raise DataError("instruction_id_list and kwargs are not lists", "mend the row")
        return all(instructions.followed(reply, names, settings))
    except KeyError as error:
        raise DataError(f"{item.place}: the row has no {error}", "rows have instruction_id_list and kwargs") from error
    except DataError as error:
        raise DataError(f"{item.place}: {error}", error.hint) from error


def program_of(task: EvalTask, item: Item, reply: str) -> tuple[str, str, str]:
    """Return the program, its tests and their helpers, which tell whether a reply is right.

    In the templates `reply` is the reply, `said` what was taken out of it; only the program may use them.
    """
    said = answers.extract(reply, task.extract, task.pattern) or ""
    row = RawRow({**item.row, "reply": reply, "said": said}, item.place)
    own = RawRow(item.row, item.place)
    return (
        template.text(task.program, row, f"program of {task.name}"),
        template.text(task.tests, own, f"tests of {task.name}"),
        template.text(task.helpers, own, f"helpers of {task.name}"),
    )


def _by_running(task: EvalTask, items: Sequence[Item], replies: Sequence[str], settings: Settings) -> list[Record]:
    """Right is what passes its tests (HumanEval, arXiv 2107.03374). An empty reply is not run."""
    spoken = [at for at, reply in enumerate(replies) if reply.strip()]
    programs = [program_of(task, items[at], replies[at]) for at in spoken]
    with Sandbox(settings.limits(), allow_weaker=settings.allow_weaker, workers=settings.workers) as sandbox:
        outcomes = dict(zip(spoken, sandbox.check_many(programs), strict=True))
        made = []
        for at, (item, reply) in enumerate(zip(items, replies, strict=True)):
            outcome = outcomes.get(at)
            note = "an empty reply" if outcome is None else outcome.told(sandbox.limits)
            passed = outcome is not None and outcome.passed
            made.append(records.of_reply(item, "", reply, passed, note))
    return made


def wanted(task: EvalTask, item: Item) -> str:
    """Return the answer as it is shown to people: of a whole solution what counts."""
    return answers.extract(item.answer, task.extract, task.pattern) or item.answer
