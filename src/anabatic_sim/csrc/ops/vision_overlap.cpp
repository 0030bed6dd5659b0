// Overlaps of boxes: IoU with its eps of 0.01 (op-plugin, IouKernelNpu.cpp), GIoU (Rezatofighi et al., arXiv:1902.09630),
// DIoU and CIoU (Zheng et al., arXiv:1911.08287), as torch_npu's tests of these operators write them. The arithmetic is float32.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/atan.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <torch/library.h>

#include <numbers>
#include <tuple>

#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;

// Boxes [N, 4] of corners against ground truth [M, 4]: [M, N]. Mode 1 divides by the ground truth's area alone.
Tensor iou(const Tensor& boxes, const Tensor& truth, int64_t mode) {
  TORCH_CHECK(boxes.dim() == 2 && truth.dim() == 2 && boxes.size(1) == 4 && truth.size(1) == 4,
              "npu_iou: bboxes must be [N, 4] and gtboxes [M, 4], got ", boxes.sizes(), " and ", truth.sizes());
  TORCH_CHECK(mode == 0 || mode == 1, "npu_iou: mode must be 0 (IoU) or 1 (IoF), got ", mode);
  const Tensor a = widened(boxes).unsqueeze(0), b = widened(truth).unsqueeze(1);
  const auto area = [](const Tensor& x) { return (x.select(-1, 2) - x.select(-1, 0)) * (x.select(-1, 3) - x.select(-1, 1)); };
  const Tensor size = (at::minimum(a.slice(-1, 2, 4), b.slice(-1, 2, 4)) - at::maximum(a.slice(-1, 0, 2), b.slice(-1, 0, 2)));
  const Tensor inter = size.clamp_min(0).prod(-1);
  const Tensor whole = mode == 0 ? area(a) + area(b) - inter : area(b).expand_as(inter);
  return (inter / (whole + 0.01)).to(boxes.scalar_type());
}

enum class Penalty { kEnclosing, kDistance, kShape };

// Boxes [4, N], as corners or (trans) as centre and size.
struct Box {
  Tensor x1, y1, x2, y2;

  Box(const Tensor& box, bool trans) {
    const Tensor a = box[0], b = box[1], c = box[2], d = box[3];
    x1 = trans ? a - c / 2 : a;
    y1 = trans ? b - d / 2 : b;
    x2 = trans ? a + c / 2 : c;
    y2 = trans ? b + d / 2 : d;
  }
  // A column beside the other boxes' row.
  void across() {
    for (Tensor* side : {&x1, &y1, &x2, &y2}) *side = side->unsqueeze(1);
  }
  Tensor width() const { return x2 - x1; }
  Tensor height() const { return y2 - y1; }
};

struct Overlap {
  Tensor value, angle;  // [1, N] or [M, N]; the difference of the boxes' angles
};

Overlap overlap(const Tensor& boxes, const Tensor& truth, bool trans, bool cross, int64_t mode, Penalty penalty) {
  constexpr double kTiny = 1e-10;  // torch_npu, test_npu_ciou.py and test_npu_diou.py
  const Box p(boxes, trans);
  Box g(truth, trans);
  if (cross)
    g.across();
  const Tensor inter = (at::minimum(p.x2, g.x2) - at::maximum(p.x1, g.x1)).clamp_min(0) *
                       (at::minimum(p.y2, g.y2) - at::maximum(p.y1, g.y1)).clamp_min(0);
  const Tensor both = p.width() * p.height() + g.width() * g.height() - inter + kTiny;
  const Tensor iou = inter / (mode == 0 ? both : g.width() * g.height() + kTiny);
  const Tensor cw = at::maximum(p.x2, g.x2) - at::minimum(p.x1, g.x1), ch = at::maximum(p.y2, g.y2) - at::minimum(p.y1, g.y1);
  Overlap found{iou, iou};
  if (penalty == Penalty::kEnclosing) {
    const Tensor hull = cw * ch + kTiny;
    found.value = iou - (hull - both) / hull;
  } else {
    const Tensor diagonal = cw.pow(2) + ch.pow(2) + kTiny;
    const Tensor distance = ((g.x1 + g.x2 - p.x1 - p.x2).pow(2) + (g.y1 + g.y2 - p.y1 - p.y2).pow(2)) / 4;
    found.value = iou - distance / diagonal;
  }
  if (penalty == Penalty::kShape) {
    found.angle = at::atan(g.width() / g.height()) - at::atan(p.width() / p.height());
    const Tensor v = found.angle.pow(2) * (4 / (std::numbers::pi * std::numbers::pi));
    const Tensor alpha = (v / (1 + kTiny - iou + v)).detach();  // a weight: the paper's gradient leaves it as it is
    found.value = found.value - v * alpha;
  }
  if (found.value.dim() == 1)
    return {found.value.unsqueeze(0), found.angle.unsqueeze(0)};
  return found;
}

