// Random numbers. The state is torch_npu's own generator (seed and offset), so manual_seed, get_rng_state, fork_rng and
// checkpointing work; the numbers come from the CPU's engine, seeded per call: repeatable, and not those of a real NPU.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <mutex>

#include "count.h"
#include "fallback.h"

namespace sim {

namespace {

// torch_npu's generator of a device. The hooks of torch, which at::globalContext() asks, have it in newer versions only;
// the function behind them is exported by all (at_npu::detail::getDefaultNPUGenerator).
const at::Generator& default_generator(c10::DeviceIndex index) {
  using Getter = const at::Generator& (*)(c10::DeviceIndex);
  static const auto getter = [] {
    void* library = dlopen("libtorch_npu.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "_ZN6at_npu6detail22getDefaultNPUGeneratorEa");
    TORCH_CHECK(symbol != nullptr, "the simulated NPU does not find getDefaultNPUGenerator in this torch_npu");
    return reinterpret_cast<Getter>(symbol);
  }();
  return getter(index);
}

}  // namespace

uint64_t take_seed(const std::optional<at::Generator>& wanted, c10::Device device) {
  at::Generator generator = wanted.has_value() && wanted->defined() ? *wanted : default_generator(device.index());
  TORCH_CHECK(generator.device().type() == device.type(), "Expected a '", device.type(),
              "' device type for generator but found '",
              generator.device().type(), "'");
  TORCH_CHECK(capture_on(device.index()) == nullptr, "anabatic sim: random numbers inside of torch.npu.graph are not simulated");
  uint64_t seed, offset;
  {
    std::lock_guard<std::mutex> lock(generator.mutex());
    seed = generator.current_seed();
    offset = generator.get_offset();
    generator.set_offset(offset + 4);  // the offset counts in fours
  }
  uint64_t mixed = seed + 0x9e3779b97f4a7c15ULL * (offset / 4 + 1);  // splitmix64
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
  return mixed ^ (mixed >> 31);
}

uint64_t take_seed_here() {
  return take_seed(std::nullopt, c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice());
}

at::Generator take_generator(const std::optional<at::Generator>& wanted, c10::Device device) {
  return at::detail::createCPUGenerator(take_seed(wanted, device));
}

}  // namespace sim
