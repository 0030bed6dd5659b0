// Virtual addresses with physical pages mapped in (expandable segments), and their hand-over between processes.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "ipc.h"
#include "memory.h"
#include "state.h"

namespace {

struct Pages {
  int fd;
  uint64_t bytes;
  int device;             // logical
  bool imported = false;  // another process's pages: that one has them in its account
};

// A shareable handle is one number: the process, its descriptor, the device, and some bits of the process's start against a later
// process of the same number.
constexpr int kPidBits = 22, kDescriptorBits = 20, kDeviceBits = 6, kStartBits = 16;
static_assert(kPidBits + kDescriptorBits + kDeviceBits + kStartBits == 64);

uint64_t low(uint64_t value, int bits) { return value & ((uint64_t{1} << bits) - 1); }

std::mutex mutex;
std::map<uintptr_t, uint64_t> reserved;
std::map<uintptr_t, uint64_t> mapped;

}  // namespace

extern "C" {

aclError aclrtReserveMemAddress(void** address, size_t size, size_t, void* wish, uint64_t) {
  uint64_t bytes = sim::round_up(size, 2 << 20);
  void* at = mmap(wish, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return sim::fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtReserveMemAddress", "no address space is left");
  std::lock_guard<std::mutex> lock(mutex);
  reserved[reinterpret_cast<uintptr_t>(at)] = bytes;
  *address = at;
  return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = reserved.find(reinterpret_cast<uintptr_t>(address));
  if (found == reserved.end()) return sim::fail(ACL_ERROR_INVALID_PARAM, "aclrtReleaseMemAddress", "the address was not reserved");
  munmap(address, found->second);
  reserved.erase(found);
  return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* wish, uint64_t) {
  int device = static_cast<int>(wish->location.id);
  int code = sim::device_alive(device, "aclrtMallocPhysical");
  if (code != ACL_SUCCESS) return code;
  if (!sim::take_hbm(sim_physical(device), size))
    return sim::fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocPhysical", "EL0004: Failed to allocate memory");
  int fd = memfd_create("anabatic-sim", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) {
    if (fd >= 0) close(fd);
    sim::give_hbm(sim_physical(device), size);
    return sim::fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocPhysical", "the host has no memory left");
  }
  *handle = new Pages{fd, size, device};
  return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* pages = static_cast<Pages*>(handle);
  close(pages->fd);  // mapped addresses keep the pages alive
  if (!pages->imported) sim::give_hbm(sim_physical(pages->device), pages->bytes);
  delete pages;
  return ACL_SUCCESS;
}

aclError aclrtMapMem(void* address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  auto* pages = static_cast<Pages*>(handle);
  void* at = mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages->fd, static_cast<off_t>(offset));
  if (at == MAP_FAILED) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem", "the pages cannot be mapped");
  std::lock_guard<std::mutex> lock(mutex);
  mapped[reinterpret_cast<uintptr_t>(address)] = size;
  sim::add_range(address, {size, pages->device, sim::DEVICE});
  return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = mapped.find(reinterpret_cast<uintptr_t>(address));
  if (found == mapped.end()) return sim::fail(ACL_ERROR_INVALID_PARAM, "aclrtUnmapMem", "the address is not mapped");
  mmap(address, found->second, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  sim::Range range;
  sim::take_range(address, &range);
  mapped.erase(found);
  return ACL_SUCCESS;
}

aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType, uint64_t, uint64_t* shareable) {
  constexpr const char* call = "aclrtMemExportToShareableHandle";
  const auto* pages = static_cast<Pages*>(handle);
  if (pages == nullptr || shareable == nullptr) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "an argument is null");
  const auto pid = static_cast<uint64_t>(getpid()), descriptor = static_cast<uint64_t>(pages->fd);
  if (low(pid, kPidBits) != pid || low(descriptor, kDescriptorBits) != descriptor)
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "the process or descriptor number is too large for a handle");
  *shareable = low(sim::start_time(getpid()), kStartBits);
  *shareable = *shareable << kDeviceBits | static_cast<uint64_t>(sim_physical(pages->device));
  *shareable = *shareable << kDescriptorBits | descriptor;
  *shareable = *shareable << kPidBits | pid;
  return ACL_SUCCESS;
}

// Whoever knows a handle may import it here: the list of processes is for hardware that several users share.
aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) { return ACL_SUCCESS; }

aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device, aclrtDrvMemHandle* handle) {
  constexpr const char* call = "aclrtMemImportFromShareableHandle";
  if (int code = sim::device_alive(device, call)) return code;
  const int pid = static_cast<int>(low(shareable, kPidBits));
  const int descriptor = static_cast<int>(low(shareable >> kPidBits, kDescriptorBits));
  const uint64_t start = shareable >> (kPidBits + kDescriptorBits + kDeviceBits);
  const uint64_t started = sim::start_time(pid);
  const int fd = low(started, kStartBits) == start ? sim::open_descriptor(pid, started, descriptor) : -1;
  struct stat found;
  if (fd < 0 || fstat(fd, &found) != 0) {
    if (fd >= 0) close(fd);
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "the process that exported the memory is gone");
  }
  *handle = new Pages{fd, static_cast<uint64_t>(found.st_size), device, true};
  return ACL_SUCCESS;
}

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions, size_t* granularity) {
  *granularity = 2 << 20;
  return ACL_SUCCESS;
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}

}  // extern "C"
