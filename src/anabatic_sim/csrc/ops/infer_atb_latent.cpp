// ATB's operators of latent attention (MLA) and of caches that are read back.
//
// Semantics: docstrings in torch_npu/op_plugin/atb/_atb_api_docs.py; results' shapes from op-plugin,
// op_plugin/ops/atb/MultiHeadLatentAttentionAtb.cpp, RingMlaAtb.cpp, PagedCacheLoadAtb.cpp.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "infer.h"
#include "infer_register.h"

namespace sim::infer {

namespace {

using at::Tensor;

constexpr int64_t kFar = std::numeric_limits<int32_t>::max();

struct Latent {
  Tensor out, lse;  // [T, N, 512] and [T, N, 1]
};

// The arguments that the five overloads share.
Latent latent_attention(const Arguments& a) {
  const std::string mask_type = a.text("mask_type", "undefined"), calc_type = a.text("calc_type", "calc_type_undefined"),
                    cache_mode = a.text("cache_mode", "krope_ctkv");
  refuse_value(a.name(), "mask_type " + mask_type, mask_type != "undefined");
  refuse_value(a.name(), "calc_type " + calc_type, calc_type != "calc_type_undefined" && calc_type != "calc_type_ring");
  refuse_value(a.name(), "cache_mode " + cache_mode, cache_mode != "krope_ctkv" && cache_mode != "nzcache");
  a.refuse({"qk_descale", "pv_descale", "mask", "qseqlen"});
  const Tensor q_nope = a.tensor("q_nope"), q_rope = a.tensor("q_rope"), latent = a.tensor("ctkv"), k_rope = a.tensor("k_rope");
  TORCH_CHECK_NOT_IMPLEMENTED(q_nope.is_floating_point() && q_nope.scalar_type() == latent.scalar_type(), "anabatic sim: atb::",
                              a.name(), " with q_nope of ", q_nope.dtype(), " and ctkv of ", latent.dtype(), " is not simulated");
  const auto contexts = *a.lengths("context_lens");
  const auto tables = page_tables(a.name(), a.tensor("block_tables"));
  const int64_t heads = a.integer("q_headnum"), kv_heads = a.integer("kv_headnum");
  TORCH_CHECK(q_nope.dim() == 3 && q_nope.size(1) == heads && q_rope.dim() == 3 && q_rope.size(1) == heads, a.name(),
              ": q_nope and q_rope must be [tokens, ", heads, ", D], got ", q_nope.sizes(), " and ", q_rope.sizes());
  TORCH_CHECK(static_cast<int64_t>(contexts.size()) == q_nope.size(0) && tables.size() == contexts.size(), a.name(),
              ": one token per sequence: got ", q_nope.size(0), " tokens, ", contexts.size(), " context_lens and ", tables.size(),
              " rows of block_tables");
  const PageLayout layout = cache_mode == "nzcache" ? PageLayout::Fractal : PageLayout::TokensFirst;
  Latent done{at::empty(q_nope.sizes(), q_rope.options()), at::empty({q_nope.size(0), heads, 1}, q_rope.options())};
  const Tensor query = at::cat({q_nope, q_rope}, -1).to(at::kFloat);
  for (size_t i = 0; i < contexts.size(); i++) {
    const Tensor value = page_rows(a.name(), latent, layout, kv_heads, tables[i], 0, contexts[i]);
    const Tensor key = at::cat({value, page_rows(a.name(), k_rope, layout, kv_heads, tables[i], 0, contexts[i])}, -1);
    const int64_t row = static_cast<int64_t>(i);
    const Attended one = attend(query[row].unsqueeze(1), key, value, {a.real("qk_scale"), {}, {}, {}});
    done.out[row].copy_(one.out.squeeze(1));
    done.lse[row].copy_(one.lse.squeeze(1));
  }
  return done;
}

void latent(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  a.finish({latent_attention(a).out});
}

void latent_out(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const Tensor output = a.tensor("output").copy_(latent_attention(a).out);
  a.finish({output});
}

void latent_lse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const bool with_lse = a.flag("return_lse");
  refuse_value(a.name(), "return_lse outside of calc_type_ring", with_lse && a.text("calc_type") != "calc_type_ring");
  const Latent done = latent_attention(a);
  a.finish({done.out, with_lse ? done.lse : Tensor()});
}

void latent_lse_out(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const bool with_lse = a.flag("return_lse");
  refuse_value(a.name(), "return_lse outside of calc_type_ring", with_lse && a.text("calc_type") != "calc_type_ring");
  const Latent done = latent_attention(a);
  const Tensor output = a.tensor("output").copy_(done.out), lse = a.tensor("lse");
  if (with_lse) lse.copy_(done.lse);
  a.finish({output, lse});
}

void latent_workspace(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  a.finish({at::empty({0}, a.tensor("q_nope").options().dtype(at::kByte))});
}

// One step of ring attention: attention over these keys, merged with the step before it by the log-sum-exps.
std::pair<Tensor, Tensor> ring_attention(const Arguments& a) {
  const std::string mask_type = a.text("mask_type", "no_mask"), calc_type = a.text("calc_type", "calc_type_first_ring");
  TORCH_CHECK(mask_type == "no_mask" || mask_type == "mask_type_triu", a.name(), ": mask_type ", mask_type, " is unknown");
  TORCH_CHECK(calc_type == "calc_type_first_ring" || calc_type == "calc_type_default", a.name(), ": calc_type ", calc_type,
              " is unknown");
  const Tensor q = at::cat({a.tensor("q_nope"), a.tensor("q_rope")}, -1).transpose(0, 1),
               k = at::cat({a.tensor("k_nope"), a.tensor("k_rope")}, -1).transpose(0, 1),
               v = a.tensor("value").transpose(0, 1);
  TORCH_CHECK(q.size(0) == a.integer("head_num") && k.size(0) == a.integer("kv_head_num"), a.name(), ": head_num is ",
              a.integer("head_num"), " and kv_head_num ", a.integer("kv_head_num"), ", query has ", q.size(0),
              " heads and key ", k.size(0));
  const Tensor seqlen = a.tensor("seqlen");
  const auto queries = integers_of(seqlen.dim() == 2 ? seqlen[0] : seqlen), keys = integers_of(seqlen.dim() == 2 ? seqlen[1]
                                                                                                                : seqlen);
  Tensor out = at::zeros({q.size(0), q.size(1), v.size(2)}), lse = at::zeros({q.size(0), q.size(1), 1});
  int64_t q_from = 0, k_from = 0;
  for (size_t i = 0; i < queries.size(); i++) {
    ScoreOptions options{a.real("qk_scale"), {}, {}, {}};
    if (mask_type == "mask_type_triu") {
      refuse_value(a.name(), "mask_type_triu and sequences of different numbers of queries and keys", queries[i] != keys[i]);
      options.hidden = band(queries[i], keys[i], 0, kFar, 0);
    }
    const Attended one = attend(q.narrow(1, q_from, queries[i]).to(at::kFloat), k.narrow(1, k_from, keys[i]).to(at::kFloat),
                                v.narrow(1, k_from, keys[i]).to(at::kFloat), options);
    out.narrow(1, q_from, queries[i]).copy_(one.out);
    // A step without keys adds nothing to the merged sum.
    lse.narrow(1, q_from, queries[i]).copy_(keys[i] == 0 ? one.lse.fill_(-std::numeric_limits<float>::infinity()) : one.lse);
    q_from += queries[i];
    k_from += keys[i];
  }
  if (calc_type == "calc_type_default") {
    TORCH_CHECK(a.is_given("pre_out") && a.is_given("prev_lse"), a.name(), ": calc_type_default needs pre_out and prev_lse");
    const Tensor before = a.tensor("prev_lse").to(at::kFloat).unsqueeze(-1), merged = at::logaddexp(before, lse);
    out = a.tensor("pre_out").transpose(0, 1).to(at::kFloat) * (before - merged).exp() + out * (lse - merged).exp();
    lse = merged;
  }
  return {out.transpose(0, 1).contiguous().to(a.tensor("q_nope").scalar_type()), lse.squeeze(-1).contiguous()};
}

void ring(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const auto [out, lse] = ring_attention(a);
  a.finish({out, lse});
}

void ring_out(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const auto [out, lse] = ring_attention(a);
  const Tensor output = a.tensor("output").copy_(out), softmax_lse = a.tensor("softmax_lse").copy_(lse);
  a.finish({output, softmax_lse});
}

// Tokens of the pages one after another. `cumsum`: context_lens are [0, ends…].
struct Loaded {
  Tensor key, value;  // [T, N, D]
};

Loaded load_cache(const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table, const Tensor& context_lens,
                  const OptionalTensor& seq_starts, bool cumsum) {
  const char* name = "npu_paged_cache_load";
  TORCH_CHECK_NOT_IMPLEMENTED(key_cache.dim() == 4 && value_cache.dim() == 4, "anabatic sim: atb::", name,
                              " takes caches of [blocks, block_size, heads, D], got ", key_cache.sizes());
  std::vector<int64_t> lengths = integers_of(context_lens);
  if (cumsum) {
    for (size_t i = 0; i + 1 < lengths.size(); i++) lengths[i] = lengths[i + 1] - lengths[i];
    if (!lengths.empty()) lengths.pop_back();
  }
  const auto tables = page_tables(name, block_table);
  TORCH_CHECK(tables.size() >= lengths.size(), name, ": ", lengths.size(), " sequences, block_table has ", tables.size(),
              " rows");
  const int64_t block = key_cache.size(1);
  const auto starts = is_given(seq_starts) ? integers_of(*seq_starts) : std::vector<int64_t>(lengths.size(), 0);
  TORCH_CHECK(starts.size() >= lengths.size(), name, ": seq_starts has ", starts.size(), " numbers for ", lengths.size(),
              " sequences");
  std::vector<Tensor> keys, values;
  for (size_t i = 0; i < lengths.size(); i++) {
    TORCH_CHECK(lengths[i] >= 0, "Invalid context_lens: negative value encountered");
    const int64_t from = starts[i] / block * block;  // whole pages
    keys.push_back(page_rows(name, key_cache, PageLayout::TokensFirst, key_cache.size(2), tables[i], from, lengths[i]));
    values.push_back(page_rows(name, value_cache, PageLayout::TokensFirst, value_cache.size(2), tables[i], from, lengths[i]));
  }
  if (keys.empty())
    return {at::empty({0, key_cache.size(2), key_cache.size(3)}, key_cache.options()),
            at::empty({0, value_cache.size(2), value_cache.size(3)}, value_cache.options())};
  return {at::cat(keys, 1).transpose(0, 1).contiguous().to(key_cache.scalar_type()),
          at::cat(values, 1).transpose(0, 1).contiguous().to(value_cache.scalar_type())};
}

std::tuple<Tensor, Tensor> load(const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                                const Tensor& context_lens, const OptionalTensor& seq_starts, bool cumsum) {
  const Loaded done = load_cache(key_cache, value_cache, block_table, context_lens, seq_starts, cumsum);
  return {done.key, done.value};
}

std::tuple<Tensor&, Tensor&> load_out(const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                                      const Tensor& context_lens, const OptionalTensor& seq_starts, bool cumsum, Tensor& key,
                                      Tensor& value) {
  const Loaded done = load_cache(key_cache, value_cache, block_table, context_lens, seq_starts, cumsum);
  TORCH_CHECK(key.size(0) >= done.key.size(0) && value.size(0) >= done.value.size(0), "npu_paged_cache_load: key holds ",
              key.size(0), " tokens, the sequences have ", done.key.size(0));
  key.narrow(0, 0, done.key.size(0)).copy_(done.key.view({done.key.size(0), -1}).view_as(key.narrow(0, 0, done.key.size(0))));
  value.narrow(0, 0, done.value.size(0)).copy_(done.value.view_as(value.narrow(0, 0, done.value.size(0))));
  return {key, value};
}

}  // namespace

void register_atb_latent(torch::Library& atb) {
  atb.impl("npu_multi_head_latent_attention", torch::CppFunction::makeFromBoxedFunction<&latent>());
  atb.impl("npu_multi_head_latent_attention.out", torch::CppFunction::makeFromBoxedFunction<&latent_out>());
  atb.impl("npu_multi_head_latent_attention.lse", torch::CppFunction::makeFromBoxedFunction<&latent_lse>());
  atb.impl("npu_multi_head_latent_attention.lse_out", torch::CppFunction::makeFromBoxedFunction<&latent_lse_out>());
  atb.impl("_npu_multi_head_latent_attention_get_workspace.lse",
           torch::CppFunction::makeFromBoxedFunction<&latent_workspace>());
  atb.impl("npu_ring_mla", torch::CppFunction::makeFromBoxedFunction<&ring>());
  atb.impl("npu_ring_mla.out", torch::CppFunction::makeFromBoxedFunction<&ring_out>());
  atb.impl("npu_paged_cache_load", TORCH_FN(load));
  atb.impl("npu_paged_cache_load.out", TORCH_FN(load_out));
}

}  // namespace sim::infer
