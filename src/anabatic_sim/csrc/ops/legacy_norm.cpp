// Normalisations of torch_npu beside RMS norm: op-plugin's pages of their names and its kernels' shapes (AddLayerNormNpu.cpp,
// DeepNormKernelNpu.cpp); DeepNorm is LayerNorm(alpha x + gx) of Wang et al., DeepNet, arXiv:2203.00555, equation 2. The
// arithmetic is float32.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros_like.h>

#include <torch/library.h>

#include <array>
#include <tuple>

#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

std::vector<int64_t> dims_of(const char* name, const Tensor& x, const Tensor& gamma) {
  TORCH_CHECK(gamma.dim() >= 1 && gamma.dim() <= x.dim() && x.sizes().slice(x.dim() - gamma.dim()) == gamma.sizes(), name,
              ": gamma ", gamma.sizes(), " does not match the last dimensions of x ", x.sizes());
  std::vector<int64_t> dims;
  for (int64_t i = gamma.dim(); i > 0; i--) dims.push_back(-i);
  return dims;
}

struct Moments {
  Tensor mean, rstd;  // with the normalised dimensions as 1
};

Moments moments(const Tensor& x, at::IntArrayRef dims, double epsilon) {
  const Tensor mean = x.mean(dims, true);
  return {mean, (x - mean).pow(2).mean(dims, true).add(epsilon).rsqrt()};
}

