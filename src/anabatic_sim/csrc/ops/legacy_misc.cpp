// Other operators of torch_npu: calibration, packed signs, sampling, and gradients that torch_npu has as operators of their own.
// Formulas: op-plugin's pages of their names; npu_ifmr as torch_npu's test of it.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/kl_div.h>
#include <ATen/ops/l1_loss.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/renorm.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

// The scale of int8 with the least squared error among steps of the range that the percentiles give.
std::tuple<Tensor, Tensor> ifmr(const Tensor& data, const Tensor& data_min, const Tensor& data_max, const Tensor& cumsum,
                                double min_percentile, double max_percentile, double start, double end, double step,
                                bool with_offset) {
  const Tensor share = widened(cumsum) / static_cast<double>(data.numel()), x = widened(data);
  const auto bins = static_cast<double>(cumsum.numel());
  const double low = data_min.item<double>(), width = data_max.item<double>() - low;
  double most = share.lt(max_percentile).sum().item<double>() / bins * width + low;
  double least = share.lt(1 - min_percentile).sum().item<double>() / bins * width + low;
  if (with_offset) {
    most = std::max(most, 0.0);
    least = std::min(least, 0.0);
  } else {
    most = std::max(std::abs(most), std::abs(least));
  }
  const Tensor tops = at::arange(start, end, step, at::kFloat) * most;
  Tensor scales = with_offset ? (tops - least) / 255 : tops / 127;
  if (with_offset)
    scales = at::where(scales.lt(1.192092896e-07), at::ones_like(scales), scales);  // float32's epsilon
  const Tensor offsets = with_offset ? -((least / scales).round() + 128) : at::zeros_like(scales);
  int64_t best = 0;
  double error = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < scales.numel(); i++) {
    const Tensor levels = ((x / scales[i]).round() + offsets[i]).clamp(-128, 127);
    const double own = ((levels - offsets[i]) * scales[i] - x).pow(2).sum().item<double>();
    if (own < error) {
      error = own;
      best = i;
    }
  }
  return {scales.slice(0, best, best + 1).clone(), offsets.slice(0, best, best + 1).clone()};
}

// Eight signs in a byte, the first in the lowest bit; 0 counts as positive, missing values as negative.
Tensor sign_bits_pack(const Tensor& x, int64_t size) {
  TORCH_CHECK(x.dim() == 1, "npu_sign_bits_pack: self must be 1-D, got ", x.sizes());
  const int64_t bytes = (x.size(0) + 7) / 8;
  TORCH_CHECK(size > 0 && bytes % size == 0, "npu_sign_bits_pack: the ", bytes, " bytes must be a multiple of size ", size);
  Tensor bits = at::zeros({bytes * 8}, at::kInt);
  bits.slice(0, 0, x.size(0)).copy_(x.ge(0));
  return bits.view({-1, 8}).bitwise_left_shift(at::arange(8, at::kInt)).sum(1).to(at::kByte).view({size, -1});
}

Tensor sign_bits_unpack(const Tensor& x, int64_t size, at::ScalarType dtype) {
  TORCH_CHECK(x.dim() == 1 && x.scalar_type() == at::kByte, "npu_sign_bits_unpack: x must be 1-D uint8, got ", x.sizes(),
              " of ", x.dtype());
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf, "npu_sign_bits_unpack: dtype must be float32 or float16, got ", dtype);
  TORCH_CHECK(size > 0 && x.size(0) * 8 % size == 0, "npu_sign_bits_unpack: the ", x.size(0) * 8,
              " values must be a multiple of size ", size);
  const Tensor bits = x.unsqueeze(1).to(at::kInt).bitwise_right_shift(at::arange(8, at::kInt)).bitwise_and(1);
  return (bits * 2 - 1).to(dtype).reshape({size, -1});
}

Tensor& sim_exponential_(Tensor& x, double rate, std::optional<at::Generator> generator) {
  return x.exponential_(rate, generator);
}

Tensor index_add(const Tensor& x, const Tensor& index, const Tensor& source, const at::Scalar& alpha) {
  return x.index_add(0, index.to(at::kLong), source, alpha);
}
Tensor& index_add_(Tensor& x, const Tensor& index, const Tensor& source, const at::Scalar& alpha) {
  return x.index_add_(0, index.to(at::kLong), source, alpha);
}

