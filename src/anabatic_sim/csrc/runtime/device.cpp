// Initialisation, devices, contexts, properties, versions.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "state.h"

namespace {

thread_local int current = -1;
sim::Context contexts[SIM_MAX_DEVICES];
bool active[SIM_MAX_DEVICES];
bool initialised = false;
bool operators = false;  // loaded
std::mutex init_mutex;
int64_t system_options[16];
std::atomic<bool> saturation{false};  // aclrtSetDeviceSatMode

// ASCEND_RT_VISIBLE_DEVICES: ascending ids, reading stops at the first thing that is none (CANN runtime, environment
// variable reference); unset: all, empty: none.
std::vector<int> read_visible() {
  std::vector<int> ids;
  const int count = static_cast<int>(sim_segment()->devices);
  const char* text = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (int i = 0; i < count; i++) ids.push_back(i);
    return ids;
  }
  while (*text != '\0') {
    char* end;
    long id = strtol(text, &end, 10);
    if (end == text || text[0] < '0' || text[0] > '9' || id >= count) break;
    if (!ids.empty() && id <= ids.back()) break;
    ids.push_back(static_cast<int>(id));
    if (*end != ',') break;
    text = end + 1;
  }
  return ids;
}

const std::vector<int>& visible() {
  static const std::vector<int> ids = read_visible();
  return ids;
}

// The queue between Python and the device is always off: operators run at once, so anything queued would come too late.
// Scripts set it themselves, so it is overruled here, before torch_npu reads it.
__attribute__((constructor)) void no_task_queue() {
  setenv("TASK_QUEUE_ENABLE", "0", 1);
}

}  // namespace

namespace sim {

int visible_devices() { return static_cast<int>(visible().size()); }

int logical_of(int physical) {
  for (int i = 0; i < visible_devices(); i++)
    if (visible()[i] == physical) return i;
  return -1;
}

void set_current(int device) { current = device; }

int current_or_default() {
  if (current < 0 && active[0]) current = 0;
  return current;
}

int device_alive(int logical, const char* call) {
  int physical = sim_physical(logical);
  if (physical < 0) return fail(ACL_ERROR_RT_INVALID_DEVICEID, call, "Invalid device ID");
  if (__atomic_load_n(&sim_segment()->device[physical].lost, __ATOMIC_RELAXED) != 0)
    return fail(ACL_ERROR_RT_DRV_INTERNAL_ERROR, call, "the device is lost (simulated)");
  return ACL_SUCCESS;
}

}  // namespace sim

