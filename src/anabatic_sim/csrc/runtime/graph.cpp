// Graphs (aclmdlRI*, which torch.npu.graph uses). Operators of a capturing stream run at once all the same, because shapes and
// checks come from the CPU's kernels; when the capture ends, memory that they have written gets its old contents back, so that a
// capture changes nothing, as on hardware. Executing a graph runs its tasks again on the same addresses: one launch of the host.
//
// Streams that wait for an event of the capture join it. Tasks stay in the order in which the host launched them, which is one of
// the orders that the events allow.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "graph_record.h"

namespace sim {

namespace {

std::mutex& mutex = *new std::mutex;
std::vector<Graph*>& capturing = *new std::vector<Graph*>;
std::atomic<int> captures{0};
std::atomic<uint32_t> next_graph{1};
thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

int refuse(Graph* graph, int code, const char* call) {
  graph->broken = true;
  return fail(code, call, "the call is not allowed while a stream is captured");
}

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  int value;  // of a fill; `from` is null then
};

int run_copy(void* argument) {
  const auto* copy = static_cast<Copy*>(argument);
  if (copy->from != nullptr) memmove(copy->to, copy->from, copy->bytes);
  else memset(copy->to, copy->value, copy->bytes);
  return ACL_SUCCESS;
}

bool capture(Stream* stream, const Copy& copy) {
  Graph* graph = capture_of(stream);
  if (graph == nullptr) return false;
  sim_capture_save(graph, copy.to, copy.bytes);
  add_task(graph, {copy.from != nullptr ? "MEMCPY_ASYNC" : "MEMSET_ASYNC", &run_copy,
                   [](void* argument) { delete static_cast<Copy*>(argument); }, new Copy(copy)});
  sim_capture_work(graph, {SIM_VECTOR, 0, 2 * copy.bytes});
  run_copy(const_cast<Copy*>(&copy));
  return true;
}

int run_group(void* argument) { return run_program(*program_of(**static_cast<std::shared_ptr<TaskGroup>*>(argument))); }

// What a stream's thread executes.
struct Queued {
  std::shared_ptr<Program> program;
  int device;
};

void prepare(const Program& program, void* stream) {
  for (const GraphTask& task : program.tasks) {
    if (task.prepare != nullptr) task.prepare(task.argument, stream);
    if (task.run == &run_group) prepare(*program_of(**static_cast<std::shared_ptr<TaskGroup>*>(task.argument)), stream);
  }
}

int run_queued(void* argument, char* text, size_t room) {
  const std::unique_ptr<Queued> queued(static_cast<Queued*>(argument));
  if (text == nullptr) {  // earlier work of the stream failed: what the host has prepared ends as well
    for (const GraphTask& task : queued->program->tasks)
      if (task.run_prepared != nullptr) task.run_prepared(task.argument, nullptr, 0);
    return ACL_SUCCESS;
  }
  set_current(queued->device);
  const int code = run_program(*queued->program);
  if (code != ACL_SUCCESS) snprintf(text, room, "%s", aclGetRecentErrMsg());
  return code;
}

}  // namespace

Graph::~Graph() {
  for (const auto& condition : conditions) aclrtFree(condition->at);
}

int run_program(const Program& program) {
  int failed = ACL_SUCCESS;
  for (const GraphTask& task : program.tasks) {
    if (task.run_prepared != nullptr) {
      char text[2048] = "";
      const int code = task.run_prepared(task.argument, failed == ACL_SUCCESS ? text : nullptr, sizeof text);
      if (failed != ACL_SUCCESS || code == ACL_SUCCESS) continue;
      sim_set_error("%s", text);
      failed = code;
    } else if (failed == ACL_SUCCESS) {
      failed = task.run(task.argument);
    }
  }
  return failed;
}

std::shared_ptr<Program> program_of(TaskGroup& group) {
  std::lock_guard<std::mutex> lock(group.mutex);
  return group.program;
}

void add_task(Graph* graph, GraphTask task) {
  Program& program = graph->group ? *graph->group->program : *graph->program;
  program.tasks.push_back(std::move(task));
}