Tensor layer_norm_eval(const Tensor& x, at::IntArrayRef shape, const OptionalTensor& weight, const OptionalTensor& bias,
                       double epsilon) {
  return at::layer_norm(widened(x), shape, widened(value_of(weight)), widened(value_of(bias)), epsilon).to(x.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, at::IntArrayRef shape,
                                                       const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
                                                       const OptionalTensor& bias) {
  const bool weighted = value_of(weight).defined(), biased = value_of(bias).defined();
  const auto [dx, dweight, dbias] =
      at::native_layer_norm_backward(widened(grad), widened(x), shape, widened(mean), widened(rstd), widened(value_of(weight)),
                                     widened(value_of(bias)), {true, weighted, biased});
  return {dx.to(x.scalar_type()), weighted ? dweight.to(weight->scalar_type()) : Tensor(),
          biased ? dbias.to(bias->scalar_type()) : Tensor()};
}

// y, mean, rstd and x1 + x2. The statistics have one dimension of 1 in place of gamma's.
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma,
                                                          const Tensor& beta, double epsilon, bool) {
  TORCH_CHECK(x1.sizes() == x2.sizes(), "npu_add_layer_norm: x1 ", x1.sizes(), " and x2 ", x2.sizes(), " differ");
  const Tensor sum = widened(x1) + widened(x2);
  const auto found = moments(sum, dims_of("npu_add_layer_norm", x1, gamma), epsilon);
  std::vector<int64_t> shape(x1.sizes().begin(), x1.sizes().end() - gamma.dim());
  shape.push_back(1);
  const auto dtype = x1.scalar_type() == x2.scalar_type() ? x1.scalar_type() : at::kFloat;
  return {((sum - found.mean) * found.rstd * widened(gamma) + widened(beta)).to(dtype), found.mean.reshape(shape),
          found.rstd.reshape(shape), sum.to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_backward(const OptionalTensor& grad, const Tensor& x1,
                                                                   const Tensor& x2, const Tensor& rstd, const Tensor& mean,
                                                                   const Tensor& gamma, const OptionalTensor& grad_sum) {
  const Tensor sum = widened(x1) + widened(x2);
  const Tensor above = value_of(grad).defined() ? widened(*grad) : at::zeros_like(sum);
  auto [dx, dgamma, dbeta] = at::native_layer_norm_backward(above, sum, gamma.sizes(), widened(mean), widened(rstd),
                                                            widened(gamma), widened(gamma), {true, true, true});
  if (value_of(grad_sum).defined())
    dx = dx + widened(*grad_sum);
  dx = dx.to(x1.scalar_type());
  return {dx, dx, dgamma, dbeta};
}

std::tuple<Tensor, Tensor, Tensor> deep_norm(const Tensor& x, const Tensor& gx, const Tensor& beta, const Tensor& gamma,
                                             double alpha, double epsilon) {
  const Tensor sum = widened(x) * alpha + widened(gx);
  const auto found = moments(sum, dims_of("npu_deep_norm", x, gamma), epsilon);
  const Tensor y = (sum - found.mean) * found.rstd * widened(gamma) + widened(beta);
  return {found.mean, found.rstd, y.to(x.scalar_type())};
}

// The gradients for x, gx, beta and gamma.
std::tuple<Tensor, Tensor, Tensor, Tensor> deep_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& gx,
                                                              const Tensor& gamma, const Tensor& mean, const Tensor& rstd,
                                                              double alpha) {
  const Tensor sum = widened(x) * alpha + widened(gx);
  const auto [dsum, dgamma, dbeta] = at::native_layer_norm_backward(widened(grad), sum, gamma.sizes(), mean, rstd,
                                                                    widened(gamma), widened(gamma), {true, true, true});
  return {(dsum * alpha).to(x.scalar_type()), dsum.to(gx.scalar_type()), dbeta, dgamma};
}

// y = n * sigmoid(scale * n) of the groups' normalised values n; mean and rstd are [N, groups].
Tensors group_norm_swish(const Tensor& x, int64_t groups, const Tensor& weight, const Tensor& bias, double epsilon,
                         double scale) {
  TORCH_CHECK(x.dim() >= 2 && groups > 0 && x.size(1) % groups == 0, "npu_group_norm_swish: dimension 1 of ", x.sizes(),
              " must be a multiple of num_groups ", groups);
  const int64_t batch = x.size(0), channels = x.size(1);
  const auto [normal, mean, rstd] =
      at::native_group_norm(x.contiguous(), weight, bias, batch, channels, x.numel() / (batch * channels), groups, epsilon);
  return {normal * at::sigmoid(normal * scale), mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> swish(const Tensor& x, int64_t groups, const Tensor& weight, const Tensor& bias,
                                         std::optional<double> epsilon, std::optional<double> scale) {
  const auto found =
      group_norm_swish(widened(x), groups, widened(weight), widened(bias), epsilon.value_or(1e-5), scale.value_or(1));
  const auto dtype = x.scalar_type();
  return {found[0].to(dtype), found[1].to(dtype), found[2].to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor> silu(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                        int64_t groups, double epsilon) {
  const auto found = group_norm_swish(widened(x), groups, widened(value_of(weight)), widened(value_of(bias)), epsilon, 1);
  const auto dtype = x.scalar_type();
  return {found[0].to(dtype), found[1].to(dtype), found[2].to(dtype)};
}

// From the statistics of the way there: they already hold the epsilon.
std::tuple<Tensor, Tensor, Tensor> swish_backward(const Tensor& grad, const Tensor& x, int64_t groups, const Tensor& weight,
                                                  const Tensor& bias, const Tensor& mean, const Tensor& rstd,
                                                  std::array<bool, 3> mask, std::optional<double> scale) {
  const int64_t batch = x.size(0), channels = x.size(1), inner = x.numel() / (batch * channels), own = channels / groups;
  const double factor = scale.value_or(1);
  const Tensor centre = widened(mean).view({batch, groups, 1, 1}), spread = widened(rstd).view({batch, groups, 1, 1});
  const Tensor value = (widened(x).reshape({batch, groups, own, inner}) - centre) * spread;
  const Tensor gamma = widened(weight).view({1, groups, own, 1}), beta = widened(bias).view({1, groups, own, 1});
  const Tensor normal = value * gamma + beta, gate = at::sigmoid(normal * factor);
  const Tensor above = widened(grad).reshape({batch, groups, own, inner}) * gate * (1 + normal * factor * (1 - gate));
  const Tensor scaled = above * gamma;
  const Tensor dx = spread * (scaled - scaled.mean({2, 3}, true) - value * (scaled * value).mean({2, 3}, true));
  return {mask[0] ? dx.reshape(x.sizes()).to(x.scalar_type()) : Tensor(),
          mask[1] ? (above * value).sum(at::IntArrayRef({0, 3})).reshape(weight.sizes()).to(weight.scalar_type()) : Tensor(),
          mask[2] ? above.sum(at::IntArrayRef({0, 3})).reshape(bias.sizes()).to(bias.scalar_type()) : Tensor()};
}

struct Added {
  Tensor y, rstd, sum;
};

Added add_rms_norm_of(const char* name, const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon) {
  TORCH_CHECK(x1.sizes() == x2.sizes(), name, ": x1 ", x1.sizes(), " and x2 ", x2.sizes(), " differ");
  const Tensor sum = (widened(x1) + widened(x2)).to(x1.scalar_type()), value = widened(sum);
  const Tensor rstd = value.pow(2).mean(dims_of(name, x1, gamma), true).add(epsilon).rsqrt();
  return {(value * rstd * widened(gamma)).to(x1.scalar_type()), rstd, sum};
}

// y in float32, y, rstd and x1 + x2.
std::tuple<Tensor, Tensor, Tensor, Tensor> add_rms_norm_cast(const Tensor& x1, const Tensor& x2, const Tensor& gamma,
                                                             double epsilon) {
  const auto found = add_rms_norm_of("npu_add_rms_norm_cast", x1, x2, gamma, epsilon);
  return {found.y.to(at::kFloat), found.y, found.rstd, found.sum};
}

// In place: x1 becomes y and x2 the sum (op-plugin, AddRmsNormV2KernelNpuOpApi.cpp).
Tensor add_rms_norm_v2(Tensor& x1, Tensor& x2, const Tensor& gamma, double epsilon) {
  const auto found = add_rms_norm_of("npu_add_rms_norm_v2", x1, x2, gamma, epsilon);
  x1.copy_(found.y);
  x2.copy_(found.sum);
  return found.rstd;
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_v2_functional(const Tensor& x1, const Tensor& x2, const Tensor& gamma,
                                                              double epsilon) {
  const auto found = add_rms_norm_of("npu_add_rms_norm_v2_functional", x1, x2, gamma, epsilon);
  return {found.rstd, found.y, found.sum};
}

}  // namespace

void register_legacy_norm(torch::Library& npu) {
  npu.impl("npu_layer_norm_eval", TORCH_FN(layer_norm_eval));
  npu.impl("npu_layernorm_grad", TORCH_FN(layer_norm_backward));
  npu.impl("npu_add_layer_norm", TORCH_FN(add_layer_norm));
  npu.impl("npu_add_layer_norm_backward", TORCH_FN(add_layer_norm_backward));
  npu.impl("npu_deep_norm", TORCH_FN(deep_norm));
  npu.impl("npu_deep_norm_backward", TORCH_FN(deep_norm_backward));
  npu.impl("npu_group_norm_silu", TORCH_FN(silu));
  npu.impl("npu_group_norm_swish", TORCH_FN(swish));
  npu.impl("npu_group_norm_swish_grad", TORCH_FN(swish_backward));
  npu.impl("npu_add_rms_norm_cast", TORCH_FN(add_rms_norm_cast));
  npu.impl("npu_add_rms_norm_v2", TORCH_FN(add_rms_norm_v2));
  npu.impl("npu_add_rms_norm_v2_functional", TORCH_FN(add_rms_norm_v2_functional));
}

}  // namespace sim
