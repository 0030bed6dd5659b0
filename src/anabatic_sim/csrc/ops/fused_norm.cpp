// Normalisation, rotation, gated activations and the fused optimizer step, with the semantics of op-plugin's documentation:
// the arithmetic is float32 whatever the tensors' format, the result has the input's.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/stack.h>

#include <torch/library.h>

#include <tuple>

#include "fallback.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;

at::Tensor wide(const Tensor& tensor) { return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat); }

std::vector<int64_t> last_dims(const Tensor& gamma) {
  std::vector<int64_t> dims;
  for (int64_t i = gamma.dim(); i > 0; i--) dims.push_back(-i);
  return dims;
}

void check_norm(const char* name, const Tensor& x, const Tensor& gamma) {
  TORCH_CHECK(gamma.dim() >= 1 && gamma.dim() <= x.dim() && x.sizes().slice(x.dim() - gamma.dim()) == gamma.sizes(), name,
              ": gamma ", gamma.sizes(), " does not match the last dimensions of x ", x.sizes());
  TORCH_CHECK(gamma.scalar_type() == x.scalar_type() || (gamma.scalar_type() == at::kFloat &&
                                                         at::isReducedFloatingType(x.scalar_type())),
              name, ": call aclnnRmsNorm failed, detail:EZ1001: x is ", x.scalar_type(), " and gamma ", gamma.scalar_type(),
              "; they must be equal, or gamma float");
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& gamma, double epsilon) {
  check_norm("npu_rms_norm", x, gamma);
  const Tensor value = wide(x);
  const Tensor rstd = value.pow(2).mean(last_dims(gamma), true).add(epsilon).rsqrt();
  return {(value * rstd * wide(gamma)).to(x.scalar_type()), rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& gamma, const Tensor& rstd) {
  const Tensor normal = wide(x) * rstd;
  const Tensor above = wide(grad);
  const Tensor scaled = above * wide(gamma);
  const Tensor dx = rstd * (scaled - normal * (scaled * normal).mean(last_dims(gamma), true));
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < x.dim() - gamma.dim(); i++) rows.push_back(i);
  Tensor dgamma = above * normal;
  if (!rows.empty()) dgamma = dgamma.sum(rows);
  return {dx.to(x.scalar_type()), dgamma};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon) {
  const Tensor sum = (wide(x1) + wide(x2)).to(x1.scalar_type());
  auto [y, rstd] = rms_norm(sum, gamma, epsilon);
  return {y, rstd, sum};
}

std::tuple<Tensor, Tensor> gemma_rms_norm(const Tensor& x, const Tensor& gamma, double epsilon) {
  const Tensor value = wide(x);
  const Tensor rstd = value.pow(2).mean(last_dims(gamma), true).add(epsilon).rsqrt();
  return {(value * rstd * (wide(gamma) + 1)).to(x.scalar_type()), rstd};
}

