"""The python tool in the engine: a model that counts on it, what it reads, and what counts as its own choice."""

from __future__ import annotations

from random import Random

import pytest
import torch

from anabatic.core.errors import DataError, Failure
from anabatic.data.chat.python_tool import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START, format_python_call
from anabatic.data.tokenizer.hf_folder import get_python_tool_ids
from anabatic.infer.dialogue import Dialogue
from anabatic.infer.engine import Engine
from anabatic.infer.request import Request
from anabatic.infer.sampling import Sampling
from anabatic.infer.tool_execution import PythonTool, format_for_display
from anabatic.sandbox.limits import ResourceLimits
from anabatic.sandbox.sandbox_runner import Sandbox
from anabatic_testing.random_models import build_random_model

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def sandbox():
    try:
        made = Sandbox(ResourceLimits(seconds=5, memory_mib=256), workers=2)
    except Failure as error:
        pytest.skip(f"programs cannot be isolated here: {error}")
    with made:
        yield made


def one(tokenizer, text):
    """The id of a text that is one token."""
    (found,) = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def chain_model(tokenizer, *chains):
    """A model that says, behind each token of a chain, the next one: no layer adds anything to the embeddings."""
    model = build_random_model(len(tokenizer), seed=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        states = torch.nn.functional.normalize(torch.randn(len(tokenizer), model.config.hidden_size), dim=-1)
        model.model.embed_tokens.weight.copy_(states)
        head = torch.zeros_like(model.lm_head.weight)
        for chain in chains:
            ids = [one(tokenizer, text) for text in chain]
            for before, behind in zip(ids, ids[1:], strict=False):
                head[behind] += states[before]
        model.lm_head.weight = torch.nn.Parameter(head)
    return model


CALL = ("a", PYTHON_START, "7", "*", "6", PYTHON_END)
GREEDY = Sampling(temperature=0.0, max_new_tokens=40)


def test_output_is_given_and_not_chosen(tokenizer, sandbox):
    model = chain_model(tokenizer, CALL, (OUTPUT_END, "b", "<|endoftext|>"))
    tool = PythonTool(sandbox, tokenizer)
    engine = Engine(model, tokenizer, max_batch=2, max_len=64, tool=tool)
    stop = one(tokenizer, "<|endoftext|>")
    done = engine.generate([[one(tokenizer, "a")]] * 3, GREEDY, stop_ids=[stop])
    expected = [*CALL[1:], OUTPUT_START, "4", "2", OUTPUT_END, "b", "<|endoftext|>"]
    for answer in done:
        assert answer.ids == [one(tokenizer, text) for text in expected]
        assert answer.text == format_python_call("7*6", "42") + "b"
        assert answer.chosen == [1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]
        assert len(answer.logprobs) == len(answer.ids)
        assert [value == 0.0 for value in answer.logprobs[5:9]] == [True] * 4
        assert answer.finish_reason == "stop"
    assert tool.num_calls == 3
    assert format_for_display(done[0].text) == "`7*6` → 42b"


def test_what_was_given_is_read(tokenizer, sandbox):
    """Behind an output the engine says what it says to a prompt of the same tokens; so do requests put back."""
    model = build_random_model(len(tokenizer), seed=5)
    given = [one(tokenizer, text) for text in (OUTPUT_START, "4", "2", OUTPUT_END)]

    class Third(PythonTool):
        def extract_code(self, ids):
            return "6 * 7" if len(ids) == 3 else None

    prompts = [[5, 9, 30 + number] for number in range(6)]
    sampling = Sampling(temperature=0.0, max_new_tokens=40)
    for cache in (None, 96):  # in the second some have to make room
        tool = Third(sandbox, tokenizer)
        engine = Engine(model, tokenizer, max_batch=6, max_len=64, cache_tokens=cache, tool=tool)
        with_tool = engine.generate(prompts, sampling, stop_ids=[])
        plain = Engine(model, tokenizer, max_batch=6, max_len=64)
        for prompt, answer in zip(prompts, with_tool, strict=True):
            first = plain.generate([prompt], Sampling(temperature=0.0, max_new_tokens=3), stop_ids=[])[0].ids
            rest = Sampling(temperature=0.0, max_new_tokens=33)
            assert answer.ids[:7] == first + given
            assert answer.ids[7:] == plain.generate([prompt + first + given], rest, stop_ids=[])[0].ids
            assert sum(answer.chosen) == 36
    assert engine.get_load().preemptions > 0


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("2**10", "1024"),
        ("'strawberry'.count('r')", "3"),
        ("x = 3\nfor i in range(2): x += i\nx", "4"),
        ("print('a')\nprint('b')", "a\nb"),
        ("None", ""),
        ("", ""),
        ("1/0", "ZeroDivisionError: division by zero"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("print('before')\nundefined", "before\nNameError: name 'undefined' is not defined"),
        ("open('/proc/1/mem')", "[Errno"),
        ("'<|im_' 'end|><|output_' 'end|>'", "<|im_end|><|output_end|>"),
        ("'x' * 5000", "x" * 2000 + "..."),
        ("'中文é'", "中文é"),
        ("import sys; sys.exit(3)", "exit code 3"),
    ],
)
def test_outputs(tokenizer, sandbox, code, output):
    tool = PythonTool(sandbox, tokenizer)
    request = Request([1], Sampling(max_new_tokens=9000), frozenset(), 9000, Random(), tokenizer)
    start, end, before, behind = get_python_tool_ids(tokenizer)
    for token in [start, *tokenizer(code, add_special_tokens=False)["input_ids"], end]:
        request.append_token(token, -1.0)
    own = len(request.ids)
    tool.run_calls([request])
    said = request.ids[own:]
    assert (said[0], said[-1]) == (before, behind)
    assert not {before, behind, start, end, one(tokenizer, "<|im_end|>")} & set(said[1:-1])
    text = tokenizer.decode(said[1:-1])
    assert output in text if output == "[Errno" else text == output
    assert request.chosen == [1] * own + [0] * len(said)


