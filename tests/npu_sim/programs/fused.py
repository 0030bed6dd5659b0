"""Compares torch_npu's fused operators with their formulas in float64: prints a line for each."""

import math

import torch
import torch_npu
from torch_npu.optim import NpuFusedAdamW

torch.manual_seed(0)


def close(name, ours, formula, *shapes):
    here = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    there = [x.detach().float().npu().requires_grad_() for x in here]
    out, expected = ours(*there), formula(*here)
    weight = torch.randn_like(expected)
    out.backward(weight.float().npu())
    expected.backward(weight)
    errors = [
        (a.detach().cpu().double() - b.detach()).abs().max().item()
        for a, b in [(out, expected), *((x.grad, y.grad) for x, y in zip(there, here, strict=True))]
    ]
    print(name, max(errors) < 1e-5, "" if max(errors) < 1e-5 else errors)


def attention(q, k, v, scale=1.0, mask=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, -math.inf), -1) @ v


def packed(q, k, v, ends, scale):
    parts, start = [], 0
    for end in ends:
        a, b, c = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        hidden = torch.ones(end - start, end - start).bool().triu(1)
        parts.append(attention(a, b, c, scale, hidden)[0].transpose(0, 1))
        start = end
    return torch.cat(parts)


def heads(x, n):
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def swap(x):
    return x.transpose(1, 2)


def rotate(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


fa = torch_npu.npu_fusion_attention
triangle = torch.ones(2048, 2048).bool().triu(1).npu()
causal = torch.ones(7, 7).bool().triu(1)
B = [(2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8)]
close(
    "rms_norm",
    lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-6)[0],
    lambda x, g: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * g,
    (2, 5, 16),
    (16,),
)
close(
    "rotary",
    lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s),
    lambda x, c, s: x * c + rotate(x) * s,
    (2, 3, 5, 8),
    (1, 1, 5, 8),
    (1, 1, 5, 8),
)
close(
    "interleaved",
    lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, "interleave"),
    lambda x, c, s: x * c + pairs(x) * s,
    (2, 3, 5, 8),
    (1, 1, 5, 8),
    (1, 1, 5, 8),
)
close("swiglu", torch_npu.npu_swiglu, lambda x: torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (3, 8))
close("scale_one", lambda q, k, v: fa(q, k, v, 4, "BNSD")[0], attention, *B)
close(
    "mode_0",
    lambda q, k, v: fa(q, k, v, 4, "BNSD", atten_mask=causal.npu(), scale=0.3)[0],
    lambda q, k, v: attention(q, k, v, 0.3, causal),
    *B,
)
close(
    "mode_2",
    lambda q, k, v: fa(q, k, v, 4, "BNSD", atten_mask=triangle, scale=0.3, sparse_mode=2)[0],
    lambda q, k, v: attention(q, k, v, 0.3, causal),
    *B,
)
close(
    "mode_3",
    lambda q, k, v: fa(q, k, v, 4, "BSND", atten_mask=triangle, scale=0.3, sparse_mode=3)[0],
    lambda q, k, v: swap(attention(swap(q), swap(k), swap(v), 0.3, torch.ones(5, 9).bool().triu(5))),
    (2, 5, 4, 8),
    (2, 9, 2, 8),
    (2, 9, 2, 8),
)
close(
    "mode_4",
    lambda q, k, v: fa(
        q, k, v, 4, "BNSD", atten_mask=triangle, scale=0.3, sparse_mode=4, pre_tockens=2, next_tockens=0
    )[0],
    lambda q, k, v: attention(q, k, v, 0.3, causal | torch.ones(7, 7).bool().tril(-3)),
    *B,
)
close(
    "BSH",
    lambda q, k, v: fa(q, k, v, 4, "BSH", scale=0.3)[0],
    lambda q, k, v: swap(attention(heads(q, 4), heads(k, 2), heads(v, 2), 0.3)).flatten(-2),
    (2, 5, 32),
    (2, 6, 16),
    (2, 6, 16),
)
close(
    "SBH",
    lambda q, k, v: fa(q, k, v, 4, "SBH", scale=0.3)[0],
    lambda q, k, v: (
        swap(attention(*(heads(x.transpose(0, 1), n) for x, n in ((q, 4), (k, 2), (v, 2))), 0.3))
        .flatten(-2)
        .transpose(0, 1)
    ),
    (5, 2, 32),
    (6, 2, 16),
    (6, 2, 16),
)
close(
    "TND",
    lambda q, k, v: fa(
        q,
        k,
        v,
        4,
        "TND",
        atten_mask=triangle,
        scale=0.3,
        sparse_mode=3,
        actual_seq_qlen=[3, 10],
        actual_seq_kvlen=[3, 10],
    )[0],
    lambda q, k, v: packed(q, k, v, [3, 10], 0.3),
    (10, 4, 8),
    (10, 2, 8),
    (10, 2, 8),
)


