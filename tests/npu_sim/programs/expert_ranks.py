"""Operators that compute and communicate: each case returns what differed from a reference on one process."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch_npu

from anabatic_sim import shared_memory

Wrong = list[str]


def name_of(group: dist.ProcessGroup | None = None) -> str:
    group = group or dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())


def numbers(rank: int, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """The same numbers on every process, for each rank others."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(shape, generator=generator) * scale


def integers(rank: int, *shape: int, seed: int = 0, low: int = -128, high: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + seed + 500)
    return torch.randint(low, high, shape, generator=generator)


def differ(wrong: Wrong, name: str, made: torch.Tensor, expected: torch.Tensor, tolerance: float = 4e-3) -> None:
    made, expected = made.cpu().double(), expected.double()
    bound = tolerance * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    if made.shape != expected.shape or not bool(((made - expected).abs() <= bound).all()):
        error = (made - expected).abs().max().item() if made.shape == expected.shape else list(made.shape)
        wrong.append(f"{name}: {error}")


def said(attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    texts = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            texts[name] = "accepted"
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


# --- matrix products -------------------------------------------------------------------------------------------------


def products(rank: int, world: int) -> Wrong:
    """All-gather then product, product then reduce-scatter."""
    wrong: Wrong = []
    hcom = name_of()
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 2e-2)):
        left = [numbers(r, 6, 256).to(dtype) for r in range(world)]
        right = [numbers(r, 256, 10, seed=1).to(dtype) for r in range(world)]
        whole = torch.cat(left)
        for turned in (False, True):
            b = right[rank].npu() if not turned else right[rank].t().contiguous().npu().t()
            out, gathered = torch_npu.npu_all_gather_base_mm(left[rank].npu(), b, hcom, world)
            differ(wrong, f"gather {dtype} {turned}", out, whole.double() @ right[rank].double(), tolerance)
            differ(wrong, f"gathered {dtype}", gathered, whole, 0)
            mine = numbers(rank, 4 * world, 256, seed=2).to(dtype).npu()
            out = torch_npu.npu_mm_reduce_scatter_base(mine, b, hcom, world)
            total = sum(numbers(r, 4 * world, 256, seed=2).to(dtype).double() @ right[r].double() for r in range(world))
            differ(wrong, f"scatter {dtype} {turned}", out, total[4 * rank : 4 * rank + 4], tolerance)
        empty = torch_npu.npu_all_gather_base_mm(left[rank].npu(), right[rank].npu(), hcom, world, gather_output=False)[
            1
        ]
        if empty.numel() or out.dtype != dtype:
            wrong.append("gather_output")
    left = [integers(r, 6, 256).to(torch.int8) for r in range(world)]
    right = [integers(r, 256, 10, seed=1).to(torch.int8) for r in range(world)]
    rows = [numbers(r, 6, 1, seed=3).abs() for r in range(world)]
    columns = numbers(9, 1, 10, seed=4).abs() * 1e-3
    call = dict(x1_scale=rows[rank].npu(), x2_scale=columns.npu(), comm_mode="aiv", output_dtype=torch.float16)
    out, gathered = torch_npu.npu_all_gather_base_mm(left[rank].npu(), right[rank].npu(), hcom, world, **call)
    expected = torch.cat(left).double() @ right[rank].double() * torch.cat(rows) * columns
    differ(wrong, "gather int8", out, expected)
    differ(wrong, "gathered int8", gathered, torch.cat(left), 0)
    out = torch_npu.npu_mm_reduce_scatter_base(left[rank].npu(), right[rank].npu(), hcom, world, **call)
    each = 6 // world
    total = sum(left[r].double() @ right[r].double() * rows[r] * columns for r in range(world))
    differ(wrong, "scatter int8", out, total[each * rank : each * (rank + 1)])
    return wrong


