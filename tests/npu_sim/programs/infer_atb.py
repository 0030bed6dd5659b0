"""torch_npu's operators of ATB (`torch_npu._npu_…`, `torch_npu.atb`) against loops: prints a line for each case."""

import torch
import torch_npu
from infer_reference import attend, causal, check, paginate, refused, to_fractal

torch.manual_seed(0)
NEAR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def sequences(counts, heads, size, dtype=torch.float16):
    return [torch.randn(count, heads, size).to(dtype) for count in counts]


def first(x):
    return x.transpose(0, 1)


def joined(q, k, v, scale, hidden=None, added=None):
    """The output of all sequences, [T, N, V], and their log-sum-exps [T, N, 1]."""
    done = [
        attend(first(a), first(b), first(c), scale, hidden and hidden[i], added and added[i].expand(a.shape[1], -1, -1))
        for i, (a, b, c) in enumerate(zip(q, k, v, strict=True))
    ]
    return torch.cat([first(out) for out, _ in done]), torch.cat([first(lse) for _, lse in done])


# Decoding from pages.
for dtype in NEAR:
    lengths, order = [5, 20, 33], [7, 1, 4, 0, 3, 2]
    q, k, v = sequences([1] * 3, 4, 32, dtype), sequences(lengths, 2, 32, dtype), sequences(lengths, 2, 16, dtype)
    keys, table = paginate(k, lengths, 16, 8, order)
    values, _ = paginate(v, lengths, 16, 8, order)
    query, contexts = torch.cat(q).npu(), torch.tensor(lengths, dtype=torch.int32)
    expected, _ = joined(q, k, v, 0.2)
    name = str(dtype).split(".")[1]
    out = torch.empty(3, 4, 16, dtype=dtype, device="npu")
    arguments = (query, keys.npu(), values.npu(), 2, 4, 0.2, table.npu(), contexts, out)
    space = torch_npu._npu_paged_attention_get_workspace(*arguments)
    torch_npu._npu_paged_attention(*arguments, workspace=space)
    check(f"paged_{name}", out, expected, NEAR[dtype])
print("workspace", space.dtype == torch.uint8 and space.device.type == "npu")
out.zero_()
torch_npu._npu_paged_attention(*arguments[:7], contexts.npu(), out)
check("paged_lengths_on_npu", out, expected, 1.6e-2)
fractal = [to_fractal(x).flatten(1, 2).npu() for x in (keys, values)]
torch_npu._npu_paged_attention(query, *fractal, 2, 4, 0.2, table.npu(), contexts, out)
check("paged_fractal", out, expected, 1.6e-2)
slopes = torch.randn(4, 1, 40).bfloat16()
torch_npu.atb._npu_paged_attention_v2(
    query, keys.npu(), table.npu(), lengths, value_cache=values.npu(), mask=slopes.npu(), num_kv_heads=2, num_heads=4,
    scale_value=0.2, mask_type=2, out=out,
)  # fmt: skip
biased = [attend(first(q[i]), first(k[i]), first(v[i]), 0.2, None, slopes[..., : lengths[i]])[0] for i in range(3)]
check("paged_v2", out, torch.cat([first(x) for x in biased]), 1.6e-2)
latent, table = paginate([x[:, :1] for x in k], lengths, 16, 8, order)
torch_npu._npu_paged_attention_mla(query, latent.npu(), 1, 4, 0.2, table.npu(), contexts, 16, out)
check("paged_mla", out, joined(q, [x[:, :1] for x in k], [x[:, :1, :16] for x in k], 0.2)[0], 1.6e-2)
refused("paged_int8", lambda: torch_npu._npu_paged_attention(query.to(torch.int8), *arguments[1:]))
refused("paged_page", lambda: torch_npu._npu_paged_attention(*arguments[:6], (table + 9).npu(), contexts, out))

