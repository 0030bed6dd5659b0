// The attention of npu_fused_infer_attention_score and its relatives: layouts, lengths, masks, pages, prefixes, paddings.
//
// Semantics: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_infer_attention_score.md and …_v2.md. The order
// scale, then pse_shift, then mask is that of the kernels (ops-transformer, incre_flash_attention_split_Bbn2s2_Us2.h and
// prompt_flash_attention_bnstilling_n_s_no_tail.h). The arithmetic is float32.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <map>

#include "infer.h"

namespace sim::infer {

using at::Tensor;

namespace {

struct Layouts {
  const char *query, *out;
};

// LAYOUT_MAP of torch_npu's op_plugin/meta/_meta_registrations.py.
const std::map<std::string, Layouts> kLayouts = {
    {"BSH", {"BSH", "BSH"}},        {"BSND", {"BSND", "BSND"}},      {"BNSD", {"BNSD", "BNSD"}},
    {"TND", {"TND", "TND"}},        {"NTD", {"NTD", "NTD"}},         {"BNSD_BSND", {"BNSD", "BSND"}},
    {"BSH_BNSD", {"BSH", "BNSD"}},  {"BSND_BNSD", {"BSND", "BNSD"}}, {"NTD_TND", {"NTD", "TND"}},
    {"BSH_NBSD", {"BSH", "NBSD"}},  {"BSND_NBSD", {"BSND", "NBSD"}}, {"BNSD_NBSD", {"BNSD", "NBSD"}},
    {"TND_NTD", {"TND", "NTD"}},    {"NSD", {"NSD", "NSD"}}};

const Layouts& layouts_of(const char* name, const std::string& layout, const Tensor& query) {
  const auto found = kLayouts.find(layout);
  TORCH_CHECK(found != kLayouts.end(), name, ": layout only support BSH, BSND, BNSD, TND, NTD, NSD, BNSD_BSND, BSH_BNSD, "
              "BSND_BNSD, NTD_TND, BSH_NBSD, BSND_NBSD, BNSD_NBSD, TND_NTD, but got ", layout);
  const int64_t dims = std::string_view(found->second.query).size() == 4 ? 4 : 3;
  TORCH_CHECK(query.dim() == dims, name, ": query's dim should be consistent with that of Layout: ", layout, " takes ", dims,
              " dimensions, got ", query.sizes());
  return found->second;
}

bool packed(const Layouts& layouts) { return layouts.query[0] == 'T' || std::string_view(layouts.query) == "NTD"; }

// One sequence: where its queries are, and how many of its keys count, from where.
struct Sequence {
  int64_t batch, q_from, q_rows, k_from, k_rows;
};

int64_t length_of(const char* name, const char* argument, const std::optional<std::vector<int64_t>>& lengths, int64_t batch,
                  int64_t batches, int64_t whole) {
  if (!lengths.has_value() || lengths->empty()) return whole;
  const int64_t count = static_cast<int64_t>(lengths->size());
  TORCH_CHECK(count == 1 || count >= batches, name, ": ", argument, " has ", count, " numbers for ", batches, " sequences");
  const int64_t length = (*lengths)[count == 1 ? 0 : static_cast<size_t>(batch)];
  TORCH_CHECK(length >= 0 && length <= whole, name, ": ", argument, " has ", length, ", the tensor holds ", whole);
  return length;
}

// The ends of packed sequences as starts and lengths.
std::vector<std::pair<int64_t, int64_t>> packed_parts(const char* name, const char* argument,
                                                      const std::optional<std::vector<int64_t>>& ends, int64_t whole) {
  TORCH_CHECK(ends.has_value() && !ends->empty(), name, ": layout TND needs actual_seq_lengths and actual_seq_lengths_kv");
  std::vector<std::pair<int64_t, int64_t>> parts;
  int64_t from = 0;
  for (const int64_t end : *ends) {
    TORCH_CHECK(end >= from && end <= whole, name, ": ", argument, " of layout TND must be cumulative and end within the ", whole,
                " tokens, got ", *ends);
    parts.emplace_back(from, end - from);
    from = end;
  }
  return parts;
}

int64_t padding_of(const char* name, const char* argument, const Tensor& tensor) {
  TORCH_CHECK(tensor.numel() == 1, name, ": ", argument, " must hold one number");
  return tensor.reshape({-1}).to(at::kLong)[0].item<int64_t>();
}

// Keys and values of one sequence, [M, K, D] in float32.
struct KeyValue {
  Tensor key, value;
};

class Call {
 public:
  explicit Call(const FusedInfer& call)
      : c_(call), layouts_(layouts_of(call.name, call.layout, call.query)), packed_(packed(layouts_)),
        paged_(is_given(call.block_table)), groups_(call.kv_heads == 0 ? call.heads : call.kv_heads) {}

