"""How much memory an engine's cache gets, decided once, before the first request."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from anabatic.config.infer import Batching
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.text import count, size
from anabatic.device.device import Device
from anabatic.infer.blocks import SIZE
from anabatic.infer.engine import Engine
from anabatic.models.cache import bytes_per_token

LONGEST = 8192
"""Tokens of a request where nobody says, whatever the model allows."""
SHARE = 0.4
"""Of the free memory, at most, where nobody says."""


def engine_of(
    model: PreTrainedModel, tokenizer: Any, device: Device, batching: Batching, nproc: int = 1,
    step_seconds: float | None = None,
) -> Engine:  # fmt: skip
    """Return an engine whose cache fits the device, and say how large it is.

    Args:
        nproc: processes that share the memory of a processor.
        step_seconds: as of `Engine`.

    Raises:
        DataError: there is no room for one request, or `max_len` is more than the model has positions for.
    """
    longest = batching.max_len or min(model.config.max_position_embeddings, LONGEST)
    return Engine(
        model, tokenizer, max_batch=batching.batch, max_len=longest,
        cache_tokens=room(model, device, batching, nproc), step_tokens=batching.step_tokens,
        step_seconds=step_seconds,
    )  # fmt: skip


def room(model: PreTrainedModel, device: Device, batching: Batching, nproc: int = 1) -> int:
    """Return the tokens that the cache gets, and say how large it is; arguments and errors as of `engine_of`."""
    longest = batching.max_len or min(model.config.max_position_embeddings, LONGEST)
    each = bytes_per_token(model.config, model.dtype)
    wanted = batching.batch * -(-longest // SIZE) * SIZE
    free = device.free_bytes()
    if batching.cache_gib is None:
        tokens = min(wanted, int(SHARE * free / (nproc if device.type == "cpu" else 1)) // each)
        why = "room for all" if tokens == wanted else f"{SHARE:g} of the free {size(free)}"
    else:
        tokens, why = int(batching.cache_gib * 2**30) // each, "asked for"
        if tokens * each > free:
            raise DataError(
                f"batching.cache_gib is {batching.cache_gib:g}, and {size(free)} are free",
                f"use at most {free / 2**30:.1f}, or leave it out",
            )
    if tokens < min(longest, 2 * SIZE):
        raise DataError(
            f"the cache has room for {tokens} tokens of {each:,} bytes ({why})", "give more with --batching.cache-gib"
        )
    log.info(f"cache for {count(tokens)} tokens, {size(tokens * each)} ({why})")
    return tokens
