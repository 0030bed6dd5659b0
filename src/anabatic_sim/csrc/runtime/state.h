// What the files of libascendcl.so share. Signatures come from the ACL headers inside the torch_npu wheel: the compiler
// checks ours against them. `#pragma GCC visibility` stays at its default: every function of the API is exported.
#pragma once

#include <acl/acl.h>
#include <acl/acl_rt.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../sim.h"

namespace sim {

// A moment on paper, and the same had collectives cost nothing and nobody waited in them: their quotient is how well a job scales.
// `shown_ns` is what the profiler shows: the device keeps the durations of paper, the host this machine's clock (profile.h).
struct Moment {
  uint64_t ns = 0, alone_ns = 0, shown_ns = 0;
};

// A collective ends at a moment that is only known when all ranks have met; until then whoever waits for it holds on to it.
struct Meeting {
  Moment end;
  bool over = false;
};
struct Mark {
  Moment at;
  std::vector<std::shared_ptr<Meeting>> after;
};

struct Graph;

struct Stream {
  int device;         // logical
  int32_t id;
  uint32_t priority;
  uint32_t flags;
  uint64_t overflow;  // aclrtSetStreamOverflowSwitch
  Mark paper;         // its clock (paper.cpp)
  Graph* capture = nullptr;  // the graph that takes what is launched (graph.cpp)
};

struct Event {
  uint64_t host_ns = 0;  // when it was recorded; 0: never
  Mark paper;  // the same on paper
  int device = -1;
  uint32_t flags = 0;
};

struct Context {
  int device;
};

// Reserves `bytes` of physical device `physical` for this process: false when the device is full.
bool take_hbm(int physical, uint64_t bytes);
void give_hbm(int physical, uint64_t bytes);
// False, said once on stderr, when the host itself has no room for it.
bool host_has(uint64_t bytes);
// Puts this process into the segment's table (once per process, also after fork).
void enter_process();
void leave_process();
// Field 22 of /proc/PID/stat, which tells a process from a later one of the same number; 0: it is gone.
uint64_t start_time(int pid);

int visible_devices();
// This process's number for a physical device; -1: not visible.
int logical_of(int physical);
// This thread's device; sets device 0 like the real runtime when the process never chose one. -1 with an error otherwise.
int current_or_default();
void set_current(int device);
int fail(int code, const char* call, const char* reason);

Stream* stream_of(aclrtStream stream);
Stream* stream_of(aclrtStream stream, int device);

// Clocks on paper (paper.cpp). The host waits for a device, or for a moment of one.
void paper_wait_device(int device);
void paper_wait_until(Mark mark);
Mark paper_record(Stream* stream);                      // an event: the moment when the stream gets there
void paper_stream_wait(Stream* stream, const Mark& mark);  // the stream waits for an event
uint64_t paper_of(Mark mark);
uint64_t paper_shown(Stream* stream);                   // the end of what runs on the stream, on the clock of the profile
void paper_graph(int device, void* stream, const std::vector<SimWork>& work, uint64_t host_ns);  // launched as one
uint64_t paper_host();                                  // the host's clock
Moment paper_now();                                     // when the host and every stream are done

// Faults (faults.cpp).
bool refuse_allocation(int physical, uint64_t bytes);
int posted(int physical);  // the error that an earlier operator left behind, described for aclGetRecentErrMsg; 0: none

// What a report holds (report.cpp). They do nothing when none was asked for.
struct Measured {
  double flops;
  uint64_t bytes, paper_ns, host_ns;
};
void report_op(const SimOp& op, int physical, int stream, uint64_t start_ns, uint64_t paper_ns);
void report_collective(SimCollective kind, int physical, int stream, const Measured& what, uint64_t start_ns, uint64_t waited_ns);
void report_sync(const char* what, int physical, uint64_t from_ns, uint64_t until_ns);
void report_copy(int kind, uint64_t bytes);
void report_flush();

// "file.py:12" of the Python code that is running on this thread, outside of torch's own files; empty when there is none.
std::string python_line();
// A call that a lost device answers with an error: 0, or the code.
int device_alive(int logical, const char* call);

}  // namespace sim
