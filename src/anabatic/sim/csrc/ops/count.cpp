#include "count.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/function.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <atomic>

#include "../sim.h"
#include "cost.h"

namespace sim {

namespace {

std::atomic<bool> backward{false};

// torch_npu's current stream. Its library is loaded when the first operator runs, but never for everyone to link with.
void* stream_of(int device) {
  using Current = c10_npu::NPUStream (*)(c10::DeviceIndex);
  using Handle = void* (*)(const c10_npu::NPUStream*, bool);
  static void* const library = dlopen("libtorch_npu.so", RTLD_NOLOAD | RTLD_LAZY);
  static const auto current = reinterpret_cast<Current>(library == nullptr ? nullptr : dlsym(library, "_ZN7c10_npu19getCurrentNPUStreamEa"));
  static const auto handle = reinterpret_cast<Handle>(library == nullptr ? nullptr : dlsym(library, "_ZNK7c10_npu9NPUStream6streamEb"));
  if (current == nullptr || handle == nullptr) return nullptr;
  const c10_npu::NPUStream stream = current(static_cast<c10::DeviceIndex>(device));
  return handle(&stream, false);
}

}  // namespace

uint64_t bytes_of(c10::ArrayRef<at::Tensor> tensors) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors)
    if (tensor.defined()) bytes += static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
  return bytes;
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
