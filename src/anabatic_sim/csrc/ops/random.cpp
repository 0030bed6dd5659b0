// Random numbers. The state is torch_npu's own generator (seed and offset), so manual_seed, get_rng_state, fork_rng and
// checkpointing work; the numbers come from the CPU's engine, seeded per call: repeatable, and not those of a real NPU.
//
// In a capture the seed and the offset are tensors of the generator (NPUGeneratorImpl::philox_npu_state), which torch_npu fills
// before each replay; a replay draws what the same calls would draw outside of a graph.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch_npu/csrc/aten/NPUGeneratorImpl.h>

#include <mutex>
#include <type_traits>
#include <vector>

#include "alias.h"
#include "capture.h"
#include "count.h"
#include "fallback.h"

namespace sim {

namespace {

constexpr uint64_t kOffsetStep = 4;  // the offset counts in fours

void* symbol_of(const char* name) {
  void* library = dlopen("libtorch_npu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = library == nullptr ? nullptr : dlsym(library, name);
  TORCH_CHECK(symbol != nullptr, "the simulated NPU does not find ", name, " in this torch_npu");
  return symbol;
}

// torch_npu's generator of a device. The hooks of torch, which at::globalContext() asks, have it in newer versions only;
// the function behind them is exported by all (at_npu::detail::getDefaultNPUGenerator).
const at::Generator& default_generator(c10::DeviceIndex index) {
  using Getter = const at::Generator& (*)(c10::DeviceIndex);
  static const auto getter = reinterpret_cast<Getter>(symbol_of("_ZN6at_npu6detail22getDefaultNPUGeneratorEa"));
  return getter(index);
}

uint64_t mix(uint64_t seed, uint64_t offset) {
  uint64_t mixed = seed + 0x9e3779b97f4a7c15ULL * (offset / kOffsetStep + 1);  // splitmix64
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
  return mixed ^ (mixed >> 31);
}

uint64_t value_of(const at::Tensor& tensor) { return static_cast<uint64_t>(*static_cast<const int64_t*>(tensor.const_data_ptr())); }

// torch_npu's state of a random call in a capture, in the versions whose generator keeps tensors for it.
template <typename State>
Draw draw_of(const State& state) {
  if constexpr (std::is_same_v<decltype(state.seed_.ptr), at::Tensor*>) {
    TORCH_CHECK(state.captured_, "the generator does not know of the capture");
    return {*state.seed_.ptr, *state.offset_.ptr, state.offset_intragraph_};
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "anabatic sim: random numbers inside of torch.npu.graph are not simulated for this torch_npu");
  }
}

uint64_t capture_draw(at::Generator& generator) {
  std::vector<Draw>* draws = recorded_draws();
  using Getter = at_npu::PhiloxNpuState (*)(c10::GeneratorImpl*, uint64_t);
  static const auto getter = reinterpret_cast<Getter>(symbol_of("_ZN6at_npu16NPUGeneratorImpl16philox_npu_stateEm"));
  const DeviceMemory host(false);
  std::lock_guard<std::mutex> lock(generator.mutex());
  draws->push_back(draw_of(getter(generator.unsafeGetGeneratorImpl(), kOffsetStep)));
  return mix(generator.current_seed(), draws->back().within);
}

}  // namespace

uint64_t take_seed(const std::optional<at::Generator>& wanted, c10::Device device) {
  if (const Draw* draw = next_replayed_draw()) return mix(value_of(draw->seed), value_of(draw->offset) + draw->within);
  at::Generator generator = wanted.has_value() && wanted->defined() ? *wanted : default_generator(device.index());
  TORCH_CHECK(generator.device().type() == device.type(), "Expected a '", device.type(),
              "' device type for generator but found '",
              generator.device().type(), "'");
  if (capture_on(device.index()) != nullptr) return capture_draw(generator);
  std::lock_guard<std::mutex> lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + kOffsetStep);
  return mix(generator.current_seed(), offset);
}

uint64_t take_seed_here() {
  return take_seed(std::nullopt, c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice());
}

at::Generator take_generator(const std::optional<at::Generator>& wanted, c10::Device device) {
  return at::detail::createCPUGenerator(take_seed(wanted, device));
}

}  // namespace sim
