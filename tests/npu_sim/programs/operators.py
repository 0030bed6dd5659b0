"""Compares torch's own samples of many operators, on the CPU and on the device: prints the number and the failures."""

import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db

warnings.filterwarnings("ignore")

LISTED = """
add mul sub div addmm addmv baddbmm bmm mm matmul einsum exp log log_softmax softmax logsumexp tanh sigmoid
pow rsqrt sqrt square abs neg where clamp maximum minimum max min argmax argmin sum mean std var cumsum
cumprod sort topk gather scatter scatter_add index_select index_add index_put masked_fill masked_select
nonzero cat stack split chunk unbind repeat repeat_interleave expand permute transpose view reshape flatten
squeeze unsqueeze roll flip tril triu diagonal one_hot norm nn.functional.linear nn.functional.embedding
nn.functional.layer_norm nn.functional.rms_norm nn.functional.silu nn.functional.gelu nn.functional.relu
nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss
nn.functional.binary_cross_entropy_with_logits nn.functional.conv1d nn.functional.conv2d
nn.functional.batch_norm nn.functional.max_pool2d nn.functional.avg_pool2d nn.functional.pad
nn.functional.softplus nn.functional.normalize nn.functional.cosine_similarity isfinite isnan eq ne lt gt
logical_and logical_not floor round sign remainder fmod lerp addcmul addcdiv outer dot linalg.vector_norm
zeros_like ones_like full_like arange linspace eye bucketize searchsorted unique nn.functional.glu
nn.functional.dropout to clone contiguous copysign nan_to_num allclose equal isclose logaddexp atan2 sin cos
softmax_with_dtype meshgrid cdist diff kthvalue median mode take take_along_dim trace renorm bincount histc
addr fft.fft fft.rfft fft.irfft linalg.qr linalg.inv linalg.cholesky linalg.solve linalg.svd linalg.eigh
"""
NAMES = set(LISTED.split())


def move(x):
    if isinstance(x, torch.Tensor):
        return x.detach().to("npu:0").requires_grad_(x.requires_grad)
    if isinstance(x, (list, tuple)):
        return type(x)(move(item) for item in x)
    if isinstance(x, dict):
        return {key: "npu:0" if key == "device" else move(value) for key, value in x.items()}
    return x


def flat(x):
    if isinstance(x, torch.Tensor):
        return [x]
    return [item for part in x for item in flat(part)] if isinstance(x, (list, tuple)) else []


def same(here, there):
    there = there.cpu()
    plain = torch.nan_to_num if here.is_floating_point() else (lambda x: x)
    return here.shape == there.shape and here.dtype == there.dtype and torch.equal(plain(here), plain(there))


RANDOM = {"nn.functional.dropout"}
checked, wrong = 0, []
for op in op_db:
    if op.name not in NAMES or op.name in RANDOM or op.name == "to":
        continue
    kinds = op.supported_dtypes("cpu")
    dtype = next((kind for kind in (torch.float32, torch.int64, torch.bool) if kind in kinds), None)
    if dtype is None:
        continue
    grad = op.supports_autograd and dtype.is_floating_point
    for sample in list(op.sample_inputs("cpu", dtype, requires_grad=grad))[:5]:
        arguments = (sample.input, sample.args, dict(sample.kwargs))
        there = move(arguments)
        try:
            here_out = flat(op(arguments[0], *arguments[1], **arguments[2]))
        except Exception:  # a sample that the CPU itself refuses compares nothing
            continue
        try:
            there_out = flat(op(there[0], *there[1], **there[2]))
            good = len(here_out) == len(there_out) and all(map(same, here_out, there_out))
            roots = [[x for x in out if x.requires_grad and x.is_floating_point()] for out in (here_out, there_out)]
            if good and roots[0]:
                leaves = [
                    [x for x in flat([a, list(b), list(c.values())]) if x.requires_grad]
                    for a, b, c in (arguments, there)
                ]
                try:
                    grads = [
                        torch.autograd.grad([x.sum() for x in out], leaf, allow_unused=True)
                        for out, leaf in zip(roots, leaves, strict=True)
                    ]
                except RuntimeError:
                    grads = [[], []]
                good = all(
                    (a is None) == (b is None) and (a is None or same(a, b)) for a, b in zip(*grads, strict=True)
                )
        except Exception as error:
            good, op.why = False, f"{type(error).__name__}: {error}"[:150]
        checked += 1
        if not good:
            wrong.append(f"{op.formatted_name} {getattr(op, 'why', 'differs')}")
            break
print(checked)
print("\\n".join(wrong))
