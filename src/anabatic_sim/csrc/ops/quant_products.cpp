// Products of quantised matrices: npu_quant_matmul and what is built on it. The sums are exact integers; scales, biases and the
// rounding of the result follow op-plugin's documentation and CANN's (ops-nn: matmul/quant_batch_matmul_v4/docs).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <algorithm>
#include <string_view>

#include "count.h"
#include "quant.h"

namespace sim::quant {

namespace {

struct Product {
  const char* name;
  Tensor left, right;  // int8 values, of int8 or int4
  OptionalTensor bias;
  int64_t columns() const { return right.size(-1); }
};

// A per-channel vector, or one number.
Tensor channel(const char* name, const char* argument, const Tensor& vector, int64_t columns) {
  const bool row = vector.dim() <= 1 || vector.numel() == vector.size(-1);
  QUANT_CHECK(row && (vector.numel() == 1 || vector.numel() == columns), name, argument, " ", vector.sizes(), " does not fit ",
              columns, " columns");
  return wide(vector).reshape({-1});
}

void check_bias(const Product& p) {
  if (!given(p.bias)) return;
  const Tensor& bias = *p.bias;
  QUANT_CHECK(bias.size(-1) == p.columns() &&
                  (bias.dim() == 1 || (bias.dim() == 3 && bias.size(1) == 1) || bias.numel() == p.columns()),
              p.name, "bias ", bias.sizes(), " does not fit ", p.columns(), " columns");
}

// x1 @ x2, with the bias that is added before the scales.
Tensor sum_of(const Product& p) {
  check_bias(p);
  const Tensor sum = integer_product(p.name, p.left, p.right);
  return given(p.bias) && p.bias->scalar_type() == at::kInt ? sum + *p.bias : sum;
}

Tensor with_late_bias(const Product& p, const Tensor& value) {
  return given(p.bias) && p.bias->scalar_type() != at::kInt ? value + wide(*p.bias) : value;
}

Tensor per_token(const Product& p, const Tensor& scale) {
  QUANT_CHECK(scale.scalar_type() == at::kFloat && scale.numel() == p.left.size(-2), p.name, "pertoken_scale ", scale.sizes(),
              " of ", scale.dtype(), " must hold one float32 per row of x1 ", p.left.sizes());
  return scale.reshape({-1, 1});
}

at::ScalarType output_of(const char* name, std::optional<int64_t> dtype, bool int32) {
  const auto wanted = static_cast<at::ScalarType>(dtype.value_or(static_cast<int64_t>(at::kChar)));
  QUANT_CHECK(wanted == at::kChar || wanted == at::kHalf || wanted == at::kBFloat16 || (int32 && wanted == at::kInt), name,
              "output_dtype must be int8, float16 or bfloat16", int32 ? " or int32" : "", ", got ", wanted);
  return wanted;
}

// A size of 0 is taken from the shapes (op-plugin docs, npu_add_quant_matmul_).
void check_sizes(const char* name, at::IntArrayRef sizes, at::IntArrayRef wanted) {
  bool fits = sizes.size() == 3;
  for (size_t i = 0; fits && i < 3; i++) fits = sizes[i] == wanted[i] || sizes[i] == 0;
  QUANT_CHECK(fits, name, "group_sizes of scales in groups must be ", wanted, ", got ", sizes);
}

// G-B: one scale per row and 128 elements of k, and one per block of 128 by 128 of x2; the products of the blocks are added.
Tensor blockwise(const Product& p, const Tensor& token, const Tensor& scale, at::IntArrayRef sizes) {
  check_sizes(p.name, sizes, {1, 128, 128});
  const int64_t inner = p.left.size(-1), blocks = (inner + 127) / 128, columns = p.columns();
  QUANT_CHECK(p.left.dim() == 2 && p.right.dim() == 2 && token.sizes().equals({p.left.size(0), blocks}) &&
                  scale.sizes().equals({blocks, (columns + 127) / 128}),
              p.name, "pertoken_scale ", token.sizes(), " and scale ", scale.sizes(), " do not fit x1 ", p.left.sizes(),
              " and x2 ", p.right.sizes());
  const Tensor factors = wide(scale).repeat_interleave(128, 1).narrow(1, 0, columns);
  Tensor value;
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t terms = std::min<int64_t>(128, inner - 128 * i);
    const Tensor part = wide(integer_product(p.name, p.left.narrow(1, 128 * i, terms), p.right.narrow(0, 128 * i, terms))) *
                        wide(token).narrow(1, i, 1) * factors.narrow(0, i, 1);
    value = value.defined() ? value + part : part;
  }
  return with_late_bias(p, value);
}

// K-G of int4: scale and offset per 256 elements of k and column: token * sum(scale * (x1 @ x2 - x1 @ offset)).
Tensor groupwise(const Product& p, const Tensor& token, const Tensor& scale, const Tensor& offset, at::IntArrayRef sizes) {
  check_sizes(p.name, sizes, {1, 1, 256});
  const int64_t inner = p.left.size(-1), groups = (inner + 255) / 256;
  QUANT_CHECK(
      scale.sizes().equals({groups, p.columns()}) && offset.sizes() == scale.sizes() && offset.scalar_type() == at::kHalf,
      p.name, "scale ", scale.sizes(), " and the float16 offset ", offset.sizes(), " must be (k / 256, n)");
  Tensor value;
  for (int64_t i = 0; i < groups; i++) {
    const int64_t terms = std::min<int64_t>(256, inner - 256 * i);
    const Tensor left = p.left.narrow(1, 256 * i, terms);
    const Tensor product = wide(integer_product(p.name, left, p.right.narrow(0, 256 * i, terms)));
    const Tensor shift = wide(left).sum(1, true) * wide(offset[i]);
    const Tensor part = (product - shift) * wide(scale[i]);
    value = value.defined() ? value + part : part;
  }
  return value * per_token(p, token);
}

// int8 by int4: the kernel splits x1 into halves of four bits and shifts the lower one by 8, so it computes (x1 - 8) @ (x2 *
// scale); offset is 8 * sum(x2 * scale), computed in advance (op-plugin docs, npu_grouped_matmul_swiglu_quant_v2, A8W4).
Tensor mixed(const Product& p, const Tensor& token, const Tensor& scale, const Tensor& offset) {
  const int64_t inner = p.left.size(-1);
  const Tensor factors = scale_of(scale).reshape({-1, p.columns()});
  const int64_t terms = inner / factors.size(0);
  QUANT_CHECK(terms * factors.size(0) == inner, p.name, "scale ", scale.sizes(), " does not fit x1 ", p.left.sizes());
  const Tensor shifted = p.left.to(at::kShort) - 8;
  Tensor value;
  for (int64_t i = 0; i < factors.size(0); i++) {
    const Tensor part =
        wide(integer_product(p.name, shifted.narrow(1, terms * i, terms), p.right.narrow(0, terms * i, terms))) * factors[i];
    value = value.defined() ? value + part : part;
  }
  return (value + channel(p.name, "offset", offset, p.columns())) * per_token(p, token);
}

Tensor quant_matmul(const Tensor& x1, const Tensor& x2, const Tensor& scale, const OptionalTensor& offset,
                    const OptionalTensor& token, const OptionalTensor& bias, std::optional<int64_t> output,
                    std::optional<int64_t> x1_dtype, std::optional<int64_t> x2_dtype, std::optional<int64_t> token_dtype,
                    std::optional<int64_t> scale_dtype, at::OptionalIntArrayRef sizes, const OptionalTensor& y_scale) {
  const char* name = "npu_quant_matmul";
  absent(name, {{"x1_dtype", x1_dtype.has_value()},
                {"x2_dtype", x2_dtype.has_value()},
                {"scale_dtype", scale_dtype.has_value()},
                {"pertoken_scale_dtype", token_dtype.has_value()}});
  absent(name, {{"y_scale", given(y_scale)}});
  const auto kind = x1.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(kind == at::kChar || kind == at::kInt, "anabatic sim: ", name, " of ", kind, " is not simulated");
  QUANT_CHECK(x2.scalar_type() == kind || (kind == at::kChar && x2.scalar_type() == at::kInt), name, "x1 is ", kind, " and x2 ",
              x2.scalar_type());
  const Tensor left = kind == at::kInt ? unpack_int4(x1) : x1;
  const Product p{name, left, unpack_matrix(name, x2, left.size(-1)), bias};
  const auto wanted = output_of(name, output, true);
  const at::IntArrayRef groups = sizes.value_or(at::IntArrayRef{});
  const bool encoded = scale.scalar_type() == at::kLong;
  QUANT_CHECK(encoded || scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kBFloat16, name,
              "scale must be int64, float32 or bfloat16, got ", scale.dtype());
  if (kind == at::kChar && x2.scalar_type() == at::kInt) {
    QUANT_CHECK(encoded && given(offset) && given(token) && !given(bias), name,
                "int8 by int4 needs an int64 scale, offset and pertoken_scale, and takes no bias");
    return mixed(p, *token, scale, *offset).to(wanted);
  }
  if (scale.dim() == 2 && scale.size(0) > 1) {
    QUANT_CHECK(given(token), name, "a scale per group needs pertoken_scale");
    if (kind == at::kChar) return blockwise(p, *token, scale, groups).to(wanted);
    QUANT_CHECK(given(offset), name, "a scale of two dimensions needs an offset");
    return groupwise(p, *token, scale, *offset, groups).to(wanted);
  }
  absent(name,
         {{"group_sizes of a scale per channel", std::any_of(groups.begin(), groups.end(), [](int64_t n) { return n > 0; })}});
  const Tensor sum = sum_of(p);
  if (wanted == at::kInt) {
    QUANT_CHECK(sum.scalar_type() == at::kInt && (!given(bias) || bias->scalar_type() == at::kInt), name,
                "an int32 result takes an int32 bias");
    return sum;
  }
  if (given(token)) {
    QUANT_CHECK(!encoded && !given(offset) && wanted != at::kChar, name,
                "pertoken_scale needs a float scale and a float16 or bfloat16 result, and takes no offset");
    return with_late_bias(p, wide(sum) * channel(name, "scale", scale, p.columns()) * per_token(p, *token)).to(wanted);
  }
  if (!encoded && wanted == at::kBFloat16) {
    QUANT_CHECK(!given(offset), name, "a bfloat16 result takes no offset");
    return with_late_bias(p, wide(sum) * channel(name, "scale", scale, p.columns())).to(wanted);
  }
  // op-plugin encodes a float scale, and its offset with it: 19 bits remain.
  QUANT_CHECK(!given(bias) || bias->scalar_type() == at::kInt, name, "without pertoken_scale a ", wanted,
              " result takes an int32 bias");
  QUANT_CHECK(wanted != at::kBFloat16 && scale.scalar_type() != at::kBFloat16, name, "a ", wanted,
              " result without pertoken_scale "
              "does not go with a scale of ",
              scale.dtype());
  QUANT_CHECK(wanted == at::kChar || !given(offset), name, "offset needs an int8 result");
  const Tensor code = encoded ? scale : encoded_scale(scale.reshape({-1}), offset, false);
  const Tensor value = wide(sum) * channel(name, "scale", scale_of(code), p.columns());
  if (wanted != at::kChar) return value.to(wanted);
  return quantised(value + channel(name, "offset", offset_of(code), p.columns()), Format::Int8);
}

// gelu of a product with scales per row and column.
Tensor quant_matmul_gelu(const Tensor& x1, const Tensor& x2, const Tensor& x1_scale, const Tensor& x2_scale,
                         const OptionalTensor& bias, std::optional<c10::string_view> approximate) {
  const char* name = "npu_quant_matmul_gelu";
  const c10::string_view form = approximate.value_or("gelu_erf");
  QUANT_CHECK(form == "gelu_erf" || form == "gelu_tanh", name, "approximate must be 'gelu_tanh' or 'gelu_erf', but got ", form);
  const auto kind = x1.scalar_type();
  QUANT_CHECK((kind == at::kChar || kind == at::kInt) && x2.scalar_type() == kind, name,
              "x1 and x2 must be int8 or int32, got ", x1.dtype(), " and ", x2.dtype());
  QUANT_CHECK(x2_scale.scalar_type() == at::kFloat || x2_scale.scalar_type() == at::kBFloat16, name,
              "x2_scale must be float32 or bfloat16, got ", x2_scale.dtype());
  const Tensor left = kind == at::kInt ? unpack_int4(x1) : x1;
  const Product p{name, left, unpack_matrix(name, x2, left.size(-1)), bias};
  const Tensor value = wide(sum_of(p)) * channel(name, "x2_scale", x2_scale, p.columns()) * per_token(p, x1_scale);
  const bool bfloat16 = x2_scale.scalar_type() == at::kBFloat16 || (given(bias) && bias->scalar_type() == at::kBFloat16);
  return at::gelu(with_late_bias(p, value), form == "gelu_tanh" ? "tanh" : "none").to(bfloat16 ? at::kBFloat16 : at::kHalf);
}

// The scaled products of all batches, added.
Tensor quant_matmul_reduce_sum(const Tensor& x1, const Tensor& x2, const OptionalTensor& x1_scale,
                               const OptionalTensor& x2_scale) {
  const char* name = "npu_quant_matmul_reduce_sum";
  QUANT_CHECK(x1.scalar_type() == at::kChar && x2.scalar_type() == at::kChar && x1.dim() == 3 && x2.dim() == 3 &&
                  x1.size(0) == x2.size(0),
              name, "x1 and x2 must be int8 of three dimensions and one batch size, got ", x1.sizes(), " and ", x2.sizes());
  QUANT_CHECK(given(x1_scale) && given(x2_scale), name, "x1_scale and x2_scale are needed");
  QUANT_CHECK(x1_scale->sizes().equals({x1.size(0), x1.size(1)}) && x2_scale->sizes().equals({x2.size(2)}), name, "x1_scale ",
              x1_scale->sizes(), " and x2_scale ", x2_scale->sizes(), " do not fit");
  const Tensor value = wide(integer_product(name, x1, x2)) * wide(*x1_scale).unsqueeze(-1) * wide(*x2_scale);
  return value.sum(0).to(at::kBFloat16);
}

// (input^T1 @ weight^T2)^Ty: the batch lies between rows and columns of the result. With a scale, which is encoded, the result
// is int8 of shape (M, 1, B * N).
Tensor transpose_batchmatmul(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& scale,
                             at::OptionalIntArrayRef perm_x1, at::OptionalIntArrayRef perm_x2, at::OptionalIntArrayRef perm_y,
                             std::optional<int64_t> split) {
  const char* name = "npu_transpose_batchmatmul";
  absent(name, {{"bias", given(bias)}});
  QUANT_CHECK(
      x.dim() == 3 && weight.dim() == 3 && x.scalar_type() == weight.scalar_type() && at::isFloatingType(x.scalar_type()), name,
      "input and weight must have three dimensions and one float dtype, got ", x.sizes(), " and ", weight.sizes());
  const std::vector<int64_t> same{0, 1, 2}, turned{1, 0, 2}, last{0, 2, 1};
  const at::IntArrayRef t1 = perm_x1.value_or(same), t2 = perm_x2.value_or(same), ty = perm_y.value_or(turned);
  QUANT_CHECK((t1.equals(same) || t1.equals(turned)) && (t2.equals(same) || t2.equals(last)) && ty.equals(turned), name,
              "perm_x1 must be [0, 1, 2] or [1, 0, 2], perm_x2 [0, 1, 2] or [0, 2, 1], perm_y [1, 0, 2]");
  const Tensor left = x.permute(t1), right = weight.permute(t2);
  QUANT_CHECK(left.size(0) == right.size(0) && left.size(2) == right.size(1), name, "input ", x.sizes(), " and weight ",
              weight.sizes(), " do not fit");
  const int64_t rows = left.size(1), width = left.size(0) * right.size(2), parts = split.value_or(1);
  const Tensor y = at::matmul(wide(left), wide(right)).permute({1, 0, 2}).contiguous();
  add_flops(2.0 * static_cast<double>(y.numel()) * static_cast<double>(left.size(2)));
  if (given(scale)) {
    QUANT_CHECK(parts == 1 && scale->scalar_type() == at::kLong && scale->numel() == width && x.scalar_type() == at::kHalf,
                name, "scale must hold B * N int64, for a float16 input and batch_split_factor 1");
    const Tensor value = y.reshape({rows, 1, width}) * scale_of(*scale).reshape({-1}) + offset_of(*scale).reshape({-1});
    return quantised(value, Format::Int8);
  }
  QUANT_CHECK(parts >= 1 && width % parts == 0, name, "batch_split_factor ", parts, " must divide B * N = ", width);
  if (parts == 1) return y.to(x.scalar_type());
  return y.reshape({rows, parts, width / parts}).permute({1, 0, 2}).contiguous().to(x.scalar_type());
}

}  // namespace

void register_products(torch::Library& npu) {
  npu.impl("npu_quant_matmul", TORCH_FN(quant_matmul));
  npu.impl("npu_quant_matmul_gelu", TORCH_FN(quant_matmul_gelu));
  npu.impl("npu_quant_matmul_reduce_sum", TORCH_FN(quant_matmul_reduce_sum));
  npu.impl("npu_transpose_batchmatmul", TORCH_FN(transpose_batchmatmul));
}

}  // namespace sim::quant
