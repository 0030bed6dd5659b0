// Making, finding and ending communicators.
#include "comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <map>
#include <thread>

#include <acl/acl.h>

#include "../sim.h"
#include "api.h"

namespace hccl_sim {

namespace {

std::mutex& comms_mutex = *new std::mutex;
std::map<HcclComm, std::shared_ptr<Comm>>& comms = *new std::map<HcclComm, std::shared_ptr<Comm>>;

// As HCCL names a communicator that got no name: the root's address, interface, port and time.
std::string default_name(const Root& root) {
  std::string id;
  for (size_t i = 0; i < 6; i++) id += format("%02x", static_cast<unsigned char>(root.id[i]));
  return format("%s%%sim_%u_%s", root.member.address[0], root.member.port, id.c_str());
}

// A communicator takes two buffers of HCCL_BUFFSIZE megabytes from the device (200 each when nothing is said): they are counted,
// because they are what is missing when torch says that memory is free.
void take_buffers(Comm& comm, const HcclCommConfig* config) {
  const char* text = getenv("HCCL_BUFFSIZE");
  uint64_t megabytes = text != nullptr && atoll(text) > 0 ? static_cast<uint64_t>(atoll(text)) : HCCL_COMM_DEFAULT_BUFFSIZE;
  if (config != nullptr && config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET) megabytes = config->hcclBufferSize;
  if (megabytes == 0 || aclrtMalloc(&comm.buffers, megabytes << 21, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS) return;
  if (comm.mesh) comm.mesh->fail();
  throw Failure{0, HCCL_E_MEMORY,
                format("EI0007: %s Failed to allocate resource[Memory] with info[size:%llu MB]: EL0004: Failed to allocate memory.\n        "
                       "Possible Cause: the device has no room for the buffers of group %s: a smaller HCCL_BUFFSIZE, or fewer groups.",
                       stamp().c_str(), static_cast<unsigned long long>(2 * megabytes), comm.name.c_str())};
}

}  // namespace

std::shared_ptr<Comm> comm_of(HcclComm handle) {
  std::lock_guard<std::mutex> lock(comms_mutex);
  auto found = comms.find(handle);
  return found == comms.end() ? nullptr : found->second;
}

HcclResult make_comm(const Root& root, uint32_t ranks, uint32_t rank, const HcclCommConfig* config, HcclComm* handle) {
  if (ranks == 0 || rank >= ranks)
    return refuse(HCCL_E_PARA, format("EI0003: %s Invalid_Argument(EI0003): In [HcclCommInitRootInfo], value [%u] for parameter [rank] is "
                                      "invalid: there are %u ranks.", stamp().c_str(), rank, ranks));
  try {
    auto comm = std::make_shared<Comm>();
    comm->rank = static_cast<int>(rank);
    comm->ranks = static_cast<int>(ranks);
    comm->root = root;
    comm->logical = sim_current_device() < 0 ? 0 : sim_current_device();
    comm->physical = sim_physical(comm->logical);
    if (comm->physical < 0) return refuse(HCCL_E_RUNTIME, "EE1001: no device is set");
    comm->execute_timeout = execute_timeout();
    const bool configured = config != nullptr;
    if (configured && config->hcclExecTimeOut != HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET) comm->execute_timeout = config->hcclExecTimeOut;
    const size_t named = configured ? strnlen(config->hcclCommName, COMM_NAME_MAX_LENGTH - 1) : 0;
    comm->name = named > 0 ? std::string(config->hcclCommName, named) : default_name(root);
    const Member me = myself(comm->physical);
    if (ranks == 1) comm->members = {me};
    else comm->mesh = join(root, comm->rank, comm->ranks, me, &comm->members);
    take_buffers(*comm, config);
    std::lock_guard<std::mutex> lock(comms_mutex);
    *handle = comm.get();
    comms[*handle] = std::move(comm);
    return HCCL_SUCCESS;
  } catch (const Failure& failure) {
    return refuse(failure.result, failure.text);
  }
}

HcclResult drop_comm(HcclComm handle) {
  auto comm = comm_of(handle);
  if (!comm) return refuse(HCCL_E_PTR, "EI0003: HcclCommDestroy: there is no such communicator");
  close(*comm);
  if (comm->buffers != nullptr) aclrtFree(comm->buffers);
  std::lock_guard<std::mutex> lock(comms_mutex);
  comms.erase(handle);
  return HCCL_SUCCESS;
}

}  // namespace hccl_sim

using namespace hccl_sim;

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  if (info == nullptr) return refuse(HCCL_E_PTR, "EI0003: HcclGetRootInfo: rootInfo is a null pointer");
  static_assert(sizeof(Root) <= sizeof(HcclRootInfo));
  try {
    const int logical = sim_current_device() < 0 ? 0 : sim_current_device();
    const Root root = make_root(random_id(), myself(sim_physical(logical)));
    memset(info, 0, sizeof *info);
    memcpy(info, &root, sizeof root);
    return HCCL_SUCCESS;
  } catch (const Failure& failure) {
    return refuse(failure.result, failure.text);
  }
}
HcclResult HcclGetRootInfoScalable(HcclRootInfo* info) { return HcclGetRootInfo(info); }

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config, HcclComm* comm) {
  if (info == nullptr || comm == nullptr) return refuse(HCCL_E_PTR, "EI0003: HcclCommInitRootInfo: a parameter is a null pointer");
  Root root;
  memcpy(&root, info, sizeof root);
  return make_comm(root, ranks, rank, config, comm);
}
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
  return HcclCommInitRootInfoConfig(ranks, info, rank, nullptr, comm);
}
// Several roots only spread the load of very large clusters: the first one serves all.
HcclResult HcclCommInitRootInfoScalable(uint32_t ranks, uint32_t roots, const HcclRootInfo* infos, uint32_t rank, uint32_t,
                                        const HcclCommConfig* config, HcclComm* comm) {
  if (roots == 0) return refuse(HCCL_E_PARA, "EI0003: HcclCommInitRootInfoScalable: nRoot is 0");
  return HcclCommInitRootInfoConfig(ranks, infos, rank, config, comm);
}

