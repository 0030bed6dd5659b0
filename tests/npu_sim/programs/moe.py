"""Routing operators of torch_npu for mixture of experts against loops in float64: prints one JSON object."""

import json

import torch
import torch_npu

torch.manual_seed(3)
found = {}
UNWRITTEN = -(2**31)


def close(name, pairs, tolerance=1e-5):
    for made, expected in pairs:
        made, expected = made.detach().cpu().double(), expected.detach().double()
        if made.shape != expected.shape or not torch.allclose(made, expected, rtol=tolerance, atol=tolerance):
            found[name] = [list(made.shape), list(expected.shape), made.flatten()[:6].tolist()]
            return
    found.setdefault(name, True)


def refused(name, call):
    try:
        call()
        found[name] = "accepted"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32)


# --- gates ----------------------------------------------------------------------------------------------------------


def gate(x, k, bias, groups, kept, mode, norm_type, factor=1.0, eps=1e-20):
    """Rows one by one, with Python's sort (stable: the first of equals)."""
    weights, chosen = [], []
    scores = torch.sigmoid(x) if norm_type == 1 else torch.softmax(x, -1)
    for row, plain in zip(scores, scores.detach(), strict=True):
        value = [
            float(a) + (float(b) if bias is not None else 0.0)
            for a, b in zip(plain, plain if bias is None else bias, strict=True)
        ]
        each = len(value) // groups
        worth = []
        for group in range(groups):
            ordered = sorted(value[group * each : (group + 1) * each], reverse=True)
            worth.append(sum(ordered[: mode + 1]))
        best = sorted(range(groups), key=lambda g: -worth[g])[:kept]
        experts = [e for e in range(len(value)) if e // each in best]
        picked = sorted(experts, key=lambda e: -value[e])[:k]
        mine = torch.stack([row[e] for e in picked])
        weights.append((mine / (mine.sum() + eps) if norm_type == 1 else mine) * factor)
        chosen.append(picked)
    return torch.stack(weights), torch.tensor(chosen), scores


x, bias = torch.randn(7, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64) / 4
for norm_type in (0, 1):
    for groups, kept, mode in ((1, 1, 0), (4, 2, 0), (4, 2, 1), (6, 3, 1)):
        for with_bias in (False, True):
            call = dict(k_group=kept, group_count=groups, group_select_mode=mode, norm_type=norm_type, out_flag=True)
            made = torch_npu.npu_moe_gating_top_k(
                x.float().npu(), 5, bias=bias.float().npu() if with_bias else None, routed_scaling_factor=2.5, **call
            )
            expected = gate(x, 5, bias if with_bias else None, groups, kept, mode, norm_type, 2.5)
            close(f"gate {norm_type} {groups} {mode} {with_bias}", zip(made, expected, strict=True))
low = torch_npu.npu_moe_gating_top_k(x.bfloat16().npu(), 3, norm_type=1)
found["gate dtypes"] = [str(a.dtype) for a in low]
found["gate out is not written"] = bool(low[2].isnan().all())
ties = torch_npu.npu_moe_gating_top_k(torch.zeros(1, 8).npu(), 3, norm_type=1)
found["gate ties"] = ties[1].tolist()
here, there = x.clone().requires_grad_(), x.float().npu().requires_grad_()
made = torch_npu.npu_moe_gating_top_k(there, 5, norm_type=1, out_flag=True, routed_scaling_factor=2.5)
up = torch.randn(7, 5, dtype=torch.float64)
made[0].backward(up.float().npu())
gate(here, 5, None, 1, 1, 0, 1, 2.5)[0].backward(up)
close("gate gradient", [(there.grad, here.grad)])
wide = x.float().npu()
refused("gate groups", lambda: torch_npu.npu_moe_gating_top_k(wide, 2, group_count=5))
refused("gate k", lambda: torch_npu.npu_moe_gating_top_k(wide, 7, k_group=1, group_count=4))
refused("gate renorm", lambda: torch_npu.npu_moe_gating_top_k(wide, 2, renorm=1))
refused(
    "gate hash",
    lambda: torch_npu.npu_moe_gating_top_k(wide, 2, input_ids=int32([0] * 7).npu(), tid2eid=int32([[0, 1]]).npu()),
)
refused("gate dtype", lambda: torch_npu.npu_moe_gating_top_k(wide.int(), 2))


def softmax_gate(x, k, finished, renorm):
    flat = x.flatten(0, -2)
    weights, chosen = [], []
    for i, row in enumerate(flat):
        scores = torch.softmax(row, 0)
        picked = sorted(range(len(row)), key=lambda e: -float(row[e]))[:k]
        weights.append(torch.softmax(row[picked], 0) if renorm else scores[picked])
        chosen.append([len(row)] * k if finished is not None and finished.flatten()[i] else picked)
    shape = (*x.shape[:-1], k)
    places = torch.tensor([[i + len(flat) * j for j in range(k)] for i in range(len(flat))])
    return torch.stack(weights).view(shape), torch.tensor(chosen).view(shape), places.view(shape)


for shape in ((9, 11), (2, 5, 11)):
    x = torch.randn(shape, dtype=torch.float64)
    for finished in (None, torch.rand(shape[:-1]) < 0.4):
        mask = None if finished is None else finished.npu()
        made = torch_npu.npu_moe_gating_top_k_softmax(x.float().npu(), mask, 4)
        close(
            f"softmax gate {len(shape)} {mask is not None}", zip(made, softmax_gate(x, 4, finished, False), strict=True)
        )
        for renorm in (0, 1):
            made = torch_npu.npu_moe_gating_top_k_softmax_v2(
                x.float().npu(), k=4, finished=mask, renorm=renorm, output_softmax=True
            )
            expected = softmax_gate(x, 4, finished, renorm == 1)[:2]
            whole = torch.softmax(x, -1) if renorm == 0 else torch.empty(0)
            close(
                f"softmax gate v2 {len(shape)} {mask is not None} {renorm}", zip(made, (*expected, whole), strict=True)
            )
refused("softmax k", lambda: torch_npu.npu_moe_gating_top_k_softmax(wide, None, 25))
refused("softmax finished", lambda: torch_npu.npu_moe_gating_top_k_softmax(wide, torch.ones(7).npu(), 2))

experts = sorted(torch.randint(0, 6, (20,)).tolist())
made = torch_npu.npu_moe_compute_expert_tokens(int32(experts).npu(), 8)
close("expert tokens", [(made, torch.tensor([sum(e <= i for e in experts) for i in range(8)]))])
found["expert tokens dtype"] = str(made.dtype)
refused("expert tokens number", lambda: torch_npu.npu_moe_compute_expert_tokens(int32(experts).npu(), 0))

# --- rows by expert -------------------------------------------------------------------------------------------------


def sort_by_expert(idx, start, end):
    """(place in idx, expert) of the active choices, by expert."""
    flat = [(int(e), i) for i, e in enumerate(idx.flatten().tolist()) if start <= e < end]
    return [(i, e) for e, i in sorted(flat)]


tokens, idx = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 5, (8, 3))
rows = torch.arange(24).view(3, 8).t().contiguous()
for active in (8, 5, 20):
    made = torch_npu.npu_moe_init_routing(tokens.float().npu(), int32(rows).npu(), int32(idx).npu(), active)
    order = sort_by_expert(idx, 0, 5)
    sources = [int(rows.flatten()[i]) for i, _ in order]
    places = torch.empty(24, dtype=torch.long)
    for i, source in enumerate(sources):
        places[source] = i
    kept = [source % 8 for source in sources][: min(active, 8) * 3]
    close(f"init {active}", zip(made, (tokens[kept], places, torch.tensor([e for _, e in order])), strict=True))