  std::pair<Tensor, Tensor> run() {
    check();
    const Tensor q = whole_query();
    prepare_keys();
    Tensor out = at::zeros({q.size(0), q.size(1), q.size(2), value_size_}, q.options());
    Tensor lse = at::full({q.size(0), q.size(1), q.size(2), 1}, std::numeric_limits<float>::infinity());
    rows_ = q.size(2);
    for (const Sequence& s : sequences(q)) {
      if (s.q_rows == 0 || s.k_from < 0) continue;
      const int64_t b = packed_ ? 0 : s.batch;
      const KeyValue kv = keys_of(s);
      if (kv.key.size(1) == 0) continue;
      ScoreOptions options{c_.scale, hidden_of(s, kv.key.size(1)), added_of(s, kv.key.size(1)),
                           is_given(c_.sink) ? *c_.sink : Tensor()};
      const Attended result = attend(q[b].narrow(1, s.q_from, s.q_rows).to(at::kFloat), kv.key, kv.value, options);
      out[b].narrow(1, s.q_from, s.q_rows).copy_(result.out);
      lse[b].narrow(1, s.q_from, s.q_rows).copy_(result.lse);
    }
    if (!c_.with_lse) return {from_heads(out, layouts_.out), at::empty({0}, lse.options())};
    return {from_heads(out, layouts_.out), packed_ ? lse.squeeze(0).transpose(0, 1).contiguous() : lse};
  }

 private:
  void check() const {
    const char* name = c_.name;
    const auto type = c_.query.scalar_type();
    TORCH_CHECK(type == at::kHalf || type == at::kBFloat16, name,
                ": call aclnn failed, detail:EZ1001: query must be float16 or bfloat16, got ", c_.query.dtype());
    TORCH_CHECK(type == c_.key.scalar_type() && type == c_.value.scalar_type(), name,
                ": query, key and value must have one dtype, got ", c_.query.dtype(), ", ", c_.key.dtype(), ", ",
                c_.value.dtype());
    TORCH_CHECK(c_.heads > 0 && c_.heads % groups_ == 0, name, ": num_heads ", c_.heads,
                " is no multiple of num_key_value_heads ", groups_);
    TORCH_CHECK(is_given(c_.query_rope) == is_given(c_.key_rope), name,
                ": query_rope and key_rope must be given together");
    TORCH_CHECK(is_given(c_.key_prefix) == is_given(c_.value_prefix), name,
                ": key_shared_prefix and value_shared_prefix must be given together");
    const bool rope = is_given(c_.query_rope), padded = is_given(c_.query_padding) || is_given(c_.kv_padding);
    refuse_value(name, "query_padding_size or kv_padding_size and block_table, query_rope or packed sequences",
                 padded && (paged_ || rope || packed_));
    refuse_value(name, "query_padding_size or kv_padding_size and atten_mask or pse_shift",
                 padded && (is_given(c_.mask) || is_given(c_.pse)));
    refuse_value(name, "key_shared_prefix and block_table, query_rope, paddings or packed sequences",
                 is_given(c_.key_prefix) && (paged_ || rope || padded || packed_));
    refuse_value(name, "pse_shift and query_rope or packed sequences", is_given(c_.pse) && (rope || packed_));
    refuse_value(name, "learnable_sink in the layout " + c_.layout,
                 is_given(c_.sink) && c_.layout != "TND" && c_.layout != "NTD_TND");
    if (is_given(c_.sink))
      TORCH_CHECK(c_.sink->numel() == c_.heads, name, ": learnable_sink must hold one number per query head, got ",
                  c_.sink->sizes());
    check_mask();
  }

