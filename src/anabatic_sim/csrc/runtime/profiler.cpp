// acl_prof.h, which torch_npu.profiler drives, and the runtime's reports of its own library, which the simulation does not need:
// it sees the operators itself (profile_data.cpp).
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include <acl/acl_prof.h>

#include <mutex>
#include <string>

#include "profile.h"

struct aclprofConfig : sim::ProfileConfig {};
struct aclprofStepInfo {};

namespace {

std::mutex mutex;
std::string folder;  // of aclprofInit
bool ready = false;

// Hardware counters have no prediction: said once, by name.
void refuse_metrics(const sim::ProfileConfig& config) {
  static bool told = false;
  if ((config.types & (ACL_PROF_AICORE_METRICS | ACL_PROF_L2CACHE)) == 0 || told) return;
  const bool asked = config.metrics != ACL_AICORE_NONE && config.metrics != ACL_AICORE_PIPE_UTILIZATION;  // the latter is Level1's own
  if (!asked && (config.types & ACL_PROF_L2CACHE) == 0) return;
  told = true;
  fprintf(stderr, "anabatic sim: aic_metrics and l2_cache are not simulated, the profile has the other columns\n");
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

aclError aclprofInit(const char* path, size_t length) {
  if (path == nullptr || length == 0) return sim::fail(ACL_ERROR_INVALID_PARAM, "aclprofInit", "the path is empty");
  std::lock_guard<std::mutex> lock(mutex);
  folder.assign(path, length);
  ready = true;
  return ACL_SUCCESS;
}

aclError aclprofFinalize() {
  std::lock_guard<std::mutex> lock(mutex);
  if (ready) sim::profile_forget();
  ready = false;
  return ACL_SUCCESS;
}

aclprofConfig* aclprofCreateConfig(uint32_t* devices, uint32_t count, aclprofAicoreMetrics metrics, const aclprofAicoreEvents*,
                                   uint64_t types) {
  auto* config = new aclprofConfig;
  for (uint32_t i = 0; devices != nullptr && i < count; i++) {
    const int physical = sim_physical(static_cast<int>(devices[i]));
    if (physical < 0) {
      delete config;
      sim::fail(ACL_ERROR_INVALID_PARAM, "aclprofCreateConfig", "Invalid device ID");
      return nullptr;
    }
    config->devices.push_back(physical);
  }
  config->types = types;
  config->metrics = metrics;
  return config;
}

aclError aclprofDestroyConfig(const aclprofConfig* config) {
  delete config;
  return ACL_SUCCESS;
}

aclError aclprofWarmup(const aclprofConfig*) { return ACL_SUCCESS; }

aclError aclprofStart(const aclprofConfig* config) {
  std::lock_guard<std::mutex> lock(mutex);
  if (config == nullptr || !ready) return sim::fail(ACL_ERROR_INVALID_PARAM, "aclprofStart", "aclprofInit was not called");
  refuse_metrics(*config);
  std::string trouble;
  if (sim::profile_start(folder, *config, &trouble)) return ACL_SUCCESS;
  fprintf(stderr, "anabatic sim: the profile is not written: %s\n", trouble.c_str());
  return sim::fail(ACL_ERROR_INTERNAL_ERROR, "aclprofStart", trouble.c_str());
}

aclError aclprofStop(const aclprofConfig*) {
  sim::profile_stop();
  return ACL_SUCCESS;
}

// Sampling frequencies and limits of what is not sampled here.
aclError aclprofSetConfig(aclprofConfigType, const char*, size_t) { return ACL_SUCCESS; }
int aclprofGetSupportedFeatures(size_t* size, void** features) {
  if (size != nullptr) *size = 0;
  if (features != nullptr) *features = nullptr;
  return 0;
}
int aclprofGetSupportedFeaturesV2(size_t* size, void** features) { return aclprofGetSupportedFeatures(size, features); }
int aclprofRegisterDeviceCallback(void) { return 0; }
aclprofStepInfo* aclprofCreateStepInfo() { return new aclprofStepInfo; }
void aclprofDestroyStepInfo(aclprofStepInfo* step) { delete step; }
aclError aclprofGetStepTimestamp(aclprofStepInfo*, aclprofStepTag, aclrtStream) { return ACL_SUCCESS; }

}  // extern "C"