def sums(rank: int, world: int) -> Wrong:
    """Product then all-reduce: float, int8 weights, int8 both; with bias and x3; of a group of its own."""
    wrong: Wrong = []
    hcom = name_of(dist.new_group())
    call = torch_npu.npu_mm_all_reduce_base
    everyone = range(world)
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 2e-2)):
        a = [numbers(r, 2, 5, 32).to(dtype) for r in everyone]
        b = [numbers(r, 32, 7, seed=1).to(dtype) for r in everyone]
        bias, x3 = numbers(5, 7).to(dtype), numbers(6, 2, 5, 7).to(dtype)
        total = sum(a[r].double() @ b[r].double() for r in everyone)
        out = call(a[rank].npu(), b[rank].npu(), hcom)
        differ(wrong, f"sum {dtype}", out, total, tolerance)
        out = call(a[rank].npu(), b[rank].npu(), hcom, reduce_op="sum", bias=bias.npu(), x3=x3.npu())
        differ(wrong, f"sum with bias and x3 {dtype}", out, total + world * (bias.double() + x3.double()), tolerance)
        weight = [integers(r, 32, 7).to(torch.int8) for r in everyone]
        for kind, shape in (("tensor", (1,)), ("channel", (7,)), ("channel 2D", (1, 7))):
            scale, offset = numbers(7, *shape).abs().to(dtype) * 0.01, numbers(8, *shape).to(dtype)
            out = call(
                a[rank].npu(), weight[rank].npu(), hcom, antiquant_scale=scale.npu(), antiquant_offset=offset.npu()
            )
            wide = [(weight[r].double() + offset.double()) * scale.double() for r in everyone]
            differ(
                wrong, f"int8 weight per {kind} {dtype}", out, sum(a[r].double() @ wide[r] for r in everyone), tolerance
            )
    long = [numbers(r, 3, 80).half() for r in everyone]
    weight = [integers(r, 80, 7).to(torch.int8) for r in everyone]
    scale = numbers(7, 3, 7).abs().half() * 0.01
    out = call(long[rank].npu(), weight[rank].npu(), hcom, antiquant_scale=scale.npu(), antiquant_group_size=32)
    rows = torch.arange(80) // 32
    differ(
        wrong,
        "int8 weight per group",
        out,
        sum(long[r].double() @ (weight[r].double() * scale.double()[rows]) for r in everyone),
    )
    a = [integers(r, 5, 32, seed=2).to(torch.int8) for r in everyone]
    b = [integers(r, 32, 7, seed=3).to(torch.int8) for r in everyone]
    bias = integers(4, 7, low=-1000, high=1000).int()
    products = [a[r].double() @ b[r].double() + bias.double() for r in everyone]
    scale = numbers(3, 7).abs() * 1e-3
    packed = (scale.view(torch.int32).long() & 0xFFFFFFFF).npu()
    out = call(a[rank].npu(), b[rank].npu(), hcom, bias=bias.npu(), dequant_scale=packed)
    differ(wrong, "int8 int64 scale", out, sum(products) * scale.double())
    tokens = [numbers(r, 5, seed=6).abs() for r in everyone]
    call8 = dict(bias=bias.npu(), dequant_scale=scale.npu(), pertoken_scale=tokens[rank].npu())
    out = call(a[rank].npu(), b[rank].npu(), hcom, **call8)
    total = sum(products[r] * tokens[r].double()[:, None] for r in everyone) * scale.double()
    differ(wrong, "int8 per token", out, total)
    out = call(a[rank].npu(), b[rank].npu(), hcom, dequant_scale=scale[:1].bfloat16().npu())
    if out.dtype != torch.bfloat16:
        wrong.append("int8 with a scale of bfloat16")
    return wrong


def product_refusals(rank: int, world: int) -> dict[str, str]:
    hcom = name_of()
    dist.all_reduce(torch.zeros(1, device="npu"))
    a, b = torch.ones(6, 256).half().npu(), torch.ones(256, 4).half().npu()
    gather, scatter = torch_npu.npu_all_gather_base_mm, torch_npu.npu_mm_reduce_scatter_base
    total = torch_npu.npu_mm_all_reduce_base
    scale = torch.ones(4).half().npu()
    return said(
        {
            "name": lambda: gather(a, b, "nobody", world),
            "world": lambda: gather(a, b, hcom, 4),
            "odd world": lambda: gather(a, b, hcom, 3),
            "short": lambda: gather(a[:, :8].contiguous(), b[:8], hcom, world),
            "turned": lambda: gather(torch.ones(256, 6).half().npu().t(), b, hcom, world),
            "gather index": lambda: gather(a, b, hcom, world, gather_index=1),
            "bias": lambda: gather(a, b, hcom, world, bias=scale),
            "ai_cpu": lambda: gather(a.char(), b.char(), hcom, world, x2_scale=torch.ones(1, 4).npu()),
            "rows": lambda: scatter(a[:5], b, hcom, world),
            "float": lambda: total(a.float(), b.float(), hcom),
            "quantised transfer": lambda: total(a, b, hcom, comm_quant_scale_1=scale, comm_quant_scale_2=scale),
            "reduce": lambda: total(a, b, hcom, reduce_op="max"),
        }
    )