  void check_mask() const {
    const char* name = c_.name;
    TORCH_CHECK_NOT_IMPLEMENTED((c_.mode >= 0 && c_.mode <= 4) || c_.mode == 9, "anabatic sim: ", name, " with sparse_mode ",
                                c_.mode, " is not simulated");
    if (c_.mode >= 1) TORCH_CHECK(is_given(c_.mask), name, ": sparse_mode ", c_.mode, " needs atten_mask");
    if (c_.mode == 9)
      TORCH_CHECK(is_given(c_.query_rope), name, ": sparse_mode 9 needs query_rope and key_rope");
    if (!is_given(c_.mask)) return;
    const Tensor& mask = *c_.mask;
    TORCH_CHECK(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte || mask.scalar_type() == at::kChar, name,
                ": call aclnn failed, detail:EZ1001: attenMask must be bool, int8 or uint8, got ", mask.dtype());
    if (c_.mode < 2 || c_.mode == 9) return;
    TORCH_CHECK(mask.dim() >= 2 && mask.size(-1) == 2048 && mask.size(-2) == 2048 && mask.numel() == 2048 * 2048, name,
                ": sparse_mode ", c_.mode, " needs the compressed mask of shape [2048, 2048], got ", mask.sizes());
    static const Tensor upper = at::ones({2048, 2048}, at::kBool).triu(1);
    TORCH_CHECK_NOT_IMPLEMENTED(at::equal(mask.reshape({2048, 2048}).to(at::kBool), upper), "anabatic sim: ", name,
                                " with sparse_mode ", c_.mode,
                                " and an atten_mask other than the upper triangle is not simulated");
  }

  Tensor whole_query() const {
    Tensor q = to_heads(c_.query, layouts_.query, c_.heads);
    TORCH_CHECK(q.size(1) == c_.heads, c_.name, ": num_heads is ", c_.heads, ", query has ", q.size(1), " heads");
    if (!is_given(c_.query_rope)) return q;
    const Tensor rope = to_heads(*c_.query_rope, layouts_.query, c_.heads);
    TORCH_CHECK(rope.dim() == 4 && rope.sizes().slice(0, 3) == q.sizes().slice(0, 3), c_.name, ": query_rope ",
                c_.query_rope->sizes(), " does not match query ", c_.query.sizes());
    return at::cat({q, rope}, -1);
  }

  PageLayout page_layout(const Tensor& cache) const {
    if (cache.dim() == 3) return PageLayout::TokensFirst;
    TORCH_CHECK(cache.dim() == 4 || cache.dim() == 5, c_.name,
                ": when Page Attention enabled, value's dim should be 3/4/5, but got ", cache.dim());
    return cache.dim() == 4 ? PageLayout::HeadsFirst : PageLayout::Fractal;
  }

