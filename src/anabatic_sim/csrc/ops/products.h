// Products of 16-bit numbers on a CPU without instructions for them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string_view>

namespace sim {

// True for operators that multiply matrices: `run_product` runs them.
bool is_product(std::string_view name);

// Runs the kernel of `op` under `key`. Factors of 16 bits become fp32, and results are rounded once, as cube cores do that add
// in fp32 (Ascend C, Mmad: fp16 and bf16 factors, fp32 sums).
void run_product(const c10::OperatorHandle& op, c10::DispatchKey key, torch::jit::Stack* stack);

}  // namespace sim
