"""gpt-oss trains with sinks in the fused operator as on a CPU and saves what is planned: prints a line for each."""

import copy
import json
import sys
import warnings

import torch
import torch_npu
import transformers

from anabatic.data.batching.packing import Batch
from anabatic.device import ops_npu
from anabatic.device.attention import PackedSegments
from anabatic.models import forward, fused_ops, pretrained
from anabatic.plan import memory_estimate
from anabatic.plan.shapes import config_shape
from anabatic.plan.training_setup import TrainingSetup

warnings.filterwarnings("ignore")
CONFIG = transformers.GptOssConfig(
    vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
    intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, pad_token_id=0,
    eos_token_id=2, max_position_embeddings=4096, layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
CONFIG._attn_implementation = pretrained.ATTENTION_NAME
DOCUMENTS = {"one document": [48], "two documents": [30, 18]}
STEPS = 4


def build():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=0.5 if "norm" in name else 0.0, std=0.2)
    return model


def pack(lengths, seed):
    made = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(3, 96, (sum(lengths),), generator=made) for _ in range(2))
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return Batch(ids, labels, torch.cat([torch.arange(n) for n in lengths]), borders, borders[-1], borders[-1])


def train(model, lengths, device, dtype, kind=None):
    """The losses, and what the sinks have become."""
    fused, plain = fused_ops.apply_fused_setting(model.to(device), "auto", device).split("; plain")
    kind = kind or ("fused" if device == "npu" else "plain")
    assert "2 attentions with sinks" in (fused if kind == "fused" else plain), fused + plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        batch = forward.pack_batch(pack(lengths, step), torch.device(device))
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = forward.compute_summed_loss(model, batch, 1 << 12) / sum(lengths)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, torch.stack([layer.self_attn.sinks.detach().cpu() for layer in model.model.layers])


def same(here, there, rounding):
    """Losses within a rounding of their own; Adam's first steps are of one size whatever the gradient's rounding is."""
    (losses, sinks), (other_losses, other_sinks) = here, there
    near = all(abs(a - b) <= rounding * abs(a) for a, b in zip(losses, other_losses, strict=True))
    worst = (sinks - other_sinks).abs().max().item()
    return near and worst <= rounding * STEPS or (losses, other_losses, worst)


def training():
    model = build()
    first = torch.stack([layer.self_attn.sinks.detach().clone() for layer in model.model.layers])
    for name, lengths in DOCUMENTS.items():
        expected = train(copy.deepcopy(model), lengths, "cpu", torch.float32)
        assert (expected[1] - first).abs().min() > 1e-4, "a sink was not trained"
        for dtype, rounding in ((torch.float32, 1e-4), (torch.bfloat16, 2.0**-6)):
            print(name, dtype, same(expected, train(copy.deepcopy(model), lengths, "npu", dtype), rounding))


def older():
    """With an older CANN the reason is named, and plain operators train to the same numbers."""
    torch_npu.npu.utils.get_cann_version = lambda: "8.3.RC1"
    ops_npu.explain_plain_sinks.cache_clear()
    told = fused_ops.apply_fused_setting(build().to("npu"), "auto", "npu")
    print("older", "2 attentions with sinks (CANN 8.3 is older than 8.5)" in told.split("; plain")[1])
    expected = train(build(), [30, 18], "cpu", torch.float32)
    print("older", same(expected, train(build(), [30, 18], "npu", torch.float32, "plain"), 1e-4))


def saved():
    """Bytes per token that an attention saves, measured and planned."""
    shape = config_shape.read_shape(json.loads(CONFIG.to_json_string(use_diff=False)), "gpt-oss")
    setup = TrainingSetup(shape=shape, micro_tokens=512, seq_len=512, half=False)
    model = build().to("npu")
    fused_ops.apply_fused_setting(model, "auto", "npu")
    for index, (kind, _) in enumerate(setup.count_kinds()):
        planned = memory_estimate.estimate_activations(kind).attention
        layer = model.model.layers[index].self_attn
        x = torch.randn(1, 512, 64, device="npu", requires_grad=True)
        angles = model.model.rotary_emb(x, torch.arange(512, device="npu")[None])
        elsewhere = [*layer.parameters(), x, *angles, ops_npu._causal_mask(x.device)]
        counted = {tensor.untyped_storage().data_ptr() for tensor in elsewhere}
        saved = {}

        def keep(tensor, counted=counted, saved=saved):
            place = tensor.untyped_storage().data_ptr()
            if place not in counted:
                saved[place] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(x, angles, None, segments=PackedSegments([0, 200, 512], x.device))
        measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 512
        good = abs(planned - measured) < 0.01 * measured
        print("saved", kind.shape.window, good or (planned, {place: x.shape for place, x in saved.items()}))


for word in sys.argv[1:]:
    {"training": training, "older": older, "saved": saved}[word]()
