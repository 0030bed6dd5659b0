"""Detect by a probe how a language model computes logits from its last hidden state.

Losses are computed in chunks outside the model's forward pass, so every step after the last hidden state must be
known: the output weight, a constant factor (Cohere, Granite), a softcap (Gemma 2).
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anabatic.core.errors import DataError

_HIDDEN, _VOCAB = 6, 10


class LmHead(NamedTuple):
    """LM head with logits `cap(scale * hidden weight^T)`."""

    scale: float = 1.0
    softcap: float | None = None

    def compute_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """`[..., H]` and `[V, H]` -> `[..., V]`."""
        out = hidden @ weight.t()
        out = out if self.scale == 1 else self.scale * out
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap


class _StubBody(nn.Module):
    """Replaces the body of a model and returns given hidden states."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(
            last_hidden_state=self.states, past_key_values=None, hidden_states=None, attentions=None, router_logits=None
        )


@torch.no_grad()
def find_lm_head(model: Any) -> LmHead:
    """Return the head of a causal language model; its weights are not read, so they may be on `meta`.

    Raises:
        DataError: its logits are computed in another way.
    """
    with torch.autocast("cpu", enabled=False), torch.device("cpu"):
        head = _probe_lm_head(model)
    if head is None:
        raise DataError(
            f"{type(model).__name__} makes its logits in a way that the loss in chunks does not know",
            "use a model whose logits are its output matrix, a factor and a cap",
        )
    return head


def _probe_lm_head(model: Any) -> LmHead | None:
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(*shape, generator=generator) for shape in ((1, 4, _HIDDEN), (_VOCAB, _HIDDEN)))
    output = model.get_output_embeddings()
    probe = copy.copy(model)
    probe.__dict__["_modules"] = dict(model._modules)
    if output is None or getattr(output, "bias", None) is not None:
        raise DataError(f"the head of {type(model).__name__} is not one matrix without a bias", "use another model")
    for name, child in model._modules.items():
        if child is output:
            head = nn.utils.skip_init(nn.Linear, _HIDDEN, _VOCAB, bias=False)  # draws no random numbers
            head.weight.copy_(weight)
            probe._modules[name] = head
        elif name == model.base_model_prefix:
            probe._modules[name] = _StubBody(states)
    return _match_head(_run_probe(probe), states, weight, getattr(model.config, "final_logit_softcapping", None))


def _run_probe(probe: Any) -> Tensor:
    out: Tensor = probe.forward(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits
    return out


def _match_head(logits: Tensor, states: Tensor, weight: Tensor, softcap: float | None) -> LmHead | None:
    unscaled = states @ weight.t()
    factor = float((logits / unscaled).median())
    for head in (LmHead(softcap=softcap), LmHead(scale=factor), LmHead(factor, softcap)):
        if torch.allclose(head.compute_logits(states, weight), logits, rtol=1e-4, atol=1e-5):
            return head
    return None
