// One boxed kernel that runs any operator of PrivateUse1 with the CPU's kernel on the same memory.
#pragma once

#include <ATen/core/boxing/OperatorKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace sim {

// Formulas of torch_npu's own operators, on CPU tensors, are registered under a key that nothing else uses: under the CPU's
// key, real CPU tensors would be accepted where a real torch_npu refuses them.
constexpr c10::DispatchKey kFormula = c10::DispatchKey::FPGA;

// What an argument of an operator is.
enum class Kind : uint8_t { Other, Tensor, TensorList, OptionalTensorList, Generator, Device, PinMemory };

class CpuKernel final : public c10::OperatorKernel {
 public:
  explicit CpuKernel(const c10::OperatorHandle& op, c10::DispatchKey key = c10::DispatchKey::CPU);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  struct Argument {
    Kind kind;
    bool written;
  };
  c10::DispatchKey key_;
  std::vector<Argument> arguments_;
  std::vector<int> returned_;  // index of the argument that this result is, or -1
  bool random_ = false;
  bool mixes_ = false;  // may take CPU tensors beside simulated ones
  bool synchronises_ = false;
  bool multiplies_ = false;
};

// Refuses an operator that is not simulated, by its name.
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// The state of the device's generator as a CPU generator for one call (random.cpp).
at::Generator take_generator(const std::optional<at::Generator>& generator, c10::Device device);

// A seed for one random call of the current device, and a CPU generator made of it.
uint64_t take_seed(const std::optional<at::Generator>& generator, c10::Device device);
uint64_t take_seed_here();

// torch_npu's text for a dtype that the chip's kernels do not take (910A, 310P: bfloat16).
void check_dtype(const c10::OperatorName& name, c10::ArrayRef<at::Tensor> tensors);

}  // namespace sim
