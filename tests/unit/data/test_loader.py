"""The loader: every target once, the same stream for any number of ranks, resumable to the token."""

import gc
import json
import threading
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batching.loader import Loader, resolve_source_weights
from anabatic.data.batching.packing import IGNORE_INDEX
from anabatic.data.batching.prefetch import PrefetchIterator
from anabatic.data.batching.validation_batches import ValidationBatches
from anabatic.data.shards.writer import EncodedEntry
from anabatic_testing.tiny_corpora import EOT_ID, write_chat_shards, write_shard_set, write_text_shards

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def documents(number, seed=0, longest=80, first=1000):
    """Documents of ids that occur once in the corpus."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, longest, number)) + first
    starts = np.concatenate([[first], ends[:-1]])
    return [list(range(start, end)) for start, end in zip(starts, ends, strict=True)]


def conversations(number, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    made = []
    for ids in documents(number, seed, longest):
        mask = rng.integers(0, 2, len(ids) + 1).tolist()
        made.append(([1, *ids], [0, *mask[1:-1], 1]))
    return made


def take(sets, number, **options):
    options = {"seq_len": 16, "micro_batch_tokens": 64, "seed": 1, **options}
    with Loader(sets, **options) as loader:
        return list(islice(loader, number))


def content(batch):
    return (batch.input_ids.tolist(), batch.labels.tolist(), batch.cu_seqlens, batch.num_targets)


def segments(batch):
    return [
        (batch.input_ids[a:b].tolist(), batch.labels[a:b].tolist())
        for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    ]


def check(batch, seq_len, capacity):
    sizes = np.diff(batch.cu_seqlens)
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == capacity == len(batch.input_ids)
    assert (sizes > 0).all() and sizes.max() <= seq_len
    assert batch.position_ids.tolist() == [at for size in sizes for at in range(size)]
    assert batch.num_targets == int((batch.labels != IGNORE_INDEX).sum())


@quick
@given(st.integers(1, 40), st.integers(2, 30), st.integers(0, 60), st.integers(0, 9))
def test_every_target_of_a_text_comes_once_per_pass(tmp_path_factory, number, seq_len, more, seed):
    docs = documents(number, seed)
    shards = write_text_shards(tmp_path_factory.mktemp("set") / "s", docs, shard_bytes=200)
    capacity = seq_len + more
    epoch = sum(len(doc) + 1 for doc in docs)
    with Loader([(shards, None)], seq_len=seq_len, micro_batch_tokens=capacity, seed=seed) as loader:
        assert loader.epoch_tokens == epoch == shards.num_tokens
        batches = list(islice(loader, 2 * epoch // capacity + 1))
    follows = {EOT_ID: {doc[0] for doc in docs}}
    for doc in docs:
        follows.update({a: {b} for a, b in zip(doc, [*doc[1:], EOT_ID], strict=True)})
    targets = []
    for batch in batches:
        check(batch, seq_len, capacity)
        assert batch.num_tokens == batch.num_targets == capacity
        for token, label in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
            assert label in follows[token]
        targets.extend(batch.labels.tolist())
    expected = Counter({token: 1 for doc in docs for token in doc} | {EOT_ID: len(docs)})
    assert Counter(targets[:epoch]) == expected
    assert Counter(targets[epoch : 2 * epoch]) == expected


def test_parts_of_a_long_document_are_one_stream(tmp_path):
    entries = [EncodedEntry(list(range(10, 20)), None, 10, True), EncodedEntry(list(range(20, 25)), None, 5, False)]
    entries.append(EncodedEntry([30, 31], None, 2, True))
    shards = write_shard_set(tmp_path / "s", "text", entries)
    assert [shards.locate_entry(i).num_inputs for i in range(3)] == [10, 6, 3]
    assert shards.read_entry(0)[0].tolist() == [EOT_ID, *range(10, 19)]
    assert shards.read_entry(1)[0].tolist() == list(range(19, 25))
    with Loader([(shards, None)], seq_len=64, micro_batch_tokens=64) as loader:
        targets = next(loader).labels.tolist()[: shards.num_tokens]
    assert sorted(targets) == sorted([*range(10, 25), 30, 31, EOT_ID, EOT_ID])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_global_stream_is_the_same_for_any_world_size(tmp_path, world_size):
    sets = [
        (write_text_shards(tmp_path / "a", documents(50)), 0.3),
        (write_chat_shards(tmp_path / "b", conversations(60)), None),
        (write_text_shards(tmp_path / "c", documents(20, 3)), 0.2),
    ]
    expected = take(sets, 24)
    ranks = [take(sets, 24 // world_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    merged = [ranks[k % world_size][k // world_size] for k in range(24)]
    assert [content(batch) for batch in merged] == [content(batch) for batch in expected]
    for step in range(24 // world_size):
        states = [json.dumps(ranks[rank][step].loader_state) for rank in range(world_size)]
        assert set(states) == {json.dumps(expected[(step + 1) * world_size - 1].loader_state)}


@pytest.mark.parametrize("stop", range(1, 12))
def test_resuming_from_any_state_gives_the_same_batches(tmp_path, stop):
    sets = [
        (write_text_shards(tmp_path / "a", documents(9)), 0.6),
        (write_chat_shards(tmp_path / "b", conversations(30)), 0.4),
    ]
    expected = take(sets, 20)
    state = json.loads(json.dumps(expected[stop - 1].loader_state))
    assert len(json.dumps(state)) < 2000
    assert [content(batch) for batch in take(sets, 20 - stop, state=state)] == [
        content(batch) for batch in expected[stop:]
    ]
    ranks = [take(sets, 2, state=state, rank=rank, world_size=4) for rank in range(4)]
    merged = sorted((content(batch) for rank in ranks for batch in rank), key=str)
    assert merged == sorted(
        (content(batch) for batch in (expected + take(sets, 8, state=expected[-1].loader_state))[stop : stop + 8]),
        key=str,
    )


@quick
@given(st.integers(1, 60), st.integers(0, 5), st.integers(1, 70))
def test_conversations_stay_whole(tmp_path_factory, number, seed, lookahead):
    chats = conversations(number, seed, longest=24)
    shards = write_chat_shards(tmp_path_factory.mktemp("set") / "s", chats, shard_bytes=300)
    expected = Counter(
        json.dumps(
            [
                ids[:-1],
                [token if learned else IGNORE_INDEX for token, learned in zip(ids[1:], mask[1:], strict=True)],
            ]
        )
        for ids, mask in chats
    )
    with Loader([(shards, None)], seq_len=32, micro_batch_tokens=100, lookahead=lookahead) as loader:
        seen = Counter()
        for batch in islice(loader, 40):
            check(batch, 32, 100)
            whole = [json.dumps(segment) for segment in segments(batch) if set(segment[0]) != {EOT_ID}]
            assert set(whole) <= set(expected)
            assert batch.num_tokens == 100 - sum(len(s[0]) for s in segments(batch) if set(s[0]) == {EOT_ID})
            seen.update(whole)
    # Look-ahead blurs the border between passes by at most the conversations that wait.
    assert max(seen.values()) - min(seen[name] for name in expected) <= 2


def test_a_long_conversation_is_cut_on_the_right_and_reported(tmp_path, caplog):
    shards = write_chat_shards(tmp_path / "s", [([*range(100, 150)], [0] * 10 + [1] * 40), ([1, 2, 3], [0, 1, 1])])
    with caplog.at_level("WARNING", logger="anabatic"):
        batches = take([(shards, None)], 1, seq_len=20, micro_batch_tokens=22)
    assert "1 conversations (50.0%) are cut to 20 tokens" in caplog.text
    assert sorted(segments(batches[0]))[-1] == (
        list(range(100, 120)),
        [IGNORE_INDEX] * 9 + list(range(110, 121)),
    )


def test_a_mixture_meets_its_weights_and_has_no_padding_when_it_holds_text(tmp_path):
    sets = [
        (write_text_shards(tmp_path / "a", documents(300, 1, first=1000)), 0.5),
        (write_chat_shards(tmp_path / "b", conversations(200)), 0.2),
        (write_text_shards(tmp_path / "c", documents(100, 2, first=1000)), None),
    ]
    with Loader(sets, seq_len=32, micro_batch_tokens=256) as loader:
        assert loader.weights == pytest.approx([0.5, 0.2, 0.3])
        batches = list(islice(loader, 200))
    drawn = [cursor["drawn"] for cursor in batches[-1].loader_state["cursors"]]
    assert np.array(drawn) / sum(drawn) == pytest.approx([0.5, 0.2, 0.3], abs=0.003)
    assert sum(drawn) == 200 * 256
    assert all(batch.num_tokens == 256 for batch in batches)


def test_sources_without_weights_share_by_size(tmp_path):
    big, small = write_text_shards(tmp_path / "a", documents(300)), write_text_shards(tmp_path / "b", documents(30))
    total = big.num_tokens + small.num_tokens
    assert resolve_source_weights([(big, None), (small, None)]) == pytest.approx(
        [big.num_tokens / total, small.num_tokens / total]
    )


@pytest.mark.parametrize(
    ("weights", "words"),
    [([0.0, None], "weight is 0"), ([-0.5, None], "weight is -0.5"), ([0.7, 0.6], "add up to 1.3")]
    + [([0.5, 0.2], "add up to 0.7"), ([1.0, None], "nothing for the sources")],
)
def test_wrong_weights_are_named(tmp_path, weights, words):
    sets = [write_text_shards(tmp_path / name, documents(3)) for name in "ab"]
    with pytest.raises(ConfigError, match=words):
        resolve_source_weights(list(zip(sets, weights, strict=True)))


def test_errors_carry_numbers(tmp_path):
    shards = write_text_shards(tmp_path / "a", documents(5))
    with pytest.raises(ConfigError, match="micro_batch_tokens is 8, batch.seq_len is 16"):
        take([(shards, None)], 1, micro_batch_tokens=8)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        take([(shards, None)], 1, rank=2, world_size=2)
    with pytest.raises(DataError, match="empty: 0 tokens"):
        take([(shards, None), (write_text_shards(tmp_path / "empty", []), None)], 1)
    with pytest.raises(ConfigError, match="no data source"):
        take([], 1)
    state = take([(shards, None)], 1)[0].loader_state
    with pytest.raises(DataError, match="seed 1, now 2"):
        take([(shards, None)], 1, seed=2, state=state)
    with pytest.raises(DataError, match="other data: sources a, now b"):
        take([(write_text_shards(tmp_path / "b", documents(5)), None)], 1, state=state)


def test_a_file_that_shrinks_under_a_running_loader_is_an_error_with_its_name(tmp_path):
    shards = write_text_shards(tmp_path / "a", documents(400))
    with Loader([(shards, None)], seq_len=16, micro_batch_tokens=64, prefetch=1) as loader:
        next(loader)
        with open(tmp_path / "a" / "00000.bin", "r+b") as file:
            file.truncate(10)
        with pytest.raises(DataError, match=r"00000\.bin: ends at byte 10"):
            for _ in range(50):
                next(loader)


def test_close_and_garbage_collection_end_the_thread(tmp_path):
    shards = write_text_shards(tmp_path / "a", documents(5))
    loader = Loader([(shards, None)], seq_len=16, micro_batch_tokens=64)
    next(loader)
    loader.close()
    assert next(loader, None) is None
    forgotten = Loader([(shards, None)], seq_len=16, micro_batch_tokens=64)
    threads = [thread for thread in threading.enumerate() if thread.name == "loader"]
    assert len(threads) == 1
    del forgotten
    gc.collect()
    threads[0].join(5)
    assert not threads[0].is_alive()


def test_prefetch_raises_after_the_items_before():
    def items():
        yield 1
        yield 2
        raise ValueError("broken")

    with PrefetchIterator(items(), 8) as ahead:
        assert [next(ahead), next(ahead)] == [1, 2]
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                next(ahead)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [1, 700, 10**9])
def test_valid_batches_are_whole_entries_and_count_their_bytes(tmp_path, world_size, max_tokens):
    docs, chats = documents(60), conversations(60, longest=16)
    sets = [write_text_shards(tmp_path / "a", docs), write_chat_shards(tmp_path / "b", chats)]
    passes = [ValidationBatches(sets, 16, 48, max_tokens, rank, world_size) for rank in range(world_size)]
    batches = [list(each) for each in passes]
    assert {len(rank) for rank in batches} == {passes[0].num_batches}
    assert {each.num_bytes for each in passes} == {passes[0].num_bytes}
    flat = [batch for rank in batches for batch in rank]
    for batch in flat:
        check(batch, 16, 48)
    whole = max_tokens == 10**9
    if whole:
        assert passes[0].num_bytes == sum(map(len, docs)) + sum(sum(mask) for _, mask in chats)
    else:
        assert max_tokens <= passes[0].num_tokens < max_tokens + 250
    text_bytes = sum(int((batch.labels >= 1000).sum()) for batch in flat)
    assert text_bytes == passes[0].num_bytes
    single = [content(b) for b in ValidationBatches(sets, 16, 48, max_tokens)]
    merged = [content(batches[k % world_size][k // world_size]) for k in range(len(single))]
    assert merged == single
    assert all(batch.num_targets == 0 for batch in flat if batch.num_tokens == 0)


def test_valid_bytes_are_exact_for_text(tmp_path):
    docs = documents(60)
    shards = write_text_shards(tmp_path / "a", docs)
    once = ValidationBatches([shards], 16, 64, 500)
    targets = [label for batch in once for label in batch.labels.tolist() if label not in (IGNORE_INDEX, EOT_ID)]
    assert once.num_bytes == len(targets)
    assert once.num_tokens < shards.num_tokens


def test_valid_bytes_of_a_cut_conversation_follow_its_learned_tokens(tmp_path):
    shards = write_chat_shards(tmp_path / "b", [([*range(100, 151)], [0] * 10 + [1] * 41)])
    assert ValidationBatches([shards], 20, 64, 500).num_bytes == 11


def test_nothing_to_validate_on(tmp_path):
    with pytest.raises(DataError, match="0 tokens of held-out data in empty"):
        ValidationBatches([write_text_shards(tmp_path / "empty", [])], 16, 64, 100)
