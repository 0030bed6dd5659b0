// The attention operators of inference: npu_prompt_flash_attention, npu_incre_flash_attention, npu_fused_infer_attention_score.
// They have no derivative: used in training they cut the graph, here as on hardware.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <array>
#include <limits>
#include <string_view>
#include <tuple>

#include "attention.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Lengths = at::OptionalIntArrayRef;

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined() && tensor->numel() > 0; }

void absent(const char* name, std::initializer_list<std::pair<const char*, const OptionalTensor*>> arguments) {
  for (const auto& [argument, tensor] : arguments)
    TORCH_CHECK_NOT_IMPLEMENTED(!given(*tensor), "anabatic sim: ", name, " with ", argument, " is not simulated");
}

void check_inputs(const char* name, const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, name,
              ": call aclnn failed, detail:EZ1001: query must be float16 or bfloat16, got ", q.dtype());
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), name,
              ": query, key and value must have one dtype, got ", q.dtype(), ", ", k.dtype(), ", ", v.dtype());
}

// The length of sequence `batch`; one number may stand for all.
int64_t length_of(const char* name, const Lengths& lengths, int64_t batch, int64_t whole) {
  if (!lengths.has_value() || lengths->empty()) return whole;
  const int64_t length = (*lengths)[lengths->size() == 1 ? 0 : static_cast<size_t>(batch)];
  TORCH_CHECK(length >= 0 && length <= whole, name, ": actual_seq_lengths has ", length, ", the tensor holds ", whole);
  return length;
}

std::vector<Part> parts_of(const char* name, const Tensor& q, const Tensor& k, const Options& options, const Lengths& q_lengths,
                           const Lengths& k_lengths) {
  std::vector<Part> parts;
  if (options.layout != "TND") {
    for (const auto* lengths : {&q_lengths, &k_lengths})
      TORCH_CHECK(!lengths->has_value() || (*lengths)->size() <= 1 || static_cast<int64_t>((*lengths)->size()) == q.size(0), name,
                  ": actual_seq_lengths must have one number per sequence");
    for (int64_t b = 0; b < q.size(0); b++)
      parts.push_back({b, 0, length_of(name, q_lengths, b, q.size(2)), 0, length_of(name, k_lengths, b, k.size(2))});
    return parts;
  }
  TORCH_CHECK(q_lengths.has_value() && k_lengths.has_value() && q_lengths->size() == k_lengths->size(), name,
              ": layout TND needs actual_seq_lengths and actual_seq_lengths_kv of the same size");
  int64_t q_from = 0, k_from = 0;
  for (size_t i = 0; i < q_lengths->size(); i++) {
    const int64_t q_end = (*q_lengths)[i], k_end = (*k_lengths)[i];
    TORCH_CHECK(q_end >= q_from && k_end >= k_from && q_end <= q.size(2) && k_end <= k.size(2), name,
                ": actual_seq_lengths of layout TND must be cumulative and end within the tensors");
    parts.push_back({static_cast<int64_t>(i), q_from, q_end - q_from, k_from, k_end - k_from});
    q_from = q_end;
    k_from = k_end;
  }
  return parts;
}

struct Result {
  Tensor out, lse;  // in the layout; [B, N, S, 1] or [T, N, 1]
};

