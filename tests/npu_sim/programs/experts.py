"""Experts, losses, inference and AdamW of torch_npu against formulas: prints a line for each."""

import torch
import torch_npu
from torch_npu.optim import NpuFusedAdamW

torch.manual_seed(0)


def equal(name, pairs, tolerance=1e-5):
    errors = [(a.detach().cpu().double() - b.detach().double()).abs().max().item() for a, b in pairs]
    shapes = [a.shape == b.shape for a, b in pairs]
    print(name, all(shapes) and max(errors) < tolerance, "" if max(errors) < tolerance else errors)


def refused(name, call):
    try:
        call()
        print(name, "accepted")
    except Exception as error:
        print(name, type(error).__name__, str(error).splitlines()[0][:160])


# --- grouped matrix product, wrapped as users wrap it ---------------------------------------------------------------


class Grouped(torch.autograd.Function):
    """Forward and both gradients are grouped products: rows by expert, then the inner dimension by expert."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight, counts)
        call = dict(group_list=counts, split_item=2, group_type=0, group_list_type=1)
        return torch_npu.npu_grouped_matmul([x], [weight], bias=None, **call)[0]

    @staticmethod
    def backward(ctx, grad):
        x, weight, counts = ctx.saved_tensors
        rows = dict(group_list=counts, split_item=2, group_type=0, group_list_type=1)
        inner = dict(group_list=counts, split_item=3, group_type=2, group_list_type=1)
        dx = torch_npu.npu_grouped_matmul([grad], [weight.transpose(1, 2)], bias=None, **rows)[0]
        dw = torch_npu.npu_grouped_matmul([x.T], [grad], bias=None, **inner)[0]
        return dx, dw, None


def by_expert(x, weight, counts):
    parts = zip(x.split(counts), weight, strict=True)
    return torch.cat([rows @ matrix for rows, matrix in parts])


COUNTS = [3, 0, 4, 2]
ENDS = [3, 3, 7, 9]
x, w = torch.randn(9, 5, dtype=torch.float64), torch.randn(4, 5, 6, dtype=torch.float64)
here = [x.clone().requires_grad_(), w.clone().requires_grad_()]
there = [a.float().npu().requires_grad_() for a in (x, w)]
counts = torch.tensor(COUNTS, device="npu")
out, expected = Grouped.apply(*there, counts), by_expert(*here, COUNTS)
up = torch.randn_like(expected)
out.backward(up.float().npu())
expected.backward(up)
equal("grouped", [(out, expected), (there[0].grad, here[0].grad), (there[1].grad, here[1].grad)])

gmm = torch_npu.npu_grouped_matmul
x32, w32 = x.float().npu(), w.float().npu()
ends = torch.tensor(ENDS, device="npu")
whole = by_expert(x, w, COUNTS)
listed = list(w32.unbind())
equal(
    "grouped_forms",
    [
        (gmm([x32], [w32], group_list=ends, split_item=3, group_type=0, group_list_type=0)[0], whole),
        (gmm([x32], listed, group_list=ends, split_item=2, group_type=0)[0], whole),
        (gmm([x32], listed, group_list=ENDS, split_item=3)[0], whole),
        (torch.cat(gmm([x32], listed, group_list=ENDS, split_item=0)), whole),
        (torch.cat(gmm(list(x32.split(COUNTS)), listed, split_item=0, group_type=-1)), whole),
        (
            gmm([x32], [w32.mT.contiguous().mT], group_list=counts, split_item=2, group_type=0, group_list_type=1)[0],
            whole,
        ),
        (
            gmm([x32], listed, bias=[torch.full((6,), 2.0).npu()] * 4, group_list=ENDS, split_item=3)[0],
            whole + 2,
        ),
    ],
)
low = gmm([x32.bfloat16()], [w32.bfloat16()], group_list=ends, split_item=2, group_type=0)[0]
print("grouped_bf16", low.dtype, torch.allclose(low.float().cpu(), whole.float(), rtol=0.02, atol=0.05))
sums = torch.ones(4, 5, 6, device="npu")
torch_npu.npu_grouped_matmul_add_(sums, x32, up.float().npu(), ends)
equal("grouped_add", [(sums, here[1].grad + 1)])
short = gmm([x32], [w32[:2]], group_list=ends[:2], split_item=2, group_type=0)[0]
print("grouped_rest", short.shape[0], short[:3].isfinite().all().item(), short[3:].isnan().all().item())
need = torch.ones(9, 5, device="npu", requires_grad=True)
gmm([need], [w32], group_list=ends, split_item=2, group_type=0)[0].sum().backward()
print("grouped_grad", need.grad)
refused("grouped_kind", lambda: gmm([x32], [w32], group_list=ends, split_item=2))
refused("grouped_inner", lambda: gmm([x32.T.contiguous()], [x32], group_list=ends, split_item=2, group_type=2))

# --- permutation of tokens -------------------------------------------------------------------------------------------

tokens = torch.randn(6, 4, dtype=torch.float64)
chosen = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
probs = torch.rand(6, 2, dtype=torch.float64)
for name, kept in (("permute", 12), ("permute_dropped", 9)):
    here = [tokens.clone().requires_grad_(), probs.clone().requires_grad_()]
    there = [a.float().npu().requires_grad_() for a in (tokens, probs)]
    order = torch.argsort(chosen.flatten(), stable=True)
    rows = here[0][order[:kept] // 2]
    back = torch.zeros(12, 4, dtype=torch.float64).index_copy(0, order[:kept], rows * rows)
    expected = (back.view(6, 2, 4) * here[1][..., None]).sum(1)
    permuted, places = torch_npu.npu_moe_token_permute(there[0], chosen.npu(), num_out_tokens=kept)
    result = torch_npu.npu_moe_token_unpermute(permuted * permuted, places, probs=there[1])
    up = torch.randn_like(expected)
    result.backward(up.float().npu())
    expected.backward(up)
    equal(
        name,
        [
            (permuted, rows),
            (places, torch.argsort(order)),
            (result, expected),
            (there[0].grad, here[0].grad),
            (there[1].grad, here[1].grad),
        ],
    )
one = torch_npu.npu_moe_token_permute(tokens.float().npu(), chosen[:, 0].npu())
equal("unpermute_plain", [(torch_npu.npu_moe_token_unpermute(*one), tokens)])

# --- losses -----------------------------------------------------------------------------------------------------------

logits, target = torch.randn(7, 11, dtype=torch.float64), torch.randint(0, 11, (7,))
for reduction in ("mean", "sum", "none"):
    here, there = logits.clone().requires_grad_(), logits.float().npu().requires_grad_()
    expected = torch.nn.functional.cross_entropy(here, target, reduction=reduction)
    loss, log_prob = torch_npu.npu_cross_entropy_loss(there, target.npu(), reduction=reduction)[:2]
    loss.sum().backward()
    expected.sum().backward()
    pairs = [(loss, expected.view(loss.shape)), (log_prob, here.log_softmax(-1)), (there.grad, here.grad)]
    equal(f"loss_{reduction}", pairs)
weight = torch.rand(11)
equal(
    "loss_options",
    [
        (
            torch_npu.npu_cross_entropy_loss(
                logits.float().npu(), target.npu(), weight.npu(), ignore_index=int(target[0]), label_smoothing=0.1
            )[0],
            torch.nn.functional.cross_entropy(
                logits, target, weight.double(), ignore_index=int(target[0]), label_smoothing=0.1
            ).view(1),
        )
    ],
)
hidden = target.clone()
hidden[0] = -100
refused("loss_hidden", lambda: torch_npu.npu_cross_entropy_loss(logits.float().npu(), hidden.npu()))
print("loss_dtype", torch_npu.npu_cross_entropy_loss(logits.bfloat16().npu(), target.npu())[0].dtype)

# --- attention of inference -------------------------------------------------------------------------------------------


def attention(q, k, v, scale, mask=None):
    k, v = (a.repeat_interleave(q.shape[1] // a.shape[1], 1) for a in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


def flat(a):
    return a.transpose(1, 2).flatten(2)


q, k, v = (torch.randn(2, n, 6, 16).bfloat16() for n in (4, 2, 2))
wide = [a.float() for a in (q, k, v)]
dev = [a.npu() for a in (q, k, v)]
triangle = torch.ones(2048, 2048).bool().triu(1).npu()
causal = torch.ones(6, 6).bool().triu(1)
heads = dict(num_heads=4, num_key_value_heads=2)
pfa, fia = torch_npu.npu_prompt_flash_attention, torch_npu.npu_fused_infer_attention_score
equal(
    "prompt",
    [
        (pfa(*dev, **heads, scale_value=0.3, input_layout="BNSD"), attention(*wide, 0.3)),
        (
            pfa(*dev, **heads, scale_value=0.3, input_layout="BNSD", atten_mask=triangle, sparse_mode=2),
            attention(*wide, 0.3, causal),
        ),
        (
            pfa(*(flat(a) for a in dev), **heads, scale_value=0.3, atten_mask=causal.npu()),
            flat(attention(*wide, 0.3, causal)),
        ),
    ],
    0.03,
)
last = [dev[0][:, :, -1:], dev[1], dev[2]]
lengths = torch.arange(6) >= torch.tensor([6, 4])[:, None, None, None]
equal(
    "incremental",
    [
        (
            torch_npu.npu_incre_flash_attention(
                *last, **heads, scale_value=0.3, input_layout="BNSD", actual_seq_lengths=[6, 4]
            ),
            attention(wide[0][:, :, -1:], *wide[1:], 0.3, lengths),
        )
    ],
    0.03,
)
out, lse = fia(*dev, **heads, scale=0.3, input_layout="BNSD_BSND", softmax_lse_flag=True)
k2 = wide[1].repeat_interleave(2, 1)
equal(
    "infer",
    [
        (out, attention(*wide, 0.3).transpose(1, 2)),
        (lse, torch.logsumexp(wide[0] @ k2.transpose(-1, -2) * 0.3, -1, keepdim=True)),
    ],
    0.03,
)
grad = dev[0].clone().requires_grad_()
pfa(grad, *dev[1:], **heads, input_layout="BNSD").sum().backward()
print("prompt_grad", grad.grad)
refused("prompt_fp32", lambda: pfa(*(a.float() for a in dev), **heads, input_layout="BNSD"))

# --- AdamW ------------------------------------------------------------------------------------------------------------

for name, flags in (("adamw", {}), ("adamw_maximize", {"maximize": True}), ("adamw_amsgrad", {"amsgrad": True})):
    plain = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.AdamW([plain], lr=0.1, weight_decay=0.2, foreach=False, **flags)
    p, m, v, most = (a.npu() for a in (plain.detach().clone(), *(torch.zeros(5, 3) for _ in range(3))))
    pointer = p.data_ptr()
    for step in range(1, 4):
        plain.grad = torch.randn(5, 3)
        optimizer.step()
        call = (0.9 ** (step - 1), 0.999 ** (step - 1), 0.1, 0.2, 0.9, 0.999, 1e-8, plain.grad.npu())
        largest = most if "amsgrad" in flags else None
        torch_npu.npu_apply_adam_w(*call, largest, "amsgrad" in flags, "maximize" in flags, out=(p, m, v))
    state = optimizer.state[plain]
    equal(name, [(p, plain), (m, state["exp_avg"]), (v, state["exp_avg_sq"])], 1e-6)
    assert p.data_ptr() == pointer


def scaled(device, fused, bad):
    """Two steps under GradScaler with an epsilon that makes a forgotten scale visible."""
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, eps=1.0, fused=fused, foreach=False)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=1024.0)
    for _ in range(2):
        loss = (parameter * (float("inf") if bad else 0.01)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return parameter.detach().cpu()


print("scaler_plain", torch.allclose(scaled("npu", False, False), scaled("cpu", False, False)))
print("scaler_plain_inf", scaled("npu", False, True).tolist())
print("scaler_fused_cpu", torch.allclose(scaled("cpu", True, False), scaled("cpu", False, False)))
print("scaler_fused", torch.allclose(scaled("npu", True, False), scaled("cpu", True, False)))
print("scaler_fused_inf", scaled("npu", True, True).isnan().all().item(), scaled("cpu", True, True).tolist())


def half(optimizer_class, bad, **flags):
    """Two steps of torch_npu's own GradScaler: is the weight unchanged, is it finite, the scale at the end."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4).npu()
    optimizer = optimizer_class(layer.parameters(), lr=0.1, **flags)
    scaler = torch_npu.npu.amp.GradScaler(init_scale=1024.0)
    before = layer.weight.detach().clone()
    for _ in range(2):
        x = torch.full((2, 4), float("inf") if bad else 1.0, device="npu")
        with torch.autocast("npu", torch.float16):
            loss = layer(x).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip = getattr(optimizer, "clip_grad_norm_fused_", None)
        norm = clip(1.0) if clip else torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    same = torch.equal(layer.weight.detach(), before)
    return same, layer.weight.isfinite().all().item(), scaler.get_scale(), round(norm.item(), 3)


for name, kind, flags in (("half", torch.optim.AdamW, {"foreach": False}), ("half_fused", NpuFusedAdamW, {})):
    print(f"{name}_good", *half(kind, False, **flags))
    print(f"{name}_bad", *half(kind, True, **flags))
refused("own_scaler", lambda: half(torch.optim.AdamW, False, fused=True))
p = torch.ones(3, device="npu")
refused("adamw_new", lambda: torch_npu.npu_apply_adam_w(1.0, 1.0, 0.1, 0.1, 0.9, 0.9, 1e-8, p, None, False, False))
