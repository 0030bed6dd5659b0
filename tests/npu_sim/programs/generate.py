"""Generation on the NPU: the CPU's tokens, requests of several lengths and beginnings, with and without adapters; what
a step that reads one token of everybody launches, and how often it waits."""

import os
import random
import sys
import warnings
from pathlib import Path

import torch
import torch_npu  # noqa: F401

from anabatic.config.sections.train_jobs import Lora
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.models import fused_ops
from anabatic.models.lora import adapter
from anabatic_sim import shared_memory
from anabatic_sim.machine_spec import SEGMENT_VARIABLE
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model

warnings.filterwarnings("ignore")
tokenizer = build_byte_tokenizer(Path("tokenizer"))
rng = random.Random(0)
beginning = [rng.randrange(len(tokenizer)) for _ in range(20)]
prompts = [beginning * (n % 2) + [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 30))] for n in range(6)]

lora = Lora(r=4)
adapted = build_random_model(len(tokenizer))
adapter.insert_adapter(adapted, lora)
adapter.init_adapter_weights(adapted, lora, 0)
with torch.no_grad():
    for layer in adapter.find_lora_layers(adapted).values():
        layer.lora_B.normal_(0, 0.3)
adapter.save_adapter(adapted, Path("adapter"), tokenizer, lora, Path("model"))


def answers(device: str, tokens: int) -> list[list[int]]:
    model = build_random_model(len(tokenizer)).to(device)
    fused_ops.apply_fused_setting(model, "auto", device.partition(":")[0])
    engine = Engine(model, tokenizer, max_batch=4, max_len=96, step_tokens=24)
    engine.load_adapter("a", Path("adapter"))
    requests = []
    for number, prompt in enumerate(prompts):
        drawn = Sampling(
            temperature=float(number % 2), top_k=20, top_p=0.9, seed=number, max_new_tokens=tokens + number
        )
        requests.append(engine.request(prompt, drawn, [], adapter="a" if number % 3 == 1 else None))
    engine.submit(requests)
    while engine.is_busy:
        engine.step()
    print(f"{device}: {engine.get_load().steps} steps, {engine.get_load().new_tokens} tokens")
    return [request.ids for request in requests]


def counted(rows: int, steps: int, sampling: Sampling) -> str:
    """Operators and waits of a step in which every request reads its last token."""
    model = build_random_model(len(tokenizer)).to("npu:0")
    fused_ops.apply_fused_setting(model, "auto", "npu")
    engine = Engine(model, tokenizer, max_batch=rows, max_len=96)
    engine.submit([engine.request(prompts[n], sampling, []) for n in range(rows)])
    while engine.get_load().new_tokens < 3 * rows:  # the third step captures the graph of its size
        engine.step()
    engine.step()
    with shared_memory.attach_segment(os.environ[SEGMENT_VARIABLE]) as machine:
        before = machine.device[0].operators, machine.device[0].syncs
        for _ in range(steps):
            engine.step()
        after = machine.device[0].operators, machine.device[0].syncs
    launched, waited = ((b - a) / steps for a, b in zip(before, after, strict=True))
    return f"{rows} rows, {model.config.num_hidden_layers} layers: {launched:g} operators, {waited:g} waits a step"


tokens = int(sys.argv[1])
on_npu = answers("npu:0", tokens)
if tokens < 20:
    print("same" if on_npu == answers("cpu", tokens) else "other tokens")
else:
    sys.exit()


def graphs_and_operators() -> str:
    """Tokens of one engine with graphs and of one without; requests end at different times and grow over blocks."""
    model = build_random_model(len(tokenizer)).to("npu:0")
    fused_ops.apply_fused_setting(model, "auto", "npu")
    found = []
    for graphs in (True, False):
        engine = Engine(model, tokenizer, max_batch=5, max_len=128)
        if not graphs:
            engine.runner.graphs = None
        samplings = [
            Sampling(temperature=0.0 if n % 3 else 0.8, seed=n, max_new_tokens=20 + 9 * n, top_logprobs=n % 2)
            for n in range(5)
        ]
        found.append([(answer.ids, answer.logprobs) for answer in engine.generate(prompts[:5], samplings, [])])
        captured = 0 if engine.runner.graphs is None else len(engine.runner.graphs._graphs)
        print(f"captured {captured}")
    (ids, chances), (other_ids, other_chances) = (zip(*one, strict=True) for one in found)
    near = all(
        abs(a - b) < 1e-3
        for one, other in zip(chances, other_chances, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    return "alike" if ids == other_ids and near else "other tokens"


def refused() -> str:
    """A model that reads the device in every layer: its steps run operator by operator, after one warning."""
    model = build_random_model(len(tokenizer)).to("npu:0")
    model.model.layers[0].register_forward_hook(lambda *_: bool(model.lm_head.weight[0, 0].item() > 99) or None)
    engine = Engine(model, tokenizer, max_batch=2, max_len=96)
    answers = engine.generate(prompts[:2], Sampling(temperature=0.0, max_new_tokens=12), [])
    assert engine.runner.graphs is not None
    return f"{[len(answer.ids) for answer in answers]} {bool(engine.runner.graphs.refusal)}"


greedy = Sampling(temperature=0.0, max_new_tokens=40)
drawn = Sampling(temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=40, seed=1)
for rows, sampling in ((1, greedy), (4, greedy), (4, drawn)):
    print(counted(rows, 8, sampling))
print(graphs_and_operators())
print(refused())
