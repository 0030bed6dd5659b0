"""How the layers of a decoder are divided among the stages of a pipeline, and what each stage trains."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

from anabatic.plan.training_setup import TrainingSetup


def split_layers(layer_weights: Sequence[int], head_weight: int, stages: int, chunks: int = 1) -> list[range]:
    """Return the layers of each chunk, at least one, in their order; stage r has the chunks r, r + stages and so on.

    The largest stage is as small as possible; of several chunks as a search by single layers finds it.

    Args:
        layer_weights: parameters of each layer, which each token is multiplied by; head_weight: of the head, which the
            last stage computes.
        chunks: of each stage.
    """
    weights = tuple(layer_weights)
    return list(
        _split_layers(weights, head_weight, stages)
        if chunks == 1
        else _split_chunks(weights, head_weight, stages, chunks)
    )


@functools.lru_cache(maxsize=64)
def _split_chunks(layer_weights: tuple[int, ...], head_weight: int, stages: int, chunks: int) -> tuple[range, ...]:
    """Move layers from chunk to chunk, from an even division, while the largest stage or the unevenness shrinks."""
    total = [0, *itertools.accumulate(layer_weights)]
    parts, count = stages * chunks, len(layer_weights)
    sizes = [(part + 1) * count // parts - part * count // parts for part in range(parts)]

    def rate(sizes: Sequence[int]) -> tuple[int, int]:
        borders = [0, *itertools.accumulate(sizes)]
        costs = [total[end] - total[start] for start, end in itertools.pairwise(borders)]
        costs[-1] += head_weight
        return max(sum(costs[rank::stages]) for rank in range(stages)), sum(cost * cost for cost in costs)

    best = rate(sizes)
    while True:
        moved = []
        for giver, taker in itertools.permutations(range(parts), 2):
            if sizes[giver] > 1:
                changed = [size + (part == taker) - (part == giver) for part, size in enumerate(sizes)]
                moved.append((rate(changed), changed))
        if not moved or min(moved)[0] >= best:
            borders = [0, *itertools.accumulate(sizes)]
            return tuple(range(start, end) for start, end in itertools.pairwise(borders))
        best, sizes = min(moved)


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


def get_first_group(stages: int, count: int) -> int:
    """Return how many of a step's micro-batches pass through a pipeline's chunks as the first group; other groups have
    as many as there are stages."""
    return min(count, stages + count % stages)


def count_passes_ahead(stages: int, chunks: int, count: int, rank: int) -> int:
    """Return the forward passes that a stage makes before its first backward pass, at most (Megatron-LM, arXiv
    2104.04473, section 2.2; `parallel/pipeline_timetable.py`).

    Args:
        chunks: of each stage; count: micro-batches of a step.
    """
    if chunks == 1:
        return stages - 1 - rank
    return 2 * (stages - 1 - rank) + (chunks - 1) * get_first_group(stages, count)


def count_passes_in_flight(stages: int, chunks: int, count: int, rank: int) -> int:
    """Return the passes through chunks of a stage whose activations are kept at a time, at most."""
    return min(count_passes_ahead(stages, chunks, count, rank) + 1, chunks * count)


def estimate_bubble(stages: int, chunks: int, count: int) -> float:
    """Return the part of a step in which a stage waits for others (Megatron-LM, arXiv 2104.04473, section 2.2)."""
    waiting = (stages - 1) / chunks
    return waiting / (count + waiting)


def list_stages(setup: TrainingSetup) -> list[TrainingSetup]:
    """Return what each stage of a pipeline trains, the first one first; without a pipeline the setup itself."""
    if not setup.has_stages:
        return [setup]
    shape = setup.shape
    kinds = [shape.kinds[kind] for kind in shape.order] if shape.kinds else [shape] * shape.layers
    parts = split_layers(
        [kind.block_params - kind.idle_params for kind in kinds],
        shape.embedding_params,
        setup.pipeline,
        setup.pipeline_chunks,
    )
    layers = [list(itertools.chain(*parts[index :: setup.pipeline])) for index in range(setup.pipeline)]
    return [
        replace(
            setup,
            shape=replace(shape, layers=len(own), order=tuple(shape.order[layer] for layer in own if shape.order)),
            stage=index,
            has_lm_head=setup.has_lm_head and index == setup.pipeline - 1,
        )
        for index, own in enumerate(layers)
    ]
