"""Choose the memory of an engine's cache, once, before the first request."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from anabatic.config.infer import Batching
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_count, format_size
from anabatic.device.device import Device
from anabatic.infer.block_pool import BLOCK_SIZE
from anabatic.infer.engine import Engine
from anabatic.models.kv_cache import bytes_per_token
from anabatic.models.linear_attention.delta_states import bytes_per_request, choose_kernels

DEFAULT_MAX_LEN = 8192
"""Tokens of a request where nobody says, whatever the model allows."""
CACHE_MEMORY_FRACTION = 0.4
"""Of the free memory, at most, where nobody says."""


def make_engine(
    model: PreTrainedModel,
    tokenizer: Any,
    device: Device,
    batching: Batching,
    nproc: int = 1,
    step_seconds: float | None = None,
    scaled: bool = False,
) -> Engine:
    """Return an engine whose cache fits the device, and say how large it is.

    Args:
        nproc: processes that share the memory of a processor.
        step_seconds, scaled: as of `Engine`.

    Raises:
        DataError: there is no room for one request, or `max_len` is more than the model has positions for.
    """
    longest = batching.max_len or min(model.config.get_text_config().max_position_embeddings, DEFAULT_MAX_LEN)
    return Engine(
        model,
        tokenizer,
        max_batch=batching.batch,
        max_len=longest,
        cache_tokens=size_cache(model, device, batching, nproc),
        step_tokens=batching.step_tokens,
        step_seconds=step_seconds,
        scaled=scaled,
    )


def size_cache(model: PreTrainedModel, device: Device, batching: Batching, nproc: int = 1) -> int:
    """Return the tokens that the cache gets, and say how large it is; arguments and errors as of `make_engine`."""
    config = model.config.get_text_config()
    longest = batching.max_len or min(config.max_position_embeddings, DEFAULT_MAX_LEN)
    each = bytes_per_token(config, model.dtype)
    needed_tokens = batching.batch * -(-longest // BLOCK_SIZE) * BLOCK_SIZE
    states = batching.batch * bytes_per_request(config, model.device, model.dtype)
    free = max(0, device.get_free_memory() - states)
    if batching.cache_gib is None:
        tokens = min(needed_tokens, int(CACHE_MEMORY_FRACTION * free / (nproc if device.type == "cpu" else 1)) // each)
        reason = (
            "room for all" if tokens == needed_tokens else f"{CACHE_MEMORY_FRACTION:g} of the free {format_size(free)}"
        )
    else:
        tokens, reason = int(batching.cache_gib * 2**30) // each, "asked for"
        if tokens * each > free:
            raise DataError(
                f"batching.cache_gib is {batching.cache_gib:g}, and {format_size(free)} are free",
                f"use at most {free / 2**30:.1f}, or leave it out",
            )
    if tokens < min(longest, 2 * BLOCK_SIZE):
        raise DataError(
            f"the cache has room for {tokens} tokens of {each:,} bytes ({reason})",
            "give more with --batching.cache-gib",
        )
    beside = f"; states of {batching.batch} requests, {format_size(states)}" if states else ""
    log.info(f"cache for {format_count(tokens)} tokens, {format_size(tokens * each)} ({reason}){beside}")
    if states and device.type != "cpu":
        log.info(str(choose_kernels(config, model.device, model.dtype)))
    return tokens
