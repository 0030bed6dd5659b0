// Products where one side is quantised: npu_weight_quant_batchmatmul (float x, integer weight) and npu_quant_matmul_dequant
// (float x that is quantised inside). Formulas from op-plugin's documentation and CANN's (ops-nn:
// matmul/weight_quant_batch_matmul_v2/docs, matmul/quant_matmul_dequant/docs).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>

#include <torch/library.h>

#include <limits>

#include "count.h"
#include "quant.h"

namespace sim::quant {

namespace {

// Scales of a weight (.., k, n): one, one per column, or one per group of rows and column.
Tensor per_weight(const char* name, const char* argument, const Tensor& scale, const Tensor& weight, int64_t group) {
  const int64_t rows = weight.size(-2), columns = weight.size(-1);
  if (scale.numel() == 1) return wide(scale).reshape({1, 1});
  if (group > 0) {
    QUANT_CHECK(scale.dim() >= 2 && scale.size(-2) == (rows + group - 1) / group && scale.size(-1) == columns, name, argument,
                " ", scale.sizes(), " must be (ceil(k / antiquant_group_size), n)");
    return wide(scale).repeat_interleave(group, -2).narrow(-2, 0, rows);
  }
  QUANT_CHECK(scale.numel() == columns && scale.size(-1) == columns, name, argument, " ", scale.sizes(),
              " does not fit weight ", weight.sizes());
  return wide(scale).reshape({1, columns});
}

Tensor weight_quant_batchmatmul(const Tensor& x, const Tensor& weight, const Tensor& scale, const OptionalTensor& offset,
                                const OptionalTensor& quant_scale, const OptionalTensor& quant_offset,
                                const OptionalTensor& bias, int64_t group, int64_t inner_precise,
                                std::optional<int64_t> weight_dtype) {
  const char* name = "npu_weight_quant_batchmatmul";
  absent(name, {{"weight_dtype", weight_dtype.has_value()}});
  TORCH_CHECK(x.dim() >= 2, "x shape do not support dim num less than 2, but it is ", x.dim());
  TORCH_CHECK(weight.dim() >= 2, "weight shape do not support dim num less than 2, but it is ", weight.dim());
  TORCH_CHECK(inner_precise == 0 || inner_precise == 1, "inner_precise only support 0 or 1. but is:", inner_precise);
  TORCH_CHECK(given(quant_scale) || !given(quant_offset),
              "Quantization parameters are incorrectly set, quant_offset cannot exist in isolation from quant_scale");
  QUANT_CHECK(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16, name, "x must be float16 or bfloat16, got ",
              x.dtype());
  TORCH_CHECK_NOT_IMPLEMENTED(weight.scalar_type() == at::kChar || weight.scalar_type() == at::kInt, "anabatic sim: ", name,
                              " with a weight of ", weight.dtype(), " is not simulated");
  const int64_t inner = x.size(-1);
  TORCH_CHECK(weight.scalar_type() == at::kInt || weight.size(-2) == inner,
              "The k of x and weight should be equal. but x_k_dim is ", inner, ", weight_k_dim is ", weight.size(-2));
  TORCH_CHECK(group == 0 || (group >= 32 && group <= inner - 1 && group % 32 == 0),
              "antiquant_group_size can be either 0 or a multiple of 32 within the range 32 to weight_k_dim - 1.");
  const Tensor numbers = unpack_matrix(name, weight, inner);
  const bool encoded = scale.scalar_type() == at::kLong;
  QUANT_CHECK(encoded || scale.scalar_type() == x.scalar_type(), name,
              "antiquant_scale must be int64 or have the dtype of x, got ", scale.dtype());
  QUANT_CHECK(
      !encoded || (weight.scalar_type() == at::kChar && x.scalar_type() == at::kHalf && group == 0 && !given(quant_scale)),
      name, "an int64 antiquant_scale needs a float16 x, an int8 weight, no antiquant_group_size and no quant_scale");
  QUANT_CHECK(!given(offset) ||
                  (offset->sizes() == scale.sizes() && offset->scalar_type() == (encoded ? at::kInt : scale.scalar_type())),
              name, "antiquant_offset ", given(offset) ? offset->sizes() : scale.sizes(),
              " must have the shape of antiquant_scale ", scale.sizes(),
              given(offset) ? " and its dtype, or int32 for int64" : "");

  OptionalTensor shift;
  if (given(offset)) shift = per_weight(name, "antiquant_offset", *offset, numbers, group);
  const Tensor factor = per_weight(name, "antiquant_scale", encoded ? scale_of(scale) : scale, numbers, group);
  // An encoded scale is applied to the result of the cube cores.
  const Tensor right = !encoded       ? antiquant(numbers, shift, factor, x.scalar_type())
                       : given(shift) ? wide(numbers) + *shift
                                      : wide(numbers);
  Tensor y = at::matmul(wide(x), right);
  if (encoded) y = y * factor;
  add_flops(2.0 * static_cast<double>(y.numel()) * static_cast<double>(inner));
  if (given(bias)) {
    const auto wanted = x.scalar_type() == at::kBFloat16 ? at::kFloat : at::kHalf;
    QUANT_CHECK(bias->scalar_type() == wanted && bias->numel() == y.size(-1), name, "bias must hold one ", wanted,
                " per column, got ", bias->sizes(), " of ", bias->dtype());
    y = y + wide(*bias).reshape({-1});
  }
  if (!given(quant_scale)) return y.to(x.scalar_type());
  const bool is_code = quant_scale->scalar_type() == at::kLong;
  QUANT_CHECK(is_code || quant_scale->scalar_type() == at::kFloat, name, "quant_scale must be int64 or float32, got ",
              quant_scale->dtype());
  const Tensor code = (is_code ? *quant_scale : encoded_scale(*quant_scale, quant_offset, false)).reshape({-1});
  QUANT_CHECK(code.numel() == 1 || code.numel() == y.size(-1), name, "quant_scale ", quant_scale->sizes(), " does not fit ",
              y.size(-1), " columns");
  return quantised(y * scale_of(code) + offset_of(code), Format::Int8);
}

struct Dynamically {
  const char* name;
  Tensor rows, scale;  // int8, and the scale of each row or of all

