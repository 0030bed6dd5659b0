// Device memory, page-locked host memory, copies. Device memory is host memory that the segment accounts for.
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "graph.h"
#include "memory.h"
#include "state.h"

namespace sim {

namespace {
std::mutex ranges_mutex;
std::map<uintptr_t, Range> ranges;
}  // namespace

void add_range(void* at, Range range) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges[reinterpret_cast<uintptr_t>(at)] = range;
}

bool take_range(void* at, Range* range) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto found = ranges.find(reinterpret_cast<uintptr_t>(at));
  if (found == ranges.end()) return false;
  *range = found->second;
  ranges.erase(found);
  return true;
}

// Memory of aclrtMallocHost stays what it is (torch_npu's NPUSwappedMemoryAllocator registers it, then frees it).
static void register_range(void* at, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto found = ranges.find(reinterpret_cast<uintptr_t>(at));
  if (found != ranges.end() && found->second.kind == HOST) found->second.registered = true;
  else ranges[reinterpret_cast<uintptr_t>(at)] = {bytes, 0, REGISTERED};
}

static bool unregister_range(void* at) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto found = ranges.find(reinterpret_cast<uintptr_t>(at));
  if (found == ranges.end() || (found->second.kind != REGISTERED && !found->second.registered)) return false;
  if (found->second.kind == REGISTERED) ranges.erase(found);
  else found->second.registered = false;
  return true;
}

bool find_range_from(const void* at, Range* range, int64_t* inside) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto next = ranges.upper_bound(reinterpret_cast<uintptr_t>(at));
  if (next == ranges.begin()) return false;
  --next;
  *inside = static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) - next->first);
  if (static_cast<uint64_t>(*inside) >= next->second.bytes) return false;
  *range = next->second;
  return true;
}

bool find_range(const void* at, Range* range) {
  int64_t unused;
  return find_range_from(at, range, &unused);
}

uint64_t round_up(uint64_t bytes, uint64_t step) { return (bytes + step - 1) / step * step; }

namespace {

aclError allocate(void** pointer, size_t size, const char* call) {
  if (pointer == nullptr || size == 0) return fail(ACL_ERROR_INVALID_PARAM, call, "the size is 0");
  int device = current_or_default();
  if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, call, "no device is set");
  int code = device_alive(device, call);
  if (code != ACL_SUCCESS) return code;
  uint64_t bytes = round_up(size, 4096);
  int physical = sim_physical(device);
  if (!take_hbm(physical, bytes)) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, call, "EL0004: Failed to allocate memory");
  int64_t offset;
  void* at = map_device_memory(bytes, &offset);
  if (at == nullptr) {
    give_hbm(physical, bytes);
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, call, "the host has no memory left for the simulated device");
  }
  add_range(at, {bytes, device, DEVICE, offset, getpid()});
  *pointer = at;
  return ACL_SUCCESS;
}

aclError copy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, const char* call) {
  if (bytes == 0) return ACL_SUCCESS;
  if (to == nullptr || from == nullptr) return fail(ACL_ERROR_INVALID_PARAM, call, "a pointer is null");
  if (room < bytes) return fail(ACL_ERROR_INVALID_PARAM, call, "the destination is smaller than the copy");
  int device = current_or_default();
  int code = device < 0 ? 0 : device_alive(device, call);
  if (code != ACL_SUCCESS) return code;
  if (kind == ACL_MEMCPY_DEFAULT) {
    int unused;
    bool source = sim_is_device_pointer(from, &unused), target = sim_is_device_pointer(to, &unused);
    kind = source ? (target ? ACL_MEMCPY_DEVICE_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST)
                  : (target ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_HOST_TO_HOST);
  }
  memmove(to, from, bytes);
  sim_count_copy(kind, bytes);
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace sim

extern "C" {

int sim_is_device_pointer(const void* at, int* device) {
  sim::Range range;
  if (!sim::find_range(at, &range) || range.kind != sim::DEVICE) return 0;
  *device = range.device;
  return 1;
}

int sim_is_host_pointer(const void* at) {
  sim::Range range;
  return sim::find_range(at, &range) && range.kind != sim::DEVICE ? 1 : 0;
}

aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) {
  return sim::allocate(pointer, size, "aclrtMalloc");
}
aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy) {
  return sim::allocate(pointer, size, "aclrtMallocAlign32");
}
aclError aclrtMallocCached(void** pointer, size_t size, aclrtMemMallocPolicy) {
  return sim::allocate(pointer, size, "aclrtMallocCached");
}
aclError aclrtMallocWithCfg(void** pointer, size_t size, aclrtMemMallocPolicy, aclrtMallocConfig*) {
  return sim::allocate(pointer, size, "aclrtMallocWithCfg");
}

aclError aclrtFree(void* pointer) {
  sim::Range range;
  if (pointer == nullptr || !sim::take_range(pointer, &range))
    return sim::fail(ACL_ERROR_INVALID_PARAM, "aclrtFree", "the address was not allocated");
  if (range.imported) {
    sim::add_range(pointer, range);
    return sim::fail(ACL_ERROR_INVALID_PARAM, "aclrtFree", "the memory was imported: aclrtIpcMemClose closes it");
  }
  sim::unmap_device_memory(pointer, range);
  sim::give_hbm(sim_physical(range.device), range.bytes);
  return ACL_SUCCESS;
}
aclError aclrtFreeWithDevSync(void* pointer) { return aclrtFree(pointer); }

