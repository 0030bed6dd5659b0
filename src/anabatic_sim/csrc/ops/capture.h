// Operators of a capturing stream, kept so that an execution of the graph runs them again on the same addresses.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "alias.h"
#include "fallback.h"

namespace sim {

// True when the current stream of this thread's device captures.
bool capture_on_any();

// One call: made with the arguments as they came, `begin` before the kernel runs, `end` after it.
class CapturedCall {
 public:
  CapturedCall(const c10::OperatorHandle& op, c10::DispatchKey key, c10::ArrayRef<c10::IValue> arguments);
  // Keeps what the call overwrites. False: the device of the call does not capture.
  bool begin(const Call& call);
  void end(const std::vector<Kind>& kinds, c10::ArrayRef<c10::IValue> results, const Call& call);

 private:
  c10::OperatorHandle op_;
  c10::DispatchKey key_;
  std::vector<c10::IValue> arguments_;
  void* graph_ = nullptr;
};

// One random call of a captured operator: tensors of the generator's state (at_npu::NPUGeneratorCaptureState), which torch_npu
// fills before each replay, and the call's place within the graph.
struct Draw {
  at::Tensor seed, offset;
  uint64_t within;
};
// Where the operator that is captured on this thread keeps its random calls.
std::vector<Draw>* recorded_draws();
// The next random call of the operator that is replayed on this thread; null: none is.
const Draw* next_replayed_draw();

// A copy between tensors of which one at least is simulated; `kind` is an aclrtMemcpyKind. To be called before it is made.
void capture_copy(void* graph, const at::Tensor& to, const at::Tensor& from, int kind);

}  // namespace sim
