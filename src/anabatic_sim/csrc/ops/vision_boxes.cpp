// Coordinates of boxes and their assignment: op-plugin's pages of these operators with their examples, torch_npu's tests of them,
// and the coders of MMDetection that they stand for (delta_xywh_bbox_coder.py with an offset of one pixel, yolo_bbox_coder.py).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/atan.h>
#include <ATen/ops/log.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tan.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <cmath>
#include <numbers>

#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;

// Centre and size; the last pixel belongs to the box where `pixel` is 1.
struct Centred {
  Tensor x, y, w, h;

  explicit Centred(const Tensor& box, double pixel, int64_t dim = -1) {
    const Tensor x1 = box.select(dim, 0), y1 = box.select(dim, 1), x2 = box.select(dim, 2), y2 = box.select(dim, 3);
    x = (x1 + x2) / 2;
    y = (y1 + y2) / 2;
    w = x2 - x1 + pixel;
    h = y2 - y1 + pixel;
  }
};

void check_boxes(const char* name, const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.dim() == 2 && a.size(1) == 4 && a.sizes() == b.sizes(), name, ": both inputs must be [N, 4], got ", a.sizes(),
              " and ", b.sizes());
}

Tensor decode(const Tensor& rois, const Tensor& deltas, double m0, double m1, double m2, double m3, double s0, double s1,
              double s2, double s3, at::IntArrayRef max_shape, double ratio) {
  check_boxes("npu_bounding_box_decode", rois, deltas);
  TORCH_CHECK(ratio > 0, "npu_bounding_box_decode: wh_ratio_clip must be positive, got ", ratio);
  const Tensor d = widened(deltas) * at::tensor({s0, s1, s2, s3}, at::kFloat) + at::tensor({m0, m1, m2, m3}, at::kFloat);
  const Centred roi(widened(rois), 1);
  const double most = std::abs(std::log(ratio));
  const Tensor w = roi.w * d.select(1, 2).clamp(-most, most).exp(), h = roi.h * d.select(1, 3).clamp(-most, most).exp();
  const Tensor x = roi.x + roi.w * d.select(1, 0), y = roi.y + roi.h * d.select(1, 1);
  const int64_t height = max_shape[0], width = max_shape[max_shape.size() > 1 ? 1 : 0];
  const Tensor sides[] = {(x - w / 2 + 0.5).clamp(0, width - 1), (y - h / 2 + 0.5).clamp(0, height - 1),
                          (x + w / 2 - 0.5).clamp(0, width - 1), (y + h / 2 - 0.5).clamp(0, height - 1)};
  return at::stack(sides, 1).to(rois.scalar_type());
}

// A box of negative size has the logarithm NaN, as on the A2 (torch_npu, contrib/test_bbox_coder.py).
Tensor encode(const Tensor& anchors, const Tensor& truth, double m0, double m1, double m2, double m3, double s0, double s1,
              double s2, double s3) {
  check_boxes("npu_bounding_box_encode", anchors, truth);
  const Centred a(widened(anchors), 1), g(widened(truth), 1);
  const Tensor deltas[] = {(g.x - a.x) / a.w, (g.y - a.y) / a.h, at::log(g.w / a.w), at::log(g.h / a.h)};
  const Tensor d = at::stack(deltas, 1);
  // Rounded to fp16 before and after, as in the example of torch_npu-npu_bounding_box_encode.md: 13.3281 for 13.3333, of fp32 boxes.
  const Tensor rounded = d.to(at::kHalf).to(at::kFloat);
  const Tensor scaled = (rounded - at::tensor({m0, m1, m2, m3}, at::kFloat)) / at::tensor({s0, s1, s2, s3}, at::kFloat);
  return scaled.to(at::kHalf).to(anchors.scalar_type());
}

Tensor yolo_encode(const Tensor& boxes, const Tensor& truth, const Tensor& stride, bool) {
  check_boxes("npu_yolo_boxes_encode", boxes, truth);
  TORCH_CHECK(stride.dim() == 1 && stride.size(0) == boxes.size(0), "npu_yolo_boxes_encode: stride must be [N], got ",
              stride.sizes());
  constexpr double kTiny = 1e-6;
  const Centred a(widened(boxes), 0), g(widened(truth), 0);
  const Tensor step = widened(stride);
  const Tensor deltas[] = {((g.x - a.x) / step + 0.5).clamp(kTiny, 1 - kTiny),
                           ((g.y - a.y) / step + 0.5).clamp(kTiny, 1 - kTiny), at::log((g.w / a.w).clamp_min(kTiny)),
                           at::log((g.h / a.h).clamp_min(kTiny))};
  return at::stack(deltas, 1).to(boxes.scalar_type());
}

constexpr double kDegree = std::numbers::pi / 180;

