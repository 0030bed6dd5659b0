// Mixture of experts: which experts a token goes to, from the scores of the gate.
//
// Formulas: op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_gating_top_k.md, ..._gating_top_k_softmax.md and
// ..._compute_expert_tokens.md; aclnnMoeGatingTopKSoftmaxV2 and aclnnMoeGatingTopKBackward of CANN's operator library. Ties keep
// the order of the experts. Scores are float32 whatever the dtype of x.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <limits>
#include <tuple>

#include "fused_common.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t kMostExperts = 2048;  // of npu_moe_gating_top_k, also with each group rounded up to 32
constexpr int64_t kAligned = 32;

// The k largest of each row, the first ones of equals.
Tensor best(const Tensor& scores, int64_t k) {
  return std::get<1>(at::sort(scores, /*stable=*/true, /*dim=*/-1, /*descending=*/true)).narrow(-1, 0, k);
}

struct Groups {
  int64_t count, chosen, mode;  // group_count, k_group, group_select_mode
};

void check_groups(const Groups& groups, int64_t experts, int64_t k) {
  const char* failed = "npu_moe_gating_top_k: call aclnnMoeGatingTopK failed, error code is 561002: ";
  TORCH_CHECK(groups.mode == 0 || groups.mode == 1, failed, "group_select_mode must be 0 or 1, got ", groups.mode);
  TORCH_CHECK(groups.count > 0 && experts % groups.count == 0, failed, experts, " experts do not make ", groups.count,
              " groups (group_count)");
  const int64_t each = experts / groups.count;
  TORCH_CHECK(each > groups.mode, failed, "a group must have more than ", groups.mode, " experts, has ", each);
  TORCH_CHECK((each + kAligned - 1) / kAligned * kAligned * groups.count <= kMostExperts, failed, groups.count, " groups of ",
              each, " experts, rounded up to 32, are more than ", kMostExperts);
  TORCH_CHECK(groups.chosen >= 1 && groups.chosen <= groups.count, failed, "k_group must be in [1, ", groups.count, "], got ",
              groups.chosen);
  TORCH_CHECK(k >= 1 && k <= each * groups.chosen, failed, "k must be in [1, ", each * groups.chosen, "], got ", k);
}

// Experts outside the chosen groups lose: a group is worth its best expert (mode 0) or its two best (1).
Tensor within_groups(const Tensor& scores, const Groups& groups) {
  if (groups.count == 1) return scores;
  const Tensor grouped = scores.view({scores.size(0), groups.count, -1});
  const Tensor sorted = std::get<0>(at::sort(grouped, /*stable=*/true, -1, /*descending=*/true));
  const Tensor worth = sorted.narrow(-1, 0, groups.mode == 0 ? 1 : 2).sum(-1);
  const Tensor lost = at::full({scores.size(0), groups.count}, true, scores.options().dtype(at::kBool))
                          .scatter(1, best(worth, groups.chosen), false);
  return grouped.masked_fill(lost.unsqueeze(-1), -std::numeric_limits<double>::infinity()).view_as(scores);
}

Three gating_top_k(const Tensor& x, int64_t k, const OptionalTensor& bias, const OptionalTensor& input_ids,
                   const OptionalTensor& tid2eid, int64_t k_group, int64_t group_count, int64_t group_select_mode,
                   int64_t renorm, int64_t norm_type, bool out_flag, double routed_scaling_factor, double eps) {
  const char* name = "npu_moe_gating_top_k";
  TORCH_CHECK(x.dim() == 2, "The x should be 2D");
  TORCH_CHECK(is_float_of_npu(x), "float16, float32 or bfloat16 tensor expected but got a tensor with dtype: ", x.scalar_type());
  if (is_given(bias)) {
    TORCH_CHECK(x.scalar_type() == bias->scalar_type(), "The dtype of x and bias should be same");
    TORCH_CHECK(bias->dim() == 1, "The bias should be 1D");
    TORCH_CHECK(bias->size(0) == x.size(1), "The bias first dim should be same as x second dim");
  }
  refuse_given(name, {{"input_ids", &input_ids}, {"tid2eid", &tid2eid}});
  TORCH_CHECK(renorm == 0, name, ": renorm only supports 0, got ", renorm);
  TORCH_CHECK(norm_type == 0 || norm_type == 1, name, ": norm_type must be 0 (softmax) or 1 (sigmoid), got ", norm_type);
  const Groups groups{group_count, k_group, group_select_mode};
  check_groups(groups, x.size(1), k);
  const Tensor wide = x.to(at::kFloat), scores = norm_type == 1 ? at::sigmoid(wide) : at::softmax(wide, -1);
  // The bias decides who is chosen, and is not part of the weights.
  const Tensor chosen = best(within_groups(is_given(bias) ? scores + bias->to(at::kFloat) : scores, groups), k);
  Tensor weights = scores.gather(1, chosen);
  if (norm_type == 1) weights = weights / (weights.sum(-1, true) + eps);
  weights = weights * routed_scaling_factor;
  return {weights.to(x.scalar_type()), chosen.to(at::kInt), out_flag ? scores : unwritten(x.sizes(), scores.options())};
}

