// Casts and float status. Formats are torch_npu's own (register.cpp, opapi/format.cpp).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include "fallback.h"
#include "kernels.h"
#include "saturate.h"

namespace sim {

namespace {

using at::Tensor;

Tensor dtype_cast(const Tensor& x, int64_t dtype, std::optional<int64_t>) { return x.to(static_cast<at::ScalarType>(dtype),
                                                                                        false, true); }
Tensor dtype_cast_plain(const Tensor& x, at::ScalarType dtype) { return x.to(dtype, false, true); }
Tensor& dtype_cast_(Tensor& x, const Tensor& source) { return x.copy_(source); }
Tensor dtype_cast_backward(const Tensor& grad, at::ScalarType dtype, std::optional<int64_t>, std::optional<int64_t>) {
  return grad.to(dtype, false, true);
}

Tensor& copy_memory(Tensor& x, const Tensor& source, bool) { return x.copy_(source); }
Tensor& one(Tensor& x) { return x.fill_(1); }

// The status register of the first chips: eight floats, the first one set after an overflow. Chips with Inf/NaN mode never set
// it.
Tensor alloc_status(const Tensor&) { return at::zeros({8}); }
Tensor status(const Tensor&, int64_t) {
  Tensor told = at::zeros({8});
  if (has_overflowed()) told.select(0, 0).fill_(1);
  return told;
}
Tensor clear_status(const Tensor&, int64_t) {
  forget_overflow();
  return at::zeros({8});
}

bool any_non_finite(at::TensorList grads) {
  if (saturates()) return has_overflowed();
  for (const Tensor& grad : grads)
    if (!at::isfinite(grad).all().item<bool>()) return true;
  return false;
}

}  // namespace

void register_casts(torch::Library& npu) {
  npu.impl("npu_dtype_cast", TORCH_FN(dtype_cast));
  npu.impl("_npu_dtype_cast", TORCH_FN(dtype_cast_plain));
  npu.impl("_npu_dtype_cast_backward", TORCH_FN(dtype_cast_plain));
  npu.impl("npu_dtype_cast_", TORCH_FN(dtype_cast_));
  npu.impl("npu_dtype_cast_backward", TORCH_FN(dtype_cast_backward));
  npu.impl("copy_memory_", TORCH_FN(copy_memory));
  npu.impl("one_", TORCH_FN(one));
  npu.impl("npu_alloc_float_status", TORCH_FN(alloc_status));
  npu.impl("npu_get_float_status", TORCH_FN(status));
  npu.impl("npu_clear_float_status", TORCH_FN(clear_status));
  npu.impl("_amp_foreach_non_finite_check", TORCH_FN(any_non_finite));
}

}  // namespace sim
