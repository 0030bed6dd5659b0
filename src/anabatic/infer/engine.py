"""Generate text: requests share a cache of blocks and join and leave the running batch at every step.

`generate` is the one method that most callers need. Underneath, `submit` queues a request and `step` reads one token
for everybody, and pieces of new prompts beside them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from anabatic.core.errors import DataError, Failure
from anabatic.infer import constrained_decoding
from anabatic.infer.block_pool import BLOCK_SIZE
from anabatic.infer.model_runner import ModelRunner
from anabatic.infer.request import Completion, Request, TopLogprobs
from anabatic.infer.sampling import Sampling, make_random
from anabatic.infer.scheduler import PromptPace, RequestScheduler
from anabatic.infer.text_stream import decode_tokens
from anabatic.infer.tool_execution import PythonTool
from anabatic.models import rope_scaling
from anabatic.models.forward import ModelRoot
from anabatic.models.kv_cache import CacheRow, KVCache
from anabatic.models.lora.multi_adapter import AdapterRegistry
from anabatic.models.pretrained import get_chat_token_ids

if TYPE_CHECKING:
    from anabatic.models.vision.prompt_pictures import PromptPictures

__all__ = ["Completion", "Engine", "EngineLoad", "PromptTooLong", "Request"]


class PromptTooLong(DataError):
    """A prompt leaves no room for an answer."""


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine.

    Attributes:
        running, waiting: requests.
        blocks: of the cache, `BLOCK_SIZE` tokens each.
        used: by running requests; idle: by none, kept because later requests may begin alike.
        prompt_tokens: of all prompts so far; shared_tokens: those of them that were in the cache already.
        steps: forward passes so far; new_tokens: chosen so far; preemptions: requests that had to make room for others.
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
    preemptions: int


class Engine:
    """Continuous batching over one model.

    Args:
        model: from `models.pretrained.load_model`.
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
        direct: where the device table says so, run a model of a known structure without its modules
            (`cpu_speed.direct_forward`), with copies of its weights where there is memory. Hooks that are added to
            modules after the first step are then not called.

    Raises:
        DataError: `max_len` is more than the model has positions for, or the cache has no room for one block.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        max_batch: int,
        max_len: int,
        root: ModelRoot | None = None,
        cache_tokens: int | None = None,
        step_tokens: int = 2048,
        step_seconds: float | None = None,
        scaled: bool = False,
        tool: PythonTool | None = None,
        direct: bool = True,
    ) -> None:
        config = model.config.get_text_config()
        positions = config.max_position_embeddings
        if max_len > positions:
            raise DataError(
                f"max_len is {max_len}, the model has {positions} positions",
                f"use at most {positions} tokens",
            )
        self._model, self._entries = model, int(config.vocab_size)
        self.tokenizer = tokenizer
        self.stop_ids = find_stop_ids(model, tokenizer)
        blocks = max_batch * -(-max_len // BLOCK_SIZE) if cache_tokens is None else cache_tokens // BLOCK_SIZE
        if blocks < 1:
            raise DataError(f"the cache has room for {cache_tokens} tokens", f"give it {BLOCK_SIZE} or more")
        self.max_len = min(max_len, blocks * BLOCK_SIZE)
        ranks = 1 if root is None else root.tensor_ranks
        cache = KVCache(config, blocks, BLOCK_SIZE, model.device, model.dtype, ranks, max_batch)
        border = rope_scaling.get_length_limit(config)
        self._schedule = RequestScheduler(blocks, max_batch, step_tokens, border, not cache.has_states)
        self._pace = None if step_seconds is None else PromptPace(step_seconds)
        self._adapters = AdapterRegistry(model)
        self.runner = ModelRunner(model, root, cache, self.max_len, scaled=scaled, direct=direct)
        self._tool = tool
        self._prompt_tokens = self._steps = self._new_tokens = 0

    @property
    def is_busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._schedule.waiting or self._schedule.running)

    @property
    def max_batch(self) -> int:
        """Requests that run at once."""
        return self._schedule.max_batch

    @property
    def adapter_names(self) -> list[str]:
        """Names of the adapters that requests may ask."""
        return list(self._adapters.adapter_names)

    def get_load(self) -> EngineLoad:
        """Return how busy the engine is."""
        plan, blocks = self._schedule, self._schedule.block_pool
        return EngineLoad(
            len(plan.running),
            len(plan.waiting),
            blocks.num_blocks,
            blocks.num_blocks - blocks.num_available,
            blocks.num_idle,
            self._prompt_tokens,
            plan.shared_tokens,
            self._steps,
            self._new_tokens,
            plan.preemptions,
        )

    def load_adapter(self, name: str, folder: Path, replaces: bool = False) -> None:
        """Read an adapter that requests may then ask by its name; the model's own weights stay as they are.

        Args:
            replaces: an adapter of this name goes once the new one is read; nobody may ask it then.

        Raises:
            DataError: the name is taken, or the folder is damaged, of another model, or of a kind that must be merged.
        """
        if self._adapters.add_adapter(name, Path(folder), replaces):
            self.runner.forget_structure()

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that nobody asks any more."""
        self._adapters.remove_adapter(name)

    def clear_prefix_cache(self) -> None:
        """Forget what is kept of earlier requests: for whoever has changed the weights."""
        self._schedule.block_pool.free_idle_blocks()

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
            self.cancel_requests(requests)
        return [self.get_completion(request) for request in requests]

    def follow(self, request: Request) -> Iterator[str]:
        """Yield the text of a submitted request while it is written; `request` holds the rest of the story."""
        try:
            while not request.finish_reason:
                self.step()
                if piece := request.take_text():
                    yield piece
            if piece := request.take_text():  # somebody else's steps ended it
                yield piece
        finally:
            self.cancel_requests([request])

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Iterable[int] | None = None,
        name: str = "the prompt",
        adapter: str | None = None,
        pictures: PromptPictures | None = None,
    ) -> Request:
        """Check a prompt and return its request, not yet submitted.

        Args:
            adapter: name of the adapter that is asked; None: the model itself.
            pictures: those of the prompt, whose tokens are in it.

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
        if unknown_tokens := [token for token in sampling.logit_bias if int(token) >= self._entries]:
            what = f"logit_bias names token {unknown_tokens[0]}; the model has {self._entries}"
            raise DataError(what, "leave it out")
        stops = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        salt, place = self._adapters.get_cache_salt(adapter), self._adapters.get_slot(adapter)
        constraint = constrained_decoding.make_constraint(sampling, self.tokenizer, self._entries, stops)
        return Request(
            list(prompt),
            sampling,
            stops,
            min(sampling.max_new_tokens, room),
            make_random(sampling),
            self.tokenizer,
            adapter,
            place,
            salt,
            constraint,
            pictures,
        )

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; they start as there is room, first come first served."""
        for request in requests:
            self._prompt_tokens += len(request.prompt)
            self._schedule.waiting.append(request)

    def cancel_requests(self, requests: Iterable[Request]) -> None:
        """Give up requests that are not finished and free what they hold."""
        for request in requests:
            if request.finish_reason:
                continue
            request.finish_reason = "cancelled"
            self._schedule.remove_request(request)

    def step(self) -> list[Request]:
        """Read one token for every running request, and pieces of prompts; return the requests that finished.

        Where all requests of the step are `abandoned` while it runs, it ends at the next layer as if it had not begun.

        Raises:
            Failure: the model's logits are not numbers.
        """
        rows = self._schedule.plan_step()
        if not rows:
            return []
        began = time.monotonic()
        chosen = self.runner.run_step(rows)
        if chosen is None:
            return []
        self._steps += 1
        self._record_pace(rows, time.monotonic() - began)
        return self._apply_tokens(rows, chosen)

    def get_completion(self, request: Request) -> Completion:
        """Return the answer of a finished request."""
        text = decode_tokens(self.tokenizer, request.answer_ids)
        if request.stop_string is not None:
            text = text[: text.index(request.stop_string)]
        return Completion(
            request.ids, text, request.finish_reason, request.logprobs, request.top_logprobs, request.chosen
        )

    def _apply_tokens(
        self, rows: Mapping[Request, CacheRow], chosen: list[tuple[int, float, TopLogprobs]]
    ) -> list[Request]:
        """Append what was chosen to the requests; return those that finished."""
        if any(value != value for _, value, _ in chosen):
            self.clear_prefix_cache()
            raise Failure(
                "the model's logits are not numbers (NaN)",
                "the weights are broken, or device.dtype is too narrow for them: try --device.dtype fp32",
            )
        for request, row in rows.items():
            self._schedule.mark_computed(request, row.start + len(row.tokens))
        done = [request for request, row in rows.items() if row.should_return_logits]
        for request, (token, logprob, top) in zip(done, chosen, strict=True):
            request.append_token(token, logprob)
            if request.sampling.top_logprobs:
                request.top_logprobs.append(top)
        self._new_tokens += len(done)
        if self._tool is not None:
            self._tool.run_calls(done)
        finished = [request for request in done if request.finish_reason]
        for request in finished:
            self._schedule.remove_request(request)
        return finished

    def _record_pace(self, rows: Mapping[Request, CacheRow], seconds: float) -> None:
        """Learn from a step how fast prompts are read. Only where tokens were chosen has the device been waited for."""
        read = sum(len(row.tokens) for row in rows.values() if len(row.tokens) > 1)
        if self._pace is not None and read and any(row.should_return_logits for row in rows.values()):
            self._pace.add_step(read, seconds)
            self._schedule.max_shared_prompt_tokens = self._pace.max_prompt_tokens


def find_stop_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the generation settings', and the tokenizer's.

    An adapter may have taught a chat template whose end of a turn the base model's settings do not know.
    """
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return frozenset([*known, *(get_chat_token_ids(tokenizer)["eos_token_id"] or [])])
