// What a capturing stream keeps, and who may not wait for it.
#pragma once

#include "state.h"

namespace sim {

// 0, or the ACL error of a wait that a capture does not allow: it breaks the capture, as on hardware.
int refuse_wait_stream(Stream* stream, const char* call);
int refuse_wait_device(int device, const char* call);
// The capture under way that `stream` belongs to, or null.
Graph* capture_of(Stream* stream);
// A stream that waits for an event of a capture takes part in it.
void join_capture(Graph* graph, Stream* stream);
// True when `graph` is still being captured: events may outlive it.
bool is_capturing(const Graph* graph);
// A copy or a fill of the runtime's own on a capturing stream; false: the stream does not capture.
bool capture_copy(Stream* stream, void* to, const void* from, size_t bytes);
bool capture_fill(Stream* stream, void* at, int value, size_t bytes);

}  // namespace sim
