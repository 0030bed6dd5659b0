// Small things that several fused operators share: optional arguments, refusals by name, results that a kernel does not write.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>

namespace sim {

inline bool is_given(const std::optional<at::Tensor>& tensor) { return tensor.has_value() && tensor->defined(); }

using NamedTensors = std::initializer_list<std::pair<const char*, const std::optional<at::Tensor>*>>;

// Refuses an optional tensor that the simulation does not compute with, by the argument's name.
inline void refuse_given(const char* name, NamedTensors arguments) {
  for (const auto& [argument, tensor] : arguments)
    TORCH_CHECK_NOT_IMPLEMENTED(!is_given(*tensor), "anabatic sim: ", name, " with ", argument, " is not simulated");
}

// Memory that the kernel allocates and leaves as it is: NaN, or the smallest integer, so that using it shows.
inline at::Tensor unwritten(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor made = at::empty(sizes, options);
  switch (made.scalar_type()) {
    case at::kLong: return made.fill_(std::numeric_limits<int64_t>::min());
    case at::kInt: return made.fill_(std::numeric_limits<int32_t>::min());
    case at::kChar: return made.fill_(std::numeric_limits<int8_t>::min());
    case at::kByte: return made.fill_(std::numeric_limits<uint8_t>::max());
    default: return made.fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

// `part` at the start of a result of `whole` rows; the kernel does not write the others.
inline at::Tensor leading_rows(const at::Tensor& part, int64_t whole) {
  if (part.size(0) == whole) return part;
  auto sizes = part.sizes().vec();
  sizes[0] = whole;
  at::Tensor made = unwritten(sizes, part.options());
  made.narrow(0, 0, part.size(0)).copy_(part);
  return made;
}

inline bool is_float_of_npu(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kFloat;
}

}  // namespace sim
