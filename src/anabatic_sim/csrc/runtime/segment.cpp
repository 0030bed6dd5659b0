// The segment of this process's machine: attaching, the table of processes, memory accounts, faults and counters.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <mutex>

#include "profile.h"
#include "state.h"

namespace {

thread_local char error_text[2048];
std::mutex process_mutex;
SimProcess* my_slot = nullptr;
pid_t my_pid = 0;

// Without `anabatic sim` around (a library loaded by hand) there is one private device.
SimSegment* private_segment() {
  auto* made = static_cast<SimSegment*>(calloc(1, sizeof(SimSegment)));
  made->magic = SIM_MAGIC;
  made->version = SIM_VERSION;
  made->size = sizeof(SimSegment);
  made->devices = 1;
  strcpy(made->soc, "Ascend910B3");
  made->cube_cores = 20;
  made->vector_cores = 40;
  made->l2_bytes = 192ULL << 20;
  made->bf16 = 1;
  made->device[0].hbm_total = 64ULL << 30;
  return made;
}

SimSegment* attach() {
  const char* name = getenv("ANABATIC_SIM_SEGMENT");
  if (name == nullptr || *name == '\0') return private_segment();
  int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) {
    fprintf(stderr, "anabatic sim: the machine %s is gone (%s); start the command again with `anabatic sim`\n", name,
            strerror(errno));
    _exit(1);
  }
  void* at = mmap(nullptr, sizeof(SimSegment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  auto* found = static_cast<SimSegment*>(at);
  if (at == MAP_FAILED || found->magic != SIM_MAGIC || found->version != SIM_VERSION || found->size != sizeof(SimSegment)) {
    fprintf(stderr, "anabatic sim: the machine %s was made by another version; run `anabatic sim clean`\n", name);
    _exit(1);
  }
  return found;
}

void free_slot(SimProcess* slot) {
  SimSegment* segment = sim_segment();
  for (uint32_t i = 0; i < segment->devices; i++) {
    uint64_t held = __atomic_exchange_n(&slot->hbm[i], 0, __ATOMIC_SEQ_CST);
    if (held != 0) __atomic_fetch_sub(&segment->device[i].hbm_used, held, __ATOMIC_SEQ_CST);
  }
  __atomic_store_n(&slot->pid, 0, __ATOMIC_SEQ_CST);
}

// Processes that were killed leave their slot behind: whoever needs room takes it back.
void reap() {
  SimSegment* segment = sim_segment();
  for (auto& slot : segment->process) {
    int32_t pid = __atomic_load_n(&slot.pid, __ATOMIC_SEQ_CST);
    if (pid > 0 && ((kill(pid, 0) != 0 && errno == ESRCH) || sim::start_time(pid) != slot.started)) {
      int32_t expected = pid;  // one reaper wins
      if (__atomic_compare_exchange_n(&slot.pid, &expected, -1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) free_slot(&slot);
    }
  }
}

}  // namespace

extern "C" SimSegment* sim_segment(void) {
  static SimSegment* segment = attach();
  return segment;
}

extern "C" uint64_t sim_clock_ns(void) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ULL + now.tv_nsec;
}

extern "C" void sim_set_error(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error_text, sizeof error_text, format, arguments);
  va_end(arguments);
}

extern "C" const char* aclGetRecentErrMsg(void) {
  static thread_local char handed[sizeof error_text];
  memcpy(handed, error_text, sizeof handed);  // reading clears it, as in the real runtime
  error_text[0] = '\0';
  return handed[0] != '\0' ? handed : nullptr;
}

