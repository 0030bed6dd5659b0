"""npu_fused_infer_attention_score and its relatives against a loop in float64: prints a line for each case."""

import torch
import torch_npu
from infer_reference import attend, causal, check, paginate, refused, to_fractal

torch.manual_seed(0)
fia, fia2 = torch_npu.npu_fused_infer_attention_score, torch_npu.npu_fused_infer_attention_score_v2
triangle = torch.ones(2048, 2048).bool().triu(1).npu()
NEAR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def sequences(counts, heads, size, dtype=torch.float16):
    return [torch.randn(count, heads, size).to(dtype) for count in counts]


def first(x):
    return x.transpose(0, 1)  # [S, N, D] as [N, S, D]


def batched(rows):
    return torch.stack(rows)  # [B, S, N, D]


def same_layouts(x):
    """The layouts of [B, S, N, D]."""
    return {
        "BSH": x.flatten(2),
        "BSND": x,
        "BNSD": x.transpose(1, 2).contiguous(),
        "NBSD": x.permute(2, 0, 1, 3).contiguous(),
        "TND": x.flatten(0, 1),
        "NTD": x.flatten(0, 1).transpose(0, 1).contiguous(),
    }


# Pages: one query for each sequence, in three forms of the cache and two dtypes.
for dtype in (torch.float16, torch.bfloat16):
    lengths, block, heads, groups, size = [5, 32, 17], 16, 4, 2, 32
    q = sequences([1] * 3, heads, size, dtype)
    k, v = sequences(lengths, groups, size, dtype), sequences(lengths, groups, size, dtype)
    order = [6, 1, 4, 0, 3, 2, 5]
    keys, table = paginate(k, lengths, block, 8, order)
    values, _ = paginate(v, lengths, block, 8, order)
    expected = torch.stack(
        [first(attend(first(a), first(b), first(c), 0.2)[0]) for a, b, c in zip(q, k, v, strict=True)]
    )
    options = {
        "actual_seq_lengths_kv": lengths, "block_table": table.npu(), "block_size": block, "num_heads": heads,
        "num_key_value_heads": groups, "scale": 0.2,
    }  # fmt: skip
    query, name = same_layouts(batched(q)), str(dtype).split(".")[1]
    out, lse = fia(query["BSH"].npu(), keys.flatten(2).npu(), values.flatten(2).npu(), input_layout="BSH", **options)
    check(f"pages_bsh_{name}", out, expected.flatten(2), NEAR[dtype])
    print(f"no_lse_{name}", lse.shape == (0,) and lse.dtype == torch.float32)
    head_pages = [x.transpose(1, 2).contiguous().npu() for x in (keys, values)]
    out = fia(query["BNSD"].npu(), *head_pages, input_layout="BNSD", **options)[0]
    check(f"pages_bnsd_{name}", out, expected.transpose(1, 2), NEAR[dtype])
    fractal = [to_fractal(x).npu() for x in (keys, values)]
    out = fia(query["BSND"].npu(), *fractal, input_layout="BSND", **options)[0]
    check(f"pages_fractal_{name}", out, expected, NEAR[dtype])
    incremental = {
        "actual_seq_lengths": lengths, "block_table": table.npu(), "block_size": block, "num_heads": heads,
        "num_key_value_heads": groups, "scale_value": 0.2,
    }  # fmt: skip
    out = torch_npu.npu_incre_flash_attention(
        query["BSH"].npu(), keys.flatten(2).npu(), values.flatten(2).npu(), input_layout="BSH", **incremental
    )
    check(f"incremental_{name}", out, expected.flatten(2), NEAR[dtype])

pages = (query["BSH"].npu(), keys.flatten(2).npu(), values.flatten(2).npu())
refused("page_beyond", lambda: fia(*pages, input_layout="BSH", **{**options, "block_table": (table + 100).npu()}))
refused("pages_without_lengths", lambda: fia(*pages, input_layout="BSH", **{**options, "actual_seq_lengths_kv": None}))
refused("wrong_block_size", lambda: fia(*pages, input_layout="BSH", **{**options, "block_size": 32}))
refused("too_few_pages", lambda: fia(*pages, input_layout="BSH", **{**options, "actual_seq_lengths_kv": [5, 33, 17]}))

