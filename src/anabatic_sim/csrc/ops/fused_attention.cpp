// npu_fusion_attention and its gradient: softmax(mask(scale * (q k^T + pse))) v with dropout, in five layouts.
// npu_fusion_attention_v2 also adds pse after scaling, and takes the rotated part of q and k apart (documentation of
// aclnnFlashAttentionScoreV2, op-plugin's FlashAttentionV2KernelNpuOpApi.cpp).
//
// Semantics from op-plugin's documentation: scale is 1 unless given, a mask of 1 hides, sparse modes 2 to 4 take the compressed
// 2048 x 2048 mask and mean a triangle or a band, TND packs sequences whose ends are listed without a leading zero, sink is a
// score of each head that takes a part of every row's softmax and has no value. The statistics of TND's rows have the shape
// [T, N, 8] and lie sequence by sequence as [N, S, 8], unless softmax_layout is TND (documentation; MindSpeed's
// core/context_parallel/utils.py, flatten_softmax). The arithmetic is float32;
// the gradient recomputes the scores, so that only the row statistics are kept.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>
#include <vector>

#include "attention.h"
#include "count.h"
#include "capture.h"
#include "fallback.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Ends = at::OptionalIntArrayRef;

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined() && tensor->numel() > 0; }

void check(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
              "npu_fusion_attention: query, key and value must have one dtype, got ", q.dtype(), ", ", k.dtype(), ", ",
                  v.dtype());
  TORCH_CHECK(options.layout == "BNSD" || options.layout == "BSND" || options.layout == "BSH" || options.layout == "SBH" ||
                  options.layout == "TND",
              "The input_layout should be BSH/SBH/BNSD/BSND/TND(case-insensitive), but got ", options.layout);
  TORCH_CHECK(options.keep > 0 && options.keep <= 1, "The keep_prob value must be in range of (0, 1], but got ", options.keep);
  if (given(options.sink))
    TORCH_CHECK(options.sink->scalar_type() == at::kFloat && options.sink->dim() == 1 && options.sink->size(0) == options.heads,
                "npu_fusion_attention: sink must be float32 of shape [", options.heads, "], got ", options.sink->dtype(), " ",
                options.sink->sizes());
  check_mask("npu_fusion_attention", options);
}

// True where the statistics of TND's rows lie sequence by sequence, false where they lie as the queries do.
bool by_sequence(const Options& options, std::string_view softmax_layout) {
  TORCH_CHECK(softmax_layout.empty() || softmax_layout == "TND", "only supported softmax_layout=TND");
  TORCH_CHECK(softmax_layout.empty() || options.layout == "TND", "softmax_layout=TND only supported when input_layout_str=TND");
  return options.layout == "TND" && softmax_layout.empty();
}

Tensor sink_rows(const Options& options) { return options.sink->view({options.heads, 1, 1}); }

}  // namespace

void check_mask(const char* name, const Options& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(options.mode >= 0 && options.mode <= 4, "anabatic sim: ", name, " with sparse_mode ", options.mode,
                              " is not simulated");
  // Mode 1 is the mask as it is given: torch_npu's test/distributed/tensor/test_attention_ops.py gives none.
  if (options.mode >= 2) TORCH_CHECK(given(options.mask), name, ": sparse_mode ", options.mode, " needs atten_mask");
  if (!given(options.mask)) return;
  TORCH_CHECK(options.mask->scalar_type() == at::kBool || options.mask->scalar_type() == at::kByte, name,
              ": call aclnn failed, detail:EZ1001: attenMask must be bool or uint8, got ", options.mask->dtype());
  if (options.mode >= 2)
    TORCH_CHECK(options.mask->dim() == 2 && options.mask->size(0) == 2048 && options.mask->size(1) == 2048, name,
                ": sparse_mode ",
                options.mode, " needs the compressed mask of shape [2048, 2048], got ", options.mask->sizes());
}

Tensor heads_first(const Tensor& x, std::string_view layout, int64_t heads) {
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  if (layout == "TND") return x.transpose(0, 1).unsqueeze(0);
  const Tensor split = x.unflatten(-1, {heads, x.size(-1) / heads});  // BSH, SBH
  return layout == "BSH" ? split.transpose(1, 2) : split.permute({1, 2, 0, 3});
}

