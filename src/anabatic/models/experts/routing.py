"""What the routers of a mixture of experts do in training: tokens of every expert, and the load-balancing loss.

Nothing here waits for the device. Only forward passes with gradients are recorded; the second forward pass of
recomputation is not, nor are evaluations. Shapes: `T` tokens, `k` experts per token, `E` experts, `L` expert layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError
from anabatic.device.attention import PackedSegments
from anabatic.device.device import send_to_device
from anabatic.models.experts.expert_layers import iter_experts_of_all
from anabatic.parallel.collectives import all_reduce_sum
from anabatic.parallel.mesh import SINGLE_RANK, RankGroup

RECORDER = "routing_recorder"
"""Attribute of a model with experts that is trained."""
METRIC_NAMES = ("router_aux_loss", "expert_load_max", "expert_load_entropy", "experts_unused", "tokens_dropped")
"""Metrics of a logged row."""


class RouterSums(NamedTuple):
    """What the load-balancing loss needs of the routers of some layers; those of more layers add up.

    Attributes:
        counts: fp32 `[E + 1]`, the choices of every expert, then the tokens, both of every rank and without gradients.
        probability: fp32 `[E]`, summed over this rank's tokens.
    """

    counts: Tensor
    probability: Tensor


def sum_routers(logits: list[Tensor], top_k: int, mask: Tensor | None, context: RankGroup = SINGLE_RANK) -> RouterSums:
    """Return the sums of layers of experts.

    Args:
        logits: `[T, E]` of each layer.
        mask: fp32 `[T]`, 0 for padding; None: there is none.
        context: ranks with the other tokens of the batch.
    """
    experts = logits[0].shape[-1]
    chosen, probability = (torch.zeros(experts, dtype=torch.float32, device=logits[0].device) for _ in range(2))
    for layer in logits:
        weights = layer.softmax(-1)
        index = weights.detach().topk(top_k, dim=-1).indices
        chosen = chosen + count_choices(index, experts, mask)
        weights = weights.float()
        probability = probability + (weights if mask is None else weights * mask[:, None]).sum(0)
    tokens = chosen.new_tensor([float(logits[0].shape[0])]) if mask is None else mask.sum()[None]
    return RouterSums(all_reduce_sum(torch.cat((chosen, len(logits) * tokens)), context), probability)


def compute_router_loss(counts: Tensor, probability: Tensor) -> Tensor:
    """Return the load-balancing loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6), over all layers.

    `E sum_e f_e p_e` with f_e the choices of expert e per token and p_e the mean of its probability, both over the
    tokens of all layers together, as transformers' `load_balancing_loss_func` computes it (5.23).

    Args:
        counts: of all layers and ranks; probability: of some layers and tokens, whose share of the loss is returned.
    """
    experts = len(probability)
    chosen, rows = counts.split([experts, 1])
    return experts * (chosen / rows * (probability / rows)).sum()


@torch.no_grad()
def count_choices(index: Tensor, experts: int, mask: Tensor | None) -> Tensor:
    """Return the tokens that chose each expert, fp32 `[E]`, exact up to 2^24, without synchronization.

    Args:
        index: `[T, k]`, the experts of each token.
        mask: fp32 `[T]`, 0 for tokens that do not count.
    """
    ones = torch.ones_like(index, dtype=torch.float32) if mask is None else mask[:, None].expand(index.shape)
    counts = torch.zeros(experts, dtype=torch.float32, device=index.device)
    return counts.scatter_add_(0, index.reshape(-1), ones.reshape(-1))


class RoutingRecorder:
    """Records the routers of one model during the forward passes of training.

    Args:
        coefficient: of the load-balancing loss; 0: there is none.
        context: ranks that share the tokens of a batch.

    Attributes:
        sums: fp32, on the device, added up since the reader's last reset: the loss weighted by targets, then the tokens
            of every expert of every layer.

    Raises:
        ConfigError: the model's routers have no such loss.
    """

    def __init__(
        self, model: PreTrainedModel, coefficient: float, device: torch.device, context: RankGroup = SINGLE_RANK
    ) -> None:
        self.coefficient, self._context = coefficient, context
        layers = [layer for _, layer in iter_experts_of_all(model)]
        self._experts = [int(layer.num_experts) for layer in layers]
        self.sums = torch.zeros(1 + sum(self._experts), device=device)
        self.top_k = int(model.config.num_experts_per_tok) if coefficient else 0
        self._is_recording = False
        self._mask: Tensor | None = None
        self._logits: list[Tensor] = []
        offset = 1
        for layer, size in zip(layers, self._experts, strict=True):
            layer.register_forward_pre_hook(self._make_counter(self.sums[offset : offset + size]), with_kwargs=True)
            offset += size
        for router, output in find_routers(model) if coefficient else ():
            router.register_forward_hook(self._make_listener(output))
        model.__dict__[RECORDER] = self

    def _make_counter(self, counts: Tensor) -> Any:
        def count_tokens(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_recording:
                index = (
                    args[1] if len(args) > 1 else kwargs["top_k_index" if "top_k_index" in kwargs else "router_indices"]
                )
                counts.add_(count_choices(index.reshape(-1, index.shape[-1]), len(counts), self._mask))

        return count_tokens

    def _make_listener(self, output: int) -> Any:
        def keep_logits(_: nn.Module, __: tuple[Any, ...], result: Any) -> None:
            if self._is_recording:
                logits: Tensor = result[output] if isinstance(result, tuple) else result
                self._logits.append(logits.reshape(-1, logits.shape[-1]))

        return keep_logits

    @contextmanager
    def record_forward(self, segments: PackedSegments) -> Iterator[None]:
        """Record the routers that run in this context."""
        mask = segments.token_mask
        self._is_recording = torch.is_grad_enabled()
        self._mask = None if mask is None else send_to_device(mask, self.sums.device)
        try:
            yield
        finally:
            self._is_recording = False

    @property
    def count_size(self) -> int:
        """Numbers in the `counts` of `RouterSums`."""
        return self._experts[0] + 1

    def take_sums(self) -> RouterSums | None:
        """Return the sums of what was recorded since the last call; None: there is no loss, or no router has run."""
        logits, self._logits = self._logits, []
        return sum_routers(logits, self.top_k, self._mask, self._context) if logits else None

    def compute_loss(self, counts: Tensor, probability: Tensor, targets: int) -> Tensor:
        """Return `compute_router_loss` times the coefficient and the targets, by which a step's loss is divided, and
        add it to the metrics. Over several micro-batches it is the mean weighted by targets."""
        loss = compute_router_loss(counts, probability)
        self.sums[0] += targets * loss.detach()
        return self.coefficient * targets * loss

    def take_loss(self, targets: int) -> Tensor | None:
        """Return the loss of what was recorded since the last call; None: there is none."""
        sums = self.take_sums()
        return None if sums is None else self.compute_loss(*sums, targets)

    def describe_sums(self, sums: list[float], targets: int) -> dict[str, float]:
        """Return the metrics of `sums`, added up over steps and ranks.

        `expert_load_max`: tokens of the busiest expert over the mean of its layer, in the most uneven layer (1: even).
        `expert_load_entropy`: of the shares of a layer's experts, over log E, mean of the layers (1: even).
        `experts_unused`: share of the experts of all layers that no token chose.
        """
        loss, *counts = sums
        busiest, entropy, unused, start = 0.0, 0.0, 0, 0
        for size in self._experts:
            layer, start = counts[start : start + size], start + size
            total = max(sum(layer), 1.0)
            shares = [count / total for count in layer if count]
            busiest = max(busiest, size * max(shares, default=0.0))
            entropy -= sum(share * math.log(share) for share in shares) / math.log(size) if size > 1 else -1.0
            unused += size - len(shares)
        values = (loss / max(targets, 1), busiest, entropy / len(self._experts), unused / sum(self._experts), 0.0)
        row = dict(zip(METRIC_NAMES, values, strict=True))
        return row if self.coefficient else {name: value for name, value in row.items() if name != METRIC_NAMES[0]}


def find_routers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Return the routers that transformers records for its loss, and which of their results are the logits.

    Raises:
        ConfigError: transformers computes no load-balancing loss for this model.
    """
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    kind, output = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
    routers = [(module, output) for module in model.modules() if isinstance(kind, type) and isinstance(module, kind)]
    if not routers or getattr(model.config, "router_aux_loss_coef", None) is None:
        raise ConfigError(
            f"optim.router_aux_loss is set, and transformers computes no such loss for {type(model).__name__}",
            "set it to 0: routers with a correction bias, such as DeepSeek-V3's, are balanced by that bias",
        )
    return routers


def make_recorder(
    model: PreTrainedModel, coefficient: float | None, device: torch.device, context: RankGroup = SINGLE_RANK
) -> RoutingRecorder | None:
    """Return the recorder of a model; None without experts.

    Args:
        coefficient: of the load-balancing loss; None: `router_aux_loss_coef` of config.json where it says
            `output_router_logits`, as transformers does, else 0.

    Raises:
        ConfigError: a loss is asked for that the model does not have.
    """
    if not any(True for _ in iter_experts_of_all(model)):
        if coefficient:
            raise ConfigError(
                f"optim.router_aux_loss is {coefficient:g}, and {type(model).__name__} has no layers of experts",
                "leave it out",
            )
        return None
    if coefficient is None:
        is_on = getattr(model.config, "output_router_logits", False)
        coefficient = float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0) if is_on else 0.0
    return RoutingRecorder(model, coefficient, device, context)


def get_recorder(model: nn.Module) -> RoutingRecorder | None:
    """Return the recorder that was made for a model."""
    return model.__dict__.get(RECORDER)