# Packed sequences with pages: ends of queries, lengths of keys, a triangle that ends at the last key.
counts, lengths = [3, 1, 4], [20, 9, 4]
q, k, v = sequences(counts, 4, 32), sequences(lengths, 2, 32), sequences(lengths, 2, 32)
keys, table = paginate(k, lengths, 16, 6, [5, 2, 0, 3])
values, _ = paginate(v, lengths, 16, 6, [5, 2, 0, 3])
packed = {
    "actual_seq_lengths": [3, 4, 8], "num_heads": 4, "num_key_value_heads": 2, "scale": 0.3, "sparse_mode": 3,
    "atten_mask": triangle, "softmax_lse_flag": True,
}  # fmt: skip
done = [
    attend(first(a), first(b), first(c), 0.3, causal(len(a), len(b), len(b) - len(a)))
    for a, b, c in zip(q, k, v, strict=True)
]
expected, sums = torch.cat([first(x) for x, _ in done]), torch.cat([first(x) for _, x in done])
in_pages = {**packed, "actual_seq_lengths_kv": lengths, "block_table": table.npu(), "block_size": 16}
out, lse = fia(torch.cat(q).npu(), keys.flatten(2).npu(), values.flatten(2).npu(), input_layout="TND", **in_pages)
check("packed_pages", out, expected, 2e-3)
check("packed_lse", lse, sums, 2e-3)
whole = {**packed, "actual_seq_lengths_kv": [20, 29, 33]}
out = fia(torch.cat(q).npu(), torch.cat(k).npu(), torch.cat(v).npu(), input_layout="TND_NTD", **whole)[0]
check("packed_tnd_ntd", out, first(expected), 2e-3)
turned = [first(torch.cat(x)).contiguous().npu() for x in (q, k, v)]
out, lse = fia(*turned, input_layout="NTD_TND", **whole)
check("packed_ntd_tnd", out, expected, 2e-3)
check("packed_ntd_lse", lse, sums, 2e-3)
check("packed_ntd", fia(*turned, input_layout="NTD", **whole)[0], first(expected), 2e-3)
refused("not_cumulative", lambda: fia(*turned, input_layout="NTD", **{**whole, "actual_seq_lengths": [4, 3, 8]}))

# Latent attention: the rope parts are more dimensions of queries and keys.
q, k, q_rope, k_rope = (
    sequences([2] * 2, 4, 512), sequences([7, 30], 1, 512), sequences([2] * 2, 4, 64), sequences([7, 30], 1, 64)
)  # fmt: skip
tree = torch.tensor([[False, True], [True, False]]).expand(2, 2, 2)


def latent(hidden):
    outs = []
    for i in range(2):
        query, key = torch.cat([q[i], q_rope[i]], -1), torch.cat([k[i], k_rope[i]], -1)
        outs.append(first(attend(first(query), first(key), first(k[i]), 0.04, hidden(len(k[i])))[0]))
    return torch.stack(outs)


keys, table = paginate(k, [7, 30], 16, 4, [3, 1, 0])
ropes, _ = paginate(k_rope, [7, 30], 16, 4, [3, 1, 0])
options = {
    "actual_seq_lengths_kv": [7, 30], "block_table": table.npu(), "block_size": 16, "num_heads": 4,
    "num_key_value_heads": 1, "scale": 0.04,
}  # fmt: skip
query, rope = same_layouts(batched(q)), same_layouts(batched(q_rope))
nz, nz_rope = to_fractal(keys).npu(), to_fractal(ropes).npu()
out = fia(
    query["BSND"].npu(), nz, nz, query_rope=rope["BSND"].npu(), key_rope=nz_rope, input_layout="BSND_NBSD", **options
)[0]
check("latent_fractal", out, latent(lambda n: None).permute(2, 0, 1, 3), 4e-3)
flat, flat_rope = keys.flatten(2).npu(), ropes.flatten(2).npu()
modern = {"actual_seq_kvlen": [7, 30], "softmax_scale": 0.04, "num_query_heads": 4, "num_key_value_heads": 1}
modern |= {"block_table": table.npu(), "block_size": 16}
out = fia2(
    query["BNSD"].npu(), flat, flat, query_rope=rope["BNSD"].npu(), key_rope=flat_rope, input_layout="BNSD",
    sparse_mode=3, atten_mask=triangle, **modern,
)[0]  # fmt: skip
check("latent_causal", out, latent(lambda n: causal(2, n, n - 2)).transpose(1, 2), 4e-3)
out = fia2(
    query["BSH"].npu(), flat, flat, query_rope=rope["BSH"].npu(), key_rope=flat_rope, input_layout="BSH",
    sparse_mode=9, atten_mask=tree.contiguous().npu(), **modern,
)[0]  # fmt: skip
check("latent_tree", out, latent(lambda n: torch.cat([torch.zeros(2, n - 2).bool(), tree[0]], 1)).flatten(2), 4e-3)
refused("half_rope", lambda: fia2(query["BSH"].npu(), flat, flat, key_rope=flat_rope, input_layout="BSH", **modern))

