"""Rewards: named, weighted and added up; answers, formats, unit tests in the sandbox, reward models."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from anabatic.core import plugins
from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.core.formatting import did_you_mean
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.data.builtin import synthetic_tasks
from anabatic.data.readers.document import Message
from anabatic.data.scoring import answer_extraction
from anabatic.data.scoring.questions import Question
from anabatic.device.device import Device
from anabatic.infer.reward_scorer import RewardScorer
from anabatic.rl.reward_worker import RewardCallError, RewardWorker, UnjudgedAnswer
from anabatic.rl.rollout import Rollout
from anabatic.sandbox.entry_point_tests import check_entry_point
from anabatic.sandbox.sandbox_runner import Sandbox

ScoreFunction = Callable[[Rollout, Question], float]
"""Reward of one answer; raises `RewardCallError` where the reward fails, `UnjudgedAnswer` where nobody can tell."""

_SOFT_FRACTION = 4
"""The last so-many-th part of the room is where a long answer begins to cost."""
_TURN_FUNCTION = "turn"


def score_answer(rollout: Rollout, question: Question) -> float:
    """1 where the answer is the expected one, else 0."""
    assert question.answer is not None  # `RewardSet` has looked
    if question.task:
        return float(synthetic_tasks.is_reply_correct(question.task, question.answer, rollout.text))
    return float(is_same_answer(question.answer, rollout.text))


def is_same_answer(expected: str, given_answer: str) -> bool:
    """Tell whether what was said ends in what was expected.

    Of both counts what stands behind the last `####` (GSM8K), else in the last `\\boxed{}` (MATH), else of numbers the
    last one, else everything. Numbers are compared as numbers, other texts without regard to case and blanks.
    """
    expected_answer = extract_final_answer(expected)
    number = answer_extraction.normalize_number(expected_answer)
    if number is None:
        return expected_answer.casefold().split() == extract_final_answer(given_answer).casefold().split()
    return answer_extraction.extract_number(given_answer) == number


def extract_final_answer(text: str) -> str:
    """Return the part of a text that holds the answer."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return next(iter(answer_extraction.extract_boxed(text)), text).strip()


def score_format(rollout: Rollout, question: Question, pattern: re.Pattern[str]) -> float:
    """1 where the whole answer matches the pattern, else 0."""
    return float(pattern.fullmatch(rollout.text) is not None)


