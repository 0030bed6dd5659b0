// Mixture of experts across ranks: npu_moe_distribute_dispatch brings each token to the ranks of its experts,
// npu_moe_distribute_combine brings the results back and adds them.
//
// Formulas: op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch.md, ..._combine.md and their _v2;
// shapes of the results: op-plugin MoeDistributeDispatch{,V2}KernelOpApi.cpp. Rows arrive by expert of the rank, then by the rank
// that sent them, then in its order. A dispatch is two collectives here (how many rows, then the rows), a combine is one. Numbers
// of ranks, tokens and columns are not limited to those of the documentation, so that two devices are enough for a test.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <algorithm>
#include <string_view>
#include <tuple>
#include <vector>

#include "../sim.h"
#include "comm_group.h"
#include "fused_common.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Seven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Numbers = std::vector<int64_t>;

constexpr double kLargestInt8 = 127;
constexpr int64_t kAssistNumbers = 128;  // int32 numbers per row in assist_info_for_combine
constexpr int64_t kRanksOfServer = 8;

// Which rank has which experts. The first ranks have copies of the shared experts, the others the routed ones. A slot is one
// expert on one rank; slots are numbered rank by rank.
struct Layout {
  const char* name;
  int64_t ranks, rank, shared, shared_ranks, experts;
  int64_t zero = 0, copied = 0, constant = 0;  // experts that are no network: ids behind the routed ones

  int64_t copies() const { return shared_ranks == 0 ? 0 : shared_ranks / shared; }
  int64_t routed_each() const { return experts / (ranks - shared_ranks); }
  int64_t slots() const { return shared_ranks + experts; }
  int64_t slots_of(int64_t r) const { return r < shared_ranks ? 1 : routed_each(); }
  int64_t first_slot(int64_t r) const { return r < shared_ranks ? r : shared_ranks + (r - shared_ranks) * routed_each(); }
  bool is_shared() const { return rank < shared_ranks; }
  int64_t ids() const { return experts + zero + copied + constant; }

  void check(const CommGroup& group) const {
    group.check_size("ep_world_size", ranks);
    TORCH_CHECK(rank == group.rank(), name, ": ep_rank_id is ", rank, ", this rank of the communicator is ", group.rank());
    TORCH_CHECK(shared_ranks >= 0 && shared_ranks < ranks,
                "shared_expert_rank_num should be in [0, ep_world_size), but got ep_world_size: ", ranks,
                ", shared_expert_rank_num: ", shared_ranks, ". ");
    TORCH_CHECK(shared_ranks == 0 ? shared == 0 || shared == 1 : shared > 0 && shared_ranks % shared == 0, name,
                ": shared_expert_num ", shared, " does not fit to shared_expert_rank_num ", shared_ranks);
    TORCH_CHECK(experts > 0 && experts % (ranks - shared_ranks) == 0, name, ": moe_expert_num ", experts, " is no multiple of ",
                ranks - shared_ranks, " ranks");
    TORCH_CHECK(zero >= 0 && copied >= 0 && constant >= 0, name, ": numbers of experts must not be negative");
    const std::string_view soc = sim_segment()->soc;
    TORCH_CHECK(shared_ranks == 0 || soc.rfind("Ascend910B", 0) != 0, name, ": shared_expert_rank_num must be 0 on ", soc);
  }
};

struct Refused {  // arguments that both operators have and that only have one value
  c10::string_view group_tp;
  int64_t tp_world_size, tp_rank_id, expert_shard_type;
  c10::string_view algorithm;
};

void check_refused(const Layout& layout, const Refused& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(call.tp_world_size == 0 || call.tp_world_size == 1, "anabatic sim: ", layout.name,
                              " with tp_world_size ", call.tp_world_size, " is not simulated");
  TORCH_CHECK(call.expert_shard_type == 0, layout.name, ": expert_shard_type only supports 0, got ", call.expert_shard_type);
  const auto& words = call.algorithm;
  TORCH_CHECK(words.empty() || words == "fullmesh" || words == "fullmesh_v1" || words == "fullmesh_v2" || words == "hierarchy",
              layout.name, ": comm_alg must be '', fullmesh, fullmesh_v1, fullmesh_v2 or hierarchy, got ", words);
}

// What this rank sends: a row per token and expert, in the order of the slots.
struct Outgoing {
  Tensor tokens;   // of each row
  Tensor choices;  // its place in expert_ids, flattened; -1 for a shared expert
  Tensor slots;
  Tensor order;    // within its slot
  Numbers counts;  // rows per slot
};

