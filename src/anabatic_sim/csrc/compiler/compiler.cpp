// libacl_op_compiler.so: options of the operator compiler. There is no compiler here; options are remembered, and what asks
// for one operator to be compiled and run is refused by its name, except Identity, with which torch_npu changes private formats.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "../sim.h"

namespace {
std::mutex mutex;
std::map<int, std::string> options;

// What the real compiler says before anybody set it: chips since 910B1 run compiled kernels, older ones compile at run time.
const std::string& option_of(aclCompileOpt option) {
  auto& value = options[option];
  if (value.empty() && option == ACL_OP_JIT_COMPILE) value = sim_segment()->bf16 != 0 ? "disable" : "enable";
  return value;
}

aclError refuse(const char* name) {
  sim_set_error("E40000: operator %s of the graph engine is not simulated", name);
  fprintf(stderr, "anabatic sim: operator %s of the graph engine is not simulated\n", name);
  return ACL_ERROR_OP_NOT_FOUND;
}

// Data of every format lie in the order of ND (fidelity page), so a change of format copies what both have room for.
aclError change_format(const aclDataBuffer* from, aclDataBuffer* to, aclrtStream stream) {
  const size_t room = aclGetDataBufferSizeV2(to);
  return aclrtMemcpyAsync(aclGetDataBufferAddr(to), room, aclGetDataBufferAddr(from), std::min(room, aclGetDataBufferSizeV2(from)),
                          ACL_MEMCPY_DEVICE_TO_DEVICE, stream);
}
}  // namespace

extern "C" {

aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  std::lock_guard<std::mutex> lock(mutex);
  options[option] = value;
  return ACL_SUCCESS;
}
size_t aclGetCompileoptSize(aclCompileOpt option) {
  std::lock_guard<std::mutex> lock(mutex);
  return option_of(option).size() + 1;  // torch_npu takes 0 for an error
}
aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t length) {
  std::lock_guard<std::mutex> lock(mutex);
  snprintf(value, length, "%s", option_of(option).c_str());
  return ACL_SUCCESS;
}
aclError aclopSetCompileFlag(aclOpCompileFlag) { return ACL_SUCCESS; }
aclError aclopCompile(const char* name, int, const aclTensorDesc* const[], int, const aclTensorDesc* const[],
                      const aclopAttr*, aclopEngineType, aclopCompileType, const char*) {
  return refuse(name);
}
aclError aclopCompileAndExecute(const char* name, int inputs, const aclTensorDesc* const[], const aclDataBuffer* const from[],
                                int outputs, const aclTensorDesc* const[], aclDataBuffer* const to[], const aclopAttr*,
                                aclopEngineType, aclopCompileType, const char*, aclrtStream stream) {
  if (strcmp(name, "Identity") == 0 && inputs == 1 && outputs == 1) return change_format(from[0], to[0], stream);
  return refuse(name);
}
aclError aclopCompileAndExecuteV2(const char* name, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*, aclrtStream) {
  return refuse(name);
}

}  // extern "C"
