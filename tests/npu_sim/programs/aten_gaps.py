"""Compares aten operators without a CPU kernel, SyncBatchNorm's steps, int32 labels and sparse tensors with the CPU."""

import copy
import warnings

import torch
import torch_npu
from comparison import Comparison

warnings.filterwarnings("ignore")
torch.manual_seed(0)
compare = Comparison()
aten = torch.ops.aten

# Products with a dtype of their own: the sums are float32.
a, b = torch.randn(5, 7).half(), torch.randn(7, 3).half()
c = torch.randn(5, 3).half()
A, B, C = a.npu(), b.npu(), c.npu()
wide = a.double() @ b.double()
compare.same("mm.dtype", torch.mm(A, B, out_dtype=torch.float32), wide)
compare.same(
    "addmm.dtype", torch.addmm(C, A, B, out_dtype=torch.float32, beta=0.5, alpha=2), c.double() * 0.5 + wide * 2
)
batch = [x[None].expand(2, *x.shape).contiguous() for x in (A, B, C)]
compare.same("bmm.dtype", torch.bmm(*batch[:2], out_dtype=torch.float32), wide[None].expand(2, -1, -1))
compare.same(
    "baddbmm.dtype",
    torch.baddbmm(batch[2], *batch[:2], out_dtype=torch.float32),
    (c.double() + wide)[None].expand(2, -1, -1),
)
out = torch.empty(5, 3, device="npu")
torch.mm(A, B, out_dtype=torch.float32, out=out)
compare.same("mm.dtype_out", out, wide)
compare.same("the same dtype", torch.mm(A, B, out_dtype=torch.float16), wide, 2e-3)
compare.refuse("mm dtype", lambda: torch.mm(A.float(), B.float(), out_dtype=torch.float16))
compare.refuse("mm mixed", lambda: torch.mm(A, B.float(), out_dtype=torch.float32))

x, weight, bias = torch.randn(2, 4, 6, 5), torch.randn(8, 1, 3, 3), torch.randn(8)
compare.same(
    "_conv_depthwise2d",
    aten._conv_depthwise2d(x.npu(), weight.npu(), [3, 3], bias.npu(), [2, 1], [1, 0], [1, 2]),
    torch.conv2d(x, weight, bias, (2, 1), (1, 0), (1, 2), 4),
)
grad = torch.randn(2, 8, 3, 1)
leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
expected = torch.autograd.grad(torch.conv2d(*leaves, None, (2, 1), (1, 0), (1, 2), 4), leaves, grad)
compare.same(
    "_conv_depthwise2d_backward",
    torch.ops.npu._conv_depthwise2d_backward(
        grad.npu(), x.npu(), weight.npu(), [3, 3], [2, 1], [1, 0], [1, 2], [True, True]
    ),
    expected,
)
compare.refuse(
    "depthwise kernel", lambda: aten._conv_depthwise2d(x.npu(), weight.npu(), [1, 3], None, [1, 1], [0, 0], [1, 1])
)
mask = torch.rand(4, 5) > 0.5
values = torch.randn(4, 5)
compare.same("_masked_scale", aten._masked_scale(values.npu(), mask.npu(), 2.5), values * mask * 2.5)
for first, second in (((3, 4), (4, 2)), ((2, 3, 4), (4, 5)), ((4,), (4, 5)), ((2, 1, 3, 4), (3, 4, 2)), ((4,), (4,))):
    leaves = [torch.randn(first).requires_grad_(), torch.randn(second).requires_grad_()]
    product = torch.matmul(*leaves)
    grad = torch.randn_like(product)
    found = aten.matmul_backward(grad.npu(), *(leaf.detach().npu() for leaf in leaves), [True, True])
    compare.same(f"matmul_backward {first} {second}", found, torch.autograd.grad(product, leaves, grad))
nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], device="npu")
padded = torch.nn.utils.rnn.pad_sequence([torch.ones(2, 3), torch.ones(4, 3)], batch_first=True, padding_value=7.0)
compare.same("to_padded_tensor", nested.to_padded_tensor(7.0), padded)

# Batch normalisation over two processes, in one: against torch.nn.BatchNorm on the whole.
for shape in ((6, 4), (6, 4, 5), (6, 4, 3, 2)):
    x, grad = torch.randn(shape), torch.randn(shape)
    whole = torch.nn.BatchNorm1d(4) if len(shape) < 4 else torch.nn.BatchNorm2d(4)
    torch.nn.init.normal_(whole.weight)
    leaf = x.clone().requires_grad_()
    expected = whole(leaf)
    expected.backward(grad)
    parts, above = x.npu().split([2, 4]), grad.npu().split([2, 4])
    stats = [torch.batch_norm_stats(part, 1e-5) for part in parts]
    counts = torch.tensor([part.numel() // 4 for part in parts], dtype=torch.float32, device="npu")
    mean_var = [torch.zeros(4, device="npu"), torch.ones(4, device="npu")]
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        parts[0], torch.stack([s[0] for s in stats]), torch.stack([s[1] for s in stats]), *mean_var, 0.1, 1e-5, counts
    )
    scale, shift = whole.weight.detach().npu(), whole.bias.detach().npu()
    compare.same(
        f"batch_norm_elemt {shape}",
        torch.cat([torch.batch_norm_elemt(part, scale, shift, mean, invstd, 1e-5) for part in parts]),
        expected,
    )
    compare.same(f"running {shape}", mean_var, [whole.running_mean, whole.running_var])
    sums = [
        torch.batch_norm_backward_reduce(g, part, mean, invstd, scale, True, True, True)
        for g, part in zip(above, parts, strict=True)
    ]
    dy, dy_xmu, dweight, dbias = (sum(column) for column in zip(*sums, strict=True))
    dx = [
        torch.batch_norm_backward_elemt(g, part, mean, invstd, scale, dy, dy_xmu, counts.int())
        for g, part in zip(above, parts, strict=True)
    ]
    compare.same(
        f"batch_norm_backward {shape}", [torch.cat(dx), dweight, dbias], [leaf.grad, whole.weight.grad, whole.bias.grad]
    )
    flat = [part.reshape(part.shape[0], 4, 1, -1) for part in parts]
    pairs = [torch_npu.batch_norm_reduce(part, 1e-5) for part in flat]
    own = [torch.zeros(4, device="npu"), torch.ones(4, device="npu")]
    found = torch_npu.batch_norm_gather_stats_update(
        parts[0], torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs]), *own, 0.1, 1e-5, counts
    )
    compare.same(f"batch_norm_gather_stats_update {shape}", [*found, *own], [mean, invstd, *mean_var])

