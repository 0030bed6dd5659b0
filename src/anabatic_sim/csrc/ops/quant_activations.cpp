// Activations between a product and a quantisation: npu_swiglu_quant, npu_dequant_swiglu_quant, npu_clipped_swiglu,
// npu_gelu_quant, npu_dequant_bias. Formulas from op-plugin's documentation and CANN's (ops-nn: quant/*/docs,
// activation/*/docs).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "quant.h"

namespace sim::quant {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The row of a table of scales that belongs to a group; one row, or one number, stands for all.
Tensor row_of(const Tensor& table, int64_t group) {
  if (table.dim() == 1) return table.size(0) == 1 ? wide(table) : wide(table[group]).reshape({1});
  return wide(table[table.size(0) == 1 ? 0 : group]);
}

void check_table(const char* name, const char* argument, const OptionalTensor& table, int64_t groups, int64_t width) {
  if (!given(table)) return;
  const bool vector = table->dim() == 1 && (table->size(0) == groups || table->size(0) == 1);
  const bool matrix = table->dim() == 2 && table->size(0) == groups && table->size(1) == width;
  QUANT_CHECK(vector || matrix, name, argument, " ", table->sizes(), " does not fit ", groups, " groups of width ", width);
}

std::vector<Group> groups_or_all(const char* name, const OptionalTensor& index, int64_t type, int64_t rows) {
  if (given(index)) return groups_of(name, *index, type, rows);
  return {{0, 0, rows}};
}

// swish of one half times the other; the static form adds offsets, the dynamic one multiplies by 127 (int4: 7) over the largest
// value of the row, and returns that factor (ops-nn, quant/swi_glu_quant/docs/aclnnSwiGluQuantV2.md).
std::tuple<Tensor, Tensor> swiglu_quant(const Tensor& x, const OptionalTensor& smooth, const OptionalTensor& offsets,
                                        const OptionalTensor& index, bool left, int64_t mode, int64_t list_type,
                                        std::optional<at::ScalarType> dtype) {
  const char* name = "npu_swiglu_quant";
  TORCH_CHECK(mode == 0 || mode == 1, "quant_mode only support 0(static) or 1(dynamic), but got ", mode);
  TORCH_CHECK(list_type == 0 || list_type == 1, "group_list_type only support 0(cumsum) or 1(count), but got ", list_type);
  TORCH_CHECK(!dtype.has_value() || *dtype == at::kChar || *dtype == at::ScalarType::QUInt4x2,
              "dtype must be torch.int8 for int8 or torch.quint4x2 for int4");
  const Format format = dtype.has_value() && *dtype != at::kChar ? Format::Int4 : Format::Int8;
  const int64_t width = x.size(-1) / 2;
  TORCH_CHECK(x.size(-1) <= 8192, "x last dim size should not be larger than 8192, but got ", x.size(-1));
  TORCH_CHECK(x.size(-1) % 2 == 0, "x last dim size should be even");
  TORCH_CHECK(format != Format::Int4 || x.size(-1) % 4 == 0,
              "x shape last dim must be divded by 4 when dst_type is torch.quint4x2, but got ", x.size(-1));
  TORCH_CHECK(mode != 0 || given(smooth) == given(offsets),
              "smooth_scales and offsets should have the same shape when quant_mode is 0");
  const int64_t groups = given(index) ? index->size(0) : 1;
  check_table(name, "smooth_scales", smooth, groups, width);
  check_table(name, "offsets", mode == 0 ? offsets : std::nullopt, groups, width);

  const auto halves = wide(x).reshape({-1, 2 * width}).chunk(2, -1);
  Tensor value = at::silu(halves[left ? 0 : 1]) * halves[left ? 1 : 0];
  for (const Group& group : groups_or_all(name, index, list_type, value.size(0))) {
    const Tensor rows = value.narrow(0, group.from, group.size);
    if (given(smooth)) rows.mul_(row_of(*smooth, group.index));
    if (given(offsets) && mode == 0) rows.add_(row_of(*offsets, group.index));
  }
  Tensor factor = at::zeros({value.size(0)}, value.options());
  if (mode == 1) {
    factor = largest(format) / value.abs().amax(-1);
    value = value * factor.unsqueeze(-1);
  }
  auto shape = x.sizes().vec();
  shape.pop_back();
  const Tensor y = quantised(value, format, at::kChar);
  factor = factor.reshape(shape);
  shape.push_back(y.size(-1));
  return {y.reshape(shape), factor};
}

struct Glu {
  int64_t mode;  // swiglu_mode
  double limit, alpha, bias;
  bool left;