Tensor heads_back(const Tensor& x, std::string_view layout) {
  if (layout == "BNSD") return x.contiguous();
  if (layout == "BSND") return x.transpose(1, 2).contiguous();
  if (layout == "TND") return x.squeeze(0).transpose(0, 1).contiguous();
  return (layout == "BSH" ? x.transpose(1, 2) : x.permute({2, 0, 1, 3})).flatten(-2).contiguous();
}

namespace {

int64_t key_heads(const Tensor& q, const Tensor& k, const Options& options) {
  if (options.layout == "TND" || options.layout == "BNSD") return k.size(1);
  if (options.layout == "BSND") return k.size(2);
  return k.size(-1) / (q.size(-1) / options.heads);
}

std::vector<Part> parts_of(const Tensor& q, const Tensor& k, const Options& options, Ends q_ends, Ends k_ends) {
  std::vector<Part> parts;
  if (options.layout != "TND") {
    for (int64_t b = 0; b < q.size(0); b++) parts.push_back({b, 0, q.size(2), 0, k.size(2)});
    return parts;
  }
  TORCH_CHECK(q_ends.has_value() && k_ends.has_value(),
              "npu_fusion_attention: layout TND needs actual_seq_qlen and actual_seq_kvlen");
  TORCH_CHECK(q_ends->size() == k_ends->size(), "npu_fusion_attention: actual_seq_qlen has ", q_ends->size(),
              " ends and actual_seq_kvlen ", k_ends->size());
  int64_t q_from = 0, k_from = 0;
  for (size_t i = 0; i < q_ends->size(); i++) {
    TORCH_CHECK((*q_ends)[i] >= q_from && (*k_ends)[i] >= k_from, "npu_fusion_attention: actual_seq lengths must be cumulative");
    parts.push_back({static_cast<int64_t>(i), q_from, (*q_ends)[i] - q_from, k_from, (*k_ends)[i] - k_from});
    q_from = (*q_ends)[i];
    k_from = (*k_ends)[i];
  }
  TORCH_CHECK(q_from == q.size(2) && k_from == k.size(2), "npu_fusion_attention: actual_seq lengths end at ", q_from, " and ",
              k_from,
              ", the tensors hold ", q.size(2), " and ", k.size(2), " tokens");
  return parts;
}

// What a row may see: `before` keys earlier and `after` keys later than the row, moved by `shift`.
struct Band {
  int64_t before, after, shift;
};

Band band_of(const Part& part, const Options& options) {
  Band band{std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::max(), 0};
  if (options.mode == 2 || options.mode == 3) band.after = 0;
  if (options.mode == 3 || options.mode == 4) band.shift = part.k_rows - part.q_rows;
  if (options.mode == 4 || (options.mode == 0 && given(options.mask))) {
    band.before = options.before;
    band.after = options.after;
  }
  return band;
}

// The scores of a head that take time: the kernel skips what the band hides, as plan/ counts it, and no mask beside it.
double count_scores(const Part& part, const Options& options) {
  const Band band = band_of(part, options);
  double count = 0;
  for (int64_t row = band.shift; row < part.q_rows + band.shift; row++) {
    const int64_t first = std::max<int64_t>(0, row - band.before), last = std::min(part.k_rows - 1, row + band.after);
    count += static_cast<double>(std::max<int64_t>(0, last - first + 1));
  }
  return count;
}

// True where a score is hidden; undefined when none is.
Tensor hidden(const Part& part, const Options& options) {
  const int64_t rows = part.q_rows, columns = part.k_rows;
  Tensor result;
  if (options.mode <= 1 && given(options.mask)) {
    result = options.mask->to(at::kBool);
    if (result.dim() == 4) result = result[result.size(0) > 1 ? part.batch : 0];
    result = result.slice(-2, 0, rows).slice(-1, 0, columns);
    TORCH_CHECK(result.size(-2) == rows && result.size(-1) == columns, "npu_fusion_attention: atten_mask ", options.mask->sizes(),
                " does not cover ", rows, " x ", columns, " scores");
  }
  const auto [before, after, shift] = band_of(part, options);
  if (before >= columns + rows && after >= columns + rows) return result;
  const Tensor distance = at::arange(columns).unsqueeze(0) - (at::arange(rows).unsqueeze(1) + shift);  // key minus query
  const Tensor band = distance.gt(after).logical_or_(distance.lt(-before));
  return result.defined() ? result.logical_or(band) : band;
}

Tensor bias(const Part& part, const Options& options) {
  if (!given(options.pse)) return {};
  TORCH_CHECK_NOT_IMPLEMENTED(options.pse->dim() == 4 && options.layout != "TND",
                              "anabatic sim: npu_fusion_attention takes pse of shape [B, N, S, S] only");
  TORCH_CHECK_NOT_IMPLEMENTED(options.pse->size(2) == part.q_rows || options.pse->size(2) == 1,
                              "anabatic sim: the compressed pse of npu_fusion_attention is not simulated");
  return (*options.pse)[options.pse->size(0) > 1 ? part.batch : 0].to(at::kFloat);
}

}  // namespace

