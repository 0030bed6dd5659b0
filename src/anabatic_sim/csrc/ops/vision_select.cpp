// Non-maximum suppression, with the rules of TensorFlow that op-plugin documents for these operators: greedy, from the best score
// on, what overlaps a kept box by more than the threshold is dropped; unused places of the results are 0.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>

#include "fallback.h"
#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using Corners = std::array<float, 4>;

Tensor plain(const Tensor& x) { return x.to(at::kFloat).contiguous(); }

Corners corners_of(const Tensor& boxes, int64_t row) {
  const float* box = boxes.const_data_ptr<float>() + row * boxes.stride(0);
  return {std::min(box[0], box[2]), std::min(box[1], box[3]), std::max(box[0], box[2]), std::max(box[1], box[3])};
}

double overlap(const Corners& a, const Corners& b) {
  const double w = std::min(a[2], b[2]) - std::max(a[0], b[0]), h = std::min(a[3], b[3]) - std::max(a[1], b[1]);
  if (w <= 0 || h <= 0)
    return 0;
  const auto area = [](const Corners& x) { return (double{x[2]} - x[0]) * (double{x[3]} - x[1]); };
  return w * h / (area(a) + area(b) - w * h);
}

// Rows of `boxes` [N, 4] that are kept, best first, at most `most`.
std::vector<int64_t> suppress(const Tensor& boxes, const float* scores, int64_t step, double score_threshold, double threshold,
                              int64_t most) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < boxes.size(0); i++)
    if (scores[i * step] > score_threshold)
      order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a * step] > scores[b * step]; });
  std::vector<int64_t> kept;
  for (const int64_t candidate : order) {
    if (static_cast<int64_t>(kept.size()) == most)
      break;
    const Corners box = corners_of(boxes, candidate);
    const auto hides = [&](int64_t other) { return overlap(box, corners_of(boxes, other)) > threshold; };
    if (std::none_of(kept.begin(), kept.end(), hides))
      kept.push_back(candidate);
  }
  return kept;
}

// The indices of kept boxes in `max_output_size` places, and how many they are.
std::tuple<Tensor, Tensor> nms_v4(const Tensor& boxes, const Tensor& scores, const at::Scalar& most, const Tensor& threshold,
                                  const Tensor& score_threshold, bool) {
  TORCH_CHECK(boxes.dim() == 2 && boxes.size(1) == 4 && scores.dim() == 1 && scores.size(0) == boxes.size(0),
              "npu_nms_v4: boxes must be [N, 4] and scores [N], got ", boxes.sizes(), " and ", scores.sizes());
  const Tensor values = plain(scores);
  const auto kept = suppress(plain(boxes), values.const_data_ptr<float>(), 1, score_threshold.item<double>(),
                             threshold.item<double>(), most.toLong());
  Tensor indices = at::zeros({most.toLong()}, at::kInt);
  for (size_t i = 0; i < kept.size(); i++) indices.mutable_data_ptr<int>()[i] = static_cast<int>(kept[i]);
  return {indices, at::full({}, static_cast<int64_t>(kept.size()), at::kInt)};
}

// Rows [x1, y1, x2, y2, score, ...] in their own order: the boxes, their places, and 1 for each that no earlier kept box hides.
std::tuple<Tensor, Tensor, Tensor> nms_with_mask(const Tensor& rows, const at::Scalar& threshold) {
  TORCH_CHECK(rows.dim() == 2 && rows.size(1) == 8, "npu_nms_with_mask: input must be [N, 8], got ", rows.sizes());
  const Tensor boxes = plain(rows);
  const int64_t count = rows.size(0);
  Tensor mask = at::zeros({count}, at::kByte);
  auto* kept = mask.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < count; i++) {
    kept[i] = 1;
    for (int64_t j = 0; j < i && kept[i] != 0; j++)
      if (kept[j] != 0 && overlap(corners_of(boxes, i), corners_of(boxes, j)) > threshold.toDouble())
        kept[i] = 0;
  }
  return {rows.slice(1, 0, 5).clone(), at::arange(count, at::kInt), mask};
}

struct Found {
  float score;
  int64_t row, kind;
};

