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

// An operator ran on a physical device: faults that wait for it strike.
void sim_count_operator_faults(int physical);
// Makes an operator of a slow device last longer; 0 when no device is slow.
int sim_slow(int physical, uint64_t host_ns);
// Nanoseconds that a collective of the device takes longer than its data need.
uint64_t sim_link_delay_ns(int physical);
// 1 when a fault of this kind was asked for.
int sim_fault_waits(enum SimFaultKind kind);

// A synchronisation of the host with the current device; `what` names the call. Returns 0 or the posted error.
int sim_count_sync(const char* what);
// A copy; kind is an aclrtMemcpyKind.
void sim_count_copy(int kind, uint64_t bytes);
// Time spent in an operator or a collective on the current device: host nanoseconds and nanoseconds on paper. sim_paper_op and
// sim_paper_collective do it themselves.
void sim_count_busy(uint64_t host_ns, uint64_t paper_ns);

// ---- Time on paper and the report (paper.cpp, report.cpp) ----
// Each stream has a clock in nanoseconds that starts at 0 with the process; the host has one too. An operator starts when its
// stream is free and the host has launched it.

// 1 when --report or --trace was given: only then are names, lines and steps kept.
int sim_reporting(void);

enum SimUnit { SIM_VECTOR = 0, SIM_CUBE_HALF = 1, SIM_CUBE_SINGLE = 2, SIM_HOST_LINK = 3 };

struct SimOp {
  const char* name;
  const char* overload;  // "" when there is none
  int device;            // as the process numbers it
  void* stream;          // aclrtStream; null: the default stream of the device
  enum SimUnit unit;
  double flops;
  uint64_t bytes;        // read and written
  uint64_t host_ns;      // what the simulation itself needed
};
// Counts an operator that ran, moves its stream's clock and returns its nanoseconds on paper.
uint64_t sim_paper_op(const struct SimOp* op);

enum SimCollective { SIM_ALL_REDUCE, SIM_ALL_GATHER, SIM_REDUCE_SCATTER, SIM_BROADCAST, SIM_REDUCE, SIM_SCATTER, SIM_ALL_TO_ALL,
                     SIM_SEND, SIM_RECEIVE, SIM_BARRIER };
// A collective: launched by the host, which goes on; when its turn has come and the ranks have met, it is told how it went.
// The handle ends with sim_paper_collective or sim_paper_failed.
void* sim_paper_launch(int device, void* stream);
// When this rank can start: the latest of all ranks is `start_ns` below (0: not known).
uint64_t sim_paper_ready(void* handle);
// `bytes` is the whole tensor: the gathered one of an all_gather, the input of a reduce_scatter or an all_to_all.
void sim_paper_collective(void* handle, enum SimCollective kind, uint64_t bytes, int ranks, bool on_card, uint64_t start_ns, uint64_t host_ns);
void sim_paper_failed(void* handle);
// The two formulas alone (a test compares them with plan/cost_model.py).
double sim_operator_ns(enum SimUnit unit, double flops, double bytes);
double sim_collective_ns(enum SimCollective kind, double bytes, int ranks, bool on_card);

// An operator that a real device would run in a fused kernel, but not with these arguments.
void sim_report_unfused(const char* name, const char* reason);
// An optimizer's step ended. Several optimizers that step without a backward pass between them make one step.
void sim_report_step(int backward_since);

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

// Waits likewise, and returns the error of work that failed on the stream: to be called before the host reads what it made.
int sim_stream_failed(void* stream, const char* call);

// ---- Graphs (graph.cpp) ----
// True while anything is captured in this process.
int sim_capturing(void);
// The graph that is captured on `stream`, or null.
void* sim_capture(void* stream);
// What an execution of the graph does, after everything before it; `run` returns 0 or an ACL error, `drop` frees the argument.
void sim_capture_task(void* graph, int (*run)(void* argument), void (*drop)(void* argument), void* argument);
// What a task costs the device.
struct SimWork {
  enum SimUnit unit;
  double flops;
  uint64_t bytes;
};
void sim_capture_work(void* graph, struct SimWork work);
// Memory that is about to be written: it has its contents of now again when the capture ends.
void sim_capture_save(void* graph, void* at, uint64_t bytes);
// Breaks the capture, as a call that it does not allow; returns the ACL error.
int sim_capture_refuse(void* graph, const char* call);
// Work for the queue of the stream that a graph is launched on: `prepare` is called by the host when it launches the graph, `run`
// as the work of sim_enqueue when its turn has come.
void sim_capture_launch(void* graph, const char* name, void (*prepare)(void* argument, void* stream),
                        int (*run)(void* argument, char* text, size_t room), void (*drop)(void* argument), void* argument);

// ---- Profiles (profile_data.cpp) ----
// True between aclprofStart and aclprofStop.
int sim_profiling(void);
// The aclnn function of the next sim_paper_op of this thread, and its tensors as op_summary writes them: "2,3;3,4",
// "FLOAT;DT_BF16", "ND;ND".
struct SimTensors {
  const char* shapes;
  const char* types;
  const char* formats;
};
void sim_profile_operator(const char* api, const struct SimTensors* inputs, const struct SimTensors* outputs);
// The communicator and the HcclDataType of a collective: after sim_paper_launch.
void sim_paper_group(void* handle, const char* communicator, int type);

// Text for aclGetRecentErrMsg of this thread.
void sim_set_error(const char* format, ...) __attribute__((format(printf, 1, 2)));
uint64_t sim_clock_ns(void);

#ifdef __cplusplus
}
#endif
