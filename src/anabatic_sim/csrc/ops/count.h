// THE hook of the operators: everything that runs on a simulated device passes here once, after it ran. Counters, the report,
// the cost model and the trace start from this call and need no other place.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>

namespace sim {

struct OpCall {
  const c10::OperatorName& name;  // aten::mm, npu::npu_rms_norm, ...
  c10::ArrayRef<at::Tensor> inputs;   // the simulated tensors in argument order, lists flattened; outputs written into included
  c10::ArrayRef<at::Tensor> outputs;  // new tensors only
  int device;                         // as the process numbers it
  uint64_t host_ns;                   // time the CPU needed
  bool host_number = false;           // one argument was a number in a CPU tensor, as Python's `x + 1` gives
};

void sim_count_op(const OpCall& call);

// profile_names.cpp: the range of the aclnn function for torch's profilers, and what CANN's shows of the next sim_paper_op.
void record_api(const OpCall& call);
void profile_call(const OpCall& call);

// An operator that a real NPU would run as a fused kernel, but not with these arguments, and why.
void sim_count_unfused(const char* name, const char* reason);

// Bytes read and written by the call: what the cost model's bandwidth term needs.
uint64_t bytes_of(c10::ArrayRef<at::Tensor> tensors);

// Operations of the products inside the operator that is running, where its tensors' shapes alone do not tell (packed sequences).
void add_flops(double flops);
double take_flops();
// Waits for the device as `what` does; throws with torch_npu's own text when an earlier operator failed.
void synchronise(const char* what);
// The graph that is captured on the current stream of `device`, or null.
void* capture_on(int device);
// True when an operator ran inside a backward pass since the last call (steps.cpp).
bool take_backward();
// Makes the report see the ends of steps; does nothing when no report was asked for.
void watch_steps();

}  // namespace sim
