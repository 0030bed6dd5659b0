"""A request on its way through the engine, and the answer that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from torch import Tensor

from anabatic.infer.blocks import SIZE, Table, digest
from anabatic.infer.sampling import Sampling
from anabatic.infer.stream import StopStrings, TextStream

TopLogprobs = list[tuple[int, float]]
"""The likeliest tokens and their log-probabilities, the likeliest first."""


class Form(Protocol):
    """What an answer has to look like, token by token."""

    def allowed(self) -> Tensor:
        """Return which tokens may come next, bool `[V]` on the host."""

    def accept(self, token: int) -> bool:
        """Take the chosen token; return True when the answer is whole and nothing may follow."""


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        ids: the tokens, the one that ended the answer included.
        text: the decoded answer, without the ending token and other special ones, and without what a stop string
            begins.
        finish_reason: `stop` (one of the stop ids or stop strings), `length` (`max_new_tokens`, or the room there is).
        logprobs: log-probability of each token under the model itself (temperature 1, nothing cut).
        top_logprobs: for each token the likeliest ones, where they were asked for.
        chosen: for each token 1 where the model chose it, 0 where a tool gave it; those have the log-probability 0.
    """

    ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """A prompt on its way: waiting, running, or finished.

    Attributes:
        prompt: token ids.
        sampling: how its tokens are chosen.
        stop_ids: tokens that end it.
        limit: tokens of the answer at most.
        draws: uniform numbers, one for each token.
        tokenizer: turns its tokens into text.
        adapter: name of the adapter it asks; None: the model itself.
        place: of the adapter among those that are loaded; -1: none.
        salt: what tells its blocks from those of equal tokens under another adapter.
        form: what the answer has to look like.
        ids: tokens so far; logprobs, top_logprobs, chosen: theirs, as in `Completion`.
        finish_reason: empty until it is finished; `cancelled` when it was given up.
        stop_string: the text that ended it.
        cached: tokens of the prompt that were in the cache already.
        abandoned: nobody waits for it any more, and it will be cancelled; any thread may say so.
        running: it has a place in the batch.
        computed: tokens whose keys and values are in its blocks.
        beyond: it is longer than the border of the model's frequencies, see `Schedule`.
    """

    prompt: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    limit: int
    draws: Random
    tokenizer: Any
    adapter: str | None = None
    place: int = -1
    salt: bytes = b""
    form: Form | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_string: str | None = None
    cached: int = 0
    abandoned: bool = False
    running: bool = False
    computed: int = 0
    beyond: bool = False
    table: Table = field(default_factory=Table)
    _names: list[bytes] = field(default_factory=list)
    _ended_by_id: bool = False
    _pushed: int = 0

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer)
        self._stops = StopStrings(self.sampling.stop)
        self._said: list[str] = []

    @property
    def size(self) -> int:
        """Tokens of the prompt and the answer so far."""
        return len(self.prompt) + len(self.ids)

    @property
    def answer(self) -> list[int]:
        """The tokens without the one that ended the answer."""
        return self.ids[:-1] if self._ended_by_id else self.ids

    def tokens(self, start: int, end: int) -> list[int]:
        """Return tokens of the prompt and the answer so far."""
        first = len(self.prompt)
        if start >= first:
            return self.ids[start - first : end - first]
        return self.prompt[start:end] if end <= first else self.prompt[start:] + self.ids[: end - first]

    def names(self, blocks: int) -> list[bytes]:
        """Return the digests of the first full blocks."""
        for at in range(len(self._names), blocks):
            before = self._names[-1] if self._names else self.salt
            self._names.append(digest(before, self.tokens(at * SIZE, (at + 1) * SIZE)))
        return self._names[:blocks]

    def cross(self) -> None:
        """Tell its blocks from those of equal tokens in requests that are shorter than the border."""
        if not self.beyond:
            self.beyond = True
            self.salt += b"beyond"
            self._names.clear()

    def take_token(self, token: int, logprob: float) -> None:
        """Add a token to the answer, and find out whether it ends it."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.chosen.append(1)
        whole = self.form is not None and self.form.accept(token)
        if token in self.stop_ids:
            self.finish_reason, self._ended_by_id = "stop", True
        elif self._stops.texts and self._stop_string_came():
            self.finish_reason, self.stop_string = "stop", self._stops.found
        elif whole:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.limit:
            self.finish_reason = "length"

    def give(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model did not choose; they are read in one piece before the next one is chosen."""
        given = tokens[: self.limit - len(self.ids)]
        self.ids += given
        self.logprobs += [0.0] * len(given)
        self.chosen += [0] * len(given)
        if self.sampling.top_logprobs:
            self.top_logprobs += [[] for _ in given]
        if len(self.ids) >= self.limit:
            self.finish_reason = "length"

    def _stop_string_came(self) -> bool:
        self._push()
        return self._stops.found is not None

    def _push(self) -> None:
        """Turn the tokens since the last time into text."""
        answer = self.answer
        for token in answer[self._pushed :]:
            self._said.append(self._stops.push(self._stream.push(token)))
        self._pushed = len(answer)

    def take(self) -> str:
        """Return the text that has become certain since the last time: no half character, no part of what may become a
        stop string. When the request is finished, all that is left."""
        self._push()
        if self.finish_reason:
            self._said.append(self._stops.push(self._stream.finish()) + self._stops.finish())
        text = "".join(self._said)
        self._said.clear()
        return text
