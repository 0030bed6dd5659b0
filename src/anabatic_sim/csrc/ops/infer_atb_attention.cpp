// The attention of the acceleration library ATB: torch_npu._npu_paged_attention… and _npu_flash_attention….
//
// Semantics: op-plugin, op_plugin/ops/atb/*.cpp (mask and calculation types of each operator) and the docstrings in
// torch_npu/op_plugin/atb/_atb_api_docs.py (shapes). Masks of ATB are numbers that are added to the scaled scores; compressed
// masks mean a triangle. The arithmetic is float32.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <functional>
#include <limits>

#include "infer.h"
#include "infer_register.h"

namespace sim::infer {

namespace {

using at::Tensor;
using Lengths = std::vector<int64_t>;

constexpr int64_t kFar = std::numeric_limits<int32_t>::max();

// Tokens of shape [T, H] or [T, N, D] as [N, T, D].
Tensor token_heads(const char* name, const char* argument, const Tensor& x, int64_t heads) {
  const Tensor split = x.dim() == 2 ? x.unflatten(-1, {heads, x.size(-1) / heads}) : x;
  TORCH_CHECK(split.dim() == 3 && split.size(1) == heads, name, ": ", argument, " ", x.sizes(), " does not hold ", heads,
              " heads");
  return split.transpose(0, 1);
}

void check_types(const char* name, const Tensor& query, const Tensor& key, const Tensor& value, int64_t heads,
                 int64_t kv_heads) {
  const auto type = query.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(type == at::kHalf || type == at::kBFloat16, "anabatic sim: atb::", name, " with ", query.dtype(),
                              " is not simulated");
  TORCH_CHECK(key.scalar_type() == type && value.scalar_type() == type, name, ": query, key and value must have one dtype, got ",
              query.dtype(), ", ", key.dtype(), ", ", value.dtype());
  TORCH_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, name, ": num_heads ", heads, " is no multiple of num_kv_heads ",
              kv_heads);
}

// The compressed mask of a triangle: ones, or -10000, above the diagonal.
void check_triangle(const char* name, const Tensor& mask) {
  const Tensor flat = mask.dim() == 3 && mask.size(0) == 1 ? mask[0] : mask;
  TORCH_CHECK(flat.dim() == 2 && flat.size(0) == flat.size(1), name, ": the compressed mask must be square, got ", mask.sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(at::equal(flat.ne(0), at::ones(flat.sizes(), at::kBool).triu(1)), "anabatic sim: atb::", name,
                              " with a mask other than the upper triangle is not simulated");
}

// A sequence's queries and keys, and what is added to its scores.
struct Part {
  int64_t q_from, q_rows, k_rows;
  ScoreOptions options;
};

using KeyRows = std::function<std::pair<Tensor, Tensor>(size_t sequence, const Part& part)>;

// Writes the attention of each sequence into out, [T, N, V] or [T, N * V]; returns the log-sum-exp, [N, T, 1].
Tensor run_parts(const char* name, const Tensor& query, int64_t heads, const std::vector<Part>& parts, const KeyRows& keys,
                 const Tensor& out) {
  const Tensor q = token_heads(name, "query", query, heads), target = token_heads(name, "out", out, heads);
  TORCH_CHECK(target.size(1) == q.size(1), name, ": out ", out.sizes(), " does not match query ", query.sizes());
  Tensor lse = at::empty({heads, q.size(1), 1});
  for (size_t i = 0; i < parts.size(); i++) {
    const Part& part = parts[i];
    TORCH_CHECK(part.q_from + part.q_rows <= q.size(1), name, ": the sequences have more than the ", q.size(1),
                " tokens of query");
    const auto [key, value] = keys(i, part);
    const Attended done = attend(q.narrow(1, part.q_from, part.q_rows).to(at::kFloat), key, value, part.options);
    target.narrow(1, part.q_from, part.q_rows).copy_(done.out);
    lse.narrow(1, part.q_from, part.q_rows).copy_(done.lse);
  }
  return lse;
}

// The layout of a cache, by its shape: [n, block, N, D], [n, block, N * D] or [n, N * D / 16, block, 16].
PageLayout cache_layout(const char* name, const Tensor& cache, int64_t heads, int64_t size) {
  if (cache.dim() == 3 && cache.size(2) == heads * size) return PageLayout::TokensFirst;
  if (cache.dim() == 4 && cache.size(2) == heads && cache.size(3) == size) return PageLayout::TokensFirst;
  TORCH_CHECK(cache.dim() == 4 && cache.size(1) * cache.size(3) == heads * size, name, ": a cache of shape ", cache.sizes(),
              " does not hold ", heads, " heads of ", size);
  return PageLayout::Fractal;
}

KeyRows paged_keys(const char* name, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                   int64_t kv_heads, int64_t key_size, int64_t value_size) {
  const auto tables = page_tables(name, block_table);
  const PageLayout key_layout = cache_layout(name, key_cache, kv_heads, key_size);
  const PageLayout value_layout = cache_layout(name, value_cache, kv_heads, value_size);
  return [=](size_t sequence, const Part& part) {
    TORCH_CHECK(sequence < tables.size(), name, ": block_table has ", tables.size(), " rows, sequence ", sequence, " has none");
    return std::pair{page_rows(name, key_cache, key_layout, kv_heads, tables[sequence], 0, part.k_rows),
                     page_rows(name, value_cache, value_layout, kv_heads, tables[sequence], 0, part.k_rows)};
  };
}

int64_t head_size(const Tensor& x, int64_t heads) { return x.dim() == 2 ? x.size(1) / heads : x.size(-1); }

// Parts of queries that lie one after another; each sees the keys before it and itself, counted from the last key.
std::vector<Part> prefix_parts(const char* name, const Lengths& queries, const Lengths& keys, double scale) {
  TORCH_CHECK(queries.size() == keys.size(), name, ": ", queries.size(), " query lengths and ", keys.size(), " key lengths");
  std::vector<Part> parts;
  int64_t from = 0;
  for (size_t i = 0; i < queries.size(); i++) {
    TORCH_CHECK(queries[i] >= 0 && keys[i] >= queries[i], name, ": a sequence has ", queries[i], " queries and ", keys[i],
                " keys");
    parts.push_back({from, queries[i], keys[i], {scale, band(queries[i], keys[i], keys[i] - queries[i], kFar, 0), {}, {}}});
    from += queries[i];
  }
  return parts;
}

// One query for each sequence.
std::vector<Part> decode_parts(const Lengths& contexts, double scale) {
  std::vector<Part> parts;
  for (size_t i = 0; i < contexts.size(); i++)
    parts.push_back({static_cast<int64_t>(i), 1, contexts[i], {scale, {}, {}, {}}});
  return parts;
}

void paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, int64_t kv_heads, int64_t heads,
                     double scale, const Tensor& block_table, const Tensor& context_lens, Tensor& out, const OptionalTensor&) {
  const char* name = "_npu_paged_attention";
  check_types(name, query, key_cache, value_cache, heads, kv_heads);
  run_parts(name, query, heads, decode_parts(integers_of(context_lens), scale),
            paged_keys(name, key_cache, value_cache, block_table, kv_heads, head_size(query, heads), head_size(out, heads)), out);
}

// The kernel's own memory: none here. uint8, as in PagedAttentionAtb.cpp.
Tensor paged_workspace(const Tensor& query, const Tensor&, const Tensor&, int64_t, int64_t, double, const Tensor&, const Tensor&,
                       Tensor&) {
  return at::empty({0}, query.options().dtype(at::kByte));
}

void paged_mla(const Tensor& query, const Tensor& key_cache, int64_t kv_heads, int64_t heads, double scale,
               const Tensor& block_table, const Tensor& context_lens, int64_t value_size, Tensor& out) {
  const char* name = "_npu_paged_attention_mla";
  check_types(name, query, key_cache, key_cache, heads, kv_heads);
  const int64_t size = head_size(query, heads);
  const KeyRows both = paged_keys(name, key_cache, key_cache, block_table, kv_heads, size, size);
  run_parts(name, query, heads, decode_parts(integers_of(context_lens), scale),
            [&](size_t sequence, const Part& part) {
              const Tensor key = both(sequence, part).first;
              return std::pair{key, key.narrow(-1, 0, value_size).contiguous()};
            },
            out);
}

Tensor& paged_v2(const Tensor& query, const Tensor& key_cache, const Tensor& block_table, c10::SymIntArrayRef context_lens,
                 const OptionalTensor& value_cache, const OptionalTensor& mask, int64_t kv_heads, int64_t heads, double scale,
                 int64_t mask_type, const OptionalTensor&, Tensor& out) {
  const char* name = "_npu_paged_attention_v2";
  TORCH_CHECK(is_given(value_cache), name, " needs value_cache");
  refuse_value(name, "mask_type " + std::to_string(mask_type), mask_type != 0 && mask_type != 2);
  check_types(name, query, key_cache, *value_cache, heads, kv_heads);
  std::vector<Part> parts = decode_parts(C10_AS_INTARRAYREF_SLOW(context_lens).vec(), scale);
  if (mask_type == 2) {  // ALiBi: [B, N, 1, S] or [N, 1, S]
    TORCH_CHECK(is_given(mask) && (mask->dim() == 4 || mask->dim() == 3) && mask->size(-3) == heads, name,
                ": mask_type 2 needs a mask of [batch, heads, 1, keys]");
    for (size_t i = 0; i < parts.size(); i++) {
      const Tensor own = mask->dim() == 4 ? (*mask)[mask->size(0) > 1 ? static_cast<int64_t>(i) : 0] : *mask;
      parts[i].options.added = own.slice(-1, 0, parts[i].k_rows).to(at::kFloat);
    }
  }
  run_parts(name, query, heads, parts,
            paged_keys(name, key_cache, *value_cache, block_table, kv_heads, head_size(query, heads), head_size(out, heads)),
            out);
  return out;
}

Tensor paged_v2_workspace(const Tensor& query, const Tensor&, const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                          const OptionalTensor&, int64_t, int64_t, double, int64_t, Tensor&) {
  return at::empty({0}, query.options().dtype(at::kByte));
}

// Several queries for each sequence; the mask has one row for each token (MASK_TYPE_SPEC).
void splitfuse(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
               const Tensor& context_lens, const Tensor& mask, const Tensor& seq_len, int64_t kv_heads, int64_t heads,
               double scale, Tensor& out) {
  const char* name = "_npu_paged_attention_splitfuse";
  check_types(name, query, key_cache, value_cache, heads, kv_heads);
  TORCH_CHECK_NOT_IMPLEMENTED(mask.dim() == 2 && mask.size(0) == query.size(0), "anabatic sim: atb::", name,
                              " with a mask of shape ", mask.sizes(), " is not simulated: it takes [tokens, keys]");
  std::vector<Part> parts = prefix_parts(name, integers_of(seq_len), integers_of(context_lens), scale);
  for (Part& part : parts) {
    TORCH_CHECK(mask.size(1) >= part.k_rows, name, ": mask ", mask.sizes(), " does not cover ", part.k_rows, " keys");
    part.options.hidden = Tensor();
    part.options.added = mask.narrow(0, part.q_from, part.q_rows).slice(1, 0, part.k_rows).to(at::kFloat);
  }
  run_parts(name, query, heads, parts,
            paged_keys(name, key_cache, value_cache, block_table, kv_heads, head_size(query, heads), head_size(out, heads)), out);
}

void splitfuse_v2(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                  const Tensor& context_lens, const Tensor& mask, const Tensor& seq_len, int64_t kv_heads, int64_t heads,
                  double scale, std::optional<int64_t> mask_type, Tensor& out) {
  const char* name = "_npu_paged_attention_splitfuse_v2";
  TORCH_CHECK(mask_type.value_or(5) == 5, "mask_type only supports MASK_TYPE_NORM_COMPRESS(5), but got: ", *mask_type);
  check_types(name, query, key_cache, value_cache, heads, kv_heads);
  check_triangle(name, mask);
  run_parts(name, query, heads, prefix_parts(name, integers_of(seq_len), integers_of(context_lens), scale),
            paged_keys(name, key_cache, value_cache, block_table, kv_heads, head_size(query, heads), head_size(out, heads)), out);
}

// Queries and keys of each sequence lie one after another. seq_len: [B], or [2, B] for queries and keys.
struct Dense {
  Lengths queries, keys;
};

Dense dense_lengths(const char* name, const Tensor& seq_len) {
  if (seq_len.dim() == 2) {
    TORCH_CHECK(seq_len.size(0) == 2, name, ": seq_len must be [batch] or [2, batch], got ", seq_len.sizes());
    return {integers_of(seq_len[0]), integers_of(seq_len[1])};
  }
  const Lengths lengths = integers_of(seq_len);
  return {lengths, lengths};
}

enum class Mask { None, Added, Triangle };

void flash(const char* name, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, Mask kind,
           const Dense& lengths, double scale, int64_t heads, int64_t kv_heads, const Tensor& out) {
  check_types(name, query, key, value, heads, kv_heads);
  const Tensor k = token_heads(name, "key", key, kv_heads), v = token_heads(name, "value", value, kv_heads);
  if (kind == Mask::Triangle) check_triangle(name, mask);
  std::vector<Part> parts;
  Lengths starts;
  int64_t q_from = 0, k_from = 0;
  for (size_t i = 0; i < lengths.queries.size(); i++) {
    const int64_t rows = lengths.queries[i], columns = lengths.keys[i];
    Part part{q_from, rows, columns, {scale, {}, {}, {}}};
    if (kind == Mask::Triangle) part.options.hidden = band(rows, columns, columns - rows, kFar, 0);
    if (kind == Mask::Added) {  // [S, S], [B, S, S] or [B, N, S, S]
      Tensor own = mask.dim() >= 3 ? mask[mask.size(0) > 1 ? static_cast<int64_t>(i) : 0] : mask;
      TORCH_CHECK(own.size(-2) >= rows && own.size(-1) >= columns, name, ": mask ", mask.sizes(), " does not cover ", rows, " x ",
                  columns, " scores");
      part.options.added = own.slice(-2, 0, rows).slice(-1, 0, columns).to(at::kFloat);
    }
    parts.push_back(part);
    starts.push_back(k_from);
    q_from += rows;
    k_from += columns;
  }
  TORCH_CHECK(k_from <= k.size(1), name, ": seq_len adds up to ", k_from, " keys, key has ", k.size(1));
  run_parts(name, query, heads, parts,
            [&](size_t i, const Part& part) {
              return std::pair{k.narrow(1, starts[i], part.k_rows).to(at::kFloat),
                               v.narrow(1, starts[i], part.k_rows).to(at::kFloat)};
            },
            out);
}

void flash_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, const Tensor& seq_len,
                     double scale, int64_t heads, int64_t kv_heads, Tensor& out) {
  const char* name = "_npu_flash_attention";
  flash(name, query, key, value, mask, Mask::Added, dense_lengths(name, seq_len), scale, heads, kv_heads, out);
}

