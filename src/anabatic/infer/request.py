"""A request on its way through the engine, and the answer that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from anabatic.config.chat import Sampling
from anabatic.infer.block_pool import BLOCK_SIZE, BlockTable, hash_block
from anabatic.infer.text_stream import StopStringFilter, TextStream

if TYPE_CHECKING:
    from anabatic.models.vision.prompt_pictures import PromptPictures

TopLogprobs = list[tuple[int, float]]
"""The likeliest tokens and their log-probabilities, the likeliest first."""


class TokenConstraint(Protocol):
    """Constraint on an answer, token by token."""

    def allowed_tokens(self) -> Tensor:
        """Return which tokens may come next, bool `[V]` on the host."""

    def accept_token(self, token: int) -> bool:
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
        max_answer_tokens: tokens of the answer at most.
        random: uniform numbers, one for each token.
        tokenizer: turns its tokens into text.
        adapter: name of the adapter it asks; None: the model itself.
        adapter_index: of the adapter among those that are loaded; -1: none.
        salt: what tells its blocks from those of equal tokens under another adapter.
        constraint: what the answer has to look like.
        pictures: of the prompt; None: it is text alone.
        ids: tokens so far; logprobs, top_logprobs, chosen: theirs, as in `Completion`.
        finish_reason: empty until it is finished; `cancelled` when it was given up.
        stop_string: the text that ended it.
        cached_tokens: tokens of the prompt that were in the cache already.
        is_abandoned: nobody waits for it any more, and it will be cancelled; any thread may say so.
        is_running: it has a place in the batch.
        state_slot: where layers with a state keep its own while it runs.
        computed_tokens: tokens whose keys and values are in its blocks.
        is_beyond_border: it is longer than the border of the model's frequencies, see `Schedule`.
    """

    prompt: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    max_answer_tokens: int
    random: Random
    tokenizer: Any
    adapter: str | None = None
    adapter_index: int = -1
    salt: bytes = b""
    constraint: TokenConstraint | None = None
    pictures: PromptPictures | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_string: str | None = None
    cached_tokens: int = 0
    is_abandoned: bool = False
    is_running: bool = False
    state_slot: int = 0
    computed_tokens: int = 0
    is_beyond_border: bool = False
    block_table: BlockTable = field(default_factory=BlockTable)
    _block_hashes: list[bytes] = field(default_factory=list)
    _ended_by_id: bool = False
    _num_decoded: int = 0

    def __post_init__(self) -> None:
        self._text_stream = TextStream(self.tokenizer)
        self._stop_strings = StopStringFilter(self.sampling.stop)
        self._pending_text: list[str] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the answer so far."""
        return len(self.prompt) + len(self.ids)

    @property
    def answer_ids(self) -> list[int]:
        """The tokens without the one that ended the answer."""
        return self.ids[:-1] if self._ended_by_id else self.ids

    def slice_tokens(self, start: int, end: int, by_content: bool = False) -> list[int]:
        """Return tokens of the prompt and the answer so far.

        Args:
            by_content: tokens of pictures are numbers that say what these show.
        """
        prompt = self.prompt if self.pictures is None or not by_content else self.pictures.content_ids
        first = len(prompt)
        if start >= first:
            return self.ids[start - first : end - first]
        return prompt[start:end] if end <= first else prompt[start:] + self.ids[: end - first]

    def block_hashes(self, blocks: int) -> list[bytes]:
        """Return the digests of the first full blocks."""
        for at in range(len(self._block_hashes), blocks):
            before = self._block_hashes[-1] if self._block_hashes else self.salt
            tokens = self.slice_tokens(at * BLOCK_SIZE, (at + 1) * BLOCK_SIZE, by_content=True)
            self._block_hashes.append(hash_block(before, tokens))
        return self._block_hashes[:blocks]

    def mark_beyond_border(self) -> None:
        """Tell its blocks from those of equal tokens in requests that are shorter than the border."""
        if not self.is_beyond_border:
            self.is_beyond_border = True
            self.salt += b"beyond"
            self._block_hashes.clear()

    def append_token(self, token: int, logprob: float) -> None:
        """Add a token to the answer, and find out whether it ends it."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.chosen.append(1)
        is_complete = self.constraint is not None and self.constraint.accept_token(token)
        if token in self.stop_ids:
            self.finish_reason, self._ended_by_id = "stop", True
        elif self._stop_strings.texts and self._has_stop_string():
            self.finish_reason, self.stop_string = "stop", self._stop_strings.matched
        elif is_complete:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.max_answer_tokens:
            self.finish_reason = "length"

    def append_given_tokens(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model did not choose; they are read in one piece before the next one is chosen."""
        given = tokens[: self.max_answer_tokens - len(self.ids)]
        self.ids += given
        self.logprobs += [0.0] * len(given)
        self.chosen += [0] * len(given)
        if self.sampling.top_logprobs:
            self.top_logprobs += [[] for _ in given]
        if len(self.ids) >= self.max_answer_tokens:
            self.finish_reason = "length"

    def _has_stop_string(self) -> bool:
        self._decode_new_tokens()
        return self._stop_strings.matched is not None

    def _decode_new_tokens(self) -> None:
        """Turn the tokens since the last time into text."""
        answer = self.answer_ids
        for token in answer[self._num_decoded :]:
            self._pending_text.append(self._stop_strings.push_text(self._text_stream.push_token(token)))
        self._num_decoded = len(answer)

    def take_text(self) -> str:
        """Return the text that has become certain since the last time: no half character, no part of what may become a
        stop string. When the request is finished, all that is left."""
        self._decode_new_tokens()
        if self.finish_reason:
            self._pending_text.append(
                self._stop_strings.push_text(self._text_stream.flush()) + self._stop_strings.flush()
            )
        text = "".join(self._pending_text)
        self._pending_text.clear()
        return text
