"""From pairs to tokens: the rules of lm-evaluation-harness, written out slowly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.evals.tasks.item_encoding import encode_beginnings, encode_items
from anabatic.evals.tasks.items import ContextPair, EvalItem
from anabatic_testing.random_models import build_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_byte_tokenizer(tmp_path_factory.mktemp("tokens"))


def slow(tokenizer, context, continuation, max_len):
    """What the harness's model is given and how many of its last tokens count; None: it refuses the pair."""
    while context and context[-1].isspace():
        context, continuation = context[:-1], context[-1] + continuation
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not context:
        ending = tokenizer.encode(continuation, add_special_tokens=False)
        before, ending = (ending[:1], ending[1:]) if ending[:1] == [first] else ([first], ending)
    else:
        before = tokenizer.encode(context)
        ending = tokenizer.encode(context + continuation)[len(before) :]
    if not 0 < len(ending) <= max_len:
        return None
    return (before + ending)[-(max_len + 1) :], len(ending)


@settings(deadline=None, max_examples=150)
@given(
    context=st.text("the in\n\"ü", max_size=12), ending=st.text("the in\n\"ü", min_size=1, max_size=12),
    max_len=st.sampled_from([4, 9, 64]),
)  # fmt: skip
def test_tokens_of_any_pair(tokenizer, context, ending, max_len) -> None:
    wanted = slow(tokenizer, context, ending, max_len)
    if wanted is None:
        return
    found = encode_items(tokenizer, [EvalItem(0, "row 1", [ContextPair(context, ending)])], max_len)
    (text,) = found.texts
    assert (text.tokens.tolist(), text.num_scored) == wanted
    long = slow(tokenizer, context, ending, 10**6)
    assert found.truncated_items == ([0] if len(long[0]) - 1 > max_len else [])


def test_where_the_border_falls_into_a_token_the_context_stays_as_it_was_asked(tokenizer) -> None:
    """`t|he and` is `the| and` as a whole: the model reads `t`, then what stands behind the whole's first token."""
    (text,) = encode_items(tokenizer, [EvalItem(0, "row 1", [ContextPair("t", "he in")])], 64).texts
    whole = tokenizer.encode("the in")
    assert text.tokens.tolist() == [*tokenizer.encode("t"), *whole[1:]] and text.num_scored == len(whole) - 1


def test_a_text_that_spells_its_beginning_gets_no_second_one(tmp_path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_byte_tokenizer(tmp_path)
    begin = tokenizer.bos_token or tokenizer.eos_token
    number = tokenizer.convert_tokens_to_ids(begin)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, number)]
    )
    found = encode_beginnings(tokenizer, ["the", f"{begin}the"])
    assert found["the"] == found[f"{begin}the"] and found["the"].count(number) == 1