void flash_unpad(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& seq_len, double scale, int64_t heads,
                 int64_t kv_heads, Tensor& out) {
  const char* name = "_npu_flash_attention_unpad";
  flash(name, query, key, value, {}, Mask::None, dense_lengths(name, seq_len), scale, heads, kv_heads, out);
}

void flash_unpad_v2(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& seq_len, double scale,
                    int64_t heads, int64_t kv_heads, std::optional<int64_t> kernel_type, Tensor& out) {
  const char* name = "_npu_flash_attention_unpad_v2";
  TORCH_CHECK(kernel_type.value_or(0) == 0 || *kernel_type == 2, "kernel_type only supports KERNELTYPE_DEFAULT(0) and "
              "KERNELTYPE_EXP_M8V2(2), but got: ", *kernel_type);
  flash(name, query, key, value, {}, Mask::None, dense_lengths(name, seq_len), scale, heads, kv_heads, out);
}

Tensor& flash_v2(const Tensor& query, const Tensor& key, const Tensor& value, c10::SymIntArrayRef seq_len,
                 const OptionalTensor& mask, const OptionalTensor&, int64_t, int64_t mask_type, double scale, int64_t heads,
                 int64_t kv_heads, Tensor& out) {
  const char* name = "_npu_flash_attention_v2";
  refuse_value(name, "mask_type " + std::to_string(mask_type), mask_type != 1 && mask_type != 2);
  TORCH_CHECK(is_given(mask), name, ": mask_type ", mask_type, " needs mask");
  const Lengths lengths = C10_AS_INTARRAYREF_SLOW(seq_len).vec();
  flash(name, query, key, value, *mask, Mask::Added, {lengths, lengths}, scale, heads, kv_heads, out);
  return out;
}

