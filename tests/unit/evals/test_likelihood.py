"""Likelihoods of the ends of texts: packed, with shared beginnings, against one plain pass for each text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.device.device import select_device
from anabatic.evals.likelihood import compute_likelihoods
from anabatic.evals.prefix_trees import ScoredText, batch_trees, build_trees
from anabatic_testing.random_models import build_random_model
from unit.evals.plain import slow

VOCAB = 60


def drawn(rng, questions=7):
    """Questions with choices: of one token, beginning alike, one text twice, one a part of another."""
    start = rng.integers(1, VOCAB, 5).tolist()
    texts = []
    for _ in range(questions):
        context = start[: rng.integers(1, 5)] + rng.integers(1, VOCAB, rng.integers(1, 12)).tolist()
        for _ in range(4):
            choice = rng.integers(1, 4, rng.integers(1, 5)).tolist()
            texts.append(ScoredText(context + choice, len(choice)))
    texts.append(texts[0])
    texts.append(ScoredText([*texts[1].tokens, 3, 4], 2))
    return texts


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("batch_tokens", [16, 90, 4096])
def test_as_one_plain_pass_for_each_text(share, batch_tokens):
    model = build_random_model(VOCAB)
    texts = drawn(np.random.default_rng(0))
    device = select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1))
    found = {}
    for part in compute_likelihoods(model, device, texts, batch_tokens, "scoring", share):
        assert not set(part) & set(found)
        found.update(part)
    assert sorted(found) == list(range(len(texts)))
    for number, text in enumerate(texts):
        logprob, greedy = slow(model, text)
        assert math.isclose(found[number].logprob, logprob, rel_tol=1e-5, abs_tol=1e-5)
        assert (found[number].is_greedy, found[number].num_tokens) == (greedy, text.num_scored)


def test_a_window_counts_along_the_path():
    model = build_random_model(VOCAB)
    model.config.layer_types = ["sliding_attention", "full_attention"]
    model.config.sliding_window = 3
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 3 if layer.self_attn.layer_idx == 0 else None
    texts = drawn(np.random.default_rng(1))
    device = select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1))
    found = {n: one for part in compute_likelihoods(model, device, texts, 200, "scoring") for n, one in part.items()}
    for number, text in enumerate(texts):
        assert math.isclose(found[number].logprob, slow(model, text)[0], rel_tol=1e-5, abs_tol=1e-5)


token_lists = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=9), min_size=1, max_size=25)


@settings(deadline=None, max_examples=60)
@given(token_lists, st.integers(2, 40), st.data())
def test_every_text_can_be_read_off_its_tree(lists, most, data):
    texts = [ScoredText(tokens, data.draw(st.integers(1, len(tokens) - 1))) for tokens in lists]
    made = build_trees(texts, 64, most)
    seen = {}
    for tree in made:
        for number, places in tree.target_rows.items():
            rows = [tree.rows[place] for place in places]
            path = [node for node in range(rows[-1] + 1) if node <= rows[-1] < tree.ends[node]]
            assert [tree.ids[node] for node in path] == list(texts[number].tokens[:-1])
            assert [tree.depths[node] for node in path] == list(range(len(path)))
            assert rows == path[-len(rows) :]
            assert [tree.targets[place] for place in places] == list(texts[number].tokens[-len(places) :])
            seen[number] = len(places)
    assert seen == {number: text.num_scored for number, text in enumerate(texts)}
    assert [len(tree.ids) for tree in made] == sorted((len(tree.ids) for tree in made), reverse=True)
    laid = list(batch_trees(made, most))
    assert [tree for batch in laid for tree in batch] == made
    assert all(len(batch) == 1 or sum(len(tree.ids) for tree in batch) <= most for batch in laid)


def test_a_beginning_of_many_questions_is_read_once():
    shots = list(range(1, 41))
    texts = [ScoredText([*shots, 41 + question, choice], 1) for question in range(6) for choice in range(4)]
    (tree,) = build_trees(texts, 512, 4096)
    assert len(tree.ids) == 40 + 6 and len(tree.targets) == 24
