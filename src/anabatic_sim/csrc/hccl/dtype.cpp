#include "dtype.h"

#include <cstdint>
#include <cstring>

namespace hccl_sim {

namespace {

struct Row {
  size_t bytes;
  const char* name;
  bool reduces;
};

// Indexed by HcclDataType (hccl_types.h). What reduces is what HCCL's own check lets through (hccl_communicator, CheckDataType).
constexpr Row kTypes[] = {{1, "int8", true},     {2, "int16", true},   {4, "int32", true},   {2, "float16", true},  {4, "float32", true},
                          {8, "int64", true},    {8, "uint64", false},  {1, "uint8", false},   {2, "uint16", false},  {4, "uint32", false},
                          {8, "float64", false},  {2, "bfloat16", true}, {16, "int128", false}, {0, "", false},      {1, "hif8", false},
                          {1, "fp8e4m3", false}, {1, "fp8e5m2", false}, {1, "fp8e8m0", false}};

const Row* row(HcclDataType type) {
  const auto index = static_cast<size_t>(type);
  return index < sizeof kTypes / sizeof *kTypes && kTypes[index].bytes != 0 ? &kTypes[index] : nullptr;
}

float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Bfloat {
  uint16_t bits;
  static float load(Bfloat value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }
  static Bfloat store(float value) {
    const uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>((bits >> 16) | 0x40)};  // NaN stays NaN
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};              // to nearest, ties to even
  }
};

struct Half {
  uint16_t bits;
  static float load(Half value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // The exponent is moved by a multiplication, which is right for subnormal numbers too.
    return from_bits(sign | to_bits(from_bits(rest << 13) * from_bits(0x77800000)));
  }
  static Half store(float value) {
    const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (magnitude >= 0x47800000) return {static_cast<uint16_t>(sign | 0x7c00)};  // beyond the largest half after rounding
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 aligns the last place, the adder rounds
      const float aligned = from_bits(magnitude) + 0.5f;
      return {static_cast<uint16_t>(sign | (to_bits(aligned) - to_bits(0.5f)))};
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return {static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13)};
  }
};

template <typename T>
struct Plain {
  using Wide = T;
  static Wide load(T value) { return value; }
  static T store(Wide value) { return value; }
};
template <typename T>
struct Narrow {
  using Wide = float;
  static Wide load(T value) { return T::load(value); }
  static T store(Wide value) { return T::store(value); }
};

template <typename T>
bool is_nan(T value) {
  return value != value;
}

template <typename T, typename Form>
void apply(HcclReduceOp op, T* into, const T* from, size_t count) {
  using Wide = typename Form::Wide;
  auto each = [&](auto step) {
    for (size_t i = 0; i < count; i++) into[i] = Form::store(step(Form::load(into[i]), Form::load(from[i])));
  };
  switch (op) {
    case HCCL_REDUCE_SUM: each([](Wide a, Wide b) { return static_cast<Wide>(a + b); }); break;
    case HCCL_REDUCE_PROD: each([](Wide a, Wide b) { return static_cast<Wide>(a * b); }); break;
    case HCCL_REDUCE_MAX: each([](Wide a, Wide b) { return is_nan(a) || a > b ? a : b; }); break;
    default: each([](Wide a, Wide b) { return is_nan(a) || a < b ? a : b; }); break;
  }
}

template <typename T, template <typename> class Form>
void run(HcclReduceOp op, void* into, const void* from, size_t count) {
  apply<T, Form<T>>(op, static_cast<T*>(into), static_cast<const T*>(from), count);
}

}  // namespace

size_t size_of(HcclDataType type) { return row(type) == nullptr ? 0 : row(type)->bytes; }
const char* name_of(HcclDataType type) { return row(type) == nullptr ? "reserved" : row(type)->name; }
bool reducible(HcclDataType type) { return row(type) != nullptr && row(type)->reduces; }

const char* name_of(HcclReduceOp op) {
  constexpr const char* names[] = {"sum", "prod", "max", "min"};
  return static_cast<unsigned>(op) < 4 ? names[op] : "reserved";
}

void reduce(HcclDataType type, HcclReduceOp op, void* into, const void* from, size_t count) {
  // Signed sums and products wrap around on a device; in C++ only unsigned ones may.
  const bool wraps = op == HCCL_REDUCE_SUM || op == HCCL_REDUCE_PROD;
  switch (type) {
    case HCCL_DATA_TYPE_FP32: return run<float, Plain>(op, into, from, count);
    case HCCL_DATA_TYPE_BFP16: return run<Bfloat, Narrow>(op, into, from, count);
    case HCCL_DATA_TYPE_FP16: return run<Half, Narrow>(op, into, from, count);
    case HCCL_DATA_TYPE_INT8: return run<int8_t, Plain>(op, into, from, count);
    case HCCL_DATA_TYPE_INT16: return run<int16_t, Plain>(op, into, from, count);
    case HCCL_DATA_TYPE_INT32:
      return wraps ? run<uint32_t, Plain>(op, into, from, count) : run<int32_t, Plain>(op, into, from, count);
    case HCCL_DATA_TYPE_INT64:
      return wraps ? run<uint64_t, Plain>(op, into, from, count) : run<int64_t, Plain>(op, into, from, count);
    default: return;
  }
}

}  // namespace hccl_sim
