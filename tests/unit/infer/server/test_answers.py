"""What clients get: the same tokens as a lone run's, in OpenAI's shapes."""

from __future__ import annotations

import base64
import struct
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from anabatic.config.chat import Sampling
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.infer.dialogue import encode_continuation
from anabatic.infer.engine import Engine

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who is there? 你好"}]


@pytest.fixture(scope="module")
def ask(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def alone(engine_parts, tokenizer):
    """Answers one prompt in its own engine."""

    def answer(name, ids, **sampling):
        model = engine_parts[name][1]
        engine = Engine(model, tokenizer, max_batch=1, max_len=128)
        return engine.generate([ids], Sampling(**{"temperature": 0.0, "max_new_tokens": 16} | sampling))[0]

    return answer


@pytest.mark.parametrize("model", ["one", "two"])
def test_a_conversation_is_answered_as_a_lone_run_answers_it(ask, alone, tokenizer, model):
    expected = alone(model, encode_chat(tokenizer, MESSAGES))
    answer = ask.chat.completions.create(model=model, messages=MESSAGES)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.ids)
    assert answer.usage.prompt_tokens == len(encode_chat(tokenizer, MESSAGES))


def test_the_pieces_of_a_stream_are_the_answer(ask, alone, tokenizer):
    expected = alone("one", encode_chat(tokenizer, MESSAGES), max_new_tokens=40)
    chunks = list(
        ask.chat.completions.create(
            model="one", messages=MESSAGES, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.finish_reason
    assert chunks[-1].usage.completion_tokens == len(expected.ids)


def test_n_answers_have_seeds_of_their_own_and_share_the_prompt(ask, alone, tokenizer):
    ids = encode_chat(tokenizer, MESSAGES)
    answer = ask.chat.completions.create(
        model="one", messages=MESSAGES, n=3, seed=7, temperature=1.0, extra_body={"top_k": 20, "min_p": 0.01}
    )
    for at, choice in enumerate(answer.choices):
        expected = alone("one", ids, temperature=1.0, top_k=20, min_p=0.01, seed=7 + at)
        assert (choice.index, choice.message.content) == (at, expected.text)
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.prompt_tokens == len(ids)


def test_log_probabilities_are_those_of_the_engine(ask, alone, tokenizer):
    expected = alone("one", encode_chat(tokenizer, MESSAGES), top_logprobs=2)
    for stream in (False, True):
        got = ask.chat.completions.create(model="one", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=stream)
        choices = [chunk.choices[0] for chunk in (got if stream else [got]) if chunk.choices]
        rows = [row for choice in choices if choice.logprobs for row in choice.logprobs.content]
        assert [row.logprob for row in rows] == pytest.approx(expected.logprobs, rel=1e-5)
        assert [[pair.logprob for pair in row.top_logprobs] for row in rows] == [
            pytest.approx([value for _, value in top], rel=1e-5) for top in expected.top_logprobs
        ]


def test_texts_go_on(ask, alone, tokenizer):
    prompts = ["The rain", "In the an"]
    expected = [alone("one", encode_continuation(tokenizer, prompt)) for prompt in prompts]
    answer = ask.completions.create(model="one", prompt=prompts, echo=True)
    assert [choice.text for choice in answer.choices] == [
        prompt + one.text for prompt, one in zip(prompts, expected, strict=True)
    ]
    ids = encode_continuation(tokenizer, prompts[0])
    rows = ask.completions.create(model="one", prompt=ids, logprobs=1).choices[0]
    assert rows.text == expected[0].text
    assert rows.logprobs.token_logprobs == pytest.approx(expected[0].logprobs, rel=1e-5)
    assert rows.logprobs.tokens == [tokenizer.decode([token]) for token in expected[0].ids]


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(ask, alone, tokenizer):
    whole = alone("one", encode_chat(tokenizer, MESSAGES), max_new_tokens=40).text
    stop = whole[5:8]
    for stream in (False, True):
        got = ask.chat.completions.create(model="one", messages=MESSAGES, max_tokens=40, stop=[stop], stream=stream)
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in got) if stream else got.choices[0].message.content
        )
        assert text == whole[: whole.index(stop)]


def test_many_clients_get_their_own_answers(server, ask, alone, tokenizer):
    """More than there are places: some wait; some streams are left in the middle."""
    talks = [[{"role": "user", "content": f"Number {n} and the {n * n}"}] for n in range(24)]
    expected = [alone("one", encode_chat(tokenizer, talk), max_new_tokens=12).text for talk in talks]

    def one(n):
        if n % 4 == 3:
            with ask.chat.completions.create(model="one", messages=talks[n], max_tokens=60, stream=True) as stream:
                next(iter(stream))
            return expected[n]
        answer = ask.chat.completions.create(model="one", messages=talks[n], max_tokens=12)
        return answer.choices[0].message.content

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(one, range(24))) == expected


def test_embeddings_have_length_one_and_do_not_depend_on_neighbours(ask, server):
    texts = ["the rain", "in the an", "the rain"]
    rows = [row.embedding for row in ask.embeddings.create(model="one", input=texts, encoding_format="float").data]
    assert rows[0] == pytest.approx(rows[2], abs=1e-6)
    assert sum(x * x for x in rows[1]) == pytest.approx(1, abs=1e-5)
    lone = ask.embeddings.create(model="one", input=texts[1], encoding_format="float").data[0].embedding
    assert rows[1] == pytest.approx(lone, abs=1e-5)
    packed = server.post("/v1/embeddings", {"model": "one", "input": texts[1], "encoding_format": "base64"}).json()
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(lone, abs=1e-5)


def test_models_tokens_health_and_figures(ask, server, tokenizer):
    assert [model.id for model in ask.models.list()] == ["one", "two"]
    assert ask.models.retrieve("two").id == "two"
    counted = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert counted["tokens"] == encode_chat(tokenizer, MESSAGES)
    assert counted["count"] == len(counted["tokens"])
    with server.client() as client:
        assert client.get("/health").json()["status"] == "ok"
        figures = client.get("/metrics").text
    assert 'anabatic_requests_total{end="length",model="one"}' in figures
    assert 'anabatic_generation_tokens_total{model="one"}' in figures
    assert "anabatic_time_to_first_token_seconds_bucket" in figures
    assert "anabatic_up 1.0" in figures
