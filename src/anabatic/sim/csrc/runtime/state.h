// What the files of libascendcl.so share. Signatures come from the ACL headers inside the torch_npu wheel: the compiler
// checks ours against them. `#pragma GCC visibility` stays at its default: every function of the API is exported.
#pragma once

#include <acl/acl.h>
#include <acl/acl_rt.h>

#include <cstddef>
#include <cstdint>

#include "../sim.h"

namespace sim {

struct Stream {
  int device;         // logical
  int32_t id;
  uint32_t priority;
  uint32_t flags;
  uint64_t overflow;  // aclrtSetStreamOverflowSwitch
};

struct Event {
  uint64_t host_ns = 0;  // when it was recorded; 0: never
  int device = -1;
  uint32_t flags = 0;
};

struct Context {
  int device;
};

// Reserves `bytes` of physical device `physical` for this process: false when the device is full.
bool take_hbm(int physical, uint64_t bytes);
void give_hbm(int physical, uint64_t bytes);
// Puts this process into the segment's table (once per process, also after fork).
void enter_process();
void leave_process();

int visible_devices();
// This thread's device; sets device 0 like the real runtime when the process never chose one. -1 with an error otherwise.
int current_or_default();
void set_current(int device);
int fail(int code, const char* call, const char* reason);

Stream* stream_of(aclrtStream stream);
// A call that a lost device answers with an error: 0, or the code.
int device_alive(int logical, const char* call);

}  // namespace sim
