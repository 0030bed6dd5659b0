"""Caches, rotations, filters, merged attention of torch_npu against loops: prints a line for each case."""

import math

import torch
import torch_npu
from infer_reference import check, refused, to_fractal

torch.manual_seed(0)


def stored(rows, slots, pages, block):
    cache = torch.zeros(pages, block, *rows.shape[1:]).to(rows.dtype)
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            cache[slot // block, slot % block] = row
    return cache


# Slots of pages.
slots = [3, 40, -1, 17, 63]
for dtype in (torch.float16, torch.int8, torch.float32):
    key, value = (torch.randint(-99, 99, (5, 2, size)).to(dtype) for size in (32, 64))
    name, width = str(dtype).split(".")[1], 32 if dtype == torch.int8 else 16
    expected = [stored(x, slots, 4, 16) for x in (key, value)]
    index = torch.tensor(slots, dtype=torch.int32 if dtype == torch.int8 else torch.int64).npu()
    caches = [torch.zeros_like(x).npu() for x in expected]
    for mode in ("Norm", None):
        torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *caches, index, cache_mode=mode)
    check(f"scattered_{name}", caches[0], expected[0], 0)
    check(f"scattered_values_{name}", caches[1], expected[1], 0)
    fractal = [to_fractal(x, width).flatten(1, 2) for x in expected]
    caches = [torch.zeros_like(x).npu() for x in fractal]
    torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *caches, index)
    check(f"scattered_fractal_{name}", caches[0], fractal[0], 0)
    check(f"scattered_fractal_values_{name}", caches[1], fractal[1], 0)
before = [x.clone() for x in caches]
made = torch_npu.npu_scatter_pa_kv_cache_functional((key + 1).npu(), value.npu(), *caches, index)
check("functional", made[0], to_fractal(stored(key + 1, slots, 4, 16)).flatten(1, 2), 0)
print("functional_keeps", all(torch.equal(a, b) for a, b in zip(before, caches, strict=True)))
cache = torch.zeros(4, 16, 2, 32).npu()
returned = torch_npu.npu_scatter_pa_cache(key.npu(), index, key_cache=cache)
check("scattered_one", cache, stored(key, slots, 4, 16), 0)
print("scattered_one_returned", returned.data_ptr() == cache.data_ptr())
refused("slot_beyond", lambda: torch_npu.npu_scatter_pa_cache(key.npu(), index + 1, key_cache=cache))
refused("slot_count", lambda: torch_npu.npu_scatter_pa_cache(key.npu(), index[:3], key_cache=cache))
refused(
    "compressed",
    lambda: torch_npu.npu_scatter_pa_cache(key.npu(), index, key_cache=cache, compress_lens=index, seq_lens=index),
)
refused(
    "cache_mode", lambda: torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *caches, index, cache_mode="NZ")
)

# Tokens read back from pages; page 9 and places beyond the table give zeros.
pages = torch.randn(6, 16, 2, 32).half()
table = torch.tensor([[4, 0, 9], [2, 5, 1]], dtype=torch.int32)


def gathered(lengths, starts):
    rows = []
    for i, length in enumerate(lengths):
        for t in range(length):
            column = starts[i] // 16 + t // 16
            page = int(table[i, column]) if column < 3 else 9
            rows.append(pages[page, t % 16] if page < 6 else torch.zeros(2, 32).half())
    return torch.stack(rows)


expected = gathered([40, 20], [0, 33])
out = [torch.ones(60, 2, 32).half().npu() for _ in range(2)]
starts = torch.tensor([0, 33], dtype=torch.int32).npu()
lengths = torch.tensor([40, 20], dtype=torch.int32).npu()
torch_npu.npu_gather_pa_kv_cache(pages.npu(), pages.npu(), table.npu(), lengths, *out, seq_offset=starts)
check("gathered", out[0], expected, 0)
check("gathered_values", out[1], expected, 0)
fractal = to_fractal(pages).flatten(1, 2).npu()
ends = torch.tensor([0, 40, 60], dtype=torch.int32).npu()
made = torch_npu.npu_gather_pa_kv_cache_functional(
    fractal, fractal, table.npu(), ends, *(torch.ones_like(x) for x in out), seq_offset=starts, is_seq_lens_cumsum=True
)
check("gathered_fractal", made[1], expected, 0)

