// Streams and events. Work is done when the call returns, so every stream is always idle; an event remembers the host's
// clock, and a callback runs at once.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>

#include "state.h"

namespace {

std::atomic<int32_t> next_stream{1};
sim::Stream default_streams[SIM_MAX_DEVICES];

aclError make_stream(aclrtStream* stream, uint32_t priority, uint32_t flags, const char* call) {
  int device = sim::current_or_default();
  if (device < 0) return sim::fail(ACL_ERROR_RT_CONTEXT_NULL, call, "no device is set");
  *stream = new sim::Stream{device, next_stream++, priority, flags, 0};
  return ACL_SUCCESS;
}

aclError make_event(aclrtEvent* event, uint32_t flags) {
  auto* made = new sim::Event;
  made->flags = flags;
  *event = made;
  return ACL_SUCCESS;
}

aclError synchronise(const char* call) {
  int device = sim::current_or_default();
  int code = device < 0 ? 0 : sim::device_alive(device, call);
  return code != ACL_SUCCESS ? code : sim_count_sync(call);
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
  delete static_cast<sim::Stream*>(stream);
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = sim::stream_of(stream)->id;
  return ACL_SUCCESS;
}
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
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
aclError aclrtSynchronizeStream(aclrtStream) { return synchronise("aclrtSynchronizeStream"); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return synchronise("aclrtSynchronizeStreamWithTimeout"); }
aclError aclrtSynchronizeDevice(void) { return synchronise("aclrtSynchronizeDevice"); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return synchronise("aclrtSynchronizeDeviceWithTimeout"); }
aclError aclrtStreamAbort(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtDeviceTaskAbort(int32_t, uint32_t) { return ACL_SUCCESS; }

aclError aclrtCreateEvent(aclrtEvent* event) { return make_event(event, ACL_EVENT_TIME_LINE); }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return make_event(event, flag); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) { return make_event(event, flag); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<sim::Event*>(event);
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  auto* recorded = static_cast<sim::Event*>(event);
  recorded->host_ns = sim_clock_ns();
  recorded->paper = sim::paper_record(sim::stream_of(stream));
  recorded->device = sim::stream_of(stream)->device;
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtQueryEvent(aclrtEvent, aclrtEventStatus* status) {
  *status = ACL_EVENT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeEvent(aclrtEvent event) {
  sim::paper_wait_until(static_cast<sim::Event*>(event)->paper);
  return synchronise("aclrtSynchronizeEvent");
}
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t) { return aclrtSynchronizeEvent(event); }
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  sim::paper_stream_wait(sim::stream_of(stream), static_cast<sim::Event*>(event)->paper);
  return ACL_SUCCESS;
}
aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t) {
  return aclrtStreamWaitEvent(stream, event);
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  auto* first = static_cast<sim::Event*>(start);
  auto* last = static_cast<sim::Event*>(end);
  if (first->host_ns == 0 || last->host_ns == 0)
    return sim::fail(ACL_ERROR_INVALID_PARAM, "aclrtEventElapsedTime", "an event was not recorded");
  // On paper: the simulation's own speed says nothing about a device. ANABATIC_SIM_CLOCK=host asks for the host's clock.
  static const bool host = getenv("ANABATIC_SIM_CLOCK") != nullptr && strcmp(getenv("ANABATIC_SIM_CLOCK"), "host") == 0;
  const uint64_t difference = host ? last->host_ns - first->host_ns : last->paper.ns - first->paper.ns;
  *milliseconds = static_cast<float>(static_cast<double>(static_cast<int64_t>(difference)) / 1e6);
  return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  *microseconds = static_cast<sim::Event*>(event)->host_ns / 1000;
  return ACL_SUCCESS;
}

aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* arguments) {
  function(arguments);
  return ACL_SUCCESS;
}
aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream) {
  function(data);
  return ACL_SUCCESS;
}
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t timeout) {
  usleep(1000 * static_cast<useconds_t>(timeout < 0 || timeout > 1000 ? 1000 : timeout));
  return ACL_ERROR_RT_REPORT_TIMEOUT;
}

}  // extern "C"
