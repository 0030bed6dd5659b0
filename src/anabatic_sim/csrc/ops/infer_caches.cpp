// Operators of torch_npu that write to caches of keys and values, or read from them.
//
// Semantics: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_scatter_pa_kv_cache.md, …-npu_scatter_nd_update.md,
// …-scatter_update.md, …-npu_kv_rmsnorm_rope_cache.md; ops-nn, index/scatter/docs/aclnnInplaceScatterUpdate.md and
// index/scatter_list/docs/aclnnScatterList.md; op-plugin's test_npu_gather_pa_kv_cache.py for pages beyond the table (zeros).
#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "infer.h"
#include "infer_register.h"

namespace sim::infer {

namespace {

using at::Tensor;

void store(const char* name, const char* what, const Tensor& x, const Tensor& cache, bool fractal,
           const std::vector<int64_t>& slots) {
  TORCH_CHECK(x.dim() == 3 && cache.dim() == 4, name, ": ", what, " must be [tokens, heads, D] and its cache have 4 dimensions, "
              "got ", x.sizes(), " and ", cache.sizes());
  TORCH_CHECK(static_cast<int64_t>(slots.size()) == x.size(0), name, ": slot_mapping has ", slots.size(), " numbers for ",
              x.size(0), " tokens");
  write_slots(name, x, cache, fractal ? PageLayout::Fractal : PageLayout::TokensFirst, slots);
}

void scatter_pa_kv(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache, const Tensor& slot_mapping,
                   const OptionalTensor& compress_lens, const OptionalTensor& compress_offsets, const OptionalTensor& seq_lens,
                   std::optional<c10::string_view> cache_mode) {
  const char* name = "npu_scatter_pa_kv_cache";
  refuse_tensors(name, {{"compress_lens", &compress_lens}, {"compress_seq_offsets", &compress_offsets}, {"seq_lens", &seq_lens}});
  const std::string mode(cache_mode.value_or("Norm"));
  TORCH_CHECK(mode == "Norm" || mode == "PA_NZ", name, ": cache_mode must be None, Norm or PA_NZ, got ", mode);
  const auto slots = integers_of(slot_mapping);
  store(name, "key", key, key_cache, mode == "PA_NZ", slots);
  store(name, "value", value, value_cache, mode == "PA_NZ", slots);
}

std::tuple<Tensor, Tensor> scatter_pa_kv_functional(
    const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping,
    const OptionalTensor& compress_lens, const OptionalTensor& compress_offsets, const OptionalTensor& seq_lens,
    std::optional<c10::string_view> cache_mode) {
  Tensor keys = key_cache.clone(), values = value_cache.clone();
  scatter_pa_kv(key, value, keys, values, slot_mapping, compress_lens, compress_offsets, seq_lens, cache_mode);
  return {keys, values};
}

Tensor& scatter_pa(const Tensor& key, const Tensor& slot_mapping, const OptionalTensor& compress_lens,
                   const OptionalTensor& compress_offsets, const OptionalTensor& seq_lens, Tensor& key_cache) {
  const char* name = "npu_scatter_pa_cache";
  refuse_tensors(name, {{"compress_lens", &compress_lens}, {"compress_seq_offsets", &compress_offsets}, {"seq_lens", &seq_lens}});
  store(name, "key", key, key_cache, false, integers_of(slot_mapping));
  return key_cache;
}

// Where the tokens of all sequences are: page and offset, page -1 for zeros.
std::vector<std::pair<int64_t, int64_t>> gathered_places(const char* name, const Tensor& block_tables, const Tensor& seq_lens,
                                                         const OptionalTensor& seq_offset, bool cumsum, int64_t block) {
  std::vector<int64_t> lengths = integers_of(seq_lens);
  if (cumsum) {
    for (size_t i = 0; i + 1 < lengths.size(); i++) lengths[i] = lengths[i + 1] - lengths[i];
    if (!lengths.empty()) lengths.pop_back();
  }
  const auto tables = page_tables(name, block_tables);
  const auto starts = is_given(seq_offset) ? integers_of(*seq_offset) : std::vector<int64_t>(lengths.size(), 0);
  TORCH_CHECK(tables.size() >= lengths.size() && starts.size() >= lengths.size(), name, ": ", lengths.size(), " sequences, but ",
              tables.size(), " rows of block_tables and ", starts.size(), " offsets");
  std::vector<std::pair<int64_t, int64_t>> places;
  for (size_t i = 0; i < lengths.size(); i++) {
    for (int64_t t = 0; t < lengths[i]; t++) {
      const size_t column = static_cast<size_t>(starts[i] / block + t / block);
      places.emplace_back(column < tables[i].size() ? tables[i][column] : -1, t % block);
    }
  }
  return places;
}

void gather_into(const char* name, const Tensor& cache, const std::vector<std::pair<int64_t, int64_t>>& places,
                 const Tensor& out) {
  TORCH_CHECK(cache.dim() == 4 && out.dim() == 3, name, ": a cache must have 4 dimensions and its result 3, got ", cache.sizes(),
              " and ", out.sizes());
  const bool fractal = cache.size(2) != out.size(1) || cache.size(3) != out.size(2);
  TORCH_CHECK(!fractal || cache.size(1) * cache.size(3) == out.size(1) * out.size(2), name, ": a cache of shape ", cache.sizes(),
              " does not hold ", out.size(1), " heads of ", out.size(2));
  const Tensor rows = fractal ? cache.permute({0, 2, 1, 3}) : cache;  // [n, block, ...]
  for (size_t i = 0; i < places.size() && static_cast<int64_t>(i) < out.size(0); i++) {
    Tensor row = out[static_cast<int64_t>(i)];
    const auto [page, offset] = places[i];
    if (page < 0 || page >= cache.size(0)) row.zero_();
    else row.copy_(rows[page][offset].reshape(row.sizes()));
  }
}

void gather_pa_kv(const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables, const Tensor& seq_lens,
                  Tensor& key, Tensor& value, const OptionalTensor& seq_offset, bool cumsum) {
  const char* name = "npu_gather_pa_kv_cache";
  TORCH_CHECK(key_cache.dim() == 4 && key.dim() == 3, name, ": key_cache must have 4 dimensions and key 3, got ",
              key_cache.sizes(), " and ", key.sizes());
  const bool fractal = key_cache.size(2) != key.size(1) || key_cache.size(3) != key.size(2);
  const auto places = gathered_places(name, block_tables, seq_lens, seq_offset, cumsum, key_cache.size(fractal ? 2 : 1));
  gather_into(name, key_cache, places, key);
  gather_into(name, value_cache, places, value);
}

std::tuple<Tensor, Tensor> gather_pa_kv_functional(const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
                                                   const Tensor& seq_lens, const Tensor& key, const Tensor& value,
                                                   const OptionalTensor& seq_offset, bool cumsum) {
  Tensor keys = key.clone(), values = value.clone();
  gather_pa_kv(key_cache, value_cache, block_tables, seq_lens, keys, values, seq_offset, cumsum);
  return {keys, values};
}

Tensor& scatter_nd_(Tensor& input, const Tensor& indices, const Tensor& updates) {
  const char* name = "npu_scatter_nd_update";
  TORCH_CHECK(indices.dim() >= 2 && indices.size(-1) <= input.dim(), name, ": indices must have 2 dimensions or more, and at "
              "most ", input.dim(), " numbers each, got ", indices.sizes());
  std::vector<int64_t> shape = indices.sizes().slice(0, indices.dim() - 1).vec();
  for (int64_t d = indices.size(-1); d < input.dim(); d++) shape.push_back(input.size(d));
  TORCH_CHECK(updates.sizes() == at::IntArrayRef(shape) && updates.scalar_type() == input.scalar_type(), name,
              ": updates must be ", input.dtype(), " ", at::IntArrayRef(shape), ", got ", updates.dtype(), " ", updates.sizes());
  c10::List<std::optional<Tensor>> where;
  for (const Tensor& index : indices.to(at::kLong).unbind(-1)) {
    TORCH_CHECK(index.numel() == 0 || index.min().item<int64_t>() >= 0, name, ": indices must not be negative");
    where.push_back(index);
  }
  return input.index_put_(where, updates);
}

Tensor scatter_nd(const Tensor& input, const Tensor& indices, const Tensor& updates) {
  Tensor result = input.clone();
  return scatter_nd_(result, indices, updates);
}

// x[i, …, at : at + L, …] = update[i] along `axis`, for the first dimension of x given by i.
void place(const char* name, const Tensor& x, int64_t at_index, const Tensor& update, int64_t axis) {
  TORCH_CHECK(at_index >= 0 && at_index + update.size(axis) <= x.size(axis), name, ": index ", at_index, " + ", update.size(axis),
              " lies beyond ", x.size(axis));
  x.narrow(axis, at_index, update.size(axis)).copy_(update);
}

Tensor& scatter_update_(Tensor& data, const Tensor& indices, const Tensor& updates, int64_t axis) {
  const char* name = "scatter_update";
  TORCH_CHECK(data.dim() == updates.dim() && data.dim() >= 2 && data.dim() <= 8, name, ": data and updates must have the same 2 "
              "to 8 dimensions, got ", data.sizes(), " and ", updates.sizes());
  TORCH_CHECK(data.scalar_type() == updates.scalar_type(), name, ": data is ", data.dtype(), " and updates ", updates.dtype());
  refuse_value(name, "indices of " + std::to_string(indices.dim()) + " dimensions", indices.dim() > 1);
  const int64_t dim = axis < 0 ? axis + data.dim() : axis;
  TORCH_CHECK(dim > 0 && dim < data.dim(), name, ": axis ", axis, " must not be the first one");
  const auto numbers = integers_of(indices);
  TORCH_CHECK(static_cast<int64_t>(numbers.size()) == updates.size(0) && updates.size(0) <= data.size(0), name, ": ",
              numbers.size(), " indices for ", updates.size(0), " updates of ", data.size(0), " rows");
  for (int64_t i = 0; i < updates.size(0); i++) place(name, data[i], numbers[i], updates[i], dim - 1);
  return data;
}

Tensor scatter_update(const Tensor& data, const Tensor& indices, const Tensor& updates, int64_t axis) {
  Tensor result = data.clone();
  return scatter_update_(result, indices, updates, axis);
}

void scatter_list_(at::TensorList input, const Tensor& indices, const Tensor& updates, const OptionalTensor& mask,
                   c10::string_view reduce, int64_t axis) {
  const char* name = "npu_scatter_list";
  refuse_value(name, "reduce " + std::string(reduce), reduce != "update");
  refuse_value(name, "indices of " + std::to_string(indices.dim()) + " dimensions", indices.dim() != 1);
  const auto numbers = integers_of(indices);
  const auto kept = is_given(mask) ? integers_of(*mask) : std::vector<int64_t>(input.size(), 1);
  TORCH_CHECK(numbers.size() == input.size() && kept.size() == input.size() &&
                  updates.size(0) == static_cast<int64_t>(input.size()), name, ": ", input.size(), " tensors, ", numbers.size(),
              " indices, ", kept.size(), " masks and ", updates.size(0), " updates");
  for (size_t i = 0; i < input.size(); i++) {
    if (kept[i] == 0) continue;
    const int64_t dim = axis < 0 ? axis + input[i].dim() : axis;
    place(name, input[i], numbers[i], updates[static_cast<int64_t>(i)], dim);
  }
}

std::vector<Tensor> scatter_list(at::TensorList input, const Tensor& indices, const Tensor& updates, const OptionalTensor& mask,
                                 c10::string_view reduce, int64_t axis) {
  std::vector<Tensor> results;
  for (const Tensor& tensor : input) results.push_back(tensor.clone());
  scatter_list_(results, indices, updates, mask, reduce, axis);
  return results;
}

// npu_kv_rmsnorm_rope_cache.
struct Normed {
  Tensor key, latent;  // what the caches get, [B, 1, S, D]; in float32
};

Normed norm_and_rotate(const Arguments& a) {
  const Tensor kv = a.tensor("kv"), gamma = a.tensor("gamma"), cos = a.tensor("cos"), sin = a.tensor("sin");
  TORCH_CHECK(kv.dim() == 4, "4D tensor expected for input kv");
  TORCH_CHECK(gamma.dim() == 1, "1D tensor expected for input gamma");
  TORCH_CHECK(cos.dim() == 4, "4D tensor expected for input cos");
  const int64_t rope = cos.size(3), normed = gamma.size(0);
  TORCH_CHECK(kv.size(1) == 1, a.name(), ": kv must be [batch, 1, tokens, D], got ", kv.sizes());
  if (!a.is_given("v")) {
    TORCH_CHECK(kv.size(3) == normed + rope, a.name(), ": kv has ", kv.size(3), " numbers, gamma ", normed, " and cos ", rope);
    return {rotate(split_pairs(kv.narrow(-1, normed, rope)), cos, sin, true),
            rms_norm(kv.narrow(-1, 0, normed), gamma, a.real("epsilon"))};
  }
  const Tensor whole = rms_norm(kv, gamma, a.real("epsilon"));
  return {at::cat({rotate(split_pairs(whole.narrow(-1, 0, rope)), cos, sin, true), whole.narrow(-1, rope, normed - rope)}, -1),
          a.tensor("v").to(at::kFloat)};
}

Tensor quantised(const Tensor& x, const OptionalTensor& scale, const Tensor& cache) {
  if (!is_given(scale)) return x.to(cache.scalar_type());
  return (x * scale->to(at::kFloat)).round().clamp(-128, 127).to(at::kChar);
}

// The slots of all tokens, by cache_mode.
std::vector<int64_t> slots_of(const Arguments& a, const std::string& mode, int64_t batch, int64_t tokens, int64_t block) {
  const auto index = integers_of(a.tensor("index"));
  if (mode.find("BLK") == std::string::npos) {
    TORCH_CHECK(static_cast<int64_t>(index.size()) == batch * tokens, a.name(), ": index must hold ", batch * tokens, " numbers");
    return index;
  }
  const int64_t pages = (tokens + block - 1) / block;
  TORCH_CHECK(static_cast<int64_t>(index.size()) == batch * pages, a.name(), ": index must hold ", batch * pages, " numbers");
  std::vector<int64_t> slots;
  for (int64_t b = 0; b < batch; b++) {
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t start = index[b * pages + t / block];
      slots.push_back(start < 0 ? -1 : start / block * block + t % block);
    }
  }
  return slots;
}

void store_normed(const Arguments& a, const std::string& mode, const Tensor& x, const Tensor& cache) {
  const int64_t batch = x.size(0), tokens = x.size(2), size = x.size(3);
  if (mode == "Norm") {
    TORCH_CHECK(cache.dim() == 4 && cache.size(0) == batch && cache.size(1) == 1 && cache.size(3) == size, a.name(),
                ": a cache of mode Norm must be [", batch, ", 1, length, ", size, "], got ", cache.sizes());
    const auto index = integers_of(a.tensor("index"));
    TORCH_CHECK(static_cast<int64_t>(index.size()) == batch * tokens, a.name(), ": index must hold ", batch * tokens, " numbers");
    for (int64_t i = 0; i < batch * tokens; i++) {
      if (index[i] < 0) continue;
      TORCH_CHECK(index[i] < cache.size(2), a.name(), ": index ", index[i], " lies beyond ", cache.size(2));
      cache[i / tokens][0][index[i]].copy_(x[i / tokens][0][i % tokens]);
    }
    return;
  }
  TORCH_CHECK(cache.dim() == 4 && cache.size(2) == 1 && cache.size(3) == size && cache.is_contiguous(), a.name(),
              ": a cache must be [blocks, block_size, 1, ", size, "], got ", cache.sizes());
  const int64_t block = cache.size(1), fraction = cache.scalar_type() == at::kChar ? 32 : 16;
  const bool fractal = mode.find("NZ") != std::string::npos;
  const Tensor pages = fractal ? cache.view({cache.size(0), size / fraction, block, fraction}) : cache;
  write_slots(a.name(), x.reshape({batch * tokens, 1, size}), pages, fractal ? PageLayout::Fractal : PageLayout::TokensFirst,
              slots_of(a, mode, batch, tokens, block));
}

// Updates both caches; returns what is_output_kv asks for.
std::pair<Tensor, Tensor> kv_rmsnorm_rope(const Arguments& a, const Tensor& k_cache, const Tensor& ckv_cache) {
  const std::string mode = a.text("cache_mode");
  TORCH_CHECK(mode == "Norm" || mode == "PA" || mode == "PA_BNSD" || mode == "PA_NZ" || mode == "PA_BLK_BNSD" ||
                  mode == "PA_BLK_NZ", a.name(), ": cache_mode ", mode, " is unknown");
  a.refuse({"k_rope_offset", "c_kv_offset", "k_cache_dtype", "ckv_cache_dtype"});
  const OptionalTensor key_scale = a.optional("k_rope_scale"), latent_scale = a.optional("c_kv_scale");
  const Normed done = norm_and_rotate(a);
  store_normed(a, mode, quantised(done.key, key_scale, k_cache), k_cache);
  store_normed(a, mode, quantised(done.latent, latent_scale, ckv_cache), ckv_cache);
  const auto type = a.tensor("kv").scalar_type();
  if (!a.flag("is_output_kv"))  // their memory is not written then
    return {at::zeros(done.key.sizes(), type), at::zeros(done.latent.sizes(), type)};
  return {done.key.to(type).contiguous(), done.latent.to(type).contiguous()};
}

void kv_rmsnorm_rope_cache(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const Tensor k_cache = a.tensor("k_cache"), ckv_cache = a.tensor("ckv_cache");
  const auto [key, latent] = kv_rmsnorm_rope(a, k_cache, ckv_cache);
  a.finish({k_cache, ckv_cache, key, latent});
}

void kv_rmsnorm_rope_cache_v2(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const auto [key, latent] = kv_rmsnorm_rope(a, a.tensor("k_cache"), a.tensor("ckv_cache"));
  a.finish({key, latent});
}

void kv_rmsnorm_rope_cache_v2_functional(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  const Tensor k_cache = a.tensor("k_cache").clone(), ckv_cache = a.tensor("ckv_cache").clone();
  const auto [key, latent] = kv_rmsnorm_rope(a, k_cache, ckv_cache);
  a.finish({key, latent, k_cache, ckv_cache});
}

}  // namespace

