// Device memory that another process of the machine maps by a key (aclrtIpcMem*), and physical pages that it maps by a number
// (aclrtMemExportToShareableHandle).
#include "ipc.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>

#include "memory.h"

namespace {

struct Imported {
  void* at;
  int users;
};
std::mutex mutex;
std::map<std::string, Imported>& imported = *new std::map<std::string, Imported>;

// A key as text: it has to fit into the 65 bytes that torch_npu keeps for it (NPUCachingAllocator.h, kAclIpcHandleSize).
struct Key {
  int pid, descriptor, physical;
  unsigned long long started, offset, bytes;
};
constexpr const char* kFormat = "%d.%d.%d.%llx.%llx.%llx";

bool parse(const char* text, Key* key) {
  return text != nullptr && sscanf(text, kFormat, &key->pid, &key->descriptor, &key->physical, &key->started, &key->offset,
                                   &key->bytes) == 6;
}

// Physical devices keep their number; one that this process does not see counts as its current one.
int device_of(int physical) {
  const int logical = sim::logical_of(physical);
  return logical >= 0 ? logical : sim::current_or_default();
}

}  // namespace

namespace sim {

int open_descriptor(int pid, uint64_t started, int descriptor) {
  if (start_time(pid) != started) return -1;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
  return open(path, O_RDWR | O_CLOEXEC);
}

}  // namespace sim

extern "C" {

aclError aclrtIpcMemGetExportKey(void* pointer, size_t size, char* key, size_t room, uint64_t) {
  constexpr const char* call = "aclrtIpcMemGetExportKey";
  sim::Range range;
  int64_t inside;
  if (key == nullptr || size == 0 || !sim::find_range_from(pointer, &range, &inside) || range.kind != sim::DEVICE)
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "the address is not device memory");
  if (range.offset < 0 || range.owner != getpid())
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "only memory of aclrtMalloc can be exported, by the process that owns it");
  if (static_cast<uint64_t>(inside) + size > range.bytes)
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "the size reaches beyond the allocation");
  const int wrote = snprintf(key, room, kFormat, getpid(), sim::device_file(), sim_physical(range.device),
                             static_cast<unsigned long long>(sim::start_time(getpid())),
                             static_cast<unsigned long long>(range.offset + inside), static_cast<unsigned long long>(size));
  if (wrote < 0 || static_cast<size_t>(wrote) >= room)
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "the room for the key is too small");
  return ACL_SUCCESS;
}

// Whoever knows a key may import it here: the list of processes is for hardware that several users share.
aclError aclrtIpcMemSetImportPid(const char* key, int32_t* pids, size_t count) {
  Key parsed;
  if (!parse(key, &parsed) || pids == nullptr || count == 0)
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemSetImportPid", "the key or the list of processes is not valid");
  return ACL_SUCCESS;
}

aclError aclrtIpcMemImportByKey(void** pointer, const char* text, uint64_t) {
  constexpr const char* call = "aclrtIpcMemImportByKey";
  Key key;
  if (pointer == nullptr || !parse(text, &key)) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "the key is not valid");
  const int device = device_of(key.physical);
  if (device < 0) return sim::fail(ACL_ERROR_RT_CONTEXT_NULL, call, "no device is set");
  std::lock_guard<std::mutex> lock(mutex);
  auto known = imported.find(text);
  if (known != imported.end()) {
    known->second.users++;
    *pointer = known->second.at;
    return ACL_SUCCESS;
  }
  const int descriptor = sim::open_descriptor(key.pid, key.started, key.descriptor);
  if (descriptor < 0) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "the process that exported the memory is gone");
  const uint64_t bytes = sim::round_up(key.bytes, 4096);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, static_cast<off_t>(key.offset));
  close(descriptor);
  if (at == MAP_FAILED) return sim::fail(ACL_ERROR_RT_MEMORY_ALLOCATION, call, "the memory cannot be mapped");
  sim::Range range{bytes, device, sim::DEVICE};
  range.imported = true;
  sim::add_range(at, range);
  imported[text] = {at, 1};
  *pointer = at;
  return ACL_SUCCESS;
}

aclError aclrtIpcMemClose(const char* text) {
  Key key;
  if (!parse(text, &key)) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemClose", "the key is not valid");
  std::lock_guard<std::mutex> lock(mutex);
  auto known = imported.find(text);
  if (known == imported.end())  // of the process that exported it: who has mapped the memory keeps it
    return key.pid == getpid() ? ACL_SUCCESS
                               : sim::fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemClose", "the key was not imported here");
  if (--known->second.users > 0) return ACL_SUCCESS;
  sim::Range range;
  sim::take_range(known->second.at, &range);
  munmap(known->second.at, range.bytes);
  imported.erase(known);
  return ACL_SUCCESS;
}

}  // extern "C"
