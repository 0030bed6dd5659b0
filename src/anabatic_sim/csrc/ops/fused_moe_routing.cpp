// Mixture of experts: rows in the order of their experts, and back.
//
// Formulas: op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_init_routing.md, ..._init_routing_v2.md,
// ..._finalize_routing.md, ..._re_routing.md (formulas and their numpy programs), constraints of aclnnMoeInitRoutingV3. Of the
// quantisations, those of the 910B are here: static and dynamic int8. None of them has a derivative.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <limits>
#include <string_view>
#include <tuple>

#include "../sim.h"
#include "fused_common.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kName = "npu_moe_init_routing_v2";
constexpr int64_t kUnquantised = -1, kStatic = 0, kDynamic = 1;  // quant_mode
constexpr int64_t kCumulative = 0, kCounts = 1, kPairs = 2;      // expert_tokens_num_type
constexpr double kLargestInt8 = 127;
constexpr int64_t kHifloat8 = 290;  // torch_npu.hifloat8, as uint8: rows are only moved

Tensor int32(const Tensor& index) { return index.to(at::kInt); }

// order[i] = the place of i in `places`: the inverse of a permutation.
Tensor inverse_order(const Tensor& places) {
  return at::empty_like(places).index_copy_(0, places, at::arange(places.numel(), places.options()));
}

Three init_routing(const Tensor& x, const Tensor& row_idx, const Tensor& expert_idx, int64_t active_num) {
  TORCH_CHECK(x.dim() == 2, "The x should be 2D");
  TORCH_CHECK(is_float_of_npu(x), "float16, float32 or bfloat16 tensor expected but got a tensor with dtype: ", x.scalar_type());
  for (const Tensor* index : {&expert_idx, &row_idx}) {
    TORCH_CHECK(index->dim() == 2, "The ", index == &row_idx ? "row_idx" : "expert_idx", " should be 2D");
    TORCH_CHECK(index->scalar_type() == at::kInt, "int32 tensor expected but got a tensor with dtype: ", index->scalar_type());
  }
  TORCH_CHECK(active_num >= 0, "The active_num must be a non-negative number");
  TORCH_CHECK(x.size(0) == expert_idx.size(0), "Input rows shoud be same.");
  TORCH_CHECK(expert_idx.sizes() == row_idx.sizes(), "The shape of expert_idx and row_idx should be same.");
  const int64_t rows = x.size(0), kept = std::min(active_num, rows) * expert_idx.size(1);
  const Tensor flat = expert_idx.flatten(), order = at::argsort(flat, /*stable=*/true, 0, false);
  const Tensor places = row_idx.flatten().to(at::kLong).index_select(0, order);
  const Tensor sources = rows == 0 ? places : places.remainder(rows);
  return {x.index_select(0, sources.narrow(0, 0, kept)), int32(inverse_order(places)), flat.index_select(0, order)};
}

// What the arguments of npu_moe_init_routing_v2 ask for.
struct Routing {
  const Tensor &x, &expert_idx;
  const OptionalTensor &scale, &offset;
  int64_t active_num, capacity, experts, drop, count_type;
  bool count;
  int64_t quant, start, end, row_idx_type;

  int64_t top_k() const { return expert_idx.size(1); }
};

