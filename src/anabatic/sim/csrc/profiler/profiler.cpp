// libmspti.so and libmsprofiler.so: torch.profiler and torch_npu.profiler start and stop, and find no device activity.
// The host's side of both profilers is torch's own and complete.
//
// Retyped from the public headers: mspti.h (MSPTI_SUCCESS is 0, the end of a buffer is an error), acl_prof.h.
#include <stdint.h>
#include <stdio.h>

#include <atomic>

namespace {

constexpr int kSuccess = 0, kEndOfBuffer = 3;

void tell() {
  static std::atomic<bool> told{false};
  if (!told.exchange(true))
    fprintf(stderr, "anabatic sim: profilers see the host's operators only, device activities are not simulated\n");
}

struct aclprofConfig {};
struct aclprofStepInfo {};

aclprofConfig config;
aclprofStepInfo step;

}  // namespace

extern "C" {

int msptiSubscribe(void** subscriber, void*, void*) {
  if (subscriber != nullptr) *subscriber = &config;
  return kSuccess;
}
int msptiUnsubscribe(void*) { return kSuccess; }
int msptiActivityRegisterCallbacks(void*, void*) { return kSuccess; }
int msptiActivityEnable(int) {
  tell();
  return kSuccess;
}
int msptiActivityDisable(int) { return kSuccess; }
int msptiActivityIsEnabled(int) { return 0; }
int msptiActivityFlushAll(uint32_t) { return kSuccess; }
int msptiActivityFlushPeriod(uint32_t) { return kSuccess; }
int msptiActivityGetNextRecord(uint8_t*, size_t, void** record) {
  if (record != nullptr) *record = nullptr;
  return kEndOfBuffer;
}
int msptiActivityPushExternalCorrelationId(int, uint64_t) { return kSuccess; }
int msptiActivityPopExternalCorrelationId(int, uint64_t* last) {
  if (last != nullptr) *last = 0;
  return kSuccess;
}

int aclprofInit(const char*, size_t) { return kSuccess; }
int aclprofWarmup(const aclprofConfig*) { return kSuccess; }
int aclprofStart(const aclprofConfig*) {
  tell();
  return kSuccess;
}
int aclprofStop(const aclprofConfig*) { return kSuccess; }
int aclprofFinalize(void) { return kSuccess; }
aclprofConfig* aclprofCreateConfig(uint32_t*, uint32_t, int, const void*, uint64_t) { return &config; }
int aclprofDestroyConfig(const aclprofConfig*) { return kSuccess; }
int aclprofSetConfig(int, const char*, size_t) { return kSuccess; }
int aclprofGetSupportedFeatures(size_t* size, void** features) {
  if (size != nullptr) *size = 0;
  if (features != nullptr) *features = nullptr;
  return kSuccess;
}
int aclprofGetSupportedFeaturesV2(size_t* size, void** features) { return aclprofGetSupportedFeatures(size, features); }
int aclprofRegisterDeviceCallback(void) { return kSuccess; }
int aclprofMarkEx(const char*, size_t, void*) { return kSuccess; }
aclprofStepInfo* aclprofCreateStepInfo(void) { return &step; }
void aclprofDestroyStepInfo(aclprofStepInfo*) {}
int aclprofGetStepTimestamp(aclprofStepInfo*, int, void*) { return kSuccess; }

}  // extern "C"
