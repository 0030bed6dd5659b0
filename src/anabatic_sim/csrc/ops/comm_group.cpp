#include "comm_group.h"

#include <ATen/ops/empty.h>
#include <acl/acl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "../sim.h"
#include "count.h"
#include "fused_common.h"

// libhccl.so (comm.cpp): the communicator of this name on the current device, or null.
extern "C" HcclComm sim_hccl_comm_named(const char* name);

namespace sim {

void* stream_of(c10::Device device);  // stream_handle.cpp

namespace {

HcclDataType hccl_type(const char* op, at::ScalarType type) {
  switch (type) {
    case at::kFloat: return HCCL_DATA_TYPE_FP32;
    case at::kHalf: return HCCL_DATA_TYPE_FP16;
    case at::kBFloat16: return HCCL_DATA_TYPE_BFP16;
    case at::kChar: return HCCL_DATA_TYPE_INT8;
    case at::kInt: return HCCL_DATA_TYPE_INT32;
    case at::kLong: return HCCL_DATA_TYPE_INT64;
    default: TORCH_CHECK(false, op, ": no collective of ", type);
  }
}

at::Tensor like(const at::Tensor& tensor, int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = rows;
  return unwritten(sizes, tensor.options());
}

uint64_t elements(const at::Tensor& tensor) { return static_cast<uint64_t>(tensor.numel()); }

}  // namespace

CommGroup::CommGroup(const char* op, const char* argument, std::string_view name) : op_(op) {
  const std::string text(name);
  handle_ = sim_hccl_comm_named(text.c_str());
  TORCH_CHECK(handle_ != nullptr, op, ": call aclnn failed, detail:EZ1001: ", argument, " '", text,
              "' names no communicator of this device: pass what get_hccl_comm_name returns");
  uint32_t rank = 0, size = 0;
  HcclGetRankId(handle_, &rank);
  HcclGetRankSize(handle_, &size);
  rank_ = rank;
  size_ = size;
}

void CommGroup::check_size(const char* argument, int64_t size) const {
  TORCH_CHECK(size == size_, op_, ": call aclnn failed, detail:EZ1001: ", argument, " is ", size, ", the communicator has ",
              size_, " ranks");
}

void* CommGroup::stream() const {
  static const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  void* on = stream_of(guard.getDevice());
  if (void* graph = sim_capture(on)) {
    sim_capture_refuse(graph, op_);
    TORCH_CHECK(false, "anabatic sim: ", op_, " inside of torch.npu.graph is not simulated: it communicates");
  }
  return on;
}

void CommGroup::finish(HcclResult result, void* stream) const {
  if (result != HCCL_SUCCESS) {
    const char* text = aclGetRecentErrMsg();
    TORCH_CHECK(false, op_, ": HCCL error code is ", result, "\n", text == nullptr ? "" : text);
  }
  if (sim_stream_failed(stream, op_) != 0) synchronise(op_);
}

at::Tensor CommGroup::all_reduce(const at::Tensor& tensor) const {
  const at::Tensor from = tensor.contiguous();
  at::Tensor to = unwritten(from.sizes(), from.options());
  void* on = stream();
  finish(HcclAllReduce(from.data_ptr(), to.data_ptr(), elements(from), hccl_type(op_, from.scalar_type()), HCCL_REDUCE_SUM,
                       handle_, on),
         on);
  return to;
}

at::Tensor CommGroup::all_gather(const at::Tensor& tensor) const {
  const at::Tensor from = tensor.contiguous();
  at::Tensor to = like(from, from.size(0) * size_);
  void* on = stream();
  finish(HcclAllGather(from.data_ptr(), to.data_ptr(), elements(from), hccl_type(op_, from.scalar_type()), handle_, on), on);
  return to;
}

at::Tensor CommGroup::reduce_scatter(const at::Tensor& tensor) const {
  const at::Tensor from = tensor.contiguous();
  at::Tensor to = like(from, from.size(0) / size_);
  void* on = stream();
  finish(HcclReduceScatter(from.data_ptr(), to.data_ptr(), elements(to), hccl_type(op_, from.scalar_type()), HCCL_REDUCE_SUM,
                           handle_, on),
         on);
  return to;
}

at::Tensor CommGroup::all_to_all(const at::Tensor& rows, const std::vector<int64_t>& sent,
                                 const std::vector<int64_t>& received) const {
  const at::Tensor from = rows.contiguous();
  int64_t width = 1, total = 0;
  for (int64_t size : from.sizes().slice(1)) width *= size;
  const auto blocks = [&](const std::vector<int64_t>& counts, std::vector<uint64_t>* lengths, std::vector<uint64_t>* offsets) {
    total = 0;
    for (int64_t count : counts) {
      lengths->push_back(static_cast<uint64_t>(count * width));
      offsets->push_back(static_cast<uint64_t>(total * width));
      total += count;
    }
  };
  std::vector<uint64_t> out, out_at, in, in_at;
  blocks(sent, &out, &out_at);
  TORCH_CHECK(total <= from.size(0) && static_cast<int64_t>(out.size()) == size_, op_, ": ", total, " rows to send to ",
              out.size(), " ranks, there are ", from.size(0), " rows and ", size_, " ranks");
  blocks(received, &in, &in_at);
  at::Tensor to = like(from, total);
  const HcclDataType type = hccl_type(op_, from.scalar_type());
  void* on = stream();
  finish(HcclAlltoAllV(from.data_ptr(), out.data(), out_at.data(), type, to.data_ptr(), in.data(), in_at.data(), type, handle_,
                       on),
         on);
  return to;
}

}  // namespace sim
