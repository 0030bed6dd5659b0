"""How the layers of a decoder are divided among the stages of a pipeline, and what each stage trains."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from anabatic.core.errors import ConfigError
from anabatic.plan.training_setup import TrainingSetup


def split_layers(layer_weights: Sequence[int], head_weight: int, stages: int) -> list[range]:
    """Return the layers of each stage, at least one, such that the largest stage is as small as possible.

    Args:
        layer_weights: parameters of each layer, which each token is multiplied by; head_weight: of the head, which the
            last stage computes.
    """
    return list(_split_layers(tuple(layer_weights), head_weight, stages))


@functools.lru_cache(maxsize=64)
def _split_layers(layer_weights: tuple[int, ...], head_weight: int, stages: int) -> tuple[range, ...]:
    count = len(layer_weights)
    total = [0]
    for weight in layer_weights:
        total.append(total[-1] + weight)
    # costs[end]: the largest stage of the best division of the first `end` layers, and where its last stage begins.
    costs: list[list[tuple[int, int]]] = [[(0, 0)] + [(1 << 62, 0)] * count]
    for stage in range(1, stages + 1):
        row: list[tuple[int, int]] = [(1 << 62, 0)] * (count + 1)
        extra = head_weight if stage == stages else 0
        for end in range(stage, count + 1):
            row[end] = min(
                (max(costs[-1][start][0], total[end] - total[start] + extra), -start) for start in range(stage - 1, end)
            )
        costs.append([(cost, -start) for cost, start in row])
    parts: list[range] = []
    end = count
    for stage in range(stages, 0, -1):
        start = costs[stage][end][1]
        parts.append(range(start, end))
        end = start
    return tuple(parts[::-1])


def require_stages(setup: TrainingSetup) -> None:
    """Check that a pipeline can divide the layers of a setup (`models/pipeline/stages.py` checks the same of a model).

    Raises:
        ConfigError: there are fewer layers.
    """
    shape, stages = setup.shape, setup.pipeline
    if stages == 1:
        return
    if shape.layers < stages:
        raise ConfigError(
            f"parallel.pipeline is {stages}, the model has {shape.layers} layers", f"use {shape.layers} or less"
        )


def list_stages(setup: TrainingSetup) -> list[TrainingSetup]:
    """Return what each stage of a pipeline trains, the first one first; without a pipeline the setup itself."""
    if setup.pipeline == 1 or setup.stage is not None:
        return [setup]
    shape = setup.shape
    kinds = [shape.kinds[kind] for kind in shape.order] if shape.kinds else [shape] * shape.layers
    parts = split_layers(
        [kind.block_params - kind.idle_params for kind in kinds], shape.embedding_params, setup.pipeline
    )
    return [
        replace(
            setup,
            shape=replace(shape, layers=len(part), order=shape.order[part.start : part.stop]),
            stage=index,
            has_lm_head=setup.has_lm_head and index == setup.pipeline - 1,
        )
        for index, part in enumerate(parts)
    ]