# --- experts --------------------------------------------------------------------------------------------------------


class Reference:
    """What each rank sends and receives, from the inputs of all ranks."""

    def __init__(
        self, world: int, experts: int, k: int, tokens: list[int], width: int, shared_ranks: int = 0, shared: int = 1
    ) -> None:
        self.world, self.experts, self.shared_ranks, self.shared = world, experts, shared_ranks, shared
        self.x = [numbers(r, tokens[r], width).half() for r in range(world)]
        self.ids = [
            torch.stack([torch.randperm(experts, generator=self.generator(r, t))[:k] for t in range(tokens[r])])
            for r in range(world)
        ]
        self.weights = [numbers(r, tokens[r], k, seed=2).abs() for r in range(world)]

    @staticmethod
    def generator(rank: int, token: int) -> torch.Generator:
        return torch.Generator().manual_seed(77 * rank + token)

    def local(self, rank: int) -> int:
        return 1 if rank < self.shared_ranks else self.experts // (self.world - self.shared_ranks)

    def arrivals(self, rank: int, active: list[torch.Tensor] | None = None) -> list[list[list[tuple[int, int]]]]:
        """(token, choice or -1) by expert of the rank and by source."""
        first = (rank - self.shared_ranks) * self.local(rank)
        found = []
        for expert in range(self.local(rank)):
            by_source = []
            for source in range(self.world):
                rows = []
                for token, chosen in enumerate(self.ids[source].tolist()):
                    for choice, e in enumerate(chosen):
                        here = rank >= self.shared_ranks and e == first + expert
                        if here and (active is None or active[source][token, choice]):
                            rows.append((token, choice))
                    if rank < self.shared_ranks and source % (self.shared_ranks // self.shared) == rank % (
                        self.shared_ranks // self.shared
                    ):
                        rows.append((token, -1))
                by_source.append(rows)
            found.append(by_source)
        return found


