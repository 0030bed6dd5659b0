// The arithmetic of chips without infinities.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "alias.h"

namespace sim {

// True on chips whose numbers end at the largest one.
bool saturates();
// What the operator `name` computed, a CPU tensor over the device's memory; nothing happens on other chips, where an input was
// infinite already, and where nothing was computed.
void saturate(std::string_view name, const at::Tensor& result, const Call& call);
// The status register.
bool has_overflowed();
void forget_overflow();

}  // namespace sim