namespace sim {

uint64_t start_time(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = fopen(path, "r");
  if (file == nullptr) return 0;
  size_t got = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[got] = '\0';
  char* after = strrchr(text, ')');  // the name may hold spaces and brackets
  if (after == nullptr) return 0;
  unsigned long long value = 0;
  // Fields 3 to 21 are skipped, field 22 is the start time (proc(5)).
  char state = 'X';
  sscanf(after + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &value);
  return state == 'Z' || state == 'X' ? 0 : value;  // one that was not waited for has given everything back
}

int fail(int code, const char* call, const char* reason) {
  sim_set_error("%s failed, error code is %d: %s", call, code, reason);
  return code;
}

void enter_process() {
  pid_t pid = getpid();
  if (my_pid == pid) return;
  std::lock_guard<std::mutex> lock(process_mutex);
  if (my_pid == pid) return;
  reap();
  for (auto& slot : sim_segment()->process) {
    int32_t none = 0;
    if (!__atomic_compare_exchange_n(&slot.pid, &none, pid, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
    slot.started = start_time(pid);
    memset(slot.name, 0, sizeof slot.name);
    FILE* file = fopen("/proc/self/comm", "r");
    if (file != nullptr) {
      if (fgets(slot.name, sizeof slot.name, file) != nullptr) slot.name[strcspn(slot.name, "\n")] = '\0';
      fclose(file);
    }
    my_slot = &slot;
    my_pid = pid;
    return;
  }
  fprintf(stderr, "anabatic sim: more than %d processes use the machine; npu-smi does not list this one\n", SIM_MAX_PROCESSES);
  static SimProcess unlisted;
  my_slot = &unlisted;
  my_pid = pid;
}

void leave_process() {
  report_flush();
  if (my_slot != nullptr && my_pid == getpid()) free_slot(my_slot);  // a forked child owns nothing here
  my_slot = nullptr;
  my_pid = 0;
}

bool take_hbm(int physical, uint64_t bytes) {
  enter_process();
  SimDevice& device = sim_segment()->device[physical];
  __atomic_fetch_add(&device.allocations, 1, __ATOMIC_RELAXED);
  if (refuse_allocation(physical, bytes) || !host_has(bytes)) return false;
  for (int attempt = 0; attempt < 2; attempt++) {
    uint64_t used = __atomic_load_n(&device.hbm_used, __ATOMIC_SEQ_CST);
    while (used + bytes <= device.hbm_total) {
      if (!__atomic_compare_exchange_n(&device.hbm_used, &used, used + bytes, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        continue;
      __atomic_fetch_add(&my_slot->hbm[physical], bytes, __ATOMIC_SEQ_CST);
      uint64_t peak = __atomic_load_n(&device.hbm_peak, __ATOMIC_SEQ_CST);
      while (peak < used + bytes &&
             !__atomic_compare_exchange_n(&device.hbm_peak, &peak, used + bytes, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
      }
      profile_memory(physical, __atomic_load_n(&my_slot->hbm[physical], __ATOMIC_SEQ_CST));
      return true;
    }
    if (attempt == 0) reap();
  }
  return false;
}

void give_hbm(int physical, uint64_t bytes) {
  if (my_slot == nullptr || my_pid != getpid()) return;  // memory of the parent, freed again in a forked child
  __atomic_fetch_sub(&my_slot->hbm[physical], bytes, __ATOMIC_SEQ_CST);
  __atomic_fetch_sub(&sim_segment()->device[physical].hbm_used, bytes, __ATOMIC_SEQ_CST);
  profile_memory(physical, __atomic_load_n(&my_slot->hbm[physical], __ATOMIC_SEQ_CST));
}

}  // namespace sim

extern "C" SimDevice* sim_current(void) {
  int physical = sim_physical(sim_current_device() < 0 ? 0 : sim_current_device());
  return &sim_segment()->device[physical < 0 ? 0 : physical];
}

extern "C" int sim_count_sync(const char* what) {
  int logical = sim_current_device() < 0 ? 0 : sim_current_device();
  int physical = sim_physical(logical);
  if (physical < 0) return 0;
  __atomic_fetch_add(&sim_segment()->device[physical].syncs, 1, __ATOMIC_RELAXED);
  const uint64_t from = sim_reporting() ? sim::paper_host() : 0;
  sim::paper_wait_device(logical);
  if (sim_reporting()) sim::report_sync(what, physical, from, sim::paper_host());
  return sim::posted(physical);
}

extern "C" void sim_count_copy(int kind, uint64_t bytes) {
  sim::report_copy(kind, bytes);
  SimDevice* device = sim_current();
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE) {
    __atomic_fetch_add(&device->h2d_calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&device->h2d_bytes, bytes, __ATOMIC_RELAXED);
  } else if (kind == ACL_MEMCPY_DEVICE_TO_HOST) {
    __atomic_fetch_add(&device->d2h_calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&device->d2h_bytes, bytes, __ATOMIC_RELAXED);
  } else if (kind != ACL_MEMCPY_HOST_TO_HOST) {
    __atomic_fetch_add(&device->d2d_calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&device->d2d_bytes, bytes, __ATOMIC_RELAXED);
  }
}

extern "C" void sim_count_busy(uint64_t host_ns, uint64_t paper_ns) {
  SimDevice* device = sim_current();
  __atomic_fetch_add(&device->busy_ns, host_ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&device->paper_ns, paper_ns, __ATOMIC_RELAXED);
}