  Tensor operator()(const Tensor& value) const {
    const auto halves = value.chunk(2, -1);
    const Tensor act = mode == 1 ? value.slice(-1, 0, std::nullopt, 2) : halves[left ? 0 : 1];
    const Tensor gate = mode == 1 ? value.slice(-1, 1, std::nullopt, 2) : halves[left ? 1 : 0];
    if (mode == 0) return at::silu(act) * gate;
    const Tensor clamped = act.clamp_max(limit);
    return clamped * at::sigmoid(clamped * alpha) * (gate.clamp(-limit, limit) + bias);
  }
};

struct Dequant {
  OptionalTensor weight_scale, activation_scale, bias;

  Tensor operator()(const Tensor& x, const Group& group) const {
    if (x.scalar_type() != at::kInt) return wide(x);
    const bool whole = given(bias) && bias->scalar_type() == at::kInt;
    const Tensor sum = whole ? x + row(*bias, group.index, at::kInt) : x;
    Tensor value = wide(sum) * row(*weight_scale, group.index, at::kFloat);
    if (given(activation_scale)) value = value * wide(activation_scale->reshape({-1, 1}).narrow(0, group.from, group.size));
    return given(bias) && !whole ? value + row(*bias, group.index, at::kFloat) : value;
  }

 private:
  static Tensor row(const Tensor& table, int64_t group, at::ScalarType dtype) {
    return (table.dim() == 1 ? table : table[group]).to(dtype);
  }
};

// Static: out / quant_scale + quant_offset; dynamic: out * quant_scale, then the scale of each row is max / 127. Groups come as
// sizes; rows behind them are not written on hardware, here they are 0 with a scale that is not a number.
std::tuple<Tensor, Tensor> dequant_swiglu_quant(const Tensor& x, const OptionalTensor& weight_scale,
                                                const OptionalTensor& activation_scale, const OptionalTensor& bias,
                                                const OptionalTensor& quant_scale, const OptionalTensor& quant_offset,
                                                const OptionalTensor& index, bool left, int64_t mode,
                                                std::optional<int64_t> dtype, std::optional<int64_t> round_mode,
                                                std::optional<int64_t> dim, int64_t glu_mode, double limit, double alpha,
                                                double glu_bias) {
  const char* name = "npu_dequant_swiglu_quant";
  TORCH_CHECK(x.dim() > 1, "x dim should larger than 1");
  TORCH_CHECK(mode == 0 || mode == 1, "quant_mode only support 0 or 1, but got", mode);
  TORCH_CHECK(glu_mode >= 0 && glu_mode <= 2, "swiglu_mode only support 0, 1 or 2, but got ", glu_mode);
  TORCH_CHECK(std::isfinite(limit) && limit > 0, "clamp_limit should be positive finite");
  TORCH_CHECK(std::isfinite(alpha), "glu_alpha should be finite");
  TORCH_CHECK(std::isfinite(glu_bias), "glu_bias should be finite");
  TORCH_CHECK(x.size(-1) % 2 == 0, "x last dim should be even");
  QUANT_CHECK(format_of(name, "dst_type", dtype) == Format::Int8, name, "dst_type must be int8");
  absent(name, {{"round_mode", round_mode.value_or(0) != 0}, {"activate_dim", dim.value_or(-1) != -1 && *dim != x.dim() - 1}});
  const bool integers = x.scalar_type() == at::kInt;
  QUANT_CHECK(integers || x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16, name,
              "x must be int32, float16 or bfloat16, got ", x.dtype());
  QUANT_CHECK(integers == given(weight_scale), name, "weight_scale is needed for an int32 x, and for no other");
  QUANT_CHECK(integers || (!given(activation_scale) && !given(bias)), name, "activation_scale and bias need an int32 x");
  QUANT_CHECK(!given(index) || (!given(bias) && !given(quant_offset)) || mode == 1, name,
              "with group_index, bias and quant_offset must be None");

  const Tensor flat = x.reshape({-1, x.size(-1)});
  const int64_t rows = flat.size(0), width = flat.size(1) / 2, groups = given(index) ? index->size(0) : 1;
  check_table(name, "quant_scale", quant_scale, groups, width);
  QUANT_CHECK(!integers || weight_scale->dim() == 1 || weight_scale->size(0) == groups, name, "weight_scale ",
              weight_scale->sizes(), " does not fit ", groups, " groups");
  const Glu glu{glu_mode, limit, alpha, glu_bias, left};
  // "bias and quant_offset have no effect" in the dynamic form with groups (op-plugin docs).
  const Dequant dequant{weight_scale, activation_scale, given(index) ? std::nullopt : bias};
  Tensor y = at::zeros({rows, width}, x.options().dtype(at::kChar));
  Tensor scale = at::full({rows}, mode == 1 ? kNan : 0.0, x.options().dtype(at::kFloat));
  for (const Group& group : groups_or_all(name, index, 1, rows)) {
    if (group.size == 0) continue;
    Tensor value = glu(dequant(flat.narrow(0, group.from, group.size), group));
    if (mode == 1) {
      if (given(quant_scale)) value = value * row_of(*quant_scale, group.index);
      const Dynamic result = dynamic_rows(value, Format::Int8);
      y.narrow(0, group.from, group.size).copy_(result.y);
      scale.narrow(0, group.from, group.size).copy_(result.scale);
    } else {
      if (given(quant_scale)) value = value / row_of(*quant_scale, group.index);
      if (given(quant_offset)) value = value + row_of(*quant_offset, group.index);
      y.narrow(0, group.from, group.size).copy_(quantised(value, Format::Int8));
    }
  }
  auto shape = x.sizes().vec();
  shape.pop_back();
  scale = scale.reshape(shape);
  shape.push_back(width);
  return {y.reshape(shape), scale};
}

// x is seen as (before dim, from dim on); its rows beyond the sum of group_index are not written on hardware, here they are not
// numbers. Pairs are neighbours (interleaved) or the two halves.
Tensor clipped_swiglu(const Tensor& x, const OptionalTensor& index, int64_t dim, double alpha, double limit, double bias,
                      bool interleaved) {
  const char* name = "npu_clipped_swiglu";
  const int64_t axis = dim < 0 ? dim + x.dim() : dim;
  QUANT_CHECK(x.dim() > 1 && axis >= 0 && axis < x.dim() && x.size(axis) % 2 == 0, name, "dimension ", dim, " of x ", x.sizes(),
              " must exist and be even");
  auto shape = x.sizes().vec();
  int64_t before = 1;
  for (int64_t i = 0; i < axis; i++) before *= shape[static_cast<size_t>(i)];
  shape[static_cast<size_t>(axis)] /= 2;
  const Tensor flat = wide(x).reshape({before, before == 0 ? 0 : x.numel() / before});
  Tensor y = at::full({before, flat.size(1) / 2}, kNan, flat.options());
  int64_t rows = before;
  if (given(index)) {
    QUANT_CHECK(index->dim() == 1 && index->scalar_type() == at::kLong, name, "group_index must be a vector of int64");
    rows = index->sum().item<int64_t>();
    QUANT_CHECK(rows >= 0 && rows <= before, name, "group_index sums to ", rows, ", x has ", before, " rows");
  }
  const Glu glu{interleaved ? 1 : 2, limit, alpha, bias, true};
  y.narrow(0, 0, rows).copy_(glu(flat.narrow(0, 0, rows)));
  return y.reshape(shape).to(x.scalar_type());
}

// ops-nn, activation/gelu_quant/docs/aclnnGeluQuant.md.
std::tuple<Tensor, Tensor> gelu_quant(const Tensor& x, const OptionalTensor& scale, const OptionalTensor& offset,
                                      c10::string_view approximate, c10::string_view mode, std::optional<int64_t> dtype,
                                      c10::string_view round_mode) {
  const char* name = "npu_gelu_quant";
  QUANT_CHECK(approximate == "none" || approximate == "tanh", name, "approximate must be none or tanh, got ", approximate);
  QUANT_CHECK(mode == "static" || mode == "dynamic", name, "quant_mode must be static or dynamic, got ", mode);
  QUANT_CHECK(round_mode == "rint", name, "round_mode must be rint for int8, got ", round_mode);
  QUANT_CHECK(format_of(name, "dst_type", dtype) == Format::Int8, name, "dst_type must be int8");
  QUANT_CHECK(mode == "dynamic" || given(scale), name, "quant_mode static needs input_scale");
  for (const auto* table : {&scale, &offset})
    QUANT_CHECK(!given(*table) || (*table)->numel() == 1 || (*table)->size(-1) == x.size(-1), name,
                "input_scale or input_offset ", given(*table) ? (*table)->sizes() : x.sizes(), " does not fit x ", x.sizes());
  Tensor value = at::gelu(wide(x), approximate);
  if (given(scale)) value = value * wide(*scale);
  if (mode == "dynamic") {
    const Dynamic result = dynamic_rows(value, Format::Int8);
    return {result.y, result.scale};
  }
  if (given(offset)) value = value + wide(*offset);
  return {quantised(value, Format::Int8), Tensor()};
}

// (x + int32 bias) * weight_scale * activation_scale + float bias (ops-nn, quant/dequant_bias/docs/aclnnDequantBias.md).
Tensor dequant_bias(const Tensor& x, const Tensor& weight_scale, const OptionalTensor& activation_scale,
                    const OptionalTensor& bias, std::optional<at::ScalarType> dtype) {
  const char* name = "npu_dequant_bias";
  const auto wanted = dtype.value_or(at::kHalf);
  TORCH_CHECK(wanted == at::kHalf || wanted == at::kBFloat16, "The dtype should be half or bfloat16");
  QUANT_CHECK(x.scalar_type() == at::kInt && x.dim() == 2, name, "x must be an int32 matrix, got ", x.sizes(), " of ",
              x.dtype());
  QUANT_CHECK(weight_scale.dim() == 1 && weight_scale.size(0) == x.size(1), name, "weight_scale ", weight_scale.sizes(),
              " does not fit x ", x.sizes());
  QUANT_CHECK(!given(activation_scale) || (activation_scale->dim() == 1 && activation_scale->size(0) == x.size(0)), name,
              "activation_scale does not fit x ", x.sizes());
  QUANT_CHECK(!given(bias) || (bias->dim() == 1 && bias->size(0) == x.size(1)), name, "bias does not fit x ", x.sizes());
  return Dequant{weight_scale, activation_scale, bias}(x, {0, 0, x.size(0)}).to(wanted);
}

}  // namespace

void register_activations(torch::Library& npu) {
  npu.impl("npu_swiglu_quant", TORCH_FN(swiglu_quant));
  npu.impl("npu_dequant_swiglu_quant", TORCH_FN(dequant_swiglu_quant));
  npu.impl("npu_clipped_swiglu", TORCH_FN(clipped_swiglu));
  npu.impl("npu_gelu_quant", TORCH_FN(gelu_quant));
  npu.impl("npu_dequant_bias", TORCH_FN(dequant_bias));
}

}  // namespace sim::quant