# Updates by index.
x, updates = torch.randn(4, 5, 6).half(), torch.randn(3, 6).half()
index = torch.tensor([[0, 1], [3, 4], [2, 0]])
expected = x.clone()
for place, row in zip(index.tolist(), updates, strict=True):
    expected[tuple(place)] = row
there = x.npu()
check("scatter_nd", torch_npu.npu_scatter_nd_update(there, index.int().npu(), updates.npu()), expected, 0)
check("scatter_nd_keeps", there, x, 0)
torch_npu.npu_scatter_nd_update_(there, index.npu(), updates.npu())
check("scatter_nd_", there, expected, 0)
refused("scatter_nd_shape", lambda: torch_npu.npu_scatter_nd_update_(there, index.npu(), updates[:, :2].npu()))
refused("scatter_nd_beyond", lambda: torch_npu.npu_scatter_nd_update_(there, index.npu() + 3, updates.npu()))
refused("scatter_nd_negative", lambda: torch_npu.npu_scatter_nd_update_(there, index.npu() - 1, updates.npu()))
data, rows, index = torch.randn(3, 2, 9, 4), torch.randn(3, 2, 2, 4), [4, 0, 7]
expected = data.clone()
for i, start in enumerate(index):
    expected[i, :, start : start + 2] = rows[i]
there = data.npu()
check("scatter_update", torch_npu.scatter_update(there, torch.tensor(index).npu(), rows.npu(), -2), expected, 0)
check("scatter_update_keeps", there, data, 0)
torch_npu.scatter_update_(there, torch.tensor(index, dtype=torch.int32).npu(), rows.npu(), 2)
check("scatter_update_", there, expected, 0)
refused("scatter_update_axis", lambda: torch_npu.scatter_update_(there, torch.tensor(index).npu(), rows.npu(), 0))
refused("scatter_update_2d", lambda: torch_npu.scatter_update_(there, torch.tensor([index]).npu(), rows.npu(), 2))
refused("scatter_update_end", lambda: torch_npu.scatter_update_(there, torch.tensor([8, 0, 0]).npu(), rows.npu(), 2))
variables = [torch.zeros(2, 9, 4).npu() for _ in range(3)]
listed = torch.zeros(3, 2, 9, 4)
for i in (0, 2):
    listed[i, :, index[i] : index[i] + 2] = rows[i]
arguments = (torch.tensor(index).npu(), rows.npu(), torch.tensor([1, 0, 1], dtype=torch.uint8).npu())
check("scatter_list", torch.stack(torch_npu.npu_scatter_list(variables, *arguments)), listed, 0)
check("scatter_list_keeps", torch.stack(variables), torch.zeros_like(listed), 0)
torch_npu.npu_scatter_list_(variables, *arguments)
check("scatter_list_", torch.stack(variables), listed, 0)

# Norm, rotation and cache in one.
kv, gamma = torch.randn(2, 1, 20, 576).bfloat16(), torch.randn(512).bfloat16()
angle = torch.randn(2, 1, 20, 64)
cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()


def rotated(x):
    pairs = x.double()
    pairs = torch.cat([pairs[..., ::2], pairs[..., 1::2]], -1)
    half = x.shape[-1] // 2
    return pairs * cos.double() + torch.cat([-pairs[..., half:], pairs[..., :half]], -1) * sin.double()


def normed(x):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double()