def run_experts(wrong: Wrong, name: str, plan: Reference, rank: int, v2: bool, **options: object) -> None:
    world, hcom = plan.world, name_of()
    x, ids, weights = plan.x[rank], plan.ids[rank].int(), plan.weights[rank]
    call: dict[str, object] = dict(group_ep=hcom, ep_world_size=world, ep_rank_id=rank, moe_expert_num=plan.experts)
    call |= dict(shared_expert_rank_num=plan.shared_ranks, shared_expert_num=plan.shared)
    global_bs = max(len(rows) for rows in plan.x) * world
    dispatch = torch_npu.npu_moe_distribute_dispatch_v2 if v2 else torch_npu.npu_moe_distribute_dispatch
    expand_x, scales, places, per_expert, ends, _, expand_scales = dispatch(
        x=x.npu(), expert_ids=ids.npu(), expert_scales=weights.npu(), global_bs=global_bs, **call, **options
    )
    arrivals = plan.arrivals(rank)
    flat = [(source, *pair) for by_source in arrivals for source, rows in enumerate(by_source) for pair in rows]
    expected = torch.stack([plan.x[source][token] for source, token, _ in flat]) if flat else x[:0]
    quantised = options.get("quant_mode") == 2
    if quantised:
        back = expand_x[: len(flat)].cpu().double() * scales[: len(flat)].cpu().double()[:, None]
        smooth = options.get("scales")
        if smooth is not None:
            expert = [i for i, by_source in enumerate(arrivals) for rows in by_source for _ in rows]
            back = back / smooth.cpu().double()[[rank * plan.local(rank) + e for e in expert]]
        differ(wrong, f"{name} quantised", back, expected, 0.02)
        if expand_x.dtype != torch.int8:
            wrong.append(f"{name} dtype")
    else:
        differ(wrong, f"{name} rows", expand_x[: len(flat)], expected, 0)
    counts = torch.tensor([[len(rows) for rows in by_source] for by_source in arrivals])
    kind = options.get("expert_token_nums_type", 1)
    differ(wrong, f"{name} per expert", per_expert, counts.sum(1) if kind == 1 else counts.sum(1).cumsum(0), 0)
    differ(wrong, f"{name} ends", ends[: counts.numel()], counts.flatten().cumsum(0), 0)
    carried = (
        torch.stack([plan.weights[s][t, c] if c >= 0 else torch.tensor(1.0) for s, t, c in flat])
        if flat
        else weights[:0, 0]
    )
    differ(wrong, f"{name} weights", expand_scales[: len(flat)], carried, 0)
    if quantised:
        return
    room = global_bs * min(plan.local(rank), ids.shape[1]) if rank >= plan.shared_ranks else expand_x.shape[0]
    if expand_x.shape[0] != room or not expand_x[len(flat) :].isnan().all():
        wrong.append(f"{name} room: {list(expand_x.shape)}")
    # Each expert multiplies by its number, each shared one by 100: the sum tells who took part.
    factors = [[100.0] if rank < plan.shared_ranks else [float(rank * 10 + e + 1)] for e in range(plan.local(rank))]
    factor = torch.tensor([factors[e][0] for e, by_source in enumerate(arrivals) for rows in by_source for _ in rows])
    outputs = expand_x.clone()
    outputs[: len(flat)] *= factor.half().npu()[:, None]
    back = dict(
        expand_x=outputs, expert_ids=ids.npu(), ep_send_counts=ends, expert_scales=weights.npu(), global_bs=global_bs
    )
    if v2:
        extra = numbers(rank, *x.shape, seed=9).half()
        made = torch_npu.npu_moe_distribute_combine_v2(
            **back, assist_info_for_combine=places, shared_expert_x=extra.npu(), **call
        )
    else:
        extra = torch.zeros_like(x)
        made = torch_npu.npu_moe_distribute_combine(**back, expand_idx=places, **call)
    local = plan.experts // (world - plan.shared_ranks)
    owner = [[plan.shared_ranks + e // local for e in row] for row in plan.ids[rank].tolist()]
    total = extra.double()
    for token, chosen in enumerate(plan.ids[rank].tolist()):
        for choice, e in enumerate(chosen):
            times = owner[token][choice] * 10 + e % local + 1
            total[token] += (plan.x[rank][token] * times).double() * float(weights[token, choice])
        if plan.shared_ranks:
            total[token] += (plan.x[rank][token] * 100.0).double() * plan.shared
    differ(wrong, f"{name} combined", made, total)


def experts(rank: int, world: int) -> Wrong:
    wrong: Wrong = []
    for v2 in (False, True):
        for number, k, tokens in ((2, 1, [5, 5]), (4, 3, [6, 6]), (8, 2, [4, 7]), (4, 2, [1, 3])):
            run_experts(wrong, f"{v2} {number} {k}", Reference(world, number, k, tokens, 16), rank, v2)
        plan = Reference(world, 4, 2, [5, 5], 16)
        run_experts(wrong, f"{v2} ends", plan, rank, v2, expert_token_nums_type=0)
        run_experts(wrong, f"{v2} dynamic", plan, rank, v2, quant_mode=2)
        smooth = numbers(3, 4, 16).abs() + 0.5
        run_experts(wrong, f"{v2} smooth", plan, rank, v2, quant_mode=2, scales=smooth.npu())
    return wrong


def shared_experts(rank: int, world: int) -> Wrong:
    wrong: Wrong = []
    run_experts(wrong, "one shared, v1", Reference(world, 4, 2, [3] * world, 16, 2), rank, False)
    run_experts(wrong, "one shared", Reference(world, 4, 2, [3] * world, 16, 2), rank, True)
    run_experts(wrong, "two shared", Reference(world, 4, 2, [3] * world, 16, 2, 2), rank, True)
    return wrong


def special_experts(rank: int, world: int) -> Wrong:
    """Masks of tokens and of choices; experts that are nothing, a copy, a constant."""
    wrong: Wrong = []
    plan, hcom = Reference(world, 4, 2, [5, 5], 16), name_of()
    x, weights = plan.x[rank], plan.weights[rank]
    call: dict[str, object] = dict(group_ep=hcom, ep_world_size=world, ep_rank_id=rank, moe_expert_num=4)
    tokens = torch.tensor([True, True, True, False, False])
    choices = torch.tensor([[True, False], [False, False], [True, True], [False, True], [True, True]])
    for name, mask in (("tokens", tokens), ("choices", choices)):
        wide = mask if mask.dim() == 2 else mask[:, None].expand(5, 2)
        ids = plan.ids[rank].int().npu()
        out = torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), ids, x_active_mask=mask.npu(), **call)
        arrivals = plan.arrivals(rank, [wide] * world)
        rows = [plan.x[s][t] for by_source in arrivals for s, pairs in enumerate(by_source) for t, _ in pairs]
        differ(wrong, f"mask of {name}", out[0][: len(rows)], torch.stack(rows), 0)
        made = torch_npu.npu_moe_distribute_combine_v2(
            out[0], ids, out[2], out[4], weights.npu(), x_active_mask=mask.npu(), **call
        )
        taking = wide.any(1)
        expected = x.double() * (weights.double() * wide).sum(1, keepdim=True)
        differ(wrong, f"mask of {name} combined", made[taking.npu()], expected[taking])
        if not made[~taking.npu()].isnan().all():
            wrong.append(f"mask of {name}: other tokens")
    ids = torch.tensor([[0, 4], [5, 6], [3, 7], [7, 8], [1, 2]]).int()  # 4, 5: zero; 6: copy; 7, 8: constants
    special = dict(zero_expert_num=2, copy_expert_num=1, const_expert_num=2)
    alpha1, alpha2, v = (numbers(4, 2, 16, seed=s).half() for s in (1, 2, 3))
    out = torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), **call, **special)
    constant = dict(const_expert_alpha_1=alpha1.npu(), const_expert_alpha_2=alpha2.npu(), const_expert_v=v.npu())
    made = torch_npu.npu_moe_distribute_combine_v2(
        out[0], ids.npu(), out[2], out[4], weights.npu(), ori_x=x.npu(), **constant, **call, **special
    )
    expected = torch.zeros(5, 16, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for choice, e in enumerate(chosen):
            value = x[token].double()
            if e in (4, 5):
                value = value * 0
            elif e > 6:
                value = alpha1[e - 7].double() * value + alpha2[e - 7].double() * v[e - 7].double()
            expected[token] += value * float(weights[token, choice])
    differ(wrong, "special", made, expected)
    return wrong


def grouped(rank: int, world: int) -> Wrong:
    """Exchange then grouped products, and back."""
    wrong: Wrong = []
    hcom, each = name_of(), 3
    counts = [integers(r, world * each, low=0, high=4).tolist() for r in range(world)]  # to (rank, expert)
    received = [counts[s][rank * each + e] for s in range(world) for e in range(each)]
    x = [numbers(r, sum(counts[r]), 8).half() for r in range(world)]
    weight, shared, shared_weight = (
        numbers(rank, each, 8, 5, seed=1).half(),
        numbers(rank, 3, 6, seed=2).half(),
        numbers(rank, 6, 4, seed=3).half(),
    )
    starts = [[sum(counts[s][:i]) for i in range(world * each)] for s in range(world)]
    blocks = [
        [x[s][starts[s][rank * each + e] :][: counts[s][rank * each + e]] for s in range(world)] for e in range(each)
    ]
    permuted = torch.cat([torch.cat(by_source) for by_source in blocks])
    expected = torch.cat([torch.cat(by_source).double() @ weight[e].double() for e, by_source in enumerate(blocks)])
    for turned in (False, True):
        w = weight.transpose(1, 2).contiguous() if turned else weight
        m = shared_weight.t().contiguous() if turned else shared_weight
        y, mm_y, rows = torch_npu.npu_alltoallv_gmm(
            x[rank].npu(), w.npu(), hcom, world, counts[rank], received, mm_x=shared.npu(), mm_weight=m.npu(),
            trans_gmm_weight=turned, trans_mm_weight=turned, permute_out_flag=True,
        )  # fmt: skip
        differ(wrong, f"exchange {turned}", y, expected)
        differ(wrong, f"permuted {turned}", rows, permuted, 0)
        differ(wrong, f"shared {turned}", mm_y, shared.double() @ shared_weight.double())
        # Back with the counts swapped: each rank gets its rows again, times the weight of their expert.
        result, nothing = torch_npu.npu_gmm_alltoallv(
            permuted.npu(), w.npu(), hcom, world, received, counts[rank], trans_gmm_weight=turned
        )
        weights = [numbers(r, each, 8, 5, seed=1).half() for r in range(world)]
        rows_back = [
            x[rank][starts[rank][r * each + e] :][: counts[rank][r * each + e]].double() @ weights[r][e].double()
            for r in range(world) for e in range(each)
        ]  # fmt: skip
        differ(wrong, f"back {turned}", result, torch.cat(rows_back))
        if nothing is not None:
            wrong.append("a product that was not asked for")
    _, mm_y, rows = torch_npu.npu_alltoallv_gmm(x[rank].npu(), weight.npu(), hcom, world, counts[rank], received)
    if mm_y is not None or rows is not None:
        wrong.append("outputs that were not asked for")
    return wrong


def expert_refusals(rank: int, world: int) -> dict[str, str]:
    hcom = name_of()
    dist.all_reduce(torch.zeros(1, device="npu"))
    x, ids = torch.ones(4, 16).half().npu(), torch.tensor([[0], [1], [2], [3]]).int().npu()

    def dispatch(**changed: object) -> object:
        call = dict(expert_ids=ids, group_ep=hcom, ep_world_size=world, ep_rank_id=rank, moe_expert_num=4) | changed
        return torch_npu.npu_moe_distribute_dispatch_v2(x, **call)

    return said(
        {
            "ep rank": lambda: dispatch(ep_rank_id=1 - rank),
            "ep experts": lambda: dispatch(moe_expert_num=3),
            "ep ids": lambda: dispatch(expert_ids=ids + 4),
            "ep quant": lambda: dispatch(quant_mode=1),
            "ep mask": lambda: dispatch(x_active_mask=torch.tensor([True, False, True, True]).npu()),
            "ep tp": lambda: dispatch(tp_world_size=2),
            "ep shared": lambda: dispatch(shared_expert_rank_num=1),
            "counts": lambda: torch_npu.npu_alltoallv_gmm(
                x, torch.ones(1, 16, 2).half().npu(), hcom, world, [1, 2], [1, 2]
            ),
        }
    )


def counted(rank: int, world: int) -> dict[str, int]:
    """Collectives that each operator adds to the counter of the device."""
    hcom = name_of()

    def collectives(call: Callable[[], object]) -> int:
        with shared_memory.attach_segment(os.environ["ANABATIC_SIM_SEGMENT"]) as machine:
            before = machine.device[rank].collectives
            call()
            return machine.device[rank].collectives - before

    a, b = torch.ones(4, 256).half().npu(), torch.ones(256, 4).half().npu()
    ids, weights = torch.tensor([[0, 1]] * 4).int().npu(), torch.ones(4, 2).npu()
    call: dict[str, object] = dict(group_ep=hcom, ep_world_size=world, ep_rank_id=rank, moe_expert_num=2)
    sent = torch_npu.npu_moe_distribute_dispatch_v2(a, ids, **call)
    return {
        "gather": collectives(lambda: torch_npu.npu_all_gather_base_mm(a, b, hcom, world)),
        "sum": collectives(lambda: torch_npu.npu_mm_all_reduce_base(a, b, hcom)),
        "dispatch": collectives(lambda: torch_npu.npu_moe_distribute_dispatch_v2(a, ids, **call)),
        "combine": collectives(
            lambda: torch_npu.npu_moe_distribute_combine_v2(sent[0], ids, sent[2], sent[4], weights, **call)
        ),
        "grouped": collectives(
            lambda: torch_npu.npu_alltoallv_gmm(a, torch.ones(1, 256, 2).half().npu(), hcom, world, [2, 2], [2, 2])
        ),
    }


def gone(rank: int, world: int) -> str:
    hcom = name_of()
    dist.all_reduce(torch.zeros(1, device="npu"))
    torch.npu.synchronize()
    if rank == 1:
        os._exit(0)
    a, b = torch.ones(4, 256).half().npu(), torch.ones(256, 4).half().npu()
    try:
        torch_npu.npu_mm_all_reduce_base(a, b, hcom)
    except RuntimeError as error:
        return str(error)
    return "accepted"