Scores attention_scores(const Tensor& q, const Tensor& k, const Part& part, const Options& options) {
  const int64_t heads = q.size(0), groups = k.size(0);
  Tensor raw = at::bmm(q.reshape({groups, -1, q.size(-1)}), k.transpose(1, 2)).view({heads, part.q_rows, part.k_rows});
  const Tensor added = bias(part, options);
  if (added.defined() && options.pse_is_scaled) raw = raw + added;
  raw = raw * options.scale;
  if (added.defined() && !options.pse_is_scaled) raw = raw + added;
  const Tensor off = hidden(part, options);
  if (off.defined()) raw.masked_fill_(off, -std::numeric_limits<float>::infinity());
  Scores result;
  result.max = part.k_rows > 0 ? raw.amax(-1, true) : at::zeros({heads, part.q_rows, 1});
  result.max = result.max.masked_fill(result.max.isinf(), 0);  // a row without keys
  if (given(options.sink)) result.max = at::maximum(result.max, sink_rows(options));
  const Tensor power = (raw - result.max).exp_();
  result.sum = power.sum(-1, true);
  if (given(options.sink)) result.sum = result.sum + (sink_rows(options) - result.max).exp();
  result.weights = power / result.sum.clamp_min(std::numeric_limits<float>::min());
  result.dropped = result.weights;
  if (options.keep < 1) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(options.seed) + static_cast<uint64_t>(part.batch));
    result.dropped = result.weights * at::empty_like(power).bernoulli_(options.keep, generator) / options.keep;
  }
  return result;
}

Tensor part_rows(const Tensor& x, const Part& part, bool query, const Options& options) {
  const Tensor own = x[options.layout == "TND" ? 0 : part.batch];
  return own.narrow(1, query ? part.q_from : part.k_from, query ? part.q_rows : part.k_rows).to(at::kFloat);
}

