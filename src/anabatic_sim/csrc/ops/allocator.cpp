// The CPU allocator inside simulated operators. What a CPU kernel allocates for its results is taken from torch_npu's caching
// allocator, so results need no copy, memory statistics are true and running out of memory is the real thing.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "../sim.h"
#include "alias.h"
#include "count.h"

namespace sim {

namespace {

thread_local bool on_device = false;

class Switching final : public c10::Allocator {
 public:
  explicit Switching(c10::Allocator* original) : host_(host(original)) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (!on_device || bytes == 0) return host_->allocate(bytes);
    c10::DataPtr data = device()->allocate(bytes);
    // In a capture this may be memory that the graph itself reuses, whose contents of now the first replay still has to read.
    if (sim_capturing() != 0)
      if (void* graph = capture_on(data.device().index())) sim_capture_save(graph, data.get(), bytes);
    data.unsafe_set_device(c10::Device(c10::DeviceType::CPU));
    return data;
  }
  // Kernels that take raw scratch memory give it back by address alone.
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { host_->copy_data(to, from, bytes); }

  static void give_back(void* data) {
    int unused;
    (sim_is_device_pointer(data, &unused) ? device() : host())->raw_deleter()(data);
  }
  static c10::Allocator* host(c10::Allocator* set = nullptr) {
    static c10::Allocator* allocator = set;
    return allocator;
  }
  static c10::Allocator* device() {
    static c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
    return allocator;
  }

 private:
  c10::Allocator* host_;
};

}  // namespace

DeviceMemory::DeviceMemory(bool on) : before_(on_device) { on_device = on; }
DeviceMemory::~DeviceMemory() { on_device = before_; }

void install_allocator() {
  static Switching allocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(&allocator, /*priority=*/255);
}

bool is_device_memory(const c10::DataPtr& data) {
  // An address that torch_npu's allocator deletes; a zero-size result has no address at all.
  static const c10::DeleterFnPtr deleter = [] {
    c10::DataPtr probe = Switching::device()->allocate(1);
    return probe.get_deleter();
  }();
  return data.get() == nullptr || data.get_deleter() == deleter;
}

}  // namespace sim
