// A communicator inside of an operator: operators that compute and communicate get its name as a string. The transfers are
// HCCL's own calls on the current stream, counted and timed as such; the operator waits for them, since its results are used at
// once. When one fails, the operator raises what the next synchronisation would raise after a collective.
#pragma once

#include <ATen/core/Tensor.h>
#include <hccl/hccl.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sim {

class CommGroup {
 public:
  // The communicator that torch_npu's get_hccl_comm_name names; `op` and `argument` are for the error.
  CommGroup(const char* op, const char* argument, std::string_view name);

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  // Refuses another number of ranks than the operator was called with.
  void check_size(const char* argument, int64_t size) const;

  at::Tensor all_reduce(const at::Tensor& tensor) const;
  // The tensors of all ranks, one after the other in the first dimension.
  at::Tensor all_gather(const at::Tensor& tensor) const;
  // The sum of this rank's part of the first dimension.
  at::Tensor reduce_scatter(const at::Tensor& tensor) const;
  // Rows to and from each rank.
  at::Tensor all_to_all(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received) const;

 private:
  void* stream() const;
  void finish(HcclResult result, void* stream) const;

  const char* op_;
  HcclComm handle_ = nullptr;
  int64_t rank_ = 0, size_ = 1;
};

}  // namespace sim
