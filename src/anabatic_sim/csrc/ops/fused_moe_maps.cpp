// Mixture of experts: the permutation of tokens by a map of tokens and experts, its inverse and the gradients of both.
//
// Formulas: CANN's ops-transformer, moe/moe_token_{permute,unpermute}_with_routing_map{,_grad}/README.md; the derivatives that
// call them: op-plugin config/derivatives.yaml. Without drop_and_pad each token has the same number of experts; with it each
// expert has the same number of tokens. Weights of a map lie expert by expert in the permuted order.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <tuple>

#include "fused_common.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kPermute = "npu_moe_token_permute_with_routing_map";
constexpr const char* kUnpermute = "npu_moe_token_unpermute_with_routing_map";

Tensor by_expert(const Tensor& map) { return map.to(at::kBool).t(); }

void check_map(const char* name, const Tensor& map) {
  TORCH_CHECK(map.dim() == 2 && (map.scalar_type() == at::kBool || map.scalar_type() == at::kChar), name,
              ": call aclnn failed, detail:EZ1001: routing_map must be a matrix of bool or int8, got ", map.dtype(), " of ",
              map.sizes());
}

// Every token has `each` experts: the kernels count on it.
void check_rows(const char* name, const Tensor& map, int64_t each) {
  const Tensor found = map.to(at::kBool).sum(1);
  TORCH_CHECK(found.eq(each).all().item<bool>(), name, ": each row of routing_map must have ", each,
              " experts (num_out_tokens / tokens) without drop_and_pad, found ", found.min().item<int64_t>(), " to ",
              found.max().item<int64_t>());
}

// With drop_and_pad place i belongs to expert i / capacity: where its weight lies in (tokens, experts), flattened.
Tensor weight_places(const Tensor& tokens_of_places, int64_t experts) {
  const int64_t capacity = tokens_of_places.numel() / experts;
  const Tensor expert = at::arange(tokens_of_places.numel(), tokens_of_places.options()).div(capacity, "floor");
  return tokens_of_places * experts + expert;
}

Three permute_map(const Tensor& tokens, const Tensor& map, const OptionalTensor& probs, std::optional<int64_t> wanted,
                  bool drop_and_pad) {
  check_map(kPermute, map);
  TORCH_CHECK(tokens.dim() == 2 && is_float_of_npu(tokens) && tokens.size(0) == map.size(0), kPermute,
              ": call aclnn failed, detail:EZ1001: tokens must be a matrix of floats with a row per row of routing_map, got ",
              tokens.dtype(), " of ", tokens.sizes());
  TORCH_CHECK(!is_given(probs) || probs->sizes() == map.sizes(), kPermute, ": probs must have the shape of routing_map");
  const int64_t rows = map.size(0), experts = map.size(1), number = wanted.value_or(rows);
  if (drop_and_pad) {
    const int64_t capacity = number / experts;
    TORCH_CHECK(capacity > 0 && capacity <= rows, kPermute, ": num_out_tokens / experts must be in [1, ", rows, "], got ",
                capacity);
    const Tensor order = std::get<1>(at::sort(by_expert(map).to(at::kChar), /*stable=*/true, -1, /*descending=*/true));
    const Tensor places = order.narrow(1, 0, capacity).flatten();
    Tensor weights;
    if (is_given(probs)) weights = probs->flatten().index_select(0, weight_places(places, experts));
    return {tokens.index_select(0, places), weights, places.to(at::kInt)};
  }
  check_rows(kPermute, map, number / rows);
  const Tensor sources = by_expert(map).nonzero().select(1, 1);
  Tensor weights;
  if (is_given(probs)) weights = probs->t().masked_select(by_expert(map));
  return {tokens.index_select(0, sources), weights, at::argsort(sources, /*stable=*/true, 0, false).to(at::kInt)};
}

// The gradients of probs, which lie in the permuted order, in the shape of the map.
Tensor spread_weights(const Tensor& values, const Tensor& map) {
  return at::zeros({map.size(1), map.size(0)}, values.options()).masked_scatter(by_expert(map), values).t().contiguous();
}

Two permute_map_grad(const Tensor& grad, const OptionalTensor& probs_grad, const Tensor& indices, const Tensor& map,
                     c10::SymInt experts, c10::SymInt tokens, bool drop_and_pad) {
  TORCH_CHECK(grad.defined(), kPermute, ": a gradient of probs alone is not simulated");
  check_map(kPermute, map);
  const int64_t rows = tokens.expect_int(), width = grad.size(1), columns = experts.expect_int();
  const Tensor index = indices.to(at::kLong), wide = grad.to(at::kFloat);
  Tensor dtokens, dprobs;
  if (drop_and_pad) {
    dtokens = at::zeros({rows, width}, wide.options()).index_add(0, index, wide);
    if (is_given(probs_grad))
      dprobs = at::zeros({rows * columns}, probs_grad->options())
                   .index_add(0, weight_places(index, columns), *probs_grad)
                   .view({rows, columns});
  } else {
    dtokens = wide.index_select(0, index).view({rows, -1, width}).sum(1);
    if (is_given(probs_grad)) dprobs = spread_weights(*probs_grad, map);
  }
  return {dtokens.to(grad.scalar_type()), dprobs};
}

