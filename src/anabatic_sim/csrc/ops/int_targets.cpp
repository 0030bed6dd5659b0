// Integers where the CPU's kernels do not take them. Losses over classes take int32 labels on an NPU (aclnnNLLLoss,
// aclnnNLLLoss2d, aclnnMultilabelMarginLoss: hiascend.com, CANN reference); the CPU's kernels take int64 and uint8.
#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>

#include <algorithm>
#include <array>

#include "fallback.h"
#include "kernels.h"

namespace sim {

namespace {

constexpr std::array<std::string_view, 7> kLosses = {"aten::nll_loss_forward",       "aten::nll_loss_backward",
                                                     "aten::nll_loss2d_forward",     "aten::nll_loss2d_backward",
                                                     "aten::multilabel_margin_loss", "aten::multilabel_margin_loss_forward",
                                                     "aten::multilabel_margin_loss_backward"};

// The CPU's kernel behind a cast of the argument `target`.
class WideTarget final : public c10::OperatorKernel {
 public:
  explicit WideTarget(const c10::OperatorHandle& op) : kernel_(op) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].name() == "target")
        back_ = arguments.size() - i;
    TORCH_INTERNAL_ASSERT(back_ > 0);
  }
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    c10::IValue& target = (*stack)[stack->size() - back_];
    if (target.isTensor() && target.toTensor().defined() && target.toTensor().scalar_type() == at::kInt)
      target = target.toTensor().to(at::kLong);
    kernel_(op, keys, stack);
  }

 private:
  CpuKernel kernel_;
  size_t back_ = 0;  // the argument's place from the end of the stack
};

// op-plugin hands `x.div_(2)` of integers to aclnnInplaceDiv, which casts the quotient; ProcessGroupHCCL's mean of integers
// rests on it (Ascend/pytorch, test/distributed/test_reduce.py: test_reduce_dist_avg).
class IntegerQuotient final : public c10::OperatorKernel {
 public:
  explicit IntegerQuotient(const c10::OperatorHandle& op) : kernel_(op) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const at::Tensor self = (*stack)[stack->size() - 2].toTensor();
    if (!at::isIntegralType(self.scalar_type(), /*includeBool=*/false)) return kernel_(op, keys, stack);
    self.copy_(at::div(self, stack->back().toTensor()));
    torch::jit::drop(*stack, 2);
    stack->emplace_back(self);
  }

 private:
  CpuKernel kernel_;
};

}  // namespace

torch::CppFunction kernel_of_integer_quotient(const c10::OperatorHandle& op) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<IntegerQuotient>(op));
}

bool takes_int_target(std::string_view name) {
  return std::find(kLosses.begin(), kLosses.end(), name.substr(0, name.find('.'))) != kLosses.end();
}

torch::CppFunction kernel_with_int_target(const c10::OperatorHandle& op) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WideTarget>(op));
}

}  // namespace sim