void add_group(Graph* graph, std::shared_ptr<TaskGroup> group) {
  add_task(graph, {"TASK_GROUP", &run_group, [](void* argument) { delete static_cast<std::shared_ptr<TaskGroup>*>(argument); },
                   new std::shared_ptr<TaskGroup>(std::move(group))});
}

void begin_capture(Graph* graph, Stream* stream) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    capturing.push_back(graph);
  }
  captures++;
  join_capture(graph, stream);
}

void release_capture(Graph* graph) {
  std::lock_guard<std::mutex> lock(mutex);
  for (Stream* stream : graph->streams) stream->capture = nullptr;
  graph->streams.clear();
  std::erase(capturing, graph);
  captures--;
  for (auto saved = graph->saved.rbegin(); saved != graph->saved.rend(); ++saved) {
    int unused;
    if (sim_is_device_pointer(saved->at, &unused)) memcpy(saved->at, saved->bytes.data(), saved->bytes.size());
  }
  graph->saved.clear();
  graph->known.clear();
}

Graph* capture_of(Stream* stream) { return captures.load(std::memory_order_acquire) == 0 ? nullptr : stream->capture; }

bool is_capturing(const Graph* graph) {
  if (graph == nullptr || captures.load(std::memory_order_acquire) == 0) return false;
  std::lock_guard<std::mutex> lock(mutex);
  return std::find(capturing.begin(), capturing.end(), graph) != capturing.end();
}

void join_capture(Graph* graph, Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (stream->capture == graph) return;
  stream->capture = graph;
  graph->streams.push_back(stream);
}

int refuse_wait_stream(Stream* stream, const char* call) {
  Graph* graph = capture_of(stream);
  return graph == nullptr ? ACL_SUCCESS : refuse(graph, ACL_ERROR_RT_STREAM_CAPTURED, call);
}

int refuse_wait_device(int device, const char* call) {
  if (captures.load(std::memory_order_acquire) == 0 || thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return ACL_SUCCESS;
  std::lock_guard<std::mutex> lock(mutex);
  for (Graph* graph : capturing) {
    const bool mine = graph->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL || graph->thread == std::this_thread::get_id();
    if (graph->device == device && mine && graph->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED)
      return refuse(graph, ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, call);
  }
  return ACL_SUCCESS;
}

bool capture_copy(Stream* stream, void* to, const void* from, size_t bytes) { return capture(stream, {to, from, bytes, 0}); }
bool capture_fill(Stream* stream, void* at, int value, size_t bytes) { return capture(stream, {at, nullptr, bytes, value}); }

}  // namespace sim

