"""Compares torch_npu's operators of detection with slow formulas in float64: overlaps, coders, suppression, pooling."""

import math
import warnings

import torch
import torch_npu
from comparison import Comparison

warnings.filterwarnings("ignore")
torch.manual_seed(0)
compare = Comparison()


def corners(box):
    x, y, w, h = box
    return x - w / 2, y - h / 2, x + w / 2, y + h / 2


def one_overlap(p, g, kind):
    """One pair of boxes as centre and size: IoU with the penalty of `kind`."""
    (px1, py1, px2, py2), (gx1, gy1, gx2, gy2) = corners(p), corners(g)
    zero = torch.zeros((), dtype=p.dtype)
    inter = torch.max(zero, torch.min(px2, gx2) - torch.max(px1, gx1)) * torch.max(
        zero, torch.min(py2, gy2) - torch.max(py1, gy1)
    )
    union = p[2] * p[3] + g[2] * g[3] - inter
    iou = inter / union
    cw, ch = torch.max(px2, gx2) - torch.min(px1, gx1), torch.max(py2, gy2) - torch.min(py1, gy1)
    if kind == "giou":
        return iou - (cw * ch - union) / (cw * ch)
    out = iou - ((p[0] - g[0]) ** 2 + (p[1] - g[1]) ** 2) / (cw**2 + ch**2)
    if kind == "ciou":
        v = 4 / math.pi**2 * (torch.atan(g[2] / g[3]) - torch.atan(p[2] / p[3])) ** 2
        out = out - v * (v / (1 - iou + v)).detach()
    return out


boxes, truth = torch.rand(4, 12) * 5 + 1, torch.rand(4, 12) * 5 + 1
for kind in ("giou", "diou", "ciou"):
    ours = getattr(torch_npu, f"npu_{kind}")
    compare.gradients(
        f"npu_{kind}",
        lambda p, g, f=ours: f(p, g, True, False, 0).flatten(),
        lambda p, g, k=kind: torch.stack([one_overlap(p[:, i], g[:, i], k) for i in range(12)]),
        [boxes, truth],
        1e-4,
    )
some = truth[:, :5]
cross = torch.stack([torch.stack([one_overlap(boxes[:, i], some[:, j], "diou") for i in range(12)]) for j in range(5)])
compare.same("npu_diou cross", torch_npu.npu_diou(boxes.npu(), some.npu(), True, True, 0), cross)
plain = torch.stack(corners(boxes))
compare.same(
    "npu_diou corners", torch_npu.npu_diou(plain.npu(), torch.stack(corners(some)).npu(), False, True, 0), cross
)
compare.refuse("giou corners", lambda: torch_npu.npu_giou(boxes.npu(), truth.npu(), False, False, 0))
compare.refuse("diou sizes", lambda: torch_npu.npu_diou(boxes.npu(), some.npu(), True, False, 0))


def iou(a, b, mode):
    w, h = max(0, min(a[2], b[2]) - max(a[0], b[0])), max(0, min(a[3], b[3]) - max(a[1], b[1]))
    area = [(x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)]
    return w * h / ((sum(area) - w * h if mode == 0 else area[1]) + 0.01)


rows = torch.stack(corners(boxes), 1)
targets = torch.stack(corners(some), 1)
for mode in (0, 1):
    expected = torch.tensor([[iou(a.tolist(), b.tolist(), mode) for a in rows] for b in targets])
    compare.same(f"npu_iou {mode}", torch_npu.npu_iou(rows.npu(), targets.npu(), mode), expected)
    compare.same(f"npu_ptiou {mode}", torch_npu.npu_ptiou(rows.npu(), targets.npu(), mode), expected)

