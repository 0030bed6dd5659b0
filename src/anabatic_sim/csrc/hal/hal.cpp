// libascend_hal.so: the driver's count of devices, which torch_npu and others ask without initialising anything.
#include <stdint.h>

#include "../sim.h"

extern "C" {

int drvGetDevNum(uint32_t* count) {
  *count = sim_segment()->devices;
  return 0;
}
int halGetAPIVersion(int* version) {
  *version = 0x072316;
  return 0;
}
// The frequency of the system counter, among others: not supported, so that torch_npu's profiler takes CLOCK_MONOTONIC_RAW.
int halGetDeviceInfo(uint32_t, int32_t, int32_t, int64_t*) { return 0xfffe; }  // DRV_ERROR_NOT_SUPPORT

}