void check_index(const Routing& job) {
  TORCH_CHECK(job.x.dim() == 2, "The x should be 2-Dimension, current is ", job.x.dim(), "-Dimension.");
  TORCH_CHECK(job.expert_idx.dim() == 2, "The expert_idx should be 2-Dimension, current is ", job.expert_idx.dim(),
              "-Dimension.");
  TORCH_CHECK(job.expert_idx.scalar_type() == at::kInt && job.x.size(0) == job.expert_idx.size(0), kName,
              ": call aclnnMoeInitRoutingV3 failed, detail:EZ1001: expert_idx must be int32 with the rows of x, got ",
              job.expert_idx.dtype(), " of ", job.expert_idx.sizes(), " for x of ", job.x.sizes());
  TORCH_CHECK(job.start >= 0 && job.end > job.start && job.end <= job.experts, kName,
              ": call aclnnMoeInitRoutingV3 failed, detail:EZ1001: active_expert_range [", job.start, ", ", job.end,
              ") must lie in [0, expert_num ", job.experts, ")");
  TORCH_CHECK(job.row_idx_type == 0 || job.row_idx_type == 1, kName, ": row_idx_type must be 0 or 1, got ", job.row_idx_type);
  TORCH_CHECK(job.count_type >= kCumulative && job.count_type <= kPairs, kName,
              ": expert_tokens_num_type must be 0, 1 or 2, got ", job.count_type);
  TORCH_CHECK(job.drop == 0 || job.drop == 1, kName, ": drop_pad_mode must be 0 or 1, got ", job.drop);
  if (job.drop == 0) return;
  TORCH_CHECK(job.capacity > 0 && job.capacity <= job.x.size(0), kName, ": expert_capacity must be in [1, ", job.x.size(0),
              "] with drop_pad_mode 1, got ", job.capacity);
  TORCH_CHECK(job.start == 0 && job.end == job.experts, kName, ": active_expert_range must be all experts with drop_pad_mode 1");
  TORCH_CHECK(job.row_idx_type == 0 && (job.count_type == kCounts || !job.count), kName,
              ": drop_pad_mode 1 takes row_idx_type 0 and expert_tokens_num_type 1");
}

void check_quant(const Routing& job) {
  const auto refuse_mode = [&](bool known) {
    TORCH_CHECK_NOT_IMPLEMENTED(known, "anabatic sim: ", kName, " with quant_mode ", job.quant, " of ", job.x.dtype(),
                                " is not simulated");
  };
  const bool is_byte = job.x.scalar_type() == at::kChar || job.x.scalar_type() == at::kByte;
  refuse_mode(is_float_of_npu(job.x) || (is_byte && job.quant == kUnquantised));
  refuse_mode(job.quant >= kUnquantised && job.quant <= kDynamic);
  const bool scaled = is_given(job.scale), shifted = is_given(job.offset);
  TORCH_CHECK(shifted == (job.quant == kStatic), kName, ": call aclnnMoeInitRoutingV3 failed, detail:EZ1001: offset belongs to ",
              "quant_mode 0, which needs it");
  if (job.quant == kStatic)
    TORCH_CHECK(scaled && job.scale->sizes() == at::IntArrayRef({1}) && job.offset->sizes() == at::IntArrayRef({1}), kName,
                ": call aclnnMoeInitRoutingV3 failed, detail:EZ1001: quant_mode 0 needs scale and offset of shape [1]");
  if (!scaled) return;
  TORCH_CHECK(job.scale->scalar_type() == at::kFloat, kName, ": scale must be float32, got ", job.scale->dtype());
  if (job.quant == kUnquantised)
    TORCH_CHECK(job.scale->dim() == 1 && job.scale->size(0) == job.x.size(0), kName, ": scale must have one number per row of x");
  if (job.quant == kDynamic)
    TORCH_CHECK(job.scale->dim() == 2 && (job.scale->size(0) == 1 || job.scale->size(0) == job.end - job.start) &&
                    job.scale->size(1) == job.x.size(1),
                kName, ": scale must be [1, H] or [experts in active_expert_range, H] with quant_mode 1");
}

// Expanded rows: which row of x each one is, and the expert (counted from the first active one) that it goes to.
struct Rows {
  Tensor sources, experts;
};

Tensor smoothed(const Routing& job, const Tensor& values, const Tensor& experts) {
  if (!is_given(job.scale)) return values;
  return values * (job.scale->size(0) == 1 ? *job.scale : job.scale->index_select(0, experts));
}

// The rows, quantised as asked, and the scale of each.
std::pair<Tensor, Tensor> values_of(const Routing& job, const Rows& rows) {
  const Tensor taken = job.x.index_select(0, rows.sources);
  if (job.quant == kUnquantised) return {taken, is_given(job.scale) ? job.scale->index_select(0, rows.sources) : Tensor()};
  if (job.quant == kStatic) {  // in float16, as the numpy program of the documentation
    const Tensor half = taken.to(at::kHalf) * job.scale->to(at::kHalf) + job.offset->to(at::kHalf);
    return {half.round().clamp(-kLargestInt8 - 1, kLargestInt8).to(at::kChar), Tensor()};
  }
  const Tensor wide = smoothed(job, taken.to(at::kFloat), rows.experts);
  const Tensor scale = wide.abs().amax({-1}) / kLargestInt8;
  const Tensor safe = at::where(scale == 0, at::ones_like(scale), scale);
  return {(wide / safe.unsqueeze(-1)).round().to(at::kChar), scale};
}