void register_caches(torch::Library& npu) {
  npu.impl("npu_scatter_pa_kv_cache", TORCH_FN(scatter_pa_kv));
  npu.impl("npu_scatter_pa_kv_cache_functional", TORCH_FN(scatter_pa_kv_functional));
  npu.impl("npu_scatter_pa_cache.value", TORCH_FN(scatter_pa));
  npu.impl("npu_gather_pa_kv_cache", TORCH_FN(gather_pa_kv));
  npu.impl("npu_gather_pa_kv_cache_functional", TORCH_FN(gather_pa_kv_functional));
  npu.impl("npu_scatter_nd_update", TORCH_FN(scatter_nd));
  npu.impl("npu_scatter_nd_update_", TORCH_FN(scatter_nd_));
  npu.impl("scatter_update", TORCH_FN(scatter_update));
  npu.impl("scatter_update_", TORCH_FN(scatter_update_));
  npu.impl("npu_scatter_list", TORCH_FN(scatter_list));
  npu.impl("npu_scatter_list_", TORCH_FN(scatter_list_));
  npu.impl("npu_kv_rmsnorm_rope_cache", torch::CppFunction::makeFromBoxedFunction<&kv_rmsnorm_rope_cache>());
  npu.impl("npu_kv_rmsnorm_rope_cache_v2", torch::CppFunction::makeFromBoxedFunction<&kv_rmsnorm_rope_cache_v2>());
  npu.impl("npu_kv_rmsnorm_rope_cache_v2_functional",
           torch::CppFunction::makeFromBoxedFunction<&kv_rmsnorm_rope_cache_v2_functional>());
}

}  // namespace sim::infer
