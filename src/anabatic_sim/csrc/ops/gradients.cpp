#include "gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

namespace sim {

namespace {

// Operators of this thread record gradients, also inside of a kernel, below the autograd keys.
class Recording final {
 public:
  Recording() : keys_(c10::impl::tls_local_dispatch_key_set().included_, excluded()), mode_(true) {}

 private:
  static c10::DispatchKeySet excluded() {
    return c10::impl::tls_local_dispatch_key_set().excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  }
  c10::impl::ForceDispatchKeyGuard keys_;
  at::AutoGradMode mode_;
};

}  // namespace

at::Tensor widened(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

std::vector<at::Tensor> gradients_of(const Formula& formula, const std::vector<at::Tensor>& inputs,
                                     const std::vector<at::Tensor>& above) {
  std::vector<at::Tensor> found;
  {
    const Recording recording;
    std::vector<at::Tensor> leaves, wanted, results, weights;
    for (const at::Tensor& input : inputs) {
      if (!input.defined()) {
        leaves.emplace_back();
        continue;
      }
      leaves.push_back(widened(input.detach()).detach().requires_grad_(true));
      wanted.push_back(leaves.back());
    }
    const std::vector<at::Tensor> outputs = formula(leaves);
    TORCH_INTERNAL_ASSERT(outputs.size() == above.size());
    for (size_t i = 0; i < outputs.size(); i++) {
      if (!above[i].defined() || !outputs[i].requires_grad())
        continue;
      results.push_back(outputs[i]);
      weights.push_back(above[i].detach().to(outputs[i].scalar_type()));
    }
    if (!results.empty())
      found = torch::autograd::grad(results, wanted, weights, std::nullopt, false, /*allow_unused=*/true);
  }
  std::vector<at::Tensor> all;
  size_t next = 0;
  for (const at::Tensor& input : inputs) {
    if (!input.defined()) {
      all.emplace_back();
      continue;
    }
    const at::Tensor own = found.empty() ? at::Tensor() : found[next++];
    all.push_back(own.defined() ? own.detach().to(input.scalar_type()) : at::zeros_like(input));
  }
  return all;
}

}  // namespace sim