def rows_of(q, k, ends, scale):
    """The statistics of causal rows, `[T, N]`: maximum and sum of the exponents."""
    scores = torch.einsum("qnd,knd->nqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    index = torch.arange(len(q))
    document = torch.bucketize(index, torch.tensor(ends), right=True)
    shown = (document[:, None] == document) & (index[:, None] >= index)
    scores = scores.masked_fill(~shown, -math.inf)
    most = scores.amax(-1)
    return most.t(), (scores - most[..., None]).exp().sum(-1).t()


for how in (
    "",
    "TND",
):  # [N, S] of one sequence after the other, or as the queries lie; and the gradient reads the same
    q, k, v = (torch.randn(10, n, 8) for n in (4, 2, 2))
    ends = [3, 10]
    there = [x.npu().requires_grad_() for x in (q, k, v)]
    options = {"atten_mask": triangle, "sparse_mode": 3, "actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    made = fa(*there, 4, "TND", scale=0.3, softmax_layout=how, **options)
    good = []
    for ours, theirs in zip(made[1:3], rows_of(q.double(), k.double(), ends, 0.3), strict=True):
        lies = torch.cat([part.t().flatten() for part in theirs.split([3, 7])]) if how == "" else theirs.flatten()
        good.append(torch.allclose(ours[..., 0].flatten().cpu().double(), lies, rtol=1e-5, atol=1e-6))
    # Rows whose keys are partly elsewhere: their sum is three times this block's, so each weight is a third.
    up = torch.randn(10, 4, 8).npu()
    whole = torch.autograd.grad(made[0], there, up)
    third = torch_npu.npu_fusion_attention_grad(
        *(x.detach() for x in there), up, 4, "TND", softmax_max=made[1], softmax_sum=made[2] * 3, scale_value=0.3,
        attention_in=made[0].detach(), softmax_layout=how, **options,
    )  # fmt: skip
    good.append(torch.allclose(third[2], whole[2] / 3, rtol=1e-4, atol=1e-6))
    print(f"statistics_{how or 'NTD'}", all(good) or good)
refused_layout = [x.detach().unsqueeze(0).transpose(1, 2) for x in there]
try:
    fa(*refused_layout, 4, "BNSD", softmax_layout="TND")
    print("statistics_BNSD accepted")
except RuntimeError as error:
    print("statistics_BNSD", str(error).splitlines()[0])


def with_sink(q, k, v, sink, scale, mask, pse=0.0):
    """The sink is one more column of scores, whose weight is dropped (op-plugin's documentation)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale + pse).masked_fill(mask, -math.inf)
    column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v


fa_v2 = torch_npu.npu_fusion_attention_v2
close(
    "sink",
    lambda q, k, v, sink: fa(q, k, v, 4, "BNSD", atten_mask=triangle, scale=0.3, sparse_mode=2, sink=sink)[0],
    lambda q, k, v, sink: with_sink(q, k, v, sink, 0.3, causal),
    *B,
    (4,),
)
close(
    "v2_sink_band",
    lambda q, k, v, sink: fa_v2(
        q, k, v, 4, "BNSD", atten_mask=triangle, scale=0.3, sparse_mode=4, pre_tokens=2, next_tokens=0, sink=sink
    )[0],
    lambda q, k, v, sink: with_sink(q, k, v, sink, 0.3, causal | torch.ones(7, 7).bool().tril(-3)),
    *B,
    (4,),
)
for kind, scale_of_pse in ((0, 1.0), (1, 0.3)):
    close(
        f"v2_pse_type_{kind}",
        lambda q, k, v, pse, kind=kind: fa_v2(
            q, k, v, 4, "BNSD", pse=pse, pse_type=kind, atten_mask=causal.npu(), scale=0.3
        )[0],
        lambda q, k, v, pse, factor=scale_of_pse: with_sink(
            q, k, v, torch.full((4,), -math.inf).double(), 0.3, causal, pse * factor
        ),
        *B,
        (1, 4, 7, 7),
    )
ENDS = {"actual_seq_qlen": [3, 10], "actual_seq_kvlen": [3, 10]}
close(
    "v2_rotated_part",
    lambda q, k, v, q_rope, k_rope: fa_v2(
        q, k, v, 4, "TND", atten_mask=triangle, scale=0.3, sparse_mode=3, query_rope=q_rope, key_rope=k_rope, **ENDS
    )[0],
    lambda q, k, v, q_rope, k_rope: packed(torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1), v, [3, 10], 0.3),
    (10, 4, 8),
    (10, 2, 8),
    (10, 2, 8),
    (10, 4, 4),
    (10, 2, 4),
)


def refused(name, call):
    try:
        call()
        print(name, "accepted")
    except Exception as error:
        print(name, type(error).__name__, str(error).splitlines()[0][:110])


x = torch.randn(2, 8).npu().requires_grad_()
refused("add_rms_norm", lambda: torch_npu.npu_add_rms_norm(x, x, torch.ones(8).npu())[0].sum().backward())
refused("on_cpu", lambda: torch_npu.npu_rms_norm(torch.randn(2, 8), torch.ones(8)))
coded = [torch.zeros(64).npu() for _ in range(5)]  # a format that is not public
refused("missing", lambda: torch_npu.npu_hans_decode(*coded[:4], out=coded[4]))
some = [torch.randn(1, 2, 4, 8).npu() for _ in range(3)]
refused("slopes", lambda: fa_v2(*some, 2, "BNSD", pse_type=2))
refused("half_sink", lambda: fa_v2(*some, 2, "BNSD", sink=torch.zeros(2, dtype=torch.half).npu()))
refused("short_sink", lambda: fa(*some, 2, "BNSD", sink=torch.zeros(1).npu()))
refused("one_rope", lambda: fa_v2(*some, 2, "BNSD", query_rope=some[0]))
refused(
    "triangle",
    lambda: fa(*(torch.randn(1, 2, 4, 8).npu() for _ in range(3)), 2, "BNSD", atten_mask=causal.npu(), sparse_mode=2),
)

q = torch.randn(1, 2, 64, 8, device="npu", requires_grad=True)
v = torch.ones(1, 2, 64, 8, device="npu", requires_grad=True)
out = fa(q, q, v, 2, "BNSD", keep_prob=0.5, scale=0.3)
out[0].backward(torch.ones_like(out[0]))
print(
    "dropout",
    out[1].shape == (1, 2, 64, 8),
    abs(out[0].mean().item() - 1) < 0.1,
    torch.allclose(v.grad.sum(), out[0].sum() * 1.0, rtol=1e-4),
)


here, there = torch.nn.Parameter(torch.randn(5)), None
there = torch.nn.Parameter(here.detach().clone().npu())
plain, fused = torch.optim.AdamW([here], lr=0.1), NpuFusedAdamW([there], lr=0.1)
for _ in range(3):
    grad = torch.randn(5)
    here.grad = grad
    there.grad = grad.npu() if there.grad is None else there.grad.copy_(grad)
    plain.step()
    fused.step()
print("fused_adamw", torch.allclose(here.detach(), there.detach().cpu(), rtol=1e-6))


def bf16():
    low = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device="npu"))
    low.grad = torch.ones_like(low)
    NpuFusedAdamW([low]).step()


refused("bf16", bf16)
