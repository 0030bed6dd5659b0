"""Compares older operators of torch_npu with formulas in float64: shapes, activations, norms, convolutions, losses."""

import warnings

import torch
import torch_npu
from comparison import Comparison
from torch.nn.functional import conv2d, conv3d, conv_transpose2d, gelu, layer_norm, mish, softmax

warnings.filterwarnings("ignore")
torch.manual_seed(0)
compare = Comparison()
npu = torch.ops.npu


def on_npu(x):
    if isinstance(x, torch.Tensor):
        return (x.float() if x.is_floating_point() else x).npu()
    return [on_npu(part) for part in x] if isinstance(x, list) else x


def same(name, ours, reference, *inputs, tolerance=1e-5):
    try:
        found = ours(*map(on_npu, inputs))
    except Exception as error:
        compare.wrong[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return
    compare.same(name, found, reference(*(x.double() if x.is_floating_point() else x for x in inputs)), tolerance)


# Shapes and selections.
x = torch.randn(2, 3, 4, 6)
same("npu_transpose", lambda x: torch_npu.npu_transpose(x, (2, 0, 3, 1)), lambda x: x.permute(2, 0, 3, 1), x)
for name, first, perm, shape in (("first", True, (0, 2, 1, 3), (2, 4, 18)), ("last", False, (0, 2, 1), (2, 12, 6))):
    compare.gradients(
        f"npu_confusion_transpose {name}",
        lambda x, p=perm, s=shape, f=first: torch_npu.npu_confusion_transpose(x, p, s, f),
        lambda x, p=perm, s=shape, f=first: x.permute(p).reshape(s) if f else x.reshape(s).permute(p),
        [x],
    )
same("npu_reshape", lambda x: torch_npu.npu_reshape(x, (6, 24)), lambda x: x.reshape(6, 24), x)
same("npu_broadcast", lambda x: torch_npu.npu_broadcast(x, (3, 4)), lambda x: x.expand(3, 4), torch.randn(3, 1))
same("npu_slice", lambda x: torch_npu.npu_slice(x, [0, 1, 0, 2], [2, 2, -1, 3]), lambda x: x[:, 1:3, :, 2:5], x)
same(
    "npu_pad", lambda x: torch_npu.npu_pad(x, [1, 0, 2, 3]), lambda x: torch.nn.functional.pad(x, (2, 3, 1, 0)), x[0, 0]
)
same(
    "npu_indexing",
    lambda x: torch_npu.npu_indexing(x, [0, 1, -3, 5], [2, 3, -1, 0], [1, 1, 1, -2]),
    lambda x: x[:, 1:3, -3:-1].flip(3)[..., 0:5:2],
    x,
)
same(
    "npu_indexing masks",
    lambda x: torch_npu.npu_indexing(x, [1, 1, 1], [2, 2, 3], [1, 1, 1], 0b10, 0b100, 0, 0, 0b1),
    lambda x: x[1, :2, 1:],
    x,
)
same(
    "npu_stride_copy",
    lambda x: torch_npu.npu_stride_copy(x, (2, 3), (1, 2), 1),
    lambda x: x.as_strided((2, 3), (1, 2), 1),
    x,
)
small, large = torch.randn(1, 3, 2, 2, 4), torch.randn(1, 20, 2, 2, 4)
expected = torch.zeros(1, 16, 2, 2, 4, dtype=torch.float64)
expected[:, :2] += small[:, 1:]
expected += large[:, 2:18]
same("npu_stride_add", lambda a, b: torch_npu.npu_stride_add(a, b, 1, 2, 1), lambda a, b: expected, small, large)
same("npu_one_hot", lambda i: torch_npu.npu_one_hot(i, -1, 5, 2, -1), lambda i: torch.tensor(
    [[-1, -1, -1, -1, -1], [-1, -1, -1, 2, -1], [2, -1, -1, -1, -1.0]]), torch.tensor([5, 3, 0]))  # fmt: skip
same("npu_sort_v2", lambda x: torch_npu.npu_sort_v2(x, 2, True), lambda x: x.sort(2, True)[0], x)
for name, ours, theirs in (("max", torch_npu.npu_max, torch.max), ("min", torch_npu.npu_min, torch.min)):
    for keep in (False, True):
        same(
            f"npu_{name} {keep}",
            lambda x, f=ours, k=keep: list(f(x, 2, k)),
            lambda x, f=theirs, k=keep: list(f(x, 2, k)),
            x,
        )
        compare.gradients(
            f"npu_{name} gradient {keep}",
            lambda x, f=ours, k=keep: f(x, 2, k)[0],
            lambda x, f=theirs, k=keep: f(x, 2, k)[0],
            [x],
        )
same(
    "npu_bmmV2", lambda a, b: torch_npu.npu_bmmV2(a, b, []), torch.matmul, torch.randn(3, 1, 2, 4), torch.randn(5, 4, 3)
)
compare.gradients(
    "npu_bmmV2 gradient", lambda a, b: torch_npu.npu_bmmV2(a, b, []), torch.matmul, [x[0], torch.randn(3, 6, 2)]
)
table, index = torch.randn(5, 3), torch.tensor([[1, 4], [1, 0]])
compare.gradients(
    "npu_gather_sparse_index", lambda t: torch_npu.npu_gather_sparse_index(t, index.npu()), lambda t: t[index], [table]
)
same(
    "npu_scatter",
    lambda x: torch_npu.npu_scatter(x, torch.tensor([0, 1]).int().npu(), torch.tensor([7.0, 8.0]).npu(), 0),
    lambda x: torch.stack([torch.stack([x[0, 0] * 0 + 7, x[0, 1]]), torch.stack([x[1, 0], x[1, 1] * 0 + 8])]),
    torch.randn(2, 2),
)
rows, start, end = (
    torch.rand(4, 4),
    torch.tensor([[0, 1, 2, 0], [3, 3, 3, 0]]),
    torch.tensor([[1, 2, 3, 0], [4, 4, 4, 4]]),
)
filled = rows.double()
for value, i in ((1.0, 0), (2.0, 1)):
    for row in range(4):
        filled[row, start[i, row] : end[i, row]] = value
same(
    "npu_masked_fill_range",
    lambda x: torch_npu.npu_masked_fill_range(x, start.int().npu(), end.int().npu(), torch.tensor([1.0, 2.0]).npu(), 1),
    lambda x: filled,
    rows,
)

# Activations and softmaxes.
halves = torch.randn(3, 8)
for left in (False, True):
    for approximate in (0, 1):
        kind = "tanh" if approximate else "none"
        compare.gradients(
            f"npu_geglu {left} {kind}",
            lambda x, a=approximate, side=left: torch_npu.npu_geglu(x, -1, a, side)[0],
            lambda x, k=kind, side=left: gelu(x.chunk(2, -1)[not side], approximate=k) * x.chunk(2, -1)[side],
            [halves],
        )
same("npu_gelu_mul", torch_npu.npu_gelu_mul, lambda x: gelu(x[:, :4]) * x[:, 4:], halves)
compare.gradients("npu_mish", torch_npu.npu_mish, mish, [halves])
scores, hidden = torch.randn(2, 3, 32, 64), torch.rand(2, 1, 32, 64) > 0.7
compare.gradients(
    "npu_scaled_masked_softmax",
    lambda x: torch_npu.npu_scaled_masked_softmax(x, hidden.npu(), 0.3),
    lambda x: softmax((x * 0.3).masked_fill(hidden, -1e4), -1),
    [scores],
)
triangle = torch.ones(32, 64).bool().triu(1)
compare.gradients(
    "npu_scaled_masked_softmax triangle",
    lambda x: torch_npu.npu_scaled_masked_softmax(x, hidden.npu(), 2, True),
    lambda x: softmax((x * 2).masked_fill(triangle, -1e4), -1),
    [scores],
)
compare.refuse(
    "softmax shape", lambda: torch_npu.npu_scaled_masked_softmax(scores[..., :30].npu(), hidden[..., :30].npu())
)
bias, mask = torch.randn(1, 1, 3, 4, 4), torch.randn(1, 2, 1, 4, 4)
same(
    "npu_masked_softmax_with_rel_pos_bias",
    lambda x, m, b: torch_npu.npu_masked_softmax_with_rel_pos_bias(x, m, b, 0.5),
    lambda x, m, b: softmax(x * 0.5 + m + b, -1),
    torch.randn(1, 2, 3, 4, 4),
    mask,
    bias,
)
logits, values = torch.randn(2, 3, 5), torch.randn(2, 5, 4)
leaf = logits.double().requires_grad_()
product = softmax(leaf, -1) @ values.double()
above = torch.randn_like(product)
product.backward(above)
attention = logits.npu()
torch_npu.npu_attn_softmax_(attention)
compare.same("npu_attn_softmax_", attention, softmax(logits.double(), -1))
torch_npu.npu_attn_softmax_backward_(attention, above.float().npu(), values.npu())
compare.same("npu_attn_softmax_backward_", attention, leaf.grad)
labels = softmax(torch.randn(4, 5), -1)
compare.gradients(
    "npu_softmax_cross_entropy_with_logits",
    lambda x: torch_npu.npu_softmax_cross_entropy_with_logits(x, labels.npu()),
    lambda x: -(labels.double() * torch.log_softmax(x, -1)).sum(1),
    [torch.randn(4, 5)],
)

# Dropout: what is left, its scale, and a mask that the way back uses.
ones = torch.ones(64, 33, device="npu", requires_grad=True)
left, bits = torch_npu._npu_dropout(ones, 0.25)
left.sum().backward()
kept = ones.grad.cpu() != 0
compare.same("_npu_dropout", [left, ones.grad], [kept / 0.75, kept / 0.75])
compare.same("_npu_dropout share", kept.double().mean(), torch.tensor(0.75, dtype=torch.float64), 0.05)
places = (bits.cpu()[:, None].int() >> torch.arange(8)) & 1
compare.same("_npu_dropout mask", places.flatten()[: kept.numel()], kept.flatten())
compare.same("size of the mask", torch.tensor(bits.numel()), torch.tensor((64 * 33 + 127) // 128 * 16))
same(
    "npu_dropout_do_mask",
    lambda x: npu.npu_dropout_do_mask(x, bits, 0.25)[0],
    lambda x: x * kept / 0.75,
    torch.randn(64, 33),
)
soft_mask, soft, dropped = torch_npu.npu_dropout_with_add_softmax(
    scores.npu(), mask[0, 0, 0, 0, 0].expand_as(scores).npu(), 0.3, 0.0, -1
)
compare.same("npu_dropout_with_add_softmax", [soft, dropped], [softmax(scores.double() * 0.3, -1)] * 2)

# Norms.
x1, x2, gamma, beta = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
same(
    "npu_layer_norm_eval",
    lambda x, g, b: torch_npu.npu_layer_norm_eval(x, [8], g, b),
    lambda x, g, b: layer_norm(x, [8], g, b),
    x1,
    gamma,
    beta,
)
compare.gradients(
    "npu_add_layer_norm",
    lambda a, b, g, c: [npu.npu_add_layer_norm(a, b, g, c, 1e-5, True)[i] for i in (0, 3)],
    lambda a, b, g, c: [layer_norm(a + b, [8], g, c), a + b],
    [x1, x2, gamma, beta],
)
compare.gradients(
    "npu_deep_norm",
    lambda a, b, c, g: npu.npu_deep_norm(a, b, c, g, 0.4, 1e-5)[2],
    lambda a, b, c, g: layer_norm(a * 0.4 + b, [8], g, c),
    [x1, x2, beta, gamma],
)
image, weight, shift = torch.randn(2, 6, 5, 3), torch.randn(6), torch.randn(6)


def swish(x, scale=1.0):
    return x * torch.sigmoid(x * scale)


compare.gradients(
    "npu_group_norm_swish",
    lambda x, w, b: torch_npu.npu_group_norm_swish(x, 3, w, b, eps=1e-5, swish_scale=1.3)[0],
    lambda x, w, b: swish(torch.nn.functional.group_norm(x, 3, w, b), 1.3),
    [image, weight, shift],
)
same(
    "npu_group_norm_silu",
    lambda x, w, b: torch_npu.npu_group_norm_silu(x, w, b, 3)[0],
    lambda x, w, b: swish(torch.nn.functional.group_norm(x, 3, w, b)),
    image,
    weight,
    shift,
)


def rms(x, g):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * g


same("npu_add_rms_norm_cast", lambda a, b, g: [torch_npu.npu_add_rms_norm_cast(a, b, g)[i] for i in (0, 1, 3)],
     lambda a, b, g: [rms(a + b, g), rms(a + b, g), a + b], x1, x2, gamma)  # fmt: skip
first, second = x1.npu(), x2.npu()
npu.npu_add_rms_norm_v2(first, second, gamma.npu())
compare.same("npu_add_rms_norm_v2", [first, second], [rms((x1 + x2).double(), gamma.double()), x1 + x2])

# Convolutions.
picture, kernel = torch.randn(2, 4, 6, 7), torch.randn(6, 2, 3, 3)
turned = torch.randn(4, 3, 3, 3)
compare.gradients(
    "npu_convolution in two dimensions",
    lambda x, w, b: torch_npu.npu_convolution(x, w, b, [2, 1], [1, 0], [1, 2], 2),
    lambda x, w, b: conv2d(x, w, b, (2, 1), (1, 0), (1, 2), 2),
    [picture, kernel, torch.randn(6)],
    1e-4,
)
compare.gradients(
    "npu_conv_transpose2d",
    lambda x, w, b: torch_npu.npu_convolution_transpose(x, w, b, [1, 0], [1, 0], [2, 1], [1, 1], 2),
    lambda x, w, b: conv_transpose2d(x, w, b, (2, 1), (1, 0), (1, 0), 2, (1, 1)),
    [picture, turned, torch.randn(6)],
    1e-4,
)
volume, cube = torch.randn(1, 2, 4, 5, 4), torch.randn(3, 2, 2, 2, 2)
compare.gradients(
    "npu_convolution",
    lambda x, w: torch_npu.npu_convolution(x, w, None, [1, 1, 2], [0, 1, 0], [1, 1, 1], 1),
    lambda x, w: conv3d(x, w, None, (1, 1, 2), (0, 1, 0)),
    [volume, cube],
    1e-4,
)
same(
    "npu_conv3d",
    lambda x, w: torch_npu.npu_conv3d(x, w, None, [1, 1, 1], [0, 0, 0], [1, 1, 1], 1),
    conv3d,
    volume,
    cube,
    tolerance=1e-4,
)
found = torch_npu.npu_conv2d(picture.npu(), kernel.npu(), None, [2, 1], [1, 0], [1, 2], 2)
compare.same("npu_conv2d", found, conv2d(picture, kernel, None, (2, 1), (1, 0), (1, 2), 2), 1e-4)
compare.refuse("conv stride", lambda: torch_npu.npu_conv2d(picture.npu(), kernel.npu(), None, [1], [0, 0], [1, 1], 2))

# Attention from before flash attention: half precision.
q, k, v = (torch.randn(2, 2, 16, 16).half() for _ in range(3))
mask = torch.randn(2, 2, 16, 16).half()
leaves = [part.double().requires_grad_() for part in (q, k, v)]
context = softmax(leaves[0] @ leaves[1].transpose(-1, -2) * 0.25 + mask.double(), -1) @ leaves[2]
context = context.transpose(1, 2).reshape(32, 32)
above = torch.randn_like(context)
context.backward(above)
there = [part.npu().requires_grad_() for part in (q, k, v)]
found = torch_npu.npu_fused_attention_score(*there, mask.npu(), 0.25, 1.0)
found.backward(above.half().npu())
compare.same(
    "npu_fused_attention_score", [found, [part.grad for part in there]], [context, [leaf.grad for leaf in leaves]], 5e-3
)
compare.refuse("transposed", lambda: torch_npu.npu_fused_attention_score(*there, mask.npu(), 0.25, 1.0, True))

width, heads, rows = 256, 16, 64
tensors = [torch.randn(rows, width).half() * 0.5 for _ in range(3)]
weights = [torch.randn(width, width).half() * 0.06 for _ in range(4)]
biases = [torch.randn(width).half() * 0.1 for _ in range(4)]
adds = torch.randn(4, heads, 16, 16).half()
leaves = [part.double().requires_grad_() for part in (*tensors, *weights, *biases)]
tq, tk, tv, wq, wk, wv, wo, bq, bk, bv, bo = leaves
sq, sk, sv = (
    torch.nn.functional.linear(t, w, b).reshape(4, 16, heads, 16).transpose(1, 2)
    for t, w, b in ((tq, wq, bq), (tk, wk, bk), (tv, wv, bv))
)
soft = softmax(sq * 0.25 @ sk.transpose(-1, -2) + adds.double(), -1)
result = torch.nn.functional.linear((soft @ sv).transpose(1, 2).reshape(rows, width), wo, bo)
above = torch.randn_like(result)
result.backward(above)
there = [leaf.detach().half().npu().requires_grad_() for leaf in leaves]
tq, tk, tv, wq, wk, wv, wo, bq, bk, bv, bo = there
found = torch_npu.npu_multi_head_attention(
    tq, tk, tv, wq, wk, wv, adds.npu(), wo, bq, bk, bv, bo, None, heads, 16, 16, 16, 0.0, True
)[0]
found.backward(above.half().npu())
compare.same(
    "npu_multi_head_attention", [found, [part.grad for part in there]], [result, [leaf.grad for leaf in leaves]], 1e-2
)

dropped = torch_npu.npu_multi_head_attention(
    *(part.detach() for part in (tq, tk, tv, wq, wk, wv)), adds.npu(), wo.detach(), None, None, None, None, None,
    heads, 16, 16, 16, 0.5, False,
)  # fmt: skip
kept = (dropped[1].cpu()[:, None].int() >> torch.arange(8)) & 1
expected = dropped[5].cpu().double().flatten() * kept.flatten() * 2
compare.same("npu_multi_head_attention dropout", dropped[6].flatten(), expected, 1e-3)
compare.same("npu_multi_head_attention kept", kept.double().mean(), torch.tensor(0.5, dtype=torch.float64), 0.05)

# A cast has derivatives of every order.
leaf = torch.randn(3).npu().requires_grad_()
cast = torch_npu.npu_dtype_cast(leaf, torch.float16)
(slope,) = torch.autograd.grad((cast.float() ** 3).sum(), leaf, create_graph=True)
(bend,) = torch.autograd.grad(slope.sum(), leaf)
compare.same("npu_dtype_cast twice", [slope, bend], [3 * leaf.detach() ** 2, 6 * leaf.detach()], 5e-3)

# Optimizers, on three steps.
parameter, grads = torch.randn(7), [torch.randn(7) for _ in range(3)]
state = [part.double() for part in (parameter, torch.zeros(7), torch.zeros(7))]
there = [part.float().npu() for part in state]
bert_state, bert = [part.clone() for part in state], [part.clone() for part in there]
for step, grad in enumerate(grads, 1):
    g = grad.double()
    state[1], state[2] = 0.9 * state[1] + 0.1 * g, 0.99 * state[2] + 0.01 * g * g
    state[0] = state[0] - 0.1 * (state[1] / (1 - 0.9**step)) / ((state[2] / (1 - 0.99**step)).sqrt() + 1e-8)
    eps = 1e-8 * (1 - 0.99**step) ** 0.5  # ApplyAdam adds it before the correction
    torch_npu.npu_apply_adam(0.9**step, 0.99**step, 0.1, 0.9, 0.99, eps, grad.npu(), False, False, out=there)
    bert_state[1], bert_state[2] = 0.9 * bert_state[1] + 0.1 * g, 0.99 * bert_state[2] + 0.01 * g * g
    bert_state[0] = bert_state[0] - 0.1 * (bert_state[1] / (bert_state[2].sqrt() + 1e-6) + 0.01 * bert_state[0])
    torch_npu.npu_bert_apply_adam(0.1, 0.9, 0.99, 1e-6, grad.npu(), -1.0, 0.0, 0.01, out=bert)
compare.same("npu_apply_adam", there, state)
compare.same("npu_bert_apply_adam", bert, bert_state)
compare.refuse(
    "bert mode",
    lambda: torch_npu.npu_bert_apply_adam(0.1, 0.9, 0.99, 1e-6, grads[0].npu(), -1.0, 0.0, 0.0, 1.0, 1, out=bert),
)

# The rest.
signs = torch.tensor([5, 4, 3, 2, 0, -1, -2, 4, 3, 2, 1, 0, -1, -2.0])
packed = torch_npu.npu_sign_bits_pack(signs.npu(), 2)
compare.same("npu_sign_bits_pack", packed, torch.tensor([[159], [15]]))
expected = torch.tensor([[1, 1, 1, 1, 1, -1, -1, 1], [1, 1, 1, 1, -1, -1, -1, -1.0]])
compare.same("npu_sign_bits_unpack", torch_npu.npu_sign_bits_unpack(packed.flatten(), 2, torch.float32), expected)
words, top_p, top_k = torch.randn(3, 9), torch.tensor([0.5, 0.9, 0.01]), torch.tensor([4, 9, 2]).int()


def filtered(x):
    out = torch.full_like(x, float("-inf"))
    for row in range(3):
        order = x[row].argsort(descending=True)[: top_k[row]]
        share = softmax(x[row, order], -1)
        before = share.cumsum(-1) - share
        order = order[(before < top_p[row].double()) | (torch.arange(len(order)) == 0)]
        out[row, order] = x[row, order]
    return out


same("npu_top_k_top_p", lambda x: torch_npu.npu_top_k_top_p(x, top_p.npu(), top_k.npu()), filtered, words)
compare.refuse("top none", lambda: torch_npu.npu_top_k_top_p(words.npu(), None, None))
LOSSES = {
    "kl_div_backward": lambda x, t: torch.nn.functional.kl_div(x, t, reduction="sum"),
    "l1_loss_backward": lambda x, t: torch.nn.functional.l1_loss(x, t, reduction="sum"),
}
for name, loss in LOSSES.items():
    leaf, target = torch.randn(3, 4).double().requires_grad_(), torch.rand(3, 4)
    loss(leaf, target.double()).backward()
    found = getattr(npu, name)(torch.tensor(1.0).npu(), leaf.detach().float().npu(), target.npu(), 2)
    compare.same(name, found, leaf.grad)
compare.report()