def score_length(rollout: Rollout, question: Question, room: int) -> float:
    """0 for an answer with room to spare, falling to -1 as it fills it (DAPO, arXiv 2503.14476, equation 13)."""
    soft = max(1, room // _SOFT_FRACTION)
    return -min(1.0, max(0.0, (rollout.num_chosen - (room - soft)) / soft))


def score_with_file(rollout: Rollout, question: Question, file: RewardWorker, function: str) -> float:
    """Result of a user's function for `(text, row)`."""
    value = file.call_function(function, rollout.text, describe_rollout(rollout, question))
    if not isinstance(value, float) or not math.isfinite(value):
        raise RewardCallError(f"{function} returned {value!r:.100}, not a finite number")
    return value


def describe_rollout(rollout: Rollout, question: Question) -> dict[str, Any]:
    """Return what a user's function gets: the row of the file, and above it what we know."""
    row = {
        "question": question.last_turn_text,
        "messages": [*question.messages, *rollout.turns],
        "answer": question.answer,
    }
    return {**question.row, **row, "truncated": rollout.truncated, "tokens": rollout.num_chosen}


@dataclass(frozen=True)
class WeightedReward:
    """One of those that are added up."""

    name: str
    weight: float
    score_function: ScoreFunction


class RewardSet:
    """All rewards of a job.

    Args:
        specs: NAME or NAME=WEIGHT each.
        pattern: of the reward `format`.
        timeout: seconds of a call.
        room: tokens of an answer at most.
        other: scores of rewards that are made elsewhere, by name.

    Raises:
        ConfigError: there is no such reward, or its file cannot be used.
    """

    def __init__(
        self,
        specs: Sequence[str],
        *,
        pattern: str,
        timeout: float,
        room: int,
        other: dict[str, ScoreFunction] | None = None,
    ) -> None:
        self._files: dict[str, RewardWorker] = {}
        self._exit_stack = ExitStack()
        self._timeout = timeout
        self._named_scores: dict[str, ScoreFunction] = {
            "answer": score_answer,
            "format": functools.partial(score_format, pattern=_compile_pattern(pattern)),
            "length": functools.partial(score_length, room=room),
            **(other or {}),
        }
        try:
            self.rewards = [self._parse_reward(spec) for spec in specs]
        except ConfigError:
            self.close()
            raise
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            self.close()
            raise ConfigError(f"rewards names {', '.join(names)}: one is given twice", "name each once, NAME=WEIGHT")

    def _parse_reward(self, spec: str) -> WeightedReward:
        name, _, weight = spec.partition("=")
        try:
            number = float(weight) if weight else 1.0
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f'"{weight}" in the reward "{spec}" is not a weight', "write NAME=0.5")
        path, _, function = name.rpartition(":")
        if path.endswith(".py"):
            return WeightedReward(
                function,
                number,
                functools.partial(score_with_file, file=self._open_file(path, function), function=function),
            )
        if name not in self._named_scores:
            point = plugins.find_plugin("anabatic.rewards", name)
            if point is not None:
                worker = self._open_file(point.module, point.attr)
                score = functools.partial(score_with_file, file=worker, function=point.attr)
                return WeightedReward(name, number, score)
            known = [*self._named_scores, *plugins.list_plugins("anabatic.rewards"), "FILE.py:FUNCTION"]
            raise ConfigError(f'there is no reward "{name}".{did_you_mean(name, known)}', f"use {', '.join(known)}")
        return WeightedReward(name, number, self._named_scores[name])

    def _open_file(self, path: str, function: str) -> RewardWorker:
        source = os.path.expanduser(path)
        file = self._files.get(source)
        if file is None:
            file = self._exit_stack.enter_context(RewardWorker(source, self._timeout))
            self._files[source] = file
        file.require_function(function)
        return file

    def get_turn_function(self) -> Callable[[Question, list[Message]], str | None]:
        """Return the function `turn(messages, row)` of the rewards' file.

        Raises:
            ConfigError: no reward comes from a file, or the file has no such function.
        """
        if not self._files:
            raise ConfigError(
                "turns is more than 1, and nothing defines what comes between", "give FILE.py with `turn`"
            )
        file = next(iter(self._files.values()))
        file.require_function(_TURN_FUNCTION)

        def call_turn_function(question: Question, messages: list[Message]) -> str | None:
            question_row = {**question.row, "question": question.last_turn_text, "answer": question.answer}
            reply = file.call_function(_TURN_FUNCTION, messages, question_row)
            if reply is not None and not isinstance(reply, str):
                raise RewardCallError(f"{_TURN_FUNCTION} returned {reply!r}, neither a text nor None")
            return reply

        return call_turn_function

    def require_answers(self, questions: Sequence[Question]) -> None:
        """Make sure that the rows have what the rewards need.

        Raises:
            DataError: the reward is `answer`, and a row has none.
        """
        if any(reward.score_function is score_answer for reward in self.rewards):
            without = next((question for question in questions if not (question.answer or "").strip()), None)
            if without is not None:
                raise DataError(
                    f"{without.id}: the row has no answer, and the reward is `answer`",
                    "give rows an answer, or name another reward",
                )

    def score_rollouts(
        self, rollouts: Sequence[Rollout], questions: Sequence[Question], stopping: Callable[[], bool] = lambda: False
    ) -> bool:
        """Set scores, faults and rewards of the rollouts; a reward that fails counts 0, an unjudged answer nothing.

        Args:
            stopping: asked before every answer; where it is True, False is returned and the rest not judged.
        """
        for rollout in rollouts:
            if stopping():
                return False
            HEARTBEAT.record_beat()  # rewards may take longer than a launcher waits for a sign of life
            for reward in self.rewards:
                try:
                    score = reward.score_function(rollout, questions[rollout.question])
                except RewardCallError as fault:
                    rollout.faults[reward.name], score = str(fault), 0.0
                except UnjudgedAnswer as reason:
                    rollout.unjudged, score = str(reason), 0.0
                rollout.scores[reward.name] = score
                rollout.reward += reward.weight * score
        return True

    def require_working_rewards(self, rollouts: Sequence[Rollout]) -> None:
        """Make sure that no reward has failed for every answer, nor `turn` for every one that was not cut
        off.

        Raises:
            Failure: one has.
        """
        ended = [rollout for rollout in rollouts if not rollout.truncated]
        spoken = [rollout.faults[_TURN_FUNCTION] for rollout in ended if _TURN_FUNCTION in rollout.faults]
        if len(spoken) == len(ended) > len(rollouts) // 2:
            raise Failure(f"{_TURN_FUNCTION} failed for all {len(spoken)} answers: {spoken[0]}", "fix the function")
        for reward in self.rewards:
            faults = [rollout.faults[reward.name] for rollout in rollouts if reward.name in rollout.faults]
            if len(faults) == len(rollouts) > 0:
                raise Failure(
                    f"the reward {reward.name} failed for all {len(faults)} answers: {faults[0]}", "fix the reward"
                )

    def close(self) -> None:
        """End the processes of files."""
        self._exit_stack.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward_pattern {pattern!r}: {error}", "give a regular expression of Python") from error


_CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_TEST_COLUMNS = ("test", "entry_point", "tests", "test_list")
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


def list_judged_columns(specs: Sequence[str]) -> Collection[str] | None:
    """Return the columns that rewards read beside the answer; None: functions of files and plug-ins may read all."""
    names = {spec.partition("=")[0] for spec in specs}
    if all(name in ("answer", "format", "length", "tests") or name.startswith("model:") for name in names):
        return _TEST_COLUMNS if "tests" in names else ()
    return None


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
    """1 where the program passes all tests of its row, else 0; one that does not end, or takes too much, has not.

    Raises:
        UnjudgedAnswer: it reaches for what could touch its tests, and did not pass apart from them.
    """
    row = question.row
    program = extract_program(rollout.text, row)
    assertions = read_assertions(row)
    prompt = row.get("prompt")
    helpers = prompt if isinstance(prompt, str) else ""
    if assertions is None:
        done = check_entry_point(sandbox, program, row["test"], row["entry_point"], helpers)
    else:
        done = sandbox.check_program(program, assertions, helpers)
    if not done.is_judged:
        raise UnjudgedAnswer("; ".join(done.reaches))
    return float(done.passed)


class ModelReward:
    """A Hugging Face folder of a sequence classifier with one label, or an adapter for one, or the run that made it.

    Raises:
        DataError: the folder is missing or damaged.
        ConfigError: its model is another one, or has several labels, or its tokenizer no chat template.
    """

    def __init__(self, folder: Path, device: Device) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder", "name that of a reward model: model:FOLDER")
        self._scorer = RewardScorer(folder, device)

    def score_rollout(self, rollout: Rollout, question: Question) -> float:
        """Return the model's number for the question with its answer."""
        try:
            turns = [*question.messages, *rollout.turns]
            row = self._scorer.encode_conversation(turns, question.pictures, question.id)
            (value,) = self._scorer.score_conversations([row])
        except (DataError, Failure) as error:
            raise RewardCallError(str(error)) from error
        return value
