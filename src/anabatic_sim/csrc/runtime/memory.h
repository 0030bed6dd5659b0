// The map of addresses that the runtime handed out, and the file behind device memory.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace sim {

enum RangeKind { DEVICE, HOST, REGISTERED };

struct Range {
  uint64_t bytes;
  int device;  // logical
  RangeKind kind;
  int64_t offset = -1;    // in this process's file of device memory; -1: not in it
  pid_t owner = 0;        // the process that mapped it
  bool imported = false;  // another process's memory: it is that one's to give back
  bool registered = false;  // page-locked memory that aclrtHostRegister was called for as well
};

// Device memory is one sparse file per process without a name, so that another process can map a piece of it (ipc.cpp). Returns
// null when the host has no room.
void* map_device_memory(uint64_t bytes, int64_t* offset);
void unmap_device_memory(void* at, const Range& range);
// Its descriptor, for /proc/PID/fd; -1 where this process has none.
int device_file();

void add_range(void* at, Range range);
bool take_range(void* at, Range* range);
bool find_range(const void* at, Range* range);
// Likewise; *inside is the distance of `at` from the beginning of the range.
bool find_range_from(const void* at, Range* range, int64_t* inside);
uint64_t round_up(uint64_t bytes, uint64_t step);

}  // namespace sim
