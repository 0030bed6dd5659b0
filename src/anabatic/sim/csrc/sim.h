// What libascendcl.so offers the simulator's other libraries (operators, collectives). Everything here is safe to call from
// any thread and after fork.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "segment.h"

#ifdef __cplusplus
extern "C" {
#endif

// The machine's segment; a private one with the defaults when ANABATIC_SIM_SEGMENT is not set. Never null.
struct SimSegment* sim_segment(void);
// Physical number of this process's device `logical` (ASCEND_RT_VISIBLE_DEVICES); -1: no such device.
int sim_physical(int logical);
// Row of this thread's current device, device 0 when none is set.
struct SimDevice* sim_current(void);
// This thread's current device as the process numbers it; -1: none set.
int sim_current_device(void);

// 0, or the ACL error that a fault of this kind strikes with now on physical device `device`.
int sim_fault(enum SimFaultKind kind, int device);
// Remember an error that the next synchronisation of the device reports (AI core errors surface late).
void sim_post_error(int device, int code);

// A synchronisation of the host with the current device; `what` names the call. Returns 0 or the posted error.
int sim_count_sync(const char* what);
// A copy; kind is an aclrtMemcpyKind.
void sim_count_copy(int kind, uint64_t bytes);
// Time spent in an operator or a collective on the current device: host nanoseconds and nanoseconds on paper.
void sim_count_busy(uint64_t host_ns, uint64_t paper_ns);

// True when [p, p+1) is memory that aclrtMalloc or aclrtMapMem handed out; *device is then its logical device.
int sim_is_device_pointer(const void* p, int* device);
// True when p lies in page-locked host memory.
int sim_is_host_pointer(const void* p);

// Puts work on a stream (aclrtStream). A thread of the stream runs it after everything before it; it returns 0, or an ACL error
// with a text. `run` is called with a null text when earlier work failed: it must then only free its argument.
void sim_enqueue(void* stream, int (*run)(void* argument, char* text, size_t room), void* argument);
// True while any stream of this process has work left.
int sim_busy(void);
// Blocks until the work that `stream` waits for is done: to be called before an operator touches memory on that stream.
void sim_settle(void* stream);

// Text for aclGetRecentErrMsg of this thread.
void sim_set_error(const char* format, ...) __attribute__((format(printf, 1, 2)));
uint64_t sim_clock_ns(void);

#ifdef __cplusplus
}
#endif
