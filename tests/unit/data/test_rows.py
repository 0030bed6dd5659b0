"""No row comes twice in a pass and none is lost, however often a run is stopped, and on any number of ranks."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from anabatic.data.batching.loader import Loader
from anabatic.data.batching.packing import SegmentOrigin
from anabatic_testing.tiny_corpora import write_chat_shards, write_text_shards

PASS = 300
"""Micro-batches of all ranks that are read: more than a pass over either set."""


def stretch(sources: Any, world: int, state: dict[str, Any] | None, rounds: int, **options: Any) -> Any:
    """Read so many rounds on `world` ranks; return every rank's rows, and the state of the last batch."""
    rows: list[list[list[SegmentOrigin]]] = []
    end = state
    for rank in range(world):
        with Loader(sources, rank=rank, world_size=world, state=state, seed=5, **options) as loader:
            read = [next(loader) for _ in range(rounds)]
        rows.append([batch.segment_origins for batch in read])
        end = read[-1].loader_state
    first = state["micro_batch"] if state else 0  # micro-batch k belongs to rank k % world
    return [rows[(first + each) % world][number] for number in range(rounds) for each in range(world)], end


@pytest.mark.parametrize("kind", ["text", "chat", "padded"])
def test_stopped_anywhere_and_gone_on_elsewhere(tmp_path: Path, kind: str) -> None:
    draw = random.Random(kind)
    lengths = [draw.randrange(2, 40) for _ in range(90)]
    if kind == "text":
        data: Any = write_text_shards(tmp_path / "set", [[1] * n for n in lengths])
        inputs = [data.locate_entry(number).num_inputs for number in range(data.num_docs)]
    else:
        data = write_chat_shards(tmp_path / "set", [([1] * n, [1] * n) for n in lengths])
        inputs = [min(n - 1, 16) for n in lengths]
    options: dict[str, Any] = {"seq_len": 16, "micro_batch_tokens": 32, "packing": kind != "padded"}
    whole, _ = stretch([(data, None)], 1, None, PASS, **options)
    state, parts = None, []
    for world in (1, 2, 1, 3, 2, 4):
        read, state = stretch([(data, None)], world, state, draw.randrange(3, 12), **options)
        parts += read
    read, state = stretch([(data, None)], 1, state, PASS - len(parts), **options)
    assert parts + read == whole  # piece by piece, and in the same micro-batch

    covered: Counter[tuple[int, int, int]] = Counter()
    for _, row, turn, start, n in (piece for pieces in whole for piece in pieces):
        covered.update((turn, row, token) for token in range(start, start + n))
    assert set(covered.values()) == {1}  # never twice in a pass
    passes = max(turn for turn, _, _ in covered)
    assert passes >= 2
    for turn in range(passes - 1):  # conversations wait across the border of a pass, so the last one is not over
        assert {(row, token) for found, row, token in covered if found == turn} == {
            (row, token) for row, n in enumerate(inputs) for token in range(n)
        }
