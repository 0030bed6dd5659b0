// The profiler's entry points inside the runtime: torch_npu calls them at import and around every operator. Nothing is
// collected; counters and times come from the simulator itself.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <atomic>

#include "../sim.h"

namespace {

struct aclprofConfig {};
struct aclprofStepInfo {};

aclprofConfig config;
aclprofStepInfo step;

void tell() {
  static std::atomic<bool> told{false};
  if (!told.exchange(true))
    fprintf(stderr, "anabatic sim: torch_npu.profiler records the host only, device activities are not simulated\n");
}

}  // namespace

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

// torch_npu.profiler (acl_prof.h)
int aclprofInit(const char*, size_t) { return 0; }
int aclprofWarmup(const aclprofConfig*) { return 0; }
int aclprofStart(const aclprofConfig*) {
  tell();
  return 0;
}
int aclprofStop(const aclprofConfig*) { return 0; }
int aclprofFinalize(void) { return 0; }
aclprofConfig* aclprofCreateConfig(uint32_t*, uint32_t, int, const void*, uint64_t) { return &config; }
int aclprofDestroyConfig(const aclprofConfig*) { return 0; }
int aclprofSetConfig(int, const char*, size_t) { return 0; }
int aclprofGetSupportedFeatures(size_t* size, void** features) {
  if (size != nullptr) *size = 0;
  if (features != nullptr) *features = nullptr;
  return 0;
}
int aclprofGetSupportedFeaturesV2(size_t* size, void** features) { return aclprofGetSupportedFeatures(size, features); }
int aclprofRegisterDeviceCallback(void) { return 0; }
int aclprofMarkEx(const char*, size_t, void*) { return 0; }
aclprofStepInfo* aclprofCreateStepInfo(void) { return &step; }
void aclprofDestroyStepInfo(aclprofStepInfo*) {}
int aclprofGetStepTimestamp(aclprofStepInfo*, int, void*) { return 0; }

}  // extern "C"