# Layouts of the output, masks, position biases.
q, k, v = sequences([5] * 2, 4, 16), sequences([9] * 2, 2, 16), sequences([9] * 2, 2, 16)
query, key, value = (same_layouts(batched(x)) for x in (q, k, v))
plain = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.25}


def reference(hidden=None, added=None, keys=(9, 9), queries=(5, 5)):
    outs, sums = [], []
    for i in range(2):
        own = None if hidden is None else hidden[i]
        bias = None if added is None else added[i]
        out, lse = attend(first(q[i][: queries[i]]), first(k[i][: keys[i]]), first(v[i][: keys[i]]), 0.25, own, bias)
        outs.append(torch.nn.functional.pad(first(out), (0, 0, 0, 0, 0, 5 - queries[i])))
        sums.append(lse)
    return torch.stack(outs), sums


expected = same_layouts(reference()[0])
for layout in ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"):
    inside, outside = layout.split("_")[0], layout.split("_")[-1]
    out = fia(query[inside].npu(), key[inside].npu(), value[inside].npu(), input_layout=layout, **plain)[0]
    check(f"layout_{layout}", out, expected[outside], 2e-3)
here = [x["BSND"].npu() for x in (query, key, value)]
mask = torch.rand(2, 1, 5, 9) > 0.6
mask[..., 0] = False
wide = {**plain, "input_layout": "BSND"}
out = fia(*here, atten_mask=mask.npu(), sparse_mode=1, **wide)[0]
check("mask_each", out, reference([mask[0, 0], mask[1, 0]])[0], 2e-3)
padded = torch.ones(1, 16, 16, dtype=torch.int8)
padded[:, :5, :9] = mask[0].to(torch.int8)
check("mask_padded", fia(*here, atten_mask=padded.npu(), **wide)[0], reference([mask[0, 0]] * 2)[0], 2e-3)
distance = torch.arange(9)[None] - torch.arange(5)[:, None]
band = mask[0, 0] | (distance > 2) | (distance < -1)
out = fia(*here, atten_mask=mask[0].npu(), pre_tokens=1, next_tokens=2, **wide)[0]
check("mask_and_band", out, reference([band] * 2)[0], 2e-3)
for mode, hidden in ((2, causal(5, 9, 0)), (3, causal(5, 9, 4)), (4, (distance > 5) | (distance < 3))):
    out = fia(*here, atten_mask=triangle, sparse_mode=mode, pre_tokens=1, next_tokens=1, **wide)[0]
    check(f"mode_{mode}", out, reference([hidden] * 2)[0], 2e-3)
full = torch.zeros(1, 5, 9).bool()
full[:, 2] = True
out, lse = fia(*here, atten_mask=full.npu(), softmax_lse_flag=True, sparse_mode=1, **wide)
blind, sums = reference([full[0]] * 2)
check("blind_row", out, blind, 2e-3)
check("blind_lse", lse, torch.stack(sums), 2e-3)
bias = torch.randn(2, 4, 5, 9).half()
check("pse_shift", fia(*here, pse_shift=bias.npu(), **wide)[0], reference(added=bias)[0], 2e-3)
short = {"actual_seq_lengths": [5, 2], "actual_seq_lengths_kv": [4, 9]}
check("short", fia(*here, **short, **wide)[0], reference(keys=(4, 9), queries=(5, 2))[0], 2e-3)
check("no_keys", fia(*here, actual_seq_lengths_kv=[0], **wide)[0], torch.zeros(2, 5, 4, 16), 0)
one = [same_layouts(batched([x[:1] for x in q]))["BNSD"].npu(), key["BNSD"].npu(), value["BNSD"].npu()]
row = torch.rand(2, 9) > 0.5
row[:, 0] = False
single = torch.stack([attend(first(q[i][:1]), first(k[i]), first(v[i]), 0.25, row[i][None])[0] for i in range(2)])
check("one_query_mask", fia(*one, atten_mask=row.npu(), input_layout="BNSD", **plain)[0], single, 2e-3)
prompt = torch_npu.npu_prompt_flash_attention(
    *here, num_heads=4, num_key_value_heads=2, scale_value=0.25, input_layout="BSND", pse_shift=bias.npu(),
    atten_mask=mask[:, 0].npu(), sparse_mode=1,
)  # fmt: skip
check("prompt", prompt, reference([mask[0, 0], mask[1, 0]], bias)[0], 2e-3)

