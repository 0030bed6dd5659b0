"""Runs a step of the engine on the model: as a captured graph, without its modules, or by the modules themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel

from anabatic.core import log
from anabatic.core.cpu_info import find_speedup
from anabatic.device.table import DEVICES
from anabatic.infer.decode_graph import DecodeGraphs
from anabatic.infer.request import Request, TopLogprobs
from anabatic.infer.sampling import sample_tokens
from anabatic.models import forward
from anabatic.models.forward import ModelRoot
from anabatic.models.kv_cache import CacheRow, KVCache


class _StepAbandoned(Exception):
    """Nobody waits any more for what a step reads."""


class ModelRunner:
    """The model of one engine, its cache, and the fastest way to run each step.

    Args:
        model: the engine's; its mode is changed while a step runs.
        root: what the model is divided under; None: it is not, and its weights stay where they are.
        cache: where keys and values of all requests are.
        max_len: tokens of a request at most.
        scaled: log-probabilities of drawn tokens are those at the temperature they were drawn at, not at 1.
        direct: where the device table says so, run a model of a known structure without its modules.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        root: ModelRoot | None,
        cache: KVCache,
        max_len: int,
        *,
        scaled: bool,
        direct: bool,
    ) -> None:
        self._model, self._root, self._cache, self._max_len = model, root or ModelRoot(model), cache, max_len
        # Weights that are gathered for training later may not become inference tensors.
        self._no_grad_context = torch.inference_mode if root is None else torch.no_grad
        # Ranks gather weights or reduce activations, and training moves them: only a model that stays is captured.
        self.graphs = DecodeGraphs.for_device(model, cache) if root is None else None
        self._scales_logprobs = scaled
        self._wants_direct = direct and DEVICES[model.device.type].direct_generation
        self._direct: forward.BodyRunner | None = None

    @property
    def runs_directly(self) -> bool:
        """True when the last step ran without the model's modules."""
        return self._direct is not None

    def forget_structure(self) -> None:
        """Look at the model's layers again before the next step: they were wrapped."""
        self._wants_direct, self._direct = self._wants_direct or self._direct is not None, None

    def run_step(self, rows: Mapping[Request, CacheRow]) -> list[tuple[int, float, TopLogprobs]] | None:
        """Return the next token of each request whose row returns logits, as `sample_tokens` does.

        None: all requests were abandoned while the step ran, and it ended at the next layer.
        """
        training = self._model.training
        if training:
            self._root.train(False)
        try:
            with self._no_grad_context():
                self._cache.layer_callback = lambda: _require_waiting_client(rows)
                chosen = self.graphs.run_step(rows, self._scales_logprobs) if self.graphs is not None else None
                return self._run_operators(rows) if chosen is None else chosen
        except _StepAbandoned:
            return None
        finally:
            if training:
                self._root.train()

    def _run_operators(self, rows: Mapping[Request, CacheRow]) -> list[tuple[int, float, TopLogprobs]]:
        logits = self._root(forward.extend_cache, list(rows.values()), self._cache, self._get_direct_forward())
        done = [request for request, row in rows.items() if row.should_return_logits]
        return sample_tokens(logits, done, self._scales_logprobs) if done else []

    def _get_direct_forward(self) -> forward.BodyRunner | None:
        """Return what runs the model without its modules, made before the first step."""
        if self._wants_direct:
            self._wants_direct = False
            self._direct = self._make_direct_forward()
        return self._direct

    def _make_direct_forward(self) -> forward.BodyRunner | None:
        found: forward.BodyRunner | str = "its weights are divided"
        if self._root.tensor_ranks == 1:
            build = find_speedup("direct_forward", "build_direct_forward")
            found = build(self._model, forward.run_modules, self._max_len) if build else "there is no folder cpu_speed"
        if isinstance(found, str):
            log.info(f"generation by the modules of {type(self._model).__name__}: {found}")
            return None
        return found


def _require_waiting_client(requests: Iterable[Request]) -> None:
    if all(request.is_abandoned for request in requests):
        raise _StepAbandoned
