"""The likelihood of a text's end by its definition: one row, all logits, log-softmax."""

from __future__ import annotations

import torch

from anabatic.device.attention import PackedSegments
from anabatic.models.forward import NO_MASK


def slow(model, text):
    """One row, all logits, log-softmax: the definition."""
    ids = torch.tensor([list(text.tokens)])
    with torch.no_grad():
        logits = (
            model(
                input_ids=ids[:, :-1],
                position_ids=torch.arange(ids.shape[1] - 1)[None],
                attention_mask=NO_MASK,
                use_cache=False,
                segments=PackedSegments([0, ids.shape[1] - 1], torch.device("cpu")),
            )
            .logits[0]
            .double()
        )
    logprobs = torch.log_softmax(logits, -1)
    first = len(text.tokens) - text.num_scored - 1
    want = ids[0, first + 1 :]
    return float(logprobs[first:].gather(1, want[:, None]).sum()), bool((logits[first:].argmax(-1) == want).all())
