#include "count.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>

#include "../sim.h"
#include "cost.h"

namespace sim {

namespace {

std::atomic<bool> backward{false};

void* stream_of(int device) {
  static const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  return guard.getStream(c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device))).native_handle();
}

}  // namespace

uint64_t bytes_of(c10::ArrayRef<at::Tensor> tensors) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors)
    if (tensor.defined()) bytes += static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
  return bytes;
}

void synchronise(const char* what) {
  static const c10::impl::VirtualGuardImpl current(c10::DeviceType::PrivateUse1);
  const int failed = sim_stream_failed(stream_of(current.getDevice().index()), what);
  const int counted = sim_count_sync(what);
  const int code = failed != 0 ? failed : counted;
  if (code == 0) return;
  // torch_npu asks its runtime and finds the same error: the text is its own. Its library is loaded, but not for us to link with.
  static void* const library = dlopen("libtorch_npu.so", RTLD_NOLOAD | RTLD_LAZY);
  static const auto check = reinterpret_cast<bool (*)(bool)>(library == nullptr ? nullptr : dlsym(library, "_ZN7c10_npu20npuSynchronizeDeviceEb"));
  if (check != nullptr) check(true);
  TORCH_CHECK(false, "NPU function error: ", what, ", error code is ", code, "\n[ERROR] ERR00100 PTA call acl api failed");
}

bool take_backward() { return backward.exchange(false); }

void sim_count_op(const OpCall& call) {
  const int physical = sim_physical(call.device);
  if (physical < 0) return;
  __atomic_fetch_add(&sim_segment()->device[physical].operators, 1, __ATOMIC_RELAXED);
  sim_slow(physical, call.host_ns);
  const Work work = work_of(call);
  const SimOp op{call.name.name.c_str(), call.name.overload_name.c_str(), call.device, stream_of(call.device), work.unit,
                 work.flops, work.bytes, call.host_ns};
  sim_paper_op(&op);
  if (sim_reporting() != 0 && torch::autograd::get_current_node() != nullptr) backward.store(true, std::memory_order_relaxed);
  sim_count_operator_faults(physical);
}

void sim_count_unfused(const char* name, const char* reason) { sim_report_unfused(name, reason); }

}  // namespace sim
