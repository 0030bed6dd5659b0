// Convolutions of torch_npu: torch's with the arguments in another order (op-plugin's pages of their names).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include <torch/library.h>

#include <array>
#include <tuple>

#include "count.h"
#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// What a convolution does beside its tensors.
struct Plan {
  const char* name;
  at::IntArrayRef stride, padding, dilation, output_padding;
  bool transposed;
  int64_t groups;

  void check(const Tensor& x, const Tensor& weight) const {
    const auto dims = static_cast<size_t>(x.dim() - 2);
    TORCH_CHECK(x.dim() == weight.dim() && (dims == 2 || dims == 3 || (dims == 1 && !transposed)), name,
                ": input and weight must be both 4-D or both 5-D, got ", x.sizes(), " and ", weight.sizes());
    for (const auto& numbers : {stride, padding, dilation})
      TORCH_CHECK(numbers.size() == dims, name, ": stride, padding and dilation need ", dims, " numbers, got ", numbers);
  }
  // Each value of the smaller side meets the whole kernel of its group.
  double flops(const Tensor& x, const Tensor& y, const Tensor& weight) const {
    const Tensor& side = transposed ? x : y;
    return 2.0 * side.numel() * weight.numel() / weight.size(0);
  }
};

Tensor forward(const Plan& plan, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  plan.check(x, weight);
  const std::vector<int64_t> none(x.dim() - 2, 0);
  const at::IntArrayRef extra = plan.transposed ? plan.output_padding : at::IntArrayRef(none);
  const Tensor y =
      at::convolution(x, weight, value_of(bias), plan.stride, plan.padding, plan.dilation, plan.transposed, extra, plan.groups);
  add_flops(plan.flops(x, y, weight));
  return y;
}

Three backward(const Plan& plan, const Tensor& x, const Tensor& grad, const Tensor& weight, std::array<bool, 3> mask) {
  plan.check(x, weight);
  const std::vector<int64_t> none(x.dim() - 2, 0);
  const at::IntArrayRef extra = plan.transposed ? plan.output_padding : at::IntArrayRef(none);
  const std::vector<int64_t> bias{grad.size(1)};
  auto [dx, dweight, dbias] = at::convolution_backward(grad, x, weight, at::IntArrayRef(bias), plan.stride, plan.padding,
                                                       plan.dilation, plan.transposed, extra, plan.groups, mask);
  add_flops(plan.flops(x, grad, weight) * (mask[0] + mask[1]));
  return {dx, dweight, dbias};
}

Tensor conv(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride, at::IntArrayRef padding,
            at::IntArrayRef dilation, int64_t groups) {
  return forward({"npu_convolution", stride, padding, dilation, {}, false, groups}, x, weight, bias);
}

Tensor& conv_out(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
                 at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, Tensor& out) {
  const Tensor y = conv(x, weight, bias, stride, padding, dilation, groups);
  if (out.sizes() != y.sizes())
    out.resize_(y.sizes());
  return out.copy_(y);
}

Three conv_backward(const Tensor& x, const Tensor& grad, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
                    at::IntArrayRef dilation, int64_t groups, std::array<bool, 3> mask) {
  return backward({"npu_convolution_backward", stride, padding, dilation, {}, false, groups}, x, grad, weight, mask);
}

Tensor conv_transpose(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef padding,
                      at::IntArrayRef output_padding, at::IntArrayRef stride, at::IntArrayRef dilation, int64_t groups) {
  return forward({"npu_convolution_transpose", stride, padding, dilation, output_padding, true, groups}, x, weight, bias);
}

Three conv_transpose_backward(const Tensor& x, const Tensor& grad, const Tensor& weight, at::IntArrayRef padding,
                              at::IntArrayRef output_padding, at::IntArrayRef stride, at::IntArrayRef dilation, int64_t groups,
                              std::array<bool, 3> mask) {
  return backward({"npu_convolution_transpose_backward", stride, padding, dilation, output_padding, true, groups}, x, grad,
                  weight, mask);
}

Three dilated_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, at::IntArrayRef, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, std::array<bool, 3> mask) {
  return backward({"slow_conv_dilated2d_backward", stride, padding, dilation, {}, false, 1}, x, grad, weight, mask);
}

Three slow_transpose_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, at::IntArrayRef,
                              at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef output_padding,
                              at::IntArrayRef dilation, std::array<bool, 3> mask) {
  return backward({"slow_conv_transpose2d_backward", stride, padding, dilation, output_padding, true, 1}, x, grad, weight,
                  mask);
}

}  // namespace

void register_legacy_conv(torch::Library& npu) {
  for (const char* name : {"npu_conv2d", "npu_conv3d", "npu_convolution"}) npu.impl(name, TORCH_FN(conv));
  for (const char* name : {"npu_conv2d.out", "npu_conv3d.out"}) npu.impl(name, TORCH_FN(conv_out));
  for (const char* name : {"npu_conv2d_backward", "npu_conv3d_backward", "npu_convolution_backward"})
    npu.impl(name, TORCH_FN(conv_backward));
  for (const char* name : {"npu_conv_transpose2d", "npu_convolution_transpose"}) npu.impl(name, TORCH_FN(conv_transpose));
  for (const char* name :
       {"npu_conv_transpose2d_backward", "npu_conv_transpose3d_backward", "npu_convolution_transpose_backward"})
    npu.impl(name, TORCH_FN(conv_transpose_backward));
  npu.impl("slow_conv_dilated2d_backward", TORCH_FN(dilated_backward));
  npu.impl("slow_conv_transpose2d_backward", TORCH_FN(slow_transpose_backward));
}

}  // namespace sim
