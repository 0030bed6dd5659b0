// Graphs under a condition (aclmdlRICond…): the task of a graph runs another graph, or not, by a value in the device's memory.
#include <string>

#include "graph_record.h"

#ifdef ACL_EVENT_RECORD_EXTERNAL  // the headers of CANN 9.1 and later, which have both
namespace sim {
namespace {

uint64_t value_of(const Condition& condition) { return __atomic_load_n(condition.at, __ATOMIC_ACQUIRE); }

int run_conditional(const Condition& condition, aclmdlRICondTaskType type, const std::vector<Graph*>& graphs) {
  const auto run = [&](size_t index) { return run_program(*graphs[index]->program); };
  switch (type) {
    case ACL_MODEL_RI_COND_TYPE_IF:
      if (value_of(condition) != 0) return run(0);
      return graphs.size() > 1 ? run(1) : ACL_SUCCESS;
    case ACL_MODEL_RI_COND_TYPE_SWITCH:
      return value_of(condition) < graphs.size() ? run(value_of(condition)) : ACL_SUCCESS;
    default:
      while (value_of(condition) != 0)
        if (int code = run(0)) return code;
      return ACL_SUCCESS;
  }
}

}  // namespace
}  // namespace sim

extern "C" {

aclError aclmdlRICondHandleCreate(aclmdlRI handle, uint32_t initial, aclmdlRICondHandleFlag, aclmdlRICondHandle* condition) {
  constexpr const char* call = "aclmdlRICondHandleCreate";
  auto* graph = static_cast<sim::Graph*>(handle);
  if (graph == nullptr || condition == nullptr) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "there is no graph");
  void* at;
  if (int code = aclrtMallocAlign32(&at, sizeof(uint64_t), ACL_MEM_MALLOC_NORMAL_ONLY)) return code;
  auto made = std::make_unique<sim::Condition>(static_cast<uint64_t*>(at), initial);
  sim::add_task(graph, sim::make_task("COND_ASSIGN_DEFAULT", [known = made.get()] {
    __atomic_store_n(known->at, known->initial, __ATOMIC_RELEASE);
    return ACL_SUCCESS;
  }));
  *condition = made.get();
  graph->conditions.push_back(std::move(made));
  return ACL_SUCCESS;
}

aclError aclmdlRICondHandleGetCondPtr(aclmdlRICondHandle condition, uint64_t** pointer) {
  *pointer = static_cast<sim::Condition*>(condition)->at;
  return ACL_SUCCESS;
}

aclError aclmdlRIAddCondTask(aclmdlRICondTaskParams params, aclrtStream stream, uint32_t) {
  constexpr const char* call = "aclmdlRIAddCondTask";
  sim::Graph* graph = sim::capture_of(sim::stream_of(stream));
  if (graph == nullptr || graph->update) return sim::fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, call, "the stream is not captured");
  if (params.handle == nullptr || params.modelRIArray == nullptr || params.size == 0 ||
      (params.type == ACL_MODEL_RI_COND_TYPE_IF && params.size > 2))
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "an if has one or two graphs, a while one, a switch at least one");
  std::vector<sim::Graph*> graphs;
  for (uint32_t i = 0; i < params.size; i++) {
    graph->children.push_back(std::make_unique<sim::Graph>(graph->id, graph->device, graph->mode, std::this_thread::get_id()));
    graphs.push_back(graph->children.back().get());
    graphs.back()->parent = graph;
    params.modelRIArray[i] = graphs.back();
  }
  const auto* condition = static_cast<sim::Condition*>(params.handle);
  sim::add_task(graph, sim::make_task("CONDITIONAL", [condition, type = params.type, graphs] {
    return sim::run_conditional(*condition, type, graphs);
  }));
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureToModelRIBegin(aclrtStream handle, aclmdlRI graph, aclmdlRICaptureMode mode) {
  constexpr const char* call = "aclmdlRICaptureToModelRIBegin";
  sim::Stream* stream = sim::stream_of(handle);
  if (stream->capture != nullptr) return sim::fail(ACL_ERROR_RT_STREAM_CAPTURED, call, "the stream is captured already");
  if (graph == nullptr) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, call, "there is no graph");
  auto* known = static_cast<sim::Graph*>(graph);
  known->mode = mode;
  sim_settle(handle);
  sim::begin_capture(known, stream);
  return ACL_SUCCESS;
}

}  // extern "C"
#endif
