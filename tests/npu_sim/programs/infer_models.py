"""Delta rule, products before latent attention, sparse attention against loops: prints a line for each case."""

import math

import torch
import torch_npu
from infer_reference import attend, check, refused, to_fractal

torch.manual_seed(0)


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


# The delta rule.
lengths, nk, nv, dk, dv = [3, 1, 5], 2, 4, 16, 8
query, key = (torch.nn.functional.normalize(bf16(9, nk, dk).float(), dim=-1).bfloat16() for _ in range(2))
value, beta, g = bf16(9, nv, dv), torch.rand(9, nv).bfloat16(), -torch.rand(9, nv)
gk = -torch.rand(9, nv, dk)


def delta(states, starts, write, beta, g, gk, scale):
    """Run all tokens; `starts` are the states that sequences begin with, `write` is called with each new one."""
    out, t = torch.zeros(9, nv, dv, dtype=torch.float64), 0
    for i, length in enumerate(lengths):
        own = states[starts[i]].double()
        for _ in range(length):
            for head in range(nv):
                q, k = query[t, head // 2].double() * scale, key[t, head // 2].double()
                decay = 1 if g is None else math.exp(g[t, head])
                decay = decay * (1 if gk is None else gk[t, head].double().exp())
                rate = 1 if beta is None else float(beta[t, head])
                s = own[head] * decay
                own[head] = s + rate * torch.outer(value[t, head].double() - s @ k, k)
                out[t, head] = own[head] @ q
            write(i, t, own)
            t += 1
    return out


slots, accepted = torch.randperm(12)[:9], [2, 1, 4]
options = {"actual_seq_lengths": torch.tensor(lengths, dtype=torch.int32).npu(), "scale": 0.25}
for name, extra in (
    ("all", {"beta": beta, "g": g, "gk": gk}),
    ("gated", {"beta": beta, "g": g}),
    ("plain", {}),
):
    state = bf16(12, nv, dv, dk)
    after = state.double()
    first = [int(slots[s + a - 1]) for s, a in zip((0, 3, 4), accepted, strict=True)]

    def write(_, t, own, after=after):
        after[slots[t]] = own

    expected = delta(state, first, write, *(extra.get(n) for n in ("beta", "g", "gk")), 0.25)
    there = state.npu()
    arguments = options | {n: x.npu() for n, x in extra.items()}
    arguments |= {"ssm_state_indices": slots.int().npu(), "num_accepted_tokens": torch.tensor(accepted).int().npu()}
    out = torch_npu.npu_recurrent_gated_delta_rule(query.npu(), key.npu(), value.npu(), there, **arguments)
    check(f"recurrent_{name}", out, expected, 1.6e-2)
    check(f"recurrent_state_{name}", there, after, 1.6e-2)
    kept = state.npu()
    out, updated = torch_npu.npu_recurrent_gated_delta_rule_functional(
        query.npu(), key.npu(), value.npu(), kept, **arguments
    )
    check(f"recurrent_functional_{name}", updated, after, 1.6e-2)
    print(f"recurrent_keeps_{name}", torch.equal(kept.cpu(), state))
rule = torch_npu.npu_recurrent_gated_delta_rule
tensors = (query.npu(), key.npu(), value.npu(), there)
refused("recurrent_scale", lambda: rule(*tensors, **{**arguments, "scale": None}))
refused("recurrent_slots", lambda: rule(*tensors, **{**arguments, "ssm_state_indices": None}))
refused("recurrent_float", lambda: rule(query.npu().float(), *tensors[1:], **arguments))
refused("recurrent_beyond", lambda: rule(*tensors[:3], there[:5], **arguments))
for dtype in (torch.bfloat16, torch.float32):
    state = torch.randn(3, nv, dv, dk).to(dtype)
    final = state.double()

    def write(i, _, own, final=final):
        final[i] = own

    expected = delta(state, range(3), write, beta, g, None, 0.25)
    out, states = torch_npu.npu_chunk_gated_delta_rule(
        *tensors[:3], beta=beta.npu(), initial_state=state.npu(), g=g.npu(), **options
    )
    check(f"chunked_{dtype}", out, expected, 1.6e-2)
    check(f"chunked_state_{dtype}", states, final, 1.6e-2 if dtype == torch.bfloat16 else 1e-4)
    print(f"chunked_dtype_{dtype}", states.dtype == dtype)
refused("chunked_state_missing", lambda: torch_npu.npu_chunk_gated_delta_rule(*tensors[:3], beta=beta.npu(), **options))

# Before latent attention.
batch, rows, hidden, cq, heads, size, latent, rope = 2, 5, 48, 32, 2, 16, 32, 16
token_x = bf16(batch, rows, hidden)
weights = [x / 8 for x in (bf16(hidden, cq), bf16(cq, heads * (size + rope)), bf16(heads, size, latent))]
weights.append(bf16(hidden, latent + rope) / 8)
gammas = [bf16(cq), bf16(latent)]
angle = torch.randn(batch, rows, rope)
sin, cos = angle.sin().bfloat16(), angle.cos().bfloat16()


def norm(x, gamma):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double()


def turn(x, cos, sin):
    x = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    return x * cos.double() + torch.cat([-x[..., rope // 2 :], x[..., : rope // 2]], -1) * sin.double()


def near(x):
    return x.bfloat16().double()


x, (dq, uq, uk, dkv) = token_x.double(), (w.double() for w in weights)
q_norm = near(norm(near(x @ dq), gammas[0]) * 1.5)
v3_up = near(q_norm @ uq).unflatten(-1, (heads, size + rope))
up = near(near(norm(near(x @ dq), gammas[0])) @ uq).unflatten(-1, (heads, size + rope))
down = near(x @ dkv)


def queries(up):
    return (
        torch.einsum("bsnd,ndh->bsnh", up[..., :size], uk),
        turn(up[..., size:], cos[:, :, None], sin[:, :, None]),
    )


compressed, key_rope = norm(down[..., :latent], gammas[1]), turn(down[..., latent:], cos, sin)
index = torch.randperm(48)[:10].view(batch, rows)


def paged(x):
    cache = torch.zeros(3, 16, 1, x.shape[-1], dtype=torch.float64)
    for slot, row in zip(index.flatten().tolist(), x.reshape(10, -1), strict=True):
        cache[slot // 16, slot % 16, 0] = row
    return cache


def caches():
    return [torch.zeros(3, 16, 1, n).bfloat16().npu() for n in (latent, rope)]


there = [t.npu() for t in (token_x, *weights, *gammas, sin, cos)]
made = caches()
out = torch_npu.npu_mla_prolog(*there, index.npu(), *made)
for name, ours, expected in zip(("query", "query_rope"), out, queries(up), strict=False):
    check(f"prolog_{name}", ours, expected, 4e-2)
check("prolog_cache", made[0], paged(compressed), 4e-2)
check("prolog_rope_cache", out[3], paged(key_rope), 4e-2)
merged = [t.flatten(0, 1) if i in (0, 7, 8) else t for i, t in enumerate(there)]
made = caches()
out = torch_npu.npu_mla_prolog_v2(*merged, index.flatten().npu(), *made, cache_mode="PA_NZ")
check("prolog_v2_query", out[0], queries(up)[0].flatten(0, 1), 4e-2)
fractal = to_fractal(paged(compressed))
check("prolog_v2_cache", made[0], fractal.view(made[0].shape), 4e-2)
print("prolog_v2_outputs", len(out) == 5 and out[4].shape == (1,))
made = caches()
out = torch_npu.npu_mla_prolog_v3(
    *there, *made, cache_index=index.npu(), qc_qr_scale=1.5, kc_scale=0.5, query_norm_flag=True
)
check("prolog_v3_query", out[0], queries(v3_up)[0], 4e-2)
check("prolog_v3_query_rope", out[1], queries(v3_up)[1], 4e-2)
check("prolog_v3_norm", out[3], q_norm, 4e-2)
check("prolog_v3_cache", made[0], paged(compressed * 0.5), 4e-2)
print("prolog_v3_outputs", out[2].shape == (0,) and out[4].shape == (0,))
made = caches()
out = torch_npu.npu_mla_prolog_v3_functional(*there, *made, cache_index=index.npu())
check("prolog_functional_cache", out[5], paged(compressed), 4e-2)
print("prolog_functional_keeps", not made[0].any().item())
lines = [torch.zeros(batch, rows, 1, n).bfloat16().npu() for n in (latent, rope)]
torch_npu.npu_mla_prolog_v3(*there, *lines, cache_mode="BSND")
check("prolog_lines", lines[0], compressed[:, :, None], 4e-2)
made = caches()
torch_npu.npu_mla_prolog_v3(
    *merged, *made, cache_index=torch.tensor([2, 0]).npu(), cache_mode="PA_BLK_BSND",
    actual_seq_len=torch.tensor([4, 10], dtype=torch.int32).npu(),
)  # fmt: skip
blocks = torch.zeros(3, 16, 1, latent, dtype=torch.float64)
blocks[2, :4, 0], blocks[0, :6, 0] = compressed.flatten(0, 1)[:4], compressed.flatten(0, 1)[4:]
check("prolog_blocks", made[0], blocks, 4e-2)
refused("prolog_quantised", lambda: torch_npu.npu_mla_prolog_v3(*there, *made, weight_quant_mode=1))
refused("prolog_mode", lambda: torch_npu.npu_mla_prolog(*there, index.npu(), *made, cache_mode="BSND"))

# Which keys matter, and attention to them.
counts, lengths = [3, 2], [40, 25]
starts = {"TND": (0, 3), "BSND": (0, 3)}
query, weight = bf16(5, 8, 32), bf16(5, 8)
keys = [bf16(n, 32) for n in lengths]
order = torch.randperm(6)
pages, table = torch.zeros(6, 16, 1, 32).bfloat16(), torch.zeros(2, 3, dtype=torch.int32)
for i, own in enumerate(keys):
    for start in range(0, len(own), 16):
        page = int(order[i * 3 + start // 16])
        table[i, start // 16] = page
        pages[page, : len(own[start : start + 16]), 0] = own[start : start + 16]


def ranked(i, row, count, causal):
    scores = torch.relu(query[(0, 3)[i] + row].double() @ keys[i].double().T)
    scores = (scores * weight[(0, 3)[i] + row].double()[:, None]).sum(0)
    end = lengths[i] - counts[i] + row + 1 if causal else lengths[i]
    best = scores[:end].sort(descending=True, stable=True)
    pad = max(0, count - end)
    return (
        torch.cat([best.indices[:count], torch.full((pad,), -1)]),
        torch.cat([best.values[:count], torch.full((pad,), -math.inf)]),
    )


seen = {"actual_seq_lengths_query": torch.tensor([3, 5], dtype=torch.int32).npu(), "sparse_count": 30}
for mode in (0, 3):
    best = [ranked(i, row, 30, mode == 3) for i in range(2) for row in range(counts[i])]
    out, none = torch_npu.npu_lightning_indexer(
        query.npu(), pages.npu(), weight.npu(), block_table=table.npu(), layout_query="TND", layout_key="PA_BSND",
        actual_seq_lengths_key=torch.tensor(lengths, dtype=torch.int32).npu(), sparse_mode=mode, **seen,
    )  # fmt: skip
    check(f"indexer_pages_{mode}", out, torch.stack([x for x, _ in best])[:, None], 0)
    out, values = torch_npu.npu_lightning_indexer(
        query.npu(), torch.cat(keys)[:, None].npu(), weight.npu(), layout_query="TND", layout_key="TND",
        actual_seq_lengths_key=torch.tensor([40, 65], dtype=torch.int32).npu(), sparse_mode=mode, return_value=True,
        **seen,
    )  # fmt: skip
    check(f"indexer_packed_{mode}", out, torch.stack([x for x, _ in best])[:, None], 0)
    check(f"indexer_values_{mode}", values, torch.stack([x for _, x in best])[:, None], 1.6e-2)
print("indexer_no_values", none.numel() == 0 and out.dtype == torch.int32)
refused(
    "indexer_mode",
    lambda: torch_npu.npu_lightning_indexer(
        query[None].npu(), keys[0][None, :, None].npu(), weight[None].npu(), sparse_mode=1
    ),
)

q, q_rope = bf16(2, 3, 4, 512) / 8, bf16(2, 3, 4, 64) / 8
k, k_rope = bf16(2, 40, 1, 512), bf16(2, 40, 1, 64)
sinks = torch.randn(4)
for block, mode in ((1, 3), (4, 3), (4, 0)):
    count, blocks = 6, -(-40 // block)
    chosen = torch.full((2, 3, 1, count + 2), -1, dtype=torch.int32)
    for i in range(2):
        for row in range(3):
            limit = (lengths[i] - counts[i] + row + 1 - 1) // block if mode == 3 else (lengths[i] - 1) // block
            chosen[i, row, 0, :count] = torch.randperm(limit + 1)[:count]

    def sparse(i, row, sink=None, block=block, mode=mode, chosen=chosen):
        end = lengths[i] - counts[i] + row + 1 if mode == 3 else lengths[i]
        used = [
            position for number in chosen[i, row, 0].tolist() if number >= 0
            for position in range(number * block, min(end, (number + 1) * block))
        ]  # fmt: skip
        full = torch.cat([k[i, used, 0], k_rope[i, used, 0]], -1)[None]
        one = torch.cat([q[i, row], q_rope[i, row]], -1)[:, None]
        return attend(one, full, k[i, used, 0][None], 0.3, sink=sink)

    def everything(sink=None, sparse=sparse):
        out, lse = torch.zeros(2, 3, 4, 512, dtype=torch.float64), torch.zeros(2, 1, 3, 4, dtype=torch.float64)
        for i in range(2):
            for row in range(counts[i]):
                one, total = sparse(i, row, sink)
                out[i, row], lse[i, 0, row] = one[:, 0], total[:, 0, 0]
        return out, lse

    common = {
        "actual_seq_lengths_query": torch.tensor(counts, dtype=torch.int32).npu(),
        "actual_seq_lengths_kv": torch.tensor(lengths, dtype=torch.int32).npu(), "sparse_block_size": block,
        "sparse_mode": mode, "attention_mode": 2,
    }  # fmt: skip
    both = {"query_rope": q_rope.npu(), "key_rope": k_rope.npu()}
    expected, sums = everything()
    flash = torch_npu.npu_sparse_flash_attention
    out, top, total = flash(q.npu(), k.npu(), k.npu(), chosen.npu(), 0.3, return_softmax_lse=True, **both, **common)
    check(f"sparse_{block}_{mode}", out, expected, 1.6e-2)
    check(f"sparse_lse_{block}_{mode}", torch.where(total == 0, 0.0, top + total.log()), sums, 1e-4)
    out = flash(q.npu(), k.npu(), k.npu(), chosen.npu(), 0.3, sinks=sinks.npu(), **both, **common)[0]
    check(f"sparse_sinks_{block}_{mode}", out, everything(sinks)[0], 1.6e-2)
cut = torch.cat([q[0], q[1, :2]]), torch.cat([q_rope[0], q_rope[1, :2]])
packed = {
    **common, "actual_seq_lengths_query": torch.tensor([3, 5], dtype=torch.int32).npu(), "layout_query": "TND",
    "layout_kv": "PA_BSND", "block_table": torch.tensor([[4, 0, 2], [1, 3, 5]], dtype=torch.int32).npu(),
}  # fmt: skip
order = [(0, 0, 4), (0, 1, 0), (0, 2, 2), (1, 0, 1), (1, 1, 3), (1, 2, 5)]


def in_pages(x):
    cache = torch.zeros(6, 16, *x.shape[2:]).to(x.dtype)
    for i, part, page in order:
        own = x[i, part * 16 : part * 16 + 16]
        cache[page, : len(own)] = own
    return cache


indices = torch.cat([chosen[0], chosen[1, :2]])
cache, cache_rope = in_pages(k).npu(), in_pages(k_rope).npu()
out = flash(cut[0].npu(), cache, cache, indices.npu(), 0.3, query_rope=cut[1].npu(), key_rope=cache_rope, **packed)[0]
check("sparse_pages", out, torch.cat([expected[0], expected[1, :2]]), 1.6e-2)
refused("sparse_attention_mode", lambda: flash(q.npu(), k.npu(), k.npu(), chosen.npu(), 0.3, **both))
refused("sparse_beyond", lambda: flash(q.npu(), k.npu(), k.npu(), chosen.npu() + 20, 0.3, **both, **common))

# The same from an int8 cache with one scale for 128 numbers.
numbers, scales = torch.randint(-99, 99, (2, 40, 1, 512)).to(torch.int8), torch.rand(2, 40, 1, 4) / 50
k = (numbers.unflatten(-1, (4, 128)).double() * scales.double()[..., None]).flatten(-2).bfloat16()
bytes_of_key = torch.cat([numbers, k_rope.view(torch.int8), scales.view(torch.int8)], -1)
out = torch_npu.npu_kv_quant_sparse_flash_attention(
    torch.cat([q, q_rope], -1).npu(), bytes_of_key.npu(), numbers.npu(), chosen.npu(), 0.3, 2, 2, **common
)
check("sparse_int8", out, everything()[0], 1.6e-2)
refused(
    "sparse_float8",
    lambda: torch_npu.npu_kv_quant_sparse_flash_attention(
        q.npu(), bytes_of_key.npu().view(torch.float8_e4m3fn), numbers.npu(), chosen.npu(), 0.3, 2, 2, **common
    ),
)
