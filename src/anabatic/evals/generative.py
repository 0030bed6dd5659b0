"""Tasks that a model answers in its own words, scored beside chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from anabatic.core.errors import DataError
from anabatic.data import tasks
from anabatic.data.tasks import TaskRow
from anabatic.data.tokenizer import chat_prompt
from anabatic.evals.progress import Bar
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling

DEFAULT_ROWS = 200
"""Questions of a task that names no number of rows."""


@dataclass(frozen=True)
class Example:
    """One question, what the model said, and whether that was right."""

    prompt: str
    reply: str
    answer: str
    correct: bool


@dataclass(frozen=True)
class TaskScore:
    """How a model did.

    Attributes:
        accuracy: share of right replies, 0 to 1.
        chance: accuracy of the best reply given without reading the question.
        n: questions asked.
        examples: the first questions, right or wrong.
    """

    accuracy: float
    chance: float
    n: int
    examples: list[Example]

    def as_json(self) -> dict[str, Any]:
        """Return the task's entry in eval.json."""
        examples = [vars(example) for example in self.examples]
        return {"accuracy": self.accuracy, "chance": self.chance, "n": self.n, "examples": examples}


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    wanted: Mapping[str, int],
    *,
    max_new_tokens: int,
    batch_size: int,
    show: int,
    seed: int = 0,
) -> dict[str, TaskScore]:
    """Ask the test questions of every task, greedily answered, and score the replies.

    Args:
        model: a chat model from `models.hf.load_model`.
        tokenizer: its tokenizer, with a chat template.
        wanted: task -> number of questions; not `all`.
        max_new_tokens: longest reply.
        batch_size: questions answered at once.
        show: examples kept per task.
        seed: of the questions.

    Raises:
        DataError: the tokenizer has no chat template, or a question does not fit into the model's context.
        ConfigError: there is no task of a name.
    """
    rows = {name: list(tasks.rows(name, "test", number, seed)) for name, number in wanted.items()}
    prompts = {name: [prompt_of(tokenizer, row) for row in drawn] for name, drawn in rows.items()}
    longest = max((len(prompt) for drawn in prompts.values() for prompt in drawn), default=0)
    max_len = min(longest + max_new_tokens, model.config.max_position_embeddings)
    engine = Engine(model, tokenizer, max_batch=batch_size, max_len=max_len)
    sampling = Sampling(temperature=0.0, max_new_tokens=max_new_tokens)
    scores = {}
    for name, drawn in rows.items():
        replies = _answer(engine, name, prompts[name], sampling)
        scores[name] = score(name, drawn, replies, show)
    return scores


def prompt_of(tokenizer: Any, row: TaskRow) -> list[int]:
    """Return the tokens of a question, ready for the assistant to speak.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"{tokenizer.name_or_path} has no chat template, tasks are asked in conversations",
            "fine-tune the model with `anabatic sft` first, or leave out --tasks",
        )
    return chat_prompt(tokenizer, row.messages[:-1])


def _answer(engine: Engine, name: str, prompts: list[list[int]], sampling: Sampling) -> list[str]:
    requests = [
        engine.request(prompt, sampling, name=f"question {number} of {name}")
        for number, prompt in enumerate(prompts, start=1)
    ]
    engine.submit(requests)
    done = 0
    try:
        with Bar(f"asking {name}", len(requests)) as bar:
            while done < len(requests):
                done += len(engine.step())
                bar.to(done)
    finally:
        engine.cancel(requests)
    return [engine.completion(request).text for request in requests]


def score(name: str, rows: list[TaskRow], replies: list[str], show: int = 0) -> TaskScore:
    """Score the replies to the rows of one task."""
    examples = [
        Example(row.messages[0]["content"], reply, row.answer, tasks.score(row.task, row.answer, reply))
        for row, reply in zip(rows, replies, strict=True)
    ]
    right = sum(example.correct for example in examples)
    return TaskScore(right / max(1, len(examples)), tasks.chance(name), len(examples), examples[:show])
