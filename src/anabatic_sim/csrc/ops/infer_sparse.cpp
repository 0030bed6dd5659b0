// Sparse attention: npu_lightning_indexer chooses keys for each query, npu_sparse_flash_attention attends to them, and
// npu_kv_quant_sparse_flash_attention does so on int8 caches.
//
// Semantics: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_lightning_indexer.md, …-npu_sparse_flash_attention.md,
// …-npu_kv_quant_sparse_flash_attention.md. The arithmetic is float32.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "count.h"
#include "infer.h"
#include "infer_register.h"

namespace sim::infer {

namespace {

using at::Tensor;

// The sequences of a call: queries in layout BSND or TND, keys in BSND, TND or PA_BSND.
class Sequences {
 public:
  struct One {
    int64_t q_from, q_rows, k_from, k_rows;  // rows of queries count over all sequences: [B * S or T]
  };

  Sequences(const Arguments& a, const char* layout_keys, const char* lengths_keys, const Tensor& query, const Tensor& key)
      : name_(a.name()) {
    const std::string layout_query = a.text("layout_query");
    layout_ = a.text(layout_keys);
    TORCH_CHECK(layout_query == "BSND" || layout_query == "TND", "The layout of query only support BSND and TND, but got ",
                layout_query);
    TORCH_CHECK(layout_ == "PA_BSND" || layout_ == layout_query, name_, ": ", layout_keys, " ", layout_,
                " must be PA_BSND or that of query, ", layout_query);
    const bool packed = layout_query == "TND";
    TORCH_CHECK(query.dim() == (packed ? 3 : 4), "When the layout of query is ", layout_query, ", the query dimension must be ",
                packed ? 3 : 4, ", but got ", query.dim());
    TORCH_CHECK(key.dim() == (layout_ == "TND" ? 3 : 4) && key.size(-2) == 1, name_, ": keys of layout ", layout_,
                " must have one head, got ", key.sizes());
    const OptionalTensor q_lengths = a.optional("actual_seq_lengths_query"), k_lengths = a.optional(lengths_keys);
    TORCH_CHECK(!packed || is_given(q_lengths), name_, ": layout TND needs actual_seq_lengths_query");
    TORCH_CHECK(layout_ == "BSND" || is_given(k_lengths), name_, ": layout ", layout_, " needs ", lengths_keys);
    std::vector<int64_t> q = is_given(q_lengths) ? integers_of(*q_lengths) : std::vector<int64_t>(query.size(0), query.size(1));
    std::vector<int64_t> k = is_given(k_lengths) ? integers_of(*k_lengths) : std::vector<int64_t>(key.size(0), key.size(1));
    TORCH_CHECK(q.size() == k.size(), name_, ": ", q.size(), " sequences of queries and ", k.size(), " of keys");
    if (layout_ == "PA_BSND") {
      TORCH_CHECK(a.is_given("block_table"), name_, ": layout PA_BSND needs block_table");
      tables_ = page_tables(name_, a.tensor("block_table"));
      TORCH_CHECK(tables_.size() >= q.size(), name_, ": block_table has ", tables_.size(), " rows for ", q.size(), " sequences");
    }
    int64_t q_end = 0, k_end = 0;
    for (size_t i = 0; i < q.size(); i++) {
      const int64_t index = static_cast<int64_t>(i);
      One one{packed ? q_end : index * query.size(1), packed ? q[i] - q_end : q[i], layout_ == "TND" ? k_end : 0,
              layout_ == "TND" ? k[i] - k_end : k[i]};
      TORCH_CHECK(one.q_rows >= 0 && one.k_rows >= 0 && (packed ? q[i] <= query.size(0) : one.q_rows <= query.size(1)), name_,
                  ": the lengths do not fit query ", query.sizes());
      all_.push_back(one);
      q_end = q[i];
      k_end = k[i];
    }
  }

  const std::vector<One>& all() const { return all_; }