  // x is multiplied by the smoothing factors and quantised, with its own largest values where there is no x_scale.
  Dynamically(const char* operator_name, const Tensor& x, const OptionalTensor& x_scale, const OptionalTensor& smooth,
              std::optional<c10::string_view> quant_mode)
      : name(operator_name) {
    const c10::string_view mode = quant_mode.value_or("pertoken");
    QUANT_CHECK(mode == "pertoken" || mode == "pertensor", name, "quant_mode must be pertoken or pertensor, got ", mode);
    QUANT_CHECK(x.dim() == 2 && x.scalar_type() == at::kHalf, name, "x must be a float16 matrix, got ", x.sizes(), " of ",
                x.dtype());
    Tensor value = wide(x);
    if (given(smooth)) {
      QUANT_CHECK(smooth->dim() == 1 && smooth->size(0) == x.size(1), name, "smooth_scale ", smooth->sizes(),
                  " does not fit x ", x.sizes());
      value = value * wide(*smooth);
    }
    if (given(x_scale)) {
      QUANT_CHECK(x_scale->numel() == (mode == "pertensor" ? 1 : x.size(0)), name, "x_scale ", x_scale->sizes(),
                  " does not fit ", mode, " and x ", x.sizes());
      scale = wide(*x_scale).reshape({-1, 1});
    } else {
      absent(name, {{"quant_mode pertensor without x_scale", mode == "pertensor"}});
      scale = value.abs().amax(-1, true) / 127;
    }
    rows = quantised(value / scale, Format::Int8);
  }