# Coders: the examples of op-plugin's pages, with the A2's NaN for a negative size.
rois, deltas = torch.tensor([[1.0, 2, 3, 4], [3, 4, 5, 6]]), torch.tensor([[5.0, 6, 7, 8], [7, 8, 9, 6]])
compare.same(
    "npu_bounding_box_decode",
    torch_npu.npu_bounding_box_decode(rois.npu(), deltas.npu(), 0, 0, 0, 0, 1, 1, 1, 1, (10, 10), 0.1),
    torch.tensor([[2.5, 6.5, 9, 9], [9, 9, 9, 9]]),
)
found = torch_npu.npu_bounding_box_encode(rois.npu(), deltas.npu(), 0, 0, 0, 0, 0.1, 0.1, 0.2, 0.2)
compare.same(
    "npu_bounding_box_encode", found, torch.tensor([[13.328125, 13.328125, 0, 0], [13.328125, 6.6640625, 0, math.nan]])
)
back = torch_npu.npu_bounding_box_decode(
    rows.npu(), torch_npu.npu_bounding_box_encode(rows.npu(), (rows + 0.3).npu(), 0.1, 0, 0, 0, 0.1, 0.1, 0.2, 0.2),
    0.1, 0, 0, 0, 0.1, 0.1, 0.2, 0.2, (100, 100), 0.016,
)  # fmt: skip
compare.same("coders are inverse", back, (rows + 0.3).clamp_min(0), 2e-2)  # the encoder rounds to fp16
anchor = torch.tensor([[[30.69], [32.6], [45.94], [59.88], [-44.53]]])
target = torch.tensor([[[30.44], [18.72], [33.22], [45.56], [8.5]]])
ones = torch.ones(5).npu()
compare.same(
    "npu_rotated_box_encode",
    torch_npu.npu_rotated_box_encode(anchor.npu(), target.npu(), ones).flatten(),
    torch.tensor([-0.4253, -0.5166, -1.7021, -0.0162, 1.1328]),
    2e-3,
)
compare.same(
    "npu_rotated_box_decode",
    torch_npu.npu_rotated_box_decode(
        anchor.npu(), torch_npu.npu_rotated_box_encode(anchor.npu(), target.npu(), ones), ones
    ),
    target,
    1e-4,
)
compare.refuse("rotated weight", lambda: torch_npu.npu_rotated_box_encode(anchor.npu(), target.npu(), ones * 2))
stride = torch.randint(1, 8, (12,))
expected = torch.tensor(
    [
        [
            min(max((((b[0] + b[2]) - (a[0] + a[2])) / 2 / s + 0.5), 1e-6), 1 - 1e-6),
            min(max((((b[1] + b[3]) - (a[1] + a[3])) / 2 / s + 0.5), 1e-6), 1 - 1e-6),
            math.log(max((b[2] - b[0]) / (a[2] - a[0]), 1e-6)),
            math.log(max((b[3] - b[1]) / (a[3] - a[1]), 1e-6)),
        ]
        for a, b, s in zip(rows.tolist(), torch.stack(corners(truth), 1).tolist(), stride.tolist(), strict=True)
    ]
)
found = torch_npu.npu_yolo_boxes_encode(rows.npu(), torch.stack(corners(truth), 1).npu(), stride.int().npu())
compare.same("npu_yolo_boxes_encode", found, expected, 1e-4)

