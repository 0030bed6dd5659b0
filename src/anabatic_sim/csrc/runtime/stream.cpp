// Streams and events. Operators are done when their call returns; only collectives leave work behind (work.h). An event
// remembers the host's clock and the work it stands after, a callback runs when that is done.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "graph.h"
#include "ipc.h"
#include "state.h"
#include "work.h"

namespace {

std::atomic<int32_t> next_stream{1};
sim::Stream default_streams[SIM_MAX_DEVICES];
std::mutex event_mutex;  // the watchdog of a process group asks about events that other threads record

aclError make_stream(aclrtStream* stream, uint32_t priority, uint32_t flags, const char* call) {
  int device = sim::current_or_default();
  if (device < 0) return sim::fail(ACL_ERROR_RT_CONTEXT_NULL, call, "no device is set");
  *stream = new sim::Stream{device, next_stream++, priority, flags, 0};
  return ACL_SUCCESS;
}

// What aclrtEvent points to.
struct Recorded : sim::Event {
  sim::Fences after;
  sim::Graph* graph = nullptr;  // of the stream, where it was captured
  sim::SharedEvent* shared = nullptr;  // where other processes may use it (ACL_EVENT_IPC)
};

sim::SharedEvent* shared(aclrtEvent event) { return static_cast<Recorded*>(event)->shared; }

aclError make_event(aclrtEvent* event, uint32_t flags) {
  auto* made = new Recorded;
  made->flags = flags;
  if ((flags & ACL_EVENT_IPC) != 0) made->shared = sim::make_shared_event();
  *event = made;
  if ((flags & ACL_EVENT_IPC) == 0 || made->shared != nullptr) return ACL_SUCCESS;
  delete made;
  return sim::fail(ACL_ERROR_RT_IPC_ERROR, "aclrtCreateEventExWithFlag", "no more events for several processes are left");
}

aclError alive(const char* call) {
  int device = sim::current_or_default();
  return device < 0 ? 0 : sim::device_alive(device, call);
}

aclError synchronise_stream(aclrtStream stream, int32_t timeout, const char* call) {
  int code = sim::refuse_wait_stream(sim::stream_of(stream), call);
  if (code == ACL_SUCCESS) code = alive(call);
  if (code == ACL_SUCCESS) code = sim::await_stream(sim::stream_of(stream), timeout, call);
  return code != ACL_SUCCESS ? code : sim_count_sync(call);
}

aclError synchronise_device(int32_t timeout, const char* call) {
  int code = sim::refuse_wait_device(sim::current_or_default(), call);
  if (code == ACL_SUCCESS) code = alive(call);
  if (code == ACL_SUCCESS) code = sim::await_device(sim::current_or_default(), timeout, call);
  return code != ACL_SUCCESS ? code : sim_count_sync(call);
}

sim::Fences after(aclrtEvent event) {
  std::lock_guard<std::mutex> lock(event_mutex);
  return static_cast<Recorded*>(event)->after;
}

// The capture that an event was recorded in, while it is under way.
sim::Graph* capture_of(aclrtEvent event) {
  sim::Graph* graph;
  {
    std::lock_guard<std::mutex> lock(event_mutex);
    graph = static_cast<Recorded*>(event)->graph;
  }
  return sim::is_capturing(graph) ? graph : nullptr;
}

sim::Mark paper_of(aclrtEvent event) {
  std::lock_guard<std::mutex> lock(event_mutex);
  return static_cast<Recorded*>(event)->paper;
}

aclError synchronise_event(aclrtEvent event, int32_t timeout, const char* call) {
  if (sim::Graph* graph = capture_of(event)) return sim_capture_refuse(graph, call);
  int code = alive(call);
  if (code == ACL_SUCCESS && shared(event) != nullptr) code = sim::await_shared_event(shared(event), timeout, call);
  if (code == ACL_SUCCESS) code = sim::await(after(event), timeout, call);
  if (code == ACL_SUCCESS) sim::paper_wait_until(paper_of(event));
  return code != ACL_SUCCESS ? code : sim_count_sync(call);
}

// Whether the work before an event is done: 0 not yet, 1 done, or an error in *code.
bool passed(aclrtEvent event, int* code) {
  if (shared(event) != nullptr) return sim::shared_event_passed(shared(event), code);
  return sim::finished(after(event), code);
}

uint64_t time_of(Recorded* event) {
  const uint64_t ended = sim::finished_ns(after(event));
  return ended > event->host_ns ? ended : event->host_ns;
}

}  // namespace

namespace sim {

Stream* stream_of(aclrtStream stream) {
  return stream_of(stream, current_or_default() < 0 ? 0 : current_or_default());
}

Stream* stream_of(aclrtStream stream, int device) {
  if (stream != nullptr) return static_cast<Stream*>(stream);
  default_streams[device].device = device;
  return &default_streams[device];
}

}  // namespace sim

