// Faults on demand: the rows that `anabatic sim --fault` wrote into the segment, and when they strike. Counters are in shared
// memory, so that "the 100th operator" means the 100th of the device over all processes, and a job that is started again by its
// launcher meets each fault once.
#include <unistd.h>

#include <atomic>

#include "state.h"

namespace {

std::atomic<int> posted_error[SIM_MAX_DEVICES];  // by physical number
thread_local uint64_t refused_bytes = 0;
thread_local int refusals = 0;

// Rows end at the first free one, so a machine without faults pays for one look. Not remembered: a test may add one later.
bool any(SimFaultKind kind) {
  for (const auto& fault : sim_segment()->fault) {
    const uint32_t found = __atomic_load_n(&fault.kind, __ATOMIC_RELAXED);
    if (found == SIM_FAULT_NONE) return false;
    if (found == static_cast<uint32_t>(kind)) return true;
  }
  return false;
}

int code_of(SimFaultKind kind) {
  switch (kind) {
    case SIM_FAULT_OOM: return ACL_ERROR_RT_MEMORY_ALLOCATION;
    case SIM_FAULT_AICORE: return 507015;  // ACL_ERROR_RT_AICORE_EXCEPTION
    case SIM_FAULT_ECC: return 507054;     // ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR
    case SIM_FAULT_HCCL: return 507048;    // ACL_ERROR_RT_NOTIFY_WAIT_TIMEOUT
    default: return ACL_ERROR_RT_DRV_INTERNAL_ERROR;
  }
}

bool lasts(SimFaultKind kind) { return kind == SIM_FAULT_LOST || kind == SIM_FAULT_LINK_DOWN; }

void worsen(int physical, uint32_t health) {
  uint32_t& row = sim_segment()->device[physical].health;
  if (__atomic_load_n(&row, __ATOMIC_RELAXED) < health) __atomic_store_n(&row, health, __ATOMIC_RELAXED);
}

void describe(int physical, int code) {
  switch (code) {
    case 507015:
      sim_set_error("EZ9999: Inner Error!\nEZ9999: [PID: %d] The error from device(chipId:%d, dieId:0), serial number is 1, there "
                    "is an aicore error exception, core id is 0, error code = 0x800000, dump info: simulated fault.\n"
                    "        TraceBack (most recent call last):\n        The extend info: errcode:(0x800000, 0, 0) errorStr: "
                    "The DDR address of the MTE instruction is out of range.", getpid(), physical);
      break;
    case 507054:
      sim_set_error("EZ9999: Inner Error!\nEZ9999: [PID: %d] HBM multi-bit ECC error, device_id=%d, simulated fault.", getpid(), physical);
      break;
    case 507048:
      sim_set_error("EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received the "
                    "Notify record from remote rank [unknown]. base information: [device %d, simulated fault].", physical);
      break;
    default:
      sim_set_error("EL9999: Inner Error!\nEL9999: [PID: %d] device %d answers nothing: simulated fault.", getpid(), physical);
  }
}

}  // namespace

extern "C" int sim_fault(enum SimFaultKind kind, int device) {
  if (!any(kind)) return 0;
  for (auto& fault : sim_segment()->fault) {
    if (fault.kind != static_cast<uint32_t>(kind) || (fault.device >= 0 && fault.device != device)) continue;
    const int64_t left = __atomic_sub_fetch(&fault.after, 1, __ATOMIC_SEQ_CST);
    if (left > 0 || (left < 0 && !lasts(kind))) continue;
    if (left == 0) __atomic_fetch_add(&fault.struck, 1, __ATOMIC_SEQ_CST);  // one that lasts strikes once
    if (kind == SIM_FAULT_ECC) worsen(device, SIM_HEALTH_ALARM);
    if (kind == SIM_FAULT_AICORE || kind == SIM_FAULT_LINK_DOWN) worsen(device, SIM_HEALTH_WARNING);
    if (kind == SIM_FAULT_LINK_DOWN) __atomic_store_n(&sim_segment()->device[device].link_down, 1, __ATOMIC_SEQ_CST);
    return fault.value != 0 ? static_cast<int>(fault.value) : code_of(kind);
  }
  return 0;
}

extern "C" void sim_post_error(int device, int code) {
  if (device >= 0 && device < SIM_MAX_DEVICES) posted_error[device] = code;
}

extern "C" void sim_count_operator_faults(int physical) {
  // The device works asynchronously: what an operator did wrong is told by the next synchronisation.
  for (SimFaultKind kind : {SIM_FAULT_AICORE, SIM_FAULT_ECC}) {
    const int code = sim_fault(kind, physical);
    if (code != 0) sim_post_error(physical, code);
  }
  if (any(SIM_FAULT_LOST) && sim_fault(SIM_FAULT_LOST, physical) != 0)
    __atomic_store_n(&sim_segment()->device[physical].lost, 1, __ATOMIC_SEQ_CST);
}

extern "C" int sim_slow(int physical, uint64_t host_ns) {
  if (!any(SIM_FAULT_SLOW)) return 0;
  static thread_local uint64_t debt = 0;  // slept off in pieces that a kernel's timer can keep
  for (const auto& fault : sim_segment()->fault)
    if (fault.kind == SIM_FAULT_SLOW && (fault.device < 0 || fault.device == physical) && fault.factor > 1)
      debt += static_cast<uint64_t>((fault.factor - 1) * static_cast<double>(host_ns));
  if (debt > 1000000) {
    usleep(static_cast<useconds_t>(debt / 1000));
    debt = 0;
  }
  return 1;
}

extern "C" uint64_t sim_link_delay_ns(int physical) {
  if (!any(SIM_FAULT_SLOW_LINK)) return 0;
  double milliseconds = 0;
  for (const auto& fault : sim_segment()->fault)
    if (fault.kind == SIM_FAULT_SLOW_LINK && (fault.device < 0 || fault.device == physical)) milliseconds += fault.factor;
  return static_cast<uint64_t>(milliseconds * 1e6);
}

extern "C" int sim_fault_waits(enum SimFaultKind kind) { return any(kind) ? 1 : 0; }

namespace sim {

bool refuse_allocation(int physical, uint64_t bytes) {
  if (!any(SIM_FAULT_OOM)) return false;
  // The caching allocator frees what it can and asks again for the same size, twice: a full device says no each time.
  if (refusals > 0 && bytes == refused_bytes) {
    refusals--;
    return true;
  }
  refusals = 0;
  if (sim_fault(SIM_FAULT_OOM, physical) == 0) return false;
  refused_bytes = bytes;
  refusals = 2;
  return true;
}

int posted(int physical) {
  const bool lost = __atomic_load_n(&sim_segment()->device[physical].lost, __ATOMIC_RELAXED) != 0;
  const int code = lost ? ACL_ERROR_RT_DRV_INTERNAL_ERROR : posted_error[physical].load();
  if (code == 0) return 0;
  describe(physical, code);
  return code;
}

}  // namespace sim

// torch_npu asks for broken pages after an ECC error; a simulated one has none.
extern "C" aclError aclrtGetMemUceInfo(int32_t, aclrtMemUceInfo*, size_t, size_t* count) {
  *count = 0;
  return ACL_SUCCESS;
}