// A rank table describes real hardware. torch_npu falls back to the root info when this fails.
HcclResult HcclCommInitClusterInfoConfig(const char*, uint32_t, HcclCommConfig*, HcclComm*) {
  return refuse(HCCL_E_NOT_SUPPORT, "EI0004: rank tables are not simulated: unset RANK_TABLE_FILE");
}
HcclResult HcclCommInitClusterInfo(const char* info, uint32_t rank, HcclComm* comm) {
  return HcclCommInitClusterInfoConfig(info, rank, nullptr, comm);
}

// The first member is the root: its listener is known from the parent, the name of the meeting follows from the arguments.
HcclResult HcclCreateSubCommConfig(HcclComm* parent, uint32_t ranks, uint32_t* ids, uint64_t number, uint32_t rank, HcclCommConfig* config,
                                   HcclComm* made) {
  if (parent == nullptr || made == nullptr) return refuse(HCCL_E_PTR, "EI0003: HcclCreateSubCommConfig: a parameter is a null pointer");
  auto comm = comm_of(*parent);
  if (!comm) return refuse(HCCL_E_PTR, "EI0003: HcclCreateSubCommConfig: there is no such communicator");
  *made = nullptr;
  if (ids == nullptr) return HCCL_SUCCESS;  // not a member
  uint64_t digest[2] = {1469598103934665603ULL ^ number, 1099511628211ULL + number};
  for (uint32_t i = 0; i < ranks; i++) {
    if (ids[i] >= static_cast<uint32_t>(comm->ranks))
      return refuse(HCCL_E_PARA, "EI0003: HcclCreateSubCommConfig: rankIds holds a rank that the communicator does not have");
    for (uint64_t& half : digest) half = (half ^ ids[i]) * 1099511628211ULL;
  }
  Id id(comm->root.id, sizeof comm->root.id);
  for (size_t i = 0; i < id.size(); i++) id[i] = static_cast<char>(id[i] ^ reinterpret_cast<const char*>(digest)[i]);
  return make_comm(make_root(id, comm->members[ids[0]]), ranks, rank, config, made);
}

HcclResult HcclCommInitAll(uint32_t count, int32_t* devices, HcclComm* made) {
  if (devices == nullptr || made == nullptr) return refuse(HCCL_E_PTR, "EI0003: HcclCommInitAll: a parameter is a null pointer");
  HcclRootInfo info;
  const HcclResult ready = HcclGetRootInfo(&info);
  if (ready != HCCL_SUCCESS) return ready;
  std::vector<HcclResult> results(count);
  std::vector<std::string> texts(count);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < count; i++)
    threads.emplace_back([&, i] {
      aclrtSetDevice(devices[i]);
      results[i] = HcclCommInitRootInfo(count, &info, i, &made[i]);
      const char* text = aclGetRecentErrMsg();
      texts[i] = text == nullptr ? "" : text;
    });
  for (auto& thread : threads) thread.join();
  for (uint32_t i = 0; i < count; i++)
    if (results[i] != HCCL_SUCCESS) return refuse(results[i], texts[i]);
  return HCCL_SUCCESS;
}

HcclResult HcclCommDestroy(HcclComm comm) { return drop_comm(comm); }