  // The weight arrives as (n, k). An int64 weight_scale holds the bits of float32 weight_scale * x_scale.
  Tensor times(const Tensor& weight, const Tensor& weight_scale, int64_t from, int64_t size) const {
    const Tensor sum = wide(integer_product(name, rows.narrow(0, from, size), weight.t()));
    QUANT_CHECK(weight_scale.numel() == weight.size(0), name, "weight_scale ", weight_scale.sizes(), " does not fit weight ",
                weight.sizes());
    if (weight_scale.scalar_type() == at::kLong) return sum * scale_of(weight_scale);
    return sum * wide(weight_scale) * (scale.size(0) == 1 ? scale : scale.narrow(0, from, size));
  }
};

void check_encoded(const char* name, const Tensor& weight_scale, const OptionalTensor& x_scale,
                   std::optional<c10::string_view> mode) {
  QUANT_CHECK(weight_scale.scalar_type() == at::kFloat || weight_scale.scalar_type() == at::kLong, name,
              "weight_scale must be float32 or int64, got ", weight_scale.dtype());
  QUANT_CHECK(weight_scale.scalar_type() == at::kFloat || (given(x_scale) && mode.value_or("pertoken") == "pertensor"), name,
              "an int64 weight_scale needs x_scale and quant_mode pertensor");
}

Tensor quant_matmul_dequant(const Tensor& x, const Tensor& weight, const Tensor& weight_scale, const OptionalTensor& bias,
                            const OptionalTensor& x_scale, const OptionalTensor& x_offset, const OptionalTensor& smooth,
                            std::optional<c10::string_view> mode) {
  const char* name = "npu_quant_matmul_dequant";
  absent(name, {{"bias", given(bias)}, {"x_offset", given(x_offset)}});
  QUANT_CHECK(weight.scalar_type() == at::kChar && weight.dim() == 2, name, "quantized_weight must be an int8 matrix");
  check_encoded(name, weight_scale, x_scale, mode);
  const Dynamically left(name, x, x_scale, smooth, mode);
  return left.times(weight, weight_scale, 0, x.size(0)).to(x.scalar_type());
}

Tensor quant_grouped_matmul_dequant(const Tensor& x, const Tensor& weight, const Tensor& weight_scale, const Tensor& list,
                                    const OptionalTensor& bias, const OptionalTensor& x_scale, const OptionalTensor& x_offset,
                                    const OptionalTensor& smooth, std::optional<c10::string_view> mode) {
  const char* name = "npu_quant_grouped_matmul_dequant";
  absent(name, {{"bias", given(bias)}, {"x_offset", given(x_offset)}});
  QUANT_CHECK(weight.scalar_type() == at::kChar && weight.dim() == 3 && weight_scale.dim() == 2 &&
                  weight_scale.size(0) == weight.size(0),
              name, "quantized_weight must be int8 of three dimensions, with a row of weight_scale for each group");
  QUANT_CHECK(list.dim() == 1 && list.size(0) == weight.size(0), name, "group_list ", list.sizes(), " does not fit ",
              weight.size(0), " groups");
  check_encoded(name, weight_scale, x_scale, mode);
  const Dynamically left(name, x, x_scale, smooth, mode);
  Tensor y = at::full({x.size(0), weight.size(1)}, std::numeric_limits<double>::quiet_NaN(), x.options());
  for (const Group& group : groups_of(name, list, 0, x.size(0)))
    y.narrow(0, group.from, group.size)
        .copy_(left.times(weight[group.index], weight_scale[group.index], group.from, group.size));
  return y;
}

}  // namespace

void register_weight_products(torch::Library& npu) {
  npu.impl("npu_weight_quant_batchmatmul", TORCH_FN(weight_quant_batchmatmul));
  npu.impl("npu_quant_matmul_dequant", TORCH_FN(quant_matmul_dequant));
  npu.impl("npu_quant_grouped_matmul_dequant", TORCH_FN(quant_grouped_matmul_dequant));
}

}  // namespace sim::quant