  // Keys (or values) of sequence i, [S, D] in float32.
  Tensor rows(const Tensor& x, size_t i) const {
    const One& one = all_[i];
    if (layout_ == "PA_BSND") return page_rows(name_, x, PageLayout::TokensFirst, 1, tables_[i], 0, one.k_rows)[0];
    const Tensor flat = (layout_ == "TND" ? x : x[static_cast<int64_t>(i)]).select(1, 0);
    TORCH_CHECK(one.k_from + one.k_rows <= flat.size(0), name_, ": a sequence of ", one.k_rows, " keys does not fit ", x.sizes());
    return flat.narrow(0, one.k_from, one.k_rows).to(at::kFloat);
  }

 private:
  const char* name_;
  std::string layout_;
  std::vector<std::vector<int64_t>> tables_;
  std::vector<One> all_;
};

void check_options(const Arguments& a) {
  const int64_t far = std::numeric_limits<int64_t>::max(), mode = a.integer("sparse_mode");
  refuse_value(a.name(), "sparse_mode " + std::to_string(mode), mode != 0 && mode != 3);
  refuse_value(a.name(), "pre_tokens or next_tokens", a.integer("pre_tokens") != far || a.integer("next_tokens") != far);
}

// The keys that query i of a sequence may see.
int64_t visible(const Sequences::One& one, int64_t i, int64_t mode) {
  return mode == 3 ? std::max<int64_t>(0, one.k_rows - one.q_rows + i + 1) : one.k_rows;
}

void lightning_indexer(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const Tensor query = a.tensor("query"), key = a.tensor("key"), weights = a.tensor("weights");
  const int64_t count = a.integer("sparse_count"), mode = a.integer("sparse_mode");
  const bool with_values = a.flag("return_value");
  TORCH_CHECK(query.numel() > 0, "Tensor query is empty.");
  TORCH_CHECK(key.numel() > 0, "Tensor key is empty.");
  TORCH_CHECK(count > 0, "sparse count should be greater than 0, but now is ", count);
  TORCH_CHECK(query.scalar_type() == key.scalar_type() && query.sizes().slice(0, query.dim() - 1) == weights.sizes(), a.name(),
              ": query ", query.dtype(), " ", query.sizes(), ", key ", key.dtype(), " and weights ", weights.sizes(),
              " do not fit together");
  check_options(a);
  const Sequences sequences(a, "layout_key", "actual_seq_lengths_key", query, key);
  std::vector<int64_t> shape = query.sizes().slice(0, query.dim() - 2).vec();
  shape.push_back(1);
  shape.push_back(count);
  const Tensor q = query.flatten(0, -3), w = weights.flatten(0, -2);
  Tensor indices = at::full({q.size(0), count}, -1, at::kInt);
  Tensor values = at::full({q.size(0), count}, -std::numeric_limits<float>::infinity(), query.options());
  for (size_t i = 0; i < sequences.all().size(); i++) {
    const auto& one = sequences.all()[i];
    if (one.q_rows == 0 || one.k_rows == 0) continue;
    const Tensor keys = sequences.rows(key, i);
    const Tensor own = q.narrow(0, one.q_from, one.q_rows).to(at::kFloat);  // [S, N, D]
    add_flops(2.0 * own.size(0) * own.size(1) * own.size(2) * keys.size(0));
    const Tensor scores = (at::matmul(own, keys.t()).relu_() * w.narrow(0, one.q_from, one.q_rows).to(at::kFloat).unsqueeze(-1))
                              .sum(1);  // [S, K]
    for (int64_t row = 0; row < one.q_rows; row++) {
      const int64_t seen = visible(one, row, mode), kept = std::min(count, seen);
      if (kept == 0) continue;
      const auto [best, where] = at::sort(scores[row].narrow(0, 0, seen), /*stable=*/true, 0, /*descending=*/true);
      indices[one.q_from + row].narrow(0, 0, kept).copy_(where.narrow(0, 0, kept));
      values[one.q_from + row].narrow(0, 0, kept).copy_(best.narrow(0, 0, kept));
    }
  }
  a.finish({indices.view(shape), with_values ? values.view(shape) : at::empty({0}, query.options())});
}

struct SparseResult {
  Tensor out, max, sum;  // [rows, N, V] in the dtype of query, [rows, N] twice in float32
};

// Attention of each query to the blocks of keys that `indices` [rows, 1, count] names (up to the first negative number).
SparseResult sparse_attention(const Arguments& a, const Sequences& sequences, const Tensor& query, const Tensor& key,
                              const Tensor& value, const Tensor& indices, const OptionalTensor& sinks) {
  const int64_t block = a.integer("sparse_block_size"), mode = a.integer("sparse_mode");
  TORCH_CHECK(block >= 1 && block <= 128, a.name(), ": sparse_block_size must lie between 1 and 128, got ", block);
  TORCH_CHECK(indices.scalar_type() == at::kInt && indices.dim() == query.dim() && indices.size(-2) == 1, a.name(),
              ": sparse_indices must be int32 [..., 1, count], got ", indices.dtype(), " ", indices.sizes());
  const Tensor q = query.flatten(0, -3), chosen = indices.flatten(0, -3).select(1, 0);
  TORCH_CHECK(chosen.size(0) == q.size(0), a.name(), ": sparse_indices ", indices.sizes(), " do not fit query ", query.sizes());
  SparseResult result{at::zeros({q.size(0), q.size(1), value.size(-1)}, query.options()), at::zeros({q.size(0), q.size(1)}),
                      at::zeros({q.size(0), q.size(1)})};
  for (size_t i = 0; i < sequences.all().size(); i++) {
    const auto& one = sequences.all()[i];
    if (one.q_rows == 0 || one.k_rows == 0) continue;
    const Tensor keys = sequences.rows(key, i), values = sequences.rows(value, i);
    for (int64_t row = 0; row < one.q_rows; row++) {
      const int64_t end = visible(one, row, mode);
      std::vector<int64_t> used;
      for (const int64_t number : integers_of(chosen[one.q_from + row])) {
        if (number < 0) break;
        TORCH_CHECK(number * block < one.k_rows, a.name(), ": sparse_indices names block ", number, " of ", block,
                    " keys, the sequence has ", one.k_rows);
        for (int64_t position = number * block; position < std::min(end, (number + 1) * block); position++)
          used.push_back(position);
      }
      if (used.empty()) continue;
      const Tensor where = at::tensor(used, at::kLong);
      ScoreOptions options{a.real("scale_value"), {}, {}, is_given(sinks) ? *sinks : Tensor()};
      const Attended done = attend(q[one.q_from + row].unsqueeze(1).to(at::kFloat), keys.index_select(0, where).unsqueeze(0),
                                   values.index_select(0, where).unsqueeze(0), options);
      result.out[one.q_from + row].copy_(done.out.squeeze(1));
      result.max[one.q_from + row].copy_(done.max.flatten());
      result.sum[one.q_from + row].copy_(done.sum.flatten());
    }
  }
  return result;
}

// [B, 1, S, N] or [1, T, N] of the statistics of rows.
Tensor statistics(const Tensor& x, const Tensor& query) {
  if (query.dim() == 3) return x.unsqueeze(0);
  return x.view({query.size(0), 1, query.size(1), query.size(2)});
}

void sparse_flash(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  check_options(a);
  refuse_value(a.name(), "attention_mode " + std::to_string(a.integer("attention_mode")), a.integer("attention_mode") != 2);
  TORCH_CHECK(a.is_given("query_rope") && a.is_given("key_rope") && a.is_given("value"), a.name(),
              ": attention_mode 2 needs value, query_rope and key_rope");
  const Tensor query = a.tensor("query"), key = a.tensor("key"), value = a.tensor("value");
  TORCH_CHECK(query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type() &&
                  (query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16), a.name(),
              ": query, key and value must be float16 or bfloat16, got ", query.dtype(), ", ", key.dtype(), " and ",
              value.dtype());
  const Sequences sequences(a, "layout_kv", "actual_seq_lengths_kv", query, key);
  const SparseResult done = sparse_attention(a, sequences, at::cat({query, a.tensor("query_rope")}, -1),
                                             at::cat({key, a.tensor("key_rope")}, -1), value, a.tensor("sparse_indices"),
                                             a.optional("sinks"));
  const Tensor out = done.out.view(query.sizes());
  if (a.flag("return_softmax_lse")) a.finish({out, statistics(done.max, query), statistics(done.sum, query)});
  else a.finish({out, at::empty({0}, at::kFloat), at::empty({0}, at::kFloat)});
}

// A row of an int8 cache: the numbers, the rope part in the dtype of query, and one float32 scale for each tile.
struct Unpacked {
  Tensor nope, rope;
};

Unpacked unpack(const Arguments& a, const Tensor& packed, const Tensor& query) {
  const int64_t rope = a.integer("rope_head_dim"), tile = a.integer("tile_size"), size = query.size(-1) - rope;
  const int64_t tiles = size / tile;
  TORCH_CHECK(packed.size(-1) == size + rope * 2 + tiles * 4, a.name(), ": key must hold ", size, " + 2 * ", rope, " + 4 * ",
              tiles, " bytes for each token, got ", packed.sizes());
  const Tensor scales = packed.narrow(-1, size + rope * 2, tiles * 4).contiguous().view(at::kFloat);
  const Tensor tiled = packed.narrow(-1, 0, size).to(at::kFloat).unflatten(-1, {tiles, tile});
  return {(tiled * scales.unsqueeze(-1)).flatten(-2).to(query.scalar_type()),
          packed.narrow(-1, size, rope * 2).contiguous().view(query.scalar_type())};
}

void quantised_sparse_flash(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  check_options(a);
  a.refuse({"key_dequant_scale", "value_dequant_scale", "key_dtype", "value_dtype", "sinks"});
  for (const auto& [argument, only] : {std::pair{"key_quant_mode", 2}, {"value_quant_mode", 2}, {"attention_mode", 2},
                                       {"quant_scale_repo_mode", 1}, {"tile_size", 128}, {"rope_head_dim", 64}})
    refuse_value(a.name(), argument + (" " + std::to_string(a.integer(argument))), a.integer(argument) != only);
  const Tensor query = a.tensor("query"), key = a.tensor("key");
  TORCH_CHECK_NOT_IMPLEMENTED(key.scalar_type() == at::kChar, "anabatic sim: ", a.name(), " with key of ", key.dtype(),
                              " is not simulated");
  const Sequences sequences(a, "layout_kv", "actual_seq_lengths_kv", query, key);
  const Unpacked parts = unpack(a, key, query);
  const SparseResult done = sparse_attention(a, sequences, query, at::cat({parts.nope, parts.rope}, -1), parts.nope,
                                             a.tensor("sparse_indices"), std::nullopt);
  std::vector<int64_t> shape = query.sizes().vec();
  shape.back() -= a.integer("rope_head_dim");
  a.finish({done.out.view(shape)});
}

}  // namespace

void register_sparse_attention(torch::Library& npu) {
  npu.impl("npu_lightning_indexer", torch::CppFunction::makeFromBoxedFunction<&lightning_indexer>());
  npu.impl("npu_sparse_flash_attention", torch::CppFunction::makeFromBoxedFunction<&sparse_flash>());
  npu.impl("npu_kv_quant_sparse_flash_attention", torch::CppFunction::makeFromBoxedFunction<&quantised_sparse_flash>());
}

}  // namespace sim::infer
