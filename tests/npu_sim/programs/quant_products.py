"""Products of quantised matrices, single and grouped: each operator against exact integers and a formula in double."""

from __future__ import annotations

import torch
import torch_npu
from quant_checks import (
    by_group,
    check,
    close,
    packed,
    product,
    raw,
    refused,
    rounded,
    run,
    same,
    short,
    unpacked,
    whole,
)

F16, BF16 = torch.float16, torch.bfloat16
call = torch_npu.npu_quant_matmul


def restored(numbers: torch.Tensor, offset: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight in the dtype of the scale; float16 rounds the sum as well."""
    value = numbers.to(F16) + offset if scale.dtype == F16 else numbers.float() + offset.float()
    return (value.float() * scale.float()).to(scale.dtype).double()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


@check
def sums_are_exact() -> None:
    # 5000 * 2^14 has no exact float32, nor have most of the sums on the way there.
    low = torch.full((3, 5000), -128, dtype=torch.int8)
    low[1, ::2], low[2, ::3] = 127, -1
    scale, bias = torch.ones(1), whole(-2000000, 2000000, 3, dtype=torch.int32)
    wanted = (product(low, low.t()) + bias).to(torch.int32)
    same(call(low.npu(), low.npu().t(), scale.npu(), bias=bias.npu(), output_dtype=torch.int32), wanted)


@check
def int8_results() -> None:
    x, w = whole(-128, 127, 6, 40), whole(-128, 127, 40, 16)
    scale, offset = torch.randn(16) * 1e-3, torch.tensor([3.5, -2.5, *(torch.randn(14) * 30).tolist()])
    bias = whole(-9999, 9999, 16, dtype=torch.int32)
    exact = (product(x, w) + bias) * short(scale) + offset.round().clamp(-256, 255)
    arguments = (x.npu(), w.npu())
    rounded(call(*arguments, scale.npu(), offset=offset.npu(), bias=bias.npu()), exact)
    code = torch_npu.npu_trans_quant_param(scale.npu(), offset.npu())
    rounded(call(*arguments, code, bias=bias.npu()), exact)
    rounded(call(x.npu(), w.t().contiguous().npu().t(), code, bias=bias.npu()), exact)
    one = torch.tensor([2.0e-3])
    rounded(call(*arguments, one.npu()), product(x, w) * short(one))
    tie = torch.tensor([[1], [3], [5], [-1], [-3]], dtype=torch.int8)
    halves = call(tie.npu(), torch.ones(1, 1, dtype=torch.int8).npu(), torch.tensor([0.5]).npu())
    same(halves, torch.tensor([[0], [2], [2], [0], [-2]], dtype=torch.int8))


@check
def float_results() -> None:
    x, w = whole(-128, 127, 6, 40), whole(-128, 127, 40, 16)
    scale, token, bias = torch.randn(16) * 1e-3, torch.rand(6), whole(-9999, 9999, 16, dtype=torch.int32)
    exact, arguments = product(x, w), (x.npu(), w.npu())
    got = call(*arguments, scale.npu(), bias=bias.npu(), output_dtype=F16)
    close(got, (exact + bias) * short(scale), 1e-3, 1e-3)
    got = call(*arguments, scale.to(BF16).npu(), bias=bias.npu(), output_dtype=BF16)
    close(got, (exact + bias) * scale.to(BF16).double(), 1e-2, 1e-2)
    late = torch.randn(16)
    for dtype, some in ((F16, late.to(F16)), (BF16, late.to(BF16)), (BF16, late)):
        got = call(*arguments, scale.npu(), pertoken_scale=token.npu(), bias=some.npu(), output_dtype=dtype)
        assert got.dtype == dtype
        close(got, exact * scale.double() * token.double()[:, None] + some.double(), 1e-2, 1e-2)
    got = call(*arguments, scale.npu(), pertoken_scale=token.npu(), bias=bias.npu(), output_dtype=F16)
    close(got, (exact + bias) * scale.double() * token.double()[:, None], 1e-3, 1e-3)
    batch, many = whole(-9, 9, 1, 6, 40), whole(-9, 9, 5, 40, 16)
    added = whole(-99, 99, 5, 1, 16, dtype=torch.int32)
    got = call(batch.npu(), many.npu(), scale.npu(), bias=added.npu(), output_dtype=BF16)
    close(got, (product(batch, many) + added) * scale.double(), 1e-2, 1e-3)


@check
def int4_products() -> None:
    x, w = whole(-8, 7, 6, 48), whole(-8, 7, 48, 16)
    exact, scale, token = product(x, w), torch.randn(16) * 1e-2, torch.rand(6)
    turned = packed(w.t().contiguous()).npu().t()  # (k / 8, n), the view of a packed (n, k)
    for right in (packed(w).npu(), turned):
        got = call(packed(x).npu(), right, scale.npu(), output_dtype=F16)
        close(got, exact * short(scale), 1e-3, 1e-3)
        got = call(packed(x).npu(), right, scale.npu(), pertoken_scale=token.npu(), output_dtype=BF16)
        close(got, exact * scale.double() * token.double()[:, None], 1e-2, 1e-3)


@check
def scales_of_groups() -> None:
    x, w = whole(-128, 127, 5, 512), whole(-128, 127, 256, 512)
    token, scale, bias = torch.rand(5, 4), torch.rand(2, 4) * 1e-2, torch.randn(256)
    exact = torch.zeros(5, 256, dtype=torch.float64) + bias
    for block in range(4):
        part = slice(128 * block, 128 * block + 128)
        columns = scale[:, block].double().repeat_interleave(128)
        exact += product(x[:, part], w[:, part].t()) * token[:, block : block + 1].double() * columns
    got = call(
        x.npu(), w.npu().t(), scale.npu().t(), pertoken_scale=token.npu(), bias=bias.npu(), output_dtype=BF16,
        group_sizes=[1, 128, 128],
    )  # fmt: skip
    close(got, exact, 1e-2, 1e-2)
    x, w, token = whole(-8, 7, 5, 1024), whole(-8, 7, 16, 1024), torch.rand(5, 1)
    scale, offset = torch.rand(4, 16), torch.randn(4, 16).to(F16)
    exact = torch.zeros(5, 16, dtype=torch.float64)
    for group in range(4):
        part = slice(256 * group, 256 * group + 256)
        shift = x[:, part].double().sum(1, keepdim=True) * offset[group].double()
        exact += (product(x[:, part], w[:, part].t()) - shift) * scale[group].double()
    right = packed(w).npu().t()
    options = {"pertoken_scale": token.npu(), "offset": offset.npu(), "output_dtype": BF16}
    got = call(packed(x).npu(), right, scale.npu(), group_sizes=[0, 0, 256], **options)
    close(got, exact * token.double(), 1e-2, 1e-2)
    got = call(packed(x).npu(), right, scale.npu(), group_sizes=[1, 1, 256], **options)
    close(got, exact * token.double(), 1e-2, 1e-2)
    refused(lambda: call(packed(x).npu(), right, scale.npu(), group_sizes=[0, 0, 128], **options), "[1, 1, 256]")


@check
def int8_by_int4() -> None:
    x, w, token = whole(-128, 127, 5, 512), whole(-8, 7, 512, 16), torch.rand(5)
    scale = torch.rand(2, 16) * 1e-2
    weight = w.double() * scale.double().repeat_interleave(256, 0)
    offset = (8 * weight.sum(0)).float()
    got = call(
        x.npu(), packed(w).npu(), raw(scale).npu(), offset=offset.npu(), pertoken_scale=token.npu(), output_dtype=F16,
        group_sizes=[0, 0, 256],
    )  # fmt: skip
    close(got, x.double() @ weight * token.double()[:, None], 2e-3, 2e-2)


@check
def matmul_refuses() -> None:
    x, w, scale = whole(-9, 9, 6, 40).npu(), whole(-9, 9, 40, 16).npu(), torch.rand(16).npu()
    refused(lambda: call(x, w, scale, y_scale=scale), "y_scale is not simulated")
    refused(lambda: call(x, w, scale, x1_dtype=torch_npu.hifloat8), "x1_dtype is not simulated")
    refused(lambda: call(x, w[:30], scale), "do not fit")
    refused(lambda: call(x, w, scale[:3]), "scale [3] does not fit 16 columns")
    refused(lambda: call(x, w, scale, pertoken_scale=scale, output_dtype=F16), "one float32 per row")
    refused(lambda: call(x, w, scale, offset=scale, output_dtype=F16), "offset needs an int8 result")
    refused(lambda: call(x, w, scale, bias=scale, output_dtype=F16), "int32 bias")
    refused(lambda: call(x.to(torch.float8_e4m3fn), w, scale), "Float8_e4m3fn is not simulated")
    refused(lambda: call(x, w, scale, output_dtype=torch.float32), "output_dtype must be")


@check
def weight_quant() -> None:
    call = torch_npu.npu_weight_quant_batchmatmul
    w = whole(-128, 127, 64, 24)
    for dtype, wide in ((F16, F16), (BF16, torch.float32)):
        x, scale, offset = torch.randn(5, 64).to(dtype), torch.rand(24).to(dtype), torch.randn(24).to(dtype)
        bias = torch.randn(24).to(wide)
        weight = restored(w, offset, scale)
        exact, arguments = x.double() @ weight, (scale.npu(), offset.npu())
        close(call(x.npu(), w.npu(), *arguments, bias=bias.npu()), exact + bias.double(), 1e-2, 5e-2)
        turned = w.t().contiguous().npu().t()
        got = call(x.npu(), turned, scale.reshape(24, 1).npu().t(), offset.reshape(24, 1).npu().t())
        close(got, exact, 1e-2, 5e-2)
        one = scale[:1]
        close(call(x.npu(), w.npu(), one.npu()), x.double() @ (w.float() * one.float()).to(dtype).double(), 1e-2, 5e-2)
        groups = torch.rand(2, 24).to(dtype)
        spread = (w.float() * groups.float().repeat_interleave(32, 0)).to(dtype).double()
        got = call(x.npu(), w.npu(), groups.npu(), antiquant_group_size=32)
        close(got, x.double() @ spread, 1e-2, 5e-2)
        small = whole(-8, 7, 64, 24, dtype=torch.int32)
        four = restored(small, offset, scale)
        for right in (
            torch_npu.npu_convert_weight_to_int4pack(small.npu()),
            torch_npu.npu_convert_weight_to_int4pack(small.t().contiguous().npu()).t(),
        ):
            close(call(x.npu(), right, *arguments), x.double() @ four, 1e-2, 5e-2)
    x, scale, offset = torch.randn(5, 64).to(F16), torch.rand(24).to(F16), torch.randn(24).to(F16)
    weight = restored(w, offset, scale)
    quant, shift = torch.rand(24) * 0.1, torch.randn(24) * 9
    exact = x.double() @ weight * short(quant) + shift.round()
    got = call(x.npu(), w.npu(), scale.npu(), offset.npu(), quant.npu(), shift.npu())
    assert got.dtype == torch.int8 and float((got.cpu().double() - exact.round().clamp(-128, 127)).abs().max()) <= 1
    code = torch_npu.npu_trans_quant_param(quant.npu(), shift.npu())
    same(call(x.npu(), w.npu(), scale.npu(), offset.npu(), code), got.cpu())
    code = torch_npu.npu_trans_quant_param(scale.float().npu())
    late = whole(-128, 127, 24, dtype=torch.int32)
    close(call(x.npu(), w.npu(), code, late.npu()), x.double() @ (w.double() + late) * short(scale.float()), 1e-2, 5e-2)
    refused(lambda: call(x.npu(), w.npu(), scale.npu(), antiquant_group_size=48), "multiple of 32")
    refused(lambda: call(x.npu(), w.npu(), scale.npu(), None, None, shift.npu()), "cannot exist in isolation")
    refused(lambda: call(x.npu(), w.npu(), scale.to(BF16).npu()), "dtype of x")
    refused(lambda: call(x[:, :60].npu(), w.npu(), scale.npu()), "k of x and weight should be equal")


@check
def matmul_dequant() -> None:
    x, w = torch.randn(7, 32, dtype=F16), whole(-128, 127, 16, 32)
    scale, smooth, fixed = torch.rand(16), torch.rand(32).to(F16), torch.tensor([0.05])
    call, grouped = torch_npu.npu_quant_matmul_dequant, torch_npu.npu_quant_grouped_matmul_dequant
    value = (x.float() * smooth.float()).double()
    own = value.abs().amax(-1, keepdim=True) / 127
    near = {"relative": 2e-3, "absolute": 5e-2}
    exact = product((value / own).round(), w.t()) * own * scale.double()
    close(call(x.npu(), w.npu(), scale.npu(), smooth_scale=smooth.npu()), exact, **near)
    still = product((value.float() / fixed).round().clamp(-128, 127), w.t()) * fixed.double() * scale.double()
    options = {"x_scale": fixed.npu(), "smooth_scale": smooth.npu(), "quant_mode": "pertensor"}
    close(call(x.npu(), w.npu(), scale.npu(), **options), still, **near)
    close(call(x.npu(), w.npu(), raw(scale * fixed).npu(), **options), still, **near)
    ends, many, scales = [3, 3, 7], whole(-128, 127, 3, 16, 32), torch.rand(3, 16)
    left = (value / own).round()
    exact = torch.cat(
        [product(left[rows], many[group].t()) * own[rows] * scales[group].double() for group, rows in by_group(ends)]
    )
    got = grouped(x.npu(), many.npu(), scales.npu(), torch.tensor(ends).npu(), smooth_scale=smooth.npu())
    close(got, exact, **near)
    refused(lambda: call(x.npu(), w.npu(), scale.npu(), bias=scale.npu()), "bias is not simulated")
    refused(lambda: call(x.npu(), w.npu(), scale.npu(), quant_mode="pertensor"), "without x_scale is not simulated")


@check
def other_products() -> None:
    x, w, token, scale = whole(-9, 9, 5, 40), whole(-9, 9, 40, 16), torch.rand(5) * 0.1, torch.rand(16) * 0.1
    value = product(x, w) * scale.double() * token.double()[:, None]
    for form, name in (("gelu_erf", "none"), ("gelu_tanh", "tanh")):
        got = torch_npu.npu_quant_matmul_gelu(x.npu(), w.npu(), token.npu(), scale.npu(), approximate=form)
        close(got, torch.nn.functional.gelu(value, approximate=name), 2e-3, 1e-3)
    many, right, tokens = whole(-9, 9, 3, 5, 40), whole(-9, 9, 3, 40, 16), torch.rand(3, 5)
    got = torch_npu.npu_quant_matmul_reduce_sum(
        many.npu(), right.npu(), x1_scale=tokens.npu(), x2_scale=scale.to(BF16).npu()
    )
    exact = (product(many, right) * tokens.double()[..., None] * scale.to(BF16).double()).sum(0)
    close(got, exact, 1e-2, 1e-2)
    left, right = torch.randn(4, 3, 16).to(F16), torch.randn(4, 16, 32).to(F16)
    exact, call = left.double() @ right.double(), torch_npu.npu_transpose_batchmatmul
    close(call(left.npu(), right.npu()), exact.transpose(0, 1), 2e-3, 2e-3)
    got = call(left.transpose(0, 1).contiguous().npu(), right.npu(), perm_x1=[1, 0, 2], batch_split_factor=4)
    close(got, exact.transpose(0, 1).reshape(3, 4, 32).transpose(0, 1), 2e-3, 2e-3)
    scales = torch.rand(128) * 9
    got = call(left.npu(), right.npu(), scale=torch_npu.npu_trans_quant_param(scales.npu()))
    assert got.shape == (3, 1, 128)
    rounded(got, exact.transpose(0, 1).reshape(3, 1, 128).float() * short(scales))
    refused(lambda: call(left.npu(), right.npu(), bias=scales.npu()), "bias is not simulated")


ENDS = [2, 2, 7]
GROUPED = {"group_list": torch.tensor(ENDS), "split_item": 3, "group_type": 0}


def grouped(x: torch.Tensor, weight: list[torch.Tensor], **given: object) -> torch.Tensor:
    """One tensor of rows, one of results."""
    moved: dict[str, object] = {}
    for name, value in ({**GROUPED, **given}).items():
        tensors = isinstance(value, list) and isinstance(value[0], torch.Tensor)
        moved[name] = [tensor.npu() for tensor in value] if tensors else value
        if isinstance(value, torch.Tensor):
            moved[name] = value.npu()
    (result,) = torch_npu.npu_grouped_matmul([x.npu()], [one.npu() for one in weight], **moved)
    return result


@check
def grouped_int8() -> None:
    x, w = whole(-128, 127, 7, 32), whole(-128, 127, 3, 32, 16)
    scale, token, bias = torch.rand(3, 16) * 1e-3, torch.rand(7), whole(-999, 999, 3, 16, dtype=torch.int32)
    sums = torch.cat([product(x[rows], w[group]) + bias[group] for group, rows in by_group(ENDS)])
    each = torch.cat([scale[group].double().expand(rows.stop - rows.start, 16) for group, rows in by_group(ENDS)])
    lists = {"scale": [scale], "bias": [bias]}
    got = grouped(x, [w], output_dtype=F16, **lists)
    close(got, sums * each, 1e-3, 1e-3)
    got = grouped(x, list(w), output_dtype=F16, scale=list(scale), bias=list(bias))
    close(got, sums * each, 1e-3, 1e-3)
    got = grouped(x, [w], output_dtype=BF16, scale=[scale.to(BF16)], bias=[bias], per_token_scale=[token])
    rough = each.float().to(BF16).double()
    close(got, sums * rough * token.double()[:, None], 1e-2, 1e-2)
    code = torch.stack([torch_npu.npu_trans_quant_param(row.npu()) for row in scale]).cpu()
    rounded(grouped(x, [w], scale=[code], bias=[bias]), sums * short(each.float()))
    plain = torch.cat([product(x[rows], w[group]) for group, rows in by_group(ENDS)])
    same(grouped(x, [w], output_dtype=torch.int32), plain.to(torch.int32))
    late = torch.randn(3, 16)
    value = plain * each * token.double()[:, None]
    value += torch.cat([late[group].double().expand(rows.stop - rows.start, 16) for group, rows in by_group(ENDS)])
    acts = {1: torch.relu, 4: lambda v: v * torch.sigmoid(1.702 * v), 5: silu}
    acts[2] = lambda v: torch.nn.functional.gelu(v, approximate="tanh")
    for kind, act in acts.items():
        options = {"scale": [scale], "bias": [late], "per_token_scale": [token], "act_type": kind}
        close(grouped(x, [w], output_dtype=F16, **options), act(value), 2e-3, 2e-3)
    pairs = torch.tensor([[2, 3], [0, 4]])  # group and size; here only two of three
    refused(
        lambda: grouped(x, [w], group_list=pairs, group_list_type=2, output_dtype=F16, **lists),
        "3 weights and 2 groups",
    )
    pairs = torch.tensor([[2, 3], [0, 0], [1, 4]])
    got = grouped(x, [w], group_list=pairs, group_list_type=2, output_dtype=F16, **lists)
    exact = [(product(x[:3], w[2]) + bias[2]) * scale[2].double(), (product(x[3:], w[1]) + bias[1]) * scale[1].double()]
    close(got, torch.cat(exact), 1e-3, 1e-3)
    got = grouped(x, [w], group_list=torch.tensor([2, 2, 5]), output_dtype=F16, **lists)
    assert got.shape == (7, 16) and bool(got[5:].isnan().all())
    parts = torch_npu.npu_grouped_matmul(
        [x[:3].npu(), x[3:].npu()], [w[0].npu(), w[1].npu()], scale=[scale[0].npu(), scale[1].npu()], group_type=-1,
        output_dtype=F16,
    )  # fmt: skip
    close(parts[1], product(x[3:], w[1]) * scale[1].double(), 1e-3, 1e-3)
    listed = torch_npu.npu_grouped_matmul(
        [x.npu()], [one.npu() for one in w], bias=[one.npu() for one in bias], scale=[one.npu() for one in code],
        group_list=ENDS, split_item=3, output_dtype=torch.int8,
    )  # fmt: skip
    rounded(listed[0], sums * short(each.float()))


@check
def grouped_int4() -> None:
    scale, token = torch.rand(3, 16) * 1e-2, torch.rand(7)
    each = torch.cat([scale[group].double().expand(rows.stop - rows.start, 16) for group, rows in by_group(ENDS)])
    x, w = whole(-8, 7, 7, 32), whole(-8, 7, 3, 32, 16)
    sums = torch.cat([product(x[rows], w[group]) for group, rows in by_group(ENDS)])
    got = grouped(packed(x), [packed(w)], scale=[raw(scale)], per_token_scale=[token], output_dtype=F16)
    close(got, sums * each * token.double()[:, None], 1e-3, 1e-3)
    x, parts = whole(-128, 127, 7, 32), torch.rand(3, 2, 16) * 1e-2
    weight = w.double() * parts.double().repeat_interleave(16, 1)
    correction = (8 * weight.sum(1)).float()
    exact = torch.cat([x[rows].double() @ weight[group] for group, rows in by_group(ENDS)]) * token.double()[:, None]
    options = {"scale": [raw(parts)], "per_token_scale": [token], "bias": [correction], "output_dtype": F16}
    close(grouped(x, [packed(w)], **options), exact, 2e-3, 1e-2)
    options.pop("bias")
    refused(lambda: grouped(x, [packed(w)], **options), "correction of the weight")


@check
def grouped_antiquant() -> None:
    for dtype, wide in ((F16, F16), (BF16, torch.float32)):
        x, w, small = torch.randn(7, 32).to(dtype), whole(-128, 127, 3, 32, 16), whole(-8, 7, 3, 32, 16)
        scale, offset, bias = torch.rand(3, 16).to(dtype), torch.randn(3, 16).to(dtype), torch.randn(3, 16).to(wide)
        parts = torch.rand(3, 2, 16).to(dtype)
        lists = {"antiquant_scale": [scale], "antiquant_offset": [offset], "bias": [bias]}
        for numbers, given in ((w, w), (small, packed(small))):
            weight = restored(numbers, offset[:, None], scale[:, None])
            rows_of = by_group(ENDS)
            exact = torch.cat([x[rows].double() @ weight[group] + bias[group].double() for group, rows in rows_of])
            close(grouped(x, [given], **lists), exact, 1e-2, 5e-2)
        weight = (small.float() * parts.float().repeat_interleave(16, 1)).to(dtype).double()
        exact = torch.cat([x[rows].double() @ weight[group] for group, rows in by_group(ENDS)])
        close(grouped(x, [packed(small)], antiquant_scale=[parts]), exact, 1e-2, 5e-2)
    refused(lambda: grouped(x, [w]), "antiquant_scale belongs to a float x and an integer weight")
    refused(lambda: grouped(x, [w], scale=[scale], antiquant_scale=[scale]), "belong to an integer x")
    refused(lambda: grouped(x, [w], antiquant_scale=[scale], offset=[offset]), "offset is not simulated")


@check
def grouped_swiglu() -> None:
    w, scale, token, ends = whole(-128, 127, 3, 32, 16), torch.rand(3, 16) * 1e-3, torch.rand(8), torch.tensor(ENDS)

    def wanted(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = value.chunk(2, -1)
        result = silu(first) * second
        top = result.abs().amax(-1, keepdim=True) / 127
        return result / top, top[:, 0]

    x, numbers = whole(-128, 127, 8, 32), by_group(ENDS)
    value = torch.cat([product(x[rows], w[group]) * scale[group].double() for group, rows in numbers])
    exact, top = wanted(value * token[:7].double()[:, None])
    y, found, _ = torch_npu.npu_grouped_matmul_swiglu_quant(x.npu(), w.npu(), ends.npu(), scale.npu(), token.npu())
    close(found[:7], top)
    rounded(y[:7], exact)
    assert bool(found[7:].isnan().all()) and y.shape == (8, 8)
    call, counts = torch_npu.npu_grouped_matmul_swiglu_quant_v2, torch.tensor([2, 0, 5])
    y, found = call(x.npu(), [w.npu()], [scale.npu()], token.npu(), counts.npu(), group_list_type=1)
    rounded(y[:7], exact)
    small, parts = whole(-8, 7, 3, 32, 16), torch.rand(3, 2, 16) * 1e-2
    weight = small.double() * parts.double().repeat_interleave(16, 1)
    assist = (8 * weight.sum(1)).float()
    value = torch.cat([x[rows].double() @ weight[group] for group, rows in numbers]) * token[:7].double()[:, None]
    exact, top = wanted(value)
    arguments = (x.npu(), [packed(small).npu()], [raw(parts).npu()], token.npu(), ends.npu())
    y, found = call(*arguments, weight_assist_matrix=[assist.npu()], dequant_mode=1)
    close(found[:7], top, 1e-4)
    assert float((y[:7].cpu().double() - exact.round()).abs().max()) <= 1
    x, smooth = whole(-8, 7, 8, 32), torch.rand(3, 8)
    value = torch.cat([product(x[rows], small[group]) * scale[group].double() for group, rows in numbers])
    value *= token[:7].double()[:, None]
    first, second = value.chunk(2, -1)
    result = silu(first) * second
    result *= torch.cat([smooth[group].double().expand(rows.stop - rows.start, 8) for group, rows in numbers])
    y, found = call(
        packed(x).npu(), [packed(small).npu()], [scale.npu()], token.npu(), ends.npu(), smooth_scale=smooth.npu()
    )
    close(found[:7], result.abs().amax(-1) / 127)
    rounded(y[:7], result / (result.abs().amax(-1, keepdim=True) / 127))
    view = w.npu().reshape(3, 1, 2, 16, 16)
    refused(lambda: call(x.npu(), [view], [scale.npu()], token.npu(), ends.npu()), "five dimensions", "not simulated")
    refused(lambda: call(*arguments, dequant_mode=1), "weight_assist_matrix")


@check
def finalize_routing() -> None:
    x, token, logit = whole(-128, 127, 8, 32), torch.rand(8), torch.rand(8)
    places, shared, counts = (
        torch.tensor([2, 0, 1, 3, 2, 1, 0, 3]),
        torch.randn(2, 16).to(BF16),
        torch.tensor([3, 1, 4]),
    )
    ends = counts.cumsum(0)
    call = torch_npu.npu_grouped_matmul_finalize_routing

    def combined(value: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(4, 16, dtype=torch.float64)
        for row in range(8):
            result[places[row]] += value[row] * token[row].double() * logit[row].double()
        result[1:3] += 0.5 * shared.double()
        return result

    options = {
        "pertoken_scale": token.npu(),
        "shared_input": shared.npu(),
        "logit": logit.npu(),
        "row_index": places.npu(),
    }
    options.update(shared_input_weight=0.5, shared_input_offset=1, output_bs=4)
    w, scale = whole(-128, 127, 3, 32, 16), torch.rand(3, 16) * 1e-3
    numbers = by_group(ends.tolist())
    value = torch.cat([product(x[rows], w[group]) * scale[group].double() for group, rows in numbers])
    for kind, groups in ((1, counts), (0, ends)):
        got = call(x.npu(), w.npu(), groups.npu(), scale=scale.npu(), group_list_type=kind, **options)
        assert got.dtype == torch.float32
        close(got, combined(value), 1e-4, 1e-4)
    small, parts, shift = whole(-8, 7, 3, 32, 16), torch.rand(3, 2, 16) * 1e-2, torch.rand(3, 2, 16) * 1e-2
    weight = small.double() * parts.double().repeat_interleave(16, 1)
    value = torch.cat(
        [x[rows].double() @ (weight[group] + shift[group].double().repeat_interleave(16, 0)) for group, rows in numbers]
    )
    bias = (8 * weight.sum(1)).float()
    got = call(
        x.npu(),
        packed(small).npu(),
        counts.npu(),
        scale=raw(parts).npu(),
        bias=bias.npu(),
        offset=shift.npu(),
        **options,
    )
    close(got, combined(value), 1e-4, 1e-3)
    options.pop("logit")
    refused(
        lambda: call(x.npu(), w.npu(), counts.npu(), scale=scale.npu(), **options), "logit and row_index are needed"
    )


def test_helpers() -> None:
    numbers = whole(-8, 7, 2, 16)
    assert torch.equal(unpacked(packed(numbers)), numbers.long())


test_helpers()
run()