Tensor gating_top_k_backward(const Tensor& x_norm, const Tensor& grad_y, const Tensor& expert_idx, int64_t renorm,
                             int64_t norm_type, double routed_scaling_factor, double eps) {
  TORCH_CHECK_NOT_IMPLEMENTED(norm_type == 1, "anabatic sim: npu_moe_gating_top_k_backward with norm_type ", norm_type,
                              " is not simulated");
  TORCH_CHECK(renorm == 0, "npu_moe_gating_top_k_backward: renorm only supports 0, got ", renorm);
  const Tensor index = expert_idx.to(at::kLong), picked = x_norm.to(at::kFloat).gather(1, index);
  const Tensor scaled = grad_y.to(at::kFloat) * routed_scaling_factor;
  const Tensor sum = picked.sum(-1, true) + eps;
  const Tensor inner = (scaled - (picked / sum * scaled).sum(-1, true)) / sum;
  const Tensor spread = at::zeros(x_norm.sizes(), inner.options()).scatter_add(1, index, inner);
  return (x_norm * (1 - x_norm) * spread).to(grad_y.scalar_type());
}

void check_softmax(const Tensor& x, const OptionalTensor& finished, int64_t k) {
  TORCH_CHECK(x.dim() == 2 || x.dim() == 3, "The x should be 2D or 3D");
  TORCH_CHECK(is_float_of_npu(x), "float16, float32 or bfloat16 tensor expected but got a tensor with dtype: ", x.scalar_type());
  TORCH_CHECK(k >= 0 && k <= x.size(-1), "The k should be in [0, ", x.size(-1), "]");
  if (!is_given(finished)) return;
  TORCH_CHECK(finished->scalar_type() == at::kBool, "bool tensor expected but got a tensor with dtype: ",
              finished->scalar_type());
  TORCH_CHECK(finished->sizes() == x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)),
              "x.dim() should be 1 more than finished.dim(), and the rows the same: x ", x.sizes(), ", finished ",
              finished->sizes());
}

// A finished row goes to no expert: its expert is the one behind the last.
Tensor experts_of(const Tensor& chosen, const Tensor& x, const OptionalTensor& finished) {
  if (!is_given(finished)) return chosen.to(at::kInt);
  return chosen.masked_fill(finished->unsqueeze(-1), x.size(-1)).to(at::kInt);
}

Three gating_softmax(const Tensor& x, const OptionalTensor& finished, int64_t k) {
  check_softmax(x, finished, k);
  const Tensor scores = at::softmax(x.to(at::kFloat), -1), chosen = best(scores, k);
  const int64_t rows = x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
  const Tensor places = at::arange(rows * k, chosen.options().dtype(at::kInt)).view({k, rows}).t().contiguous();
  return {scores.gather(-1, chosen).to(x.scalar_type()), experts_of(chosen, x, finished), places.view(chosen.sizes())};
}

Three gating_softmax_v2(const Tensor& x, int64_t k, const OptionalTensor& finished, std::optional<int64_t> renorm,
                        std::optional<bool> output_softmax) {
  check_softmax(x, finished, k);
  const int64_t order = renorm.value_or(0);
  TORCH_CHECK(order == 0 || order == 1, "renorm must be 0 or 1, but got: ", order);
  const Tensor wide = x.to(at::kFloat);
  if (order == 1) {  // the k best first, then the softmax of these
    const Tensor chosen = best(wide, k);
    return {at::softmax(wide.gather(-1, chosen), -1).to(x.scalar_type()), experts_of(chosen, x, finished),
            at::empty({0}, wide.options())};
  }
  const Tensor scores = at::softmax(wide, -1), chosen = best(scores, k);
  return {scores.gather(-1, chosen).to(x.scalar_type()), experts_of(chosen, x, finished),
          output_softmax.value_or(false) ? scores : at::empty({0}, wide.options())};
}

// Where the rows of each expert end.
Tensor compute_expert_tokens(const Tensor& sorted_experts, int64_t experts) {
  const char* name = "npu_moe_compute_expert_tokens";
  TORCH_CHECK(sorted_experts.dim() == 1 && sorted_experts.scalar_type() == at::kInt, name,
              ": call aclnnMoeComputeExpertTokens failed, detail:EZ1001: sorted_expert_for_source_row must be a vector of int32");
  TORCH_CHECK(experts > 0 && experts <= kMostExperts, name,
              ": call aclnnMoeComputeExpertTokens failed, detail:EZ1001: num_expert must be in (0, 2048], got ", experts);
  return at::searchsorted(sorted_experts, at::arange(experts, sorted_experts.options()), /*out_int32=*/true, /*right=*/true);
}

}  // namespace

void register_moe_gating(torch::Library& npu) {
  npu.impl("npu_moe_gating_top_k", TORCH_FN(gating_top_k));
  npu.impl("npu_moe_gating_top_k_backward", TORCH_FN(gating_top_k_backward));
  npu.impl("npu_moe_gating_top_k_softmax", TORCH_FN(gating_softmax));
  npu.impl("npu_moe_gating_top_k_softmax_v2", TORCH_FN(gating_softmax_v2));
  npu.impl("npu_moe_compute_expert_tokens", TORCH_FN(compute_expert_tokens));
}

}  // namespace sim
