// The operations of HCCL's C interface (hccl.h): checks as HCCL makes them, then launch().
#include <string.h>

#include <string_view>

#include "../sim.h"
#include "comm.h"
#include "dtype.h"

namespace hccl_sim {

namespace {

HcclResult invalid(HcclResult result, const char* call, const char* value, const char* parameter, const char* expected) {
  return refuse(result, format("EI0003: %s Invalid_Argument(EI0003): In [%s], value [%s] for parameter [%s] is invalid. Reason: The "
                               "collective communication operator has an invalid argument. Expected value: %s.",
                               stamp().c_str(), call, value, parameter, expected));
}

enum class Chip { A2, A1, P310 };
Chip chip() {
  const std::string_view soc = sim_segment()->soc;
  if (soc.rfind("Ascend310P", 0) == 0) return Chip::P310;
  // The first generation: Ascend910A, 910B, 910ProA, 910ProB, 910PremiumA. 910B with a digit is the second.
  const bool second = soc.rfind("Ascend910_", 0) == 0 || (soc.rfind("Ascend910B", 0) == 0 && soc.size() > 10);
  return second || soc.rfind("Ascend910", 0) != 0 ? Chip::A2 : Chip::A1;
}

HcclResult check_type(const char* call, HcclDataType type) {
  if (size_of(type) == 0) return invalid(HCCL_E_NOT_SUPPORT, call, "reserved", "dataType", "a type of HcclDataType");
  if (type == HCCL_DATA_TYPE_BFP16 && sim_segment()->bf16 == 0)
    return invalid(HCCL_E_NOT_SUPPORT, call, name_of(type), "dataType", "a type that the chip knows");
  return HCCL_SUCCESS;
}

// hccl_communicator CheckDataType and param_check HcomCheckReduceDataType.
HcclResult check_reduction(const char* call, HcclDataType type, HcclReduceOp op) {
  if (static_cast<unsigned>(op) > HCCL_REDUCE_MIN) return invalid(HCCL_E_NOT_SUPPORT, call, name_of(op), "op", "sum, prod, max, min");
  const HcclResult known = check_type(call, type);
  if (known != HCCL_SUCCESS) return known;
  constexpr const char* all = "int8, int16, int32, float16, float32, bfloat16, int64";
  if (!reducible(type)) return invalid(HCCL_E_NOT_SUPPORT, call, name_of(type), "dataType", all);
  const bool wide = type == HCCL_DATA_TYPE_INT16 || type == HCCL_DATA_TYPE_BFP16;
  switch (chip()) {
    case Chip::A2:
      if (op == HCCL_REDUCE_PROD && wide) return invalid(HCCL_E_NOT_SUPPORT, call, name_of(type), "dataType", "float16, float32, int32");
      break;
    case Chip::A1:
      if (type == HCCL_DATA_TYPE_INT16) return invalid(HCCL_E_NOT_SUPPORT, call, name_of(type), "dataType", "float16, float32");
      break;
    case Chip::P310:
      if (type == HCCL_DATA_TYPE_INT64)
        return invalid(HCCL_E_NOT_SUPPORT, call, name_of(type), "dataType", "int8, int16, int32, float16, float32");
      if (type == HCCL_DATA_TYPE_INT16 && op != HCCL_REDUCE_SUM) return invalid(HCCL_E_NOT_SUPPORT, call, name_of(op), "op", "sum");
      break;
  }
  return HCCL_SUCCESS;
}

int ranks_of(HcclComm handle) {
  auto comm = comm_of(handle);
  return comm ? comm->ranks : 0;
}

HcclResult check_root(const char* call, HcclComm comm, uint32_t root) {
  if (root < static_cast<uint32_t>(ranks_of(comm))) return HCCL_SUCCESS;
  return invalid(HCCL_E_PARA, call, std::to_string(root).c_str(), "root", "a rank of the communicator");
}

HcclResult check_buffers(const char* call, const void* first, const void* second, uint64_t count) {
  if (count == 0 || (first != nullptr && second != nullptr)) return HCCL_SUCCESS;
  return invalid(HCCL_E_PTR, call, "nullptr", "sendBuf/recvBuf", "device memory");
}

std::vector<uint64_t> list(const void* values, int count) {
  const auto* at = static_cast<const uint64_t*>(values);
  return at == nullptr ? std::vector<uint64_t>(static_cast<size_t>(count)) : std::vector<uint64_t>(at, at + count);
}

Operation operation(Kind kind, HcclDataType type, const void* from, void* to, uint64_t count) {
  Operation made{kind};
  made.type = type;
  made.from = static_cast<const char*>(from);
  made.to = static_cast<char*>(to);
  made.count = count;
  return made;
}

// `count` elements in each of `ranks` blocks, one after the other.
void blocks(uint64_t count, int ranks, std::vector<uint64_t>* counts, std::vector<uint64_t>* offsets) {
  counts->assign(static_cast<size_t>(ranks), count);
  for (int i = 0; i < ranks; i++) offsets->push_back(count * static_cast<uint64_t>(i));
}

}  // namespace
}  // namespace hccl_sim