// Half: (first, second) -> (-second, first); interleave: the same for neighbours.
Tensor rotated(const Tensor& x, bool half) {
  if (half) {
    auto parts = x.chunk(2, -1);
    return at::cat({-parts[1], parts[0]}, -1);
  }
  const Tensor pairs = x.unflatten(-1, {x.size(-1) / 2, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

bool is_half(c10::string_view mode, const Tensor& x) {
  TORCH_CHECK(mode == "half" || mode == "interleave", "npu_rotary_mul: rotary_mode should be half or interleave, got ", mode);
  TORCH_CHECK(x.dim() >= 3 && x.size(-1) % 2 == 0, "npu_rotary_mul: the last dimension of a 4-D input must be even, got ",
              x.sizes());
  return mode == "half";
}

Tensor rotary_mul(const Tensor& x, const Tensor& cos, const Tensor& sin, c10::string_view mode,
                  const std::optional<Tensor>& rotate) {
  TORCH_CHECK_NOT_IMPLEMENTED(!rotate.has_value() || !rotate->defined(),
                              "anabatic sim: npu_rotary_mul with rotate is not simulated");
  const bool half = is_half(mode, x);
  TORCH_CHECK(cos.sizes() == sin.sizes(), "npu_rotary_mul: r1 ", cos.sizes(), " and r2 ", sin.sizes(), " differ");
  const Tensor value = wide(x);
  return (value * wide(cos) + rotated(value, half) * wide(sin)).to(x.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> rotary_mul_backward(const Tensor& grad, const Tensor& x, const Tensor& cos, const Tensor& sin,
                                                       c10::string_view mode) {
  const bool half = is_half(mode, x);
  const Tensor above = wide(grad), value = wide(x);
  const Tensor dx = above * wide(cos) - rotated(above * wide(sin), half);  // the rotation's transpose is its negative
  const Tensor dcos = (above * value).sum_to_size(cos.sizes());
  const Tensor dsin = (above * rotated(value, half)).sum_to_size(sin.sizes());
  return {dx.to(x.scalar_type()), dcos.to(cos.scalar_type()), dsin.to(sin.scalar_type())};
}

std::tuple<Tensor, Tensor> apply_rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                        c10::string_view layout,
                                        c10::string_view mode) {
  TORCH_CHECK(layout == "BSND" || layout == "BSH" || layout == "1", "npu_apply_rotary_pos_emb: layout should be BSND, got ",
              layout);
  return {rotary_mul(q, cos, sin, mode, std::nullopt), rotary_mul(k, cos, sin, mode, std::nullopt)};
}

Tensor swiglu(const Tensor& x, int64_t dim) {
  TORCH_CHECK(x.size(dim) % 2 == 0, "npu_swiglu: the size of dimension ", dim, " must be even, got ", x.size(dim));
  auto parts = wide(x).chunk(2, dim);
  return (at::silu(parts[0]) * parts[1]).to(x.scalar_type());
}

Tensor swiglu_backward(const Tensor& grad, const Tensor& x, int64_t dim) {
  auto parts = wide(x).chunk(2, dim);
  const Tensor above = wide(grad), gate = at::sigmoid(parts[0]);
  const Tensor dgate = above * parts[1] * gate * (1 + parts[0] * (1 - gate));
  return at::cat({dgate, above * parts[0] * gate}, dim).to(x.scalar_type());
}

Tensor npu_silu(const Tensor& x) { return at::silu(x); }
Tensor& npu_silu_(Tensor& x) { return at::silu_(x); }
Tensor npu_silu_backward(const Tensor& grad, const Tensor& x, const Tensor&) { return at::silu_backward(grad, x); }
Tensor npu_gelu(const Tensor& x, c10::string_view approximate) { return at::gelu(x, approximate); }
Tensor npu_gelu_backward(const Tensor& grad, const Tensor& x, c10::string_view approximate) {
  return at::gelu_backward(grad, x, approximate);
}
// x * exp(0.851 (x - |x|)) / (1 + exp(-1.702 |x|)), which is x * sigmoid(1.702 x).
Tensor fast_gelu(const Tensor& x) { return (wide(x) * at::sigmoid(wide(x) * 1.702)).to(x.scalar_type()); }
Tensor fast_gelu_backward(const Tensor& grad, const Tensor& x) {
  const Tensor value = wide(x), gate = at::sigmoid(value * 1.702);
  return (wide(grad) * (gate + value * 1.702 * gate * (1 - gate))).to(x.scalar_type());
}
Tensor npu_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return at::linear(x, weight, bias);
}
std::tuple<Tensor, Tensor> npu_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight) {
  return {grad.matmul(weight), grad.t().matmul(x)};
}

// One tensor's AdamW step in place: out = (parameter, first moment, second moment). The powers are those of the step before.
void apply_adam_w_out(const at::Scalar& power1, const at::Scalar& power2, const at::Scalar& lr, const at::Scalar& decay,
                      const at::Scalar& beta1, const at::Scalar& beta2, const at::Scalar& epsilon, const Tensor& grad,
                      const std::optional<Tensor>& max_norm, std::optional<bool> amsgrad, std::optional<bool> maximize,
                      at::TensorList out) {
  TORCH_CHECK(out.size() == 3, "npu_apply_adam_w: out must hold the parameter and both moments");
  const double b1 = beta1.toDouble(), b2 = beta2.toDouble(), rate = lr.toDouble();
  const Tensor &param = out[0], &first = out[1], &second = out[2];
  const Tensor g = maximize.value_or(false) ? -wide(grad) : wide(grad);
  const Tensor m = wide(first) * b1 + g * (1 - b1), v = wide(second) * b2 + g * g * (1 - b2);
  const double bias1 = 1 - power1.toDouble() * b1, bias2 = 1 - power2.toDouble() * b2;
  Tensor largest = v;
  if (amsgrad.value_or(false)) {
    TORCH_CHECK(max_norm.has_value(), "npu_apply_adam_w: amsgrad needs max_grad_norm");
    largest = at::maximum(wide(*max_norm), v);
    max_norm->copy_(largest);
  }
  const Tensor step = (m / bias1) / ((largest / bias2).sqrt() + epsilon.toDouble());
  param.copy_(wide(param) * (1 - rate * decay.toDouble()) - step * rate);
  first.copy_(m);
  second.copy_(v);
}

std::tuple<Tensor, Tensor, Tensor> apply_adam_w(const at::Scalar& power1, const at::Scalar& power2, const at::Scalar& lr,
                                                const at::Scalar& decay, const at::Scalar& beta1, const at::Scalar& beta2,
                                                const at::Scalar& epsilon, const Tensor& grad,
                                                    const std::optional<Tensor>& max_norm,
                                                std::optional<bool> amsgrad, std::optional<bool> maximize, at::TensorList out) {
  apply_adam_w_out(power1, power2, lr, decay, beta1, beta2, epsilon, grad, max_norm, amsgrad, maximize, out);
  return {out[0], out[1], out[2]};
}

std::tuple<Tensor, Tensor, Tensor> apply_adam_w_new(const at::Scalar&, const at::Scalar&, const at::Scalar&, const at::Scalar&,
                                                    const at::Scalar&, const at::Scalar&, const at::Scalar&, const Tensor&,
                                                    const std::optional<Tensor>&, std::optional<bool>, std::optional<bool>) {
  TORCH_CHECK(false, "npu_apply_adam_w is not implemented for Tensor");  // op-plugin has the form with out= only
}

}  // namespace

void register_fused_norm(torch::Library& npu) {
  npu.impl("npu_rms_norm", TORCH_FN(rms_norm));
  npu.impl("npu_rms_norm_backward", TORCH_FN(rms_norm_backward));
  npu.impl("npu_add_rms_norm", TORCH_FN(add_rms_norm));
  npu.impl("npu_gemma_rms_norm", TORCH_FN(gemma_rms_norm));
  npu.impl("npu_rotary_mul", TORCH_FN(rotary_mul));
  npu.impl("npu_rotary_mul_backward", TORCH_FN(rotary_mul_backward));
  npu.impl("npu_apply_rotary_pos_emb", TORCH_FN(apply_rotary));
  npu.impl("npu_swiglu", TORCH_FN(swiglu));
  npu.impl("npu_swiglu_backward", TORCH_FN(swiglu_backward));
  npu.impl("npu_silu", TORCH_FN(npu_silu));
  npu.impl("npu_silu_", TORCH_FN(npu_silu_));
  npu.impl("npu_silu_backward", TORCH_FN(npu_silu_backward));
  npu.impl("npu_gelu", TORCH_FN(npu_gelu));
  npu.impl("npu_gelu_backward", TORCH_FN(npu_gelu_backward));
  npu.impl("fast_gelu", TORCH_FN(fast_gelu));
  npu.impl("npu_fast_gelu", TORCH_FN(fast_gelu));
  npu.impl("npu_fast_gelu_backward", TORCH_FN(fast_gelu_backward));
  npu.impl("npu_linear", TORCH_FN(npu_linear));
  npu.impl("npu_linear_backward", TORCH_FN(npu_linear_backward));
  npu.impl("npu_apply_adam_w", TORCH_FN(apply_adam_w_new));
  npu.impl("npu_apply_adam_w.out", TORCH_FN(apply_adam_w));
}

}  // namespace sim
