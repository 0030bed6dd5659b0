#include "count.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "../sim.h"
#include "cost.h"

namespace sim {

void* stream_of(c10::Device device);  // stream_handle.cpp

namespace {

std::atomic<bool> backward{false};

void* stream_of(int device) {
  return sim::stream_of(c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)));
}

}  // namespace

void* capture_on(int device) { return sim_capture(stream_of(device)); }

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

namespace {

// A fault that nothing reports: the next reader of the weight computes with another number. Activations may be leaves too, where
// a function computes gradients inside of its forward pass; only weights have been written in place, by loading and updates.
void flip_weight_bit(const OpCall& call, int physical) {
  if (sim_fault_waits(SIM_FAULT_FLIP) == 0) return;
  for (const auto& tensor : call.inputs) {
    if (!tensor.defined() || !tensor.is_leaf() || !tensor.requires_grad() || tensor.numel() == 0 || tensor._version() == 0) continue;
    if (sim_fault(SIM_FAULT_FLIP, physical) == 0) return;
    const auto size = static_cast<int64_t>(tensor.element_size());
    auto* bytes = static_cast<uint8_t*>(tensor.data_ptr());
    bytes[(tensor.numel() / 2) * size + std::max<int64_t>(size - 2, 0)] ^= 0x20;  // a high bit of the mantissa
    return;
  }
}

void count_launch(const OpCall& call) {
  const int physical = sim_physical(call.device);
  if (physical < 0) return;
  void* const stream = stream_of(call.device);
  if (void* graph = sim_capturing() == 0 ? nullptr : sim_capture(stream)) {
    const Work work = work_of(call);
    return sim_capture_work(graph, {work.unit, work.flops, work.bytes});
  }
  __atomic_fetch_add(&sim_segment()->device[physical].operators, 1, __ATOMIC_RELAXED);
  sim_slow(physical, call.host_ns);
  const Work work = work_of(call);
  const SimOp op{call.name.name.c_str(), call.name.overload_name.c_str(), call.device, stream, work.unit,
                 work.flops, work.bytes, call.host_ns};
  if (work.unit != SIM_HOST_LINK) record_api(call);  // a copy is aclrtMemcpyAsync
  if (sim_profiling() != 0) profile_call(call);
  sim_paper_op(&op);
  if (sim_reporting() != 0 && torch::autograd::get_current_node() != nullptr) backward.store(true, std::memory_order_relaxed);
  sim_count_operator_faults(physical);
  flip_weight_bit(call, physical);
}

// op-plugin's fused AdamW is a loop: for each parameter it launches `step - 1` and ApplyAdamWV2
// (gitcode.com/Ascend/op-plugin, op_plugin/ops/opapi/FusedAdamWKernelNpuOpApi.cpp).
void count_adamw(const OpCall& call) {
  static const c10::OperatorName minus("aten::sub", "Scalar");
  const auto& inputs = call.inputs;
  // Lists of parameters, gradients, two moments, with amsgrad a third one, and step counters, which are scalars.
  auto counters = [&](size_t first, size_t count) {
    for (size_t i = first; i < first + count; i++)
      if (inputs[i].dim() != 0) return false;
    return true;
  };
  const size_t fifth = inputs.size() / 5;
  const bool amsgrad = !counters(4 * fifth, fifth);
  const size_t lists = amsgrad ? 6 : 5, parameters = inputs.size() / lists;
  for (size_t i = 0; i < parameters; i++) {
    std::vector<at::Tensor> mine;
    for (size_t list = 0; list < lists; list++) mine.push_back(inputs[list * parameters + i]);
    const uint64_t host_ns = call.host_ns / (2 * parameters);
    count_launch({minus, c10::ArrayRef<at::Tensor>(mine).slice(lists - 1), {}, call.device, host_ns});
    count_launch({call.name, mine, {}, call.device, host_ns});
  }
}

}  // namespace

void sim_count_op(const OpCall& call) {
  if (call.name.name == "aten::_fused_adamw_") return count_adamw(call);
  count_launch(call);
}

void sim_count_unfused(const char* name, const char* reason) { sim_report_unfused(name, reason); }

}  // namespace sim