using namespace hccl_sim;

#define CHECK(expression)                                    \
  if (const HcclResult checked = (expression); checked != 0) \
  return checked

extern "C" {

HcclResult HcclAllReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  CHECK(check_reduction("HcclAllReduce", type, op));
  CHECK(check_buffers("HcclAllReduce", from, to, count));
  Operation made = operation(Kind::AllReduce, type, from, to, count);
  made.op = op;
  return launch(comm, std::move(made), stream);
}

HcclResult HcclReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root, HcclComm comm,
                      aclrtStream stream) {
  CHECK(check_reduction("HcclReduce", type, op));
  CHECK(check_root("HcclReduce", comm, root));
  CHECK(check_buffers("HcclReduce", from, to, count));
  Operation made = operation(Kind::Reduce, type, from, to, count);
  made.op = op;
  made.root = static_cast<int>(root);
  return launch(comm, std::move(made), stream);
}

HcclResult HcclReduceScatterV(void* from, const void* counts, const void* offsets, void* to, uint64_t count, HcclDataType type,
                              HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  CHECK(check_reduction("HcclReduceScatterV", type, op));
  Operation made = operation(Kind::ReduceScatterV, type, from, to, 0);
  made.op = op;
  made.send_counts = list(counts, ranks_of(comm));
  made.send_offsets = list(offsets, ranks_of(comm));
  auto owner = comm_of(comm);
  if (owner && made.send_counts[static_cast<size_t>(owner->rank)] != count)
    return invalid(HCCL_E_PARA, "HcclReduceScatterV", std::to_string(count).c_str(), "recvCount", "sendCounts[rank]");
  return launch(comm, std::move(made), stream);
}

HcclResult HcclReduceScatter(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  CHECK(check_reduction("HcclReduceScatter", type, op));
  CHECK(check_buffers("HcclReduceScatter", from, to, count));
  Operation made = operation(Kind::ReduceScatter, type, from, to, count);
  made.op = op;
  blocks(count, ranks_of(comm), &made.send_counts, &made.send_offsets);
  return launch(comm, std::move(made), stream);
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  CHECK(check_type("HcclBroadcast", type));
  CHECK(check_root("HcclBroadcast", comm, root));
  CHECK(check_buffers("HcclBroadcast", buffer, buffer, count));
  Operation made = operation(Kind::Broadcast, type, buffer, buffer, count);
  made.root = static_cast<int>(root);
  return launch(comm, std::move(made), stream);
}

HcclResult HcclScatter(void* from, void* to, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  CHECK(check_type("HcclScatter", type));
  CHECK(check_root("HcclScatter", comm, root));
  CHECK(check_buffers("HcclScatter", to, to, count));
  Operation made = operation(Kind::Scatter, type, from, to, count);
  made.root = static_cast<int>(root);
  return launch(comm, std::move(made), stream);
}

HcclResult HcclAllGatherV(void* from, uint64_t count, void* to, const void* counts, const void* offsets, HcclDataType type, HcclComm comm,
                          aclrtStream stream) {
  CHECK(check_type("HcclAllGatherV", type));
  const int ranks = ranks_of(comm);
  Operation made = operation(Kind::AllGatherV, type, from, to, 0);
  made.send_counts.assign(static_cast<size_t>(ranks), count);
  made.send_offsets.assign(static_cast<size_t>(ranks), 0);
  made.receive_counts = list(counts, ranks);
  made.receive_offsets = list(offsets, ranks);
  return launch(comm, std::move(made), stream);
}

HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  CHECK(check_type("HcclAllGather", type));
  CHECK(check_buffers("HcclAllGather", from, to, count));
  const int ranks = ranks_of(comm);
  Operation made = operation(Kind::AllGather, type, from, to, 0);
  made.send_counts.assign(static_cast<size_t>(ranks), count);
  made.send_offsets.assign(static_cast<size_t>(ranks), 0);
  blocks(count, ranks, &made.receive_counts, &made.receive_offsets);
  return launch(comm, std::move(made), stream);
}

HcclResult HcclAlltoAll(const void* from, uint64_t send_count, HcclDataType type, const void* to, uint64_t receive_count,
                        HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  CHECK(check_type("HcclAlltoAll", type));
  if (type != receive_type || send_count != receive_count)
    return invalid(HCCL_E_PARA, "HcclAlltoAll", name_of(receive_type), "recvType", "the same type and count as the send side");
  CHECK(check_buffers("HcclAlltoAll", from, to, send_count));
  Operation made = operation(Kind::AlltoAll, type, from, const_cast<void*>(to), 0);
  blocks(send_count, ranks_of(comm), &made.send_counts, &made.send_offsets);
  blocks(receive_count, ranks_of(comm), &made.receive_counts, &made.receive_offsets);
  return launch(comm, std::move(made), stream);
}

HcclResult HcclAlltoAllV(const void* from, const void* send_counts, const void* send_offsets, HcclDataType type, const void* to,
                         const void* receive_counts, const void* receive_offsets, HcclDataType receive_type, HcclComm comm,
                         aclrtStream stream) {
  CHECK(check_type("HcclAlltoAllV", type));
  if (type != receive_type) return invalid(HCCL_E_PARA, "HcclAlltoAllV", name_of(receive_type), "recvType", "the same type as the send side");
  const int ranks = ranks_of(comm);
  Operation made = operation(Kind::AlltoAllV, type, from, const_cast<void*>(to), 0);
  made.send_counts = list(send_counts, ranks);
  made.send_offsets = list(send_offsets, ranks);
  made.receive_counts = list(receive_counts, ranks);
  made.receive_offsets = list(receive_offsets, ranks);
  return launch(comm, std::move(made), stream);
}

// The matrix says what every rank sends to every other: blocks lie one after the other on both sides.
HcclResult HcclAlltoAllVC(const void* from, const void* matrix, HcclDataType type, const void* to, HcclDataType receive_type, HcclComm comm,
                          aclrtStream stream) {
  CHECK(check_type("HcclAlltoAllVC", type));
  auto owner = comm_of(comm);
  if (matrix == nullptr || !owner || type != receive_type)
    return invalid(HCCL_E_PARA, "HcclAlltoAllVC", "nullptr", "sendCountMatrix", "a matrix, one type");
  const auto ranks = static_cast<size_t>(owner->ranks), rank = static_cast<size_t>(owner->rank);
  const auto* at = static_cast<const uint64_t*>(matrix);
  Operation made = operation(Kind::AlltoAllVC, type, from, const_cast<void*>(to), 0);
  uint64_t sent = 0, received = 0;
  for (size_t peer = 0; peer < ranks; peer++) {
    made.send_counts.push_back(at[rank * ranks + peer]);
    made.send_offsets.push_back(sent);
    made.receive_counts.push_back(at[peer * ranks + rank]);
    made.receive_offsets.push_back(received);
    sent += made.send_counts.back();
    received += made.receive_counts.back();
  }
  return launch(comm, std::move(made), stream);
}

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  CHECK(check_type("HcclSend", type));
  CHECK(check_root("HcclSend", comm, peer));
  Operation made = operation(Kind::Send, type, buffer, nullptr, count);
  made.root = static_cast<int>(peer);
  return launch(comm, std::move(made), stream);
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  CHECK(check_type("HcclRecv", type));
  CHECK(check_root("HcclRecv", comm, peer));
  Operation made = operation(Kind::Receive, type, nullptr, buffer, count);
  made.root = static_cast<int>(peer);
  return launch(comm, std::move(made), stream);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  if (items == nullptr || count == 0) return invalid(HCCL_E_PARA, "HcclBatchSendRecv", "0", "itemNum", "at least one item");
  Operation made{Kind::BatchSendRecv};
  for (uint32_t i = 0; i < count; i++) {
    CHECK(check_type("HcclBatchSendRecv", items[i].dataType));
    CHECK(check_root("HcclBatchSendRecv", comm, items[i].remoteRank));
    made.items.push_back(items[i]);
  }
  return launch(comm, std::move(made), stream);
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) { return launch(comm, Operation{Kind::Barrier}, stream); }

}  // extern "C"