# Several queries for each sequence, from pages.
counts, lengths = [3, 1, 4], [20, 33, 4]
q, k, v = sequences(counts, 4, 32), sequences(lengths, 2, 32), sequences(lengths, 2, 32)
keys, table = paginate(k, lengths, 16, 8, order)
values, _ = paginate(v, lengths, 16, 8, order)
query, contexts, queries = torch.cat(q).npu(), *(torch.tensor(x, dtype=torch.int32) for x in (lengths, counts))
triangles = [causal(len(a), len(b), len(b) - len(a)) for a, b in zip(q, k, strict=True)]
expected, _ = joined(q, k, v, 0.2, triangles)
caches = (keys.npu(), values.npu(), table.npu())
out = torch.zeros_like(query)
rows = torch.zeros(8, 40)
for start, hidden in zip((0, 3, 4), triangles, strict=True):
    rows[start : start + len(hidden), : hidden.shape[1]] = hidden.float() * -10000
torch_npu._npu_paged_attention_splitfuse(
    query=query, key_cache=caches[0], value_cache=caches[1], block_table=caches[2], context_lens=contexts,
    mask=rows.half().npu(), seq_len=queries, num_kv_heads=2, num_heads=4, scale_value=0.2, out=out,
)  # fmt: skip
check("splitfuse", out, expected, 2e-3)
upper = torch.ones(128, 128).triu(1).half()
for name, operator, mask in (
    ("splitfuse_v2", torch_npu._npu_paged_attention_splitfuse_v2, (upper * -10000)[None]),
    ("qlens", torch_npu._npu_flash_attention_qlens, upper),
):
    out.zero_()
    operator(
        query=query, key_cache=caches[0], value_cache=caches[1], block_table=caches[2], mask=mask.npu(),
        seq_len=queries, context_lens=contexts, num_kv_heads=2, num_heads=4, scale_value=0.2, out=out,
    )  # fmt: skip
    check(name, out, expected, 2e-3)
out.zero_()
torch_npu.atb._npu_flash_attention_prefix_v2(
    query, *caches, upper.npu(), counts, lengths, mask_type=3, num_kv_heads=2, num_heads=4, scale_value=0.2, out=out
)
check("prefix_v2", out, expected, 2e-3)
flat = [x.flatten(2) for x in caches[:2]]
encoded = torch_npu.atb.npu_self_attention_prefix_encoder(query, *flat, caches[2], counts, lengths, 4, 0.2, 2)
check("prefix_encoder", encoded, expected, 2e-3)
refused(
    "qlens_mask",
    lambda: torch_npu._npu_flash_attention_qlens(
        query, *caches, torch.zeros(128, 128).half().npu(), queries, contexts, 2, 4, 0.2, out
    ),
)
refused(
    "prefix_alibi",
    lambda: torch_npu.atb._npu_flash_attention_prefix_v2(
        query, *caches, upper.npu(), counts, lengths, mask_type=4, num_kv_heads=2, num_heads=4, out=out
    ),
)

# Whole prompts, one after another.
counts = [5, 9, 2]
q, k, v = sequences(counts, 4, 32), sequences(counts, 2, 32), sequences(counts, 2, 16)
there, lengths = [torch.cat(x).npu() for x in (q, k, v)], torch.tensor(counts, dtype=torch.int32)
out = torch.zeros(16, 4, 16, device="npu").half()
added = torch.randn(9, 9).half()
torch_npu._npu_flash_attention(*there, added.npu(), lengths, 0.2, 4, 2, out)
check("flash", out, joined(q, k, v, 0.2, None, [added[:n, :n] for n in counts])[0], 2e-3)
heads = torch.randn(3, 4, 9, 9).half()
torch_npu.atb._npu_flash_attention_v2(
    *there, counts, mask=heads.npu(), mask_type=2, scale_value=0.2, num_heads=4, num_kv_heads=2, out=out
)
check("flash_v2", out, joined(q, k, v, 0.2, None, [heads[i, :, :n, :n] for i, n in enumerate(counts)])[0], 2e-3)
plain, _ = joined(q, k, v, 0.2)
flat = [x.flatten(1) for x in there]
wide = out.zero_().flatten(1)
torch_npu._npu_flash_attention_unpad(*flat, lengths, 0.2, 4, 2, wide)
check("flash_unpad", wide, plain.flatten(1), 2e-3)
torch_npu._npu_flash_attention_unpad_v2(*there, lengths, 0.2, 4, 2, out=out.zero_())
check("flash_unpad_v2", out, plain, 2e-3)
torch_npu._npu_flash_attention_v3(*there, (upper * -10000).npu(), lengths, 0.2, 4, 2, out=out.zero_())
check("flash_v3", out, joined(q, k, v, 0.2, [causal(n, n, 0) for n in counts])[0], 2e-3)
refused(
    "flash_kernel", lambda: torch_npu._npu_flash_attention_unpad_v2(*there, lengths, 1, 4, 2, kernel_type=1, out=out)
)

