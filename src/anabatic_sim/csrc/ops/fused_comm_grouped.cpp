// The grouped product of experts with the exchange of their tokens: npu_alltoallv_gmm (exchange, then products) and
// npu_gmm_alltoallv (products, then exchange).
//
// Formulas: op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_alltoallv_gmm.md, ..._gmm_alltoallv.md. Entry rank * e + expert
// of send_counts and recv_counts counts the rows of one expert (of e per rank); rows of an exchange lie by rank, then by expert,
// those of a product by expert, then by rank (CANN's ops-transformer, mc2/grouped_mat_mul_allto_allv/op_kernel). The number of
// ranks and the volume are not limited to those of the documentation.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tensor.h>

#include <torch/library.h>

#include <tuple>
#include <vector>

#include "comm_group.h"
#include "count.h"
#include "fused_common.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalText = std::optional<c10::string_view>;
using Numbers = std::vector<int64_t>;

Tensor product(const Tensor& left, const Tensor& right) {
  add_flops(2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(1)));
  return at::matmul(left.to(at::kFloat), right.to(at::kFloat)).to(left.scalar_type());
}

struct Exchange {  // arguments of both operators
  const char* name;
  const Tensor &x, &weight;
  int64_t ranks;
  at::IntArrayRef sent, received;
  const OptionalTensor &sent_tensor, &received_tensor, &shared_x, &shared_weight;
  bool turn_weight, turn_shared;
  const OptionalText& mode;

  int64_t experts() const { return weight.size(0); }
};

void check(const Exchange& job, at::IntArrayRef of_x) {
  const char* failed = ": call aclnn failed, detail:EZ1001: ";
  refuse_given(job.name, {{"send_counts_tensor", &job.sent_tensor}, {"recv_counts_tensor", &job.received_tensor}});
  TORCH_CHECK(!job.mode.has_value() || *job.mode == "ai_cpu" || *job.mode == "aiv", job.name,
              ": comm_mode must be ai_cpu or aiv, got ", job.mode.value_or(""));
  TORCH_CHECK((job.x.scalar_type() == at::kHalf || job.x.scalar_type() == at::kBFloat16) &&
                  job.weight.scalar_type() == job.x.scalar_type(),
              job.name, failed, "gmm_x and gmm_weight must both be float16 or bfloat16, got ", job.x.scalar_type(), " and ",
              job.weight.scalar_type());
  TORCH_CHECK(job.x.dim() == 2 && job.weight.dim() == 3 && job.weight.size(job.turn_weight ? 2 : 1) == job.x.size(1), job.name,
              failed, "gmm_x ", job.x.sizes(), " and gmm_weight ", job.weight.sizes(), " do not fit");
  const auto blocks = static_cast<size_t>(job.experts() * job.ranks);
  TORCH_CHECK(job.sent.size() == blocks && job.received.size() == blocks, job.name, failed,
              "send_counts and recv_counts must have ", blocks, " numbers (experts of a rank * ep_world_size), have ",
              job.sent.size(), " and ", job.received.size());
  int64_t rows = 0;
  for (const auto* counts : {&job.sent, &job.received})
    for (int64_t count : *counts) TORCH_CHECK(count >= 0, job.name, failed, "send_counts and recv_counts must not be negative");
  for (int64_t count : of_x) rows += count;
  TORCH_CHECK(rows == job.x.size(0), job.name, failed, "gmm_x has ", job.x.size(0), " rows, the counts say ", rows);
  TORCH_CHECK(is_given(job.shared_x) == is_given(job.shared_weight), job.name, failed, "mm_x and mm_weight belong together");
}

Numbers rows_of_ranks(const Exchange& job, at::IntArrayRef counts) {
  Numbers rows(static_cast<size_t>(job.ranks), 0);
  for (size_t i = 0; i < counts.size(); i++) rows[i / static_cast<size_t>(job.experts())] += counts[i];
  return rows;
}