namespace {

struct Forward {
  Tensor out, max, sum;
};

Forward forward(const Tensor& query, const Tensor& key, const Tensor& value, const Options& options, Ends q_ends, Ends k_ends,
                std::string_view softmax_layout) {
  check(query, key, value, options);
  const bool sequences_apart = by_sequence(options, softmax_layout);
  const int64_t groups = key_heads(query, key, options);
  TORCH_CHECK(groups > 0 && options.heads % groups == 0, "npu_fusion_attention: ", options.heads, " query heads, ", groups,
              " key heads");
  const Tensor q = heads_first(query, options.layout, options.heads);
  TORCH_CHECK(q.size(1) == options.heads, "npu_fusion_attention: head_num is ", options.heads, ", query has ", q.size(1),
              " heads");
  const Tensor k = heads_first(key, options.layout, groups), v = heads_first(value, options.layout, groups);
  Tensor out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  Tensor max = at::zeros({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kFloat)), sum = at::zeros_like(max);
  const std::vector<Part> parts = parts_of(q, k, options, q_ends, k_ends);
  for (const Part& part : parts) {
    if (part.q_rows == 0) continue;
    add_flops(2.0 * options.heads * count_scores(part, options) * (q.size(3) + v.size(3)));
    const Scores s = attention_scores(part_rows(q, part, true, options), part_rows(k, part, false, options), part, options);
    const Tensor result = at::bmm(s.dropped.view({groups, -1, part.k_rows}), part_rows(v, part, false, options));
    const int64_t b = options.layout == "TND" ? 0 : part.batch;
    out[b].narrow(1, part.q_from, part.q_rows).copy_(result.view({options.heads, part.q_rows, -1}));
    max[b].narrow(1, part.q_from, part.q_rows).copy_(s.max);
    sum[b].narrow(1, part.q_from, part.q_rows).copy_(s.sum);
  }
  auto eight = [&](const Tensor& x) {  // the kernel writes each statistic eight times
    const Tensor wide = x.expand({-1, -1, -1, 8});
    if (options.layout != "TND") return wide.contiguous();
    if (!sequences_apart) return wide.squeeze(0).transpose(0, 1).contiguous();
    std::vector<Tensor> sequences;
    for (const Part& part : parts) sequences.push_back(wide[0].narrow(1, part.q_from, part.q_rows).reshape({-1, 8}));
    return at::cat(sequences).view({q.size(2), options.heads, 8});
  };
  return {heads_back(out, options.layout), eight(max), eight(sum)};
}

struct Backward {
  Tensor dq, dk, dv, dpse, dsink;
};

// What the caller gives of the rows' softmax. Where several blocks of keys are merged, it is that of all of them
// (op-plugin's documentation: the gradient reads softmax_max, softmax_sum and attention_in of the forward pass).
struct Given {
  OptionalTensor max, sum, out;
  std::string_view softmax_layout;
};

// `[heads, rows, 1]` of a part from a statistic that is written eight times.
Tensor statistic(const OptionalTensor& given_rows, const Part& part, const Options& options, bool sequences_apart) {
  const Tensor one = given_rows->select(-1, 0);
  if (sequences_apart)
    return one.reshape({-1}).narrow(0, part.q_from * options.heads, part.q_rows * options.heads)
        .view({options.heads, part.q_rows, 1}).to(at::kFloat);
  const Tensor own = options.layout == "TND" ? one.transpose(0, 1) : one[part.batch];
  return own.narrow(1, part.q_from, part.q_rows).unsqueeze(-1).to(at::kFloat);
}

// Turn the weights of this block alone into its weights among all keys; false where it is all of them.
bool merge_rows(Scores& s, const Given& rows, const Part& part, const Options& options) {
  if (!given(rows.max) || !given(rows.sum) || !given(rows.out)) return false;
  const bool apart = by_sequence(options, rows.softmax_layout);
  const Tensor max = statistic(rows.max, part, options, apart), sum = statistic(rows.sum, part, options, apart);
  if (max.equal(s.max) && sum.equal(s.sum)) return false;
  const Tensor share = s.sum * (s.max - max).exp() / sum;
  s.weights = s.weights * share;
  s.dropped = s.dropped * share;
  return true;
}

Backward backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& grad, const Options& options,
                  Ends q_ends, Ends k_ends, const Given& rows) {
  check(query, key, value, options);
  const int64_t groups = key_heads(query, key, options);
  const Tensor q = heads_first(query, options.layout, options.heads), k = heads_first(key, options.layout, groups),
               v = heads_first(value, options.layout, groups), above = heads_first(grad, options.layout, options.heads);
  Tensor dq = at::zeros(q.sizes(), q.options()), dk = at::zeros(k.sizes(), k.options()), dv = at::zeros(v.sizes(), v.options());
  Tensor dsink = at::zeros({given(options.sink) ? options.heads : 0}, k.options().dtype(at::kFloat));
  Tensor dpse = given(options.pse) ? at::zeros(options.pse->sizes(), q.options().dtype(at::kFloat)) : Tensor();
  for (const Part& part : parts_of(q, k, options, q_ends, k_ends)) {
    if (part.q_rows == 0 || part.k_rows == 0) continue;
    add_flops(2.0 * options.heads * count_scores(part, options) * (3 * q.size(3) + 2 * v.size(3)));
    const Tensor qs = part_rows(q, part, true, options), ks = part_rows(k, part, false, options), vs = part_rows(v, part, false,
                                                                                                                 options),
                 dout = part_rows(above, part, true, options).reshape({groups, -1, vs.size(-1)});
    Scores s = attention_scores(qs, ks, part, options);
    const bool merged = merge_rows(s, rows, part, options);
    const std::vector<int64_t> grouped = {groups, -1, part.k_rows};
    Tensor dweights = at::bmm(dout, vs.transpose(1, 2)).view_as(s.weights);
    if (options.keep < 1) dweights = dweights * (s.dropped != 0) / options.keep;
    Tensor inner = (dweights * s.weights).sum(-1, true);
    if (merged) {  // over all keys: their output tells, whose sum with its gradient is the same number
      const Tensor out = part_rows(heads_first(*rows.out, options.layout, options.heads), part, true, options);
      inner = (dout.view_as(out) * out).sum(-1, true);
    }
    if (given(options.sink)) {  // its weight, with a gradient of 0 - inner
      const bool apart = by_sequence(options, rows.softmax_layout);
      const Tensor max = merged ? statistic(rows.max, part, options, apart) : s.max,
                   sum = merged ? statistic(rows.sum, part, options, apart) : s.sum;
      dsink.sub_(((sink_rows(options) - max).exp() / sum * inner).sum({1, 2}));
    }
    const Tensor unscaled = s.weights * (dweights - inner), draw = unscaled * options.scale;
    const int64_t b = options.layout == "TND" ? 0 : part.batch;
    dq[b].narrow(1, part.q_from, part.q_rows).copy_(at::bmm(draw.view(grouped), ks).view_as(qs));
    dk[b].narrow(1, part.k_from, part.k_rows)
        .copy_(at::bmm(draw.view(grouped).transpose(1, 2), qs.reshape({groups, -1, qs.size(-1)})));
    dv[b].narrow(1, part.k_from, part.k_rows).copy_(at::bmm(s.dropped.view(grouped).transpose(1, 2), dout));
    if (dpse.defined()) {
      Tensor own = dpse[options.pse->size(0) > 1 ? part.batch : 0];
      own.add_((options.pse_is_scaled ? draw : unscaled).sum_to_size(own.sizes()));
    }
  }
  if (dpse.defined()) dpse = dpse.to(options.pse->scalar_type());
  return {heads_back(dq, options.layout), heads_back(dk, options.layout), heads_back(dv, options.layout), dpse, dsink};
}

