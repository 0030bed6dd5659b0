// Copies between host and device and between devices, scalars, casts.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "../sim.h"
#include "alias.h"
#include "capture.h"
#include "count.h"
#include "fallback.h"
#include "kernels.h"
#include "saturate.h"

namespace sim {

namespace {

// Values of aclrtMemcpyKind (acl_rt.h).
constexpr int kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3;

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  static const c10::OperatorName name("aten::copy_", "");
  const uint64_t started = sim_clock_ns();
  if (source.is_meta()) return self;
  if (self.numel() == 0 && source.numel() == 0) return self;  // torch_npu launches nothing (CopyKernelOpApi.cpp)
  Call call, other;  // two calls: a copy may join two devices
  const bool to_device = on_npu(self), from_device = on_npu(source);
  const c10::Device device = to_device ? self.device() : source.device();
  const c10::DeviceGuard guard(device);
  at::Tensor target = to_device ? call.in(self, true) : self;
  const at::Tensor from = from_device ? other.in(source, false) : source;
  const int kind = to_device ? (from_device ? kDeviceToDevice : kHostToDevice) : kDeviceToHost;
  if (void* graph = capture_on(device.index())) capture_copy(graph, self, source, kind);
  if (to_device && from_device && self.storage().is_alias_of(source.storage())) {
    Call same;  // one alias storage, so that an overlap is seen
    at::Tensor own = same.in(self, true);
    const at::AutoDispatchBelowADInplaceOrView below;
    own.copy_(same.in(source, false));
  } else {
    const at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(from);
    if (to_device && from_device && target.scalar_type() != from.scalar_type()) saturate(name.name, target, other);
  }
  if (kind != kDeviceToDevice) {
    // Real hardware runs ahead only when the host side is page-locked.
    const at::Tensor& pinned = to_device ? source : self;
    if (!non_blocking || !sim_is_host_pointer(pinned.const_data_ptr())) synchronise("aclrtMemcpy");
    if (capture_on(device.index()) == nullptr) sim_count_copy(kind, static_cast<uint64_t>(self.numel()) * self.element_size());
  } else if (self.device() != source.device()) {
    sim_count_copy(kind, static_cast<uint64_t>(self.numel()) * self.element_size());
  } else {
    check_dtype(name, call.inputs());
    check_dtype(name, other.inputs());
  }
  const at::Tensor both[] = {self, source};
  sim_count_op({name, both, {}, device.index(), sim_clock_ns() - started});
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor to = target;
  copy_(to, self, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::Tensor to = target;
  to.resize_(self.sizes());
  copy_(to, self, false);
  return target;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Call call;
  const at::Tensor host = call.in(self, false);
  synchronise("aclrtSynchronizeStream");
  sim_count_copy(kDeviceToHost, self.element_size());
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(host);
}

}  // namespace

void register_copies(torch::Library& library) {
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
}

}  // namespace sim
