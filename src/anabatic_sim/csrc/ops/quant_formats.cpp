// From floats to integers with given scales, and back: npu_quantize, npu_anti_quant, npu_group_quant, npu_quant_scatter, the
// packing of int4 and the encoding of scales. Formulas from op-plugin's documentation (docs/zh/custom_APIs/torch_npu).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/round.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/constant_pad_nd.h>

#include <torch/library.h>

#include <tuple>

#include "quant.h"

namespace sim::quant {

namespace {

void check_float(const char* name, const char* argument, const Tensor& x) {
  QUANT_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16, name, argument,
              " must be float32, float16 or bfloat16, got ", x.dtype());
}

// A vector along one axis of x, or one number, or a tensor that is 1 on all other axes.
Tensor along(const char* name, const char* argument, const Tensor& given_one, const Tensor& x, int64_t axis) {
  const int64_t dim = axis < 0 ? axis + x.dim() : axis;
  QUANT_CHECK(dim >= 0 && dim < x.dim(), name, "axis ", axis, " is no dimension of ", x.sizes());
  if (given_one.numel() == 1) return wide(given_one).reshape({1});
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[static_cast<size_t>(dim)] = x.size(dim);
  const bool fits = given_one.dim() == 1 || given_one.sizes().equals(shape);
  QUANT_CHECK(fits && given_one.numel() == x.size(dim), name, argument, " ", given_one.sizes(), " does not fit dimension ", dim,
              " of ", x.sizes());
  return wide(given_one).reshape(shape);
}

// div_mode: round(x / scales + zero_points), any axis, int8, uint8 or int32; else round(x * scales + zero_points), one of the
// last two axes, int8 or int4.
Tensor quantize(const Tensor& x, const Tensor& scales, const OptionalTensor& points, int64_t dtype, int64_t axis,
                bool divides) {
  const char* name = "npu_quantize";
  check_float(name, "input", x);
  Format format = format_of(name, "dtype", dtype);
  if (divides) {
    QUANT_CHECK(format != Format::Int4, name, "dtype must be qint8, quint8 or qint32 with div_mode=True");
  } else {
    // op-plugin: an int32 result without div_mode holds int4, and an axis above -2 is the last one.
    if (format == Format::Int32) format = Format::Int4;
    QUANT_CHECK(format == Format::Int8 || format == Format::Int4, name, "dtype must be qint8 or quint4x2 with div_mode=False");
    axis = axis < -1 ? axis : -1;
  }
  const Tensor scale = along(name, "scales", scales, x, axis);
  Tensor value = divides ? wide(x) / scale : wide(x) * scale;
  if (given(points)) value = value + along(name, "zero_points", *points, x, axis);
  return quantised(value, format);
}

Tensor anti_quant(const Tensor& x, const Tensor& scale, const OptionalTensor& offset, std::optional<int64_t> dst_dtype,
                  std::optional<int64_t> src_dtype) {
  const char* name = "npu_anti_quant";
  const bool packed = x.scalar_type() == at::kInt;
  TORCH_CHECK(packed || x.scalar_type() == at::kChar, "Input x must be int8, int32, hifloat8, float8_e5m2 or float8_e4m3fn");
  if (src_dtype.has_value()) {
    const Format source = format_of(name, "src_dtype", src_dtype);
    TORCH_CHECK(!packed || source == Format::Int4, "The datatype of x is int32, src_dtype must be int4");
    TORCH_CHECK(packed || source == Format::Int8, "The datatype of x must match src_dtype");
  }
  const int64_t half = static_cast<int64_t>(at::kHalf), bfloat16 = static_cast<int64_t>(at::kBFloat16);
  const int64_t wanted = dst_dtype.value_or(half);
  QUANT_CHECK(wanted == half || wanted == bfloat16, name, "dst_dtype must be float16 or bfloat16, got ", wanted);
  QUANT_CHECK(scale.dim() == 1 && (scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kBFloat16), name,
              "scale must be a vector of float32 or bfloat16, got ", scale.sizes(), " of ", scale.dtype());
  QUANT_CHECK(!given(offset) || (offset->sizes() == scale.sizes() && offset->scalar_type() == scale.scalar_type()), name,
              "offset must have the shape and the dtype of scale");
  const Tensor numbers = packed ? unpack_int4(x) : x;
  QUANT_CHECK(scale.numel() == 1 || scale.numel() == numbers.size(-1), name, "scale ", scale.sizes(), " does not fit x ",
              numbers.sizes());
  Tensor value = wide(numbers);
  if (given(offset)) value = value + wide(*offset);
  return (value * wide(scale)).to(static_cast<at::ScalarType>(wanted));
}

// round(x * scale[group] + offset); group_index holds the ends of the groups.
Tensor group_quant(const Tensor& x, const Tensor& scale, const Tensor& index, const OptionalTensor& offset,
                   std::optional<at::ScalarType> dtype) {
  const char* name = "npu_group_quant";
  std::optional<int64_t> wanted;
  if (dtype.has_value()) wanted = static_cast<int64_t>(*dtype);
  const Format format = int8_or_int4(name, "dst_dtype", wanted);
  check_float(name, "x", x);
  QUANT_CHECK(x.dim() == 2 && scale.dim() == 2 && scale.size(1) == x.size(1) && scale.size(0) == index.size(0), name, "x ",
              x.sizes(), ", scale ", scale.sizes(), " and group_index ", index.sizes(), " do not fit");
  QUANT_CHECK(!given(offset) || offset->numel() == 1, name, "offset must hold one number, got ", offset->sizes());
  Tensor value = at::zeros(x.sizes(), x.options().dtype(at::kFloat));
  int64_t end = 0;
  for (const Group& group : groups_of(name, index, 0, x.size(0))) {
    value.narrow(0, group.from, group.size).copy_(wide(x.narrow(0, group.from, group.size)) * wide(scale[group.index]));
    end = group.from + group.size;
  }
  QUANT_CHECK(end == x.size(0), name, "the last group_index must be the number of rows ", x.size(0), ", got ", end);
  if (given(offset)) value = value + wide(*offset).reshape({1});
  return quantised(value, format);
}

Tensor trans_quant_param(const Tensor& scale, const OptionalTensor& offset, std::optional<int64_t> mode) {
  const char* name = "npu_trans_quant_param";
  TORCH_CHECK(mode.value_or(0) == 0 || mode.value_or(0) == 1, "round_mode must be 0 or 1. but now is ", mode.value_or(0));
  QUANT_CHECK(scale.scalar_type() == at::kFloat && (!given(offset) || offset->scalar_type() == at::kFloat), name,
              "scale and offset must be float32");
  QUANT_CHECK(scale.dim() == 1 || scale.dim() == 2, name, "scale must have one or two dimensions, got ", scale.sizes());
  if (!given(offset)) return encoded_scale(scale, std::nullopt, mode.value_or(0) == 1);
  const int64_t n = scale.numel(), m = offset->numel();
  QUANT_CHECK(scale.dim() == 2 ? scale.sizes() == offset->sizes() : offset->dim() == 1 && (n == m || n == 1 || m == 1), name,
              "scale ", scale.sizes(), " and offset ", offset->sizes(), " do not fit");
  return encoded_scale(scale, offset, mode.value_or(0) == 1);
}

Tensor int4pack(const Tensor& weight, int64_t) {
  TORCH_CHECK(weight.is_contiguous(), "weight should be contiguous");
  TORCH_CHECK(weight.dim() == 2 || weight.dim() == 3, "weight shape only support dim num 2/3, but it is ", weight.dim());
  TORCH_CHECK_NOT_IMPLEMENTED(weight.scalar_type() != at::kFloat,
                              "anabatic sim: npu_convert_weight_to_int4pack of float32 (float4_e2m1) is not simulated");
  TORCH_CHECK(weight.scalar_type() == at::kInt, "weight dtype only support int32 and float32, but it is ", weight.dtype());
  TORCH_CHECK(weight.numel() > 0, "weight dim should be greater than 0");
  TORCH_CHECK(weight.size(-1) % 8 == 0, "weight last dim should be the multiple of 8, but it is ", weight.size(-1));
  return pack_int4(weight, at::kInt);
}

// Blocks of 128 columns of a row: the scale is min(max|x| / 127, 1 / min_scale).
std::tuple<Tensor, Tensor> dynamic_block_quant(const Tensor& x, double min_scale, c10::string_view round_mode, int64_t dst_type,
                                               int64_t row_block, int64_t column_block, double type_max) {
  const char* name = "npu_dynamic_block_quant";
  TORCH_CHECK(x.dim() == 2 || x.dim() == 3, "x must be 2 or 3 dimensional.");
  QUANT_CHECK(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16, name, "x must be float16 or bfloat16, got ",
              x.dtype());
  QUANT_CHECK(format_of(name, "dst_type", dst_type) == Format::Int8, name, "dst_type must be int8");
  QUANT_CHECK(round_mode == "rint" && row_block == 1 && column_block == 128 && min_scale >= 0, name,
              "takes round_mode rint, row_block_size 1, col_block_size 128 and min_scale >= 0");
  absent(name, {{"dst_type_max", type_max != 0}});
  const int64_t width = x.size(-1), blocks = (width + column_block - 1) / column_block;
  const Tensor padded = at::constant_pad_nd(wide(x), {0, blocks * column_block - width}).unflatten(-1, {blocks, column_block});
  Tensor scale = padded.abs().amax(-1, true) / 127;
  if (min_scale > 0) scale = scale.clamp_max(1 / min_scale);
  const Tensor y = quantised(padded / scale, Format::Int8).flatten(-2).narrow(-1, 0, width).contiguous();
  return {y, scale.squeeze(-1)};
}

// Sequence i of updates is quantised and written into input at indices[i] of the axis, or into row indices[i][0] at
// indices[i][1] (ops-nn, index/quant_update_scatter: Quantize along the last dimension, then Scatter).
Tensor& quant_scatter_(Tensor& x, const Tensor& indices, const Tensor& updates, const Tensor& scales,
                       const OptionalTensor& points, int64_t axis, int64_t quant_axis, c10::string_view reduce,
                       std::optional<int64_t> dst_type, std::optional<c10::string_view> round_mode) {
  const char* name = "npu_quant_scatter";
  const int64_t dims = x.dim(), dim = axis < 0 ? axis + dims : axis;
  QUANT_CHECK(dims >= 3 && dims <= 8 && updates.dim() == dims, name, "input and updates must have 3 to 8 dimensions, got ",
              x.sizes(), " and ", updates.sizes());
  QUANT_CHECK(x.scalar_type() == at::kChar && format_of(name, "dst_type", dst_type) == Format::Int8, name,
              "input must be int8");
  QUANT_CHECK(reduce == "update" && round_mode.value_or("rint") == "rint", name, "takes reduce update and round_mode rint");
  QUANT_CHECK(dim > 0 && dim < dims - 1, name, "axis ", axis, " must be neither the first nor the last dimension");
  QUANT_CHECK(quant_axis == -1 || quant_axis == dims - 1, name, "quant_axis must be the last dimension, got ", quant_axis);
  QUANT_CHECK(indices.dim() == 1 || (indices.dim() == 2 && indices.size(1) == 2), name, "indices cannot have the shape ",
              indices.sizes());
  const int64_t sequences = updates.size(0), length = updates.size(dim);
  QUANT_CHECK(indices.size(0) == sequences && sequences <= x.size(0), name, "indices ", indices.sizes(), ", updates ",
              updates.sizes(), " and input ", x.sizes(), " do not fit");
  Tensor value = wide(updates) / along(name, "quant_scales", scales.reshape({-1}), updates, -1);
  if (given(points)) value = value + along(name, "quant_zero_points", points->reshape({-1}), updates, -1);
  const Tensor written = quantised(value, Format::Int8), places = indices.to(at::kLong).contiguous();
  const int64_t* numbers = places.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < sequences; i++) {
    const int64_t row = indices.dim() == 1 ? i : numbers[2 * i], from = indices.dim() == 1 ? numbers[i] : numbers[2 * i + 1];
    QUANT_CHECK(row >= 0 && row < x.size(0) && from >= 0 && from + length <= x.size(dim), name,
                "indices point outside of input");
    x[row].narrow(dim - 1, from, length).copy_(written[i]);
  }
  return x;
}

