"""Quantisation, static and dynamic, and what is fused with it: each operator against its formula in double."""

from __future__ import annotations

import torch
import torch_npu
from quant_checks import bits_of, by_group, check, close, packed, refused, rounded, run, same, short, unpacked, whole

F16, BF16 = torch.float16, torch.bfloat16


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def row_scale(x: torch.Tensor, top: float = 127.0) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True) / top


@check
def quantize_rounds_and_saturates() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0, float("nan")]])
    wanted = torch.tensor([[0, 2, 2, 0, -2, 127, -128, 0]], dtype=torch.int8)
    one = torch.ones(1).npu()
    for divides in (True, False):
        same(torch_npu.npu_quantize(x.npu(), one, None, torch.qint8, -1, divides), wanted)
    low = torch.tensor([[0, 2, 2, 0, 0, 255, 0, 0]], dtype=torch.uint8)
    same(torch_npu.npu_quantize(x.npu(), one, None, torch.quint8, -1), low)
    big = torch.tensor([[3e9, -3e9, 16777217.0, 7.0]])
    whole_numbers = torch.tensor([[2147483647, -2147483648, 16777216, 7]], dtype=torch.int32)
    same(torch_npu.npu_quantize(big.npu(), one, None, torch.qint32, -1), whole_numbers)


@check
def quantize_along_axes() -> None:
    x, scale, point = torch.randn(3, 5, 7), torch.rand(5) + 0.01, whole(-9, 9, 5, dtype=torch.int32)
    got = torch_npu.npu_quantize(x.npu(), scale.npu(), point.npu(), torch.qint8, 1)
    rounded(got, x.double() / scale.double()[:, None] + point[:, None])
    for dtype in (F16, BF16, torch.float32):
        x, scale = torch.randn(4, 6, 16).to(dtype), (torch.rand(16) * 40).to(dtype)
        got = torch_npu.npu_quantize(
            x.npu(), scale.npu(), scale.npu(), torch.qint8, 1, False
        )  # the last axis all the same
        rounded(got, x.double() * scale.double() + scale.double())
        heads = (torch.rand(6, 1) * 9).to(dtype)
        got = torch_npu.npu_quantize(x.npu(), heads[None].npu(), None, torch.qint8, -2, False)
        rounded(got, x.double() * heads.double())
        got = torch_npu.npu_quantize(x.npu(), scale.npu(), None, torch.quint4x2, -1, False)
        assert got.dtype == torch.int32
        rounded(unpacked(got.cpu()), x.double() * scale.double(), -8, 7)


@check
def quantize_refuses() -> None:
    x, one = torch.randn(4, 8).npu(), torch.ones(1).npu()
    refused(lambda: torch_npu.npu_quantize(x, one, None, torch.float8_e4m3fn, -1), "float8_e4m3fn", "not simulated")
    refused(lambda: torch_npu.npu_quantize(x, one, None, torch_npu.hifloat8, -1), "hifloat8", "not simulated")
    refused(lambda: torch_npu.npu_quantize(x, torch.ones(3).npu(), None, torch.qint8, -1), "scales [3] does not fit")
    refused(lambda: torch_npu.npu_quantize(x, one, None, torch.quint4x2, -1), "div_mode=True")
    refused(lambda: torch_npu.npu_quantize(x[:, :5], one, None, torch.quint4x2, -1, False), "multiple of 8")


@check
def anti_quant() -> None:
    x, scale, offset = whole(-128, 127, 6, 10), torch.randn(10), torch.randn(10)
    wanted = (x.double() + offset) * scale
    close(torch_npu.npu_anti_quant(x.npu(), scale.npu(), offset=offset.npu(), dst_dtype=BF16), wanted, 1e-2)
    got = torch_npu.npu_anti_quant(x.npu(), scale[:1].npu())
    assert got.dtype == F16
    close(got, x.double() * scale[0], 1e-3)
    numbers, scale = whole(-8, 7, 3, 16), torch.randn(16)
    got = torch_npu.npu_anti_quant(packed(numbers).npu(), scale.npu(), src_dtype=torch.quint4x2)
    close(got, numbers.double() * scale, 1e-3)
    refused(lambda: torch_npu.npu_anti_quant(x.npu(), scale.npu()), "does not fit")
    refused(
        lambda: torch_npu.npu_anti_quant(x.npu(), scale[:1].npu(), src_dtype=torch.quint4x2), "must match src_dtype"
    )


