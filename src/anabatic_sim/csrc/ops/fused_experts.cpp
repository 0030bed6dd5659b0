// Mixture of experts: the grouped matrix product, and the permutation that brings the tokens of an expert together.
//
// Semantics from op-plugin's documentation. Groups are given by their ends (group_list_type 0) or sizes (1); group_type 0 splits
// the rows of x, 2 splits the inner dimension and gives one product per group. Neither has a derivative of its own.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <limits>
#include <tuple>
#include <vector>

#include "fallback.h"
#include "kernels.h"
#include "quant.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalList = std::optional<at::TensorList>;

constexpr const char* kGrouped = "npu_grouped_matmul";

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

void absent(std::initializer_list<std::pair<const char*, const OptionalList*>> arguments) {
  for (const auto& [name, list] : arguments)
    TORCH_CHECK_NOT_IMPLEMENTED(!list->has_value() || (*list)->empty(), "anabatic sim: ", kGrouped, " with ", name,
                                " is not simulated");
}

Tensor product(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  Tensor y = at::matmul(x.to(at::kFloat), weight.to(at::kFloat));
  return given(bias) ? y + bias->to(at::kFloat) : y;
}

// Where each group ends on an axis of `whole` elements.
std::vector<int64_t> ends_of(at::IntArrayRef list, bool counts, int64_t whole) {
  std::vector<int64_t> ends;
  int64_t end = 0;
  for (size_t i = 0; i < list.size(); i++) {
    const int64_t size = counts ? list[i] : list[i] - end;
    TORCH_CHECK(size >= 0, "group_list[", i, "] - group_list[", i - 1, "] should be larger than or equal to 0, but now is ",
                size, ".");
    end += size;
    ends.push_back(end);
  }
  TORCH_CHECK(end <= whole, kGrouped, ": call aclnnGroupedMatmulV5 failed, detail:EZ1001: group_list ends at ", end, ", x has ",
              whole);
  return ends;
}

std::vector<int64_t> numbers(const Tensor& list) {
  TORCH_CHECK(list.dim() == 1 && list.scalar_type() == at::kLong, kGrouped,
              ": call aclnnGroupedMatmulV5 failed, detail:EZ1001: group_list must be a vector of int64, got ", list.sizes(),
                  " of ",
              list.dtype());
  const Tensor flat = list.contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

struct Job {
  at::TensorList x, weight;
  OptionalList bias;
  int64_t split, kind;  // split_item, group_type
  at::ScalarType dtype;

  // One 3-D tensor holds all weights, or there is one 2-D tensor per group.
  bool stacked() const { return weight.size() == 1 && weight[0].dim() == 3; }
  size_t groups() const { return stacked() ? static_cast<size_t>(weight[0].size(0)) : weight.size(); }
  Tensor weight_of(size_t i) const { return stacked() ? weight[0][static_cast<int64_t>(i)] : weight[i]; }
  OptionalTensor bias_of(size_t i) const {
    if (!bias.has_value() || bias->empty()) return std::nullopt;
    return bias->size() == 1 && (*bias)[0].dim() == 2 ? (*bias)[0][static_cast<int64_t>(i)] : (*bias)[i];
  }
};

// The inner dimension is split: one product per group, x arrives transposed.
std::vector<Tensor> inner(const Job& job, const std::vector<int64_t>& ends) {
  const Tensor &x = job.x[0], &weight = job.weight[0];
  TORCH_CHECK(job.x.size() == 1 && job.weight.size() == 1 && x.dim() == 2 && weight.dim() == 2 && job.split >= 2, kGrouped,
              ": call aclnnGroupedMatmulV5 failed, detail:EZ1001: "
              "group_type 2 takes one 2-D x, one 2-D weight and split_item 2 or 3");
  TORCH_CHECK(x.stride(0) == 1 || x.numel() <= 1 || x.size(1) == 1, kGrouped,
              ": call aclnnGroupedMatmulV5 failed, detail:EZ1001: "
              "with group_type 2 x must be transposed (pass x.T of a contiguous x)");
  TORCH_CHECK(x.size(1) == weight.size(0), kGrouped, ": x ", x.sizes(), " and weight ", weight.sizes(), " do not fit");
  Tensor y = at::zeros({static_cast<int64_t>(ends.size()), x.size(0), weight.size(1)}, x.options().dtype(job.dtype));
  int64_t from = 0;
  for (size_t i = 0; i < ends.size(); from = ends[i++])
    if (ends[i] > from)
      y[static_cast<int64_t>(i)].copy_(product(x.narrow(1, from, ends[i] - from), weight.narrow(0, from, ends[i] - from), {}));
  return {y};
}

// x holds the rows of all groups.
std::vector<Tensor> outer(const Job& job, const std::vector<int64_t>& ends) {
  const Tensor& x = job.x[0];
  TORCH_CHECK(job.groups() == ends.size(), kGrouped, ": ", job.groups(), " weights and ", ends.size(), " groups");
  std::vector<Tensor> parts;
  int64_t from = 0;
  for (size_t i = 0; i < ends.size(); from = ends[i++])
    parts.push_back(product(x.narrow(0, from, ends[i] - from), job.weight_of(i), job.bias_of(i)).to(job.dtype));
  if (job.split < 2) return parts;
  // The kernel does not write what lies behind the last group.
  if (from < x.size(0))
    parts.push_back(at::full({x.size(0) - from, job.weight_of(0).size(-1)}, std::numeric_limits<double>::quiet_NaN(),
                             x.options().dtype(job.dtype)));
  return {at::cat(parts)};
}

std::vector<Tensor> grouped(const Job& job, const std::optional<std::vector<int64_t>>& list, bool counts) {
  TORCH_CHECK(!job.x.empty() && !job.weight.empty(), "Invalid inputs: neither x nor weight could be empty.");
  TORCH_CHECK(job.split >= 0 && job.split <= 3, "Invalid value of split_item [", job.split,
              "], which should only be one of 0/1/2/3.");
  TORCH_CHECK(job.kind == -1 || job.kind == 0 || job.kind == 2, "group_type only supports -1, 0 and 2, but got ", job.kind);
  const auto kind = job.x[0].scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(kind), "anabatic sim: ", kGrouped, " of ", kind, " is not simulated");
  for (const auto* tensors : {&job.x, &job.weight})
    for (const Tensor& tensor : *tensors)
      TORCH_CHECK(tensor.scalar_type() == kind, kGrouped, ": call aclnnGroupedMatmulV5 failed, detail:EZ1001: x is ", kind,
                  " and weight ", tensor.scalar_type());
  if (job.x.size() == 1 && list.has_value() && job.kind != -1) {
    const auto ends = ends_of(*list, counts, job.x[0].size(job.kind == 2 ? 1 : 0));
    return job.kind == 2 ? inner(job, ends) : outer(job, ends);
  }
  TORCH_CHECK(job.x.size() == job.groups(), "When split_item = 0 or 1 and input group_list is None, "
              "the num of x tensors must equal the num of weight tensors. Actual lengths: x [", job.x.size(), "], weight [",
              job.groups(), "].");
  std::vector<Tensor> parts;
  for (size_t i = 0; i < job.x.size(); i++) parts.push_back(product(job.x[i], job.weight_of(i), job.bias_of(i)).to(job.dtype));
  if (job.split < 2) return parts;
  return {at::cat(parts)};
}

