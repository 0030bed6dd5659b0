// What torch_npu's profiler gets from the simulated CANN: aclprofStart opens a folder PROF_*, and until aclprofStop everything
// that runs on a profiled device is a line of JSON there. `msprof` (sim/profiling) makes the tables and the timeline of it.
//
// Two clocks: rows of the host have this machine's time, CLOCK_MONOTONIC_RAW as torch_npu's own rows; rows of a device last as
// long as predicted, and start when the simulation has launched them and their stream is free.
#pragma once

#include <string>

#include "state.h"

namespace sim {

// Who launched a collective, for the row of the host; thread 0: nothing was profiled then.
struct ProfiledLaunch {
  int thread = 0;
  uint64_t begin_ns = 0;
  std::string communicator;
  int type = -1;  // HcclDataType
};

uint64_t profile_clock_ns();  // CLOCK_MONOTONIC_RAW
ProfiledLaunch profile_launch();

void profile_op(const SimOp& op, int physical, int stream, uint64_t start_ns, uint64_t took_ns);
void profile_collective(const ProfiledLaunch& launch, SimCollective kind, int physical, int stream, uint64_t bytes, int ranks,
                        uint64_t start_ns, uint64_t took_ns, uint64_t waited_ns);
// `used`: what this process holds now.
void profile_memory(int physical, uint64_t used);

// A mark or a range of mstx; with a stream also on its device. `end_ns` equals `begin_ns` for a mark.
struct ProfiledMark {
  std::string message, domain;
  uint64_t begin_ns = 0, end_ns = 0;
  int physical = -1, stream = -1;
  uint64_t device_begin_ns = 0, device_end_ns = 0;
};
void profile_mark(const ProfiledMark& mark);

// aclprofStart and aclprofStop. `devices` are physical numbers; start returns false, with a text, when the folder cannot be written.
struct ProfileConfig {
  std::vector<int> devices;
  uint64_t types = 0;  // ACL_PROF_*
  int metrics = 0;     // aclprofAicoreMetrics
};
bool profile_start(const std::string& folder, const ProfileConfig& config, std::string* trouble);
void profile_stop();
// The next start makes a new PROF_* folder.
void profile_forget();

}  // namespace sim