void check_rotated(const char* name, const Tensor& a, const Tensor& b, const Tensor& weight) {
  TORCH_CHECK(a.dim() == 3 && a.size(1) == 5 && a.sizes() == b.sizes(), name, ": both inputs must be [B, 5, N], got ",
              a.sizes(), " and ", b.sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(weight.eq(1).all().item<bool>(), "anabatic sim: ", name, " with weight is not simulated");
}

// Corners and an angle in degrees; the deltas of angles are those of their tangents (the examples of the pages).
Tensor rotated_encode(const Tensor& anchors, const Tensor& truth, const Tensor& weight) {
  check_rotated("npu_rotated_box_encode", anchors, truth, weight);
  const Tensor from = widened(anchors), to = widened(truth);
  const Centred a(from, 0, 1), g(to, 0, 1);
  const Tensor turn = at::tan(to.select(1, 4) * kDegree) - at::tan(from.select(1, 4) * kDegree);
  const Tensor deltas[] = {(g.x - a.x) / a.w, (g.y - a.y) / a.h, at::log(g.w / a.w), at::log(g.h / a.h), turn};
  return at::stack(deltas, 1).to(anchors.scalar_type());
}

Tensor rotated_decode(const Tensor& anchors, const Tensor& deltas, const Tensor& weight) {
  check_rotated("npu_rotated_box_decode", anchors, deltas, weight);
  const Tensor from = widened(anchors), d = widened(deltas);
  const Centred a(from, 0, 1);
  const Tensor x = a.x + d.select(1, 0) * a.w, y = a.y + d.select(1, 1) * a.h;
  const Tensor w = a.w * d.select(1, 2).exp(), h = a.h * d.select(1, 3).exp();
  const Tensor angle = at::atan(at::tan(from.select(1, 4) * kDegree) + d.select(1, 4)) / kDegree;
  const Tensor parts[] = {x - w / 2, y - h / 2, x + w / 2, y + h / 2, angle};
  return at::stack(parts, 1).to(anchors.scalar_type());
}

// 1 for each anchor of the cells of a feature map that the centre of a box lies in.
Tensor response_flags(const Tensor& boxes, at::IntArrayRef featmap, at::IntArrayRef stride, int64_t anchors) {
  TORCH_CHECK(boxes.dim() == 2 && boxes.size(1) == 4 && featmap.size() == 2 && stride.size() == 2,
              "npu_anchor_response_flags: self must be [batch, 4], featmap_size and strides two numbers, got ", boxes.sizes());
  const Centred box(widened(boxes), 0);
  const int64_t cells = featmap[0] * featmap[1];
  const Tensor column = (box.x / static_cast<double>(stride[0])).floor().to(at::kLong);
  const Tensor row = (box.y / static_cast<double>(stride[1])).floor().to(at::kLong);
  const Tensor index = row * featmap[1] + column;
  TORCH_CHECK(index.numel() == 0 || (index.min().item<int64_t>() >= 0 && index.max().item<int64_t>() < cells),
              "npu_anchor_response_flags: a box has its centre outside of the feature map ", featmap);
  const Tensor flags = at::zeros({cells}, at::kByte).index_fill_(0, index, 1);
  return flags.unsqueeze(1).expand({cells, anchors}).reshape({-1});
}

// MMDetection's GridAssigner: responsible boxes get the ground truth they overlap most with, where that is more than pos_iou_thr;
// and each ground truth gets its best box, or all that overlap as much.
Tensor grid_assign(const Tensor& assigned, const Tensor& overlaps, const Tensor& flags, const Tensor& max_overlaps,
                   const Tensor& argmax_overlaps, const Tensor& gt_max, const Tensor& gt_argmax, int64_t, double threshold,
                   double least, bool all) {
  const Tensor responsible = flags.to(at::kBool);
  Tensor result = widened(assigned).clone();
  result = at::where(max_overlaps.gt(threshold) & responsible, widened(argmax_overlaps) + 1, result);
  for (int64_t i = 0; i < gt_max.size(0); i++) {
    if (gt_max[i].item<double>() <= least)
      continue;
    if (all) {
      result = result.masked_fill(overlaps[i].eq(gt_max[i]) & responsible, static_cast<double>(i + 1));
    } else if (const int64_t best = gt_argmax[i].item<int64_t>(); responsible[best].item<bool>()) {
      result[best].fill_(static_cast<double>(i + 1));
    }
  }
  return result.to(assigned.scalar_type());
}

}  // namespace

void register_vision_boxes(torch::Library& npu) {
  npu.impl("npu_bounding_box_decode", TORCH_FN(decode));
  npu.impl("npu_bounding_box_encode", TORCH_FN(encode));
  npu.impl("npu_yolo_boxes_encode", TORCH_FN(yolo_encode));
  npu.impl("npu_rotated_box_encode", TORCH_FN(rotated_encode));
  npu.impl("npu_rotated_box_decode", TORCH_FN(rotated_decode));
  npu.impl("npu_anchor_response_flags", TORCH_FN(response_flags));
  npu.impl("npu_grid_assign_positive", TORCH_FN(grid_assign));
}

}  // namespace sim