# Labels of int32.
for shape in ((5, 3), (2, 3, 4, 2)):
    logits, labels = torch.randn(shape), torch.randint(0, 3, (shape[0], *shape[2:]))
    labels.view(-1)[0] = -100
    for reduction in ("mean", "sum", "none"):
        leaves = [logits.clone().requires_grad_(), logits.npu().requires_grad_()]
        losses = [
            torch.nn.functional.cross_entropy(
                leaf, target, weight=torch.ones(3).to(leaf.device) * 0.7, reduction=reduction
            )
            for leaf, target in zip(leaves, (labels, labels.int().npu()), strict=True)
        ]
        for loss in losses:
            loss.sum().backward()
        compare.same(f"int32 labels {shape} {reduction}", [losses[1], leaves[1].grad], [losses[0], leaves[0].grad])
margins, labels = torch.rand(2, 4), torch.tensor([[3, 0, -1, 1], [2, -1, 0, 0]])
found = torch.nn.functional.multilabel_margin_loss(margins.npu(), labels.int().npu())
compare.same("int32 labels, many", found, torch.nn.functional.multilabel_margin_loss(margins, labels))
compare.refuse("float labels", lambda: torch.nn.functional.nll_loss(A, torch.zeros(5).npu()))

# Sparse tensors: what op-plugin has kernels for, and torch's operators on top of them.
dense = torch.tensor([[0, 1.0, 0], [2, 0, 3]])
coo = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1, 0], [1, 0, 2, 1]]), torch.tensor([1.0, 2, 3, 4]), (2, 3))
SPARSE = {
    "to_dense": lambda d, s: s.to_dense(),
    "coalesce": lambda d, s: s.coalesce(),
    "values": lambda d, s: s.coalesce().values(),
    "to_sparse": lambda d, s: d.to_sparse(),
    "to_sparse rows": lambda d, s: d.to_sparse(1),
    "add": lambda d, s: s + s,
    "add to dense": lambda d, s: d + s,
    "times a number": lambda d, s: s * 2,
    "product": lambda d, s: s * s,
    "negative": lambda d, s: -s.coalesce(),
    "sum": lambda d, s: torch.sparse.sum(s),
    "sum of rows": lambda d, s: torch.sparse.sum(s, 1),
    "cat": lambda d, s: torch.cat([s, s]),
    "mask": lambda d, s: d.sparse_mask(s.coalesce()),
    "relu": lambda d, s: torch.relu(s.coalesce()),
    "to_sparse_csr": lambda d, s: d.to_sparse_csr(),
    "csr to dense": lambda d, s: d.to_sparse_csr().to_dense(),
    "csr to coo": lambda d, s: d.to_sparse_csr().to_sparse(),
}
for name, function in SPARSE.items():
    results = []
    for inputs in ((dense.npu(), coo.npu()), (dense, coo)):
        try:
            result = function(*inputs).cpu()
            results.append(result if result.layout == torch.strided else result.to_dense())
        except Exception as error:
            compare.wrong[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    if len(results) == 2:
        compare.same(f"sparse {name}", *results)
compare.refuse("sparse product", lambda: torch.sparse.mm(coo.npu(), torch.ones(3, 4).npu()))

for optimizer in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
    here = torch.nn.Embedding(5, 3, sparse=True)
    there = copy.deepcopy(here).npu()
    for layer in (here, there):
        device = layer.weight.device
        step = optimizer(list(layer.parameters()), lr=0.1)
        for _ in range(3):
            step.zero_grad()
            layer(torch.tensor([1, 2, 1], device=device)).pow(2).sum().backward()
            step.step()
    compare.same(f"sparse gradients {optimizer.__name__}", there.weight, here.weight)
for dtype in (torch.int32, torch.int8, torch.int64):
    whole = torch.tensor([7, -7, 4, -1], dtype=dtype)
    compare.same(f"quotient of {dtype}", whole.npu().div_(2), torch.div(whole, 2, rounding_mode="trunc"))
compare.same("quotient", torch.tensor([7.0]).npu().div_(2), torch.tensor([3.5]))
compare.report()