latent, rope = normed(kv[..., :512]), rotated(kv[..., 512:])
arguments = [x.npu() for x in (kv, gamma, cos, sin)]
order = torch.randperm(64)[:40]
pages_of = {"PA_BNSD": lambda x: stored(x.reshape(40, 1, -1), order.tolist(), 4, 16)}
for mode in ("PA", "PA_BNSD", "PA_NZ"):
    caches = [torch.zeros(4, 16, 1, size).bfloat16().npu() for size in (64, 512)]
    out = torch_npu.npu_kv_rmsnorm_rope_cache(*arguments, order.npu(), *caches, cache_mode=mode, is_output_kv=True)
    expected = [pages_of["PA_BNSD"](x) for x in (rope, latent)]
    if mode == "PA_NZ":
        expected = [to_fractal(x).view(x.shape) for x in expected]
    check(f"normed_key_{mode}", out[0], expected[0], 1.6e-2)
    check(f"normed_latent_{mode}", out[1], expected[1], 1.6e-2)
check("normed_inside", caches[0], expected[0], 1.6e-2)
check("normed_out_key", out[2], rope, 1.6e-2)
check("normed_out_latent", out[3], latent, 1.6e-2)
blocks = torch.tensor([48, 16, 0, 32])  # two pages for each sequence
whole = [int(blocks[i * 2 + t // 16]) + t % 16 for i in range(2) for t in range(20)]
caches = [torch.zeros(4, 16, 1, size).bfloat16().npu() for size in (64, 512)]
made = torch_npu.npu_kv_rmsnorm_rope_cache_v2(*arguments, blocks.npu(), *caches, cache_mode="PA_BLK_BNSD")
check("normed_blocks", caches[1], stored(latent.reshape(40, 1, -1), whole, 4, 16), 1.6e-2)
print("normed_v2", len(made) == 2 and made[0].shape == rope.shape)
lines = torch.stack([torch.randperm(32)[:20] for _ in range(2)])
caches = [torch.zeros(2, 1, 32, size).bfloat16().npu() for size in (64, 512)]
made = torch_npu.npu_kv_rmsnorm_rope_cache_v2_functional(*arguments, lines.npu(), *caches, cache_mode="Norm")
expected = torch.zeros(2, 1, 32, 512, dtype=torch.float64)
for i in range(2):
    expected[i, 0, lines[i]] = latent[i, 0]
check("normed_lines", made[3], expected, 1.6e-2)
print("normed_functional_keeps", not caches[1].any().item())
scales = [torch.rand(size) * 20 for size in (64, 512)]
caches = [torch.zeros(4, 16, 1, size, dtype=torch.int8).npu() for size in (64, 512)]
torch_npu.npu_kv_rmsnorm_rope_cache(
    *arguments, order.npu(), *caches, cache_mode="PA", k_rope_scale=scales[0].npu(), c_kv_scale=scales[1].npu()
)
expected = pages_of["PA_BNSD"]((latent * scales[1].double()).round().clamp(-128, 127))
check("normed_int8", caches[1] / 64, expected / 64, 1.6e-2)  # roundings differ by one
refused(
    "normed_offset",
    lambda: torch_npu.npu_kv_rmsnorm_rope_cache(
        *arguments, order.npu(), *caches, cache_mode="PA", k_rope_offset=scales[0].npu()
    ),
)
refused("normed_mode", lambda: torch_npu.npu_kv_rmsnorm_rope_cache(*arguments, order.npu(), *caches, cache_mode="ND"))

# Rotations.
x, angle = torch.randn(2, 3, 5, 64).half(), torch.randn(2, 1, 5, 64)
cos, sin = angle.cos().half(), angle.sin().half()
check("interleave_rope", torch_npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu()), rotated(x), 4e-3)
refused("interleave_size", lambda: torch_npu.npu_interleave_rope(x[..., :32].npu(), cos.npu(), sin.npu()))
table = torch.randn(20, 64)
query, key = torch.randn(7, 4 * 96), torch.randn(7, 2 * 96)
rows = torch.randint(0, 20, (4, 7))


def turned(x, cos, sin, half):
    heads = x.double().unflatten(1, (-1, 96)).clone()
    part = heads[..., :64]
    a, b = part.chunk(2, -1) if half else (part[..., ::2], part[..., 1::2])
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    pair = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat([torch.cat(pair, -1) if half else torch.stack(pair, -1).flatten(-2), heads[..., 64:]], -1).flatten(
        1
    )


def columns(half, sections, interleaved):
    """The columns of cos or sin: whose row of positions each of the 32 comes from."""
    owner = [i for i, count in enumerate(sections) for _ in range(count)]
    if interleaved:
        owner = [c % 3 if c % 3 and c < sections[1] * 3 else 0 for c in range(32)]
    return torch.stack([table[rows[i]][:, half * 32 + c] for c, i in enumerate(owner)], 1)


for sections, mode in (([12, 10, 10], "default"), ([12, 10, 10], "interleave"), ([8, 8, 8, 8], "default")):
    cos, sin = (columns(half, sections, mode == "interleave") for half in range(2))
    for style in ("half", "interleave"):
        out = torch_npu.npu_mrope(
            rows[: len(sections)].npu(), query.npu(), key.npu(), table.npu(), 96, mrope_section=sections,
            rotary_mode=style, cache_mode=mode,
        )  # fmt: skip
        check(f"mrope_{len(sections)}_{mode}_{style}", out[0], turned(query, cos, sin, style == "half"), 1e-5)
        check(f"mrope_key_{len(sections)}_{mode}_{style}", out[1], turned(key, cos, sin, style == "half"), 1e-5)
out = torch_npu.npu_mrope(rows[0].npu(), query.npu(), key.npu(), table.npu(), 96, mrope_section=[0, 0, 0])
check("mrope_plain", out[0], turned(query, *table[rows[0]].chunk(2, -1), True), 1e-5)
refused(
    "mrope_mode",
    lambda: torch_npu.npu_mrope(rows[0].npu(), query.npu(), key.npu(), table.npu(), 96, rotary_mode="interleaved"),
)
refused(
    "mrope_sections",
    lambda: torch_npu.npu_mrope(rows[:3].npu(), query.npu(), key.npu(), table.npu(), 96, mrope_section=[8, 8, 8]),
)

# Filters of logits.
logits, p, k = torch.randn(5, 30), torch.tensor([0.1, 0.5, 0.9, 1.0, 0.0]), torch.tensor([30, 7, 1, 12, 5])


def kept(row, p, k):
    value, order = row.double().sort(stable=True)
    if k is not None:
        value[value < value[len(value) - k]] = -math.inf
    if p is not None:
        hidden = torch.softmax(value, 0).cumsum(0) <= 1 - p
        hidden[-1] = False
        value[hidden] = -math.inf
    return torch.empty_like(value).scatter_(0, order, value)


for name, top_p, top_k in (("both", p, k), ("p", p, None), ("k", None, k)):
    out = torch_npu.npu_top_k_top_p(
        logits.npu(), None if top_p is None else top_p.npu(), None if top_k is None else top_k.int().npu()
    )
    expected = [
        kept(logits[i], None if top_p is None else float(p[i]), None if top_k is None else int(k[i])) for i in range(5)
    ]
    check(f"top_{name}", out, torch.stack(expected), 1e-6)
refused("top_k_beyond", lambda: torch_npu.npu_top_k_top_p(logits.npu(), p.npu(), k.int().npu() + 1))

# Attention over parts of the keys, merged.
for dtype in (torch.float32, torch.bfloat16):
    lse, parts = [torch.randn(6) * 3 for _ in range(3)], [torch.randn(6, 16).to(dtype) for _ in range(3)]
    total = torch.logsumexp(torch.stack(lse).double(), 0)
    merged = sum(a.double() * (b.double() - total).exp()[:, None] for a, b in zip(parts, lse, strict=True))
    there = [x.npu() for x in lse], [x.npu() for x in parts]
    out, all_lse = torch_npu.npu_attention_update(*there, 1)
    check(f"merged_{dtype}", out, merged, 1e-5 if dtype == torch.float32 else 1.6e-2)
    check(f"merged_lse_{dtype}", all_lse, total, 1e-5)
print("merged_alone", torch_npu.npu_attention_update(*there, 0)[1] is None)
refused("merged_counts", lambda: torch_npu.npu_attention_update(there[0][:2], there[1], 0))
