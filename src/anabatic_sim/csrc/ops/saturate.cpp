// Arithmetic without infinities: of the 910A and 310P, and of other chips with INF_NAN_MODE_FORCE_DISABLE=1, for which torch_npu calls
// aclrtSetDeviceSatMode (hiascend.com, INF_NAN_MODE_ENABLE): what overflows becomes the largest
// number of its format, what is not a number 0, and a status register tells until it is cleared. Here for fp16 alone; one register
// for the devices of a process.
#include "saturate.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/nan_to_num.h>
#include <c10/core/DispatchKeySet.h>

#include <array>
#include <atomic>
#include <string_view>

#include "../sim.h"
#include "alias.h"

extern "C" int sim_saturates(void);  // libascendcl.so: aclrtSetDeviceSatMode

namespace sim {

namespace {

constexpr double kLargest = 65504.0;
// They compute nothing: an infinity that is written stays one, and new memory holds what lay there.
constexpr std::array<std::string_view, 8> kWriting = {"aten::empty",     "aten::full",  "aten::fill", "aten::masked_fill",
                                                      "aten::new_empty", "aten::where", "aten::set_", "aten::scalar_tensor"};

std::atomic<bool> overflowed{false};

bool finite(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.scalar_type() != at::kHalf || at::isfinite(tensor).all().item<bool>();
}

}  // namespace

bool saturates() {
  static const bool always = sim_segment()->bf16 == 0;
  return always || sim_saturates() != 0;
}

void saturate(std::string_view name, const at::Tensor& result, const Call& call) {
  if (!saturates() || !result.defined() || result.scalar_type() != at::kHalf || !result.device().is_cpu()) return;
  for (auto writing : kWriting)
    if (name.substr(0, writing.size()) == writing) return;
  const DeviceMemory host(false);
  if (finite(result) || !call.read_all(finite)) return;
  at::Tensor target = result;
  target.copy_(at::nan_to_num(result, 0.0, kLargest, -kLargest));
  overflowed = true;
}

bool has_overflowed() { return overflowed; }
void forget_overflow() { overflowed = false; }

}  // namespace sim