// Boxes [B, N, 1 or C, 4] and scores [B, N, C]: for each image the best boxes of all classes, their scores, classes and number.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_nms(const Tensor& boxes, const Tensor& scores, double score_threshold,
                                                     double threshold, int64_t per_class, int64_t total, bool change_frame,
                                                     bool transpose_box) {
  TORCH_CHECK(boxes.numel() > 0, "The input tensor [self] is an empty tensor.");
  TORCH_CHECK_NOT_IMPLEMENTED(!change_frame, "anabatic sim: npu_batch_nms with change_coordinate_frame is not simulated");
  TORCH_CHECK_NOT_IMPLEMENTED(!transpose_box, "anabatic sim: npu_batch_nms with transpose_box is not simulated");
  TORCH_CHECK(boxes.dim() == 4 && scores.dim() == 3 && boxes.size(3) == 4 && boxes.size(0) == scores.size(0) &&
                  boxes.size(1) == scores.size(1) && (boxes.size(2) == 1 || boxes.size(2) == scores.size(2)),
              "npu_batch_nms: self must be [batch, N, 1 or classes, 4] and scores [batch, N, classes], got ", boxes.sizes(),
              " and ", scores.sizes());
  const int64_t batch = boxes.size(0), kinds = scores.size(2);
  const Tensor all = plain(boxes), values = plain(scores);
  Tensor best = at::zeros({batch, total, 4}, at::kFloat), marks = at::zeros({batch, total}, at::kFloat);
  Tensor classes = at::zeros({batch, total}, at::kFloat), counts = at::zeros({batch}, at::kInt);
  for (int64_t b = 0; b < batch; b++) {
    std::vector<Found> found;
    for (int64_t kind = 0; kind < kinds; kind++) {
      const Tensor own = all[b].select(1, boxes.size(2) == 1 ? 0 : kind);
      const float* score = values.const_data_ptr<float>() + b * scores.size(1) * kinds + kind;
      for (const int64_t row : suppress(own, score, kinds, score_threshold, threshold, per_class))
        found.push_back({score[row * kinds], row, kind});
    }
    std::stable_sort(found.begin(), found.end(), [](const Found& x, const Found& y) { return x.score > y.score; });
    const int64_t count = std::min<int64_t>(total, static_cast<int64_t>(found.size()));
    for (int64_t i = 0; i < count; i++) {
      best[b][i].copy_(all[b][found[i].row][boxes.size(2) == 1 ? 0 : found[i].kind]);
      marks[b][i].fill_(found[i].score);
      classes[b][i].fill_(static_cast<double>(found[i].kind));
    }
    counts[b].fill_(count);
  }
  const auto dtype = boxes.scalar_type();
  return {best.to(dtype), marks.to(dtype), classes.to(dtype), counts};
}

// Places of values that are not zero, in random order: `count` of them (0: all), with a flag for each that is one.
std::tuple<Tensor, Tensor> random_choice(const Tensor& x, int64_t count, int64_t seed, int64_t seed2) {
  const Tensor places = x.nonzero();
  const int64_t have = places.size(0), most = count > 0 ? count : have, used = std::min(have, most);
  const uint64_t own = seed != 0 || seed2 != 0 ? static_cast<uint64_t>(seed) * 2654435761ULL + static_cast<uint64_t>(seed2)
                                               : take_seed_here();  // Knuth's multiplicative constant
  const Tensor order = at::randperm(have, at::detail::createCPUGenerator(own), at::kLong);
  Tensor chosen = at::zeros({most, x.dim()}, at::kInt), valid = at::zeros({most}, at::kBool);
  chosen.slice(0, 0, used).copy_(places.index_select(0, order.slice(0, 0, used)));
  valid.slice(0, 0, used).fill_(true);
  return {chosen, valid};
}

}  // namespace

void register_vision_select(torch::Library& npu) {
  npu.impl("npu_nms_v4", TORCH_FN(nms_v4));
  npu.impl("npu_nms_with_mask", TORCH_FN(nms_with_mask));
  npu.impl("npu_batch_nms", TORCH_FN(batch_nms));
  npu.impl("npu_random_choice_with_mask", TORCH_FN(random_choice));
}

}  // namespace sim