Tensor quant_scatter(const Tensor& x, const Tensor& indices, const Tensor& updates, const Tensor& scales,
                     const OptionalTensor& points, int64_t axis, int64_t quant_axis, c10::string_view reduce,
                     std::optional<int64_t> dst_type, std::optional<c10::string_view> round_mode) {
  Tensor result = x.clone();
  return quant_scatter_(result, indices, updates, scales, points, axis, quant_axis, reduce, dst_type, round_mode);
}

// x'' = p1 @ x @ p2, one scale per matrix: max|x''| / (7 / clip_ratio) (ops-nn, quant/flat_quant/docs/aclnnFlatQuant.md).
std::tuple<Tensor, Tensor> kronecker_quant(const Tensor& x, const Tensor& p1, const Tensor& p2,
                                           std::optional<double> clip_ratio, std::optional<int64_t> dtype,
                                           std::optional<double> type_max) {
  const char* name = "npu_kronecker_quant";
  if (dtype.has_value()) {
    const Format format = format_of(name, "dst_dtype", dtype);
    QUANT_CHECK(format == Format::Int32 || format == Format::Int4, name, "dst_dtype must be int32");
  }
  absent(name, {{"dst_type_max", type_max.value_or(0) != 0}});
  QUANT_CHECK(x.dim() == 3 && p1.dim() == 2 && p2.dim() == 2 && p1.size(0) == p1.size(1) && p2.size(0) == p2.size(1) &&
                  p1.size(0) == x.size(1) && p2.size(0) == x.size(2),
              name, "x ", x.sizes(), ", kronecker_p1 ", p1.sizes(), " and kronecker_p2 ", p2.sizes(), " do not fit");
  QUANT_CHECK(x.size(2) % 8 == 0, name, "input shape last dim must be divded by 8, got ", x.size(2));
  const Tensor value = wide(p1).matmul(wide(x).matmul(wide(p2)));
  const Tensor scale = value.abs().amax({1, 2}, true) / (7 / clip_ratio.value_or(1.0));
  return {quantised(value / scale, Format::Int4), scale.reshape({x.size(0)})};
}

}  // namespace

void register_formats(torch::Library& npu) {
  npu.impl("npu_quantize", TORCH_FN(quantize));
  npu.impl("npu_anti_quant", TORCH_FN(anti_quant));
  npu.impl("npu_group_quant", TORCH_FN(group_quant));
  npu.impl("npu_trans_quant_param", TORCH_FN(trans_quant_param));
  npu.impl("npu_convert_weight_to_int4pack", TORCH_FN(int4pack));
  npu.impl("npu_dynamic_block_quant", TORCH_FN(dynamic_block_quant));
  npu.impl("npu_quant_scatter", TORCH_FN(quant_scatter));
  npu.impl("npu_quant_scatter_", TORCH_FN(quant_scatter_));
  npu.impl("npu_kronecker_quant", TORCH_FN(kronecker_quant));
}

}  // namespace sim::quant