void flash_v3(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, const Tensor& seq_len,
              double scale, int64_t heads, int64_t kv_heads, std::optional<int64_t> mask_type, Tensor& out) {
  const char* name = "_npu_flash_attention_v3";
  TORCH_CHECK(mask_type.value_or(3) == 3, "mask_type only supports MASK_TYPE_NORM_COMPRESS, but got: ", *mask_type);
  flash(name, query, key, value, mask, Mask::Triangle, dense_lengths(name, seq_len), scale, heads, kv_heads, out);
}

void prefix(const char* name, const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
            const Lengths& queries, const Lengths& keys, int64_t kv_heads, int64_t heads, double scale, const Tensor& out) {
  check_types(name, query, key_cache, value_cache, heads, kv_heads);
  run_parts(name, query, heads, prefix_parts(name, queries, keys, scale),
            paged_keys(name, key_cache, value_cache, block_table, kv_heads, head_size(query, heads), head_size(out, heads)), out);
}

void flash_qlens(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                 const Tensor& mask, const Tensor& seq_len, const Tensor& context_lens, int64_t kv_heads, int64_t heads,
                 double scale, Tensor& out) {
  const char* name = "_npu_flash_attention_qlens";
  check_triangle(name, mask);
  prefix(name, query, key_cache, value_cache, block_table, integers_of(seq_len), integers_of(context_lens), kv_heads, heads,
         scale, out);
}

