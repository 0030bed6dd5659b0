// The pieces of fused attention that training (fused_attention.cpp) and inference (fused_infer.cpp) share.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace sim {

struct Options {
  int64_t heads;
  std::string_view layout;
  std::optional<at::Tensor> pse, mask;
  double scale, keep;
  int64_t before, after, mode, seed;
  std::optional<at::Tensor> sink = std::nullopt;  // [N]: one more score in each row's softmax, without a value
  bool pse_is_scaled = true;  // pse_type 1: scale * (q k^T + pse), else scale * q k^T + pse
};

// One sequence of the batch: where its rows are and which scores it may use.
struct Part {
  int64_t batch, q_from, q_rows, k_from, k_rows;
};

struct Scores {
  at::Tensor weights, dropped, max, sum;  // [N, S, S] twice, [N, S, 1] twice; max and sum are those with the sink
};

// [B, N, S, D] whatever the layout, and back; TND counts as a batch of one.
at::Tensor heads_first(const at::Tensor& x, std::string_view layout, int64_t heads);
at::Tensor heads_back(const at::Tensor& x, std::string_view layout);

// The rows of one sequence, [N, S, D] in float32.
at::Tensor part_rows(const at::Tensor& x, const Part& part, bool query, const Options& options);

// q [N, S, D], k [M, S, D]; N is a multiple of M.
Scores attention_scores(const at::Tensor& q, const at::Tensor& k, const Part& part, const Options& options);

// The operator's demands on atten_mask and sparse_mode.
void check_mask(const char* name, const Options& options);

}  // namespace sim