# A prefix that all sequences share, and sequences that end where the tensor ends.
prefix_k, prefix_v = sequences([6], 2, 16)[0], sequences([6], 2, 16)[0]
joined = [
    attend(first(q[i]), first(torch.cat([prefix_k[:4], k[i]])), first(torch.cat([prefix_v[:4], v[i]])), 0.25)[0]
    for i in range(2)
]
out = fia(
    *here, key_shared_prefix=prefix_k[None].npu(), value_shared_prefix=prefix_v[None].npu(),
    actual_shared_prefix_len=[4], **wide,
)[0]  # fmt: skip
check("prefix", out, torch.stack([first(x) for x in joined]), 2e-3)
out = fia(
    *here, actual_seq_lengths=[3, 2], actual_seq_lengths_kv=[5, 7], query_padding_size=torch.tensor([1]).npu(),
    kv_padding_size=torch.tensor([2]).npu(), **wide,
)[0]  # fmt: skip
left = torch.zeros(2, 5, 4, 16, dtype=torch.float64)
left[0, 1:4] = first(attend(first(q[0][1:4]), first(k[0][2:7]), first(v[0][2:7]), 0.25)[0])
left[1, 2:4] = first(attend(first(q[1][2:4]), first(k[1][:7]), first(v[1][:7]), 0.25)[0])
check("left_padding", out, left, 2e-3)
out = torch_npu.npu_incre_flash_attention(
    *one, actual_seq_lengths=[5, 9], kv_padding_size=torch.tensor([2]).npu(), num_heads=4, num_key_value_heads=2,
    scale_value=0.25, input_layout="BNSD",
)  # fmt: skip
last = torch.stack([attend(first(q[0][:1]), first(k[0][2:7]), first(v[0][2:7]), 0.25)[0], torch.zeros(4, 1, 16)])
check("left_padding_one", out, last, 2e-3)

# The second version: sinks, results that the caller made, workspaces.
sink = torch.randn(4).bfloat16()
q, k, v = (sequences([n], h, 16, torch.bfloat16)[0] for n, h in ((6, 4), (8, 2), (8, 2)))
again = {
    "actual_seq_qlen": [6], "actual_seq_kvlen": [8], "num_query_heads": 4, "num_key_value_heads": 2,
    "softmax_scale": 0.25, "input_layout": "TND", "return_softmax_lse": True,
}  # fmt: skip
there = [x.npu() for x in (q, k, v)]
with_sink, sums = attend(first(q), first(k), first(v), 0.25, sink=sink)
out, lse = fia2(*there, learnable_sink=sink.npu(), **again)
check("sink", out, first(with_sink), 1.6e-2)
check("sink_lse", lse, first(sums), 1e-2)
space = torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace(*there, **again)
made = torch_npu._npu_fused_infer_attention_score_v2_infer_output(
    there[0], there[2], input_layout="TND", num_query_heads=4, num_key_value_heads=2, return_softmax_lse=True
)
print("made", space.dtype == torch.bfloat16 and made[0].shape == (6, 4, 16) and made[1].shape == (6, 4, 1))
without, sums = attend(first(q), first(k), first(v), 0.25)
found = fia2.out(*there, workspace=space, out=list(made), **again)
check("out", made[0], first(without), 1.6e-2)
check("out_lse", made[1], first(sums), 1e-2)
print("out_is_made", found[0].data_ptr() == made[0].data_ptr() and found[1].data_ptr() == made[1].data_ptr())
old = torch_npu._npu_fused_infer_attention_score_infer_output(*here[::2], input_layout="BSND", num_heads=4)
space = torch_npu._npu_fused_infer_attention_score_get_max_workspace(*here, **wide)
fia.out(*here, workspace=space, out=list(old), **wide)
check("out_first", old[0], expected["BSND"], 2e-3)
small = [torch.empty(2, device="npu").half(), old[1]]
refused("out_shape", lambda: fia.out(*here, out=small, **wide))

refused("post_quantised", lambda: fia(*here, quant_scale2=torch.ones(1).npu(), **wide))
refused("dequantised", lambda: fia2(*there, dequant_scale_key=torch.ones(1).npu(), **again))
refused("int8", lambda: fia(*(x.to(torch.int8) for x in here), **wide))
refused("layout", lambda: fia(*here, input_layout="SBH", **plain))
refused("dims", lambda: fia(*here, input_layout="BSH", **plain))
refused("mode_5", lambda: fia(*here, sparse_mode=5, atten_mask=triangle, **wide))
refused("mode_3_alone", lambda: fia(*here, sparse_mode=3, **wide))
refused("other_mask", lambda: fia(*here, sparse_mode=3, atten_mask=torch.zeros_like(triangle), **wide))
refused("small_mask", lambda: fia(*here, sparse_mode=2, atten_mask=full.npu(), **wide))
refused("prefix_alone", lambda: fia(*here, key_shared_prefix=prefix_k[None].npu(), **wide))
refused("heads", lambda: fia(*here, **{**wide, "num_heads": 8}))
refused("many_queries", lambda: torch_npu.npu_incre_flash_attention(*here, num_heads=4, input_layout="BSND"))