def test_only_whole_calls_are_calls(tokenizer, sandbox):
    tool = PythonTool(sandbox, tokenizer)
    start, end, output, _ = get_python_tool_ids(tokenizer)
    assert tool.extract_code([]) is None
    assert tool.extract_code([start, 5]) is None
    assert tool.extract_code([5, end]) is None
    assert tool.extract_code([start, end, 5, end]) is None
    assert tool.extract_code([start, output, end]) is None
    assert tool.extract_code([start, end]) == ""


def test_output_at_the_limit_is_cut(tokenizer, sandbox):
    model = chain_model(tokenizer, CALL, (OUTPUT_END, "b", "b"))
    engine = Engine(model, tokenizer, max_batch=1, max_len=64, tool=PythonTool(sandbox, tokenizer))
    for limit in (4, 5, 6, 7, 9, 10):
        (done,) = engine.generate([[one(tokenizer, "a")]], Sampling(temperature=0.0, max_new_tokens=limit), stop_ids=[])
        assert (len(done.ids), done.finish_reason) == (limit, "length")
        assert len(done.chosen) == len(done.logprobs) == limit


def test_dialogue_remembers_the_call(tokenizer, sandbox):
    """The next turn's prompt holds the very tokens of the answer."""
    model = chain_model(tokenizer, CALL, ("\n", "a"), (OUTPUT_END, "b", "<|im_end|>"))
    engine = Engine(model, tokenizer, max_batch=1, max_len=128, tool=PythonTool(sandbox, tokenizer))
    engine.stop_ids = frozenset({one(tokenizer, "<|im_end|>")})
    dialogue = Dialogue(engine, GREEDY)
    pieces = list(dialogue.answer_message("how much?"))
    assert "".join(pieces) == "a" + format_python_call("7*6", "42") + "b"
    ids = tokenizer.apply_chat_template(dialogue.get_transcript(), tokenize=True, return_dict=False)
    said = dialogue.request.answer_ids
    assert any(ids[at : at + len(said)] == said for at in range(len(ids)))


def test_foreign_tokenizers_have_no_tool(tokenizer, sandbox):
    import copy

    from transformers import PreTrainedTokenizerFast

    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    text = backend.to_str().replace("<|python_start|>", "<|other|>")
    other = PreTrainedTokenizerFast(tokenizer_object=type(backend).from_str(text))
    with pytest.raises(DataError, match="no tokens for calls"):
        PythonTool(sandbox, other)