// Places of rows that lie by rank and then by expert, in the order of experts and then ranks.
Tensor by_expert(const Exchange& job, at::IntArrayRef counts) {
  const auto options = job.x.options().dtype(at::kLong);
  Numbers starts;
  int64_t end = 0;
  for (int64_t count : counts) {
    starts.push_back(end);
    end += count;
  }
  std::vector<Tensor> parts;
  for (int64_t expert = 0; expert < job.experts(); expert++)
    for (int64_t rank = 0; rank < job.ranks; rank++) {
      const auto i = static_cast<size_t>(rank * job.experts() + expert);
      parts.push_back(at::arange(starts[i], starts[i] + counts[i], options));
    }
  return at::cat(parts);
}

// x holds the rows of the experts, one after the other.
Tensor products(const Exchange& job, const Tensor& x, at::IntArrayRef counts) {
  std::vector<Tensor> parts;
  int64_t from = 0;
  for (int64_t expert = 0; expert < job.experts(); expert++) {
    int64_t rows = 0;
    for (int64_t rank = 0; rank < job.ranks; rank++) rows += counts[static_cast<size_t>(rank * job.experts() + expert)];
    const Tensor weight = job.turn_weight ? job.weight[expert].t() : job.weight[expert];
    parts.push_back(product(x.narrow(0, from, rows), weight));
    from += rows;
  }
  return at::cat(parts);
}

// The expert that all tokens go to; undefined when it is not asked for.
Tensor shared_product(const Exchange& job) {
  if (!is_given(job.shared_x)) return Tensor();
  return product(*job.shared_x, job.turn_shared ? job.shared_weight->t() : *job.shared_weight);
}

std::tuple<Tensor, Tensor, Tensor> exchange_then_products(const Tensor& gmm_x, const Tensor& gmm_weight, c10::string_view hcom,
                                                          int64_t ep_world_size, at::IntArrayRef send_counts,
                                                          at::IntArrayRef recv_counts, const OptionalTensor& send_counts_tensor,
                                                          const OptionalTensor& recv_counts_tensor, const OptionalTensor& mm_x,
                                                          const OptionalTensor& mm_weight, bool trans_gmm_weight,
                                                          bool trans_mm_weight, bool permute_out_flag, OptionalText comm_mode) {
  const Exchange job{"npu_alltoallv_gmm", gmm_x, gmm_weight, ep_world_size, send_counts, recv_counts, send_counts_tensor,
                     recv_counts_tensor, mm_x, mm_weight, trans_gmm_weight, trans_mm_weight, comm_mode};
  check(job, send_counts);
  const CommGroup group(job.name, "hcom", hcom);
  group.check_size("ep_world_size", ep_world_size);
  const Tensor arrived = group.all_to_all(gmm_x, rows_of_ranks(job, send_counts), rows_of_ranks(job, recv_counts));
  const Tensor permuted = arrived.index_select(0, by_expert(job, recv_counts));
  return {products(job, permuted, recv_counts), shared_product(job), permute_out_flag ? permuted : Tensor()};
}

std::tuple<Tensor, Tensor> products_then_exchange(
    const Tensor& gmm_x, const Tensor& gmm_weight, c10::string_view hcom, int64_t ep_world_size, at::IntArrayRef send_counts,
    at::IntArrayRef recv_counts, const OptionalTensor& send_counts_tensor, const OptionalTensor& recv_counts_tensor,
    const OptionalTensor& mm_x, const OptionalTensor& mm_weight, bool trans_gmm_weight, bool trans_mm_weight,
    OptionalText comm_mode) {
  const Exchange job{"npu_gmm_alltoallv", gmm_x, gmm_weight, ep_world_size, send_counts, recv_counts, send_counts_tensor,
                     recv_counts_tensor, mm_x, mm_weight, trans_gmm_weight, trans_mm_weight, comm_mode};
  check(job, send_counts);
  const CommGroup group(job.name, "hcom", hcom);
  group.check_size("ep_world_size", ep_world_size);
  const Tensor made = products(job, gmm_x, send_counts), order = by_expert(job, send_counts);
  const Tensor unpermuted = at::empty_like(made).index_copy_(0, order, made);
  return {group.all_to_all(unpermuted, rows_of_ranks(job, send_counts), rows_of_ranks(job, recv_counts)), shared_product(job)};
}

}  // namespace

void register_comm_grouped(torch::Library& npu) {
  npu.impl("npu_alltoallv_gmm", TORCH_FN(exchange_then_products));
  npu.impl("npu_gmm_alltoallv", TORCH_FN(products_then_exchange));
}

}  // namespace sim
