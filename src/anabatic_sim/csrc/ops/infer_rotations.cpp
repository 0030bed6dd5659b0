// Rotary positions of inference: npu_interleave_rope, npu_mrope.
//
// Semantics: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_interleave_rope.md and …-npu_mrope.md.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include <numeric>

#include "infer.h"
#include "infer_register.h"

namespace sim::infer {

namespace {

using at::Tensor;

Tensor interleave_rope(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const char* name = "npu_interleave_rope";
  TORCH_CHECK(x.dim() == 4 && cos.dim() == 4 && cos.sizes() == sin.sizes() && x.size(3) == 64 && cos.size(3) == 64 &&
                  cos.size(1) == 1, name, ": x must be [B, N, S, 64], cos and sin [B, 1, S or 1, 64], got ", x.sizes(), ", ",
              cos.sizes(), " and ", sin.sizes());
  TORCH_CHECK(x.scalar_type() == cos.scalar_type() && x.scalar_type() == sin.scalar_type(), name,
              ": x, cos and sin must have one dtype, got ", x.dtype(), ", ", cos.dtype(), " and ", sin.dtype());
  return rotate(split_pairs(x), cos, sin, true).to(x.scalar_type());
}

// [T, rotary / 2]: the columns of each section come from the row of positions that the section belongs to.
Tensor merge_sections(const Tensor& x, const std::vector<int64_t>& sections, bool interleaved) {
  if (!interleaved) {
    std::vector<Tensor> parts;
    int64_t from = 0;
    for (size_t i = 0; i < sections.size(); i++) {
      parts.push_back(x[static_cast<int64_t>(i)].narrow(-1, from, sections[i]));
      from += sections[i];
    }
    return at::cat(parts, -1);
  }
  Tensor merged = x[0].clone();
  for (const int64_t row : {1, 2}) {
    const int64_t end = sections[1] * 3;
    merged.slice(-1, row, end, 3).copy_(x[row].slice(-1, row, end, 3));
  }
  return merged;
}

std::tuple<Tensor, Tensor> mrope(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& cos_sin_cache,
                                 int64_t head_size, at::OptionalIntArrayRef mrope_section,
                                 std::optional<c10::string_view> rotary_mode, std::optional<c10::string_view> cache_mode) {
  const char* name = "npu_mrope";
  const std::string rotary(rotary_mode.value_or("half")), cache(cache_mode.value_or("default"));
  // The documentation says interleaved, torch_npu takes interleave (RopeWithSinCosCacheKernelNpuOpApi.cpp).
  TORCH_CHECK(rotary == "half" || rotary == "interleave", "rotary_mode only support half or interleave, got ", rotary);
  TORCH_CHECK(cache == "default" || cache == "interleave", "cache_mode only support default or interleave, got ", cache);
  TORCH_CHECK(query.dim() == 2 && key.dim() == 2 && cos_sin_cache.dim() == 2, name,
              ": query, key and cos_sin_cache must have 2 dimensions, got ", query.sizes(), ", ", key.sizes(), " and ",
              cos_sin_cache.sizes());
  TORCH_CHECK(query.scalar_type() == key.scalar_type() && query.scalar_type() == cos_sin_cache.scalar_type(), name,
              ": query, key and cos_sin_cache must have one dtype, got ", query.dtype(), ", ", key.dtype(), " and ",
              cos_sin_cache.dtype());
  const int64_t rotary_size = cos_sin_cache.size(1);
  TORCH_CHECK(rotary_size <= head_size && query.size(1) % head_size == 0 && key.size(1) % head_size == 0, name, ": head_size ",
              head_size, " does not fit cos_sin_cache ", cos_sin_cache.sizes(), ", query ", query.sizes(), " and key ",
              key.sizes());
  std::vector<int64_t> sections = mrope_section.has_value() ? mrope_section->vec() : std::vector<int64_t>{};
  if (std::accumulate(sections.begin(), sections.end(), int64_t{0}) == 0) sections.clear();
  const Tensor rows = cos_sin_cache.index({positions.to(at::kLong)}).to(at::kFloat);  // [T, D] or [M, T, D]
  Tensor cos = rows.narrow(-1, 0, rotary_size / 2), sin = rows.narrow(-1, rotary_size / 2, rotary_size / 2);
  if (sections.empty()) {
    TORCH_CHECK(positions.dim() == 1, name, ": without mrope_section positions must have 1 dimension, got ", positions.sizes());
  } else {
    TORCH_CHECK(positions.dim() == 2 && positions.size(0) == static_cast<int64_t>(sections.size()) &&
                    (sections.size() == 3 || (sections.size() == 4 && cache == "default")), name, ": mrope_section has ",
                sections.size(), " parts, positions are ", positions.sizes());
    TORCH_CHECK(std::accumulate(sections.begin(), sections.end(), int64_t{0}) == rotary_size / 2, name,
                ": mrope_section must add up to ", rotary_size / 2);
    cos = merge_sections(cos, sections, cache == "interleave");
    sin = merge_sections(sin, sections, cache == "interleave");
  }
  const bool halves = rotary == "half";
  auto wide = [&](const Tensor& x) { return (halves ? x.repeat({1, 2}) : x.repeat_interleave(2, 1)).unsqueeze(1); };
  auto turned = [&](const Tensor& x) {
    const Tensor heads = x.unflatten(1, {-1, head_size});
    TORCH_CHECK(heads.size(0) == cos.size(0), name, ": ", cos.size(0), " positions for ", heads.size(0), " tokens");
    const Tensor rotated = rotate(heads.narrow(-1, 0, rotary_size), wide(cos), wide(sin), halves).to(x.scalar_type());
    return at::cat({rotated, heads.narrow(-1, rotary_size, head_size - rotary_size)}, -1).flatten(1);
  };
  return {turned(query), turned(key)};
}

}  // namespace

void register_rotations(torch::Library& npu) {
  npu.impl("npu_interleave_rope", TORCH_FN(interleave_rope));
  npu.impl("npu_mrope", TORCH_FN(mrope));
}

}  // namespace sim::infer
