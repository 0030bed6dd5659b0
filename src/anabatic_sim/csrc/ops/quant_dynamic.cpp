// Scales that are computed from the numbers: npu_dynamic_quant, symmetric and not, and RMSNorm followed by a quantisation.
// Formulas from op-plugin's documentation and CANN's (ops-nn: quant/dynamic_quant/docs/aclnnDynamicQuantV4.md,
// norm/*quant*/docs).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <array>
#include <tuple>

#include "quant.h"

namespace sim::quant {

namespace {

// The smallest scale of the asymmetric form (ops-nn, quant/dynamic_quant/op_kernel/dynamic_quant_base.h).
constexpr double kSmallestScale = 1e-12;

void check_half(const char* name, const char* argument, const Tensor& x) {
  QUANT_CHECK(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16, name, argument,
              " must be float16 or bfloat16, got ", x.dtype());
}

// x times the smoothing factors: one vector, or one per group of rows.
Tensor smoothed(const char* name, const Tensor& x, const OptionalTensor& smooth, const OptionalTensor& index,
                c10::string_view mode) {
  const Tensor value = wide(x);
  if (!given(smooth)) {
    QUANT_CHECK(!given(index), name, "group_index needs smooth_scales");
    return value;
  }
  QUANT_CHECK(smooth->scalar_type() == x.scalar_type(), name, "smooth_scales must have the dtype of x, got ", smooth->dtype());
  const int64_t axis = mode == "perchannel" ? -2 : -1;
  QUANT_CHECK(smooth->dim() == (given(index) ? 2 : 1) && smooth->size(-1) == x.size(axis), name, "smooth_scales ",
              smooth->sizes(), " does not fit x ", x.sizes());
  if (!given(index)) return value * (axis == -2 ? wide(*smooth).unsqueeze(-1) : wide(*smooth));
  absent(name, {{"group_index outside of quant_mode pertoken", mode != "pertoken"}});
  QUANT_CHECK(index->scalar_type() == at::kInt && index->dim() == 1 && index->size(0) == smooth->size(0), name,
              "group_index must hold one int32 per row of smooth_scales, got ", index->sizes(), " of ", index->dtype());
  const Tensor rows = value.reshape({-1, x.size(-1)}).clone();
  int64_t end = 0;
  for (const Group& group : groups_of(name, *index, 0, rows.size(0))) {
    rows.narrow(0, group.from, group.size).mul_(wide((*smooth)[group.index]));
    end = group.from + group.size;
  }
  QUANT_CHECK(end == rows.size(0), name, "the last group_index must be the number of rows ", rows.size(0), ", got ", end);
  return rows.view(x.sizes());
}

struct Ranges {
  Tensor value, top, bottom;  // bottom only for the asymmetric form
  Format format;
  std::vector<int64_t> shape;  // of the scales
};

Ranges ranges_of(const char* name, const Tensor& x, const OptionalTensor& smooth, const OptionalTensor& index,
                 std::optional<int64_t> dtype, c10::string_view mode, double type_max, bool symmetric) {
  TORCH_CHECK(x.dim() > 1, "Input shape dim should be greater than 1");
  check_half(name, "x", x);
  QUANT_CHECK(mode == "pertoken" || mode == "perchannel" || mode == "pertensor", name, "quant_mode ", mode, " is unknown");
  absent(name, {{"dst_type_max", type_max != 0}});
  const Format format = int8_or_int4(name, "dst_type", dtype);
  TORCH_CHECK(format != Format::Int4 || x.size(-1) % 8 == 0, "Input shape last dim must be divded by 8 when int4 quantization");
  const Tensor value = smoothed(name, x, smooth, index, mode), numbers = symmetric ? value.abs() : value;
  std::vector<int64_t> dims, shape;
  if (mode == "pertensor") {
    for (int64_t i = 0; i < x.dim(); i++) dims.push_back(i);
    shape = {1};
  } else {
    dims = {mode == "perchannel" ? x.dim() - 2 : x.dim() - 1};
    for (int64_t i = 0; i < x.dim(); i++)
      if (i != dims[0]) shape.push_back(x.size(i));
  }
  return {value, numbers.amax(dims, true), symmetric ? Tensor() : numbers.amin(dims, true), format, shape};
}

std::tuple<Tensor, Tensor> dynamic_quant(const Tensor& x, const OptionalTensor& smooth, const OptionalTensor& index,
                                         std::optional<int64_t> dtype, c10::string_view mode, double type_max) {
  const Ranges r = ranges_of("npu_dynamic_quant", x, smooth, index, dtype, mode, type_max, true);
  const Tensor scale = r.top / largest(r.format);
  return {quantised(r.value / scale, r.format), scale.reshape(r.shape)};
}

std::tuple<Tensor, Tensor, Tensor> dynamic_quant_asymmetric(const Tensor& x, const OptionalTensor& smooth,
                                                            const OptionalTensor& index, std::optional<int64_t> dtype,
                                                            c10::string_view mode, double type_max) {
  const Ranges r = ranges_of("npu_dynamic_quant_asymmetric", x, smooth, index, dtype, mode, type_max, false);
  const double high = largest(r.format);
  const Tensor scale = ((r.top - r.bottom) / (high - smallest(r.format))).clamp_min(kSmallestScale);
  const Tensor offset = high - r.top / scale;
  return {quantised(r.value / scale + offset, r.format), scale.reshape(r.shape), offset.reshape(r.shape)};
}

Tensor scaled(const Tensor& value, const Tensor& scale, const OptionalTensor& offset, bool divides) {
  const Tensor result = divides ? value / wide(scale) : value * wide(scale);
  return given(offset) ? result + wide(*offset) : result;
}

Tensor sum_of(const char* name, const Tensor& x1, const Tensor& x2) {
  check_half(name, "x1", x1);
  QUANT_CHECK(x1.sizes() == x2.sizes() && x1.scalar_type() == x2.scalar_type(), name,
              "x1 and x2 must have one shape and dtype");
  return (wide(x1) + wide(x2)).to(x1.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_quant(const Tensor& x1, const Tensor& x2, const Tensor& gamma,
                                                      const Tensor& scales1, const OptionalTensor& points1,
                                                      const OptionalTensor& beta, const OptionalTensor& scales2,
                                                      const OptionalTensor& points2, int64_t axis, double epsilon, bool divides,
                                                      std::optional<int64_t> dtype) {
  const char* name = "npu_add_rms_norm_quant";
  TORCH_CHECK(axis == -1, "axis only support -1.");
  QUANT_CHECK(format_of(name, "dst_type", dtype) == Format::Int8, name, "dst_type must be int8");
  const Tensor x = sum_of(name, x1, x2);
  for (const Tensor* scale : {&scales1, given(scales2) ? &*scales2 : &scales1})
    QUANT_CHECK(scale->sizes() == gamma.sizes(), name, "scales ", scale->sizes(), " must have the shape of gamma ",
                gamma.sizes());
  const Tensor y = rms_normed(name, x, gamma, beta, epsilon, nullptr);
  const Tensor y1 = quantised(scaled(y, scales1, points1, divides), Format::Int8);
  if (!given(scales2)) return {y1, at::zeros(x.sizes(), y1.options()), x};
  return {y1, quantised(scaled(y, *scales2, points2, divides), Format::Int8), x};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_rms_norm_dynamic_quant(
    const Tensor& x1, const Tensor& x2, const Tensor& gamma, const OptionalTensor& smooth1, const OptionalTensor& smooth2,
    const OptionalTensor& beta, double epsilon, std::optional<std::array<bool, 2>> mask, std::optional<int64_t> dtype) {
  const char* name = "npu_add_rms_norm_dynamic_quant";
  const Format format = int8_or_int4(name, "y_dtype", dtype);
  TORCH_CHECK(x1.dim() >= 2 && x1.dim() <= 8, "The x1 should be in 2~8D");
  TORCH_CHECK(x1.sizes() == x2.sizes(), "The shape of x1 and x2 must be the same");
  TORCH_CHECK(!mask.has_value() || (*mask)[0] || (*mask)[1],
              "When the output_mask is not empty, at least one of y1 and y2 must be output. ");
  QUANT_CHECK(gamma.dim() == 1, name, "gamma must be a vector, got ", gamma.sizes());
  TORCH_CHECK(format != Format::Int4 || x1.size(-1) % 8 == 0,
              "The last dim input shape must be divisible by 8 if y dtype is torch_npu.int4 or torch.quint4x2");
  const std::array<bool, 2> wanted = mask.value_or(std::array<bool, 2>{true, given(smooth1) && given(smooth2)});
  const OptionalTensor* smooth[] = {&smooth1, &smooth2};
  const Tensor x = sum_of(name, x1, x2), y = rms_normed(name, x, gamma, beta, epsilon, nullptr);
  Dynamic results[2];
  for (size_t i = 0; i < 2; i++) {
    QUANT_CHECK(!mask.has_value() || wanted[i] || !given(*smooth[i]), name, "output_mask excludes an output with smooth_scale");
    if (wanted[i]) {
      results[i] = dynamic_rows(given(*smooth[i]) ? y * wide(**smooth[i]) : y, format);
    } else {  // op-plugin: tensors without dimensions, which nothing writes
      results[i] = {at::zeros({}, x.options().dtype(format == Format::Int4 ? at::kInt : at::kChar)),
                    at::zeros({}, x.options().dtype(at::kFloat))};
    }
  }
  return {results[0].y, results[1].y, x, results[0].scale, results[1].scale};
}

Tensor rms_norm_quant(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& scale, const Tensor& offset,
                      double epsilon, std::optional<int64_t> dtype) {
  const char* name = "npu_rms_norm_quant";
  const Format format = int8_or_int4(name, "dst_dtype", dtype);
  check_half(name, "x", x);
  QUANT_CHECK(scale.numel() == 1 && offset.numel() == 1, name, "scale and offset must hold one number");
  const Tensor y = rms_normed(name, x, gamma, beta, epsilon, nullptr);
  // Divided: op-plugin's page multiplies, but CANN's (ops-nn, norm/rms_norm_quant/docs) and its kernel divide.
  return quantised(scaled(y, scale.reshape({1}), offset.reshape({1}), true), format);
}

std::tuple<Tensor, Tensor> rms_norm_quant_v2(const Tensor& x, const Tensor& gamma, const Tensor& scale,
                                             const OptionalTensor& offset, const OptionalTensor& beta, double epsilon,
                                             bool divides, std::optional<int64_t> dtype) {
  const char* name = "npu_rms_norm_quant_v2";
  const Format format = int8_or_int4(name, "dst_dtype", dtype);
  check_half(name, "x", x);
  QUANT_CHECK(scale.numel() == 1 || scale.size(-1) == x.size(-1), name, "scale ", scale.sizes(), " does not fit x ", x.sizes());
  const Tensor y = rms_normed(name, x, gamma, beta, epsilon, nullptr);
  // op-plugin writes rstd for an x that requires gradients only, and below autograd none does.
  return {quantised(scaled(y, scale, offset, divides), format), at::empty({0}, x.options().dtype(at::kFloat))};
}

// Blocks of the last dimension times a rotation, then one scale per row (ops-nn, matmul/rotate_quant/docs/aclnnRotateQuant.md).
std::tuple<Tensor, Tensor> rotate_quant(const Tensor& x, const Tensor& rotation, const OptionalTensor& alpha,
                                        std::optional<int64_t> dtype, std::optional<int64_t> axis,
                                        std::optional<c10::string_view> round_mode, std::optional<int64_t> scale_alg,
                                        std::optional<double> type_max, std::optional<bool> turned) {
  const char* name = "npu_rotate_quant";
  const Format format = int8_or_int4(name, "dst_dtype", dtype);
  check_half(name, "x", x);
  absent(name, {{"alpha", given(alpha)},
                {"scale_alg", scale_alg.value_or(0) != 0},
                {"dst_type_max", type_max.value_or(0) != 0},
                {"transpose_y", turned.value_or(false)},
                {"round_mode", round_mode.value_or("rint") != "rint"}});
  QUANT_CHECK(x.dim() == 2 && (axis.value_or(-1) == -1 || axis == 1), name, "x must be a matrix and axis -1 or 1, got ",
              x.sizes());
  const int64_t size = rotation.size(-1);
  QUANT_CHECK(
      rotation.dim() == 2 && rotation.size(0) == size && rotation.scalar_type() == x.scalar_type() && x.size(1) % size == 0,
      name, "rotation ", rotation.sizes(), " of ", rotation.dtype(), " does not fit x ", x.sizes());
  // The cube cores hand the rotated numbers on in the dtype of x (op-plugin, test_npu_rotate_quant.py).
  const Tensor value = wide(at::matmul(wide(x).reshape({-1, size}), wide(rotation)).reshape(x.sizes()).to(x.scalar_type()));
  const Dynamic result = dynamic_rows(value, format);
  return {result.y, result.scale};
}

}  // namespace

void register_dynamic(torch::Library& npu) {
  npu.impl("npu_dynamic_quant", TORCH_FN(dynamic_quant));
  npu.impl("npu_dynamic_quant_asymmetric", TORCH_FN(dynamic_quant_asymmetric));
  npu.impl("npu_add_rms_norm_quant", TORCH_FN(add_rms_norm_quant));
  npu.impl("npu_add_rms_norm_dynamic_quant", TORCH_FN(add_rms_norm_dynamic_quant));
  npu.impl("npu_rms_norm_quant", TORCH_FN(rms_norm_quant));
  npu.impl("npu_rms_norm_quant_v2", TORCH_FN(rms_norm_quant_v2));
  npu.impl("npu_rotate_quant", TORCH_FN(rotate_quant));
}

}  // namespace sim::quant