@check
def group_quant() -> None:
    x, scale, offset, ends = torch.randn(9, 16, dtype=F16), torch.randn(4, 16) * 30, torch.randn(1), [2, 2, 7, 9]
    exact = torch.cat([x[rows].double() * scale[group].double() + offset.double() for group, rows in by_group(ends)])
    index = torch.tensor(ends, dtype=torch.int32)
    rounded(torch_npu.npu_group_quant(x.npu(), scale.npu(), index.npu(), offset=offset.npu()), exact)
    got = torch_npu.npu_group_quant(x.npu(), scale.npu(), index.npu(), offset=offset.npu(), dst_dtype=torch.quint4x2)
    rounded(unpacked(got.cpu()), exact, -8, 7)
    refused(lambda: torch_npu.npu_group_quant(x.npu(), scale.npu(), (index - 1).clamp(min=0).npu()), "number of rows 9")


@check
def trans_quant_param() -> None:
    scale, offset = torch.randn(16), torch.tensor([1.5, 2.5, -0.5, 400.0, -400.0, *torch.randn(11).tolist()])
    words, rounded_words = [], []
    for value, shift in zip(scale.tolist(), offset.tolist(), strict=True):
        nine = max(-256, min(255, round(shift))) & 0x1FF
        bits = bits_of(value)
        words.append((bits & 0xFFFFE000) | (1 << 46) | (nine << 37))
        rounded_words.append(((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000) | (1 << 46) | (nine << 37))
    same(torch_npu.npu_trans_quant_param(scale.npu(), offset.npu()), torch.tensor(words))
    same(torch_npu.npu_trans_quant_param(scale.npu(), offset.npu(), 1), torch.tensor(rounded_words))
    plain = torch.tensor([(bits_of(value) & 0xFFFFE000) | (1 << 46) for value in scale.tolist()])
    same(torch_npu.npu_trans_quant_param(scale.npu()[None]), plain[None])
    assert torch_npu.npu_trans_quant_param(scale[:1].npu(), offset.npu()).shape == (16,)
    close(short(scale), scale.double(), relative=2**-10)  # ten bits of mantissa remain
    refused(lambda: torch_npu.npu_trans_quant_param(scale.npu(), offset[:5].npu()), "do not fit")
    refused(lambda: torch_npu.npu_trans_quant_param(scale.npu(), None, 2), "round_mode must be 0 or 1")


@check
def int4_packing() -> None:
    numbers = whole(-8, 7, 6, 24, dtype=torch.int32)
    got = torch_npu.npu_convert_weight_to_int4pack(numbers.npu())
    same(got, packed(numbers))
    assert torch.equal(unpacked(got.cpu()).int(), numbers)
    refused(lambda: torch_npu.npu_convert_weight_to_int4pack(numbers[:, :6].contiguous().npu()), "multiple of 8")
    refused(lambda: torch_npu.npu_convert_weight_to_int4pack(numbers.npu().t()), "contiguous")


@check
def dynamic_quant() -> None:
    for dtype in (F16, BF16):
        x, smooth = torch.randn(2, 5, 16).to(dtype), torch.randn(16).to(dtype)
        for factor, given in ((torch.ones(16), {}), (smooth.double(), {"smooth_scales": smooth.npu()})):
            value = x.double() * factor
            y, scale = torch_npu.npu_dynamic_quant(x.npu(), **given)
            close(scale, row_scale(value)[..., 0])
            rounded(y, value / row_scale(value))
            y, scale = torch_npu.npu_dynamic_quant(x.npu(), dst_type=torch.quint4x2, **given)
            close(scale, row_scale(value, 7)[..., 0])
            rounded(unpacked(y.cpu()), value / row_scale(value, 7), -8, 7)
    x[0, 1] = 0
    y, scale = torch_npu.npu_dynamic_quant(x.npu())
    assert y[0, 1].abs().max() == 0 and scale[0, 1] == 0
    value = x.double()
    y, scale = torch_npu.npu_dynamic_quant(x.npu(), quant_mode="perchannel")
    close(scale, value.abs().amax(1) / 127)
    rounded(y, value / (value.abs().amax(1, keepdim=True) / 127))
    y, scale = torch_npu.npu_dynamic_quant(x.npu(), quant_mode="pertensor")
    close(scale, value.abs().amax().reshape(1) / 127)
    rounded(y, value / (value.abs().amax() / 127))


@check
def dynamic_quant_of_experts() -> None:
    x, smooth, ends = torch.randn(2, 5, 16, dtype=F16), torch.randn(3, 16, dtype=F16), [3, 3, 10]
    index = torch.tensor(ends, dtype=torch.int32)
    rows = x.reshape(10, 16).double()
    value = torch.cat([rows[part] * smooth[group].double() for group, part in by_group(ends)]).reshape(2, 5, 16)
    y, scale = torch_npu.npu_dynamic_quant(x.npu(), smooth_scales=smooth.npu(), group_index=index.npu())
    close(scale, row_scale(value)[..., 0])
    rounded(y, value / row_scale(value))
    y, scale, offset = torch_npu.npu_dynamic_quant_asymmetric(
        x.npu(), smooth_scales=smooth.npu(), group_index=index.npu()
    )
    exact = (value.amax(-1) - value.amin(-1)) / 255
    close(scale, exact)
    close(offset, 127 - value.amax(-1) / exact, 1e-4, 1e-4)
    call = torch_npu.npu_dynamic_quant
    refused(
        lambda: call(x.npu(), smooth_scales=smooth.npu(), group_index=(index - 1).npu()), "number of rows 10, got 9"
    )
    refused(lambda: call(x.npu(), group_index=index.npu()), "group_index needs smooth_scales")
    refused(lambda: call(x.npu(), smooth_scales=smooth.npu()), "smooth_scales [3, 16] does not fit")
    refused(lambda: call(x.float().npu()), "float16 or bfloat16")
    refused(lambda: call(x.npu(), dst_type=torch.float8_e5m2), "float8_e5m2", "not simulated")
    refused(lambda: call(x.npu()[0, 0]), "greater than 1")


@check
def dynamic_quant_asymmetric() -> None:
    x = torch.randn(3, 16, dtype=F16) + 2
    x[1] = 1
    value = x.double()
    for name, top, bottom in ((torch.int8, 127, -128), (torch.quint4x2, 7, -8)):
        y, scale, offset = torch_npu.npu_dynamic_quant_asymmetric(x.npu(), dst_type=name)
        exact = ((value.amax(-1) - value.amin(-1)) / (top - bottom)).clamp(min=1e-12)
        shift = top - value.amax(-1) / exact
        close(scale, exact)
        close(offset, shift, 1e-4, 1e-4)
        varied = [0, 2]  # a constant row has the smallest scale: its sum of two large numbers is lost in float32
        number = y.cpu() if top == 127 else unpacked(y.cpu())
        rounded(number[varied], (value / exact[:, None] + shift[:, None])[varied], bottom, top)


@check
def dynamic_block_quant() -> None:
    x = torch.randn(3, 300, dtype=BF16)
    y, scale = torch_npu.npu_dynamic_block_quant(x.npu())
    assert scale.shape == (3, 3)
    for block in range(3):
        part = x[:, 128 * block : 128 * block + 128].double()
        close(scale[:, block], row_scale(part)[:, 0])
        rounded(y[:, 128 * block : 128 * block + 128], part / row_scale(part))
    _, limited = torch_npu.npu_dynamic_block_quant(x.npu(), min_scale=100.0)
    assert float((limited.cpu() - 0.01).abs().max()) < 1e-8  # 1 / min_scale
    refused(lambda: torch_npu.npu_dynamic_block_quant(x.npu(), col_block_size=64), "col_block_size 128")


@check
def quant_scatter() -> None:
    x, updates = whole(-100, 100, 4, 3, 8, 32), torch.randn(2, 3, 5, 32, dtype=BF16)
    scale, point = (torch.rand(32) + 0.01).to(BF16), whole(-3, 3, 32).to(BF16)
    exact = updates.double() / scale.double() + point.double()
    for index, rows, starts in (([1, 3], [0, 1], [1, 3]), ([[3, 0], [1, 2]], [3, 1], [0, 2])):
        indices = torch.tensor(index, dtype=torch.int32)
        target = x.npu()
        got = torch_npu.npu_quant_scatter(
            target, indices.npu(), updates.npu(), scale.npu(), point.npu(), -2, -1, "update"
        )
        same(target, x)
        wanted = x.double()
        for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
            wanted[row, :, start : start + 5] = exact[number].round().clamp(-128, 127)
        rounded(got, wanted)
        torch_npu.npu_quant_scatter_(target, indices.npu(), updates.npu(), scale.npu(), point.npu(), -2, -1, "update")
        same(target, got.cpu())
    far = torch.tensor([1, 4], dtype=torch.int32).npu()
    refused(
        lambda: torch_npu.npu_quant_scatter(x.npu(), far, updates.npu(), scale.npu(), None, -2, -1), "outside of input"
    )


@check
def kronecker_quant() -> None:
    x, p1, p2 = torch.randn(4, 6, 16, dtype=F16), torch.randn(6, 6, dtype=F16), torch.randn(16, 16, dtype=F16)
    value = p1.double() @ x.double() @ p2.double()
    for ratio in (1.0, 0.5):
        y, scale = torch_npu.npu_kronecker_quant(x.npu(), p1.npu(), p2.npu(), ratio)
        exact = value.abs().amax((1, 2)) / (7 / ratio)
        close(scale, exact)
        rounded(unpacked(y.cpu()), value / exact[:, None, None], -8, 7)


@check
def norms() -> None:
    for dtype, wide in ((F16, torch.float32), (BF16, BF16)):
        x1, x2, gamma, beta = (torch.randn(*shape).to(dtype) for shape in ((4, 16), (4, 16), (16,), (16,)))
        x = (x1.float() + x2.float()).to(dtype)
        normed = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma.double()
        shifted = normed + beta.double()
        s1, s2 = (torch.rand(16) + 0.01).to(wide), (torch.rand(16) + 0.01).to(wide)
        z1 = whole(-9, 9, 16, dtype=torch.int32).to(torch.int32 if dtype == F16 else BF16)
        call = torch_npu.npu_add_rms_norm_quant
        arguments = [tensor.npu() for tensor in (x1, x2, gamma, s1, z1, beta, s2)]
        y1, y2, total = call(*arguments)
        same(total, x)
        rounded(y1, shifted / s1.double() + z1.double())
        rounded(y2, shifted / s2.double())
        rounded(call(*arguments[:5], div_mode=False)[0], normed * s1.double() + z1.double())

        call, smooth = torch_npu.npu_add_rms_norm_dynamic_quant, s1.to(dtype)
        y1, y2, total, c1, c2 = call(
            *arguments[:3], smooth_scale1=smooth.npu(), smooth_scale2=gamma.npu(), beta=beta.npu()
        )
        for y, scale, value in ((y1, c1, shifted * smooth.double()), (y2, c2, shifted * gamma.double())):
            close(scale, row_scale(value)[:, 0])
            rounded(y, value / row_scale(value))
        y1, y2, total, c1, c2 = call(*arguments[:3], y_dtype=torch.quint4x2)
        rounded(unpacked(y1.cpu()), normed / row_scale(normed, 7), -8, 7)
        assert y2.shape == () and c2.shape == ()

        scale, offset = torch.tensor([0.0625]).to(dtype), torch.tensor([3], dtype=torch.int8)
        got = torch_npu.npu_rms_norm_quant(x.npu(), gamma.npu(), beta.npu(), scale.npu(), offset.npu())
        rounded(got, shifted * 16 + 3)
        got, _ = torch_npu.npu_rms_norm_quant_v2(x.npu(), gamma.npu(), s1.npu(), beta=beta.npu(), div_mode=True)
        rounded(got, shifted / s1.double())
    refused(lambda: call(*arguments[:3], output_mask=[False, False]), "at least one of y1 and y2")


@check
def rotate_quant() -> None:
    x, rotation = torch.randn(4, 128, dtype=BF16), torch.randn(32, 32, dtype=BF16)
    value = (x.double().reshape(-1, 32) @ rotation.double()).reshape(4, 128).to(BF16).double()
    y, scale = torch_npu.npu_rotate_quant(x.npu(), rotation.npu())
    close(scale, row_scale(value)[:, 0])
    rounded(y, value / row_scale(value))
    y, scale = torch_npu.npu_rotate_quant(x.npu(), rotation.npu(), dst_dtype=torch.quint4x2)
    rounded(unpacked(y.cpu()), value / row_scale(value, 7), -8, 7)
    refused(lambda: torch_npu.npu_rotate_quant(x.npu(), rotation.npu()[:, :24]), "does not fit x")


@check
def swiglu_quant() -> None:
    x, ends, smooth, offsets = torch.randn(7, 32), [2, 2, 6], torch.randn(3, 16), torch.randn(3, 16)
    index = torch.tensor(ends, dtype=torch.int32)
    counts = torch.tensor([2, 0, 4], dtype=torch.int32)
    for left in (True, False):
        first, second = x.double().chunk(2, -1)
        act = silu(first) * second if left else first * silu(second)
        moved, plain = act.clone(), act.clone()
        for group, rows in by_group(ends):
            plain[rows] = act[rows] * smooth[group].double()
            moved[rows] = plain[rows] + offsets[group].double()
        options = {"activate_left": left, "smooth_scales": smooth.npu()}
        call = torch_npu.npu_swiglu_quant
        y, _ = call(x.npu(), offsets=offsets.npu(), group_index=index.npu(), **options)
        rounded(y, moved)
        for kind, numbers in ((0, index), (1, counts)):
            y, factor = call(x.npu(), group_index=numbers.npu(), quant_mode=1, group_list_type=kind, **options)
            close(factor, 127 / plain.abs().amax(-1))
            rounded(y, plain * (127 / plain.abs().amax(-1, keepdim=True)))
        y, factor = call(x.npu(), group_index=index.npu(), quant_mode=1, dst_type=torch.quint4x2, **options)
        assert y.dtype == torch.int8 and y.shape == (7, 8)
        rounded(unpacked(y.cpu(), 8), plain * (7 / plain.abs().amax(-1, keepdim=True)), -8, 7)
    refused(lambda: call(x.npu(), smooth_scales=smooth.npu(), group_index=index.npu()), "smooth_scales and offsets")
    refused(lambda: call(x[:, :7].npu(), quant_mode=1), "even")


def glu(value: torch.Tensor, mode: int, left: bool) -> torch.Tensor:
    first, second = (value[..., ::2], value[..., 1::2]) if mode == 1 else value.chunk(2, -1)
    if mode != 1 and not left:
        first, second = second, first
    if mode == 0:
        return silu(first) * second
    first = first.clamp(max=7.0)
    return first * torch.sigmoid(1.702 * first) * (second.clamp(-7.0, 7.0) + 1)


@check
def dequant_swiglu_quant() -> None:
    x, token, counts = whole(-900, 900, 7, 64, dtype=torch.int32), torch.rand(7, 1), [2, 0, 4]
    weight, smooth, index = torch.rand(3, 64) * 0.02, torch.rand(3, 32) + 0.1, torch.tensor(counts)
    call = torch_npu.npu_dequant_swiglu_quant
    ends = [2, 2, 6]
    for mode, left in ((0, False), (0, True), (1, False), (2, True)):
        given = {
            "weight_scale": weight.npu(),
            "activation_scale": token.npu(),
            "activate_left": left,
            "swiglu_mode": mode,
        }
        value = torch.zeros(7, 32, dtype=torch.float64)
        for group, rows in by_group(ends):
            value[rows] = glu(x[rows].double() * weight[group].double() * token[rows].double(), mode, left)
            value[rows] *= smooth[group].double()
        y, scale = call(x.npu(), group_index=index.npu(), quant_scale=smooth.npu(), quant_mode=1, **given)
        close(scale[:6], row_scale(value)[:6, 0])
        rounded(y[:6], (value / row_scale(value))[:6])
        assert bool(scale[6].isnan())
    bias, one = whole(-50, 50, 64, dtype=torch.int32), weight[:1]
    given = {"weight_scale": one.npu(), "activation_scale": token.npu(), "bias": bias.npu()}
    value = glu((x + bias).double() * one.double() * token.double(), 0, False)
    offset = torch.randn(32)
    y, _ = call(x.npu(), quant_scale=smooth[0].npu()[None], quant_offset=offset.npu()[None], **given)
    rounded(y, value / smooth[0].double() + offset.double())
    half = torch.randn(2, 3, 64, dtype=F16)
    value = glu(half.double(), 0, True)
    y, scale = call(half.npu(), activate_left=True, quant_mode=1)
    close(scale, row_scale(value)[..., 0])
    rounded(y, value / row_scale(value))
    refused(lambda: call(x.npu(), quant_mode=1), "weight_scale is needed for an int32 x")
    refused(lambda: call(half.npu(), quant_mode=1, round_mode=2), "round_mode is not simulated")


@check
def other_activations() -> None:
    x = torch.randn(5, 12, 4) * 6
    for interleaved in (True, False):
        flat = x.double().reshape(5, 48)
        first, second = (flat[:, ::2], flat[:, 1::2]) if interleaved else flat.chunk(2, -1)
        value = glu(torch.stack((first, second), -1).flatten(-2), 1, True).reshape(5, 6, 4)
        close(torch_npu.npu_clipped_swiglu(x.npu(), dim=1, interleaved=interleaved), value)
        counts = torch.tensor([2, 1])
        got = torch_npu.npu_clipped_swiglu(x.npu(), group_index=counts.npu(), dim=1, interleaved=interleaved)
        close(got[:3], value[:3])
        assert bool(got[3:].isnan().all())
    half, scale, offset = torch.randn(6, 16, dtype=F16), torch.rand(16).to(F16) * 20, torch.randn(16).to(F16)
    for approximate in ("none", "tanh"):
        value = torch.nn.functional.gelu(half.double(), approximate=approximate) * scale.double()
        call = torch_npu.npu_gelu_quant
        y, _ = call(
            half.npu(), input_scale=scale.npu(), input_offset=offset.npu(), approximate=approximate, quant_mode="static"
        )
        rounded(y, value + offset.double())
        y, found = call(half.npu(), input_scale=scale.npu(), approximate=approximate)
        close(found, row_scale(value)[:, 0])
        rounded(y, value / row_scale(value))
    numbers, weight, token = whole(-900, 900, 6, 16, dtype=torch.int32), torch.rand(16), torch.rand(6)
    for bias in (whole(-90, 90, 16, dtype=torch.int32), torch.randn(16)):
        early = bias.double() if bias.dtype == torch.int32 else torch.zeros(16).double()
        exact = (numbers.double() + early) * weight.double() * token.double()[:, None] + (bias.double() - early)
        got = torch_npu.npu_dequant_bias(numbers.npu(), weight.npu(), token.npu(), bias.npu(), output_dtype=F16)
        close(got, exact, 1e-3)


run()