  void prepare_keys() {
    if (!paged_) {
      k_ = to_heads(c_.key, layouts_.query, groups_);
      v_ = to_heads(c_.value, layouts_.query, groups_);
      TORCH_CHECK(k_.dim() == 4 && v_.dim() == 4 && k_.size(1) == groups_ && v_.size(1) == groups_, c_.name,
                  ": num_key_value_heads is ", groups_, ", key is ", c_.key.sizes(), " and value ", c_.value.sizes());
      value_size_ = v_.size(3);
      if (is_given(c_.key_rope)) k_ = at::cat({k_, to_heads(*c_.key_rope, layouts_.query, groups_)}, -1);
      return;
    }
    TORCH_CHECK(c_.block_size > 0, c_.name, ": block_table needs block_size");
    TORCH_CHECK(c_.kv_lengths.has_value() && !c_.kv_lengths->empty(), c_.name, ": block_table needs actual_seq_lengths_kv");
    tables_ = page_tables(c_.name, *c_.block_table);
    const PageLayout layout = page_layout(c_.value);
    const int64_t block = c_.key.size(layout == PageLayout::TokensFirst ? 1 : layout == PageLayout::HeadsFirst ? 2 : 3);
    TORCH_CHECK(block == c_.block_size, c_.name, ": block_size is ", c_.block_size, ", a page of key ", c_.key.sizes(),
                " holds ", block, " tokens");
    value_size_ = layout == PageLayout::TokensFirst ? c_.value.size(2) / groups_
                  : layout == PageLayout::HeadsFirst ? c_.value.size(3) : c_.value.size(2) * c_.value.size(4);
  }

  std::vector<Sequence> sequences(const Tensor& q) const {
    std::vector<Sequence> found;
    if (packed_) {
      const auto queries = packed_parts(c_.name, "actual_seq_lengths", c_.query_lengths, q.size(2));
      const int64_t count = static_cast<int64_t>(queries.size());
      std::vector<std::pair<int64_t, int64_t>> keys;
      // With pages the numbers are lengths, without they are ends (torch_npu-npu_fused_infer_attention_score.md, TND).
      if (paged_) {
        for (int64_t b = 0; b < count; b++)
          keys.emplace_back(0, length_of(c_.name, "actual_seq_lengths_kv", c_.kv_lengths, b, count, paged_rows(b)));
      } else {
        keys = packed_parts(c_.name, "actual_seq_lengths_kv", c_.kv_lengths, k_.size(2));
      }
      TORCH_CHECK(queries.size() == keys.size(), c_.name, ": layout TND needs actual_seq_lengths and actual_seq_lengths_kv of "
                  "the same size, got ", queries.size(), " and ", keys.size());
      for (int64_t b = 0; b < count; b++)
        found.push_back({b, queries[b].first, queries[b].second, keys[b].first, keys[b].second});
      return found;
    }
    for (int64_t b = 0; b < q.size(0); b++) {
      const int64_t whole = paged_ ? paged_rows(b) : k_.size(2);
      // One query has no length of its own: programs pass anything then (torch_npu's test/npu/test_aclgraph_update.py: 100).
      const int64_t rows = q.size(2) == 1 ? 1 : length_of(c_.name, "actual_seq_lengths", c_.query_lengths, b, q.size(0), q.size(2));
      Sequence s{b, 0, rows, 0,
                 length_of(c_.name, "actual_seq_lengths_kv", c_.kv_lengths, b, q.size(0), whole)};
      if (is_given(c_.query_padding) && c_.query_lengths.has_value() && q.size(2) > 1) {
        s.q_from = q.size(2) - padding_of(c_.name, "query_padding_size", *c_.query_padding) - s.q_rows;
        TORCH_CHECK(s.q_from >= 0 && s.q_from + s.q_rows <= q.size(2), c_.name, ": query_padding_size does not fit");
      }
      if (is_given(c_.kv_padding) && c_.kv_lengths.has_value()) {
        const int64_t padding = std::max<int64_t>(0, padding_of(c_.name, "kv_padding_size", *c_.kv_padding));
        s.k_from = whole - padding - s.k_rows;
        TORCH_CHECK(s.k_from >= 0 || q.size(2) == 1, c_.name, ": kv_padding_size does not fit");  // one query: all zeros
      }
      found.push_back(s);
    }
    return found;
  }