Tensor counted(const Routing& job, const Tensor& active) {
  const int64_t length = job.end - job.start;
  const auto options = job.expert_idx.options().dtype(at::kLong);
  if (!job.count) {
    if (job.count_type == kPairs) return unwritten({job.experts, 2}, options);
    return unwritten({length}, options);
  }
  const Tensor counts = at::bincount(active, {}, length);
  if (job.count_type == kCounts) return counts;
  if (job.count_type == kCumulative) return counts.cumsum(0);
  // Experts with tokens, in order, each with its number; a pair of zeros ends the list.
  Tensor pairs = unwritten({job.experts, 2}, options);
  const Tensor busy = counts.nonzero().squeeze(1);
  const int64_t found = busy.numel();
  pairs.narrow(0, 0, found).copy_(at::stack({busy + job.start, counts.index_select(0, busy)}, 1));
  if (found < job.experts) pairs[found].zero_();
  return pairs;
}

Four dropless(const Routing& job, const Tensor& order, const Tensor& experts, int64_t active) {
  const int64_t all = order.numel(), wanted = job.active_num > 0 ? job.active_num : all;
  const int64_t rows = std::min(wanted, all), kept = std::min(wanted, active);
  const Tensor chosen = order.narrow(0, 0, kept);
  const auto [values, scale] = values_of(job, {chosen.div(job.top_k(), "floor"), experts.narrow(0, 0, kept)});
  Tensor places;
  if (job.row_idx_type == 1) {
    places = order;
  } else {
    places = at::full({all}, -1, order.options());
    places.index_copy_(0, order.narrow(0, 0, active), at::arange(active, order.options()));
  }
  return {leading_rows(values, rows), int32(places), counted(job, experts.narrow(0, 0, active)),
          scale.defined() ? leading_rows(scale, rows) : unwritten({rows}, job.x.options().dtype(at::kFloat))};
}

// Every expert has `capacity` rows: what is too much is dropped, what is missing is zero.
Four padded(const Routing& job, const Tensor& order, const Tensor& experts, int64_t active) {
  const Tensor here = experts.narrow(0, 0, active), chosen = order.narrow(0, 0, active);
  const Tensor counts = at::bincount(here, {}, job.experts), first = counts.cumsum(0) - counts;
  const Tensor number = at::arange(active, order.options()) - first.index_select(0, here);  // within its expert
  const Tensor kept = number.lt(job.capacity).nonzero().squeeze(1);
  const Tensor slots = (here * job.capacity + number).index_select(0, kept), from = chosen.index_select(0, kept);
  const auto [values, scale] = values_of(job, {from.div(job.top_k(), "floor"), here.index_select(0, kept)});
  const int64_t all = job.experts * job.capacity;
  Tensor rows = at::zeros({all, job.x.size(1)}, values.options()).index_copy_(0, slots, values);
  const Tensor places = at::full({order.numel()}, -1, order.options()).index_copy_(0, from, slots);
  const auto wide = job.x.options().dtype(at::kFloat);
  return {rows.view({job.experts, job.capacity, -1}), int32(places), counted(job, here),
          scale.defined() ? at::zeros({all}, wide).index_copy_(0, slots, scale) : unwritten({all}, wide)};
}

// Without rows torch_npu calls no kernel, and sets the counts to zero.
Four nothing(const Routing& job) {
  const auto options = job.x.options();
  const auto dtype = job.quant == kUnquantised ? job.x.scalar_type() : at::kChar;
  const Tensor counts = job.count_type == kPairs ? at::zeros({job.experts, 2}, options.dtype(at::kLong))
                                                 : at::zeros({job.end - job.start}, options.dtype(at::kLong));
  return {at::empty({0, job.x.size(1)}, options.dtype(dtype)), at::empty({0}, options.dtype(at::kInt)), counts,
          at::empty({0}, options.dtype(at::kFloat))};
}

