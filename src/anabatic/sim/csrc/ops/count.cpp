#include "count.h"

#include <c10/util/Exception.h>

#include "../sim.h"

namespace sim {

uint64_t bytes_of(c10::ArrayRef<at::Tensor> tensors) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors)
    if (tensor.defined()) bytes += static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
  return bytes;
}

void sim_count_op(const OpCall& call) {
  const int physical = sim_physical(call.device);
  if (physical < 0) return;
  SimDevice& device = sim_segment()->device[physical];
  __atomic_fetch_add(&device.operators, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&device.busy_ns, call.host_ns, __ATOMIC_RELAXED);
  // AI core errors are asynchronous on a real device: the next synchronisation reports them.
  for (SimFaultKind kind : {SIM_FAULT_AICORE, SIM_FAULT_ECC}) {
    int code = sim_fault(kind, physical);
    if (code != 0) sim_post_error(physical, code);
  }
  if (sim_fault(SIM_FAULT_LOST, physical) != 0) __atomic_store_n(&device.lost, 1, __ATOMIC_SEQ_CST);
}

void sim_count_unfused(const char*, const char*) {}

}  // namespace sim
