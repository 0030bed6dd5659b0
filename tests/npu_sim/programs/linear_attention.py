"""Generation with linear attention by torch_npu's operators, against plain torch in fp32: prints a line for each."""

import copy
import random
import sys
import warnings
from pathlib import Path

import torch
import torch_npu
import transformers

from anabatic.device.delta_kernels import RuleShape, choose_delta_kernels
from anabatic.device.delta_rule import DeltaInputs, DeltaPlan
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.models.linear_attention.delta_states import bytes_per_request, choose_kernels
from anabatic.models.pretrained import prepare_model
from anabatic_testing.random_models import build_byte_tokenizer
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS

warnings.filterwarnings("ignore")
SHAPE = RuleShape(key_heads=2, value_heads=6, key_size=16, value_size=8)
LENGTHS = [70, 1, 130, 5]
NEAR = 2.0**-6
"""Of the largest element: inputs, states and outputs in bf16 round to 2^-9 of their own."""


def rule(inputs, state, start, end):
    """The recurrence token by token in float64 (arXiv 2412.06464, equation 10); state [V, D, E]."""
    q, k, v, log_decay, beta = (x.double() for x in inputs)
    outs = []
    for t in range(start, end):
        heads = [i // (v.shape[1] // q.shape[1]) for i in range(v.shape[1])]
        query, key = (torch.nn.functional.normalize(x[t], dim=-1)[heads] for x in (q, k))
        state = state * log_decay[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("vd,vde->ve", key, state))
        state = state + key[:, :, None] * change[:, None, :]
        outs.append(torch.einsum("vd,vde->ve", query, state) * q.shape[-1] ** -0.5)
    return torch.stack(outs), state


def make_inputs(tokens):
    heads = [(SHAPE.key_heads, SHAPE.key_size)] * 2 + [(SHAPE.value_heads, SHAPE.value_size)]
    q, k, v = (torch.randn(tokens, *size).bfloat16() for size in heads)
    rates = torch.rand(2, tokens, SHAPE.value_heads)
    return DeltaInputs(q, k, v, -3 * rates[0], rates[1])


def near(name, ours, theirs):
    ours, theirs = ours.cpu().double(), theirs.double()
    worst = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    print(name, worst < NEAR or worst)


def move(inputs):
    return DeltaInputs(*(x.npu() for x in inputs))


def operators():
    """Chunks that continue states, then three tokens of each request, in slots of another order."""
    for state_dtype in (None, "float32"):
        torch.manual_seed(0)
        kernels = choose_delta_kernels(SHAPE, torch.bfloat16, torch.device("npu:0"), state_dtype)
        print(f"{state_dtype}: {kernels}")
        borders = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
        inputs, slots = make_inputs(borders[-1]), torch.tensor([2, 0, 4, 1])
        before = torch.randn(len(LENGTHS), SHAPE.value_heads, SHAPE.key_size, SHAPE.value_size).bfloat16().double()
        kept = before.to(kernels.state_dtype)
        kept = kept if kernels.plain_tokens else kept.mT
        plan = DeltaPlan(borders, torch.device("npu:0"))
        out, after = kernels.run_chunks(move(inputs), plan, torch.tensor(LENGTHS).int().npu(), kept.contiguous().npu())
        expected = [rule(inputs, before[i], borders[i], borders[i + 1]) for i in range(len(LENGTHS))]
        near("chunks", out, torch.cat([values for values, _ in expected]))
        now = torch.stack([state for _, state in expected])
        near("chunk states", after if kernels.plain_tokens else after.mT, now)
        states = kernels.allocate_states(5, SHAPE, torch.device("npu:0"))
        states.index_copy_(0, slots.npu(), after.to(states.dtype))
        for _ in range(3):
            inputs = make_inputs(len(LENGTHS))
            ones = torch.ones(len(LENGTHS), dtype=torch.int32).npu()
            out = kernels.run_tokens(move(inputs), states, slots.npu(), ones)
            found = [rule(inputs, now[i], i, i + 1) for i in range(len(LENGTHS))]
            now = torch.stack([state for _, state in found])
        near("tokens", out, torch.cat([values for values, _ in found]))
        ours = states.index_select(0, slots.npu())
        near("token states", ours if kernels.plain_tokens else ours.mT, now)
        print("untouched", not states[3].any().item())


def why(**more):
    sizes = {**SHAPE._asdict(), **more}
    return choose_delta_kernels(RuleShape(**sizes), torch.bfloat16, torch.device("npu:0"), None)


def reasons():
    """Where an operator is not used, the reason is named."""
    print(choose_delta_kernels(SHAPE, torch.float32, torch.device("npu:0"), None))
    print(choose_delta_kernels(SHAPE, torch.bfloat16, torch.device("cpu"), None))
    print(why(value_heads=66))
    del torch_npu.npu_chunk_gated_delta_rule
    print(why(key_size=24))


def models():
    """Greedy answers of a crowded engine, whose requests are stopped and read again: at each place the token is the
    best of plain torch in fp32 on the CPU, but for rounding."""
    tokenizer = build_byte_tokenizer(Path("tokenizer"))
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 200) for _ in range(rng.randint(1, 32))] for _ in range(7)]
    for family, asked in (("Qwen3Next", None), ("Qwen3_5Text", None), ("Qwen3_5Text", "float32")):
        torch.manual_seed(0)
        sizes = {**COMMON_CONFIG, **FAMILY_CONFIGS[family], "vocab_size": len(tokenizer), "initializer_range": 0.2}
        config = getattr(transformers, f"{family}Config")(**sizes, mamba_ssm_dtype=asked)
        plain = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval().bfloat16()
        model = prepare_model(copy.deepcopy(plain).npu(), torch.device("npu:0"))
        kernels = choose_kernels(config, model.device, model.dtype)
        print(f"{family} {asked}: {kernels}, {bytes_per_request(config, model.device, model.dtype)} bytes")
        engine = Engine(model, tokenizer, max_batch=5, max_len=64, cache_tokens=96, step_tokens=16)
        answers = engine.generate(prompts, Sampling(temperature=0.0, max_new_tokens=20), [])
        gaps = []
        for prompt, answer in zip(prompts, answers, strict=True):
            with torch.no_grad():
                logits = plain.float()(torch.tensor([prompt + answer.ids])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
            gaps += ((logits.amax(1) - chosen) / (logits.amax(1) - logits.mean(1))).tolist()
        print("preempted", engine.get_load().preemptions > 0)
        exact = sum(gap == 0 for gap in gaps) / len(gaps)
        print("best", len(gaps) == 140 and max(gaps) < 4 * NEAR and exact > 0.8 or (len(gaps), max(gaps), exact))


for word in sys.argv[1:]:
    {"operators": operators, "reasons": reasons, "models": models}[word]()
