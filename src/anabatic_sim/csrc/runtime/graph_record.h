// What a captured graph holds: shared by graph.cpp (captures and executions) and graph_tasks.cpp (groups, conditions, waits).
#pragma once

#include <stddef.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "graph.h"

namespace sim {

struct Program;

// Either `run` alone, or `prepare`, which the host calls when it launches the graph, and `run_prepared`, which the stream calls
// then (a collective takes its place in the order of the communicator when it is launched).
struct GraphTask {
  std::string name;
  int (*run)(void* argument) = nullptr;
  void (*drop)(void* argument) = nullptr;
  void* argument = nullptr;
  void (*prepare)(void* argument, void* stream) = nullptr;
  int (*run_prepared)(void* argument, char* text, size_t room) = nullptr;
};

struct Program {
  std::vector<GraphTask> tasks;
  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    for (const GraphTask& task : tasks) task.drop(task.argument);
  }
};

// Tasks that an update replaces (aclrtTaskGrp).
struct TaskGroup {
  int device;
  std::mutex mutex;  // an update may come while a stream executes the graph
  std::shared_ptr<Program> program = std::make_shared<Program>();
};

struct Condition {
  uint64_t* at;  // memory of the device
  uint64_t initial;
};

struct Graph {
  struct Saved {
    void* at;
    std::vector<char> bytes;
  };

  uint32_t id;
  int device;
  aclmdlRICaptureMode mode;
  std::thread::id thread;
  std::vector<Stream*> streams = {};
  std::shared_ptr<Program> program = std::make_shared<Program>();
  std::shared_ptr<TaskGroup> group = nullptr;   // takes the tasks while it is open
  std::shared_ptr<TaskGroup> update = nullptr;  // not a graph: what is captured replaces the tasks of this group
  std::vector<std::shared_ptr<TaskGroup>> groups = {};
  Graph* parent = nullptr;  // the graph that runs this one under a condition
  std::vector<std::unique_ptr<Graph>> children = {};
  std::vector<std::unique_ptr<Condition>> conditions = {};
  std::vector<SimWork> work = {};
  std::vector<Saved> saved = {};
  std::set<std::pair<void*, size_t>> known = {};  // what `saved` holds
  bool broken = false;
  bool waits = false;  // a task waits for other streams or ranks: the stream's thread executes it, so that the host goes on

  ~Graph();
};

void add_task(Graph* graph, GraphTask task);
// A capture on `stream` begins, or ends: its streams are free then, and memory is as it was.
void begin_capture(Graph* graph, Stream* stream);
void release_capture(Graph* graph);
int run_program(const Program& program);
std::shared_ptr<Program> program_of(TaskGroup& group);

// A task made of a C++ function object.
template <typename Call>
GraphTask make_task(const char* name, Call call) {
  GraphTask task;
  task.name = name;
  task.run = [](void* argument) { return (*static_cast<Call*>(argument))(); };
  task.drop = [](void* argument) { delete static_cast<Call*>(argument); };
  task.argument = new Call(std::move(call));
  return task;
}

}  // namespace sim