# Latent attention.
lengths, order = [7, 40], [3, 1, 0, 5]
nope, rope = sequences([1] * 2, 4, 512), sequences([1] * 2, 4, 64)
latent, k_rope = sequences(lengths, 1, 512), sequences(lengths, 1, 64)
keys, table = paginate(latent, lengths, 16, 6, order)
ropes, _ = paginate(k_rope, lengths, 16, 6, order)
expected, sums = joined(
    [torch.cat(x, -1) for x in zip(nope, rope, strict=True)],
    [torch.cat(x, -1) for x in zip(latent, k_rope, strict=True)],
    latent, 0.04,
)  # fmt: skip
q_nope, q_rope = torch.cat(nope).npu(), torch.cat(rope).npu()
mla = torch_npu.atb.npu_multi_head_latent_attention
check("mla", mla(q_nope, q_rope, keys.npu(), ropes.npu(), table.npu(), lengths, 4, 0.04, 1), expected, 4e-3)
fractal = [to_fractal(x).flatten(1, 2).npu() for x in (keys, ropes)]
out, lse = mla(
    q_nope, q_rope, *fractal, table.npu(), lengths, 4, 0.04, 1, True, calc_type="calc_type_ring", cache_mode="nzcache"
)
check("mla_fractal", out, expected, 4e-3)
check("mla_lse", lse, sums, 4e-3)
refused(
    "mla_int8",
    lambda: mla(q_nope, q_rope, *fractal, table.npu(), lengths, 4, 0.04, 1, cache_mode="int8_nzcache"),
)
counts = [6, 10]
nope, rope = sequences(counts, 2, 128), sequences(counts, 2, 64)
value = sequences(counts, 2, 128)
halves = [[x[: len(x) // 2] for x in part] for part in (nope, rope, value)]
ring = torch_npu.atb.npu_ring_mla
none = torch.zeros(512, 512).half().npu()
query = [torch.cat(x, -1) for x in zip(nope, rope, strict=True)]
both = [torch.cat(nope).npu(), torch.cat(rope).npu()]
lengths = torch.tensor([counts, [3, 5]], dtype=torch.int32)
step = [torch.cat(x).npu() for x in halves]
out, lse = ring(*both, *step, none, lengths, 2, 2, qk_scale=0.07)
key = [torch.cat(x, -1) for x in zip(*halves[:2], strict=True)]
expected, sums = joined(query, key, halves[2], 0.07)
check("ring_first", out, expected, 4e-3)
check("ring_first_lse", lse, sums[..., 0].T, 4e-3)
rest = [[x[len(x) // 2 :] for x in part] for part in (nope, rope, value)]
out, lse = ring(
    *both, *(torch.cat(x).npu() for x in rest), none, lengths, 2, 2, pre_out=out, prev_lse=lse, qk_scale=0.07,
    calc_type="calc_type_default",
)  # fmt: skip
expected, sums = joined(query, query, value, 0.07)
check("ring_merged", out, expected, 4e-3)
check("ring_merged_lse", lse, sums[..., 0].T, 4e-3)
out, _ = ring(*both, *both, torch.cat(value).npu(), none, lengths[0], 2, 2, qk_scale=0.07, mask_type="mask_type_triu")
check("ring_triangle", out, joined(query, query, value, 0.07, [causal(n, n, 0) for n in counts])[0], 4e-3)

# Caches.
key, value = torch.randn(5, 2, 32).half(), torch.randn(5, 2, 16).half()
slots = torch.tensor([3, 40, -1, 17, 63], dtype=torch.int32)
keys, values = torch.zeros(4, 16, 2, 32).half(), torch.zeros(4, 16, 2, 16).half()
for i, slot in enumerate(slots.tolist()):
    if slot >= 0:
        keys[slot // 16, slot % 16], values[slot // 16, slot % 16] = key[i], value[i]
stored = [torch.zeros_like(keys).npu(), torch.zeros_like(values).npu()]
torch_npu._npu_reshape_and_cache(key.npu(), value.npu(), *stored, slots.npu())
check("stored_keys", stored[0], keys, 0)
check("stored_values", stored[1], values, 0)
fractal = [to_fractal(x).flatten(1, 2) for x in (keys, values)]
stored = [torch.zeros_like(x).npu() for x in fractal]
torch_npu._npu_reshape_and_cache(key.npu(), value.npu(), *stored, slots.npu())
check("stored_fractal", stored[0], fractal[0], 0)
check("stored_fractal_values", stored[1], fractal[1], 0)
alone = torch.zeros_like(keys).npu()
torch_npu._npu_reshape_and_cache_siso(key.npu(), alone, slots.npu())
check("stored_alone", alone, keys, 0)
refused("stored_beyond", lambda: torch_npu._npu_reshape_and_cache_siso(key.npu(), alone, (slots + 1).npu()))
refused("stored_dtype", lambda: torch_npu._npu_reshape_and_cache_siso(key.npu().float(), alone, slots.npu()))
lengths = [20, 7]
rows = sequences(lengths, 2, 32)
pages, table = paginate(rows, lengths, 16, 4, [2, 0, 3])
loaded, again = torch_npu.atb.npu_paged_cache_load(
    pages.npu(), pages.npu(), table.npu(), torch.tensor(lengths, dtype=torch.int32).npu()
)
check("loaded", loaded, torch.cat(rows), 0)
check("loaded_values", again, torch.cat(rows), 0)
out = [torch.zeros(11, 2, 32).half().npu() for _ in range(2)]
torch_npu.atb.npu_paged_cache_load(
    pages.npu(), pages.npu(), table.npu(), torch.tensor([0, 4, 11], dtype=torch.int32).npu(),
    seq_starts=torch.tensor([17, 0], dtype=torch.int32).npu(), cumsum=True, key=out[0], value=out[1],
)  # fmt: skip
check("loaded_from", out[0], torch.cat([rows[0][16:20], rows[1]]), 0)

# Rotations, groups of experts, products.
table = torch.randn(50, 32)
positions = torch.tensor([[4, 0, 49]])


def turned(x, neox):
    cos, sin = (part[positions[0]][:, None].double() for part in table.half().chunk(2, -1))
    heads = x.double().unflatten(1, (-1, 32))
    a, b = heads.chunk(2, -1) if neox else (heads[..., ::2], heads[..., 1::2])
    pair = (a * cos - b * sin, b * cos + a * sin)
    return (torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)).flatten(1)


for neox in (True, False):
    q, k = torch.randn(3, 128).half(), torch.randn(3, 64).half()
    here = [q.npu(), k.npu()]
    torch_npu._npu_rotary_embedding(positions.npu(), *here, 32, table.half().npu(), neox)
    check(f"rotary_query_{neox}", here[0], turned(q, neox), 4e-3)
    check(f"rotary_key_{neox}", here[1], turned(k, neox), 4e-3)
refused(
    "rotary_again", lambda: torch_npu._npu_rotary_embedding(positions.npu(), *here, 32, table.half().npu() + 1, True)
)
refused("rotary_part", lambda: torch_npu._npu_rotary_embedding(positions.npu(), *here, 64, table.half().npu(), True))
scores = torch.randn(6, 32).bfloat16()
for best in (1, 2):
    groups = scores.clone().view(6, 8, 4)
    for row in groups:
        value = torch.tensor([group.double().sort(descending=True).values[:best].sum() for group in row])
        row[value.argsort(descending=True)[3:]] = 0
    there = scores.npu()
    torch_npu._npu_group_topk(there, k=3, group_num=8, n=best)
    check(f"group_topk_{best}", there, groups.flatten(1), 0)
refused("group_topk_groups", lambda: torch_npu._npu_group_topk(there, k=3, group_num=5, n=1))
x, weight, total = torch.randn(7, 5).half(), torch.randn(7, 3).half(), torch.randn(5, 3)
here = total.npu()
torch_npu._npu_matmul_add_fp32(x.npu(), weight.npu(), here)
check("matmul_add", here, total.double() + x.double().T @ weight.double(), 1e-5)
refused("matmul_add_half", lambda: torch_npu._npu_matmul_add_fp32(x.npu(), weight.npu(), here.half()))
refused("missing", lambda: torch_npu._npu_quantize_per_tensor(x.npu(), x.npu(), x.npu(), x.npu()))
