// Gradients of a formula by torch's own automatic differentiation, for the backward operators of torch_npu.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace sim {

using Formula = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// The gradient for each of `inputs` of `formula`, whose results have the gradients `above` (undefined: none). Inputs are taken
// in float32 (float64 stays), the gradients have the inputs' dtypes. An undefined input stays undefined; an input that the
// results do not depend on gets zeros.
std::vector<at::Tensor> gradients_of(const Formula& formula, const std::vector<at::Tensor>& inputs,
                                     const std::vector<at::Tensor>& above);

// Values in which formulas compute: float32, float64 stays.
at::Tensor widened(const at::Tensor& tensor);

inline at::Tensor value_of(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

}  // namespace sim
