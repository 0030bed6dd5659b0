// Activations and softmaxes of torch_npu: op-plugin's pages of their names, and the references in torch_npu's own tests
// (test/custom_ops). The arithmetic is float32, results have the inputs' dtype.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>

#include <torch/library.h>

#include <tuple>

#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

const char* gelu_kind(int64_t approximate) {
  TORCH_CHECK(approximate == 0 || approximate == 1, "npu_geglu: approximate must be 0 (none) or 1 (tanh), got ", approximate);
  return approximate == 0 ? "none" : "tanh";
}

// The product and the activated half; `activate_left` says which half that is.
Tensors geglu_of(const Tensor& x, int64_t dim, const char* kind, bool activate_left) {
  TORCH_CHECK(x.size(dim) % 2 == 0, "npu_geglu: the size of dimension ", dim, " must be even, got ", x.size(dim));
  const auto halves = x.chunk(2, dim);
  const Tensor active = at::gelu(halves[activate_left ? 0 : 1], kind);
  return {active * halves[activate_left ? 1 : 0], active};
}

std::tuple<Tensor, Tensor> geglu(const Tensor& x, int64_t dim, int64_t approximate, bool activate_left) {
  const auto found = geglu_of(widened(x), dim, gelu_kind(approximate), activate_left);
  return {found[0].to(x.scalar_type()), found[1].to(x.scalar_type())};
}

Tensor geglu_backward(const Tensor& grad, const Tensor& x, const Tensor&, int64_t dim, int64_t approximate,
                      bool activate_left) {
  const char* kind = gelu_kind(approximate);
  return gradients_of([&](const Tensors& in) { return Tensors{geglu_of(in[0], dim, kind, activate_left)[0]}; }, {x}, {grad})[0];
}

Tensor gelu_mul(const Tensor& x, c10::string_view approximate) {
  TORCH_CHECK(approximate == "none" || approximate == "tanh", "npu_gelu_mul: approximate must be none or tanh, got ",
              approximate);
  TORCH_CHECK(x.size(-1) % 2 == 0 && x.size(-1) <= 1024, "npu_gelu_mul: the last dimension must be even and at most 1024, got ",
              x.size(-1));
  return geglu_of(widened(x), -1, approximate == "none" ? "none" : "tanh", true)[0].to(x.scalar_type());
}

Tensor mish(const Tensor& x) { return at::mish(widened(x)).to(x.scalar_type()); }
Tensor mish_backward(const Tensor& grad, const Tensor& x) {
  return gradients_of([](const Tensors& in) { return Tensors{at::mish(in[0])}; }, {x}, {grad})[0];
}

// What is hidden counts as -10,000 before the softmax (torch_npu, test_npu_scaled_masked_softmax.py).
Tensor hidden_by(const Tensor& mask, const Tensor& x, bool fixed_triu_mask) {
  if (fixed_triu_mask)
    return at::ones({x.size(-2), x.size(-1)}, at::kBool).triu(1);
  TORCH_CHECK(mask.scalar_type() == at::kBool, "npu_scaled_masked_softmax: mask must be bool, got ", mask.dtype());
  return mask;
}

Tensor scaled_masked_softmax(const Tensor& x, const Tensor& mask, const at::Scalar& scale, bool fixed_triu_mask) {
  TORCH_CHECK(x.dim() >= 2, "npu_scaled_masked_softmax: x must have at least two dimensions, got ", x.sizes());
  for (const int64_t dim : {-1, -2})
    TORCH_CHECK(x.size(dim) >= 32 && x.size(dim) <= 4096 && x.size(dim) % 32 == 0,
                "npu_scaled_masked_softmax: the last two dimensions must be multiples of 32 from 32 to 4096, got ", x.sizes());
  const Tensor scores = (widened(x) * scale).masked_fill(hidden_by(mask, x, fixed_triu_mask), -1e4);
  return at::softmax(scores, -1).to(x.scalar_type());
}

Tensor scaled_masked_softmax_backward(const Tensor& grad, const Tensor& y, const Tensor& mask, const at::Scalar& scale,
                                      bool fixed_triu_mask) {
  const Tensor above = widened(grad), value = widened(y);
  const Tensor inner = (above - (above * value).sum(-1, true)) * value;
  return (inner * scale).masked_fill(hidden_by(mask, y, fixed_triu_mask), 0).to(grad.scalar_type());
}

Tensor masked_softmax_with_bias(const Tensor& x, const OptionalTensor& mask, const Tensor& bias, double scale, int64_t) {
  Tensor scores = widened(x) * scale + widened(bias);
  if (value_of(mask).defined())
    scores = scores + widened(*mask);
  return at::softmax(scores, -1).to(x.scalar_type());
}

Tensor& attn_softmax_(Tensor& x) { return x.copy_(at::softmax(widened(x), -1)); }

// x holds the softmax, `grad` belongs to its product with `values`: x becomes the gradient of the scores
// (op-plugin, test_npu_attn_softmax.py).
Tensor& attn_softmax_backward_(Tensor& x, const Tensor& grad, const Tensor& values) {
  const Tensor above = at::matmul(widened(grad), widened(values).transpose(-1, -2)), soft = widened(x);
  return x.copy_((above - (above * soft).sum(-1, true)) * soft);
}

Tensor softmax_cross_entropy(const Tensor& x, const Tensor& labels) {
  TORCH_CHECK(x.dim() == 2 && x.sizes() == labels.sizes(),
              "npu_softmax_cross_entropy_with_logits: features and labels must both be [batch, classes], got ", x.sizes(),
              " and ", labels.sizes());
  return -(widened(labels) * at::log_softmax(widened(x), -1)).sum(1).to(x.scalar_type());
}

// TensorFlow's SoftmaxCrossEntropyWithLogits: the softmax minus the labels, whatever these sum to.
Tensor softmax_cross_entropy_backward(const Tensor& grad, const Tensor& x, const Tensor& labels) {
  return (widened(grad).unsqueeze(-1) * (at::softmax(widened(x), -1) - widened(labels))).to(x.scalar_type());
}

}  // namespace

void register_legacy_activation(torch::Library& npu) {
  npu.impl("npu_geglu", TORCH_FN(geglu));
  npu.impl("npu_geglu_grad", TORCH_FN(geglu_backward));
  npu.impl("npu_gelu_mul", TORCH_FN(gelu_mul));
  npu.impl("npu_mish", TORCH_FN(mish));
  npu.impl("npu_mish_backward", TORCH_FN(mish_backward));
  npu.impl("npu_scaled_masked_softmax", TORCH_FN(scaled_masked_softmax));
  npu.impl("npu_scaled_masked_softmax_backward", TORCH_FN(scaled_masked_softmax_backward));
  npu.impl("npu_masked_softmax_with_rel_pos_bias", TORCH_FN(masked_softmax_with_bias));
  npu.impl("npu_attn_softmax_", TORCH_FN(attn_softmax_));
  npu.impl("npu_attn_softmax_backward_", TORCH_FN(attn_softmax_backward_));
  npu.impl("npu_softmax_cross_entropy_with_logits", TORCH_FN(softmax_cross_entropy));
  npu.impl("npu_softmax_cross_entropy_with_logits_backward", TORCH_FN(softmax_cross_entropy_backward));
}

}  // namespace sim