extern "C" {

aclError aclrtCreateStream(aclrtStream* stream) { return make_stream(stream, 0, 0, "aclrtCreateStream"); }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority, uint32_t flag) {
  return make_stream(stream, priority, flag, "aclrtCreateStreamWithConfig");
}
aclError aclrtDestroyStream(aclrtStream stream) {
  sim::await_stream(sim::stream_of(stream), -1, "aclrtDestroyStream");
  return aclrtDestroyStreamForce(stream);
}
aclError aclrtDestroyStreamForce(aclrtStream stream) {
  if (sim::capture_of(sim::stream_of(stream)) != nullptr)
    return sim::fail(ACL_ERROR_RT_STREAM_CAPTURED, "aclrtDestroyStream", "the stream is captured");
  sim::drop_work(sim::stream_of(stream));
  delete static_cast<sim::Stream*>(stream);
  return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = sim::stream_of(stream)->id;
  return ACL_SUCCESS;
}
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  int code;
  const bool done = sim::finished(sim::pending(sim::stream_of(stream)), &code);
  *status = done ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return code;
}
aclError aclrtStreamGetPriority(aclrtStream stream, uint32_t* priority) {
  *priority = sim::stream_of(stream)->priority;
  return ACL_SUCCESS;
}
aclError aclrtDeviceGetStreamPriorityRange(int32_t* least, int32_t* greatest) {
  *least = 7;
  *greatest = 0;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
  sim::stream_of(stream)->overflow = flag;
  return ACL_SUCCESS;
}
aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* flag) {
  *flag = static_cast<uint32_t>(sim::stream_of(stream)->overflow);
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronise_stream(stream, -1, "aclrtSynchronizeStream"); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
  return synchronise_stream(stream, timeout, "aclrtSynchronizeStreamWithTimeout");
}
aclError aclrtSynchronizeDevice(void) { return synchronise_device(-1, "aclrtSynchronizeDevice"); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
  return synchronise_device(timeout, "aclrtSynchronizeDeviceWithTimeout");
}
aclError aclrtStreamAbort(aclrtStream stream) {
  sim::forget_errors(sim::stream_of(stream)->device);
  return ACL_SUCCESS;
}
aclError aclrtDeviceTaskAbort(int32_t device, uint32_t) {
  sim::forget_errors(device);
  return ACL_SUCCESS;
}

aclError aclrtCreateEvent(aclrtEvent* event) { return make_event(event, ACL_EVENT_TIME_LINE); }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return make_event(event, flag); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) { return make_event(event, flag); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  if (shared(event) != nullptr) sim::drop_shared_event(shared(event));
  delete static_cast<Recorded*>(event);
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  auto* recorded = static_cast<Recorded*>(event);
  if (recorded->shared != nullptr) sim::record_shared_event(recorded->shared, stream);
  sim::Fences fences = sim::pending(sim::stream_of(stream));
  sim::Mark mark = sim::paper_record(sim::stream_of(stream));
  std::lock_guard<std::mutex> lock(event_mutex);
  recorded->after = std::move(fences);
  recorded->host_ns = sim_clock_ns();
  recorded->paper = std::move(mark);
  recorded->device = sim::stream_of(stream)->device;
  recorded->graph = sim::capture_of(sim::stream_of(stream));
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus* status) {
  int code;
  *status = passed(event, &code) ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY;
  return code;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  int code;
  const bool done = passed(event, &code);
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return code;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  int code;
  const bool done = passed(event, &code);
  *status = done ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return code;
}
aclError aclrtSynchronizeEvent(aclrtEvent event) { return synchronise_event(event, -1, "aclrtSynchronizeEvent"); }
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout) {
  return synchronise_event(event, timeout, "aclrtSynchronizeEventWithTimeout");
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  if (sim::Graph* graph = capture_of(event)) {
    sim::join_capture(graph, sim::stream_of(stream));
    return ACL_SUCCESS;
  }
  if (shared(event) != nullptr) sim::stream_wait_shared_event(stream, shared(event));
  sim::wait_for(sim::stream_of(stream), after(event));
  sim::paper_stream_wait(sim::stream_of(stream), paper_of(event));
  return ACL_SUCCESS;
}
aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t) {
  return aclrtStreamWaitEvent(stream, event);
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  auto* first = static_cast<Recorded*>(start);
  auto* last = static_cast<Recorded*>(end);
  if (first->host_ns == 0 || last->host_ns == 0)
    return sim::fail(ACL_ERROR_INVALID_PARAM, "aclrtEventElapsedTime", "an event was not recorded");
  // On paper: the simulation's own speed says nothing about a device. ANABATIC_SIM_CLOCK=host asks for the host's clock.
  static const bool host = getenv("ANABATIC_SIM_CLOCK") != nullptr && strcmp(getenv("ANABATIC_SIM_CLOCK"), "host") == 0;
  const uint64_t difference = host ? time_of(last) - time_of(first) : sim::paper_of(last->paper) - sim::paper_of(first->paper);
  *milliseconds = static_cast<float>(static_cast<double>(static_cast<int64_t>(difference)) / 1e6);
  return ACL_SUCCESS;
}
aclError aclrtIpcGetEventHandle(aclrtEvent event, aclrtIpcEventHandle* handle) {
  if (event == nullptr || shared(event) == nullptr)
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcGetEventHandle", "the event was not made with ACL_EVENT_IPC");
  return sim::fill_handle(shared(event), handle);
}
aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle, aclrtEvent* event) {
  auto* made = new Recorded;
  made->flags = ACL_EVENT_IPC;
  made->shared = sim::open_handle(handle);
  *event = made;
  if (made->shared != nullptr) return ACL_SUCCESS;
  delete made;
  *event = nullptr;
  return sim::fail(ACL_ERROR_RT_IPC_ERROR, "aclrtIpcOpenEventHandle", "the process that made the event is gone");
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  *microseconds = time_of(static_cast<Recorded*>(event)) / 1000;
  return ACL_SUCCESS;
}

aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t timeout) {
  usleep(1000 * static_cast<useconds_t>(timeout < 0 || timeout > 1000 ? 1000 : timeout));
  return ACL_ERROR_RT_REPORT_TIMEOUT;
}

}  // extern "C"
