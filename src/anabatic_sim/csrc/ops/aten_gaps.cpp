// aten operators that the CPU does not have: products with a dtype of their own, depthwise convolution, the gradient of matmul.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>

#include <torch/library.h>

#include <array>
#include <tuple>

#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// torch's own rule for these overloads (aten/src/ATen/native/cuda/Blas.cpp): the inputs' dtype, or float32 for half precision.
void check_products(const char* name, const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), name, ": input dtypes must be the same, got ", a.dtype(), " and ", b.dtype());
  TORCH_CHECK(dtype == a.scalar_type() || (dtype == at::kFloat && at::isReducedFloatingType(a.scalar_type())), name,
              ": out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs, got ", dtype);
}

Tensor typed_mm(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  check_products("mm", a, b, dtype);
  return at::mm(widened(a), widened(b)).to(dtype);
}

Tensor typed_bmm(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  check_products("bmm", a, b, dtype);
  return at::bmm(widened(a), widened(b)).to(dtype);
}

Tensor typed_addmm(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                   const at::Scalar& alpha) {
  check_products("addmm", a, b, dtype);
  return at::addmm(widened(c), widened(a), widened(b), beta, alpha).to(dtype);
}

Tensor typed_baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                     const at::Scalar& alpha) {
  check_products("baddbmm", a, b, dtype);
  return at::baddbmm(widened(c), widened(a), widened(b), beta, alpha).to(dtype);
}

Tensor& store(const Tensor& result, at::ScalarType dtype, Tensor& out) {
  TORCH_CHECK(out.scalar_type() == dtype, "out must have the dtype ", dtype, ", got ", out.dtype());
  if (out.sizes() != result.sizes())
    out.resize_(result.sizes());
  return out.copy_(result);
}

Tensor& typed_mm_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  return store(typed_mm(a, b, dtype), dtype, out);
}
Tensor& typed_bmm_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  return store(typed_bmm(a, b, dtype), dtype, out);
}
Tensor& typed_addmm_out(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                        const at::Scalar& alpha, Tensor& out) {
  return store(typed_addmm(c, a, b, dtype, beta, alpha), dtype, out);
}
Tensor& typed_baddbmm_out(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                          const at::Scalar& alpha, Tensor& out) {
  return store(typed_baddbmm(c, a, b, dtype, beta, alpha), dtype, out);
}

// One group for each channel of the input (aten/src/ATen/native/cuda/DepthwiseConv2d.cu).
Tensor depthwise(const Tensor& x, const Tensor& weight, at::IntArrayRef kernel, const OptionalTensor& bias,
                 at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  TORCH_CHECK(weight.dim() == 4 && weight.size(1) == 1 && weight.sizes().slice(2) == kernel,
              "_conv_depthwise2d: weight must be [out channels, 1, ", kernel, "], got ", weight.sizes());
  return at::conv2d(x, weight, bias, stride, padding, dilation, x.size(x.dim() - 3));
}

Tensor& depthwise_out(const Tensor& x, const Tensor& weight, at::IntArrayRef kernel, const OptionalTensor& bias,
                      at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, Tensor& out) {
  return store(depthwise(x, weight, kernel, bias, stride, padding, dilation), x.scalar_type(), out);
}

std::tuple<Tensor, Tensor> depthwise_backward(const Tensor& above, const Tensor& x, const Tensor& weight,
                                              at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
                                              at::IntArrayRef dilation, std::array<bool, 2> mask) {
  const auto found = gradients_of(
      [&](const std::vector<Tensor>& in) {
        return std::vector<Tensor>{depthwise(in[0], in[1], kernel, std::nullopt, stride, padding, dilation)};
      },
      {x, weight}, {above});
  return {mask[0] ? found[0] : Tensor(), mask[1] ? found[1] : Tensor()};
}

// The gradient of dropout: `mask` is 1 where a value was kept.
Tensor masked_scale(const Tensor& x, const Tensor& mask, double scale) {
  return (widened(x) * widened(mask) * scale).to(x.scalar_type());
}

std::tuple<Tensor, Tensor> matmul_backward(const Tensor& above, const Tensor& a, const Tensor& b, std::array<bool, 2> mask) {
  if (!above.defined())
    return {Tensor(), Tensor()};
  const auto found = gradients_of([](const std::vector<Tensor>& in) { return std::vector<Tensor>{at::matmul(in[0], in[1])}; },
                                  {a, b}, {above});
  return {mask[0] ? found[0] : Tensor(), mask[1] ? found[1] : Tensor()};
}

}  // namespace

void register_aten_gaps(torch::Library& npu, torch::Library& aten) {
  aten.impl("mm.dtype", TORCH_FN(typed_mm));
  aten.impl("mm.dtype_out", TORCH_FN(typed_mm_out));
  aten.impl("bmm.dtype", TORCH_FN(typed_bmm));
  aten.impl("bmm.dtype_out", TORCH_FN(typed_bmm_out));
  aten.impl("addmm.dtype", TORCH_FN(typed_addmm));
  aten.impl("addmm.dtype_out", TORCH_FN(typed_addmm_out));
  aten.impl("baddbmm.dtype", TORCH_FN(typed_baddbmm));
  aten.impl("baddbmm.dtype_out", TORCH_FN(typed_baddbmm_out));
  aten.impl("_conv_depthwise2d", TORCH_FN(depthwise));
  aten.impl("_conv_depthwise2d.out", TORCH_FN(depthwise_out));
  npu.impl("_conv_depthwise2d_backward", TORCH_FN(depthwise_backward));
  aten.impl("_masked_scale", TORCH_FN(masked_scale));
  aten.impl("matmul_backward", TORCH_FN(matmul_backward));
}

}  // namespace sim
