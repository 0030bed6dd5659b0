// The gated delta rule, token by token: npu_recurrent_gated_delta_rule, npu_chunk_gated_delta_rule.
//
//   S_t = alpha_t S_{t-1} + beta_t (v_t - alpha_t S_{t-1} k_t) k_t^T      o_t = S_t (scale q_t)
//
// with alpha = exp(g) (and exp(gk) for each dimension of the keys). Semantics: op-plugin,
// docs/zh/custom_APIs/torch_npu/torch_npu-npu_recurrent_gated_delta_rule.md and …-npu_chunk_gated_delta_rule.md. The chunked
// operator computes the same in another order. The arithmetic is float32.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <numeric>

#include "count.h"
#include "infer.h"
#include "infer_register.h"

namespace sim::infer {

namespace {

using at::Tensor;

struct Inputs {
  Tensor query, key, value, beta, decay;  // [T, Nv, Dk] twice, [T, Nv, Dv], [T, Nv, 1], [T, Nv, 1 or Dk]; float32
};

Inputs prepare(const char* name, const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& beta,
               const OptionalTensor& g, const OptionalTensor& gk, double scale) {
  TORCH_CHECK(query.dim() == 3 && query.sizes() == key.sizes() && value.dim() == 3 && value.size(0) == query.size(0) &&
                  value.size(1) % query.size(1) == 0, name, ": query and key must be [T, Nk, Dk] and value [T, Nv, Dv] with Nv a "
              "multiple of Nk, got ", query.sizes(), ", ", key.sizes(), " and ", value.sizes());
  TORCH_CHECK(query.scalar_type() == at::kBFloat16 && key.scalar_type() == at::kBFloat16 && value.scalar_type() == at::kBFloat16,
              name, ": query, key and value must be bfloat16, got ", query.dtype(), ", ", key.dtype(), " and ", value.dtype());
  const int64_t tokens = value.size(0), heads = value.size(1), repeat = heads / query.size(1);
  for (const auto& [what, tensor] : {std::pair{"beta", &beta}, std::pair{"g", &g}})
    TORCH_CHECK(!is_given(*tensor) || ((*tensor)->dim() == 2 && (*tensor)->size(0) == tokens && (*tensor)->size(1) == heads),
                name, ": ", what, " must be [", tokens, ", ", heads, "]");
  Inputs inputs;
  inputs.query = query.to(at::kFloat).repeat_interleave(repeat, 1) * scale;
  inputs.key = key.to(at::kFloat).repeat_interleave(repeat, 1);
  inputs.value = value.to(at::kFloat);
  inputs.beta = (is_given(beta) ? beta->to(at::kFloat) : at::ones({tokens, heads})).unsqueeze(-1);
  inputs.decay = (is_given(g) ? g->to(at::kFloat).exp() : at::ones({tokens, heads})).unsqueeze(-1);
  if (is_given(gk)) {
    TORCH_CHECK(gk->dim() == 3 && gk->size(0) == tokens && gk->size(1) == heads && gk->size(2) == query.size(2), name,
                ": gk must be [T, Nv, Dk], got ", gk->sizes());
    inputs.decay = inputs.decay * gk->to(at::kFloat).exp();
  }
  add_flops(6.0 * tokens * heads * query.size(2) * value.size(2));
  return inputs;
}

// One token: updates the states [Nv, Dv, Dk], returns its output [Nv, Dv].
Tensor step(const Inputs& inputs, int64_t t, Tensor& state) {
  const Tensor key = inputs.key[t].unsqueeze(1);  // [Nv, 1, Dk]
  state = state * inputs.decay[t].unsqueeze(1);
  const Tensor change = (inputs.value[t] - at::bmm(state, key.transpose(1, 2)).squeeze(-1)) * inputs.beta[t];
  state = state + at::bmm(change.unsqueeze(-1), key);
  return at::bmm(state, inputs.query[t].unsqueeze(-1)).squeeze(-1);
}

std::vector<int64_t> sequence_lengths(const char* name, const OptionalTensor& lengths, int64_t tokens) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_given(lengths), "anabatic sim: ", name, " without actual_seq_lengths is not simulated");
  const auto found = integers_of(*lengths);
  TORCH_CHECK(std::accumulate(found.begin(), found.end(), int64_t{0}) == tokens, name, ": actual_seq_lengths must add up to the ",
              tokens, " tokens");
  return found;
}