  // The tokens that the pages of a sequence can hold.
  int64_t paged_rows(int64_t batch) const {
    TORCH_CHECK(batch < static_cast<int64_t>(tables_.size()), c_.name, ": block_table has ", tables_.size(), " rows, sequence ",
                batch, " has none");
    return static_cast<int64_t>(tables_[batch].size()) * c_.block_size;
  }

  KeyValue keys_of(const Sequence& s) const {
    if (paged_) {
      const auto& table = tables_[static_cast<size_t>(s.batch)];
      Tensor key = page_rows(c_.name, c_.key, page_layout(c_.key), groups_, table, s.k_from, s.k_rows);
      if (is_given(c_.key_rope))
        key = at::cat({key, page_rows(c_.name, *c_.key_rope, page_layout(*c_.key_rope), groups_, table, s.k_from, s.k_rows)}, -1);
      return {key, page_rows(c_.name, c_.value, page_layout(c_.value), groups_, table, s.k_from, s.k_rows)};
    }
    const int64_t b = packed_ ? 0 : s.batch;
    KeyValue kv{k_[b].narrow(1, s.k_from, s.k_rows).to(at::kFloat), v_[b].narrow(1, s.k_from, s.k_rows).to(at::kFloat)};
    if (!is_given(c_.key_prefix)) return kv;
    const Tensor key = to_heads(*c_.key_prefix, layouts_.query, groups_), value = to_heads(*c_.value_prefix, layouts_.query,
                                                                                            groups_);
    const int64_t rows = length_of(c_.name, "actual_shared_prefix_len", c_.prefix_length, 0, 1, key.size(2));
    return {at::cat({key[0].narrow(1, 0, rows).to(at::kFloat), kv.key}, 1),
            at::cat({value[0].narrow(1, 0, rows).to(at::kFloat), kv.value}, 1)};
  }

  // The part of a whole atten_mask (sparse_mode 0 and 1) that belongs to a sequence.
  Tensor own_mask(const Sequence& s, int64_t columns, bool single) const {
    Tensor mask = *c_.mask;
    if (mask.dim() == 4) {
      TORCH_CHECK(mask.size(1) == 1, c_.name, ": atten_mask ", mask.sizes(), " must have one head");
      mask = mask.select(1, 0);
    }
    if (mask.dim() == 3) mask = mask[mask.size(0) > 1 ? s.batch : 0];
    else if (single && mask.dim() == 2) mask = mask.narrow(0, mask.size(0) > 1 ? s.batch : 0, 1);
    TORCH_CHECK(mask.dim() == 2 && mask.size(0) >= s.q_rows && mask.size(1) >= columns, c_.name, ": atten_mask ",
                c_.mask->sizes(), " does not cover ", s.q_rows, " x ", columns, " scores");
    return mask.slice(0, 0, s.q_rows).slice(1, 0, columns).to(at::kBool);
  }

  // The mask of the last queries among themselves: [B, S, S], or one after another in one dimension.
  Tensor tree_mask(const Sequence& s, int64_t columns) const {
    TORCH_CHECK(s.q_rows <= columns, c_.name, ": sparse_mode 9 needs at least as many keys as queries");
    Tensor own;
    if (packed_) {
      int64_t from = 0, before = 0;
      for (int64_t b = 0; b < s.batch; b++) {
        const int64_t rows = (*c_.query_lengths)[b] - before;
        from += rows * rows;
        before = (*c_.query_lengths)[b];
      }
      TORCH_CHECK(c_.mask->dim() == 1 && c_.mask->numel() >= from + s.q_rows * s.q_rows, c_.name, ": sparse_mode 9 needs an "
                  "atten_mask of one dimension in the layout TND, got ", c_.mask->sizes());
      own = c_.mask->narrow(0, from, s.q_rows * s.q_rows).view({s.q_rows, s.q_rows});
    } else {
      TORCH_CHECK(c_.mask->dim() == 3 && c_.mask->size(1) >= s.q_rows, c_.name,
                  ": sparse_mode 9 needs an atten_mask of [B, S, S], got ", c_.mask->sizes());
      own = (*c_.mask)[s.batch].slice(0, 0, s.q_rows).slice(1, 0, s.q_rows);
    }
    return at::cat({at::zeros({s.q_rows, columns - s.q_rows}, at::kBool), own.to(at::kBool)}, 1);
  }

