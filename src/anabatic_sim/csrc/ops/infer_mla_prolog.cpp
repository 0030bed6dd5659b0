// What latent attention (MLA) computes before its scores: npu_mla_prolog, _v2, _v3.
//
//   c_q = norm(x W_dq)    query = (c_q W_uq) W_uk    query_rope = rope(c_q W_qr)
//   kv_cache <- norm(x W_dkv)                        kr_cache <- rope(x W_kr)
//
// Semantics: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_mla_prolog{,_v2,_v3}.md; the results of products are
// rounded to bfloat16, as in op-plugin's test_mla_prolog.py. Quantised weights and caches are refused.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "count.h"
#include "infer.h"
#include "infer_register.h"

namespace sim::infer {

namespace {

using at::Tensor;

Tensor rounded(const Tensor& x) { return x.to(at::kBFloat16).to(at::kFloat); }

Tensor product(const Tensor& x, const Tensor& weight) {
  add_flops(2.0 * x.size(0) * x.size(1) * weight.size(1));
  return rounded(at::mm(x, weight.to(at::kFloat)));
}

// Where tokens go in the caches: one slot for each of T.
std::vector<int64_t> cache_slots(const Arguments& a, const std::string& mode, int64_t block, int64_t batch, int64_t per_sequence,
                                 bool merged) {
  const auto index = integers_of(a.tensor("cache_index"));
  if (mode.find("BLK") == std::string::npos) return index;
  // Pages of the cache; each sequence begins with a new one.
  std::vector<int64_t> lengths(static_cast<size_t>(batch), per_sequence);
  if (merged) {
    TORCH_CHECK(a.is_given("actual_seq_len"), a.name(), ": cache_mode ", mode, " needs actual_seq_len");
    lengths = integers_of(a.tensor("actual_seq_len"));
    for (size_t i = lengths.size(); i-- > 1;) lengths[i] -= lengths[i - 1];
  }
  std::vector<int64_t> slots;
  size_t page = 0;
  for (const int64_t length : lengths) {
    const int64_t pages = (length + block - 1) / block;
    TORCH_CHECK(page + static_cast<size_t>(pages) <= index.size(), a.name(), ": cache_index has ", index.size(), " pages");
    for (int64_t t = 0; t < length; t++) slots.push_back(index[page + static_cast<size_t>(t / block)] * block + t % block);
    page += static_cast<size_t>(pages);
  }
  return slots;
}

void store(const Arguments& a, const Tensor& x, const Tensor& cache, const std::string& mode, int64_t batch, int64_t per_sequence,
           bool merged) {
  TORCH_CHECK(cache.scalar_type() == at::kBFloat16 && cache.is_contiguous(), a.name(),
              ": a cache must be bfloat16 and contiguous, got ", cache.dtype());
  if (cache.numel() == 0 || x.size(0) == 0) return;
  const Tensor rows = x.to(at::kBFloat16);
  if (mode == "BSND" || mode == "TND") {
    TORCH_CHECK(cache.numel() == rows.numel(), a.name(), ": a cache of mode ", mode, " must hold ", rows.sizes(), ", got ",
                cache.sizes());
    cache.view(rows.sizes()).copy_(rows);
    return;
  }
  TORCH_CHECK(cache.dim() == 4 && cache.size(2) == 1 && cache.size(3) == x.size(1), a.name(),
              ": a cache must be [blocks, block_size, 1, ", x.size(1), "], got ", cache.sizes());
  TORCH_CHECK(a.is_given("cache_index"), a.name(), ": cache_mode ", mode, " needs cache_index");
  const int64_t block = cache.size(1);
  const bool fractal = mode.find("NZ") != std::string::npos;
  const auto slots = cache_slots(a, mode, block, batch, per_sequence, merged);
  TORCH_CHECK(static_cast<int64_t>(slots.size()) == x.size(0), a.name(), ": cache_index places ", slots.size(), " tokens of ",
              x.size(0));
  write_slots(a.name(), rows.unsqueeze(1), fractal ? cache.view({cache.size(0), x.size(1) / 16, block, 16}) : cache,
              fractal ? PageLayout::Fractal : PageLayout::TokensFirst, slots);
}

struct Prolog {
  Tensor query, query_rope, query_norm;
};

Prolog prolog(const Arguments& a, const Tensor& kv_cache, const Tensor& kr_cache) {
  a.refuse({"dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr", "quant_scale_ckv",
            "quant_scale_ckr", "smooth_scales_cq", "k_nope_clip_alpha", "token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype",
            "weight_dkv_kr_dtype", "kv_cache_dtype"});
  for (const char* argument : {"weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode", "ckvkr_repo_mode",
                               "quant_scale_repo_mode"})
    refuse_value(a.name(), argument, a.has(argument) && a.integer(argument) != 0);
  const std::string mode = a.text("cache_mode");
  const bool third = a.has("qc_qr_scale");
  TORCH_CHECK(mode == "PA_BSND" || mode == "PA_NZ" || (third && (mode == "PA_BLK_BSND" || mode == "PA_BLK_NZ" || mode == "BSND" ||
                                                                mode == "TND")), a.name(), ": cache_mode ", mode, " is unknown");
  const Tensor token_x = a.tensor("token_x"), weight_uk = a.tensor("weight_uk");
  for (const char* argument : {"token_x", "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr"})
    TORCH_CHECK_NOT_IMPLEMENTED(a.tensor(argument).scalar_type() == at::kBFloat16, "anabatic sim: ", a.name(), " with ", argument,
                                " of ", a.tensor(argument).dtype(), " is not simulated");
  TORCH_CHECK(token_x.dim() == 2 || token_x.dim() == 3, a.name(), ": token_x must have 2 or 3 dimensions, got ", token_x.sizes());
  TORCH_CHECK(weight_uk.dim() == 3, "weight_uk dim num should be 3, but the actual value is ", weight_uk.dim());
  const Tensor sin = a.tensor("rope_sin").flatten(0, -2), cos = a.tensor("rope_cos").flatten(0, -2);
  const Tensor x = token_x.flatten(0, -2).to(at::kFloat);
  const int64_t heads = weight_uk.size(0), size = weight_uk.size(1), latent = weight_uk.size(2), rope = sin.size(-1);
  TORCH_CHECK(a.tensor("weight_uq_qr").size(1) == heads * (size + rope) && a.tensor("weight_dkv_kr").size(1) == latent + rope,
              a.name(), ": weight_uq_qr ", a.tensor("weight_uq_qr").sizes(), " and weight_dkv_kr ",
              a.tensor("weight_dkv_kr").sizes(), " do not fit ", heads, " heads of ", size, " + ", rope, " and a latent of ",
              latent);

  Tensor norm = rms_norm(product(x, a.tensor("weight_dq")), a.tensor("rmsnorm_gamma_cq"), a.real("rmsnorm_epsilon_cq"));
  if (third) norm = norm * a.real("qc_qr_scale");
  norm = rounded(norm);
  const Tensor up = product(norm, a.tensor("weight_uq_qr")).view({-1, heads, size + rope});
  add_flops(2.0 * up.size(0) * heads * size * latent);
  const Tensor query = at::bmm(up.narrow(-1, 0, size).transpose(0, 1), weight_uk.to(at::kFloat)).transpose(0, 1);
  const Tensor query_rope = rotate(split_pairs(up.narrow(-1, size, rope)), cos.unsqueeze(1), sin.unsqueeze(1), true);

  const Tensor down = product(x, a.tensor("weight_dkv_kr"));
  Tensor compressed = rms_norm(down.narrow(-1, 0, latent), a.tensor("rmsnorm_gamma_ckv"), a.real("rmsnorm_epsilon_ckv"));
  if (third) compressed = compressed * a.real("kc_scale");
  const bool merged = token_x.dim() == 2;
  const int64_t batch = merged ? 1 : token_x.size(0), tokens = merged ? token_x.size(0) : token_x.size(1);
  store(a, compressed, kv_cache, mode, batch, tokens, merged);
  store(a, rotate(split_pairs(down.narrow(-1, latent, rope)), cos, sin, true), kr_cache, mode, batch, tokens, merged);

  auto shaped = [&](const Tensor& y) {  // the dimensions of the tokens, then those of y
    std::vector<int64_t> sizes = token_x.sizes().slice(0, token_x.dim() - 1).vec();
    for (int64_t d = 1; d < y.dim(); d++) sizes.push_back(y.size(d));
    return y.to(at::kBFloat16).contiguous().view(sizes);
  };
  return {shaped(query), shaped(query_rope), shaped(norm)};
}

void first(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const Tensor kv_cache = a.tensor("kv_cache"), kr_cache = a.tensor("kr_cache");
  const Prolog done = prolog(a, kv_cache, kr_cache);
  a.finish({done.query, done.query_rope, kv_cache, kr_cache});
}

// The sizes of results that only quantisation fills are those of MlaPrologV2KernelNpuOpApi.cpp and …V3….
void second(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const Tensor kv_cache = a.tensor("kv_cache"), kr_cache = a.tensor("kr_cache");
  const Prolog done = prolog(a, kv_cache, kr_cache);
  a.finish({done.query, done.query_rope, kv_cache, kr_cache, at::zeros({1}, at::kFloat)});
}

std::vector<Tensor> third_results(const Arguments& a, const Tensor& kv_cache, const Tensor& kr_cache) {
  const Prolog done = prolog(a, kv_cache, kr_cache);
  const Tensor norm = a.flag("query_norm_flag") ? done.query_norm : at::empty({0}, at::kBFloat16);
  return {done.query, done.query_rope, at::empty({0}, at::kFloat), norm, at::empty({0}, at::kFloat)};
}

void third(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  a.finish(third_results(a, a.tensor("kv_cache"), a.tensor("kr_cache")));
}

void third_functional(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const Tensor kv_cache = a.tensor("kv_cache").clone(), kr_cache = a.tensor("kr_cache").clone();
  std::vector<Tensor> results = third_results(a, kv_cache, kr_cache);
  results.push_back(kv_cache);
  results.push_back(kr_cache);
  a.finish(std::move(results));
}

}  // namespace

void register_mla_prolog(torch::Library& npu) {
  npu.impl("npu_mla_prolog", torch::CppFunction::makeFromBoxedFunction<&first>());
  npu.impl("npu_mla_prolog_v2", torch::CppFunction::makeFromBoxedFunction<&second>());
  npu.impl("npu_mla_prolog_v3", torch::CppFunction::makeFromBoxedFunction<&third>());
  npu.impl("npu_mla_prolog_v3_functional", torch::CppFunction::makeFromBoxedFunction<&third_functional>());
}

}  // namespace sim::infer
