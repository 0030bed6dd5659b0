"""Generate text: a key-value cache with a slot per request, filled and emptied while others go on.

`generate` is the one method that most callers need. Underneath, `submit` queues a request and `step` reads
one token for everybody: finished requests leave their slot, waiting ones take it at the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

from anabatic.core.errors import DataError, Failure
from anabatic.infer.sampling import Sampling, choose, log_probability, source_of_draws
from anabatic.infer.stream import TextStream, decode
from anabatic.models import forward
from anabatic.models.attention import KVCache
from anabatic.models.forward import Root

PREFILL_TOKENS = 8192
"""Prompt tokens read in one forward pass; a longer prompt is read alone."""


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        ids: the tokens, the one that ended the answer included.
        text: the decoded answer, without the ending token and other special ones.
        finish_reason: `stop` (one of the stop ids), `length` (`max_new_tokens`, or the engine's `max_len`).
        logprobs: log-probability of each token under the model itself (temperature 1, nothing cut).
    """

    ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float]


@dataclass(eq=False)
class Request:
    """A prompt on its way: waiting, in a slot, or finished.

    Attributes:
        prompt: token ids.
        sampling: how its tokens are chosen.
        stop_ids: tokens that end it.
        limit: tokens at most.
        ids: tokens so far.
        logprobs: their log-probabilities.
        finish_reason: empty until it is finished; `cancelled` when it was given up.
    """

    prompt: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    limit: int
    draws: Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    slot: int = -1

    @property
    def answer(self) -> list[int]:
        """The tokens without the one that ended the answer."""
        return self.ids[:-1] if self.finish_reason == "stop" else self.ids


