#include <ATen/TensorOperators.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/round.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "count.h"
#include "kernels.h"
#include "quant.h"

namespace sim {

namespace quant {

namespace {

constexpr int64_t kOffsetOfCann = 256;
// A product of two int8 is at most 2^14, and float32 holds integers up to 2^24: sums of 1024 products are exact.
constexpr int64_t kExactTerms = 1024;

const char* refused_format(int64_t dtype) {
  switch (dtype) {
    case static_cast<int64_t>(at::kFloat8_e5m2):
    case kOffsetOfCann + 35: return "float8_e5m2";
    case static_cast<int64_t>(at::kFloat8_e4m3fn):
    case kOffsetOfCann + 36: return "float8_e4m3fn";
    case kOffsetOfCann + 34: return "hifloat8";
    case kOffsetOfCann + 37: return "float8_e8m0fnu";
    case kOffsetOfCann + 40: return "float4_e2m1fn_x2";
    case kOffsetOfCann + 41: return "float4_e1m2fn_x2";
    default: return nullptr;
  }
}

}  // namespace

void absent(const char* name, std::initializer_list<std::pair<const char*, bool>> given_arguments) {
  for (const auto& [argument, is_given] : given_arguments)
    TORCH_CHECK_NOT_IMPLEMENTED(!is_given, "anabatic sim: ", name, " with ", argument, " is not simulated");
}

Format format_of(const char* name, const char* argument, std::optional<int64_t> dtype) {
  if (!dtype.has_value()) return Format::Int8;
  switch (*dtype) {
    case static_cast<int64_t>(at::kChar):
    case static_cast<int64_t>(at::kQInt8):
    case kOffsetOfCann + 2: return Format::Int8;
    case static_cast<int64_t>(at::kByte):
    case static_cast<int64_t>(at::kQUInt8):
    case kOffsetOfCann + 4: return Format::UInt8;
    case static_cast<int64_t>(at::kInt):
    case static_cast<int64_t>(at::kQInt32):
    case kOffsetOfCann + 3: return Format::Int32;
    case static_cast<int64_t>(at::ScalarType::QUInt4x2):
    case kOffsetOfCann + 29: return Format::Int4;
    default: break;
  }
  const char* known = refused_format(*dtype);
  TORCH_CHECK_NOT_IMPLEMENTED(known == nullptr, "anabatic sim: ", name, " with ", argument, " ", known,
                              " is not simulated: a format of the 950 family");
  QUANT_CHECK(false, name, argument, " ", *dtype, " is no dtype of a quantised tensor");
}

Format int8_or_int4(const char* name, const char* argument, std::optional<int64_t> dtype) {
  const Format format = format_of(name, argument, dtype);
  QUANT_CHECK(format == Format::Int8 || format == Format::Int4, name, argument, " must be int8 or quint4x2");
  return format;
}

double largest(Format format) {
  switch (format) {
    case Format::Int8: return 127;
    case Format::UInt8: return 255;
    case Format::Int32: return 2147483647;
    default: return 7;
  }
}

double smallest(Format format) {
  switch (format) {
    case Format::Int8: return -128;
    case Format::UInt8: return 0;
    case Format::Int32: return -2147483648.0;
    default: return -8;
  }
}

Tensor quantised(const Tensor& value, Format format, at::ScalarType int4_storage) {
  const double low = smallest(format), high = largest(format);
  // float32 has no 2^31 - 1: doubles, where the result is an int32.
  const Tensor exact = format == Format::Int32 ? value.to(at::kDouble) : value;
  const Tensor whole = at::nan_to_num(at::round(exact), 0.0, high, low).clamp(low, high);
  switch (format) {
    case Format::Int8: return whole.to(at::kChar);
    case Format::UInt8: return whole.to(at::kByte);
    case Format::Int32: return whole.to(at::kInt);
    default: return pack_int4(whole, int4_storage);
  }
}

Tensor pack_int4(const Tensor& values, at::ScalarType storage) {
  const int64_t width = values.size(-1), in_one = storage == at::kInt ? 8 : 2;
  TORCH_CHECK(width % in_one == 0, "the last dimension of an int4 tensor must be a multiple of ", in_one, ", got ", width);
  const Tensor pairs = values.to(at::kChar).contiguous().view(at::kByte).unflatten(-1, {width / 2, 2});
  const Tensor low = at::bitwise_and(pairs.select(-1, 0), 15), high = at::bitwise_left_shift(pairs.select(-1, 1), 4);
  return (low + high).contiguous().view(storage);
}

Tensor unpack_int4(const Tensor& packed) {
  const Tensor bytes = packed.contiguous().view(at::kByte);
  const Tensor low = at::bitwise_right_shift(at::bitwise_left_shift(bytes, 4).view(at::kChar), 4);
  const Tensor high = at::bitwise_right_shift(bytes.view(at::kChar), 4);
  return at::stack({low, high}, -1).flatten(-2);
}

Tensor unpack_matrix(const char* name, const Tensor& packed, int64_t rows) {
  if (packed.scalar_type() != at::kInt) return packed;
  if (packed.size(-2) == rows) return unpack_int4(packed);
  QUANT_CHECK(packed.size(-2) * 8 == rows, name, "a packed weight of ", rows, " rows cannot have the shape ", packed.sizes());
  return unpack_int4(packed.transpose(-1, -2)).transpose(-1, -2);
}

Tensor antiquant(const Tensor& numbers, const OptionalTensor& offset, const Tensor& scale, at::ScalarType dtype) {
  Tensor value = wide(numbers);
  if (given(offset)) value = value + *offset;
  if (given(offset) && dtype == at::kHalf) value = wide(value.to(dtype));
  return wide((value * scale).to(dtype));
}

Tensor integer_product(const char* name, const Tensor& left, const Tensor& right) {
  const int64_t inner = left.size(-1);
  QUANT_CHECK(left.dim() >= 2 && right.dim() >= 2 && right.size(-2) == inner, name, "the shapes ", left.sizes(), " and ",
              right.sizes(), " do not fit");
  Tensor sum;
  for (int64_t from = 0; from < inner || !sum.defined(); from += kExactTerms) {
    const int64_t terms = std::min(kExactTerms, inner - from);
    const Tensor part = at::matmul(wide(left.narrow(-1, from, terms)), wide(right.narrow(-2, from, terms))).to(at::kInt);
    sum = sum.defined() ? sum.add_(part) : part;
  }
  add_flops(2.0 * static_cast<double>(sum.numel()) * static_cast<double>(inner));
  return sum;
}

// op-plugin docs, npu_trans_quant_param: the upper 19 bits of the float, bit 46, nine bits of offset from bit 37.
Tensor encoded_scale(const Tensor& scale, const OptionalTensor& offset, bool round) {
  Tensor bits = at::bitwise_and(scale.to(at::kFloat).contiguous().view(at::kInt).to(at::kLong), 0xFFFFFFFFLL);
  // To the nearest number of 19 bits, half to even.
  if (round) bits = bits + 0xFFF + at::bitwise_and(at::bitwise_right_shift(bits, 13), 1);
  Tensor encoded = at::bitwise_and(bits, 0xFFFFE000LL) + (1LL << 46);
  if (!given(offset)) return encoded;
  const Tensor whole = at::round(wide(*offset)).clamp(-256, 255).to(at::kLong);
  return encoded + at::bitwise_left_shift(at::bitwise_and(whole, 0x1FF), 37);
}

Tensor scale_of(const Tensor& encoded) {
  return at::bitwise_and(encoded, 0xFFFFFFFFLL).to(at::kInt).contiguous().view(at::kFloat);
}

Tensor offset_of(const Tensor& encoded) {
  const Tensor nine = at::bitwise_and(at::bitwise_right_shift(encoded, 37), 0x1FF);
  return wide(at::where(nine.ge(256), nine - 512, nine));
}

std::vector<Group> groups_of(const char* name, const Tensor& list, int64_t type, int64_t rows) {
  QUANT_CHECK(type >= 0 && type <= 2, name, "group_list_type should be 0, 1 or 2, got ", type);
  QUANT_CHECK(list.dim() == (type == 2 ? 2 : 1) && (type != 2 || list.size(1) == 2), name, "group_list of type ", type,
              " cannot have the shape ", list.sizes());
  const Tensor flat = list.to(at::kLong).contiguous();
  const int64_t* numbers = flat.const_data_ptr<int64_t>();
  std::vector<Group> groups;
  int64_t end = 0;
  for (int64_t i = 0; i < list.size(0); i++) {
    const int64_t size = type == 0 ? numbers[i] - end : type == 1 ? numbers[i] : numbers[2 * i + 1];
    QUANT_CHECK(size >= 0, name, "group_list has a group of ", size, " rows");
    groups.push_back({type == 2 ? numbers[2 * i] : i, end, size});
    end += size;
  }
  QUANT_CHECK(end <= rows, name, "group_list ends at ", end, ", there are ", rows, " rows");
  return groups;
}

Dynamic dynamic_rows(const Tensor& value, Format format, at::ScalarType int4_storage) {
  const Tensor scale = value.abs().amax(-1, true) / largest(format);
  return {quantised(value / scale, format, int4_storage), scale.squeeze(-1)};
}

Tensor rms_normed(const char* name, const Tensor& x, const Tensor& gamma, const OptionalTensor& beta, double epsilon,
                  Tensor* rstd) {
  QUANT_CHECK(gamma.size(-1) == x.size(-1), name, "gamma ", gamma.sizes(), " does not fit x ", x.sizes());
  const int64_t normed = gamma.dim() == 2 && gamma.size(0) == 1 ? 1 : gamma.dim();
  std::vector<int64_t> dims;
  for (int64_t i = 1; i <= normed; i++) dims.push_back(-i);
  const Tensor value = wide(x), inverse = value.pow(2).mean(dims, true).add(epsilon).rsqrt();
  if (rstd != nullptr) *rstd = inverse;
  const Tensor y = value * inverse * wide(gamma);
  return given(beta) ? y + wide(*beta) : y;
}

}  // namespace quant

void register_quant(torch::Library& npu) {
  quant::register_formats(npu);
  quant::register_dynamic(npu);
  quant::register_activations(npu);
  quant::register_products(npu);
  quant::register_weight_products(npu);
  quant::register_groups(npu);
}

}  // namespace sim