std::vector<Tensor> grouped_matmul(at::TensorList x, at::TensorList weight, OptionalList bias, OptionalList scale,
                                   OptionalList offset,
                                   OptionalList a1, OptionalList a2, OptionalList token, const OptionalTensor& group_list,
                                   OptionalList i1, OptionalList i2, OptionalList i3, std::optional<int64_t> split,
                                   std::optional<int64_t> kind, std::optional<int64_t> list_type, std::optional<int64_t> act,
                                   at::OptionalIntArrayRef, std::optional<int64_t> dtype, std::optional<int64_t> x_dtype,
                                   std::optional<int64_t> weight_dtype, std::optional<int64_t> scale_dtype,
                                   std::optional<int64_t> token_dtype) {
  TORCH_CHECK(kind.has_value(), "Requires manual passing group_type, current is None.");
  absent({{"activation_input", &i1}, {"activation_quant_scale", &i2}, {"activation_quant_offset", &i3}});
  quant::absent(kGrouped, {{"x_dtype", x_dtype.has_value()}, {"weight_dtype", weight_dtype.has_value()},
                           {"scale_dtype", scale_dtype.has_value()}, {"per_token_scale_dtype", token_dtype.has_value()}});
  quant::GroupedArguments quantised{x, weight, bias, scale, offset, a1, a2, token, std::nullopt, split.value_or(0), *kind,
                                    act.value_or(0), std::nullopt};
  if (quant::is_quantised(quantised)) {
    if (dtype.has_value()) quantised.dtype = static_cast<at::ScalarType>(*dtype);
    if (given(group_list) && !x.empty())
      quantised.groups = quant::groups_of(kGrouped, *group_list, list_type.value_or(0), x[0].size(0));
    return quant::quantised_grouped_matmul(quantised);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(act.value_or(0) == 0, "anabatic sim: ", kGrouped, " with act_type is not simulated");
  TORCH_CHECK_NOT_IMPLEMENTED(list_type.value_or(0) <= 1, "anabatic sim: ", kGrouped, " with group_list_type 2 is not simulated");
  std::optional<std::vector<int64_t>> list;
  if (given(group_list)) list = numbers(*group_list);
  const auto result = dtype.has_value() ? static_cast<at::ScalarType>(*dtype) : x[0].scalar_type();
  return grouped({x, weight, bias, split.value_or(0), *kind, result}, list, list_type.value_or(0) == 1);
}

std::vector<Tensor> grouped_matmul_list(at::TensorList x, at::TensorList weight, OptionalList bias, OptionalList scale,
                                        OptionalList offset, OptionalList a1, OptionalList a2, OptionalList token,
                                        at::OptionalIntArrayRef group_list, OptionalList i1, OptionalList i2, OptionalList i3,
                                        std::optional<int64_t> split, std::optional<int64_t>, std::optional<int64_t>,
                                        std::optional<int64_t>, std::optional<at::ScalarType> dtype) {
  absent({{"activation_input", &i1}, {"activation_quant_scale", &i2}, {"activation_quant_offset", &i3}});
  quant::GroupedArguments quantised{x, weight, bias, scale, offset, a1, a2, token, std::nullopt, split.value_or(0), 0, 0, dtype};
  if (quant::is_quantised(quantised)) {
    if (group_list.has_value() && !group_list->empty() && !x.empty())
      quantised.groups = quant::groups_of(kGrouped, at::tensor(*group_list, at::kLong), 0, x[0].size(0));
    return quant::quantised_grouped_matmul(quantised);
  }
  std::optional<std::vector<int64_t>> list;
  if (group_list.has_value() && !group_list->empty()) list = group_list->vec();
  return grouped({x, weight, bias, split.value_or(0), 0, dtype.value_or(x[0].scalar_type())}, list, false);
}

// input[i] += x_i^T weight_i, the accumulation of weight gradients in float32.
Tensor& grouped_matmul_add_(Tensor& input, const Tensor& x, const Tensor& weight, const Tensor& group_list, bool turn_x,
                            bool turn_weight,
                            int64_t kind, std::optional<int64_t> list_type) {
  TORCH_CHECK(kind == 2, "group_type only supports 2, but got ", kind);
  TORCH_CHECK_NOT_IMPLEMENTED(turn_x && !turn_weight,
                              "anabatic sim: npu_grouped_matmul_add_ takes transpose_x=True, transpose_weight=False");
  const auto ends = ends_of(numbers(group_list), list_type.value_or(0) == 1, x.size(0));
  Tensor sums = input.view({static_cast<int64_t>(ends.size()), x.size(1), weight.size(1)});
  int64_t from = 0;
  for (size_t i = 0; i < ends.size(); from = ends[i++])
    sums[static_cast<int64_t>(i)].add_(product(x.narrow(0, from, ends[i] - from).t(), weight.narrow(0, from, ends[i] - from),
                                               {}));
  return input;
}

void no_padding(const char* name, bool padded) {
  TORCH_CHECK_NOT_IMPLEMENTED(!padded, "anabatic sim: ", name, " with padded_mode is not simulated");
}

int64_t chosen(const Tensor& indices) { return indices.dim() == 1 ? 1 : indices.size(1); }

std::tuple<Tensor, Tensor> permute(const Tensor& tokens, const Tensor& indices, std::optional<int64_t> wanted, bool padded) {
  no_padding("npu_moe_token_permute", padded);
  TORCH_CHECK(tokens.dim() == 2, "The dims of input tokens should be 2 dimensional, but got ", tokens.dim(), "-dimensional.");
  TORCH_CHECK(indices.dim() == 1 || indices.dim() == 2, "The dims of input indices should be 2 or 1 dimensional, but got ",
              indices.dim(),
              "-dimensional.");
  const Tensor order = at::argsort(indices.flatten(), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const int64_t all = order.numel(), number = wanted.value_or(0);
  const int64_t kept = number > 0 ? std::min(number, all) : all + number;
  const Tensor rows = order.narrow(0, 0, kept).div(chosen(indices), "floor");
  return {tokens.index_select(0, rows), at::argsort(order, true, 0, false).to(at::kInt)};
}

// Row i of the result is the sum over the chosen experts of what became of token i.
Tensor gathered(const Tensor& grad, const Tensor& places, int64_t tokens, int64_t topk, at::ScalarType dtype) {
  const Tensor index = places.to(at::kLong), there = index.lt(grad.size(0));
  if (grad.size(0) == 0) return at::zeros({tokens, grad.size(1)}, grad.options().dtype(dtype));
  const Tensor rows = grad.to(at::kFloat).index_select(0, index.clamp_max(grad.size(0) - 1)) * there.unsqueeze(1);
  return rows.view({tokens, topk, -1}).sum(1).to(dtype);
}

Tensor permute_grad(const Tensor& tokens, const Tensor& grad, const Tensor& indices, const Tensor& places, bool padded) {
  no_padding("npu_moe_token_permute_grad", padded);
  return gathered(grad, places, tokens.size(0), chosen(indices), tokens.scalar_type());
}

Tensor permute_grad_v2(const Tensor& grad, const Tensor& places, c10::SymInt tokens, at::ScalarType dtype, c10::SymInt topk,
                       bool padded) {
  no_padding("npu_moe_token_permute_grad", padded);
  return gathered(grad, places, tokens.expect_int(), topk.expect_int(), dtype);
}

Tensor unpermute(const Tensor& permuted, const Tensor& places, const OptionalTensor& probs, bool padded,
                 at::OptionalIntArrayRef) {
  no_padding("npu_moe_token_unpermute", padded);
  const int64_t topk = given(probs) ? probs->size(1) : 1, tokens = places.numel() / topk;
  const Tensor index = places.to(at::kLong), there = index.lt(permuted.size(0));
  if (permuted.size(0) == 0) return at::zeros({tokens, permuted.size(1)}, permuted.options());
  Tensor rows = permuted.to(at::kFloat).index_select(0, index.clamp_max(permuted.size(0) - 1)) * there.unsqueeze(1);
  if (given(probs)) rows = rows * probs->to(at::kFloat).reshape({-1, 1});
  return rows.view({tokens, topk, -1}).sum(1).to(permuted.scalar_type());
}

// Also what the derivative needs: the permuted tokens themselves.
std::tuple<Tensor, Tensor> unpermute_kept(const Tensor& permuted, const Tensor& places, const OptionalTensor& probs, bool padded,
                                          at::OptionalIntArrayRef shape) {
  return {unpermute(permuted, places, probs, padded, shape), permuted};
}

std::tuple<Tensor, Tensor> unpermute_grad_of(const Tensor& grad, const Tensor& places, int64_t size, at::ScalarType dtype,
                                             const OptionalTensor& probs, const OptionalTensor& permuted) {
  const int64_t topk = given(probs) ? probs->size(1) : 1;
  const Tensor index = places.to(at::kLong), there = index.lt(size).nonzero().squeeze(1);
  const Tensor from = index.index_select(0, there), above = grad.to(at::kFloat).index_select(0, there.div(topk, "floor"));
  Tensor rows = above, dprobs;
  if (given(probs)) {
    rows = above * probs->to(at::kFloat).reshape({-1, 1}).index_select(0, there);
    TORCH_CHECK(given(permuted), "npu_moe_token_unpermute_grad: probs need permuted_tokens");
    const Tensor dots = (above * permuted->to(at::kFloat).index_select(0, from)).sum(1);
    dprobs = at::zeros({places.numel()}, dots.options()).index_copy_(0, there, dots).view_as(*probs).to(probs->scalar_type());
  }
  const Tensor dtokens = at::zeros({size, grad.size(1)}, rows.options()).index_copy_(0, from, rows).to(dtype);
  return {dtokens, dprobs};
}

std::tuple<Tensor, Tensor> unpermute_grad(const Tensor& permuted, const Tensor& grad, const Tensor& places,
                                          const OptionalTensor& probs,
                                          bool padded, at::OptionalIntArrayRef) {
  no_padding("npu_moe_token_unpermute_grad", padded);
  return unpermute_grad_of(grad, places, permuted.size(0), permuted.scalar_type(), probs, permuted);
}

std::tuple<Tensor, Tensor> unpermute_grad_v2(const Tensor& grad, const Tensor& places, c10::SymInt size, at::ScalarType dtype,
                                             const OptionalTensor& probs, bool padded, at::OptionalIntArrayRef,
                                             const OptionalTensor& permuted) {
  no_padding("npu_moe_token_unpermute_grad", padded);
  return unpermute_grad_of(grad, places, size.expect_int(), dtype, probs, permuted);
}

}  // namespace

void register_fused_experts(torch::Library& npu) {
  npu.impl("npu_grouped_matmul", TORCH_FN(grouped_matmul));
  npu.impl("npu_grouped_matmul.List", TORCH_FN(grouped_matmul_list));
  npu.impl("npu_grouped_matmul_add_", TORCH_FN(grouped_matmul_add_));
  npu.impl("npu_moe_token_permute", TORCH_FN(permute));
  npu.impl("npu_moe_token_permute_grad", TORCH_FN(permute_grad));
  npu.impl("npu_moe_token_permute_grad_v2", TORCH_FN(permute_grad_v2));
  npu.impl("npu_moe_token_unpermute", TORCH_FN(unpermute));
  npu.impl("_npu_moe_token_unpermute", TORCH_FN(unpermute_kept));
  npu.impl("npu_moe_token_unpermute_grad", TORCH_FN(unpermute_grad));
  npu.impl("npu_moe_token_unpermute_grad_v2", TORCH_FN(unpermute_grad_v2));
}

}  // namespace sim
