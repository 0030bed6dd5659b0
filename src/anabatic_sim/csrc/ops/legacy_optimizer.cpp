// Optimizer steps of torch_npu on one tensor: out = (parameter, first moment, second moment), in place. Formulas: op-plugin's
// pages of their names; npu_apply_adam is TensorFlow's ApplyAdam, npu_bert_apply_adam the Adam of google-research/bert
// (optimization.py: no bias correction, weight decay beside the gradient).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;

void check_out(const char* name, const Tensor& grad, at::TensorList out) {
  TORCH_CHECK(out.size() == 3, name, ": out must hold the parameter and both moments");
  for (const Tensor& tensor : out)
    TORCH_CHECK(tensor.sizes() == grad.sizes(), name, ": the gradient is ", grad.sizes(), ", a tensor of out ", tensor.sizes());
}

Three apply_adam_out(const at::Scalar& power1, const at::Scalar& power2, const at::Scalar& lr, const at::Scalar& beta1,
                     const at::Scalar& beta2, const at::Scalar& epsilon, const Tensor& grad, std::optional<bool>,
                     std::optional<bool> nesterov, at::TensorList out) {
  check_out("npu_apply_adam", grad, out);
  const double b1 = beta1.toDouble(), b2 = beta2.toDouble();
  const double rate = lr.toDouble() * std::sqrt(1 - power2.toDouble()) / (1 - power1.toDouble());
  const Tensor g = widened(grad);
  const Tensor m = widened(out[1]) * b1 + g * (1 - b1), v = widened(out[2]) * b2 + g * g * (1 - b2);
  const Tensor ahead = nesterov.value_or(false) ? m * b1 + g * (1 - b1) : m;
  out[0].copy_(widened(out[0]) - ahead * rate / (v.sqrt() + epsilon.toDouble()));
  out[1].copy_(m);
  out[2].copy_(v);
  return {out[0], out[1], out[2]};
}

Three bert_apply_adam_out(const at::Scalar& lr, const at::Scalar& beta1, const at::Scalar& beta2, const at::Scalar& epsilon,
                          const Tensor& grad, const at::Scalar& max_norm, const at::Scalar&, const at::Scalar& decay,
                          const std::optional<at::Scalar>& step_size, int64_t mode, at::TensorList out) {
  check_out("npu_bert_apply_adam", grad, out);
  TORCH_CHECK_NOT_IMPLEMENTED(mode == 0, "anabatic sim: npu_bert_apply_adam with adam_mode ", mode, " is not simulated");
  TORCH_CHECK_NOT_IMPLEMENTED(!step_size.has_value(), "anabatic sim: npu_bert_apply_adam with step_size is not simulated");
  TORCH_CHECK_NOT_IMPLEMENTED(max_norm.toDouble() <= 0,
                              "anabatic sim: npu_bert_apply_adam with max_grad_norm is not simulated");
  const double b1 = beta1.toDouble(), b2 = beta2.toDouble();
  const Tensor g = widened(grad), before = widened(out[0]);
  const Tensor m = widened(out[1]) * b1 + g * (1 - b1), v = widened(out[2]) * b2 + g * g * (1 - b2);
  out[0].copy_(before - (m / (v.sqrt() + epsilon.toDouble()) + before * decay.toDouble()) * lr.toDouble());
  out[1].copy_(m);
  out[2].copy_(v);
  return {out[0], out[1], out[2]};
}

// op-plugin has the forms with out= only.
Three apply_adam(const at::Scalar&, const at::Scalar&, const at::Scalar&, const at::Scalar&, const at::Scalar&,
                 const at::Scalar&, const Tensor&, std::optional<bool>, std::optional<bool>) {
  TORCH_CHECK(false, "npu_apply_adam is not implemented for Tensor");
}
Three bert_apply_adam(const at::Scalar&, const at::Scalar&, const at::Scalar&, const at::Scalar&, const Tensor&,
                      const at::Scalar&, const at::Scalar&, const at::Scalar&, const std::optional<at::Scalar>&, int64_t) {
  TORCH_CHECK(false, "npu_bert_apply_adam is not implemented for Tensor");
}

}  // namespace

void register_legacy_optimizer(torch::Library& npu) {
  npu.impl("npu_apply_adam", TORCH_FN(apply_adam));
  npu.impl("npu_apply_adam.out", TORCH_FN(apply_adam_out));
  npu.impl("npu_bert_apply_adam", TORCH_FN(bert_apply_adam));
  npu.impl("npu_bert_apply_adam.out", TORCH_FN(bert_apply_adam_out));
}

}  // namespace sim