extern "C" {

int sim_capturing(void) { return sim::captures.load(std::memory_order_acquire) != 0; }
void* sim_capture(void* stream) {
  if (!sim_capturing()) return nullptr;
  return sim::stream_of(stream)->capture;
}
void sim_capture_named_task(void* handle, const char* name, int (*run)(void*), void (*drop)(void*), void* argument) {
  sim::add_task(static_cast<sim::Graph*>(handle), {name, run, drop, argument});
}
void sim_capture_task(void* handle, int (*run)(void*), void (*drop)(void*), void* argument) {
  sim_capture_named_task(handle, "TASK", run, drop, argument);
}
void sim_capture_launch(void* handle, const char* name, void (*prepare)(void*, void*), int (*run)(void*, char*, size_t),
                        void (*drop)(void*), void* argument) {
  auto* graph = static_cast<sim::Graph*>(handle);
  graph->waits = true;
  sim::add_task(graph, {name, nullptr, drop, argument, prepare, run});
}
void sim_capture_work(void* handle, struct SimWork work) {
  auto* graph = static_cast<sim::Graph*>(handle);
  if (!graph->update) graph->work.push_back(work);
}
void sim_capture_save(void* handle, void* at, uint64_t bytes) {
  auto* graph = static_cast<sim::Graph*>(handle);
  if (bytes == 0 || !graph->known.emplace(at, bytes).second) return;
  const char* from = static_cast<const char*>(at);
  graph->saved.push_back({at, std::vector<char>(from, from + bytes)});
}
int sim_capture_refuse(void* handle, const char* call) {
  return sim::refuse(static_cast<sim::Graph*>(handle), ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, call);
}

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  constexpr const char* call = "aclmdlRICaptureBegin";
  if (sim_segment()->bf16 == 0)
    return sim::fail(ACL_ERROR_FEATURE_UNSUPPORTED, call, "this chip has no graphs (Atlas A2 and A3 have)");
  sim::Stream* stream = sim::stream_of(handle);
  if (stream->capture != nullptr) return sim::fail(ACL_ERROR_RT_STREAM_CAPTURED, call, "the stream is captured already");
  sim_settle(handle);
  sim::begin_capture(new sim::Graph{sim::next_graph++, stream->device, mode, std::this_thread::get_id()}, stream);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  sim::Graph* found = sim::capture_of(sim::stream_of(handle));
  if (found != nullptr && found->update) found = nullptr;  // an update is no capture to the caller
  if (graph != nullptr) *graph = found;
  if (status != nullptr)
    *status = found == nullptr ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : found->broken  ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                               : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* graph) {
  constexpr const char* call = "aclmdlRICaptureEnd";
  sim::Graph* found = sim::capture_of(sim::stream_of(handle));
  *graph = nullptr;
  if (found == nullptr) return sim::fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, call, "the stream is not captured");
  if (found->streams.front() != sim::stream_of(handle))
    return sim::fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, call, "the capture began on another stream");
  if (found->group) {
    found->broken = true;
    found->group = nullptr;
  }
  sim::release_capture(found);
  if (found->parent != nullptr) {
    found->parent->waits |= found->waits;
    found->parent->broken |= found->broken;
    found->parent->work.insert(found->parent->work.end(), found->work.begin(), found->work.end());
  }
  if (found->broken) {
    if (found->parent == nullptr) delete found;
    return sim::fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, call, "an earlier call has invalidated the capture");
  }
  *graph = found;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, sim::thread_mode);
  return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
  constexpr const char* call = "aclmdlRIExecuteAsync";
  const auto* graph = static_cast<sim::Graph*>(handle);
  if (graph == nullptr) return sim::fail(ACL_ERROR_INVALID_PARAM, call, "there is no graph");
  if (sim::capture_of(sim::stream_of(stream, graph->device)) != nullptr)
    return sim::fail(ACL_ERROR_RT_STREAM_CAPTURED, call, "a graph inside of a graph is not simulated");
  if (int code = sim::device_alive(graph->device, call)) return code;
  const uint64_t started = sim_clock_ns();
  if (graph->waits) {
    sim::prepare(*graph->program, stream);
    sim_enqueue(stream, &sim::run_queued, new sim::Queued{graph->program, graph->device});
  } else {
    sim_settle(stream);
    if (int code = sim::run_program(*graph->program)) return code;
  }
  const int physical = sim_physical(graph->device);
  __atomic_fetch_add(&sim_segment()->device[physical].operators, 1, __ATOMIC_RELAXED);
  sim_slow(physical, sim_clock_ns() - started);
  sim::paper_graph(graph->device, stream, graph->work, sim_clock_ns() - started);
  sim_count_operator_faults(physical);
  return ACL_SUCCESS;
}
aclError aclmdlRIExecute(aclmdlRI graph, int32_t timeout) {
  if (int code = aclmdlRIExecuteAsync(graph, nullptr)) return code;
  return aclrtSynchronizeStreamWithTimeout(nullptr, timeout);
}

aclError aclmdlRIDestroy(aclmdlRI graph) {
  delete static_cast<sim::Graph*>(graph);
  return ACL_SUCCESS;
}

aclError aclmdlRIDebugPrint(aclmdlRI handle) {
  const auto* graph = static_cast<sim::Graph*>(handle);
  fprintf(stderr, "graph %u of device %d: %zu tasks\n", graph->id, graph->device, graph->program->tasks.size());
  return ACL_SUCCESS;
}

}  // extern "C"