  Tensor hidden_of(const Sequence& s, int64_t columns) const {
    if (!is_given(c_.mask)) return {};
    if (c_.mode == 9) return tree_mask(s, columns);
    // One query without rope: sparse_mode, pre_tokens and next_tokens have no effect.
    const bool single = !packed_ && rows_ == 1 && !is_given(c_.query_rope);
    if (single && c_.mode >= 2) return {};
    const int64_t shift = columns - s.q_rows, far = std::numeric_limits<int32_t>::max();
    if (c_.mode == 2) return band(s.q_rows, columns, 0, far, 0);
    if (c_.mode == 3) return band(s.q_rows, columns, shift, far, 0);
    if (c_.mode == 4) return band(s.q_rows, columns, shift, c_.before, c_.after);
    const Tensor mask = own_mask(s, columns, single);
    if (single || c_.mode == 1 || (c_.before >= columns + s.q_rows && c_.after >= columns + s.q_rows)) return mask;
    return mask.logical_or(band(s.q_rows, columns, 0, c_.before, c_.after));
  }

  Tensor added_of(const Sequence& s, int64_t columns) const {
    if (!is_given(c_.pse)) return {};
    const Tensor& pse = *c_.pse;
    TORCH_CHECK(pse.dim() == 4 && pse.size(1) == c_.heads && pse.size(2) >= s.q_rows && pse.size(3) >= columns, c_.name,
                ": pse_shift ", pse.sizes(), " does not cover ", c_.heads, " x ", s.q_rows, " x ", columns, " scores");
    return pse[pse.size(0) > 1 ? s.batch : 0].slice(1, 0, s.q_rows).slice(2, 0, columns).to(at::kFloat);
  }

  const FusedInfer& c_;
  const Layouts& layouts_;
  const bool packed_, paged_;
  const int64_t groups_;
  int64_t value_size_ = 0, rows_ = 0;
  Tensor k_, v_;
  std::vector<std::vector<int64_t>> tables_;
};

}  // namespace

std::pair<Tensor, Tensor> fused_infer(const FusedInfer& call) { return Call(call).run(); }

std::pair<Tensor, Tensor> fused_infer_outputs(const char* name, const Tensor& query, const Tensor& value,
                                              const std::string& layout, bool paged, int64_t heads, int64_t kv_heads,
                                              bool with_lse) {
  TORCH_CHECK(heads > 0, name, ": num_heads should be greater than 0, but the actual value is ", heads);
  const Layouts& layouts = layouts_of(name, layout, query);
  const Tensor q = to_heads(query, layouts.query, heads);
  const int64_t groups = kv_heads == 0 ? heads : kv_heads;
  int64_t size = value.size(-1);
  if (value.dim() == 3 && (paged || std::string_view(layouts.query) == "BSH")) size = value.size(2) / groups;
  if (paged && value.dim() == 5) size = value.size(2) * value.size(4);
  if (size == 0 || q.size(3) == 0) size = q.size(3);
  const Tensor out = from_heads(at::empty({q.size(0), q.size(1), q.size(2), size}, query.options()), layouts.out);
  const auto wide = query.options().dtype(at::kFloat);
  if (!with_lse) return {out, at::empty({0}, wide)};
  if (packed(layouts)) return {out, at::empty({q.size(2), q.size(1), 1}, wide)};
  return {out, at::empty({q.size(0), q.size(1), q.size(2), 1}, wide)};
}

}  // namespace sim::infer
