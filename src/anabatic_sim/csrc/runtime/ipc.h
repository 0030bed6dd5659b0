// What processes of one simulated machine share: device memory by a key, events by a handle. Neither has a name that could be left
// behind: both are files of the process that made them, which others open through /proc.
#pragma once

#include <cstdint>

#include "state.h"

namespace sim {

// The state of an event that several processes use: a record takes the next number, its end stores it.
struct SharedEvent {
  uint64_t recorded;
  uint64_t finished;
  int32_t code;            // the error of the work before it
  int32_t recorder;        // the process that recorded it last
  uint64_t recorder_start;
};

SharedEvent* make_shared_event();
void drop_shared_event(SharedEvent* event);
// The stream gets there later: stored when its work is done.
void record_shared_event(SharedEvent* event, aclrtStream stream);
// Work of the stream begins after what is recorded now.
void stream_wait_shared_event(aclrtStream stream, SharedEvent* event);
// Whether what is recorded now is done; *code is then its error.
bool shared_event_passed(SharedEvent* event, int* code);
int await_shared_event(SharedEvent* event, int milliseconds, const char* call);

// 0, or an ACL error: the event is another process's.
int fill_handle(SharedEvent* event, aclrtIpcEventHandle* handle);
// Null: the process that made the event is gone, or this is no handle.
SharedEvent* open_handle(const aclrtIpcEventHandle& handle);

// A descriptor of another process of this user, or -1: it is gone, or this is a later process of that number.
int open_descriptor(int pid, uint64_t started, int descriptor);

}  // namespace sim
