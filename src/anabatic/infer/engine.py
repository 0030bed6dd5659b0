"""Generate text: requests share a cache of blocks and join and leave the running batch at every step.

`generate` is the one method that most callers need. Underneath, `submit` queues a request and `step` reads one token
for everybody, and pieces of new prompts beside them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from anabatic.core.errors import DataError, Failure
from anabatic.infer import form
from anabatic.infer.blocks import SIZE
from anabatic.infer.request import Completion, Request
from anabatic.infer.sampling import Sampling, pick, source_of_draws
from anabatic.infer.schedule import Pace, Schedule
from anabatic.infer.stream import decode
from anabatic.infer.tool import PythonTool
from anabatic.models import forward, rope_lengths
from anabatic.models.cache import Cache, Row
from anabatic.models.forward import Root
from anabatic.models.hf import chat_ids
from anabatic.models.lora_many import Adapters

__all__ = ["Completion", "Engine", "Load", "PromptTooLong", "Request"]


class PromptTooLong(DataError):
    """A prompt leaves no room for an answer."""


class _Abandoned(Exception):
    """Nobody waits any more for what a step reads."""


@dataclass(frozen=True)
class Load:
    """How busy an engine is.

    Attributes:
        running, waiting: requests.
        blocks: of the cache, `SIZE` tokens each.
        used: by running requests; idle: by none, kept because later requests may begin alike.
        prompt_tokens: of all prompts so far; shared_tokens: those of them that were in the cache already.
        steps: forward passes so far; new_tokens: chosen so far; put_back: requests that had to make room for others.
    """

    running: int
    waiting: int
    blocks: int
    used: int
    idle: int
    prompt_tokens: int
    shared_tokens: int
    steps: int
    new_tokens: int
    put_back: int


class Engine:
    """Continuous batching over one model.

    Args:
        model: from `models.hf.load_model`.
        tokenizer: a fast tokenizer of transformers; turns tokens into text.
        max_batch: requests that run at once; the others wait.
        max_len: tokens of a request at most, prompt and answer together.
        root: what the model is divided under; all ranks then make the same calls.
        cache_tokens: tokens that the cache has room for, allocated here and now; default: `max_batch` requests of
            `max_len`. Requests wait while there is no room, and the youngest makes room for older ones.
        step_tokens: tokens of prompts that are read in one step at most; longer prompts are read in pieces, and those
            who are already being answered do not wait for the whole.
        step_seconds: a step of several requests reads no more of prompts than takes about so long, as the steps before
            have shown; None: `step_tokens` alone counts. Not for ranks that make the same calls: their clocks differ.
        scaled: log-probabilities of drawn tokens are those at the temperature they were drawn at, not at 1.
        tool: runs the code that answers hold, and gives them its output. Not for ranks that make the same calls: the
            output of a program may differ between them.

    Raises:
        DataError: `max_len` is more than the model has positions for, or the cache has no room for one block.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, max_batch: int, max_len: int, root: Root | None = None,
        cache_tokens: int | None = None, step_tokens: int = 2048, step_seconds: float | None = None,
        scaled: bool = False, tool: PythonTool | None = None,
    ) -> None:  # fmt: skip
        positions = model.config.max_position_embeddings
        if max_len > positions:
            raise DataError(
                f"max_len is {max_len}, the model has {positions} positions",
                f"use at most {positions} tokens",
            )
        self._model, self._root = model, root or Root(model)
        # Weights that are gathered for training later may not become inference tensors.
        self._untracked = torch.inference_mode if root is None else torch.no_grad
        self.tokenizer = tokenizer
        self.stop_ids = _end_ids(model, tokenizer)
        blocks = max_batch * -(-max_len // SIZE) if cache_tokens is None else cache_tokens // SIZE
        if blocks < 1:
            raise DataError(f"the cache has room for {cache_tokens} tokens", f"give it {SIZE} or more")
        self.max_len = min(max_len, blocks * SIZE)
        self._cache = Cache(model.config, blocks, SIZE, model.device, model.dtype, self._root.parts)
        self._schedule = Schedule(blocks, max_batch, step_tokens, rope_lengths.border(model.config))
        self._pace = None if step_seconds is None else Pace(step_seconds)
        self._adapters = Adapters(model)
        self._scaled = scaled
        self._tool = tool
        self._prompt_tokens = self._steps = self._new_tokens = 0

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._schedule.waiting or self._schedule.running)

    @property
    def max_batch(self) -> int:
        """Requests that run at once."""
        return self._schedule.max_batch

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that requests may ask."""
        return list(self._adapters.names)

    def load(self) -> Load:
        """Return how busy the engine is."""
        plan, blocks = self._schedule, self._schedule.blocks
        return Load(
            len(plan.running), len(plan.waiting), blocks.count, blocks.count - blocks.available, blocks.idle,
            self._prompt_tokens, plan.shared_tokens, self._steps, self._new_tokens, plan.put_back,
        )  # fmt: skip

    def load_adapter(self, name: str, folder: Path) -> None:
        """Read an adapter that requests may then ask by its name; the model's own weights stay as they are.

        Raises:
            DataError: the name is taken, or the folder is damaged, of another model, or of a kind that must be merged.
        """
        self._adapters.add(name, Path(folder))

    def drop_adapter(self, name: str) -> None:
        """Give up an adapter.

        Raises:
            DataError: there is none of that name, or requests are under way that ask it.
        """
        asked = sum(request.adapter == name for request in (*self._schedule.waiting, *self._schedule.running))
        if asked:
            raise DataError(f"{asked} requests ask the adapter {name}", "wait for them, or cancel them")
        self._adapters.remove(name)

    def forget(self) -> None:
        """Forget what is kept of earlier requests: for whoever has changed the weights."""
        self._schedule.blocks.forget()

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
            DataError: a prompt is empty or leaves no room for an answer, or the samplings are not as many as the
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
        """Yield the text of a submitted request while it is written; `request` holds the rest of the story."""
        try:
            while not request.finish_reason:
                self.step()
                if piece := request.take():
                    yield piece
            if piece := request.take():  # somebody else's steps ended it
                yield piece
        finally:
            self.cancel([request])

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Iterable[int] | None = None,
        name: str = "the prompt",
        adapter: str | None = None,
    ) -> Request:
        """Check a prompt and return its request, not yet submitted.

        Args:
            adapter: name of the adapter that is asked; None: the model itself.

        Raises:
            DataError: the prompt is empty; there is no such adapter.
            PromptTooLong: it leaves no room for an answer.
            ConfigError: the form of the answer cannot be read, or needs a library that is not installed.
        """
        room = self.max_len - len(prompt)
        if not prompt:
            raise DataError(f"{name} is empty: there is no token to start from", "give at least one token")
        if room < 1:
            raise PromptTooLong(
                f"{name} has {len(prompt)} tokens; with an answer at most {self.max_len} fit",
                f"shorten it to {self.max_len - 1} tokens or fewer, or use a model with a longer context",
            )
        entries = self._model.config.vocab_size
        if strange := [token for token in sampling.logit_bias if int(token) >= entries]:
            raise DataError(f"logit_bias names token {strange[0]}; the model has {entries}", "leave it out")
        stops = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        salt, place = self._adapters.salt(adapter), self._adapters.place(adapter)
        wanted = form.of(sampling, self.tokenizer, self._model.config.vocab_size, stops)
        return Request(
            list(prompt), sampling, stops, min(sampling.max_new_tokens, room), source_of_draws(sampling),
            self.tokenizer, adapter, place, salt, wanted,
        )  # fmt: skip

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; they start as there is room, first come first served."""
        for request in requests:
            self._prompt_tokens += len(request.prompt)
            self._schedule.waiting.append(request)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Give up requests that are not finished and free what they hold."""
        for request in requests:
            if request.finish_reason:
                continue
            request.finish_reason = "cancelled"
            self._schedule.leave(request)

    def step(self) -> list[Request]:
        """Read one token for every running request, and pieces of prompts; return the requests that finished.

        Where all requests of the step are `abandoned` while it runs, it ends at the next layer as if it had not begun.

        Raises:
            Failure: the model's logits are not numbers.
        """
        training = self._model.training
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
        if request.stop_string is not None:
            text = text[: text.index(request.stop_string)]
        return Completion(
            request.ids, text, request.finish_reason, request.logprobs, request.top_logprobs, request.chosen
        )

    def _step(self) -> list[Request]:
        rows = self._schedule.plan()
        if not rows:
            return []
        began = time.monotonic()
        self._cache.look = lambda: _require_awaited(rows)
        try:
            logits = self._root(forward.extend, list(rows.values()), self._cache)
        except _Abandoned:
            return []
        done = [request for request, row in rows.items() if row.wanted]
        chosen = pick(logits, done, self._scaled) if done else []
        self._steps += 1
        self._measure(rows, time.monotonic() - began)
        if any(value != value for _, value, _ in chosen):
            self.forget()
            raise Failure(
                "the model's logits are not numbers (NaN)",
                "the weights are broken, or device.dtype is too narrow for them: try --device.dtype fp32",
            )
        for request, row in rows.items():
            self._schedule.note(request, row.start + len(row.tokens))
        for request, (token, logprob, top) in zip(done, chosen, strict=True):
            request.take_token(token, logprob)
            if request.sampling.top_logprobs:
                request.top_logprobs.append(top)
        self._new_tokens += len(done)
        if self._tool is not None:
            self._tool.answer(done)
        finished = [request for request in done if request.finish_reason]
        for request in finished:
            self._schedule.leave(request)
        return finished

    def _measure(self, rows: Mapping[Request, Row], seconds: float) -> None:
        """Learn from a step how fast prompts are read. Only where tokens were chosen has the device been waited for."""
        read = sum(len(row.tokens) for row in rows.values() if len(row.tokens) > 1)
        if self._pace is not None and read and any(row.wanted for row in rows.values()):
            self._pace.add(read, seconds)
            self._schedule.most = self._pace.tokens


def _require_awaited(requests: Iterable[Request]) -> None:
    if all(request.abandoned for request in requests):
        raise _Abandoned


def _end_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the generation settings', and the tokenizer's.

    An adapter may have taught a chat template whose end of a turn the base model's settings do not know.
    """
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return frozenset([*known, *(chat_ids(tokenizer)["eos_token_id"] or [])])