HcclResult HcclGetCommName(HcclComm handle, char* name) {
  auto comm = comm_of(handle);
  if (!comm || name == nullptr) return refuse(HCCL_E_PTR, "EI0003: HcclGetCommName: there is no such communicator");
  snprintf(name, COMM_NAME_MAX_LENGTH, "%s", comm->name.c_str());
  return HCCL_SUCCESS;
}
// For operators that take the name of a communicator (ops/comm_group.cpp): the one of the current device, or null.
HcclComm sim_hccl_comm_named(const char* name) {
  const int device = sim_current_device() < 0 ? 0 : sim_current_device();
  std::lock_guard<std::mutex> lock(comms_mutex);
  for (const auto& [handle, comm] : comms)
    if (comm->name == name && comm->logical == device) return handle;
  return nullptr;
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t* size) {
  auto comm = comm_of(handle);
  if (!comm || size == nullptr) return refuse(HCCL_E_PTR, "EI0003: HcclGetRankSize: there is no such communicator");
  *size = static_cast<uint32_t>(comm->ranks);
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  auto comm = comm_of(handle);
  if (!comm || rank == nullptr) return refuse(HCCL_E_PTR, "EI0003: HcclGetRankId: there is no such communicator");
  *rank = static_cast<uint32_t>(comm->rank);
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
  auto comm = comm_of(handle);
  if (!comm || error == nullptr) return refuse(HCCL_E_PTR, "EI0003: HcclGetCommAsyncError: there is no such communicator");
  *error = static_cast<HcclResult>(comm->async_error.load());
  if (*error != HCCL_SUCCESS) {
    std::lock_guard<std::mutex> lock(comm->mutex);
    if (comm->broken) sim_set_error("%s", comm->broken->text.c_str());
  }
  return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult code) {
  static const char* const texts[] = {"no error", "parameter error", "empty pointer", "memory error", "internal error", "not support feature",
                                      "not found specific resource", "resource unavailable", "call system interface error", "timeout",
                                      "open file fail", "tcp connect fail", "roce connect fail", "tcp transfer fail", "roce transfer fail",
                                      "call runtime api fail", "call driver api fail", "call profiling api fail", "call cce api fail",
                                      "call network api fail", "operation repeat", "error cqe", "error communicator suspending",
                                      "retry constraint", "out of memory"};
  return static_cast<unsigned>(code) < sizeof texts / sizeof *texts ? texts[code] : "unknow error";
}

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

// Results are always deterministic; the switches are remembered.
static int32_t config_values[2] = {1, 0};
HcclResult HcclSetConfig(HcclConfig config, HcclConfigValue value) {
  if (static_cast<unsigned>(config) >= 2) return refuse(HCCL_E_PARA, "EI0003: HcclSetConfig: no such configuration");
  config_values[config] = value.value;
  return HCCL_SUCCESS;
}
HcclResult HcclGetConfig(HcclConfig config, HcclConfigValue* value) {
  if (static_cast<unsigned>(config) >= 2 || value == nullptr) return refuse(HCCL_E_PARA, "EI0003: HcclGetConfig: no such configuration");
  value->value = config_values[config];
  return HCCL_SUCCESS;
}
HcclResult HcclSetCommConfig(HcclComm, HcclConfig config, HcclConfigValue value) { return HcclSetConfig(config, value); }
HcclResult HcclGetCommConfig(HcclComm, HcclConfig config, HcclConfigValue* value) { return HcclGetConfig(config, value); }

HcclResult HcclGroupStart() {
  begin_group();
  return HCCL_SUCCESS;
}
HcclResult HcclGroupEnd() { return end_group(); }

// Memory windows make transfers cheaper on hardware and change no result.
HcclResult HcclCommSetMemoryRange(HcclComm, void*, size_t, size_t, uint64_t) { return HCCL_SUCCESS; }
HcclResult HcclCommUnsetMemoryRange(HcclComm, void*) { return HCCL_SUCCESS; }
HcclResult HcclCommActivateCommMemory(HcclComm, void*, size_t, size_t, aclrtDrvMemHandle, uint64_t) { return HCCL_SUCCESS; }
HcclResult HcclCommDeactivateCommMemory(HcclComm, void*) { return HCCL_SUCCESS; }
HcclResult HcclCommRegister(HcclComm, void* address, uint64_t, void** handle, uint32_t) {
  *handle = address;
  return HCCL_SUCCESS;
}
HcclResult HcclCommDeregister(HcclComm, void*) { return HCCL_SUCCESS; }
HcclResult HcclCommExchangeMem(HcclComm, void*, uint32_t*, uint32_t) { return HCCL_SUCCESS; }
HcclResult HcclCommSymWinRegister(HcclComm, void* address, uint64_t, void** handle, uint32_t) {
  *handle = address;
  return HCCL_SUCCESS;
}
HcclResult HcclCommSymWinDeregister(void*) { return HCCL_SUCCESS; }

HcclResult HcclCommWorkingDevNicSet(HcclComm, uint32_t*, bool*, uint32_t) {
  return refuse(HCCL_E_NOT_SUPPORT, "anabatic sim: HcclCommWorkingDevNicSet is not simulated: there is one network card");
}
HcclResult HcclCommSuspend(HcclComm) { return refuse(HCCL_E_NOT_SUPPORT, "anabatic sim: HcclCommSuspend is not simulated"); }
HcclResult HcclCommResume(HcclComm) { return refuse(HCCL_E_NOT_SUPPORT, "anabatic sim: HcclCommResume is not simulated"); }

}  // extern "C"
