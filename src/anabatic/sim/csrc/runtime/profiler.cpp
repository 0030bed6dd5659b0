// The profiler's entry points inside the runtime: torch_npu calls them at import and around every operator. Nothing is
// collected; counters and times come from the simulator itself.
#include <stdint.h>

#include "../sim.h"

extern "C" {

int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
uint64_t MsprofGetHashId(const char* text, uint64_t length) {
  uint64_t hash = 1469598103934665603ULL;  // FNV-1a
  for (uint64_t i = 0; i < length; i++) hash = (hash ^ static_cast<unsigned char>(text[i])) * 1099511628211ULL;
  return hash;
}
uint64_t MsprofSysCycleTime(void) { return sim_clock_ns(); }

}  // extern "C"
