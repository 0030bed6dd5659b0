// What an operator costs a device: which unit runs it, how many operations, how many bytes.
#pragma once

#include "../sim.h"
#include "count.h"

namespace sim {

struct Work {
  SimUnit unit;
  double flops;
  uint64_t bytes;
};

Work work_of(const OpCall& call);

}  // namespace sim
