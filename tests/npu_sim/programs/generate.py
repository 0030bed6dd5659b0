"""Generation on the NPU: the CPU's tokens, requests of several lengths and beginnings, with and without adapters."""

import random
import sys
import warnings
from pathlib import Path

import torch
import torch_npu  # noqa: F401

from anabatic.config.tuner import Lora
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.models import adapter, fuse
from anabatic.testing.untrained import byte_tokenizer, random_model

warnings.filterwarnings("ignore")
tokenizer = byte_tokenizer(Path("tokenizer"))
rng = random.Random(0)
beginning = [rng.randrange(len(tokenizer)) for _ in range(20)]
prompts = [beginning * (n % 2) + [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 30))] for n in range(6)]

lora = Lora(r=4)
adapted = random_model(len(tokenizer))
adapter.insert(adapted, lora)
adapter.begin(adapted, lora, 0)
with torch.no_grad():
    for layer in adapter.layers(adapted).values():
        layer.lora_B.normal_(0, 0.3)
adapter.save(adapted, Path("adapter"), tokenizer, lora, Path("model"))


def answers(device: str, tokens: int) -> list[list[int]]:
    model = random_model(len(tokenizer)).to(device)
    fuse.settle(model, "auto", device.partition(":")[0])
    engine = Engine(model, tokenizer, max_batch=4, max_len=96, step_tokens=24)
    engine.load_adapter("a", Path("adapter"))
    requests = []
    for number, prompt in enumerate(prompts):
        drawn = Sampling(
            temperature=float(number % 2), top_k=20, top_p=0.9, seed=number, max_new_tokens=tokens + number
        )
        requests.append(engine.request(prompt, drawn, [], adapter="a" if number % 3 == 1 else None))
    engine.submit(requests)
    while engine.busy:
        engine.step()
    print(f"{device}: {engine.load().steps} steps, {engine.load().new_tokens} tokens")
    return [request.ids for request in requests]


tokens = int(sys.argv[1])
on_npu = answers("npu:0", tokens)
if tokens < 20:
    print("same" if on_npu == answers("cpu", tokens) else "other tokens")
