"""Levels, stages, and what is drawn in each: counted sample by sample."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.sections.common import Data
from anabatic.config.sections.train_jobs import Curriculum, CurriculumStage
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.data.batching import curriculum
from anabatic.data.batching.curriculum import DifficultyLevels
from anabatic.data.batching.loader import Loader
from anabatic.data.shards.reader import ShardSet
from anabatic_testing.tiny_corpora import write_chat_shards

SEED_STAGES = Curriculum(use=True)
"""The stages of the default: 0-30 %, 30-70 %, 70-100 %."""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[ShardSet]:
    """Levels of 60, 30 and 5 conversations; a conversation's tokens say which one it is."""
    root = tmp_path_factory.mktemp("levels")
    made = []
    for number, (name, rows) in enumerate((("explain", 60), ("reasoning", 30), ("topology", 5))):
        chats = [([100 * number + 10 + row % 90] * (5 + row % 4), [0, *[1] * (4 + row % 4)]) for row in range(rows)]
        made.append(write_chat_shards(root / name, chats))
    return made


def levels_of(sets: list[ShardSet]) -> DifficultyLevels:
    return DifficultyLevels(["explain", "reasoning", "topology"], [(part, number) for number, part in enumerate(sets)])


def drawn(loader: Loader, batches: int) -> list[Counter[int]]:
    """Level -> conversations, batch by batch."""
    found = []
    for _ in range(batches):
        batch = next(loader)
        starts = batch.cu_seqlens[:-1]
        tokens = [int(batch.input_ids[at]) for at in starts if at < batch.num_tokens]
        found.append(Counter((token - 10) // 100 for token in tokens))
    return found


def stream(sets: list[ShardSet], total: int, **options: Any) -> Loader:
    stages = curriculum.plan_stages(SEED_STAGES, levels_of(sets), total, 1)
    given = {"seq_len": 16, "micro_batch_tokens": 100, "seed": 7, **options}
    return Loader([(part, None) for part in sets], stages=stages, **given)


def test_every_stage_has_its_mixture(sets: list[ShardSet]) -> None:
    total = 40
    with stream(sets, total) as loader:
        batches = drawn(loader, total)
    for begin, end, mix in ((0, 12, (0.8, 0.2, 0.0)), (12, 28, (0.4, 0.4, 0.2)), (28, 40, (0.25, 0.35, 0.4))):
        counts: Counter[int] = sum(batches[begin:end], Counter())
        samples = sum(counts.values())
        for level, share in enumerate(mix):
            assert abs(counts[level] - share * samples) <= 1.5, (begin, counts)
    assert sum(batches, Counter())[2] > 5 * 10  # five rows were drawn again and again


def test_a_short_level_comes_round_evenly(sets: list[ShardSet]) -> None:
    """Drawn anew only when all of it was drawn, each time in another order."""
    with stream(sets, 40) as loader:
        tokens: list[int] = []
        for _ in range(40):
            batch = next(loader)
            tokens += [int(batch.input_ids[at]) for at in batch.cu_seqlens[:-1] if int(batch.input_ids[at]) >= 210]
    times = Counter(tokens)
    assert len(times) == 5 and max(times.values()) - min(times.values()) <= 2


@pytest.mark.process
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 39), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_it_continues_at_any_batch_with_any_number_of_ranks(
    sets: list[ShardSet], stop: int, before: int, after: int
) -> None:
    stop -= stop % (before * after)
    with stream(sets, 40) as loader:
        whole = [next(loader).input_ids.tolist() for _ in range(40)]
    state = None
    done: list[list[int]] = []
    for ranks, length in ((before, stop), (after, 40 - stop)):
        loaders = [stream(sets, 40, rank=rank, world_size=ranks, state=state) for rank in range(ranks)]
        for number in range(length - length % ranks):
            batch = next(loaders[number % ranks])
            done.append(batch.input_ids.tolist())
            state = json.loads(json.dumps(batch.loader_state))
        for loader in loaders:
            loader.close()
    assert done == whole[: len(done)] and len(done) >= 38


def test_lengths_part_a_source_into_equal_levels(tmp_path: Path) -> None:
    source = write_chat_shards(tmp_path / "a", [([9] * n, [0] + [1] * (n - 1)) for n in range(2, 62)])
    levels = curriculum.split_by_length([source], ["short", "middle", "long"])
    assert [levels.count_samples(number) for number in range(3)] == [20, 20, 20]
    short, middle, long = (part for part, _ in levels.leveled_sets)
    assert max(short.read_entry_lengths(0)) < min(middle.read_entry_lengths(0)) and max(
        middle.read_entry_lengths(0)
    ) < min(long.read_entry_lengths(0))
    assert short.name == f"{source.name} (short)" and short.key != middle.key
    entry = long.locate_entry(0)
    assert long.read_segment(entry, 0, entry.num_inputs).ids.tolist() == [9] * (entry.num_inputs + 1)
    assert short.num_tokens + middle.num_tokens + long.num_tokens == source.num_tokens


def rows(path: Path, *levels: str | None) -> Data:
    made = [{"query": "q", "response": "r", **({} if level is None else {"difficulty": level})} for level in levels]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return Data(train=[str(path)])


def check(data: Data) -> bool:
    return curriculum.check_levels(curriculum.count_levels(data.train, data, "difficulty"), SEED_STAGES)


def test_data_without_the_field_is_trained_as_usual(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log.setup_logging()
    log.LOGGER.propagate = True
    assert not check(rows(tmp_path / "a.jsonl", None, None))
    assert 'none of the 2 rows has the field "difficulty"' in caplog.text
    assert check(rows(tmp_path / "b.jsonl", "explain", "reasoning", "topology"))


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (("explain", "reasoning", None), "no level (1)"),
        (("explain", "reasoning", "topolgy"), '"topolgy" (1). Did you mean "topology"?'),
        (("explain", "explain", "reasoning"), "no row has the level topology; there are 2 explain, 1 reasoning"),
    ],
)
def test_rows_that_do_not_fit(tmp_path: Path, levels: tuple[str | None, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(rows(tmp_path / "a.jsonl", *levels))
    assert words in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "stages is empty"),
        ([CurriculumStage(until=0.5, mix={"a": 1.0})], "the last stage of curriculum.stages ends at 0.5"),
        ([CurriculumStage(until=1.0, mix={"a": 0.5})], "curriculum.stages[0].mix sums to 0.5"),
        ([CurriculumStage(until=1.0, mix={"a": 1.5, "b": -0.5})], "has the share -0.5"),
        ([CurriculumStage(until=0.5, mix={"a": 1}), CurriculumStage(until=0.5, mix={"a": 1})], "[1].until is 0.5"),
    ],
)
def test_stages_that_cannot_be(stages: list[CurriculumStage], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Curriculum(use=True, stages=stages)
    assert words in str(caught.value)
    Curriculum(stages=stages)  # switched off, nothing is checked


def test_what_was_drawn_is_said_with_how_often_it_came_round(sets: list[ShardSet]) -> None:
    state = {"samples": [30, 45, 10]}
    assert curriculum.describe_drawn_samples(state, levels_of(sets)) == (
        "curriculum: drawn 30 explain (0.50 times its 60 rows), 45 reasoning (1.50 times its 30 rows),"
        " 10 topology (2.00 times its 5 rows)"
    )
