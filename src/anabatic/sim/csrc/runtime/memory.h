// The map of addresses that the runtime handed out.
#pragma once

#include <cstdint>

namespace sim {

enum RangeKind { DEVICE, HOST, REGISTERED };

struct Range {
  uint64_t bytes;
  int device;  // logical
  RangeKind kind;
};

void add_range(void* at, Range range);
bool take_range(void* at, Range* range);
bool find_range(const void* at, Range* range);
uint64_t round_up(uint64_t bytes, uint64_t step);

}  // namespace sim