Tensor one_gradient(const Formula& formula, const Tensor& input, const Tensor& above) {
  return gradients_of(formula, {input}, {above})[0];
}

Tensor kl_div_backward(const Tensor& grad, const Tensor& x, const Tensor& target, int64_t reduction, bool log_target) {
  return one_gradient([&](const Tensors& in) { return Tensors{at::kl_div(in[0], widened(target), reduction, log_target)}; }, x,
                      grad);
}
Tensor kl_div_target_backward(const Tensor& grad, const Tensor& x, const Tensor& target, int64_t reduction, bool log_target) {
  return one_gradient([&](const Tensors& in) { return Tensors{at::kl_div(widened(x), in[0], reduction, log_target)}; }, target,
                      grad);
}
Tensor l1_loss_backward(const Tensor& grad, const Tensor& x, const Tensor& target, int64_t reduction) {
  return one_gradient([&](const Tensors& in) { return Tensors{at::l1_loss(in[0], widened(target), reduction)}; }, x, grad);
}
Tensor bce_backward(const Tensor& grad, const Tensor& x, const Tensor& target, const OptionalTensor& weight,
                    const OptionalTensor& positive, int64_t reduction) {
  return one_gradient(
      [&](const Tensors& in) {
        return Tensors{at::binary_cross_entropy_with_logits(in[0], widened(target), widened(value_of(weight)),
                                                            widened(value_of(positive)), reduction)};
      },
      x, grad);
}
Tensor renorm_backward(const Tensor& grad, const Tensor& x, const at::Scalar& p, int64_t dim, const at::Scalar& most) {
  return one_gradient([&](const Tensors& in) { return Tensors{at::renorm(in[0], p, dim, most)}; }, x, grad);
}
Tensor repeat_backward_int(const Tensor& grad, const Tensor& x, c10::SymInt repeats, std::optional<int64_t> dim) {
  const int64_t count = repeats.guard_int(__FILE__, __LINE__);
  return one_gradient([&](const Tensors& in) { return Tensors{at::repeat_interleave(in[0], count, dim)}; }, x, grad);
}
Tensor repeat_backward_tensor(const Tensor& grad, const Tensor& x, const Tensor& repeats, std::optional<int64_t> dim) {
  return one_gradient([&](const Tensors& in) { return Tensors{at::repeat_interleave(in[0], repeats.to(at::kLong), dim)}; }, x,
                      grad);
}
Tensor gather_backward(const Tensor& grad, c10::SymIntArrayRef sizes, int64_t dim, const Tensor& index, bool sparse) {
  TORCH_CHECK_NOT_IMPLEMENTED(!sparse, "anabatic sim: npu_gather_backward with sparse_grad is not simulated");
  const Tensor result = at::zeros(C10_AS_INTARRAYREF_SLOW(sizes), widened(grad).options());
  if (grad.dim() == 0 || result.dim() == 0)
    return result.add(widened(grad).sum()).to(grad.scalar_type());
  return result.scatter_add(dim, index.to(at::kLong), widened(grad)).to(grad.scalar_type());
}

}  // namespace

void register_legacy_misc(torch::Library& npu) {
  npu.impl("npu_ifmr", TORCH_FN(ifmr));
  npu.impl("npu_sign_bits_pack", TORCH_FN(sign_bits_pack));
  npu.impl("npu_sign_bits_unpack", TORCH_FN(sign_bits_unpack));
  npu.impl("npu_sim_exponential_", TORCH_FN(sim_exponential_));
  npu.impl("_npu_index_add", TORCH_FN(index_add));
  npu.impl("_npu_index_add_", TORCH_FN(index_add_));
  npu.impl("kl_div_backward", TORCH_FN(kl_div_backward));
  npu.impl("kl_div_target_backward", TORCH_FN(kl_div_target_backward));
  npu.impl("l1_loss_backward", TORCH_FN(l1_loss_backward));
  npu.impl("npu_binary_cross_entropy_with_logits_backward", TORCH_FN(bce_backward));
  npu.impl("npu_renorm_backward", TORCH_FN(renorm_backward));
  npu.impl("repeat_interleave_backward_int", TORCH_FN(repeat_backward_int));
  npu.impl("repeat_interleave_backward_tensor", TORCH_FN(repeat_backward_tensor));
  npu.impl("npu_gather_backward", TORCH_FN(gather_backward));
}

}  // namespace sim