Tensor& flash_prefix_v2(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                        const Tensor& mask, c10::SymIntArrayRef seq_len, c10::SymIntArrayRef context_lens, const OptionalTensor&,
                        int64_t, int64_t mask_type, int64_t kv_heads, int64_t heads, double scale, Tensor& out) {
  const char* name = "_npu_flash_attention_prefix_v2";
  refuse_value(name, "mask_type " + std::to_string(mask_type), mask_type != 3);
  check_triangle(name, mask);
  prefix(name, query, key_cache, value_cache, block_table, C10_AS_INTARRAYREF_SLOW(seq_len).vec(),
         C10_AS_INTARRAYREF_SLOW(context_lens).vec(), kv_heads, heads, scale, out);
  return out;
}

Tensor& prefix_encoder_out(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table,
                           c10::SymIntArrayRef seqlen, c10::SymIntArrayRef kv_seqlen, int64_t heads, double scale,
                           int64_t kv_heads, const OptionalTensor& mask, const OptionalTensor& slopes,
                           std::optional<c10::string_view> mask_type, Tensor& output) {
  const char* name = "npu_self_attention_prefix_encoder";
  const std::string type(mask_type.value_or("mask_type_causal_mask"));
  refuse_value(name, "mask_type " + type, type != "mask_type_causal_mask" && type != "mask_type_norm_compress");
  refuse_tensors(name, {{"slopes", &slopes}});
  if (is_given(mask)) check_triangle(name, *mask);
  prefix(name, query, key, value, block_table, C10_AS_INTARRAYREF_SLOW(seqlen).vec(), C10_AS_INTARRAYREF_SLOW(kv_seqlen).vec(),
         kv_heads, heads, scale, output);
  return output;
}