init = torch_npu.npu_moe_init_routing_v2
device, choice = tokens.float().npu(), int32(idx).npu()
weight = torch.rand(8)


def dropless(start, end, active_num, row_idx_type):
    order = sort_by_expert(idx, start, end)
    if row_idx_type == 1:
        behind = sorted((int(e), i) for i, e in enumerate(idx.flatten()) if e >= end)
        before = [i for i, e in enumerate(idx.flatten()) if e < start]
        places = [i for i, _ in order] + [i for _, i in behind] + before
    else:
        places = [-1] * 24
        for row, (i, _) in enumerate(order):
            places[i] = row
    kept = order[:active_num] if active_num > 0 else order
    rest = (min(active_num, 24) if active_num > 0 else 24) - len(kept)
    return kept, rest, torch.tensor(places)


def same(name, made, kept, rest, values):
    """The first rows as expected, the others not written."""
    close(name, [(made[: len(kept)], values)])
    if made.shape[0] != len(kept) + rest or not made[len(kept) :].isnan().all():
        found[name] = [list(made.shape), rest]


for start, end in ((0, 5), (1, 4), (2, 3)):
    for active_num in (-1, 0, 7, 100):
        for row_idx_type in (0, 1):
            name = f"init v2 {start} {end} {active_num} {row_idx_type}"
            kept, rest, places = dropless(start, end, active_num, row_idx_type)
            made = init(
                device, choice, scale=weight.npu(), active_num=active_num, expert_num=5, expert_tokens_num_type=1,
                expert_tokens_num_flag=True, active_expert_range=[start, end], row_idx_type=row_idx_type,
            )  # fmt: skip
            same(name, made[0], kept, rest, tokens[[i // 3 for i, _ in kept]])
            same(name, made[3], kept, rest, weight[[i // 3 for i, _ in kept]])
            counts = torch.tensor([int((idx == e).sum()) for e in range(start, end)])
            close(name, [(made[1], places), (made[2], counts)])
counts = torch.tensor([int((idx == e).sum()) for e in range(5)])
number = dict(expert_num=5, expert_tokens_num_flag=True)
close("counts cumulated", [(init(device, choice, **number)[2], counts.cumsum(0))])
sparse = int32([[0, 3], [3, 4]]).npu()
pairs = init(device[:2], sparse, expert_tokens_num_type=2, expert_num=6, expert_tokens_num_flag=True)[2].tolist()
found["counts as pairs"] = pairs[:4] == [[0, 1], [3, 2], [4, 1], [0, 0]] and len(pairs) == 6
found["counts not asked for"] = bool((init(device, choice, expert_num=5)[2] < -(2**60)).all())
found["no scale"] = bool(init(device, choice, expert_num=5)[3].isnan().all())
found["int8 passes"] = str(init(torch.ones(8, 6).char().npu(), choice, expert_num=5)[0].dtype)
found["no rows"] = [list(a.shape) for a in init(device[:0], choice[:0], **number)]

smooth = torch.rand(3, 6) + 0.5
for name, scale in (("none", None), ("one", smooth[:1]), ("each", smooth)):
    kept, rest, places = dropless(1, 4, -1, 0)
    made = init(
        device,
        choice,
        scale=None if scale is None else scale.npu(),
        expert_num=5,
        quant_mode=1,
        active_expert_range=[1, 4],
    )
    values, scales = [], []
    for i, e in kept:
        row = tokens.float()[i // 3]
        row = row if scale is None else row * scale[0 if len(scale) == 1 else e - 1]
        scales.append(float(row.abs().max()) / 127)
        values.append((row.double() / scales[-1]).tolist())
    close(f"dynamic {name}", [(made[0][: len(kept)], torch.tensor(values))], 0.501)
    close(f"dynamic {name} scale", [(made[3][: len(kept)], torch.tensor(scales)), (made[1], places)])
found["dynamic dtype"] = str(made[0].dtype)
zero = init(torch.zeros(8, 6).npu(), choice, expert_num=5, quant_mode=1)
found["dynamic zeros"] = [int(zero[0].abs().max()), float(zero[3].max())]
scale, offset = torch.tensor([20.0]), torch.tensor([3.0])
made = init(device * 4, choice, scale=scale.npu(), offset=offset.npu(), expert_num=5, quant_mode=0)
kept = [i // 3 for i, _ in dropless(0, 5, -1, 0)[0]]
expected = ((tokens.float() * 4).half() * scale.half() + offset.half()).float()[kept].round().clamp(-128, 127)
close("static", [(made[0], expected)])
found["static clamps"] = int(made[0].max()) == 127

for capacity in (2, 4, 8):
    made = init(
        device, choice, scale=weight.npu(), expert_num=5, expert_capacity=capacity, drop_pad_mode=1,
        expert_tokens_num_type=1, expert_tokens_num_flag=True,
    )  # fmt: skip
    rows_of = torch.zeros(5, capacity, 6, dtype=torch.float64)
    weights, places, used = torch.zeros(5, capacity), torch.full((24,), -1), [0] * 5
    for i, e in sort_by_expert(idx, 0, 5):
        if used[e] < capacity:
            rows_of[e, used[e]] = tokens[i // 3]
            weights[e, used[e]] = weight[i // 3]
            places[i] = e * capacity + used[e]
            used[e] += 1
    close(f"drop {capacity}", zip(made, (rows_of, places, counts, weights.flatten()), strict=True))
    quantised = init(device, choice, expert_num=5, expert_capacity=capacity, drop_pad_mode=1, quant_mode=1)
    back = quantised[0].cpu().double() * quantised[3].cpu().double().view(5, capacity, 1)
    close(f"drop {capacity} dynamic", [(back, rows_of)], 0.02)

refused("init range", lambda: init(device, choice, expert_num=5, active_expert_range=[2, 6]))
refused("init no experts", lambda: init(device, choice))
refused("init capacity", lambda: init(device, choice, expert_num=5, drop_pad_mode=1))
refused("init mxfp8", lambda: init(device, choice, expert_num=5, quant_mode=2))
refused("init x_dtype", lambda: init(device, choice, expert_num=5, x_dtype=290))
raw = torch.randint(0, 256, (8, 6)).byte()
made = init(raw.npu(), choice, expert_num=5, x_dtype=290)[0]
close("init hifloat8", [(made, raw[[i // 3 for i, _ in sort_by_expert(idx, 0, 5)]])], 0)
refused("init offset", lambda: init(device, choice, expert_num=5, offset=offset.npu()))
refused("init int64", lambda: init(device, idx.npu(), expert_num=5))

# --- and back -------------------------------------------------------------------------------------------------------

finalize = torch_npu.npu_moe_finalize_routing
skip1, skip2 = (torch.randn(8, 6, dtype=torch.float64) for _ in range(2))
experts_bias, scales = torch.randn(5, 6, dtype=torch.float64), torch.rand(8, 3, dtype=torch.float64)
for mode in range(4):
    many = 24 if mode % 2 == 0 else 20
    permuted = torch.randn(many, 6, dtype=torch.float64)
    index = torch.randperm(24)
    index[index >= many] = -1
    for options in ((True, True, True), (False, True, True), (True, False, True), (False, False, False)):
        skips, biased, scaled = options
        k = 3 if scaled else 1
        rows_out = 24 // k
        out = torch.zeros(rows_out, 6, dtype=torch.float64) if not skips else skip1 + skip2
        for i in range(rows_out):
            for j in range(k):
                source = int(index[j * rows_out + i] if mode < 2 else index[i * k + j])
                row = permuted[source] if source >= 0 else torch.zeros(6, dtype=torch.float64)
                row = row + experts_bias[idx[i, j]] if biased else row
                out[i] += row * (scales[i, j] if scaled else 1.0)
        made = finalize(
            permuted.float().view(*((4, 5) if mode % 2 else (24,)), 6).npu(), skip1.float().npu() if skips else None,
            skip2.float().npu() if skips else None, experts_bias.float().npu() if biased else None,
            scales.float().npu() if scaled else None, int32(index).npu(), choice if biased else None, mode,
        )  # fmt: skip
        close(f"finalize {mode} {options}", [(made, out)])
made = finalize(permuted[:4].float().npu().view(4, 1, 6), None, None, None, None, int32(range(4)).npu(), None, 3, 2)
close("finalize k", [(made, permuted[:4].view(2, 2, 6).sum(1))])
refused("finalize skip", lambda: finalize(device, None, device, None, None, int32(range(8)).npu(), None))
refused("finalize index", lambda: finalize(device, None, None, None, None, int32([8] * 8).npu(), None))

numbers = torch.tensor([[2, 0, 3], [1, 4, 0]])
rows = torch.randn(10, 4)
starts = [0, 2, 2, 5, 6, 10]
order = [*range(2), *range(5, 6), *range(6, 10), *range(2, 5)]
for dtype in (torch.int32, torch.int64):
    made = torch_npu.npu_moe_re_routing(
        rows.half().npu(), numbers.to(dtype).npu(), per_token_scales=rows[:, 0].contiguous().npu()
    )
    close(
        f"re-routing {dtype}",
        zip(made, (rows.half()[order], rows[order, 0], torch.tensor(order), numbers.sum(0)), strict=True),
    )
found["re-routing dtypes"] = [str(a.dtype) for a in made]
short = torch_npu.npu_moe_re_routing(rows.half().npu(), numbers[:1].npu())
found["re-routing rest"] = [
    bool(short[0][5:].isnan().all()),
    bool(short[1].isnan().all()),
    short[2][5:].tolist() == [UNWRITTEN] * 5,
]
refused("re-routing index", lambda: torch_npu.npu_moe_re_routing(rows.half().npu(), numbers.npu(), idx_type=1))
refused("re-routing rows", lambda: torch_npu.npu_moe_re_routing(rows[:5].half().npu(), numbers.npu()))

# --- maps of tokens and experts -------------------------------------------------------------------------------------


def permute_by_map(tokens, routing, probs, number, pad):
    """(permuted tokens, their weights, token of each row), expert by expert."""
    count, experts = routing.shape
    members = []
    for e in range(experts):
        chosen = [t for t in range(count) if routing[t, e]]
        if pad:
            chosen = (chosen + [t for t in range(count) if not routing[t, e]])[: number // experts]
        members += [(t, e) for t in chosen]
    rows = tokens[[t for t, _ in members]]
    weights = None if probs is None else torch.stack([probs[t, e] for t, e in members])
    return rows, weights, members


def places_of(members, pad):
    tokens_of = [t for t, _ in members]
    if pad:
        return tokens_of
    return sorted(range(len(tokens_of)), key=lambda i: tokens_of[i])


permute, unpermute = (
    torch_npu.npu_moe_token_permute_with_routing_map,
    torch_npu.npu_moe_token_unpermute_with_routing_map,
)
routing = torch.zeros(6, 4, dtype=torch.bool)
for row in routing:
    row[torch.randperm(4)[:2]] = True
tokens, probs = torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)
for pad in (False, True):
    for weighted in (False, True):
        for kind in (torch.bool, torch.int8):
            name = f"map {pad} {weighted} {kind}"
            here = [tokens.clone().requires_grad_(), probs.clone().requires_grad_()]
            there = [a.float().npu().requires_grad_() for a in (tokens, probs)]
            wide_map = routing.to(kind).npu()
            number = 12 if not pad else 16
            rows, weights, members = permute_by_map(here[0], routing, here[1] if weighted else None, number, pad)
            made = permute(
                there[0], wide_map, probs=there[1] if weighted else None, num_out_tokens=number, drop_and_pad=pad
            )
            close(name, [(made[0], rows), (made[2], torch.tensor(places_of(members, pad)))])
            if weighted:
                close(name, [(made[1], weights)])
            else:
                found[name] = found[name] and made[1] is None
            # Back again, with weights: the sum over the experts of a token.
            squared = rows * rows
            scaled = squared * torch.stack([here[1][t, e] for t, e in members])[:, None] if weighted else squared
            out = torch.zeros(6, 5, dtype=torch.float64).index_add(0, torch.tensor([t for t, _ in members]), scaled)
            result = unpermute(
                made[0] * made[0],
                made[2],
                [6, 5],
                probs=there[1] if weighted else None,
                routing_map=wide_map,
                drop_and_pad=pad,
            )
            close(f"{name} back", [(result, out)])
            up = torch.randn_like(out)
            loss, other = (out * up).sum(), (result * up.float().npu()).sum()
            if weighted:
                loss, other = loss + (weights * weights).sum(), other + (made[1] * made[1]).sum()
            loss.backward()
            other.backward()
            close(f"{name} gradient", [(there[0].grad, here[0].grad)])
            if weighted:
                close(f"{name} gradient", [(there[1].grad, here[1].grad)])
kept = torch_npu._npu_moe_token_unpermute_with_routing_map(
    made[0].detach(), made[2], [6, 5], probs=probs.float().npu(), routing_map=wide_map, drop_and_pad=True
)
sorted_tokens = sorted((t, i) for i, t in enumerate(made[2].tolist()))
close(
    "map kept",
    [(kept[1], torch.tensor([i for _, i in sorted_tokens])), (kept[2], torch.tensor([t for t, _ in sorted_tokens]))],
)
uneven = routing.clone()
uneven[0] = True
refused("map uneven", lambda: permute(tokens.float().npu(), uneven.npu(), num_out_tokens=12))
refused("map dtype", lambda: permute(tokens.float().npu(), routing.float().npu(), num_out_tokens=12))
refused("map shape", lambda: unpermute(tokens.float().npu(), int32(range(6)).npu(), [6, 4]))

print(json.dumps(found))
