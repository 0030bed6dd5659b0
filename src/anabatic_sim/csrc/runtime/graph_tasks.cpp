// Tasks of graphs that are not operators: groups that an update replaces (aclmdlRICaptureTaskGrp…, aclmdlRICaptureTaskUpdate…),
// waits for a value in memory, which torch.npu.ExternalEvent is made of (aclrtValueWait, aclrtValueWrite), functions of the host,
// and the list of tasks as a trace (aclmdlRIDebugJsonPrint).
#include <stdio.h>
#include <unistd.h>

#include <string>

#include "graph_record.h"
#include "work.h"

namespace sim {

void add_group(Graph* graph, std::shared_ptr<TaskGroup> group);  // graph.cpp

namespace {

constexpr useconds_t kPollMicroseconds = 50;

uint64_t load(const void* at) { return __atomic_load_n(static_cast<const uint64_t*>(at), __ATOMIC_ACQUIRE); }
void store(void* at, uint64_t value) { __atomic_store_n(static_cast<uint64_t*>(at), value, __ATOMIC_RELEASE); }

// The comparisons of aclrtValueWait (acl_rt.h, ACL_STREAM_WAIT_VALUE_*).
bool holds(uint64_t found, uint64_t value, uint32_t flag) {
  switch (flag) {
    case ACL_STREAM_WAIT_VALUE_GEQ: return static_cast<int64_t>(found - value) >= 0;
    case ACL_STREAM_WAIT_VALUE_EQ: return found == value;
    case ACL_STREAM_WAIT_VALUE_AND: return (found & value) != 0;
    default: return ~(found | value) != 0;
  }
}

int await_value(const void* at, uint64_t value, uint32_t flag) {
  for (;;) {
    int unused;
    if (!sim_is_device_pointer(at, &unused))
      return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWait", "the memory was given back to the device");
    if (holds(load(at), value, flag)) return ACL_SUCCESS;
    usleep(kPollMicroseconds);
  }
}

// Work of a stream's queue made of a task.
int run_enqueued(void* argument, char* text, size_t room) {
  auto* task = static_cast<GraphTask*>(argument);
  int code = ACL_SUCCESS;
  if (text != nullptr) {
    code = task->run(task->argument);
    if (code != ACL_SUCCESS) snprintf(text, room, "%s", aclGetRecentErrMsg());
  }
  task->drop(task->argument);
  delete task;
  return code;
}

// To the capture of the stream, or behind what the stream still has to do.
void put(aclrtStream stream, bool waits, GraphTask task) {
  if (Graph* graph = capture_of(stream_of(stream))) {
    graph->waits |= waits;
    add_task(graph, std::move(task));
  } else if (waits || !pending(stream_of(stream)).empty()) {
    sim_enqueue(stream, &run_enqueued, new GraphTask(std::move(task)));
  } else {
    task.run(task.argument);
    task.drop(task.argument);
  }
}

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') made += '\\';
    made += letter;
  }
  return made + '"';
}

}  // namespace
}  // namespace sim

extern "C" {

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
  constexpr const char* call = "aclmdlRICaptureTaskGrpBegin";
  sim::Graph* graph = sim::capture_of(sim::stream_of(stream));
  if (graph == nullptr || graph->update) return sim::fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, call, "the stream is not captured");
  if (graph->group) return sim::fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, call, "a group of tasks is open already");
  graph->group = std::make_shared<sim::TaskGroup>(graph->device);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp* handle) {
  constexpr const char* call = "aclmdlRICaptureTaskGrpEnd";
  sim::Graph* graph = sim::capture_of(sim::stream_of(stream));
  *handle = nullptr;
  if (graph == nullptr || !graph->group)
    return sim::fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, call, "no group of tasks was begun on the stream");
  const auto group = std::move(graph->group);
  graph->group = nullptr;
  graph->groups.push_back(group);
  sim::add_group(graph, group);
  *handle = group.get();
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  constexpr const char* call = "aclmdlRICaptureTaskUpdateBegin";
  sim::Stream* stream = sim::stream_of(handle);
  if (stream->capture != nullptr) return sim::fail(ACL_ERROR_RT_STREAM_CAPTURED, call, "the stream is captured already");
  if (group == nullptr) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "there is no group of tasks");
  auto* known = static_cast<sim::TaskGroup*>(group);
  sim_settle(handle);
  auto* update = new sim::Graph{0, stream->device, ACL_MODEL_RI_CAPTURE_MODE_RELAXED, std::this_thread::get_id()};
  update->update = std::shared_ptr<sim::TaskGroup>(known, [](sim::TaskGroup*) {});  // the graph owns it
  sim::begin_capture(update, stream);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  constexpr const char* call = "aclmdlRICaptureTaskUpdateEnd";
  sim::Graph* update = sim::capture_of(sim::stream_of(handle));
  if (update == nullptr || !update->update)
    return sim::fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, call, "no update was begun on the stream");
  sim::release_capture(update);
  const std::unique_ptr<sim::Graph> end(update);
  if (update->broken) return sim::fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, call, "an earlier call has invalidated the update");
  std::lock_guard<std::mutex> lock(update->update->mutex);
  if (update->program->tasks.size() != update->update->program->tasks.size())
    return sim::fail(ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT, call, "the update has another number of tasks than its group");
  update->update->program = update->program;
  return ACL_SUCCESS;
}

aclError aclrtValueWrite(void* at, uint64_t value, uint32_t, aclrtStream stream) {
  const std::string name = "MEM_WRITE_VALUE_" + std::to_string(reinterpret_cast<uintptr_t>(at));
  sim::put(stream, false, sim::make_task(name.c_str(), [=] {
    sim::store(at, value);
    return ACL_SUCCESS;
  }));
  return ACL_SUCCESS;
}

aclError aclrtValueWait(void* at, uint64_t value, uint32_t flag, aclrtStream stream) {
  const std::string name = "MEM_WAIT_VALUE_" + std::to_string(reinterpret_cast<uintptr_t>(at));
  sim::put(stream, true, sim::make_task(name.c_str(), [=] { return sim::await_value(at, value, flag); }));
  return ACL_SUCCESS;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* arguments) {
  if (sim::capture_of(sim::stream_of(stream)) == nullptr) sim_settle(stream);
  sim::put(stream, false, sim::make_task("HOST_FUNC", [=] {
    function(arguments);
    return ACL_SUCCESS;
  }));
  return ACL_SUCCESS;
}

aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  return aclrtLaunchHostFunc(stream, function, data);
}

aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char* path, uint32_t) {
  constexpr const char* call = "aclmdlRIDebugJsonPrint";
  const auto* graph = static_cast<sim::Graph*>(handle);
  if (graph == nullptr || path == nullptr) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "there is no graph or no path");
  FILE* file = fopen(path, "w");
  if (file == nullptr) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "the file cannot be written");
  fputc('[', file);
  size_t number = 0;
  for (const sim::GraphTask& task : graph->program->tasks) {
    fprintf(file, "%s\n{\"name\": %s, \"pid\": \"graph %u\", \"tid\": \"stream0\", \"ph\": \"X\", \"ts\": %zu, \"dur\": 1, "
                  "\"args\": {\"Model Id\": %u, \"Stream Id\": 0, \"Task Id\": %zu, \"Task Type\": %s}}",
            number == 0 ? "" : ",", sim::quoted(task.name).c_str(), graph->id, 2 * number, graph->id, number,
            sim::quoted(task.name).c_str());
    number++;
  }
  fputs("\n]\n", file);
  fclose(file);
  return ACL_SUCCESS;
}

}  // extern "C"
