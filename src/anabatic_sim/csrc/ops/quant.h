// What the quantised operators share (quant_*.cpp): integer formats, packed int4, exact integer products, encoded scales,
// groups.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

namespace sim::quant {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }
inline Tensor wide(const Tensor& x) { return x.to(at::kFloat); }
// Refuses, by its name, an argument that is not simulated.
void absent(const char* name, std::initializer_list<std::pair<const char*, bool>> given_arguments);
// An error of the arguments, in the form that torch_npu gives those of CANN.
#define QUANT_CHECK(condition, name, ...) TORCH_CHECK(condition, name, ": call aclnn failed, detail:EZ1001: ", __VA_ARGS__)

// What a quantised tensor holds. Int4 fills an int32 with eight numbers, the first one in the lowest bits
// (op-plugin docs, npu_convert_weight_to_int4pack).
enum class Format : uint8_t { Int8, UInt8, Int32, Int4 };

// The format that a dtype argument asks for: torch's numbers of dtypes, and torch_npu's, which are CANN's plus 256
// (pytorch: torch_npu/csrc/custom_dtype/Init.h). FP8, HiFloat8 and MX formats are refused by name.
Format format_of(const char* name, const char* argument, std::optional<int64_t> dtype);
// As above, where only int8 and int4 exist.
Format int8_or_int4(const char* name, const char* argument, std::optional<int64_t> dtype);
double largest(Format format);
double smallest(Format format);
// Rounds half to even and saturates; what is not a number becomes 0. Int4 comes out packed along the last dimension.
Tensor quantised(const Tensor& value, Format format, at::ScalarType int4_storage = at::kInt);

// int4 numbers in int32, or two in an int8, along the last dimension.
Tensor pack_int4(const Tensor& values, at::ScalarType storage);
Tensor unpack_int4(const Tensor& packed);
// The numbers of a matrix (.., rows, columns) that arrives packed along its memory: along the columns, or along the rows where
// it is the transposed view of a packed one. int8 is returned as it is.
Tensor unpack_matrix(const char* name, const Tensor& packed, int64_t rows);

// ((numbers + offset) * scale) in `dtype`, in which the cube cores read a weight; in float16 the sum is rounded too (op-plugin,
// test_npu_grouped_matmul.py: A16W4).
Tensor antiquant(const Tensor& numbers, const OptionalTensor& offset, const Tensor& scale, at::ScalarType dtype);

// The product of small integers (at most 8 bits), exact in int32.
Tensor integer_product(const char* name, const Tensor& left, const Tensor& right);

// Scales that are encoded in 64 bits (npu_trans_quant_param): the float in the low half, nine bits of offset from bit 37.
Tensor encoded_scale(const Tensor& scale, const OptionalTensor& offset, bool round);
Tensor scale_of(const Tensor& encoded);
Tensor offset_of(const Tensor& encoded);

// The rows of a group, and which group it is.
struct Group {
  int64_t index, from, size;
};
// group_list: the ends of the groups (type 0), their sizes (1) or pairs of number and size (2).
std::vector<Group> groups_of(const char* name, const Tensor& list, int64_t type, int64_t rows);

struct Dynamic {
  Tensor y, scale;
};
// Symmetric: the scale is the largest absolute value of a row over the largest number of the format.
Dynamic dynamic_rows(const Tensor& value, Format format, at::ScalarType int4_storage = at::kInt);

Tensor rms_normed(const char* name, const Tensor& x, const Tensor& gamma, const OptionalTensor& beta, double epsilon,
                  Tensor* rstd);

void register_formats(torch::Library& npu);
void register_dynamic(torch::Library& npu);
void register_activations(torch::Library& npu);
void register_products(torch::Library& npu);
void register_weight_products(torch::Library& npu);
void register_groups(torch::Library& npu);

// npu_grouped_matmul with quantised arguments, or nothing where there are none (quant_grouped.cpp).
using OptionalList = std::optional<at::TensorList>;
struct GroupedArguments {
  at::TensorList x, weight;
  OptionalList bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale;
  std::optional<std::vector<Group>> groups;
  int64_t split, kind, activation;  // split_item, group_type, act_type
  std::optional<at::ScalarType> dtype;
};
bool is_quantised(const GroupedArguments& arguments);
std::vector<Tensor> quantised_grouped_matmul(const GroupedArguments& arguments);

}  // namespace sim::quant
