"""Answers to learn from: drawn by the engine from the very weights that are trained, several to each question."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.data.readers.document import Message
from anabatic.data.scoring.questions import Question
from anabatic.device.device import Device
from anabatic.infer.request import Completion
from anabatic.infer.sampling import Sampling
from anabatic.models.forward import ModelRoot
from anabatic.rl.reward_worker import RewardCallError

if TYPE_CHECKING:
    from anabatic.infer.picture_prompts import PictureReader
    from anabatic.models.vision.prompt_pictures import PromptPictures

_PROGRESS_SECONDS = 10.0
"""Seconds of a round after which it says how far it is."""
_SHARED_PROMPT_TOKENS = 96
"""Tokens of a prompt from which on a processor shares it among the answers. A shorter one is read again for each: its
answer then lies in one piece of the cache, which is read without copying (docs/dev)."""

TurnFunction = Callable[[Question, list[Message]], "str | None"]
"""Next user turn of a conversation, None at its end; raises `RewardCallError` where it cannot tell."""


class AnswerEngine(Protocol):
    """What answers: `infer.engine.Engine`, or servers in its place (`ServedEngine`). Requests are its own."""

    tokenizer: Any
    max_len: int

    def request(self, prompt: Sequence[int], sampling: Sampling, *, name: str, pictures: PromptPictures | None) -> Any:
        """Check a prompt and return its request, not yet submitted."""

    def submit(self, requests: Iterable[Any]) -> None:
        """Queue requests."""

    def step(self) -> list[Any]:
        """Go on for a moment; return the requests that finished."""

    def get_completion(self, request: Any) -> Completion:
        """Return the answer of a finished request."""

    def cancel_requests(self, requests: Iterable[Any]) -> None:
        """Give up requests that are not finished."""


@dataclass
class Rollout:
    """One answer, of one turn or several.

    Attributes:
        question: number of the question; number: of the answer in its round.
        ids: all tokens, the prompt's `start` first.
        chosen: of each token behind the prompt, 1 where the model chose it, 0 where it was given.
        logprobs: of each token behind the prompt, as the engine had it; 0 where it was given.
        trained_logprobs: of each token behind the prompt, as the trainer had it before the round's first update; empty:
            not needed.
        text: the last answer; turns: what was said behind the question.
        truncated: the limit of its length ended it.
        scores: of each reward, unweighted; faults: rewards that failed, and why.
        unjudged: why nobody can tell what it is worth; such an answer is left out.
        reward: the weighted sum; advantage: how much better than expected.
    """

    question: int
    number: int
    ids: list[int]
    start: int
    chosen: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    turns: list[Message] = field(default_factory=list)
    truncated: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    unjudged: str = ""
    trained_logprobs: list[float] = field(default_factory=list)

    @property
    def num_chosen(self) -> int:
        """Tokens that the model chose."""
        return sum(self.chosen)


@dataclass(frozen=True)
class RolloutRequest:
    """One answer that is wanted."""

    question_index: int
    answer_index: int
    prompt: list[int]
    sampling: Sampling


class RolloutGenerator:
    """Draws answers.

    Args:
        questions: what the numbers of questions mean.
        root: the model, which answers without dropout.
        turns: of the assistant at most.
        turn: what is said between them.
        stopping: asked after every token; True ends the round without a result.
        pictures: reads those of questions; None: the model sees none.

    Attributes:
        metrics: of new weights that the engine got for this round.
    """

    metrics: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        engine: AnswerEngine,
        device: Device,
        questions: Sequence[Question],
        root: ModelRoot,
        turns: int = 1,
        turn: TurnFunction | None = None,
        stopping: Callable[[], bool] = lambda: False,
        pictures: PictureReader | None = None,
    ) -> None:
        self._engine, self._device, self._questions = engine, device, questions
        self._root, self._max_turns, self._turn_function, self._should_stop = root, turns, turn, stopping
        self._live_requests: dict[Any, tuple[RolloutRequest, Rollout]] = {}
        self._picture_reader = pictures
        self._read_pictures: dict[tuple[int, int], PromptPictures | None] = {}

    def generate_rollouts(self, asks: Sequence[RolloutRequest]) -> list[Rollout] | None:
        """Return an answer to each, in their order; None when somebody wished to stop.

        Prompts that are alike are read once if others come between them.

        Raises:
            DataError: a prompt leaves no room for an answer.
            Failure: the model's logits are not numbers.
        """
        rollouts = [Rollout(ask.question_index, ask.answer_index, list(ask.prompt), len(ask.prompt)) for ask in asks]
        for ask, rollout in zip(asks, rollouts, strict=True):
            self._submit_request(ask, rollout)
        last_log_time = time.monotonic()
        was_training = self._root.training
        self._root.eval()
        try:
            while self._live_requests:
                if self._should_stop():
                    return None
                HEARTBEAT.record_beat()
                with self._device.autocast():
                    finished = self._engine.step()
                for request in finished:
                    self._collect_answer(request, *self._live_requests.pop(request))
                if time.monotonic() - last_log_time > _PROGRESS_SECONDS:
                    log.info(f"  answering: {len(asks) - len(self._live_requests)} of {len(asks)}")
                    last_log_time = time.monotonic()
        finally:
            self._engine.cancel_requests(self._live_requests)
            self._live_requests.clear()
            self._root.train(was_training)
        return rollouts

    def _submit_request(self, ask: RolloutRequest, rollout: Rollout) -> None:
        question = self._questions[ask.question_index]
        pictures = self._find_pictures(rollout.question, rollout.ids)
        request = self._engine.request(rollout.ids, ask.sampling, name=question.id, pictures=pictures)
        if self._device.type == "cpu" and rollout.start < _SHARED_PROMPT_TOKENS:
            request.salt = ask.answer_index.to_bytes(8, "little")
        self._live_requests[request] = ask, rollout
        self._engine.submit([request])

    def _find_pictures(self, question: int, ids: list[int]) -> PromptPictures | None:
        """Return the pictures of a prompt; answers to one question share them, and the tower reads them once."""
        grids = self._questions[question].picture_grids
        if self._picture_reader is None or not grids:
            return None
        key = (question, len(ids))
        if key not in self._read_pictures:
            self._read_pictures[key] = self._picture_reader.read(ids, grids)
        return self._read_pictures[key]

    def _collect_answer(self, request: Any, ask: RolloutRequest, rollout: Rollout) -> None:
        done = self._engine.get_completion(request)
        rollout.ids += done.ids
        rollout.chosen += done.chosen
        rollout.logprobs += done.logprobs
        rollout.text = done.text
        rollout.turns.append({"role": "assistant", "content": done.text})
        rollout.truncated = done.finish_reason == "length"
        assistant_turns = [turn for turn in rollout.turns if turn["role"] == "assistant"]
        if rollout.truncated or self._turn_function is None or len(assistant_turns) >= self._max_turns:
            return
        question = self._questions[rollout.question]
        try:
            reply = self._turn_function(question, [*question.messages, *rollout.turns])
        except RewardCallError as fault:
            rollout.faults["turn"] = str(fault)
            return
        if reply is None:
            return
        given = encode_user_turn(self._engine.tokenizer, reply, done.ids[-1])
        if len(rollout.ids) + len(given) >= self._engine.max_len:
            rollout.truncated = True
            return
        rollout.turns.append({"role": "user", "content": reply})
        rollout.ids += given
        rollout.chosen += [0] * len(given)
        rollout.logprobs += [0.0] * len(given)
        self._submit_request(ask, rollout)


def encode_user_turn(tokenizer: Any, text: str, last: int) -> list[int]:
    """Return the tokens that stand between an answer, whose last token is `last`, and the next one: the rest of the
    answer's frame, the user's turn, and the beginning of the assistant's.

    The answer itself is never tokenised anew: its tokens are those that were drawn.

    Raises:
        ConfigError: the chat template changes earlier turns when later ones come.
    """
    turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    before: str = tokenizer.apply_chat_template(turns, tokenize=False)
    after: str = tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    if not after.startswith(before):
        raise ConfigError("the chat template changes earlier turns when later ones come", "use --turns 1")
    frame = before[before.rindex("B") + 1 :].removeprefix(tokenizer.decode([last]))
    ids: list[int] = tokenizer.encode(frame + after[len(before) :], add_special_tokens=False)
    return ids