Result infer(const char* name, const Tensor& query, const Tensor& key, const Tensor& value, const Options& options,
             int64_t key_heads,
             const Lengths& q_lengths, const Lengths& k_lengths, std::string_view out_layout) {
  check_inputs(name, query, key, value);
  TORCH_CHECK(options.layout == "BSH" || options.layout == "BSND" || options.layout == "BNSD" || options.layout == "TND", name,
              ": input_layout ", options.layout, " is not one of BSH, BSND, BNSD, TND");
  check_mask(name, options);
  const int64_t groups = key_heads == 0 ? options.heads : key_heads;
  TORCH_CHECK(options.heads > 0 && options.heads % groups == 0, name, ": num_heads ", options.heads,
              " is no multiple of num_key_value_heads ", groups);
  const Tensor q = heads_first(query, options.layout, options.heads), k = heads_first(key, options.layout, groups),
               v = heads_first(value, options.layout, groups);
  TORCH_CHECK(q.size(1) == options.heads && k.size(1) == groups && v.size(1) == groups, name, ": num_heads is ", options.heads,
              " and num_key_value_heads ", groups, ", query has ", q.size(1), " heads and key ", k.size(1));
  Tensor out = at::zeros({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  Tensor lse = at::full({q.size(0), q.size(1), q.size(2), 1}, std::numeric_limits<float>::infinity(),
                        q.options().dtype(at::kFloat));
  for (const Part& part : parts_of(name, q, k, options, q_lengths, k_lengths)) {
    if (part.q_rows == 0 || part.k_rows == 0) continue;
    const Scores s = attention_scores(part_rows(q, part, true, options), part_rows(k, part, false, options), part, options);
    const Tensor result = at::bmm(s.weights.view({groups, -1, part.k_rows}), part_rows(v, part, false, options));
    const int64_t b = options.layout == "TND" ? 0 : part.batch;
    out[b].narrow(1, part.q_from, part.q_rows).copy_(result.view({options.heads, part.q_rows, -1}));
    lse[b].narrow(1, part.q_from, part.q_rows).copy_(s.max + s.sum.log());
  }
  if (options.layout == "TND") lse = lse.squeeze(0).transpose(0, 1).contiguous();
  return {heads_back(out, out_layout), lse};
}

Tensor prompt(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor&, const OptionalTensor& mask,
              const OptionalTensor& pse, Lengths lengths, const OptionalTensor& d1, const OptionalTensor& q1,
                  const OptionalTensor& d2,
              const OptionalTensor& q2, const OptionalTensor& o2, int64_t heads, double scale, int64_t before, int64_t after,
              c10::string_view layout, int64_t key_heads, Lengths k_lengths, int64_t mode) {
  const char* name = "npu_prompt_flash_attention";
  absent(name, {{"deq_scale1", &d1}, {"quant_scale1", &q1}, {"deq_scale2", &d2}, {"quant_scale2", &q2}, {"quant_offset2", &o2}});
  const Options options{heads, layout, pse, mask, scale, 1.0, before, after, mode, 0};
  return infer(name, q, k, v, options, key_heads, lengths, k_lengths, layout).out;
}

Tensor incremental(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor&, const OptionalTensor& mask,
                   const OptionalTensor& pse, c10::OptionalArrayRef<c10::SymInt> lengths, const OptionalTensor& a1,
                   const OptionalTensor& a2, const OptionalTensor& table, const OptionalTensor& d1, const OptionalTensor& q1,
                   const OptionalTensor& d2, const OptionalTensor& q2, const OptionalTensor& o2, const OptionalTensor& padding,
                   int64_t heads, double scale, c10::string_view layout, int64_t key_heads, int64_t, int64_t) {
  const char* name = "npu_incre_flash_attention";
  absent(name, {{"antiquant_scale", &a1}, {"antiquant_offset", &a2}, {"block_table", &table}, {"dequant_scale1", &d1},
                {"quant_scale1", &q1}, {"dequant_scale2", &d2}, {"quant_scale2", &q2}, {"quant_offset2", &o2},
                {"kv_padding_size", &padding}});
  const int64_t far = std::numeric_limits<int32_t>::max();
  const Options options{heads, layout, pse, mask, scale, 1.0, far, far, 0, 0};
  const auto k_lengths = lengths.has_value() ? Lengths(C10_AS_INTARRAYREF_SLOW(*lengths)) : Lengths();
  const Result result = infer(name, q, k, v, options, key_heads, Lengths(), k_lengths, layout);
  const int64_t rows = heads_first(q, layout, heads).size(2);
  TORCH_CHECK(rows == 1, name, ": call aclnn failed, detail:EZ1001: query must hold one token per sequence, got ", rows);
  return result.out;
}

std::tuple<Tensor, Tensor> fused(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& pse, const OptionalTensor& mask,
    c10::OptionalArrayRef<c10::SymInt> lengths, c10::OptionalArrayRef<c10::SymInt> k_lengths, const OptionalTensor& d1,
    const OptionalTensor& q1, const OptionalTensor& d2, const OptionalTensor& q2, const OptionalTensor& o2,
        const OptionalTensor& a1,
    const OptionalTensor& a2, const OptionalTensor& k1, const OptionalTensor& k2, const OptionalTensor& v1,
        const OptionalTensor& v2,
    const OptionalTensor& table, const OptionalTensor& q_padding, const OptionalTensor& k_padding, const OptionalTensor& k_prefix,
    const OptionalTensor& v_prefix, c10::OptionalArrayRef<c10::SymInt>, const OptionalTensor& q_rope,
        const OptionalTensor& k_rope,
    const OptionalTensor& rope_scale, int64_t heads, double scale, int64_t before, int64_t after, c10::string_view layout,
    int64_t key_heads, int64_t mode, int64_t, int64_t, int64_t, int64_t, int64_t, bool with_lse) {
  const char* name = "npu_fused_infer_attention_score";
  absent(name, {{"dequant_scale1", &d1}, {"quant_scale1", &q1}, {"dequant_scale2", &d2}, {"quant_scale2", &q2},
                {"quant_offset2", &o2}, {"antiquant_scale", &a1}, {"antiquant_offset", &a2}, {"key_antiquant_scale", &k1},
                {"key_antiquant_offset", &k2}, {"value_antiquant_scale", &v1}, {"value_antiquant_offset", &v2},
                {"block_table", &table}, {"query_padding_size", &q_padding}, {"kv_padding_size", &k_padding},
                {"key_shared_prefix", &k_prefix}, {"value_shared_prefix", &v_prefix}, {"query_rope", &q_rope}, {"key_rope",
                                                                                                                &k_rope},
                {"key_rope_antiquant_scale", &rope_scale}});
  const bool turned = layout == "BNSD_BSND";
  const Options options{heads, turned ? "BNSD" : std::string_view(layout), pse, mask, scale, 1.0, before, after, mode, 0};
  const auto ends = lengths.has_value() ? Lengths(C10_AS_INTARRAYREF_SLOW(*lengths)) : Lengths();
  const auto k_ends = k_lengths.has_value() ? Lengths(C10_AS_INTARRAYREF_SLOW(*k_lengths)) : Lengths();
  const Result result = infer(name, q, k, v, options, key_heads, ends, k_ends, turned ? "BSND" : std::string_view(layout));
  return {result.out, with_lse ? result.lse : at::empty({0}, result.lse.options())};
}

}  // namespace

void register_fused_infer(torch::Library& npu) {
  npu.impl("npu_prompt_flash_attention", TORCH_FN(prompt));
  npu.impl("npu_incre_flash_attention", TORCH_FN(incremental));
  npu.impl("npu_fused_infer_attention_score", TORCH_FN(fused));
}

}  // namespace sim
