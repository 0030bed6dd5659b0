// Threads that do the work of streams, and waiting for them.
#include "work.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "graph.h"

namespace {

struct Task {
  sim::Fences after;
  std::shared_ptr<sim::Fence> end;
  int (*run)(void*, char*, size_t);
  void* argument;
};

struct Queue {
  sim::Fences pending;
  std::deque<Task> tasks;
  int device = 0;
  bool has_thread = false;
  bool dropped = false;
};

// Never freed: threads may outlive static destruction when the process ends.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
std::unordered_map<sim::Stream*, std::shared_ptr<Queue>>& queues = *new std::unordered_map<sim::Stream*, std::shared_ptr<Queue>>;
std::atomic<int> unfinished{0};  // fences that are not done

// Removes what is done; the mutex is held. An error stays until a synchronisation has reported it.
void prune(sim::Fences& fences) {
  std::erase_if(fences, [](const auto& fence) { return fence->done && fence->code == 0; });
}

Queue& queue_of(sim::Stream* stream) {
  auto& queue = queues[stream];
  if (!queue) {
    queue = std::make_shared<Queue>();
    queue->device = stream->device;
  }
  return *queue;
}

void finish(Task& task, int code, const char* text) {
  task.end->code = code;
  task.end->text = text;
  task.end->done_ns = sim_clock_ns();
  task.end->done = true;
  unfinished--;
  changed.notify_all();
}

void work(std::shared_ptr<Queue> queue) {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return queue->dropped || !queue->tasks.empty(); });
    if (queue->tasks.empty()) return;
    Task task = std::move(queue->tasks.front());
    queue->tasks.pop_front();
    for (const auto& fence : task.after) changed.wait(lock, [&] { return fence->done; });
    const sim::Fence* broken = nullptr;
    for (const auto& fence : task.after)
      if (fence->code != 0) broken = fence.get();
    if (broken != nullptr) {  // a stream that failed does nothing more
      const std::string text = broken->text;
      task.run(task.argument, nullptr, 0);
      finish(task, broken->code, text.c_str());
      continue;
    }
    lock.unlock();
    char text[2048] = "";
    const int code = task.run(task.argument, text, sizeof text);
    lock.lock();
    finish(task, code, text);
  }
}

// The mutex is held. False: the time is over.
bool wait_locked(std::unique_lock<std::mutex>& lock, const sim::Fences& fences, int milliseconds) {
  auto ready = [&] {
    for (const auto& fence : fences)
      if (!fence->done) return false;
    return true;
  };
  if (milliseconds < 0) {
    changed.wait(lock, ready);
    return true;
  }
  return changed.wait_for(lock, std::chrono::milliseconds(milliseconds), ready);
}

int first_error(const sim::Fences& fences) {
  for (const auto& fence : fences) {
    if (!fence->done || fence->code == 0) continue;
    sim_set_error("%s", fence->text.c_str());
    return fence->code;
  }
  return 0;
}

}  // namespace

namespace sim {

Fences pending(Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = queues.find(stream);
  if (found == queues.end()) return {};
  prune(found->second->pending);
  return found->second->pending;
}

void wait_for(Stream* stream, const Fences& fences) {
  if (fences.empty()) return;
  std::lock_guard<std::mutex> lock(mutex);
  Fences& mine = queue_of(stream).pending;
  prune(mine);
  for (const auto& fence : fences)
    if ((!fence->done || fence->code != 0) && std::find(mine.begin(), mine.end(), fence) == mine.end()) mine.push_back(fence);
}

bool finished(const Fences& fences, int* code) {
  *code = 0;
  if (fences.empty()) return true;
  std::lock_guard<std::mutex> lock(mutex);
  *code = first_error(fences);
  if (*code != 0) return true;
  for (const auto& fence : fences)
    if (!fence->done) return false;
  return true;
}

uint64_t finished_ns(const Fences& fences) {
  std::lock_guard<std::mutex> lock(mutex);
  uint64_t last = 0;
  for (const auto& fence : fences) last = fence->done_ns > last ? fence->done_ns : last;
  return last;
}

int await(const Fences& fences, int milliseconds, const char* call) {
  if (fences.empty()) return 0;
  std::unique_lock<std::mutex> lock(mutex);
  if (!wait_locked(lock, fences, milliseconds))
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, call, "the stream did not end within the time given");
  return first_error(fences);
}

int await_stream(Stream* stream, int milliseconds, const char* call) {
  const Fences fences = pending(stream);
  const int code = await(fences, milliseconds, call);
  if (code == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT || fences.empty()) return code;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = queues.find(stream);
  if (found != queues.end()) prune(found->second->pending);
  return code;
}

int await_device(int device, int milliseconds, const char* call) {
  Fences all;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& [stream, queue] : queues) {
      if (queue->device != device) continue;
      prune(queue->pending);
      all.insert(all.end(), queue->pending.begin(), queue->pending.end());
    }
  }
  return await(all, milliseconds, call);
}

void forget_errors(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [stream, queue] : queues)
    if (queue->device == device) std::erase_if(queue->pending, [](const auto& fence) { return fence->done; });
}

void drop_work(Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = queues.find(stream);
  if (found == queues.end()) return;
  found->second->dropped = true;
  queues.erase(found);
  changed.notify_all();
}

}  // namespace sim

extern "C" {

void sim_enqueue(void* handle, int (*run)(void*, char*, size_t), void* argument) {
  sim::Stream* stream = sim::stream_of(handle);
  std::lock_guard<std::mutex> lock(mutex);
  Queue& queue = queue_of(stream);
  prune(queue.pending);
  auto end = std::make_shared<sim::Fence>();
  queue.tasks.push_back({queue.pending, end, run, argument});
  queue.pending = {end};  // it comes after everything before it
  unfinished++;
  if (!queue.has_thread) {
    queue.has_thread = true;
    std::thread(work, queues[stream]).detach();
  }
  changed.notify_all();
}

int sim_busy(void) { return unfinished.load(std::memory_order_acquire) != 0; }

void sim_settle(void* handle) {
  if (!sim_busy()) return;
  sim::Stream* stream = sim::stream_of(handle);
  // An error stays with the stream: the next synchronisation reports it, as on hardware.
  const sim::Fences fences = sim::pending(stream);
  if (fences.empty()) return;
  std::unique_lock<std::mutex> lock(mutex);
  wait_locked(lock, fences, -1);
}

int sim_stream_failed(void* handle, const char* call) {
  sim::Stream* stream = sim::stream_of(handle);
  if (int code = sim::refuse_wait_stream(stream, call)) return code;
  return sim::await_stream(stream, -1, call);
}

}  // extern "C"
