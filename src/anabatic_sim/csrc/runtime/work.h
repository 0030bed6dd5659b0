// Work that a stream still has to do. Operators run on the host when they are launched, so a stream only has work left when a
// collective was put on it: that waits for other processes, and the host must be able to go on meanwhile, as on hardware.
//
// A fence is the end of one piece of work. A stream keeps the fences of everything it still waits for; an event takes a copy of
// them; a stream that waits for the event adds them to its own. Operators of a stream wait for its fences first (sim_settle).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "state.h"

namespace sim {

struct Fence {
  bool done = false;
  int code = 0;          // ACL error of the work
  std::string text;      // what aclGetRecentErrMsg says about it
  uint64_t done_ns = 0;
};
using Fences = std::vector<std::shared_ptr<Fence>>;

// What the stream still waits for. Cheap when nothing is under way in the whole process.
Fences pending(Stream* stream);
void wait_for(Stream* stream, const Fences& fences);
// True when all are done; *code is then the first error.
bool finished(const Fences& fences, int* code);
// Host time at which the last one ended, 0 when there is none.
uint64_t finished_ns(const Fences& fences);
// Blocks the host. 0, an error of the work, or ACL_ERROR_RT_STREAM_SYNC_TIMEOUT; milliseconds < 0: for ever.
int await(const Fences& fences, int milliseconds, const char* call);
int await_stream(Stream* stream, int milliseconds, const char* call);
int await_device(int device, int milliseconds, const char* call);
// What failed on the device stays with its streams until somebody aborts its tasks to begin anew.
void forget_errors(int device);
// Before a stream is deleted: ends its thread when the work is done.
void drop_work(Stream* stream);

}  // namespace sim