class Engine:
    """Continuous batching over one model.

    Args:
        model: from `models.hf.load_model`.
        tokenizer: a fast tokenizer of transformers; turns tokens into text.
        max_batch: requests that run at once; the others wait.
        max_len: tokens of a request at most, prompt and answer together.
        root: what the model is divided under; all ranks then make the same calls.

    Raises:
        DataError: `max_len` is more than the model has positions for.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, max_batch: int, max_len: int, root: Root | None = None
    ) -> None:
        positions = model.config.max_position_embeddings
        if max_len > positions:
            raise DataError(
                f"max_len is {max_len}, the model has {positions} positions",
                f"use at most {positions} tokens",
            )
        self._root = root or Root(model)
        # Weights that are gathered for training later may not become inference tensors.
        self._untracked = torch.inference_mode if root is None else torch.no_grad
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.stop_ids = _end_ids(model, tokenizer)
        self._cache = KVCache(model.config, max_batch, max_len, model.device, model.dtype, self._root.parts)
        self._free = list(range(max_batch - 1, -1, -1))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._waiting or self._running)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        stop_ids: Iterable[int] | None = None,
    ) -> list[Completion]:
        """Answer every prompt, in the order of the prompts.

        Args:
            prompts: token ids, any number of them.
            sampling: one for all, or one for each.
            stop_ids: tokens that end an answer; default: those of the model's generation settings.

        Raises:
            DataError: a prompt is empty or leaves no room for an answer, or the samplings are not as many
            as the
                prompts. Nothing is generated then.
            Failure: the model's logits are not numbers.
        """
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != len(prompts):
            raise DataError(f"{len(samplings)} sampling settings for {len(prompts)} prompts", "give one, or one each")
        stops = None if stop_ids is None else frozenset(stop_ids)
        requests = [
            self.request(prompt, each, stops, f"prompt {number}")
            for number, (prompt, each) in enumerate(zip(prompts, samplings, strict=True), start=1)
        ]
        self.submit(requests)
        try:
            while any(not request.finish_reason for request in requests):
                self.step()
        finally:
            self.cancel(requests)
        return [self.completion(request) for request in requests]

    def stream(self, prompt: Sequence[int], sampling: Sampling, stop_ids: Iterable[int] | None = None) -> Iterator[str]:
        """Yield the answer to one prompt piece by piece; no piece ends inside a character.

        Leaving the loop early gives the request up.

        Raises:
            DataError, Failure: as `generate`.
        """
        request = self.request(prompt, sampling, stop_ids)
        self.submit([request])
        yield from self.follow(request)

    def follow(self, request: Request) -> Iterator[str]:
        """Yield the text of a submitted request while it is written; `request` holds the rest of the
        story."""
        text = TextStream(self.tokenizer)
        seen = 0
        try:
            while not request.finish_reason:
                self.step()
                for token in request.answer[seen:]:
                    if piece := text.push(token):
                        yield piece
                seen = len(request.answer)
            if piece := text.finish():
                yield piece
        finally:
            self.cancel([request])

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Iterable[int] | None = None,
        name: str = "the prompt",
    ) -> Request:
        """Check a prompt and return its request, not yet submitted.

        Raises:
            DataError: it is empty, or leaves no room for an answer.
        """
        room = self.max_len - len(prompt)
        if not prompt:
            raise DataError(f"{name} is empty: there is no token to start from", "give at least one token")
        if room < 1:
            raise DataError(
                f"{name} has {len(prompt)} tokens; with an answer at most {self.max_len} fit",
                f"shorten it to {self.max_len - 1} tokens or fewer, or use a model with a longer context",
            )
        stops = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        limit = min(sampling.max_new_tokens, room)
        return Request(list(prompt), sampling, stops, limit, source_of_draws(sampling))

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; they start as slots become free, first come first served."""
        self._waiting.extend(requests)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Give up requests that are not finished and free their slots."""
        for request in requests:
            if request.finish_reason:
                continue
            request.finish_reason = "cancelled"
            if request.slot >= 0:
                self._leave(request)
            elif request in self._waiting:
                self._waiting.remove(request)

    def step(self) -> list[Request]:
        """Read one token for every running request, new ones included; return those that finished.

        Raises:
            Failure: the model's logits are not numbers.
        """
        training = self._root.training
        if training:
            self._root.train(False)
        try:
            with self._untracked():
                return self._step()
        finally:
            if training:
                self._root.train()

    def completion(self, request: Request) -> Completion:
        """Return the answer of a finished request."""
        text = decode(self.tokenizer, request.answer)
        return Completion(request.ids, text, request.finish_reason, request.logprobs)

    def _step(self) -> list[Request]:
        finished: list[Request] = []
        going = list(self._running)
        if joined := self._admit():
            prompts, slots = [request.prompt for request in joined], [request.slot for request in joined]
            finished += self._take(joined, self._root(forward.prefill, prompts, slots, self._cache))
        if going:
            tokens, slots = [request.ids[-1] for request in going], [request.slot for request in going]
            finished += self._take(going, self._root(forward.decode, tokens, slots, self._cache))
        return finished

    def _admit(self) -> list[Request]:
        """Move waiting requests into free slots, as many as one forward pass should read."""
        joined: list[Request] = []
        tokens = 0
        while self._waiting and self._free:
            tokens += len(self._waiting[0].prompt)
            if joined and tokens > PREFILL_TOKENS:
                break
            request = self._waiting.popleft()
            request.slot = self._free.pop()
            self._running.append(request)
            joined.append(request)
        return joined

    def _take(self, requests: list[Request], logits: torch.Tensor) -> list[Request]:
        """Give each request its next token; return those that are finished, their slots freed."""
        draws = [request.draws.random() for request in requests]
        tokens = choose(logits, [request.sampling for request in requests], draws)
        logprobs = log_probability(logits, tokens).tolist()
        if any(value != value for value in logprobs):
            raise Failure(
                "the model's logits are not numbers (NaN)",
                "the weights are broken, or device.dtype is too narrow for them: try --device.dtype fp32",
            )
        finished = []
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs, strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            if token in request.stop_ids:
                request.finish_reason = "stop"
            elif len(request.ids) >= request.limit:
                request.finish_reason = "length"
            if request.finish_reason:
                self._leave(request)
                finished.append(request)
        return finished

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self._free.append(request.slot)
        request.slot = -1


def _end_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the generation settings', else the tokenizer's."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])
