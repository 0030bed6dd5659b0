// Device memory is host memory, taken when it is first written. A host that is full would be told by the kernel's killer; the
// program shall hear of it as of a full device.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>

#include "state.h"

namespace {

constexpr uint64_t kSpare = 128ULL << 20;  // for the program itself
constexpr uint64_t kSmall = 16ULL << 20;   // blocks that are not worth a look

// The value of a line "name value ..." of a file, `otherwise` when there is none ("max").
uint64_t value_of(const char* path, const char* name, uint64_t otherwise) {
  FILE* file = fopen(path, "r");
  if (file == nullptr) return otherwise;
  char line[256];
  uint64_t found = otherwise;
  while (fgets(line, sizeof line, file) != nullptr) {
    unsigned long long value;
    if (strncmp(line, name, strlen(name)) == 0 && sscanf(line + strlen(name), "%llu", &value) == 1) found = value;
  }
  fclose(file);
  return found;
}

// proc(5); a container's limit is in its cgroup (version 2).
uint64_t available() {
  uint64_t left = value_of("/proc/meminfo", "MemAvailable:", UINT64_MAX >> 10) << 10;
  const uint64_t most = value_of("/sys/fs/cgroup/memory.max", "", UINT64_MAX);
  if (most != UINT64_MAX) {
    const uint64_t used = value_of("/sys/fs/cgroup/memory.current", "", 0);
    const uint64_t cached = value_of("/sys/fs/cgroup/memory.stat", "inactive_file ", 0);
    const uint64_t held = used > cached ? used - cached : 0;
    left = std::min(left, most > held ? most - held : 0);
  }
  return left;
}

}  // namespace

namespace sim {

bool host_has(uint64_t bytes) {
  static std::atomic<bool> told{false};
  if (bytes < kSmall) return true;
  const uint64_t left = available();
  if (bytes + kSpare <= left) return true;
  if (!told.exchange(true))
    fprintf(stderr, "anabatic sim: the host has %llu MiB left, the simulated device asks for %llu MiB\n",
            static_cast<unsigned long long>(left >> 20), static_cast<unsigned long long>(bytes >> 20));
  return false;
}

}  // namespace sim