void no_prefix(const Ends& prefix) {
  TORCH_CHECK_NOT_IMPLEMENTED(!prefix.has_value() || prefix->empty(),
                              "anabatic sim: npu_fusion_attention with prefix is not simulated");
}

int64_t new_seed(double keep) {
  if (keep >= 1) return 0;
  TORCH_CHECK_NOT_IMPLEMENTED(!capture_on_any(), "anabatic sim: npu_fusion_attention with dropout inside of torch.npu.graph is not "
                              "simulated: its seed is a number of the host");
  return static_cast<int64_t>(take_seed_here() >> 2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, int64_t> attention(
    const Tensor& q, const Tensor& k, const Tensor& v, int64_t heads, c10::string_view layout, const OptionalTensor& pse,
    const OptionalTensor&, const OptionalTensor& mask, double scale, double keep, int64_t before, int64_t after, int64_t,
        Ends prefix,
    Ends q_ends, Ends k_ends, int64_t mode, bool, bool, c10::string_view rows, const OptionalTensor& sink,
    const OptionalTensor& dropout_mask, int64_t, int64_t) {
  no_prefix(prefix);
  TORCH_CHECK_NOT_IMPLEMENTED(!given(dropout_mask), "anabatic sim: npu_fusion_attention with dropout_mask is not simulated");
  const Options options{heads, layout, pse, mask, scale, keep, before, after, mode, new_seed(keep), sink};
  const Forward f = forward(q, k, v, options, q_ends, k_ends, rows);
  return {f.out, f.max, f.sum, at::empty({0}, q.options()), options.seed, 0, keep < 1 ? q.numel() : 0};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_grad(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy, int64_t heads, c10::string_view layout,
        const OptionalTensor& pse,
    const OptionalTensor&, const OptionalTensor& mask, const OptionalTensor& max, const OptionalTensor& sum,
    const OptionalTensor&, const OptionalTensor& out, double scale, double keep, int64_t before, int64_t after, int64_t,
        int64_t seed, int64_t, int64_t,
        Ends prefix,
    Ends q_ends, Ends k_ends, int64_t mode, bool, bool, c10::string_view rows, const OptionalTensor& sink) {
  no_prefix(prefix);
  const Options options{heads, layout, pse, mask, scale, keep, before, after, mode, seed, sink};
  const Backward b = backward(q, k, v, dy, options, q_ends, k_ends, {max, sum, out, rows});
  return {b.dq, b.dk, b.dv, b.dpse, b.dsink};  // no gradient of pse without one
}

std::vector<int64_t> listed(const OptionalTensor& ends) {
  if (!given(ends)) return {};
  const Tensor host = ends->to(at::kLong).contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

Ends ends_of(const std::vector<int64_t>& list) { return list.empty() ? Ends() : Ends(at::IntArrayRef(list)); }

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_v3(
    const Tensor& q, const Tensor& k, const Tensor& v, int64_t heads, c10::string_view layout, const OptionalTensor& pse,
    const OptionalTensor&, const OptionalTensor& mask, double scale, double keep, int64_t before, int64_t after, int64_t,
        Ends prefix,
    const OptionalTensor& q_ends, const OptionalTensor& k_ends, int64_t mode, bool, bool, c10::string_view rows,
        const OptionalTensor& sink) {
  no_prefix(prefix);
  const auto q_list = listed(q_ends), k_list = listed(k_ends);
  const Options options{heads, layout, pse, mask, scale, keep, before, after, mode, new_seed(keep), sink};
  const Forward f = forward(q, k, v, options, ends_of(q_list), ends_of(k_list), rows);
  return {f.out, f.max, f.sum, at::empty({0}, q.options()), at::full({1}, options.seed, at::kLong), at::zeros({1}, at::kLong)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_grad_v3(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy, int64_t heads, c10::string_view layout,
        const OptionalTensor& pse,
    const OptionalTensor&, const OptionalTensor& mask, const OptionalTensor& max, const OptionalTensor& sum,
    const OptionalTensor&, const OptionalTensor& out, double scale, double keep, int64_t before, int64_t after, int64_t,
        const OptionalTensor& seed,
    const OptionalTensor&, Ends prefix, const OptionalTensor& q_ends, const OptionalTensor& k_ends, int64_t mode, bool, bool,
    c10::string_view rows, const OptionalTensor& sink) {
  no_prefix(prefix);
  const auto q_list = listed(q_ends), k_list = listed(k_ends);
  const int64_t number = given(seed) ? seed->item<int64_t>() : 0;
  const Options options{heads, layout, pse, mask, scale, keep, before, after, mode, number, sink};
  const Backward b = backward(q, k, v, dy, options, ends_of(q_list), ends_of(k_list), {max, sum, out, rows});
  return {b.dq, b.dk, b.dv, b.dpse, b.dsink};  // no gradient of pse without one
}

// Where the rotated part of the heads is given apart: it follows the other part.
struct WithRotated {
  Tensor q, k;
  bool apart;

  WithRotated(const Tensor& query, const Tensor& key, const OptionalTensor& query_rope, const OptionalTensor& key_rope,
              c10::string_view layout)
      : q(query), k(key), apart(given(query_rope)) {
    TORCH_CHECK(given(query_rope) == given(key_rope), "npu_fusion_attention_v2: query_rope and key_rope go together");
    if (!apart) return;
    TORCH_CHECK(layout == "TND", "npu_fusion_attention_v2: query_rope and key_rope need layout TND, got ", layout);
    q = at::cat({query, *query_rope}, -1);
    k = at::cat({key, *key_rope}, -1);
  }
};

Options options_v2(int64_t heads, c10::string_view layout, const OptionalTensor& pse, const OptionalTensor& mask, double scale,
                   double keep, int64_t before, int64_t after, int64_t mode, int64_t seed, const OptionalTensor& sink,
                   int64_t pse_type, const Ends& q_start, const Ends& k_start) {
  TORCH_CHECK_NOT_IMPLEMENTED(pse_type == 0 || pse_type == 1, "anabatic sim: npu_fusion_attention_v2 with pse_type ", pse_type,
                              " (slopes made by the kernel) is not simulated");
  const bool starts = (q_start.has_value() && !q_start->empty()) || (k_start.has_value() && !k_start->empty());
  TORCH_CHECK_NOT_IMPLEMENTED(!starts, "anabatic sim: npu_fusion_attention_v2 with q_start_idx or kv_start_idx is not simulated");
  return {heads, layout, pse, mask, scale, keep, before, after, mode, seed, sink, pse_type == 1};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, int64_t> attention_v2(
    const Tensor& q, const Tensor& k, const Tensor& v, int64_t heads, c10::string_view layout, const OptionalTensor& pse,
    const OptionalTensor&, const OptionalTensor& mask, const OptionalTensor& q_rope, const OptionalTensor& k_rope, double scale,
    double keep, int64_t before, int64_t after, int64_t, Ends prefix, Ends q_ends, Ends k_ends, int64_t mode, bool, bool,
    int64_t pse_type, Ends q_start, Ends k_start, c10::string_view rows, const OptionalTensor& sink,
    const OptionalTensor& dropout_mask, int64_t, int64_t) {
  no_prefix(prefix);
  TORCH_CHECK_NOT_IMPLEMENTED(!given(dropout_mask), "anabatic sim: npu_fusion_attention_v2 with dropout_mask is not simulated");
  const WithRotated x(q, k, q_rope, k_rope, layout);
  const Options options = options_v2(heads, layout, pse, mask, scale, keep, before, after, mode, new_seed(keep), sink, pse_type,
                                     q_start, k_start);
  const Forward f = forward(x.q, x.k, v, options, q_ends, k_ends, rows);
  return {f.out, f.max, f.sum, at::empty({0}, q.options()), options.seed, 0, keep < 1 ? q.numel() : 0};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_grad_v2(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy, int64_t heads, c10::string_view layout,
    const OptionalTensor& pse, const OptionalTensor&, const OptionalTensor& mask, const OptionalTensor& max,
    const OptionalTensor& sum, const OptionalTensor&, const OptionalTensor& out, const OptionalTensor& q_rope,
    const OptionalTensor& k_rope, double scale, double keep, int64_t before, int64_t after, int64_t, int64_t seed, int64_t,
    int64_t, Ends prefix, Ends q_ends, Ends k_ends, int64_t mode, bool, bool, int64_t pse_type, Ends q_start, Ends k_start,
    c10::string_view rows, const OptionalTensor& sink) {
  no_prefix(prefix);
  const WithRotated x(q, k, q_rope, k_rope, layout);
  const Options options = options_v2(heads, layout, pse, mask, scale, keep, before, after, mode, seed, sink, pse_type, q_start,
                                     k_start);
  const Backward b = backward(x.q, x.k, v, dy, options, q_ends, k_ends, {max, sum, out, rows});
  if (!x.apart) return {b.dq, b.dk, b.dv, b.dpse, Tensor(), Tensor(), b.dsink};
  const int64_t own = q.size(-1), rotated = q_rope->size(-1);
  auto part = [](const Tensor& whole, int64_t from, int64_t size) { return whole.narrow(-1, from, size).contiguous(); };
  return {part(b.dq, 0, own), part(b.dk, 0, own), b.dv, b.dpse, part(b.dq, own, rotated), part(b.dk, own, rotated), b.dsink};
}

}  // namespace

void register_fused_attention(torch::Library& npu) {
  npu.impl("npu_fusion_attention", TORCH_FN(attention));
  npu.impl("npu_fusion_attention_grad", TORCH_FN(attention_grad));
  npu.impl("npu_fusion_attention_v2", TORCH_FN(attention_v2));
  npu.impl("npu_fusion_attention_grad_v2", TORCH_FN(attention_grad_v2));
  npu.impl("npu_fusion_attention_v3", TORCH_FN(attention_v3));
  npu.impl("npu_fusion_attention_grad_v3", TORCH_FN(attention_grad_v3));
}

}  // namespace sim