extern "C" {

int sim_physical(int logical) {
  return logical >= 0 && logical < sim::visible_devices() ? visible()[logical] : -1;
}

int sim_current_device(void) { return sim::current_or_default(); }

aclError aclInit(const char*) {
  std::lock_guard<std::mutex> lock(init_mutex);
  // The operators belong to the device: they arrive with it, whatever imported torch_npu and in whichever order. A program that
  // uses the runtime alone (pyACL) has no torch for them; if torch_npu comes later, it calls here again.
  if (!operators && dlopen("libtorch_npu.so", RTLD_NOLOAD | RTLD_LAZY) != nullptr) {
    if (dlopen("libanabatic_sim_ops.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      fprintf(stderr, "anabatic sim: the operators cannot be loaded: %s\n", dlerror());
      return sim::fail(ACL_ERROR_INTERNAL_ERROR, "aclInit", "the simulated operators cannot be loaded");
    }
    operators = true;
  }
  if (initialised) return ACL_ERROR_REPEAT_INITIALIZE;
  sim::enter_process();
  initialised = true;
  return ACL_SUCCESS;
}

aclError aclFinalize(void) {
  std::lock_guard<std::mutex> lock(init_mutex);
  if (!initialised) return ACL_ERROR_REPEAT_FINALIZE;
  initialised = false;
  sim::leave_process();
  return ACL_SUCCESS;
}

aclError aclFinalizeReference(uint64_t* references) {
  if (references != nullptr) *references = 0;
  return aclFinalize();
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(sim::visible_devices());
  return *count > 0 ? ACL_SUCCESS : sim::fail(ACL_ERROR_RT_NO_DEVICE, "aclrtGetDeviceCount", "no device is visible");
}

aclError aclrtSetDevice(int32_t device) {
  int code = sim::device_alive(device, "aclrtSetDevice");
  if (code != ACL_SUCCESS) return code;
  sim::enter_process();
  contexts[device].device = device;
  active[device] = true;
  current = device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t device) {
  if (sim_physical(device) < 0) return sim::fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtResetDevice", "Invalid device ID");
  active[device] = false;
  if (current == device) current = -1;
  return ACL_SUCCESS;
}

aclError aclrtResetDeviceForce(int32_t device) { return aclrtResetDevice(device); }

aclError aclrtGetDevice(int32_t* device) {
  if (sim::current_or_default() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = current;
  return ACL_SUCCESS;
}

aclError aclrtCreateContext(aclrtContext* context, int32_t device) {
  int code = aclrtSetDevice(device);
  if (code == ACL_SUCCESS) *context = &contexts[device];
  return code;
}

aclError aclrtDestroyContext(aclrtContext) { return ACL_SUCCESS; }

aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context == nullptr) return sim::fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtSetCurrentContext", "the context is null");
  current = static_cast<sim::Context*>(context)->device;
  return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (sim::current_or_default() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = &contexts[current];
  return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* is_active) {
  if (sim_physical(device) < 0) return ACL_ERROR_RT_INVALID_DEVICEID;
  if (flags != nullptr) *flags = 0;
  *is_active = active[device] ? 1 : 0;
  return ACL_SUCCESS;
}

aclError aclrtSetTsDevice(aclrtTsId) { return ACL_SUCCESS; }

aclError aclrtGetRunMode(aclrtRunMode* mode) {
  *mode = ACL_HOST;
  return ACL_SUCCESS;
}

const char* aclrtGetSocName(void) { return sim_segment()->soc; }

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logical) {
  if (sim_physical(user) < 0) return ACL_ERROR_RT_INVALID_DEVICEID;
  *logical = sim_physical(user);
  return ACL_SUCCESS;
}

aclError aclrtGetPhyDevIdByLogicDevId(const int32_t logical, int32_t* const physical) {
  *physical = logical;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
  int physical = sim_physical(static_cast<int>(device));
  if (physical < 0) return sim::fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtGetDeviceInfo", "Invalid device ID");
  const SimSegment* segment = sim_segment();
  switch (static_cast<int>(attribute)) {
    case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = 6; break;
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = segment->cube_cores; break;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = segment->vector_cores; break;
    case 204: *value = 192 << 10; break;  // unified buffer of a vector core
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = static_cast<int64_t>(segment->device[physical].hbm_total); break;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = static_cast<int64_t>(segment->l2_bytes); break;
    case ACL_DEV_ATTR_PHY_CHIP_ID: *value = physical; break;
    case ACL_DEV_ATTR_IS_VIRTUAL: *value = 0; break;
    default: return sim::fail(ACL_ERROR_FEATURE_UNSUPPORTED, "aclrtGetDeviceInfo", "this attribute is not simulated");
  }
  return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t* value) {
  if (sim_physical(static_cast<int>(device)) < 0) return ACL_ERROR_RT_INVALID_DEVICEID;
  const SimSegment* segment = sim_segment();
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = segment->cube_cores; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = segment->vector_cores; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE: *value = static_cast<int64_t>(segment->l2_bytes); return ACL_SUCCESS;
    default: return ACL_ERROR_INVALID_PARAM;
  }
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid* uuid) {
  if (sim_physical(device) < 0) return ACL_ERROR_RT_INVALID_DEVICEID;
  memset(uuid, 0, sizeof *uuid);
  snprintf(reinterpret_cast<char*>(uuid), sizeof *uuid, "simulated-%02d", sim_physical(device));
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo* info) {
  int physical = sim_physical(device);
  if (physical < 0) return ACL_ERROR_RT_INVALID_DEVICEID;
  const SimDevice& row = sim_segment()->device[physical];
  info->cubeUtilization = info->vectorUtilization = info->aicpuUtilization = 0;
  info->memoryUtilization = row.hbm_total == 0 ? 0 : static_cast<int32_t>(100 * row.hbm_used / row.hbm_total);
  return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
  *can = sim_physical(device) >= 0 && sim_physical(peer) >= 0 && device != peer ? 1 : 0;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclrtDeviceDisablePeerAccess(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t* value) {
  if (sim_physical(device) < 0) return ACL_ERROR_RT_INVALID_DEVICEID;
  *value = type == ACL_RT_DEV_RES_CUBE_CORE ? sim_segment()->cube_cores : sim_segment()->vector_cores;
  return ACL_SUCCESS;
}

// Deterministic mode, debug kernels and strong consistency are remembered; the simulation is always deterministic.
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  if (option < 0 || option >= 16) return ACL_ERROR_INVALID_PARAM;
  system_options[option] = value;
  return ACL_SUCCESS;
}
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  if (option < 0 || option >= 16) return ACL_ERROR_INVALID_PARAM;
  *value = system_options[option];
  return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) { return aclrtGetSysParamOpt(option, value); }

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  saturation.store(mode == ACL_RT_OVERFLOW_MODE_SATURATION || sim_segment()->bf16 == 0);
  return ACL_SUCCESS;
}
int sim_saturates(void) { return saturation.load(std::memory_order_relaxed); }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  if (actual != nullptr) *actual = timeout;
  return ACL_SUCCESS;
}
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

aclError aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
  *major = ACL_MAJOR_VERSION;
  *minor = ACL_MINOR_VERSION;
  *patch = ACL_PATCH_VERSION;
  return ACL_SUCCESS;
}

// ANABATIC_SIM_CANN is the release that torch_npu's own table pairs with it (wheel.py).
aclError aclsysGetVersionStr(char*, char* version) {
  const char* text = getenv("ANABATIC_SIM_CANN");
  snprintf(version, ACL_PKG_VERSION_MAX_SIZE, "%s", text != nullptr ? text : "9.2.0");
  return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  memset(version, 0, sizeof *version);
  aclsysGetVersionStr(nullptr, version->version);
  sscanf(version->version, "%63[^.].%63[^.].%63[^.]", version->majorVersion, version->minorVersion, version->releaseVersion);
  return ACL_SUCCESS;
}

}  // extern "C"
