// Batch normalisation over several processes: the steps of torch.nn.SyncBatchNorm, and the two that torch_npu has of its own
// (torch_npu/utils/syncbatchnorm.py). Formulas: torch's kernels for other accelerators (aten/src/ATen/native/cuda/
// Normalization.cuh) and op-plugin's page on batch_norm_reduce. Statistics are float32.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rsqrt.h>

#include <torch/library.h>

#include <tuple>

#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

std::vector<int64_t> other_dims(const Tensor& x) {
  TORCH_CHECK(x.dim() >= 2, "batch norm: the input must be at least [N, C], got ", x.sizes());
  std::vector<int64_t> dims{0};
  for (int64_t i = 2; i < x.dim(); i++) dims.push_back(i);
  return dims;
}

// One value per channel beside the dimensions of x.
Tensor per_channel(const Tensor& values, const Tensor& x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[1] = x.size(1);
  return widened(values).reshape(shape);
}

Tensor weight_of(const OptionalTensor& weight, const Tensor& x, double missing) {
  return given(weight) ? per_channel(*weight, x) : at::full({}, missing);
}

std::tuple<Tensor, Tensor> stats(const Tensor& x, double epsilon) {
  const auto dims = other_dims(x);
  const Tensor value = widened(x), mean = value.mean(dims);
  return {mean, at::rsqrt((value - per_channel(mean, x)).pow(2).mean(dims) + epsilon)};
}

Tensor elemt(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
             const Tensor& invstd, double) {
  const Tensor normal = (widened(x) - per_channel(mean, x)) * per_channel(invstd, x);
  return (normal * weight_of(weight, x, 1) + weight_of(bias, x, 0)).to(x.scalar_type());
}

Tensor& elemt_out(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
                  const Tensor& invstd, double epsilon, Tensor& out) {
  const Tensor result = elemt(x, weight, bias, mean, invstd, epsilon);
  if (out.sizes() != result.sizes())
    out.resize_(result.sizes());
  return out.copy_(result);
}

// The running statistics in place; their variance is the unbiased one.
void update_running(const OptionalTensor& running_mean, const OptionalTensor& running_var, const Tensor& mean,
                    const Tensor& variance, double count, double momentum) {
  if (given(running_mean)) {
    Tensor target = *running_mean;
    target.copy_(widened(target) * (1 - momentum) + mean * momentum);
  }
  if (given(running_var)) {
    Tensor target = *running_var;
    target.copy_(widened(target) * (1 - momentum) + variance * (momentum * count / (count - 1)));
  }
}

// One row of mean and invstd for each process, with the number of values behind it.
std::tuple<Tensor, Tensor> gather_stats(const Tensor&, const Tensor& means, const Tensor& invstds,
                                        const OptionalTensor& running_mean, const OptionalTensor& running_var, double momentum,
                                        double epsilon, const Tensor& counts) {
  TORCH_CHECK(means.dim() == 2 && means.sizes() == invstds.sizes() && counts.numel() == means.size(0),
              "batch_norm_gather_stats_with_counts: mean and invstd must be [processes, C] and counts [processes], got ",
              means.sizes(), ", ", invstds.sizes(), " and ", counts.sizes());
  const Tensor weights = widened(counts).reshape({-1, 1}), total = weights.sum();
  const Tensor mean = (widened(means) * weights).sum(0) / total;
  const Tensor own = widened(invstds).pow(-2) - epsilon;
  const Tensor variance = ((own + (widened(means) - mean).pow(2)) * weights).sum(0) / total;
  update_running(running_mean, running_var, mean, variance, total.item<double>(), momentum);
  return {mean, at::rsqrt(variance + epsilon)};
}

// torch_npu's own pair: sums and sums of squares per channel, then what all processes have together.
std::tuple<Tensor, Tensor> reduce(const Tensor& x, double) {
  const auto dims = other_dims(x);
  const Tensor value = widened(x);
  return {value.sum(dims), value.pow(2).sum(dims)};
}

std::tuple<Tensor, Tensor> gather_sums(const Tensor&, const Tensor& sums, const Tensor& squares,
                                       const OptionalTensor& running_mean, const OptionalTensor& running_var, double momentum,
                                       double epsilon, const Tensor& counts) {
  TORCH_CHECK(sums.dim() == 2 && sums.sizes() == squares.sizes() && counts.numel() == sums.size(0),
              "batch_norm_gather_stats_update: sum and square_sum must be [processes, C] and counts [processes], got ",
              sums.sizes(), ", ", squares.sizes(), " and ", counts.sizes());
  const double total = widened(counts).sum().item<double>();
  const Tensor mean = widened(sums).sum(0) / total;
  const Tensor variance = (widened(squares).sum(0) / total - mean.pow(2)).clamp_min(0);
  update_running(running_mean, running_var, mean, variance, total, momentum);
  return {mean, at::rsqrt(variance + epsilon)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& above, const Tensor& x, const Tensor& mean,
                                                           const Tensor& invstd, const OptionalTensor& weight, bool for_input,
                                                           bool for_weight, bool for_bias) {
  const auto dims = other_dims(x);
  const Tensor grad = widened(above), sum = grad.sum(dims);
  const Tensor product = (grad * (widened(x) - per_channel(mean, x))).sum(dims);
  const at::ScalarType dtype = given(weight) ? weight->scalar_type() : sum.scalar_type();
  return {for_input ? sum : Tensor(), for_input ? product : Tensor(),
          for_weight ? (product * widened(invstd)).to(dtype) : Tensor(), for_bias ? sum.to(dtype) : Tensor()};
}

Tensor backward_elemt(const Tensor& above, const Tensor& x, const Tensor& mean, const Tensor& invstd,
                      const OptionalTensor& weight, const Tensor& sum, const Tensor& product, const Tensor& counts) {
  const Tensor total = widened(counts).sum(), scale = per_channel(invstd, x);
  const Tensor centred = widened(x) - per_channel(mean, x);
  const Tensor slope = per_channel(product, x) / total * scale.pow(2);
  const Tensor grad = widened(above) - per_channel(sum, x) / total - centred * slope;
  return (grad * scale * weight_of(weight, x, 1)).to(x.scalar_type());
}

}  // namespace

void register_batch_norm(torch::Library& npu, torch::Library& aten) {
  aten.impl("batch_norm_stats", TORCH_FN(stats));
  aten.impl("batch_norm_elemt", TORCH_FN(elemt));
  aten.impl("batch_norm_elemt.out", TORCH_FN(elemt_out));
  aten.impl("batch_norm_gather_stats_with_counts", TORCH_FN(gather_stats));
  aten.impl("batch_norm_backward_reduce", TORCH_FN(backward_reduce));
  aten.impl("batch_norm_backward_elemt", TORCH_FN(backward_elemt));
  npu.impl("batch_norm_reduce", TORCH_FN(reduce));
  npu.impl("batch_norm_gather_stats_update", TORCH_FN(gather_sums));
}

}  // namespace sim
