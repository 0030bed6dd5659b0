// ATB's smaller operators: caches that are written, rotations, groups of experts, products that accumulate.
//
// Semantics: op-plugin, op_plugin/ops/atb/ReshapeAndCachAtb.cpp, RopeAtb.cpp, GroupTopkAtb.cpp, LinearAtb.cpp.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "count.h"
#include "infer.h"
#include "infer_register.h"

namespace sim::infer {

namespace {

using at::Tensor;

// [n, block, N, D], or the fractal [n, N * D / 16, block, 16] (32 for int8). A real NPU decides by the format of the cache's
// memory, which the simulation does not have.
PageLayout layout_of(const char* name, const Tensor& x, const Tensor& cache) {
  TORCH_CHECK(x.dim() == 3 && cache.dim() == 4, name, ": key must be [tokens, heads, D] and a cache have 4 dimensions, got ",
              x.sizes(), " and ", cache.sizes());
  if (cache.size(2) == x.size(1) && cache.size(3) == x.size(2)) return PageLayout::TokensFirst;
  TORCH_CHECK(cache.size(1) * cache.size(3) == x.size(1) * x.size(2), name, ": a cache of shape ", cache.sizes(),
              " does not hold ", x.size(1), " heads of ", x.size(2));
  return PageLayout::Fractal;
}

void store(const char* name, const Tensor& x, const Tensor& cache, const std::vector<int64_t>& slots) {
  TORCH_CHECK(static_cast<int64_t>(slots.size()) == x.size(0), name, ": ", slots.size(), " slots for ", x.size(0), " tokens");
  write_slots(name, x, cache, layout_of(name, x, cache), slots);
}

void reshape_and_cache(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache, const Tensor& slots) {
  const char* name = "_npu_reshape_and_cache";
  const auto numbers = integers_of(slots);
  store(name, key, key_cache, numbers);
  store(name, value, value_cache, numbers);
}

void reshape_and_cache_siso(const Tensor& key, Tensor& key_cache, const Tensor& slots) {
  store("_npu_reshape_and_cache_siso", key, key_cache, integers_of(slots));
}

// torch_npu builds its tables from the first cos_sin_cache of the process and ignores later ones (RopeAtb.cpp): a program that
// passes another one would compute something else on a real NPU, so it is refused here.
const Tensor& first_table(const Tensor& cos_sin, const Tensor& positions) {
  static const Tensor first = cos_sin.clone();
  TORCH_CHECK_NOT_IMPLEMENTED(first.sizes() == cos_sin.sizes() && first.scalar_type() == cos_sin.scalar_type() &&
                                  at::equal(first.index_select(0, positions), cos_sin.index_select(0, positions)),
                              "anabatic sim: atb::_npu_rotary_embedding with a second cos_sin_cache is not simulated: torch_npu "
                              "uses the first one of the process for all calls");
  return first;
}

void rotary_embedding(const Tensor& positions, Tensor& query, Tensor& key, int64_t head_size, const Tensor& cos_sin_cache,
                      bool neox) {
  const char* name = "_npu_rotary_embedding";
  TORCH_CHECK_NOT_IMPLEMENTED(cos_sin_cache.dim() == 2 && cos_sin_cache.size(1) == head_size, "anabatic sim: atb::", name,
                              " with cos_sin_cache of ", cos_sin_cache.sizes(), " and heads of ", head_size,
                              " is not simulated: it rotates whole heads");
  const Tensor flat = positions.flatten().to(at::kLong), rows = first_table(cos_sin_cache, flat).index_select(0, flat);
  const auto halves = rows.chunk(2, -1);
  auto wide = [&](const Tensor& x) { return (neox ? x.repeat({1, 2}) : x.repeat_interleave(2, 1)).unsqueeze(1); };
  for (Tensor* x : {&query, &key}) {
    TORCH_CHECK(x->numel() % (flat.numel() * head_size) == 0, name, ": ", x->sizes(), " does not hold ", flat.numel(),
                " tokens with heads of ", head_size);
    const Tensor heads = x->reshape({flat.numel(), -1, head_size});
    x->copy_(rotate(heads, wide(halves[0]), wide(halves[1]), neox).view(x->sizes()));
  }
}

// Sets the scores of all but the best k groups to 0. A group counts its best score, or the sum of its best n.
void group_topk(const Tensor& self, int64_t k, int64_t group_num, int64_t n) {
  const char* name = "_npu_group_topk";
  TORCH_CHECK(self.dim() == 2 && group_num > 0 && self.size(1) % group_num == 0, name, ": ", self.sizes(),
              " does not divide into ", group_num, " groups");
  TORCH_CHECK(k >= 0 && k <= group_num && n >= 1 && n <= self.size(1) / group_num, name, ": k is ", k, " of ", group_num,
              " groups and n is ", n, " of ", self.size(1) / group_num, " scores");
  const Tensor groups = self.unflatten(1, {group_num, -1});
  const Tensor best = std::get<0>(at::topk(groups.to(at::kFloat), n)).sum(-1);
  const Tensor order = std::get<1>(at::sort(best, /*stable=*/true, -1, /*descending=*/true));
  Tensor dropped = at::zeros(best.sizes(), at::kBool);
  dropped.scatter_(1, order.narrow(1, k, group_num - k), true);
  Tensor(self).copy_(groups.masked_fill(dropped.unsqueeze(-1), 0).flatten(1));
}

void matmul_add_fp32(const Tensor& x, const Tensor& weight, Tensor& c) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(0) == weight.size(0) && c.dim() == 2 && c.size(0) == x.size(1) &&
                  c.size(1) == weight.size(1), "_npu_matmul_add_fp32: x [K, M], weight [K, N] and C [M, N], got ", x.sizes(),
              ", ", weight.sizes(), " and ", c.sizes());
  TORCH_CHECK(c.scalar_type() == at::kFloat, "_npu_matmul_add_fp32: C must be float32, got ", c.dtype());
  add_flops(2.0 * x.size(0) * x.size(1) * weight.size(1));
  c.add_(at::mm(x.to(at::kFloat).t(), weight.to(at::kFloat)));
}

}  // namespace

void register_atb_others(torch::Library& atb) {
  atb.impl("_npu_reshape_and_cache", TORCH_FN(reshape_and_cache));
  atb.impl("_npu_reshape_and_cache_siso", TORCH_FN(reshape_and_cache_siso));
  atb.impl("_npu_rotary_embedding", TORCH_FN(rotary_embedding));
  atb.impl("_npu_group_topk", TORCH_FN(group_topk));
  atb.impl("_npu_matmul_add_fp32", TORCH_FN(matmul_add_fp32));
}

}  // namespace sim::infer