Four unpermute_map_kept(const Tensor& permuted, const Tensor& indices, at::IntArrayRef shape, const OptionalTensor& probs,
                        const OptionalTensor& map, bool drop_and_pad) {
  TORCH_CHECK(permuted.dim() == 2 && is_float_of_npu(permuted) && indices.dim() == 1 && indices.scalar_type() == at::kInt &&
                  indices.size(0) == permuted.size(0),
              kUnpermute, ": call aclnn failed, detail:EZ1001: permuted_tokens must be a matrix of floats and sorted_indices ",
              "int32 with a number per row, got ", permuted.dtype(), " of ", permuted.sizes(), " and ", indices.dtype(), " of ",
              indices.sizes());
  TORCH_CHECK(shape.size() == 2 && shape[1] == permuted.size(1) && shape[0] > 0, kUnpermute, ": restore_shape ", shape,
              " must be [tokens, ", permuted.size(1), "]");
  const int64_t rows = shape[0];
  const Tensor index = indices.to(at::kLong), wide = permuted.to(at::kFloat);
  if (drop_and_pad) {
    Tensor weights, values = wide;
    if (is_given(probs)) {
      TORCH_CHECK(probs->dim() == 2 && probs->size(0) == rows, kUnpermute, ": probs ", probs->sizes(), " must have ", rows,
                  " rows");
      weights = probs->flatten().index_select(0, weight_places(index, probs->size(1)));
      values = wide * weights.to(at::kFloat).unsqueeze(1);
    }
    const Tensor sum = at::zeros({rows, shape[1]}, wide.options()).index_add(0, index, values);
    const auto [tokens, places] = at::sort(index, /*stable=*/true, 0, false);
    return {sum.to(permuted.scalar_type()), places.to(at::kInt), tokens.to(at::kInt), weights};
  }
  TORCH_CHECK(permuted.size(0) % rows == 0, kUnpermute, ": ", permuted.size(0), " permuted tokens are no multiple of ", rows,
              " tokens");
  Tensor weights, values = wide.index_select(0, index);
  if (is_given(probs)) {
    TORCH_CHECK(is_given(map), kUnpermute, ": probs need routing_map");
    check_map(kUnpermute, *map);
    check_rows(kUnpermute, *map, permuted.size(0) / rows);
    weights = probs->masked_select(map->to(at::kBool));  // token by token, as op-plugin's test expects this output
    values = values * weights.to(at::kFloat).unsqueeze(1);
  }
  return {values.view({rows, -1, shape[1]}).sum(1).to(permuted.scalar_type()), unwritten(indices.sizes(), indices.options()),
          unwritten(indices.sizes(), indices.options()), weights};
}

Tensor unpermute_map(const Tensor& permuted, const Tensor& indices, at::IntArrayRef shape, const OptionalTensor& probs,
                     const OptionalTensor& map, bool drop_and_pad) {
  return std::get<0>(unpermute_map_kept(permuted, indices, shape, probs, map, drop_and_pad));
}

// With drop_and_pad out_index sorts the places by token and token_of is that token; without, both are sorted_indices.
Two unpermute_map_grad(const Tensor& grad, const Tensor& out_index, const Tensor& token_of, const OptionalTensor& map,
                       const OptionalTensor& permuted, const OptionalTensor& probs, bool drop_and_pad, at::IntArrayRef) {
  const int64_t all = out_index.size(0), rows = grad.size(0);
  const Tensor places = out_index.to(at::kLong), wide = grad.to(at::kFloat);
  const Tensor tokens = drop_and_pad ? token_of.to(at::kLong)
                                     : at::arange(all, places.options()).div(all / std::max<int64_t>(rows, 1), "floor");
  const Tensor above = at::zeros({all, grad.size(1)}, wide.options()).index_copy(0, places, wide.index_select(0, tokens));
  if (!is_given(probs)) return {above.to(grad.scalar_type()), Tensor()};
  TORCH_CHECK(is_given(permuted), kUnpermute, "_grad: probs need permuted_tokens");
  const Tensor dots = (above * permuted->to(at::kFloat)).sum(1).to(grad.scalar_type());
  const int64_t experts = probs->size(1);
  if (drop_and_pad) {
    const Tensor token = at::empty_like(places).index_copy(0, places, tokens), flat = weight_places(token, experts);
    const Tensor weights = probs->flatten().index_select(0, flat).to(at::kFloat);
    const Tensor dprobs = at::zeros({probs->numel()}, dots.options()).index_add(0, flat, dots).view(probs->sizes());
    return {(above * weights.unsqueeze(1)).to(grad.scalar_type()), dprobs};
  }
  TORCH_CHECK(is_given(map), kUnpermute, "_grad: probs need routing_map");
  check_map(kUnpermute, *map);
  const Tensor weights = probs->t().masked_select(by_expert(*map)).to(at::kFloat);
  return {(above * weights.unsqueeze(1)).to(grad.scalar_type()), spread_weights(dots, *map)};
}

}  // namespace

void register_moe_maps(torch::Library& npu) {
  npu.impl("npu_moe_token_permute_with_routing_map", TORCH_FN(permute_map));
  npu.impl("npu_moe_token_permute_with_routing_map_grad", TORCH_FN(permute_map_grad));
  npu.impl("npu_moe_token_unpermute_with_routing_map", TORCH_FN(unpermute_map));
  npu.impl("_npu_moe_token_unpermute_with_routing_map", TORCH_FN(unpermute_map_kept));
  npu.impl("npu_moe_token_unpermute_with_routing_map_grad", TORCH_FN(unpermute_map_grad));
}

}  // namespace sim