void check(const char* name, const Tensor& boxes, const Tensor& truth, bool cross, int64_t mode) {
  TORCH_CHECK(boxes.dim() == 2 && truth.dim() == 2 && boxes.size(0) == 4 && truth.size(0) == 4, name,
              ": self and gtboxes must be [4, n], got ", boxes.sizes(), " and ", truth.sizes());
  TORCH_CHECK(cross || boxes.size(1) == truth.size(1), name,
              ": without is_cross self and gtboxes need the same number of boxes");
  TORCH_CHECK(mode == 0 || mode == 1, name, ": mode must be 0 (IoU) or 1 (IoF), got ", mode);
}

void check_backward(const char* name, bool trans, bool cross, int64_t mode) {
  TORCH_CHECK(trans && !cross && mode == 0, name,
              " backward only support trans==True, is_cross==False, mode==0('iou') current ",
              "version if you need to back propagation, please ensure your parameter is correct!");
}

Two backward(const Tensor& grad, const Tensor& boxes, const Tensor& truth, Penalty penalty) {
  const auto found = gradients_of(
      [penalty](const std::vector<Tensor>& in) {
        return std::vector<Tensor>{overlap(in[0], in[1], true, false, 0, penalty).value};
      },
      {boxes, truth}, {grad.reshape({1, -1})});
  return {found[0], found[1]};
}

// [N, 1]: op-plugin turns the kernel's [1, N].
Tensor giou(const Tensor& boxes, const Tensor& truth, bool trans, bool cross, int64_t mode) {
  check_backward("giou", trans, cross, mode);
  check("npu_giou", boxes, truth, cross, mode);
  return overlap(widened(boxes), widened(truth), trans, cross, mode, Penalty::kEnclosing)
      .value.t()
      .contiguous()
      .to(boxes.scalar_type());
}
Two giou_backward(const Tensor& grad, const Tensor& boxes, const Tensor& truth, bool trans, bool cross, int64_t mode) {
  check_backward("giou", trans, cross, mode);
  return backward(grad, boxes, truth, Penalty::kEnclosing);
}

Tensor diou(const Tensor& boxes, const Tensor& truth, bool trans, bool cross, int64_t mode) {
  check("npu_diou", boxes, truth, cross, mode);
  return overlap(widened(boxes), widened(truth), trans, cross, mode, Penalty::kDistance).value.to(boxes.scalar_type());
}
Two diou_backward(const Tensor& grad, const Tensor& boxes, const Tensor& truth, bool trans, bool cross, int64_t mode) {
  check_backward("diou", trans, cross, mode);
  return backward(grad, boxes, truth, Penalty::kDistance);
}

Two ciou_with_angle(const Tensor& boxes, const Tensor& truth, bool trans, bool cross, int64_t mode, bool) {
  check("npu_ciou", boxes, truth, cross, mode);
  const auto found = overlap(widened(boxes), widened(truth), trans, cross, mode, Penalty::kShape);
  return {found.value.to(boxes.scalar_type()), found.angle.to(boxes.scalar_type())};
}
Two ciou_backward(const Tensor& grad, const Tensor& boxes, const Tensor& truth, const OptionalTensor&, bool trans, bool cross,
                  int64_t mode) {
  check_backward("ciou", trans, cross, mode);
  return backward(grad, boxes, truth, Penalty::kShape);
}

}  // namespace

void register_vision_overlap(torch::Library& npu) {
  npu.impl("npu_iou", TORCH_FN(iou));
  npu.impl("npu_ptiou", TORCH_FN(iou));
  npu.impl("npu_giou", TORCH_FN(giou));
  npu.impl("npu_giou_backward", TORCH_FN(giou_backward));
  npu.impl("npu_diou", TORCH_FN(diou));
  npu.impl("npu_diou_backward", TORCH_FN(diou_backward));
  npu.impl("_npu_ciou", TORCH_FN(ciou_with_angle));
  npu.impl("npu_ciou_backward", TORCH_FN(ciou_backward));
}

}  // namespace sim