// (BS, K) booleans: who takes part. A mask of tokens must have all true values first.
Tensor active_choices(const Layout& layout, const Tensor& ids, const OptionalTensor& mask) {
  if (!is_given(mask)) return at::full(ids.sizes(), true, ids.options().dtype(at::kBool));
  TORCH_CHECK(mask->scalar_type() == at::kBool && (mask->sizes() == ids.sizes() || mask->sizes() == ids.sizes().slice(0, 1)),
              layout.name, ": x_active_mask must be bool of shape [", ids.size(0), "] or [", ids.size(0), ", ", ids.size(1), "]");
  if (mask->dim() == 2) return *mask;
  const Tensor falls = mask->to(at::kInt).diff();
  TORCH_CHECK(falls.le(0).all().item<bool>(), layout.name, ": x_active_mask must have all true values before the false ones");
  return mask->unsqueeze(1).expand(ids.sizes());
}

Outgoing outgoing(const Layout& layout, const Tensor& ids, const Tensor& active) {
  const auto options = ids.options().dtype(at::kLong);
  const Tensor flat = ids.flatten().to(at::kLong);
  TORCH_CHECK(flat.numel() == 0 || (flat.ge(0).all().item<bool>() && flat.lt(layout.ids()).all().item<bool>()), layout.name,
              ": expert_ids must lie in [0, ", layout.ids(), ")");
  std::vector<Tensor> tokens, choices, slots;
  const Tensor present = active.any(1).nonzero().squeeze(1);
  for (int64_t expert = 0; layout.shared_ranks > 0 && expert < layout.shared; expert++) {
    tokens.push_back(present);
    choices.push_back(at::full(present.sizes(), -1, options));
    slots.push_back(at::full(present.sizes(), expert * layout.copies() + layout.rank % layout.copies(), options));
  }
  const Tensor routed = active.flatten().logical_and(flat.lt(layout.experts)).nonzero().squeeze(1);
  tokens.push_back(routed.div(ids.size(1), "floor"));
  choices.push_back(routed);
  slots.push_back(flat.index_select(0, routed) + layout.shared_ranks);
  const Tensor slot = at::cat(slots), sorted = at::argsort(slot, /*stable=*/true, 0, false);
  Outgoing out{at::cat(tokens).index_select(0, sorted), at::cat(choices).index_select(0, sorted), slot.index_select(0, sorted),
               Tensor(), {}};
  const Tensor counts = at::bincount(out.slots, {}, layout.slots());
  out.order = at::arange(slot.numel(), options) - (counts.cumsum(0) - counts).index_select(0, out.slots);
  out.counts.assign(counts.const_data_ptr<int64_t>(), counts.const_data_ptr<int64_t>() + counts.numel());
  return out;
}

// Rows per rank, from rows per slot.
Numbers rows_to_ranks(const Layout& layout, const Numbers& counts) {
  Numbers rows;
  for (int64_t r = 0; r < layout.ranks; r++) {
    const auto first = counts.begin() + layout.first_slot(r);
    int64_t sum = 0;
    for (auto at = first; at != first + layout.slots_of(r); ++at) sum += *at;
    rows.push_back(sum);
  }
  return rows;
}

// Places of rows that lie by rank and then by expert, in the order of experts and then ranks. `counts` is (ranks, experts).
Tensor by_expert(const Tensor& counts) {
  const Tensor starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts);
  std::vector<Tensor> parts;
  for (int64_t expert = 0; expert < counts.size(1); expert++)
    for (int64_t rank = 0; rank < counts.size(0); rank++) {
      const int64_t from = starts[rank][expert].item<int64_t>();
      parts.push_back(at::arange(from, from + counts[rank][expert].item<int64_t>(), counts.options()));
    }
  return at::cat(parts);
}