Four init_routing_v2(const Tensor& x, const Tensor& expert_idx, const OptionalTensor& scale, const OptionalTensor& offset,
                     int64_t active_num, int64_t expert_capacity, int64_t expert_num, int64_t drop_pad_mode,
                     int64_t expert_tokens_num_type, bool expert_tokens_num_flag, int64_t quant_mode,
                     at::IntArrayRef active_expert_range, int64_t row_idx_type, std::optional<int64_t> x_dtype) {
  const bool is_hifloat8 = x_dtype == kHifloat8 && x.scalar_type() == at::kByte && quant_mode == kUnquantised;
  TORCH_CHECK_NOT_IMPLEMENTED(is_hifloat8 || (!x_dtype.has_value() && x.scalar_type() != at::kByte), "anabatic sim: ", kName,
                              " with x_dtype other than hifloat8 unquantised is not simulated");
  TORCH_CHECK_NOT_IMPLEMENTED(std::string_view(sim_segment()->soc).rfind("Ascend310P", 0) != 0, "anabatic sim: ", kName,
                              " is not simulated on the 310P, whose results differ");
  TORCH_CHECK(active_expert_range.empty() || active_expert_range.size() == 2,
              "The length of list active_expert_range should be 2, current is ", active_expert_range.size(), ".");
  const bool whole = active_expert_range.empty();
  const Routing job{x, expert_idx, scale, offset, active_num, expert_capacity, expert_num, drop_pad_mode,
                    expert_tokens_num_type, expert_tokens_num_flag, quant_mode, whole ? 0 : active_expert_range[0],
                    whole ? expert_num : active_expert_range[1], row_idx_type};
  check_index(job);
  if (x.size(0) == 0) return nothing(job);
  check_quant(job);
  // Active experts first, then those behind them, then those before them.
  const Tensor flat = expert_idx.flatten().to(at::kLong);
  const Tensor keys = at::where(flat.lt(job.start), at::full_like(flat, std::numeric_limits<int32_t>::max()), flat) - job.start;
  const Tensor order = at::argsort(keys, /*stable=*/true, 0, false);
  const int64_t active = keys.lt(job.end - job.start).sum().item<int64_t>();
  const Tensor experts = keys.index_select(0, order);
  return job.drop == 1 ? padded(job, order, experts, active) : dropless(job, order, experts, active);
}

// out[i] = skip1[i] + skip2[i] + sum over k of scales[i, k] * (the row of choice (i, k) + bias of its expert).
Tensor finalize_routing(const Tensor& expanded, const OptionalTensor& skip1, const OptionalTensor& skip2,
                        const OptionalTensor& bias, const OptionalTensor& scales, const Tensor& rows_of,
                        const OptionalTensor& experts, std::optional<int64_t> drop_pad_mode, std::optional<int64_t> k) {
  const char* name = "npu_moe_finalize_routing";
  const char* failed = ": call aclnnMoeFinalizeRoutingV4 failed, detail:EZ1001: ";
  const int64_t mode = drop_pad_mode.value_or(0);
  TORCH_CHECK(mode >= 0 && mode <= 3, name, failed, "drop_pad_mode must be in [0, 3], got ", mode);
  TORCH_CHECK(expanded.dim() == (mode % 2 == 1 ? 3 : 2), name, failed, "expanded_permuted_rows must be ",
              mode % 2 == 1 ? "3D" : "2D", " with drop_pad_mode ", mode, ", got ", expanded.sizes());
  TORCH_CHECK(is_float_of_npu(expanded), name, failed, "expanded_permuted_rows is ", expanded.dtype());
  TORCH_CHECK(rows_of.dim() == 1 && rows_of.scalar_type() == at::kInt, name, failed,
              "expanded_src_to_dst_row must be a vector of int32");
  TORCH_CHECK(is_given(skip1) || !is_given(skip2), name, failed, "skip2 needs skip1");
  TORCH_CHECK(!is_given(bias) || is_given(experts), name, failed, "bias needs expert_for_source_row");
  const int64_t choices = is_given(scales) ? scales->size(1) : k.value_or(1);
  TORCH_CHECK(choices > 0 && rows_of.numel() % choices == 0, name, failed, "expanded_src_to_dst_row has ", rows_of.numel(),
              " places for ", choices, " experts per row");
  const int64_t rows = rows_of.numel() / choices, width = expanded.size(-1);
  for (const OptionalTensor* skip : {&skip1, &skip2})
    TORCH_CHECK(!is_given(*skip) || ((*skip)->sizes() == at::IntArrayRef({rows, width}) &&
                                     (*skip)->scalar_type() == expanded.scalar_type()),
                name, failed, "skip1 and skip2 must have the shape [", rows, ", ", width, "] and the dtype of the rows");
  const Tensor from = expanded.reshape({-1, width}).to(at::kFloat);
  // Modes 0 and 1: the first choices of all rows, then the second ones; 2 and 3: row by row.
  const Tensor ordered = mode < 2 ? rows_of.view({choices, rows}).t() : rows_of.view({rows, choices});
  const Tensor index = ordered.flatten().to(at::kLong), is_there = index.ne(-1);
  TORCH_CHECK(index.numel() == 0 || (index.ge(-1).all().item<bool>() && index.lt(from.size(0)).all().item<bool>()), name,
              ": expanded_src_to_dst_row must lie in [-1, ", from.size(0), ")");
  Tensor values = from.size(0) == 0 ? at::zeros({index.numel(), width}, from.options())
                                    : from.index_select(0, index.clamp_min(0)) * is_there.unsqueeze(1);
  if (is_given(bias)) values = values + bias->to(at::kFloat).index_select(0, experts->flatten().to(at::kLong));
  if (is_given(scales)) values = values * scales->to(at::kFloat).reshape({-1, 1});
  Tensor sum = values.view({rows, choices, width}).sum(1);
  for (const OptionalTensor* skip : {&skip1, &skip2})
    if (is_given(*skip)) sum = sum + (*skip)->to(at::kFloat);
  return sum.to(expanded.scalar_type());
}