# Assignment.
positive = torch.rand(6, 4) * 30
flags = torch.zeros(8 * 10, 3)
for x1, y1, x2, y2 in positive.tolist():
    flags[int((y1 + y2) / 2 // 4) * 10 + int((x1 + x2) / 2 // 4)] = 1
found = torch_npu.npu_anchor_response_flags(positive.npu(), [8, 10], [4, 4], 3)
compare.same("npu_anchor_response_flags", found, flags.flatten())
compare.refuse("flags outside", lambda: torch_npu.npu_anchor_response_flags(positive.npu() + 100, [8, 10], [4, 4], 3))
for everything in (True, False):
    overlaps = torch.rand(3, 7)
    overlaps[1, 4] = overlaps[1, 2] = 0.99
    assigned, responsible = torch.full((7,), -1.0), torch.tensor([1, 1, 1, 0, 1, 1, 0]).to(torch.uint8)
    expected = assigned.clone()
    for i in range(7):
        if responsible[i] and overlaps[:, i].max() > 0.7:
            expected[i] = overlaps[:, i].argmax() + 1
    for g in range(3):
        best = overlaps[g].argmax().item()
        for i in range(7):
            if (
                overlaps[g].max() > 0.2
                and responsible[i]
                and (overlaps[g, i] == overlaps[g].max() if everything else i == best)
            ):
                expected[i] = g + 1
    found = torch_npu.npu_grid_assign_positive(
        assigned.npu(), overlaps.npu(), responsible.npu(), overlaps.max(0)[0].npu(), overlaps.argmax(0).int().npu(),
        overlaps.max(1)[0].npu(), overlaps.argmax(1).int().npu(), 3, 0.7, 0.2, everything,
    )  # fmt: skip
    compare.same(f"npu_grid_assign_positive {everything}", found, expected)

# Suppression.
many, scores = torch.rand(40, 4) * 10, torch.rand(40)
many[:, 2:] += many[:, :2]


def suppress(boxes, scores, least, threshold, most):
    kept = []
    for i in scores.argsort(descending=True).tolist():
        a = boxes[i].tolist()
        if scores[i] <= least or len(kept) == most:
            continue
        pairs = [(a, boxes[j].tolist()) for j in kept]
        overlap = []
        for p, q in pairs:
            w, h = max(0, min(p[2], q[2]) - max(p[0], q[0])), max(0, min(p[3], q[3]) - max(p[1], q[1]))
            overlap.append(w * h / ((p[2] - p[0]) * (p[3] - p[1]) + (q[2] - q[0]) * (q[3] - q[1]) - w * h))
        if all(value <= threshold for value in overlap):
            kept.append(i)
    return kept


kept = suppress(many, scores, 0.3, 0.2, 12)
found = torch_npu.npu_nms_v4(many.npu(), scores.npu(), 12, torch.tensor(0.2).npu(), torch.tensor(0.3).npu())
compare.same("npu_nms_v4", list(found), [torch.tensor(kept + [0] * (12 - len(kept))), torch.tensor(len(kept))])
order = scores.argsort(descending=True)
table = torch.cat([many[order], scores[order][:, None], torch.zeros(40, 3)], 1)
flags = torch.zeros(40)
flags[suppress(table[:, :4], table[:, 4], -1, 0.2, 40)] = 1
found = torch_npu.npu_nms_with_mask(table.npu(), 0.2)
compare.same("npu_nms_with_mask", list(found), [table[:, :5], torch.arange(40), flags])
shared, per_class = torch.stack([many[:20], many[20:]])[:, :, None], torch.rand(2, 20, 3)
found = torch_npu.npu_batch_nms(shared.npu(), per_class.npu(), 0.3, 0.2, 4, 6)
for b in range(2):
    best = []
    for c in range(3):
        best += [(per_class[b, i, c].item(), i, c) for i in suppress(shared[b, :, 0], per_class[b, :, c], 0.3, 0.2, 4)]
    best = sorted(best, reverse=True)[:6]
    expected = [torch.zeros(6, 4), torch.zeros(6), torch.zeros(6), torch.tensor(len(best))]
    for place, (score, i, c) in enumerate(best):
        expected[0][place], expected[1][place], expected[2][place] = shared[b, i, 0], score, c
    compare.same(f"npu_batch_nms {b}", [part[b] for part in found], expected)
compare.refuse("batch_nms frame", lambda: torch_npu.npu_batch_nms(shared.npu(), per_class.npu(), 0.3, 0.2, 4, 6, True))
chosen, valid = torch_npu.npu_random_choice_with_mask((scores > 0.5).npu(), 30, 1, 0)
have = (scores > 0.5).sum().item()
compare.same("npu_random_choice_with_mask", chosen[:have].flatten().sort()[0], (scores > 0.5).nonzero().flatten())
compare.same("npu_random_choice_with_mask valid", valid, torch.arange(30) < have)


# Pooling of regions.
def bilinear(image, y, x):
    height, width = image.shape[-2:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return image[..., 0, 0] * 0
    y, x = max(y, 0), max(x, 0)
    top, left = min(int(y), height - 1), min(int(x), width - 1)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    dy, dx = (y - top if bottom > top else 0), (x - left if right > left else 0)
    upper = image[..., top, left] * (1 - dx) + image[..., top, right] * dx
    return upper * (1 - dy) + (image[..., bottom, left] * (1 - dx) + image[..., bottom, right] * dx) * dy


def roi_align(x, rois, scale, rows, columns, samples, aligned):
    results = []
    for n, x1, y1, x2, y2 in rois.tolist():
        shift = 0.5 if aligned else 0
        x1, y1, x2, y2 = (value * scale - shift for value in (x1, y1, x2, y2))
        w, h = (x2 - x1, y2 - y1) if aligned else (max(x2 - x1, 1), max(y2 - y1, 1))
        down, across = samples or math.ceil(h / rows), samples or math.ceil(w / columns)
        bins = [
            sum(
                bilinear(x[int(n)], y1 + (r + (i + 0.5) / down) * h / rows, x1 + (c + (j + 0.5) / across) * w / columns)
                for i in range(down)
                for j in range(across)
            )
            / (down * across)
            for r in range(rows)
            for c in range(columns)
        ]
        results.append(torch.stack(bins, -1).reshape(-1, rows, columns))
    return torch.stack(results)


image = torch.randn(2, 3, 7, 9)
regions = torch.tensor([[0, -3.0, 2, 15, 11], [1, 4, 4, 5, 4.5], [1, 1, 3, 30, 40]])
for mode, samples in ((0, 2), (3, 2), (0, 0)):
    leaf = image.double().requires_grad_()
    expected = roi_align(leaf, regions, 0.5, 2, 3, samples, mode == 3)
    above = torch.randn_like(expected)
    expected.backward(above)
    found = torch_npu.npu_roi_align(image.npu(), regions.npu(), 0.5, 2, 3, samples, mode)
    back = torch_npu.npu_roi_alignbk(above.float().npu(), regions.npu(), list(image.shape), 3, 2, 0.5, samples, mode)
    compare.same(f"npu_roi_align {mode} {samples}", [found, back], [expected, leaf.grad])
compare.refuse("roi_end_mode", lambda: torch_npu.npu_roi_align(image.npu(), regions.npu(), 0.5, 2, 3, 2, 1))
compare.refuse("roi image", lambda: torch_npu.npu_roi_align(image.npu(), (regions + 1).npu(), 0.5, 2, 3, 2, 0))

maps = torch.randn(2, 2 * 9, 8, 10)
sets = torch.tensor(
    [[[0, 1.2, 2.0, 14.0, 9.0], [0, 0, 0, 3, 3]], [[1, 5, 6, 19, 30], [1, 40, 40, 50, 50.0]]]
).transpose(1, 2)


def ps_roi_pooling(x, sets, scale, group, out):
    results = []
    for region in sets.transpose(1, 2).reshape(-1, 5).tolist():
        n = int(region[0])
        x1, y1 = round(region[1]) * scale, round(region[2]) * scale
        w = max(round(region[3] + 1) * scale - x1, 0.1) / group
        h = max(round(region[4] + 1) * scale - y1, 0.1) / group
        cells = []
        for c in range(out):
            for r in range(group):
                for k in range(group):
                    top, bottom = (min(max(f, 0), 8) for f in (math.floor(r * h + y1), math.ceil((r + 1) * h + y1)))
                    left, right = (min(max(f, 0), 10) for f in (math.floor(k * w + x1), math.ceil((k + 1) * w + x1)))
                    own = x[n, (c * group + r) * group + k, top:bottom, left:right]
                    cells.append(own.mean() if own.numel() else x[0, 0, 0, 0] * 0)
        results.append(torch.stack(cells).reshape(out, group, group))
    return torch.stack(results)


compare.gradients(
    "npu_ps_roi_pooling",
    lambda x: torch_npu.npu_ps_roi_pooling(x, sets.contiguous().npu(), 0.5, 3, 2),
    lambda x: ps_roi_pooling(x, sets, 0.5, 3, 2),
    [maps],
)


# Deformable convolution, value by value.
def deformable(x, weight, offset, bias, stride, pad, dilation, groups):
    batch, channels = x.shape[:2]
    kh, kw, (rows, columns) = *weight.shape[2:], offset.shape[2:]
    parts = offset.reshape(batch, 3, groups, kh, kw, rows, columns)
    out = []
    for n in range(batch):
        for r in range(rows):
            for c in range(columns):
                sample = []
                for g in range(groups):
                    image = x[n, g * channels // groups : (g + 1) * channels // groups]
                    for i in range(kh):
                        for j in range(kw):
                            dx, dy, m = parts[n, :, g, i, j, r, c]
                            py, px = r * stride - pad + i * dilation + dy, c * stride - pad + j * dilation + dx
                            y0, x0 = torch.floor(py.detach()).long().item(), torch.floor(px.detach()).long().item()
                            total = 0
                            for y in (y0, y0 + 1):
                                for z in (x0, x0 + 1):
                                    if 0 <= y < x.shape[2] and 0 <= z < x.shape[3]:
                                        total = total + image[:, y, z] * (1 - (py - y).abs()) * (1 - (px - z).abs())
                            sample.append(total * m if isinstance(total, torch.Tensor) else image[:, 0, 0] * 0)
                sample = torch.stack(sample).reshape(groups, kh, kw, -1).permute(0, 3, 1, 2).reshape(channels, kh, kw)
                out.append((weight * sample).sum((1, 2, 3)) + bias)
    return torch.stack(out).reshape(batch, rows, columns, -1).permute(0, 3, 1, 2)


def npu_deformable(x, weight, offset, bias):
    return torch_npu.npu_deformable_conv2d(
        x, weight, offset, bias, [3, 3], [1, 1, 2, 2], [1, 1, 1, 1], [1, 1, 1, 1], 1, 2, True
    )[0]


tensors = [torch.randn(2, 4, 5, 6), torch.randn(3, 4, 3, 3), torch.randn(2, 2 * 27, 3, 3), torch.randn(3)]
compare.gradients(
    "npu_deformable_conv2d",
    npu_deformable,
    lambda x, w, o, b: deformable(x, w, o, b, 2, 1, 1, 2),
    tensors,
    1e-4,
)
compare.report()
