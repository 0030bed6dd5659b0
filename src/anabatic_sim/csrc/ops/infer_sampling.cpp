// Filters of logits, and partial results of attention that are merged: npu_top_k_top_p, npu_attention_update.
//
// Semantics: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_top_k_top_p.md and …-npu_attention_update.md.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>

#include "infer.h"
#include "infer_register.h"

namespace sim::infer {

namespace {

using at::Tensor;

Tensor top_k_top_p(const Tensor& logits, const OptionalTensor& p, const OptionalTensor& k) {
  const char* name = "npu_top_k_top_p";
  const float hidden = -std::numeric_limits<float>::infinity();
  TORCH_CHECK(logits.dim() == 2, name, ": logits must have 2 dimensions, got ", logits.sizes());
  TORCH_CHECK(is_given(p) || is_given(k), name, ": p and k must not both be None");
  for (const OptionalTensor* argument : {&p, &k})
    TORCH_CHECK(!is_given(*argument) || ((*argument)->dim() == 1 && (*argument)->size(0) == logits.size(0)), name,
                ": p and k must hold one number for each of ", logits.size(0), " rows");
  auto [sorted, order] = at::sort(logits.to(at::kFloat), /*stable=*/true, -1, /*descending=*/false);
  if (is_given(k)) {
    const Tensor rank = logits.size(1) - k->to(at::kLong);
    TORCH_CHECK(rank.min().item<int64_t>() >= 0 && rank.max().item<int64_t>() < logits.size(1), name,
                ": k must lie between 1 and ", logits.size(1));
    sorted = sorted.masked_fill(sorted.lt(sorted.gather(1, rank.unsqueeze(1))), hidden);
  }
  if (is_given(p)) {
    TORCH_CHECK(p->scalar_type() == logits.scalar_type(), name, ": p must be ", logits.dtype(), ", got ", p->dtype());
    Tensor dropped = at::softmax(sorted, -1).cumsum(-1).le(1 - p->to(at::kFloat).unsqueeze(1));
    dropped.select(1, -1).fill_(false);
    sorted = sorted.masked_fill(dropped, hidden);
  }
  return at::empty_like(sorted).scatter_(1, order, sorted).to(logits.scalar_type());
}

std::tuple<Tensor, Tensor> attention_update(at::TensorList lse, at::TensorList local_out, int64_t update_type) {
  const char* name = "npu_attention_update";
  TORCH_CHECK(!lse.empty() && lse.size() == local_out.size(), name, ": ", lse.size(), " lse and ", local_out.size(),
              " local_out");
  TORCH_CHECK(update_type == 0 || update_type == 1, name, ": update_type must be 0 or 1, got ", update_type);
  for (size_t i = 0; i < lse.size(); i++)
    TORCH_CHECK(lse[i].dim() == 1 && local_out[i].dim() == 2 && lse[i].size(0) == local_out[i].size(0) &&
                    local_out[i].sizes() == local_out[0].sizes(), name, ": lse must be [rows] and local_out [rows, D], got ",
                lse[i].sizes(), " and ", local_out[i].sizes());
  std::vector<Tensor> each(lse.begin(), lse.end());
  const Tensor merged = at::logsumexp(at::stack(each).to(at::kFloat), at::IntArrayRef{0});
  Tensor out = at::zeros_like(local_out[0], local_out[0].options().dtype(at::kFloat));
  for (size_t i = 0; i < lse.size(); i++)
    out.add_(local_out[i].to(at::kFloat) * (lse[i].to(at::kFloat) - merged).exp().unsqueeze(1));
  return {out.to(local_out[0].scalar_type()), update_type == 1 ? merged.to(lse[0].scalar_type()) : Tensor()};
}

}  // namespace

void register_sampling(torch::Library& npu) {
  npu.impl("npu_top_k_top_p", TORCH_FN(top_k_top_p));
  npu.impl("npu_attention_update", TORCH_FN(attention_update));
}

}  // namespace sim::infer