Tensor recurrent(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& state, const OptionalTensor& beta,
                 std::optional<double> scale, const OptionalTensor& actual_seq_lengths, const OptionalTensor& ssm_state_indices,
                 const OptionalTensor& num_accepted_tokens, const OptionalTensor& g, const OptionalTensor& gk) {
  const char* name = "npu_recurrent_gated_delta_rule";
  TORCH_CHECK(scale.has_value(), "scale cannot be empty");
  TORCH_CHECK_NOT_IMPLEMENTED(is_given(ssm_state_indices), "anabatic sim: ", name,
                              " without ssm_state_indices is not simulated");
  TORCH_CHECK(state.dim() == 4 && state.size(1) == value.size(1) && state.size(2) == value.size(2) &&
                  state.size(3) == key.size(2), name, ": state must be [blocks, Nv, Dv, Dk], got ", state.sizes());
  const Inputs inputs = prepare(name, query, key, value, beta, g, gk, *scale);
  const auto lengths = sequence_lengths(name, actual_seq_lengths, value.size(0));
  const auto slots = integers_of(*ssm_state_indices);
  const auto accepted = is_given(num_accepted_tokens) ? integers_of(*num_accepted_tokens)
                                                      : std::vector<int64_t>(lengths.size(), 1);
  TORCH_CHECK(static_cast<int64_t>(slots.size()) == value.size(0) && accepted.size() == lengths.size(), name,
              ": ssm_state_indices must hold one number per token and num_accepted_tokens one per sequence");
  for (const int64_t slot : slots)
    TORCH_CHECK(slot >= 0 && slot < state.size(0), name, ": ssm_state_indices has ", slot, ", state has ", state.size(0),
                " blocks");
  Tensor out = at::empty(value.sizes(), value.options());
  int64_t t = 0;
  for (size_t i = 0; i < lengths.size(); i++) {
    TORCH_CHECK(accepted[i] >= 1 && accepted[i] <= lengths[i], name, ": num_accepted_tokens has ", accepted[i],
                " for a sequence of ", lengths[i]);
    Tensor own = state[slots[t + accepted[i] - 1]].to(at::kFloat);
    for (const int64_t end = t + lengths[i]; t < end; t++) {
      out[t].copy_(step(inputs, t, own));
      state[slots[t]].copy_(own);
    }
  }
  return out;
}

std::tuple<Tensor, Tensor> recurrent_functional(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state, const OptionalTensor& beta,
    std::optional<double> scale, const OptionalTensor& actual_seq_lengths, const OptionalTensor& ssm_state_indices,
    const OptionalTensor& num_accepted_tokens, const OptionalTensor& g, const OptionalTensor& gk) {
  Tensor updated = state.clone();
  const Tensor out = recurrent(query, key, value, updated, beta, scale, actual_seq_lengths, ssm_state_indices,
                               num_accepted_tokens, g, gk);
  return {out, updated};
}

std::tuple<Tensor, Tensor> chunked(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& beta,
                                   const OptionalTensor& initial_state, const OptionalTensor& actual_seq_lengths,
                                   std::optional<double> scale, const OptionalTensor& g) {
  const char* name = "npu_chunk_gated_delta_rule";
  TORCH_CHECK(value.numel() > 0, "value cannot be empty");
  TORCH_CHECK(is_given(beta), "beta cannot be empty");
  TORCH_CHECK(is_given(initial_state), "initial_state cannot be empty");
  TORCH_CHECK(is_given(actual_seq_lengths), "actual_seq_lengths cannot be empty");
  TORCH_CHECK(scale.has_value(), "scale cannot be empty");
  const Inputs inputs = prepare(name, query, key, value, beta, g, std::nullopt, *scale);
  const auto lengths = sequence_lengths(name, actual_seq_lengths, value.size(0));
  Tensor states = initial_state->clone();
  TORCH_CHECK(states.dim() == 4 && states.size(0) == static_cast<int64_t>(lengths.size()) && states.size(1) == value.size(1) &&
                  states.size(2) == value.size(2) && states.size(3) == key.size(2), name,
              ": initial_state must be [B, Nv, Dv, Dk], got ", states.sizes());
  Tensor out = at::empty(value.sizes(), value.options());
  int64_t t = 0;
  for (size_t i = 0; i < lengths.size(); i++) {
    Tensor own = states[static_cast<int64_t>(i)].to(at::kFloat);
    for (const int64_t end = t + lengths[i]; t < end; t++) out[t].copy_(step(inputs, t, own));
    states[static_cast<int64_t>(i)].copy_(own);
  }
  return {out, states};
}

}  // namespace

void register_delta_rule(torch::Library& npu) {
  npu.impl("npu_recurrent_gated_delta_rule", TORCH_FN(recurrent));
  npu.impl("npu_recurrent_gated_delta_rule_functional", TORCH_FN(recurrent_functional));
  npu.impl("npu_chunk_gated_delta_rule", TORCH_FN(chunked));
}

}  // namespace sim::infer
