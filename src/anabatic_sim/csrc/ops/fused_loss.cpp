// npu_cross_entropy_loss with its gradient, and torch operators whose NPU kernels differ from the CPU's.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <tuple>

#include "fallback.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

struct Loss {
  const Tensor& log_prob;
  const Tensor& target;
  const OptionalTensor& weight;
  c10::string_view reduction;
  int64_t ignored;  // negative: no label is ignored, also not -100
  double smoothing;

  Tensor kept() const { return ignored < 0 ? target.ge(0) : target.ne(ignored); }
  // The weight of each row, 0 where it is ignored.
  Tensor rows() const {
    const Tensor one = kept().to(at::kFloat);
    return given(weight) ? one * weight->to(at::kFloat).index_select(0, target.clamp_min(0)) : one;
  }
};

void check_loss(const Loss& loss) {
  TORCH_CHECK(loss.log_prob.dim() == 2 && loss.target.dim() == 1 && loss.target.size(0) == loss.log_prob.size(0),
              "npu_cross_entropy_loss: input must be [N, C] and target [N], got ", loss.log_prob.sizes(), " and ",
                  loss.target.sizes());
  TORCH_CHECK(loss.log_prob.size(0) <= 200000, "npu_cross_entropy_loss: call aclnnCrossEntropyLoss failed, detail:EZ1001: N is ",
              loss.log_prob.size(0), ", at most 200000 is supported");
  TORCH_CHECK(loss.target.scalar_type() == at::kLong, "npu_cross_entropy_loss: target must be int64, got ", loss.target.dtype());
  TORCH_CHECK(loss.reduction == "mean" || loss.reduction == "sum" || loss.reduction == "none",
              "npu_cross_entropy_loss: reduction is ",
              loss.reduction, ", must be mean, sum or none");
  if (loss.target.numel() == 0) return;
  // On hardware such a label reads foreign memory: nothing to compute with.
  const int64_t low = loss.target.min().item<int64_t>(), high = loss.target.max().item<int64_t>();
  TORCH_CHECK(low >= 0 && high < loss.log_prob.size(1), "npu_cross_entropy_loss: target must lie in [0, ", loss.log_prob.size(1),
              "), found ", low < 0 ? low : high, " (a negative ignore_index ignores nothing: filter such rows before)");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                                                         c10::string_view reduction, int64_t ignored, double smoothing, double,
                                                         bool with_zloss) {
  TORCH_CHECK_NOT_IMPLEMENTED(!with_zloss, "anabatic sim: npu_cross_entropy_loss with return_zloss is not simulated");
  const Tensor log_prob = at::log_softmax(input, -1, at::kFloat);
  const Loss loss{log_prob, target, weight, reduction, ignored, smoothing};
  check_loss(loss);
  const Tensor rows = loss.rows(), picked = log_prob.gather(1, target.clamp_min(0).unsqueeze(1)).squeeze(1);
  Tensor each = -picked * rows * (1 - smoothing);
  if (smoothing > 0) {
    const Tensor weighted = given(weight) ? log_prob * weight->to(at::kFloat) : log_prob;
    each = each - weighted.sum(1) * loss.kept() * (smoothing / static_cast<double>(input.size(1)));
  }
  if (reduction == "sum") each = each.sum().view({1});
  if (reduction == "mean") each = (each.sum() / rows.sum()).view({1});
  const auto dtype = input.scalar_type();
  return {each.to(dtype), log_prob.to(dtype), at::empty({0}, input.options()), at::empty({0}, input.options())};
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& log_prob, const Tensor& target, const OptionalTensor& weight,
                              const OptionalTensor&, const OptionalTensor&, c10::string_view reduction, int64_t ignored,
                                  double smoothing,
                              double) {
  const bool plain = smoothing == 0 && (reduction != "mean" || (!given(weight) && ignored == -100));
  TORCH_CHECK(plain, "npu_cross_entropy_loss: call aclnnCrossEntropyLossGrad failed, detail:EZ1001: the gradient of ", reduction,
              " is supported with the default ", reduction == "mean" ? "weight, ignore_index and " : "", "label_smoothing only");
  const Loss loss{log_prob, target, weight, reduction, ignored, smoothing};
  Tensor rows = loss.rows();
  if (reduction == "mean") rows = rows / rows.sum();
  const Tensor above = (grad.to(at::kFloat) * rows).unsqueeze(1);
  Tensor result = log_prob.to(at::kFloat).exp() * above;
  result.scatter_add_(1, target.clamp_min(0).unsqueeze(1), -above);
  return result.to(log_prob.scalar_type());
}

// The NPU counts integers too; the CPU has no such kernel.
Tensor histc(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  if (!at::isIntegralType(x.scalar_type(), /*includeBool=*/false)) return at::histc(x, bins, low, high);
  return at::histc(x.to(at::kDouble), bins, low, high).to(x.scalar_type());
}

// op-plugin takes grad_scale and found_inf and uses neither: gradients stay scaled and infinite steps are not skipped.
// _fused_adam_ honours both: on these chips op-plugin sends it to the CPU.
void fused_adamw_(at::TensorList params, at::TensorList grads, at::TensorList first, at::TensorList second,
                  at::TensorList largest,
                  at::TensorList steps, double lr, double beta1, double beta2, double decay, double epsilon, bool amsgrad,
                      bool maximize,
                  const OptionalTensor&, const OptionalTensor&) {
  at::_fused_adamw_(params, grads, first, second, largest, steps, lr, beta1, beta2, decay, epsilon, amsgrad, maximize,
                    std::nullopt,
                    std::nullopt);
}

}  // namespace

void register_fused_loss(torch::Library& npu, torch::Library& aten) {
  npu.impl("npu_cross_entropy_loss", TORCH_FN(cross_entropy));
  npu.impl("npu_cross_entropy_loss_backward", TORCH_FN(cross_entropy_backward));
  aten.impl("histc", TORCH_FN(histc));
  aten.impl("_fused_adamw_", TORCH_FN(fused_adamw_));
}

}  // namespace sim