// Tokens come in blocks (rank, expert), rank by rank; they leave expert by expert.
Four re_routing(const Tensor& tokens, const Tensor& numbers, const OptionalTensor& scales, int64_t number_type, int64_t idx_type,
                std::optional<int64_t> tokens_dtype) {
  const char* name = "npu_moe_re_routing";
  TORCH_CHECK(tokens.dim() > 1, "tokens dim should larger than 1");
  TORCH_CHECK(numbers.dim() > 1, "expert_token_num_per_rank dim should larger than 1");
  TORCH_CHECK_NOT_IMPLEMENTED(!tokens_dtype.has_value(), "anabatic sim: ", name, " with tokens_dtype is not simulated");
  TORCH_CHECK(number_type == 1, name, ": expert_token_num_type only supports 1, got ", number_type);
  TORCH_CHECK(idx_type == 0, name, ": idx_type only supports 0, got ", idx_type);
  TORCH_CHECK(numbers.scalar_type() == at::kInt || numbers.scalar_type() == at::kLong, name,
              ": call aclnnMoeReRouting failed, detail:EZ1001: expert_token_num_per_rank must be int32 or int64, got ",
              numbers.dtype());
  const Tensor counts = numbers.to(at::kLong), starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts);
  TORCH_CHECK(counts.ge(0).all().item<bool>() && counts.sum().item<int64_t>() <= tokens.size(0), name,
              ": expert_token_num_per_rank counts ", counts.sum().item<int64_t>(), " tokens, there are ", tokens.size(0));
  std::vector<Tensor> parts;
  for (int64_t expert = 0; expert < counts.size(1); expert++)
    for (int64_t rank = 0; rank < counts.size(0); rank++) {
      const int64_t from = starts[rank][expert].item<int64_t>();
      parts.push_back(at::arange(from, from + counts[rank][expert].item<int64_t>(), counts.options()));
    }
  const Tensor index = parts.empty() ? at::empty({0}, counts.options()) : at::cat(parts);
  const int64_t all = tokens.size(0);
  return {
      leading_rows(tokens.index_select(0, index), all),
      is_given(scales) ? leading_rows(scales->index_select(0, index), all) : unwritten({all}, tokens.options().dtype(at::kFloat)),
      leading_rows(int32(index), all), counts.sum(0).to(numbers.scalar_type())};
}

}  // namespace

void register_moe_routing(torch::Library& npu) {
  npu.impl("npu_moe_init_routing", TORCH_FN(init_routing));
  npu.impl("npu_moe_init_routing_v2", TORCH_FN(init_routing_v2));
  npu.impl("npu_moe_finalize_routing", TORCH_FN(finalize_routing));
  npu.impl("npu_moe_re_routing", TORCH_FN(re_routing));
}

}  // namespace sim
