// The shared memory of one simulated machine: what every process of it, `npu-smi` and the parent see.
//
// One POSIX object, named by ANABATIC_SIM_SEGMENT, made and removed by `anabatic sim` (segment.py is this file's mirror;
// a test compares the offsets). Every other shared object of the machine (collectives) starts with the same name, so that
// one sweep of /dev/shm cleans up. Plain integers, changed with __atomic builtins: no locks, so nobody who is killed holds
// one. Integers are little-endian, everything is 8-byte aligned.
#pragma once

#include <stdint.h>

#define SIM_MAGIC 0x314d4953414e41ULL /* "ANASIM1" */
#define SIM_VERSION 3
#define SIM_MAX_DEVICES 64
#define SIM_MAX_PROCESSES 256
#define SIM_MAX_FAULTS 32

enum SimHealth { SIM_HEALTH_OK = 0, SIM_HEALTH_WARNING = 1, SIM_HEALTH_ALARM = 2, SIM_HEALTH_CRITICAL = 3 };

enum SimFaultKind {
  SIM_FAULT_NONE = 0,
  SIM_FAULT_OOM = 1,        // the n-th aclrtMalloc answers 207001
  SIM_FAULT_AICORE = 2,     // the n-th operator, seen at the next synchronisation: 507015
  SIM_FAULT_ECC = 3,        // likewise, 507054
  SIM_FAULT_HCCL = 4,       // the n-th collective times out
  SIM_FAULT_LINK_DOWN = 5,  // collectives of the device fail, npu-smi and hccn_tool say DOWN
  SIM_FAULT_LOST = 6,       // every call on the device answers 507899 from the n-th operator on
  SIM_FAULT_SLOW = 7,       // operators take `factor` times as long, on paper and on the host's clock
  SIM_FAULT_HEALTH = 8,     // npu-smi shows `value` (SimHealth)
  SIM_FAULT_SLOW_LINK = 9,  // collectives of the device take `factor` milliseconds longer
  SIM_FAULT_FLIP = 10       // the n-th operator that reads a trained weight leaves one bit of it flipped
};

struct SimFault {
  uint32_t kind;     // SimFaultKind
  int32_t device;    // physical number, -1: every device
  int64_t after;     // events of the kind still to pass before it strikes; counted down atomically, strikes at zero
  int64_t value;     // SimHealth, or an error code that replaces the usual one
  double factor;     // SIM_FAULT_SLOW, SIM_FAULT_SLOW_LINK
  int64_t struck;    // times it has struck
};

struct SimDevice {
  uint64_t hbm_total;   // bytes
  uint64_t hbm_used;    // bytes, all processes
  uint64_t hbm_peak;    // highest hbm_used
  uint64_t busy_ns;     // host time spent inside operators and collectives of this device
  uint64_t paper_ns;    // estimated device time of the same
  uint64_t operators;   // launched
  uint64_t syncs;       // host synchronisations: device, stream, event, scalar reads
  uint64_t h2d_calls;
  uint64_t h2d_bytes;
  uint64_t d2h_calls;
  uint64_t d2h_bytes;
  uint64_t d2d_calls;
  uint64_t d2d_bytes;
  uint64_t collectives;
  uint64_t collective_bytes;
  uint64_t allocations;  // aclrtMalloc and physical pages
  uint32_t health;       // SimHealth
  uint32_t link_down;    // 1: HCCS and RoCE are down
  uint32_t lost;         // 1: gone from the bus
  uint32_t reserved;
};

struct SimProcess {
  int32_t pid;       // 0: free slot
  uint32_t pad;
  uint64_t started;  // field 22 of /proc/PID/stat: a reused pid is somebody else
  char name[64];     // /proc/PID/comm, or the script's name
  uint64_t hbm[SIM_MAX_DEVICES];  // bytes it holds on each device
};

// The constants of the estimated time (plan/cost_model.py computes them and names their sources): operations or bytes a second with the
// usual efficiency taken off, and nanoseconds.
struct SimRates {
  double half_flops;    // matrix products in fp16 and bf16
  double single_flops;  // in fp32
  double memory;        // HBM
  double host_link;     // PCIe
  double peer;          // to one other device of the server
  double peers;         // to all of them together
  double card;          // to the other die of its card; 0: a card has one
  double network;       // to another server
  double launch_ns;     // on the device: an operator of the vector cores
  double launch_cube_ns;
  double launch_collective_ns;
  double network_ns;    // latency of one exchange between servers
  double host_ns;       // what the host needs to launch one operator
  uint64_t server;      // devices of a server
};

struct SimSegment {
  uint64_t magic;
  uint32_t version;
  uint32_t size;          // sizeof(SimSegment)
  uint32_t devices;
  int32_t owner_pid;      // `anabatic sim`
  uint64_t owner_started;
  uint64_t created_ns;    // CLOCK_REALTIME
  char soc[32];           // as aclrtGetSocName gives it
  uint32_t cube_cores;
  uint32_t vector_cores;
  uint64_t l2_bytes;
  uint32_t bf16;          // 1: the chip knows bfloat16
  uint32_t clock_mhz;
  double half_tflops;     // dense peak of fp16 = bf16
  double bandwidth_gbs;   // HBM, 1e9 bytes a second; 0: not published
  struct SimRates rates;
  struct SimDevice device[SIM_MAX_DEVICES];
  struct SimProcess process[SIM_MAX_PROCESSES];
  struct SimFault fault[SIM_MAX_FAULTS];  // filled from the start, before COMMAND runs; ends at the first SIM_FAULT_NONE
};
