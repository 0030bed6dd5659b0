// libmspti.so: torch.profiler starts and stops, and finds no device activity. Its host side is torch's own and complete.
//
// Retyped from the public header mspti.h: MSPTI_SUCCESS is 0, the end of a buffer is an error.
#include <stdint.h>
#include <stdio.h>

#include <atomic>

namespace {

constexpr int kSuccess = 0, kEndOfBuffer = 3;

void tell() {
  static std::atomic<bool> told{false};
  if (!told.exchange(true))
    fprintf(stderr, "anabatic sim: torch.profiler sees the host's operators only, device activities are not simulated\n");
}

int handle;

}  // namespace

extern "C" {

int msptiSubscribe(void** subscriber, void*, void*) {
  if (subscriber != nullptr) *subscriber = &handle;
  return kSuccess;
}
int msptiUnsubscribe(void*) { return kSuccess; }
int msptiActivityRegisterCallbacks(void*, void*) { return kSuccess; }
int msptiActivityEnable(int) { return kSuccess; }
int msptiActivityDisable(int) { return kSuccess; }
int msptiActivityIsEnabled(int) { return 0; }
int msptiActivityFlushAll(uint32_t) {
  tell();
  return kSuccess;
}
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

}  // extern "C"