aclError aclrtMallocHost(void** pointer, size_t size) {
  size_t bytes = sim::round_up(size == 0 ? 1 : size, 4096);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return sim::fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocHost", "the host has no memory left");
  sim::add_range(at, {bytes, 0, sim::HOST});
  *pointer = at;
  return ACL_SUCCESS;
}
aclError aclrtMallocHostWithCfg(void** pointer, uint64_t size, aclrtMallocConfig*) { return aclrtMallocHost(pointer, size); }

aclError aclrtFreeHost(void* pointer) {
  sim::Range range;
  if (pointer == nullptr || !sim::take_range(pointer, &range))
    return sim::fail(ACL_ERROR_INVALID_PARAM, "aclrtFreeHost", "the address was not allocated");
  munmap(pointer, range.bytes);
  return ACL_SUCCESS;
}
aclError aclrtFreeHostWithDevSync(void* pointer) { return aclrtFreeHost(pointer); }

aclError aclrtHostRegister(void* pointer, uint64_t size, aclrtHostRegisterType, void** device_pointer) {
  sim::register_range(pointer, size);
  if (device_pointer != nullptr) *device_pointer = pointer;
  return ACL_SUCCESS;
}
aclError aclrtHostRegisterV2(void* pointer, uint64_t size, uint32_t) {
  sim::register_range(pointer, size);
  return ACL_SUCCESS;
}
aclError aclrtHostGetDevicePointer(void* host, void** device, uint32_t) {
  *device = host;
  return ACL_SUCCESS;
}
aclError aclrtHostUnregister(void* pointer) {
  if (sim::unregister_range(pointer)) return ACL_SUCCESS;
  return sim::fail(ACL_ERROR_INVALID_PARAM, "aclrtHostUnregister", "the address was not registered");
}

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  memset(attributes, 0, sizeof *attributes);
  sim::Range range;
  attributes->pageSize = 4096;
  attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  if (sim::find_range(pointer, &range)) {
    attributes->location.type = range.kind == sim::DEVICE ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
    attributes->location.id = static_cast<uint32_t>(range.device);
  }
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  // Without a device it is the first one's: torch_npu's allocator asks before it sets one (per_process_memory_fraction,
  // NPUCachingAllocator.cpp, setMemoryFraction; its test_per_process_memory_fraction.py passes on NPUs).
  const int device = std::max(sim::current_or_default(), 0);
  if (sim_physical(device) < 0) return sim::fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetMemInfo", "no device is visible");
  const SimDevice& row = sim_segment()->device[sim_physical(device)];
  uint64_t used = __atomic_load_n(&row.hbm_used, __ATOMIC_RELAXED);
  *total = row.hbm_total;
  *free_bytes = used < row.hbm_total ? row.hbm_total - used : 0;
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (kind != ACL_MEMCPY_HOST_TO_HOST) {
    int code = sim::refuse_wait_device(sim::current_or_default(), "aclrtMemcpy");
    if (code == ACL_SUCCESS) code = sim_count_sync("aclrtMemcpy");
    if (code != ACL_SUCCESS) return code;
  }
  return sim::copy(to, room, from, bytes, kind, "aclrtMemcpy");
}
aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  sim_settle(stream);
  if (bytes <= room && sim::capture_copy(sim::stream_of(stream), to, from, bytes)) return ACL_SUCCESS;
  return sim::copy(to, room, from, bytes, kind, "aclrtMemcpyAsync");
}
aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
  sim_settle(stream);
  return sim::copy(to, room, from, bytes, kind, "aclrtMemcpyAsyncWithCondition");
}

aclError aclrtMemcpy2d(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                       aclrtMemcpyKind kind) {
  for (size_t row = 0; row < height; row++) {
    int code = sim::copy(static_cast<char*>(to) + row * to_pitch, width, static_cast<const char*>(from) + row * from_pitch,
                         width, kind, "aclrtMemcpy2d");
    if (code != ACL_SUCCESS) return code;
  }
  return ACL_SUCCESS;
}
aclError aclrtMemcpy2dAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                            aclrtMemcpyKind kind, aclrtStream stream) {
  sim_settle(stream);
  return aclrtMemcpy2d(to, to_pitch, from, from_pitch, width, height, kind);
}

aclError aclrtMemcpyBatch(void** to, size_t* rooms, void** from, size_t* sizes, size_t count, aclrtMemcpyBatchAttr*, size_t*,
                          size_t, size_t* failed) {
  for (size_t i = 0; i < count; i++) {
    int code = sim::copy(to[i], rooms[i], from[i], sizes[i], ACL_MEMCPY_DEFAULT, "aclrtMemcpyBatch");
    if (code != ACL_SUCCESS) {
      *failed = i;
      return code;
    }
  }
  return ACL_SUCCESS;
}
aclError aclrtMemcpyBatchAsync(void** to, size_t* rooms, void** from, size_t* sizes, size_t count, aclrtMemcpyBatchAttr* attrs,
                               size_t* indexes, size_t attr_count, size_t* failed, aclrtStream stream) {
  sim_settle(stream);
  return aclrtMemcpyBatch(to, rooms, from, sizes, count, attrs, indexes, attr_count, failed);
}

aclError aclrtMemset(void* at, size_t room, int32_t value, size_t bytes) {
  if (room < bytes) return sim::fail(ACL_ERROR_INVALID_PARAM, "aclrtMemset", "the destination is smaller than the fill");
  memset(at, value, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void* at, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  sim_settle(stream);
  if (bytes <= room && sim::capture_fill(sim::stream_of(stream), at, value, bytes)) return ACL_SUCCESS;
  return aclrtMemset(at, room, value, bytes);
}

}  // extern "C"
