// Sparse tensors (COO). Most of their operators are torch's own, on the indices and values; these are op-plugin's kernels among
// them (op_plugin_functions.yaml: `sparse`), and the way from a dense tensor. The CPU's kernels run on the same memory.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_coalesce.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/copy_sparse_to_sparse.h>
#include <ATen/ops/mul.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "../sim.h"
#include "alias.h"
#include "count.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;

// One call of a CPU kernel on sparse tensors of a device.
class SparseCall {
 public:
  explicit SparseCall(const char* name, const char* overload = "") : name_(name, overload) {}

  Tensor in(const Tensor& tensor) {
    if (!on_npu(tensor))
      return tensor;
    if (!tensor.is_sparse())
      return call_.in(tensor, false);
    const Tensor indices = call_.in(tensor._indices(), false), values = call_.in(tensor._values(), false);
    return at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes())._coalesced_(tensor.is_coalesced());
  }
  Tensor out(const Tensor& cpu) {
    const c10::DeviceGuard guard(call_.device());
    const Tensor indices = call_.out(cpu._indices()), values = call_.out(cpu._values());
    sim_count_op({name_, call_.inputs(), call_.outputs(), call_.device().index(), sim_clock_ns() - started_});
    return at::_sparse_coo_tensor_with_dims_and_tensors(cpu.sparse_dim(), cpu.dense_dim(), cpu.sizes(), indices, values,
                                                        values.options().layout(at::kSparse), cpu.is_coalesced());
  }

 private:
  c10::OperatorName name_;
  uint64_t started_ = sim_clock_ns();
  Call call_;
};

Tensor coalesce(const Tensor& x) {
  const at::AutoDispatchBelowADInplaceOrView below;
  SparseCall call("aten::_coalesce");
  return call.out(at::_coalesce(call.in(x)));
}

Tensor& mul_out(const Tensor& a, const Tensor& b, Tensor& out) {
  const at::AutoDispatchBelowADInplaceOrView below;
  SparseCall call("aten::mul", "out");
  const Tensor made = call.out(at::mul(call.in(a), call.in(b)));
  out.sparse_resize_and_clear_(made.sizes(), made.sparse_dim(), made.dense_dim());
  return at::copy_sparse_to_sparse_(out, made);
}

// The number of values that are not 0 is the size of the result: the host waits for it.
Tensor to_sparse_of(const Tensor& x, std::optional<int64_t> sparse_dim) {
  const at::AutoDispatchBelowADInplaceOrView below;
  SparseCall call("aten::_to_sparse");
  const Tensor dense = call.in(x);
  const Tensor made = call.out(sparse_dim.has_value() ? dense._to_sparse(*sparse_dim) : dense._to_sparse());
  synchronise("aten::_to_sparse");
  return made;
}

Tensor to_sparse(const Tensor& x, std::optional<at::Layout> layout, at::OptionalIntArrayRef blocks,
                 std::optional<int64_t> dense_dim) {
  TORCH_CHECK(!layout.has_value() || *layout == at::kSparse, "anabatic sim: _to_sparse with layout ", *layout,
              " is not simulated");
  TORCH_CHECK(!blocks.has_value(), "to_sparse: blocksize needs a blocked layout");
  return to_sparse_of(x, dense_dim.has_value() ? std::make_optional(x.dim() - *dense_dim) : std::nullopt);
}

Tensor to_sparse_dims(const Tensor& x, int64_t sparse_dim) { return to_sparse_of(x, sparse_dim); }

}  // namespace

void register_sparse(torch::Library& aten) {
  aten.impl("_to_sparse", TORCH_FN(to_sparse));
  aten.impl("_to_sparse.sparse_dim", TORCH_FN(to_sparse_dims));
  // Never freed, as the library of the dense kernels.
  auto* sparse = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::SparsePrivateUse1, __FILE__, __LINE__);
  sparse->impl("_coalesce", TORCH_FN(coalesce));
  sparse->impl("mul.out", TORCH_FN(mul_out));
}

}  // namespace sim