Numbers numbers(const Tensor& values) {
  const Tensor flat = values.to(at::kLong).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

// How many rows each rank sends to each expert of this one: (ranks, experts here).
Tensor incoming(const Layout& layout, const CommGroup& group, const Numbers& counts, const at::TensorOptions& options) {
  Tensor mine = at::empty({static_cast<int64_t>(counts.size())}, options.dtype(at::kLong));
  std::copy(counts.begin(), counts.end(), mine.mutable_data_ptr<int64_t>());
  Numbers sent;
  for (int64_t r = 0; r < layout.ranks; r++) sent.push_back(layout.slots_of(r));
  const int64_t here = layout.slots_of(layout.rank);
  return group.all_to_all(mine.to(at::kInt), sent, Numbers(static_cast<size_t>(layout.ranks), here))
      .to(at::kLong)
      .view({layout.ranks, here});
}

struct Dispatch {
  const Tensor &x, &ids;
  const OptionalTensor &scales, &mask, &expert_scales;
  int64_t quant, global_bs, count_type, tp;
  bool v2;

  bool quantised() const { return quant == 2; }
};

void check_dispatch(const Layout& layout, const Dispatch& job) {
  TORCH_CHECK(job.x.dim() == 2 && job.ids.dim() == 2, "The x and expert_ids should be 2D");
  TORCH_CHECK_NOT_IMPLEMENTED(job.x.scalar_type() != at::kInt, "anabatic sim: ", layout.name,
                              " with x of int32 is not simulated");
  TORCH_CHECK((job.x.scalar_type() == at::kBFloat16 || job.x.scalar_type() == at::kHalf) && job.ids.scalar_type() == at::kInt,
              "dtype of x should be bfloat16 or half, dtype of expert_ids should be int.");
  TORCH_CHECK(job.x.size(0) == job.ids.size(0), layout.name, ": x has ", job.x.size(0), " rows, expert_ids ", job.ids.size(0));
  TORCH_CHECK(job.count_type == 0 || job.count_type == 1, "The expert_token_nums_type should be 0 or 1.");
  TORCH_CHECK_NOT_IMPLEMENTED(job.quant == 0 || job.quant == 2, "anabatic sim: ", layout.name, " with quant_mode ", job.quant,
                              " is not simulated");
  TORCH_CHECK(!is_given(job.scales) || job.quantised(), layout.name, ": scales belong to quant_mode 2");
  const int64_t all = layout.experts + (layout.shared_ranks > 0 ? layout.shared : 0);
  TORCH_CHECK(!is_given(job.scales) || (job.scales->sizes() == at::IntArrayRef({all, job.x.size(1)}) &&
                                        job.scales->scalar_type() == at::kFloat),
              layout.name, ": scales must be float32 of shape [", all, ", ", job.x.size(1), "]");
  TORCH_CHECK(!is_given(job.expert_scales) ||
                  (job.expert_scales->sizes() == job.ids.sizes() && job.expert_scales->scalar_type() == at::kFloat),
              layout.name, ": expert_scales must be float32 with the shape of expert_ids");
  TORCH_CHECK(job.global_bs >= 0 && job.global_bs % layout.ranks == 0 && (job.global_bs == 0 || job.global_bs / layout.ranks >=
                                                                                                    job.x.size(0)),
              layout.name, ": global_bs must be 0 or at least ep_world_size * rows of x, got ", job.global_bs);
}

Tensor bytes_of_rows(const Tensor& rows) {
  const Tensor flat = rows.dim() == 1 ? rows.unsqueeze(1) : rows;
  return flat.contiguous().view(at::kChar);
}

// The rows to send as bytes: the token, perhaps quantised, its scale and its weight.
Tensor packed_rows(const Layout& layout, const Dispatch& job, const Outgoing& out) {
  Tensor rows = job.x.index_select(0, out.tokens);
  std::vector<Tensor> parts;
  if (job.quantised()) {
    Tensor wide = rows.to(at::kFloat);
    if (is_given(job.scales)) {
      const int64_t shared = layout.shared_ranks > 0 ? layout.shared : 0;
      const Tensor routed = out.slots - layout.shared_ranks + shared;
      const Tensor expert = shared == 0 ? routed : at::where(out.choices.lt(0), out.slots.div(layout.copies(), "floor"), routed);
      wide = wide * job.scales->index_select(0, expert);
    }
    const Tensor largest = wide.abs().amax({-1}), factor = kLargestInt8 / largest;
    parts = {bytes_of_rows((wide * factor.unsqueeze(1)).nan_to_num(0).round().to(at::kChar)),
             bytes_of_rows(largest / kLargestInt8)};
  } else {
    parts = {bytes_of_rows(rows)};
  }
  if (is_given(job.expert_scales)) {
    const Tensor weights = job.expert_scales->flatten().index_select(0, out.choices.clamp_min(0));
    parts.push_back(bytes_of_rows(weights.masked_fill(out.choices.lt(0), 1.0)));  // shared experts have no weight
  }
  return at::cat(parts, 1);
}

// Rows that this rank may receive: what the caller has to allocate for (the A of the documentation).
int64_t capacity(const Layout& layout, const Dispatch& job, int64_t global_bs) {
  if (!layout.is_shared()) return global_bs * std::min(layout.routed_each(), job.ids.size(1));
  if (!job.v2) return global_bs / layout.shared_ranks;
  return global_bs / layout.ranks * ((layout.ranks + layout.copies() - 1) / layout.copies());
}

Seven dispatch(const Layout& layout, const Dispatch& job, const CommGroup& group) {
  layout.check(group);
  check_dispatch(layout, job);
  const Outgoing out = outgoing(layout, job.ids, active_choices(layout, job.ids, job.mask));
  const auto options = job.x.options();
  const Tensor counts = incoming(layout, group, out.counts, options);
  const Tensor rows = group.all_to_all(packed_rows(layout, job, out), rows_to_ranks(layout, out.counts), numbers(counts.sum(1)));
  const Tensor sorted = rows.index_select(0, by_expert(counts));
  const int64_t global_bs = job.global_bs == 0 ? job.x.size(0) * layout.ranks : job.global_bs;
  const int64_t room = capacity(layout, job, global_bs), found = sorted.size(0);
  TORCH_CHECK(found <= room, layout.name, ": ", found, " rows for room of ", room,
              ": ranks with different numbers of tokens need global_bs = most tokens of a rank * ep_world_size");
  const auto dtype = job.quantised() ? at::kChar : job.x.scalar_type();
  const int64_t width = job.x.size(1) * static_cast<int64_t>(c10::elementSize(dtype));
  const Tensor expand_x = sorted.narrow(1, 0, width).contiguous().view(dtype);
  const auto column = [&](int64_t from) { return sorted.narrow(1, from, 4).contiguous().view(at::kFloat).flatten(); };
  const auto floats = options.dtype(at::kFloat), ints = options.dtype(at::kInt);
  const Tensor scales = job.quantised() ? leading_rows(column(width), room) : unwritten({room}, floats);
  const Tensor weights = is_given(job.expert_scales) ? leading_rows(column(width + (job.quantised() ? 4 : 0)), room)
                                                     : unwritten({room}, floats);
  Tensor places = at::full({job.ids.numel()}, -1, options.dtype(at::kLong));
  const Tensor routed = out.choices.ge(0).nonzero().squeeze(1);
  places.index_copy_(0, out.choices.index_select(0, routed), out.order.index_select(0, routed));
  const int64_t assist = job.v2 ? std::max(job.ids.numel(), room * kAssistNumbers) : job.ids.numel();
  const Tensor each = counts.sum(0);
  const Tensor ends = counts.t().flatten().cumsum(0).to(at::kInt);
  const int64_t extra = is_given(job.expert_scales) ? 2 * global_bs * job.ids.size(1) * (layout.ranks / kRanksOfServer) : 0;
  return {leading_rows(expand_x, room),
          scales,
          leading_rows(places.to(at::kInt), assist),
          job.count_type == 0 ? each.cumsum(0) : each,
          leading_rows(ends, ends.numel() + extra),
          unwritten({job.tp}, ints),
          weights};
}

struct Combine {
  const Tensor &expand_x, &ids, &places, &ends, &weights;
  const OptionalTensor &mask, &shared_x, &ori_x, &alpha1, &alpha2, &v;
};

void check_combine(const Layout& layout, const Combine& job) {
  TORCH_CHECK(job.expand_x.dim() == 2 && job.ids.dim() == 2, "The x and expert_ids should be 2D");
  TORCH_CHECK((job.expand_x.scalar_type() == at::kBFloat16 || job.expand_x.scalar_type() == at::kHalf) &&
                  job.ids.scalar_type() == at::kInt,
              "dtype of x should be bfloat16, float16 or int, dtype of expert_ids should be int.");
  TORCH_CHECK(job.weights.sizes() == job.ids.sizes() && job.weights.scalar_type() == at::kFloat, layout.name,
              ": expert_scales must be float32 with the shape of expert_ids ", job.ids.sizes());
  const int64_t blocks = layout.ranks * layout.slots_of(layout.rank);
  TORCH_CHECK(job.ends.scalar_type() == at::kInt && job.ends.numel() >= blocks && job.places.scalar_type() == at::kInt &&
                  job.places.numel() >= job.ids.numel(),
              layout.name, ": pass ep_recv_counts and expand_idx (assist_info_for_combine) of the dispatch");
  TORCH_CHECK(!is_given(job.shared_x) || (job.shared_x->numel() == job.ids.size(0) * job.expand_x.size(1) &&
                                          job.shared_x->scalar_type() == job.expand_x.scalar_type()),
              layout.name, ": shared_expert_x must have ", job.ids.size(0), " rows of ", job.expand_x.size(1),
              " in the dtype of ", "expand_x");
  TORCH_CHECK((layout.copied == 0 && layout.constant == 0) || is_given(job.ori_x), layout.name,
              ": copy_expert_num and const_expert_num need ori_x");
  TORCH_CHECK(layout.constant == 0 || (is_given(job.alpha1) && is_given(job.alpha2) && is_given(job.v)), layout.name,
              ": const_expert_num needs const_expert_alpha_1, const_expert_alpha_2 and const_expert_v");
}

// (ranks, experts here): how many rows of `expand_x` go back to each rank, from their cumulated numbers by expert and rank.
Tensor returned(const Layout& layout, const Combine& job) {
  const int64_t here = layout.slots_of(layout.rank);
  const Tensor ends = job.ends.narrow(0, 0, layout.ranks * here).to(at::kLong);
  const Tensor counts = at::cat({ends.narrow(0, 0, 1), ends.diff()});
  TORCH_CHECK(counts.ge(0).all().item<bool>() && ends.select(0, -1).item<int64_t>() <= job.expand_x.size(0), layout.name,
              ": ep_send_counts must be cumulative and end within the ", job.expand_x.size(0), " rows of expand_x");
  return counts.view({here, layout.ranks}).t().contiguous();
}

// What experts without a network make of a token: nothing, the token, or alpha1 * token + alpha2 * v.
Tensor special_values(const Layout& layout, const Combine& job, const Tensor& choices) {
  const Tensor id = job.ids.flatten().index_select(0, choices).to(at::kLong) - layout.experts;
  const Tensor token = choices.div(job.ids.size(1), "floor");
  if (!is_given(job.ori_x)) return at::zeros({choices.numel(), job.expand_x.size(1)}, job.expand_x.options().dtype(at::kFloat));
  Tensor values = job.ori_x->to(at::kFloat).index_select(0, token) * id.ge(layout.zero).unsqueeze(1);
  if (layout.constant == 0) return values;
  const Tensor expert = id - layout.zero - layout.copied, constant = expert.ge(0).unsqueeze(1), index = expert.clamp_min(0);
  const auto of = [&](const OptionalTensor& table) { return table->to(at::kFloat).index_select(0, index); };
  return at::where(constant, of(job.alpha1) * values + of(job.alpha2) * of(job.v), values);
}

Tensor combine(const Layout& layout, const Combine& job, const CommGroup& group) {
  layout.check(group);
  check_combine(layout, job);
  const Tensor active = active_choices(layout, job.ids, job.mask);
  const Outgoing out = outgoing(layout, job.ids, active);
  const Tensor counts = returned(layout, job);
  // Back to where they came from: by rank, then by expert.
  const Tensor order = by_expert(counts), back = at::empty_like(order).index_copy_(0, order, at::arange(order.numel(),
                                                                                                        order.options()));
  const Tensor rows =
      group.all_to_all(job.expand_x.index_select(0, back), numbers(counts.sum(1)), rows_to_ranks(layout, out.counts));
  const Tensor values = rows.to(at::kFloat);
  Tensor sum = at::zeros({job.ids.size(0), job.expand_x.size(1)}, values.options());
  const Tensor routed = out.choices.ge(0).nonzero().squeeze(1), choices = out.choices.index_select(0, routed);
  // The dispatch wrote where each row lies within its expert.
  const Tensor slots = out.slots.index_select(0, routed);
  const Tensor sizes = at::bincount(out.slots, {}, layout.slots()), starts = sizes.cumsum(0) - sizes;
  const Tensor place = job.places.to(at::kLong).index_select(0, choices);
  TORCH_CHECK(place.ge(0).all().item<bool>() && place.lt(sizes.index_select(0, slots)).all().item<bool>(), layout.name,
              ": expand_idx (assist_info_for_combine) is not of the dispatch of these expert_ids");
  const Tensor weights = job.weights.flatten();
  const Tensor from = starts.index_select(0, slots) + place;
  Tensor parts = at::zeros({job.ids.numel(), job.expand_x.size(1)}, values.options());
  parts.index_copy_(0, choices, values.index_select(0, from) * weights.index_select(0, choices).unsqueeze(1));
  const Tensor special = active.flatten().logical_and(job.ids.flatten().ge(layout.experts)).nonzero().squeeze(1);
  parts.index_copy_(0, special, special_values(layout, job, special) * weights.index_select(0, special).unsqueeze(1));
  sum = sum + parts.view({job.ids.size(0), job.ids.size(1), -1}).sum(1);
  const Tensor shared = out.choices.lt(0).nonzero().squeeze(1);
  sum.index_add_(0, out.tokens.index_select(0, shared), values.index_select(0, shared));
  if (is_given(job.shared_x)) sum = sum + job.shared_x->to(at::kFloat).view(sum.sizes());
  const Tensor result = sum.to(job.expand_x.scalar_type());
  // Tokens that took no part are not written.
  return at::where(active.any(1).unsqueeze(1), result, unwritten(result.sizes(), result.options()));
}

Seven dispatch_v1(const Tensor& x, const Tensor& expert_ids, c10::string_view group_ep, int64_t ep_world_size, int64_t ep_rank_id,
                  int64_t moe_expert_num, const OptionalTensor& scales, const OptionalTensor& x_active_mask,
                  const OptionalTensor& expert_scales, c10::string_view group_tp, int64_t tp_world_size, int64_t tp_rank_id,
                  int64_t expert_shard_type, int64_t shared_expert_num, int64_t shared_expert_rank_num, int64_t quant_mode,
                  int64_t global_bs, int64_t expert_token_nums_type) {
  const Layout layout{"npu_moe_distribute_dispatch", ep_world_size, ep_rank_id, shared_expert_num, shared_expert_rank_num,
                      moe_expert_num};
  refuse_given(layout.name, {{"x_active_mask", &x_active_mask}});
  check_refused(layout, {group_tp, tp_world_size, tp_rank_id, expert_shard_type, ""});
  const Dispatch job{x, expert_ids, scales, x_active_mask, expert_scales, quant_mode, global_bs, expert_token_nums_type,
                     tp_world_size, false};
  return dispatch(layout, job, CommGroup(layout.name, "group_ep", group_ep));
}

Seven dispatch_v2(const Tensor& x, const Tensor& expert_ids, c10::string_view group_ep, int64_t ep_world_size, int64_t ep_rank_id,
                  int64_t moe_expert_num, const OptionalTensor& scales, const OptionalTensor& x_active_mask,
                  const OptionalTensor& expert_scales, const OptionalTensor& elastic_info, const OptionalTensor& performance_info,
                  c10::string_view group_tp, int64_t tp_world_size, int64_t tp_rank_id, int64_t expert_shard_type,
                  int64_t shared_expert_num, int64_t shared_expert_rank_num, int64_t quant_mode, int64_t global_bs,
                  int64_t expert_token_nums_type, c10::string_view comm_alg, int64_t zero_expert_num, int64_t copy_expert_num,
                  int64_t const_expert_num, std::optional<int64_t> y_dtype, std::optional<int64_t> x_dtype,
                  std::optional<int64_t> scales_dtype) {
  const Layout layout{"npu_moe_distribute_dispatch_v2", ep_world_size, ep_rank_id, shared_expert_num, shared_expert_rank_num,
                      moe_expert_num, zero_expert_num, copy_expert_num, const_expert_num};
  refuse_given(layout.name, {{"elastic_info", &elastic_info}, {"performance_info", &performance_info}});
  TORCH_CHECK_NOT_IMPLEMENTED(!y_dtype && !x_dtype && !scales_dtype, "anabatic sim: ", layout.name,
                              " with y_dtype, x_dtype or scales_dtype is not simulated");
  check_refused(layout, {group_tp, tp_world_size, tp_rank_id, expert_shard_type, comm_alg});
  const Dispatch job{x, expert_ids, scales, x_active_mask, expert_scales, quant_mode, global_bs, expert_token_nums_type,
                     tp_world_size, true};
  return dispatch(layout, job, CommGroup(layout.name, "group_ep", group_ep));
}

Tensor combine_v1(const Tensor& expand_x, const Tensor& expert_ids, const Tensor& expand_idx, const Tensor& ep_send_counts,
                  const Tensor& expert_scales, c10::string_view group_ep, int64_t ep_world_size, int64_t ep_rank_id,
                  int64_t moe_expert_num, const OptionalTensor&, const OptionalTensor& x_active_mask,
                  const OptionalTensor& activation_scale, const OptionalTensor& weight_scale, const OptionalTensor& group_list,
                  const OptionalTensor&, const OptionalTensor& shared_expert_x, c10::string_view group_tp, int64_t tp_world_size,
                  int64_t tp_rank_id, int64_t expert_shard_type, int64_t shared_expert_num, int64_t shared_expert_rank_num,
                  int64_t, int64_t out_dtype, int64_t comm_quant_mode, int64_t group_list_type) {
  const Layout layout{"npu_moe_distribute_combine", ep_world_size, ep_rank_id, shared_expert_num, shared_expert_rank_num,
                      moe_expert_num};
  refuse_given(layout.name, {{"x_active_mask", &x_active_mask},
                             {"activation_scale", &activation_scale},
                             {"weight_scale", &weight_scale},
                             {"group_list", &group_list},
                             {"shared_expert_x", &shared_expert_x}});
  check_refused(layout, {group_tp, tp_world_size, tp_rank_id, expert_shard_type, ""});
  TORCH_CHECK_NOT_IMPLEMENTED(comm_quant_mode == 0 && out_dtype == 0 && group_list_type == 0, "anabatic sim: ", layout.name,
                              " with comm_quant_mode, out_dtype or group_list_type is not simulated");
  const OptionalTensor none;
  const Combine job{expand_x, expert_ids, expand_idx, ep_send_counts, expert_scales, none, none, none, none, none, none};
  return combine(layout, job, CommGroup(layout.name, "group_ep", group_ep));
}

Tensor combine_v2(const Tensor& expand_x, const Tensor& expert_ids, const Tensor& assist_info, const Tensor& ep_send_counts,
                  const Tensor& expert_scales, c10::string_view group_ep, int64_t ep_world_size, int64_t ep_rank_id,
                  int64_t moe_expert_num, const OptionalTensor&, const OptionalTensor& x_active_mask, const OptionalTensor&,
                  const OptionalTensor& shared_expert_x, const OptionalTensor& elastic_info, const OptionalTensor& ori_x,
                  const OptionalTensor& alpha1, const OptionalTensor& alpha2, const OptionalTensor& v,
                  const OptionalTensor& performance_info, c10::string_view group_tp, int64_t tp_world_size, int64_t tp_rank_id,
                  int64_t expert_shard_type, int64_t shared_expert_num, int64_t shared_expert_rank_num, int64_t,
                  int64_t comm_quant_mode, c10::string_view comm_alg, int64_t zero_expert_num, int64_t copy_expert_num,
                  int64_t const_expert_num) {
  const Layout layout{"npu_moe_distribute_combine_v2", ep_world_size, ep_rank_id, shared_expert_num, shared_expert_rank_num,
                      moe_expert_num, zero_expert_num, copy_expert_num, const_expert_num};
  refuse_given(layout.name, {{"elastic_info", &elastic_info}, {"performance_info", &performance_info}});
  check_refused(layout, {group_tp, tp_world_size, tp_rank_id, expert_shard_type, comm_alg});
  TORCH_CHECK_NOT_IMPLEMENTED(comm_quant_mode == 0, "anabatic sim: ", layout.name, " with comm_quant_mode ", comm_quant_mode,
                              " is not simulated");
  const Combine job{
      expand_x, expert_ids, assist_info, ep_send_counts, expert_scales, x_active_mask, shared_expert_x, ori_x, alpha1, alpha2, v};
  return combine(layout, job, CommGroup(layout.name, "group_ep", group_ep));
}

}  // namespace

void register_comm_experts(torch::Library& npu) {
  npu.impl("npu_moe_distribute_dispatch", TORCH_FN(dispatch_v1));
  npu.impl("npu_moe_distribute_dispatch_v2", TORCH_FN(dispatch_v2));
  npu.impl("npu_moe_distribute_combine", TORCH_FN(combine_v1));
  npu.impl("npu_moe_distribute_combine_v2", TORCH_FN(combine_v2));
}

}  // namespace sim
