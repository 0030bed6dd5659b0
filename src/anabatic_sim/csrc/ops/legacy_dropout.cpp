// Dropout of torch_npu with its masks: one bit for each value, the lowest bit first, in whole blocks of 128 bits, or one byte for
// each value (op-plugin, DropoutKernelNpu.cpp, DropoutWithByteMaskKernelNpu.cpp, DropoutWithAddSoftmaxKernelNpu.cpp). The numbers
// are those of the CPU's generator, seeded by the device's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <tuple>

#include "dropout_mask.h"
#include "fallback.h"
#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;

constexpr int64_t kBlock = 128;  // bits of a block of a mask, and bytes of one with a byte for each value

void check_probability(double p) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
}

int64_t whole_blocks(int64_t count) { return (count + kBlock - 1) / kBlock * kBlock; }

Tensor apply_mask(const Tensor& x, const Tensor& kept, double p) {
  const double scale = p < 1 ? 1 / (1 - p) : 0;
  return (widened(x) * kept.to(at::kFloat) * scale).to(x.scalar_type());
}

std::tuple<Tensor, Tensor> npu_dropout(const Tensor& x, double p) {
  check_probability(p);
  TORCH_CHECK(at::isFloatingType(x.scalar_type()), "dropout only supports floating-point dtypes");
  const Tensor kept = draw_kept(x.numel(), p, take_seed_here());
  return {apply_mask(x, kept.view(x.sizes()), p), pack_mask(kept)};
}

Tensor npu_dropout_backward(const Tensor& grad, const Tensor& mask, double p) {
  check_probability(p);
  return apply_mask(grad, unpack_mask(mask, grad.sizes()), p);
}

std::tuple<Tensor, Tensor> dropout_do_mask(const Tensor& x, const Tensor& mask, double p) {
  check_probability(p);
  return {apply_mask(x, unpack_mask(mask, x.sizes()), p), mask};
}

Tensor dropout_gen_mask(const Tensor&, at::IntArrayRef size, double p, int64_t seed, int64_t offset, std::optional<bool>,
                        std::optional<bool>) {
  check_probability(p);
  const uint64_t mixed = static_cast<uint64_t>(seed) + 0x9e3779b97f4a7c15ULL * static_cast<uint64_t>(offset + 1);  // splitmix64
  return pack_mask(draw_kept(c10::multiply_integers(size), p, mixed));
}

std::tuple<Tensor, Tensor> dropout_with_byte_mask(const Tensor& x, double p) {
  check_probability(p);
  TORCH_CHECK(at::isFloatingType(x.scalar_type()), "dropout only supports floating-point dtypes");
  const Tensor kept = draw_kept(x.numel(), p, take_seed_here()).view(x.sizes());
  return {apply_mask(x, kept, p), kept.to(at::kByte)};
}

Tensor dropout_with_byte_mask_backward(const Tensor& grad, const Tensor& mask, double p) {
  check_probability(p);
  return apply_mask(grad, mask, p);
}

// The mask, softmax(x1 + alpha * x) and what dropout leaves of it.
std::tuple<Tensor, Tensor, Tensor> add_softmax(const Tensor& x, const Tensor& x1, const at::Scalar& alpha, double p,
                                               int64_t dim) {
  check_probability(p);
  TORCH_CHECK(x.sizes() == x1.sizes(), "npu_dropout_with_add_softmax: self ", x.sizes(), " and x1 ", x1.sizes(), " differ");
  const Tensor soft = at::softmax(widened(x1) + widened(x) * alpha, dim);
  const Tensor kept = draw_kept(x.numel(), p, take_seed_here());
  Tensor mask = at::zeros({whole_blocks(x.numel())}, at::kByte);
  mask.slice(0, 0, x.numel()).copy_(kept);
  const auto dtype = x.scalar_type();
  return {mask, soft.to(dtype), apply_mask(soft, kept.view(x.sizes()), p).to(dtype)};
}

// The second result, for x1, is the incoming gradient as it was: op-plugin does the same.
std::tuple<Tensor, Tensor> add_softmax_backward(const Tensor& grad, const Tensor& mask, const Tensor& soft,
                                                const at::Scalar& alpha, double p, int64_t dim) {
  const Tensor kept = mask.reshape({-1}).slice(0, 0, grad.numel()).view(grad.sizes());
  const Tensor above = apply_mask(widened(grad), kept, p), value = widened(soft);
  const Tensor scores = (above - (above * value).sum(dim, true)) * value;
  return {(scores * alpha).to(grad.scalar_type()), grad};
}

}  // namespace

Tensor draw_kept(int64_t count, double p, uint64_t seed) {
  return at::rand({count}, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kFloat)).ge(p);
}

Tensor pack_mask(const Tensor& kept) {
  const int64_t count = kept.numel(), bits = whole_blocks(count);
  Tensor all = at::zeros({bits}, at::kInt);
  all.slice(0, 0, count).copy_(kept.reshape({-1}));
  const Tensor places = at::arange(8, at::kInt);
  return all.view({-1, 8}).bitwise_left_shift(places).sum(1).to(at::kByte);
}

Tensor unpack_mask(const Tensor& mask, at::IntArrayRef sizes) {
  const int64_t count = c10::multiply_integers(sizes);
  TORCH_CHECK(mask.scalar_type() == at::kByte && mask.numel() * 8 >= count,
              "dropout: the mask must be uint8 with a bit for each of ", count, " values, got ", mask.numel(), " bytes of ",
              mask.dtype());
  const Tensor places = at::arange(8, at::kInt);
  return mask.reshape({-1, 1})
      .to(at::kInt)
      .bitwise_right_shift(places)
      .bitwise_and(1)
      .reshape({-1})
      .slice(0, 0, count)
      .view(sizes);
}

void register_legacy_dropout(torch::Library& npu) {
  npu.impl("_npu_dropout", TORCH_FN(npu_dropout));
  npu.impl("npu_dropout_backward", TORCH_FN(npu_dropout_backward));
  npu.impl("npu_dropout_do_mask", TORCH_FN(dropout_do_mask));
  npu.impl("_npu_dropout_gen_mask.Tensor", TORCH_FN(dropout_gen_mask));
  npu.impl("_dropout_with_byte_mask", TORCH_FN(dropout_with_byte_mask));
  npu.impl("_dropout_with_byte_mask_backward", TORCH_FN(dropout_with_byte_mask_backward));
  npu.impl("npu_dropout_with_add_softmax", TORCH_FN(add_softmax));
  npu.impl("npu_dropout_with_add_softmax_backward", TORCH_FN(add_softmax_backward));
}

}  // namespace sim
