// Events between processes (ACL_EVENT_IPC): a slot in a file of the process that made the event. Only collectives leave work
// behind on a stream (work.h), so a record is mostly done at once; otherwise the stream's thread stores the end.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <mutex>

#include "ipc.h"
#include "work.h"

namespace {

constexpr size_t kSlots = 1 << 16;
constexpr size_t kBytes = kSlots * sizeof(sim::SharedEvent);

std::mutex& mutex = *new std::mutex;
int file = -1;
pid_t owner = 0;
sim::SharedEvent* slots = nullptr;
size_t next = 0;
std::deque<sim::SharedEvent*>& free_slots = *new std::deque<sim::SharedEvent*>;
std::map<std::pair<int, uint64_t>, sim::SharedEvent*>& foreign = *new std::map<std::pair<int, uint64_t>, sim::SharedEvent*>;

// What aclrtIpcEventHandle holds.
struct Handle {
  char magic[8];
  int32_t pid, descriptor;
  uint64_t started, slot;
};
static_assert(sizeof(Handle) <= ACL_IPC_EVENT_HANDLE_SIZE);
constexpr char kMagic[8] = "SIMEVT1";

sim::SharedEvent* map_slots(int descriptor) {
  void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return at == MAP_FAILED ? nullptr : static_cast<sim::SharedEvent*>(at);
}

// The mutex is held.
bool open_slots() {
  if (owner == getpid()) return slots != nullptr;
  owner = getpid();
  next = 0;
  free_slots.clear();
  slots = nullptr;
  file = memfd_create("anabatic-sim-events", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, kBytes) == 0) slots = map_slots(file);
  return slots != nullptr;
}

struct Store {
  sim::SharedEvent* event;
  uint64_t number;
};

void store(const Store& what) {
  uint64_t before = __atomic_load_n(&what.event->finished, __ATOMIC_ACQUIRE);
  while (before < what.number &&
         !__atomic_compare_exchange_n(&what.event->finished, &before, what.number, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
}

// With a null text earlier work has failed: who waits shall fail too, not hang.
int run_store(void* argument, char* text, size_t) {
  const auto* what = static_cast<Store*>(argument);
  if (text == nullptr) __atomic_store_n(&what->event->code, ACL_ERROR_RT_IPC_ERROR, __ATOMIC_RELEASE);
  store(*what);
  delete what;
  return ACL_SUCCESS;
}

enum class State { Waiting, Done, Gone };

State state_of(const Store& what) {
  if (__atomic_load_n(&what.event->finished, __ATOMIC_ACQUIRE) >= what.number) return State::Done;
  const int recorder = __atomic_load_n(&what.event->recorder, __ATOMIC_ACQUIRE);
  if (recorder != getpid() && sim::start_time(recorder) != what.event->recorder_start) return State::Gone;
  return State::Waiting;
}

constexpr const char* kGone = "the process that recorded the event is gone";

// milliseconds < 0: for ever.
int wait_for(const Store& what, int milliseconds, const char* call) {
  const uint64_t until = sim_clock_ns() + 1000000ULL * static_cast<uint64_t>(milliseconds < 0 ? 0 : milliseconds);
  for (;;) {
    const State state = state_of(what);
    if (state == State::Gone) return sim::fail(ACL_ERROR_RT_IPC_ERROR, call, kGone);
    if (state == State::Done) break;
    if (milliseconds >= 0 && sim_clock_ns() >= until)
      return sim::fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, call, "the event was not reached within the time given");
    usleep(200);
  }
  const int code = __atomic_load_n(&what.event->code, __ATOMIC_ACQUIRE);
  return code == 0 ? ACL_SUCCESS : sim::fail(code, call, "work before the event has failed in another process");
}

int run_wait(void* argument, char* text, size_t room) {
  const auto* what = static_cast<Store*>(argument);
  int code = ACL_SUCCESS;
  if (text != nullptr) {
    code = wait_for(*what, -1, "aclrtStreamWaitEvent");
    if (code != ACL_SUCCESS) snprintf(text, room, "aclrtStreamWaitEvent failed, error code is %d: %s", code, kGone);
  }
  delete what;
  return code;
}

Store recorded(sim::SharedEvent* event) { return {event, __atomic_load_n(&event->recorded, __ATOMIC_ACQUIRE)}; }

}  // namespace

namespace sim {

SharedEvent* make_shared_event() {
  std::lock_guard<std::mutex> lock(mutex);
  if (!open_slots()) return nullptr;
  SharedEvent* made;
  if (next < kSlots) {
    made = &slots[next++];
  } else {
    if (free_slots.empty()) return nullptr;
    made = free_slots.front();  // the oldest: others may still look at a younger one
    free_slots.pop_front();
  }
  memset(made, 0, sizeof *made);
  return made;
}

void drop_shared_event(SharedEvent* event) {
  std::lock_guard<std::mutex> lock(mutex);
  if (owner == getpid() && event >= slots && event < slots + kSlots) free_slots.push_back(event);
}

void record_shared_event(SharedEvent* event, aclrtStream stream) {
  event->recorder_start = start_time(getpid());
  __atomic_store_n(&event->recorder, getpid(), __ATOMIC_RELEASE);
  const Store what{event, __atomic_add_fetch(&event->recorded, 1, __ATOMIC_ACQ_REL)};
  if (pending(stream_of(stream)).empty()) store(what);
  else sim_enqueue(stream, &run_store, new Store(what));
}

void stream_wait_shared_event(aclrtStream stream, SharedEvent* event) {
  const Store what = recorded(event);
  if (state_of(what) != State::Done) sim_enqueue(stream, &run_wait, new Store(what));
}

bool shared_event_passed(SharedEvent* event, int* code) {
  const State state = state_of(recorded(event));
  *code = state == State::Gone ? fail(ACL_ERROR_RT_IPC_ERROR, "aclrtQueryEventStatus", kGone)
                               : __atomic_load_n(&event->code, __ATOMIC_ACQUIRE);
  return state != State::Waiting;
}

int await_shared_event(SharedEvent* event, int milliseconds, const char* call) {
  return wait_for(recorded(event), milliseconds, call);
}

int fill_handle(SharedEvent* event, aclrtIpcEventHandle* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid() || event < slots || event >= slots + kSlots)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcGetEventHandle", "the event was not made by this process");
  Handle made{{}, getpid(), file, start_time(getpid()), static_cast<uint64_t>(event - slots)};
  memcpy(made.magic, kMagic, sizeof made.magic);
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &made, sizeof made);
  return ACL_SUCCESS;
}

SharedEvent* open_handle(const aclrtIpcEventHandle& handle) {
  Handle made;
  memcpy(&made, &handle, sizeof made);
  if (memcmp(made.magic, kMagic, sizeof made.magic) != 0 || made.slot >= kSlots) return nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (made.pid == getpid() && owner == made.pid) return &slots[made.slot];
  auto known = foreign.find({made.pid, made.started});
  if (known == foreign.end()) {
    const int descriptor = open_descriptor(made.pid, made.started, made.descriptor);
    if (descriptor < 0) return nullptr;
    SharedEvent* mapped = map_slots(descriptor);
    close(descriptor);
    if (mapped == nullptr) return nullptr;
    known = foreign.emplace(std::make_pair(made.pid, made.started), mapped).first;
  }
  return &known->second[made.slot];
}

}  // namespace sim
