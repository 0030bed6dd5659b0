"""Replies judged: by their text, by the generated task they answer, by running them."""

from __future__ import annotations

from collections.abc import Sequence

from anabatic.config.task import EvalTask
from anabatic.data import answers, tasks
from anabatic.evals import records
from anabatic.evals.items import Item
from anabatic.evals.records import Record


def judge(task: EvalTask, items: Sequence[Item], replies: Sequence[str]) -> list[Record]:
    """Return the records of the replies to items."""
    return [
        records.of_reply(item, shown(item), reply, is_right(task, item, reply))
        for item, reply in zip(items, replies, strict=True)
    ]


def is_right(task: EvalTask, item: Item, reply: str) -> bool:
    """Tell whether one reply is right, by its text."""
    if task.check == "generated":
        return tasks.score(task.data.task, item.answer, reply)
    return answers.is_right(reply, item.answer, task.extract, task.check, task.pattern)


def shown(item: Item) -> str:
    """Return the question as it is shown to people: the last turn, or the end of the text."""
    context = item.pairs[0].context
    return context if isinstance(context, str) else context[-1]["content"]