Tensor prefix_encoder(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table,
                      c10::SymIntArrayRef seqlen, c10::SymIntArrayRef kv_seqlen, int64_t heads, double scale, int64_t kv_heads,
                      const OptionalTensor& mask, const OptionalTensor& slopes, std::optional<c10::string_view> mask_type) {
  Tensor output = at::empty(query.sizes(), query.options());
  return prefix_encoder_out(query, key, value, block_table, seqlen, kv_seqlen, heads, scale, kv_heads, mask, slopes, mask_type,
                            output);
}

}  // namespace

void register_atb_attention(torch::Library& atb) {
  atb.impl("_npu_paged_attention", TORCH_FN(paged_attention));
  atb.impl("_npu_paged_attention_get_workspace", TORCH_FN(paged_workspace));
  atb.impl("_npu_paged_attention_mla", TORCH_FN(paged_mla));
  atb.impl("_npu_paged_attention_v2.out", TORCH_FN(paged_v2));
  atb.impl("_npu_paged_attention_v2_get_workspace", TORCH_FN(paged_v2_workspace));
  atb.impl("_npu_paged_attention_splitfuse", TORCH_FN(splitfuse));
  atb.impl("_npu_paged_attention_splitfuse_v2", TORCH_FN(splitfuse_v2));
  atb.impl("_npu_flash_attention", TORCH_FN(flash_attention));
  atb.impl("_npu_flash_attention_unpad", TORCH_FN(flash_unpad));
  atb.impl("_npu_flash_attention_unpad_v2", TORCH_FN(flash_unpad_v2));
  atb.impl("_npu_flash_attention_v2.out", TORCH_FN(flash_v2));
  atb.impl("_npu_flash_attention_v3", TORCH_FN(flash_v3));
  atb.impl("_npu_flash_attention_qlens", TORCH_FN(flash_qlens));
  atb.impl("_npu_flash_attention_prefix_v2.out", TORCH_FN(flash_prefix_v2));
  atb.impl("npu_self_attention_prefix_encoder", TORCH_FN(prefix_encoder));
  atb.impl("npu_self_attention_prefix_encoder.out", TORCH_FN(prefix_encoder_out));
}

}  // namespace sim::infer
