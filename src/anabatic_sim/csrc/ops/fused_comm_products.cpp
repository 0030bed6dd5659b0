// Matrix products with a collective in the same operator: npu_all_gather_base_mm, npu_mm_reduce_scatter_base,
// npu_mm_all_reduce_base.
//
// Formulas: op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_all_gather_base_mm.md, ..._mm_reduce_scatter_base.md,
// ..._mm_all_reduce_base.md. A product alone has the bits of aten::mm; with scales, a bias or x3 it is float32 and rounded to the
// dtype of the result before it is sent. Ranks are added in their order. Compute and transfers overlap on hardware: here the
// predicted time is that of both, one after the other.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>

#include <torch/library.h>

#include <string_view>
#include <tuple>

#include "comm_group.h"
#include "count.h"
#include "fused_common.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalText = std::optional<c10::string_view>;
using OptionalInt = std::optional<int64_t>;

constexpr int64_t kShortestInner = 256, kLongestInner = 65535;  // of the products that gather or scatter: [256, 65535)

Tensor product(const Tensor& left, const Tensor& right, bool alone) {
  add_flops(2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(1)));
  const auto type = left.scalar_type();
  if (alone && type == right.scalar_type() && at::isFloatingType(type)) return at::matmul(left, right);
  // Sums of int8 products are exact in float64.
  const auto wide = type == at::kChar ? at::kDouble : at::kFloat;
  return at::matmul(left.to(wide), right.to(wide));
}

// Scales that npu_trans_quant_param packed into int64 are float32 in the lower half.
Tensor scale_values(const Tensor& scale) {
  if (scale.scalar_type() != at::kLong) return scale.to(at::kFloat);
  return scale.contiguous().view(at::kInt).view({-1, 2}).select(1, 0).contiguous().view(at::kFloat).view(scale.sizes());
}

void check_mode(const char* name, const OptionalText& mode, int64_t turn) {
  TORCH_CHECK(!mode.has_value() || *mode == "ai_cpu" || *mode == "aiv", name, ": comm_mode must be ai_cpu or aiv, got ",
              mode.value_or(""));
  TORCH_CHECK(turn == 0, name, ": comm_turn only supports 0, got ", turn);
}

struct Split {  // arguments of the products that gather or scatter
  const Tensor &x1, &x2;
  const OptionalTensor &bias, &x1_scale, &x2_scale;
  std::optional<at::ScalarType> output_dtype;
  OptionalText mode;

  bool quantised() const { return is_given(x2_scale); }
  at::ScalarType dtype() const {
    if (!quantised()) return x1.scalar_type();
    return x2_scale->scalar_type() == at::kLong ? at::kHalf : output_dtype.value_or(at::kBFloat16);
  }
};

void check_scales(const char* name, const Split& job) {
  TORCH_CHECK(!is_given(job.x1_scale) || (job.x1_scale->scalar_type() == at::kFloat && job.x1_scale->numel() == job.x1.size(0)),
              name, ": call aclnn failed, detail:EZ1001: x1_scale must be float32 of shape [", job.x1.size(0), ", 1]");
  TORCH_CHECK(job.x2_scale->numel() == job.x2.size(1) &&
                  (job.x2_scale->scalar_type() == at::kFloat || job.x2_scale->scalar_type() == at::kLong),
              name, ": call aclnn failed, detail:EZ1001: x2_scale must be float32 or int64 of shape [1, ", job.x2.size(1), "]");
}

void check_split(const char* name, const Split& job, int64_t world_size) {
  TORCH_CHECK(world_size == 2 || world_size == 4 || world_size == 8 || world_size == 16 || world_size == 32,
              "world_size should be in [2, 4, 8, 16, 32], but the actual value is ", world_size, ".");
  TORCH_CHECK(job.x1.dim() == 2 && job.x2.dim() == 2, "Both inputs of mm are required to be 2D, but the actual inputs are ",
              job.x1.dim(), "D and ", job.x2.dim(), "D.");
  TORCH_CHECK(job.x1.size(1) == job.x2.size(0),
              "The K-axis in the two inputs of Matmul must be equal, but in reality, the K-axis of x1 is ", job.x1.size(1),
              " and the K-axis of x2 is ", job.x2.size(0), ".");
  const auto type = job.x1.scalar_type();
  const bool wide = type == at::kHalf || type == at::kBFloat16;
  TORCH_CHECK((wide || (type == at::kChar && job.quantised())) && job.x2.scalar_type() == type, name,
              ": call aclnn failed, detail:EZ1001: x1 and x2 must both be float16 or bfloat16, or int8 with x2_scale, got ", type,
              " and ", job.x2.scalar_type());
  TORCH_CHECK(!wide || !job.quantised(), name, ": x2_scale belongs to int8 inputs, x1 is ", type);
  const int64_t inner = job.x1.size(1);
  TORCH_CHECK(inner >= kShortestInner && inner < kLongestInner, name,
              ": call aclnn failed, detail:EZ1001: the K-axis must be in [256, 65535), got ", inner);
  TORCH_CHECK(job.x1.stride(1) == 1, name, ": call aclnn failed, detail:EZ1001: x1 must not be transposed");
  TORCH_CHECK(!job.quantised() || job.mode.value_or("ai_cpu") == "aiv", "When comm_mode is ai_cpu, quantization not supported.");
  TORCH_CHECK_NOT_IMPLEMENTED(!is_given(job.bias) || job.bias->eq(0).all().item<bool>(), "anabatic sim: ", name,
                              " with a bias other than 0 is not simulated (the documentation excludes it)");
  if (job.quantised()) check_scales(name, job);
}

// (x1_scale * x2_scale) * (x1 @ x2), as the dtype of the result.
Tensor scaled_product(const Split& job, const Tensor& x1, const OptionalTensor& x1_scale) {
  Tensor y = product(x1, job.x2, !job.quantised());
  if (job.quantised()) y = y * scale_values(*job.x2_scale).view({1, -1});
  if (is_given(x1_scale)) y = y * x1_scale->view({-1, 1});
  return y.to(job.dtype());
}

std::tuple<Tensor, Tensor> gather_product(const Tensor& x1, const Tensor& x2, c10::string_view hcom, int64_t world_size,
                                          const OptionalTensor& bias, const OptionalTensor& x1_scale,
                                          const OptionalTensor& x2_scale, int64_t gather_index, bool gather_output,
                                          int64_t comm_turn, std::optional<at::ScalarType> output_dtype, OptionalText comm_mode) {
  const char* name = "npu_all_gather_base_mm";
  const Split job{x1, x2, bias, x1_scale, x2_scale, output_dtype, comm_mode};
  check_mode(name, comm_mode, comm_turn);
  check_split(name, job, world_size);
  TORCH_CHECK(gather_index == 0, name, ": gather_index only supports 0, got ", gather_index);
  const CommGroup group(name, "hcom", hcom);
  group.check_size("world_size", world_size);
  const Tensor whole = group.all_gather(x1);
  const OptionalTensor scales = is_given(x1_scale) ? OptionalTensor(group.all_gather(*x1_scale)) : std::nullopt;
  return {scaled_product(job, whole, scales), gather_output ? whole : at::empty({0}, x1.options())};
}

Tensor product_scatter(const Tensor& x1, const Tensor& x2, c10::string_view hcom, int64_t world_size, c10::string_view reduce_op,
                       const OptionalTensor& bias, const OptionalTensor& x1_scale, const OptionalTensor& x2_scale,
                       int64_t comm_turn, std::optional<at::ScalarType> output_dtype, OptionalText comm_mode) {
  const char* name = "npu_mm_reduce_scatter_base";
  const Split job{x1, x2, bias, x1_scale, x2_scale, output_dtype, comm_mode};
  check_mode(name, comm_mode, comm_turn);
  check_split(name, job, world_size);
  TORCH_CHECK(x1.size(0) % world_size == 0, "The M-axis in input of Matmul should be be divisible by world_size.");
  TORCH_CHECK(reduce_op == "sum", name, ": reduce_op only supports sum, got ", reduce_op);
  const CommGroup group(name, "hcom", hcom);
  group.check_size("world_size", world_size);
  return group.reduce_scatter(scaled_product(job, x1, x1_scale));
}

// A weight in int8 as (x2 + offset) * scale, with one pair for all, per column or per group of rows.
Tensor weight_values(const Tensor& x2, const OptionalTensor& scale, const OptionalTensor& offset, int64_t group_size) {
  const char* name = "npu_mm_all_reduce_base";
  if (!is_given(scale)) return x2;
  const int64_t inner = x2.size(0), groups = group_size > 0 ? (inner + group_size - 1) / group_size : 1;
  TORCH_CHECK(scale->numel() == 1 || scale->numel() == groups * x2.size(1), name, ": antiquant_scale ", scale->sizes(),
              " must have 1, N or [ceil(K / antiquant_group_size), N] elements for x2 of ", x2.sizes());
  TORCH_CHECK(!is_given(offset) || offset->sizes() == scale->sizes(), name, ": antiquant_offset ", offset->sizes(),
              " must have the shape of antiquant_scale ", scale->sizes());
  const auto rows_of = [&](const Tensor& values) {
    const Tensor wide = values.to(at::kFloat);
    if (values.numel() == 1) return wide.view({1, 1});
    return groups == 1 ? wide.view({1, -1}) : wide.view({groups, -1}).repeat_interleave(group_size, 0).narrow(0, 0, inner);
  };
  const Tensor wide = x2.to(at::kFloat);
  return (is_given(offset) ? wide + rows_of(*offset) : wide) * rows_of(*scale);
}

struct Sum {  // arguments of npu_mm_all_reduce_base
  const Tensor &x1, &x2;
  const OptionalTensor &bias, &antiquant_scale, &antiquant_offset, &x3, &dequant_scale, &pertoken_scale;
  int64_t group_size;

  bool whole_int8() const { return x1.scalar_type() == at::kChar; }
  at::ScalarType dtype() const {
    if (!whole_int8()) return x1.scalar_type();
    return dequant_scale->scalar_type() == at::kBFloat16 ? at::kBFloat16 : at::kHalf;
  }
};

void check_sum(const char* name, const Sum& job) {
  const char* failed = ": call aclnnMatmulAllReduce failed, detail:EZ1001: ";
  TORCH_CHECK(job.x2.dim() == 2, "x2 needs to be 2D, but got: ", job.x2.dim(), "D");
  TORCH_CHECK(job.x1.dim() == 2 || job.x1.dim() == 3, name, failed, "x1 must be 2D or 3D, got ", job.x1.sizes());
  TORCH_CHECK(job.x1.size(-1) == job.x2.size(0), "K of x1 and x2 should be same, but they are x1_k: ", job.x1.size(-1),
              ", x2_k: ", job.x2.size(0));
  const auto left = job.x1.scalar_type(), right = job.x2.scalar_type();
  TORCH_CHECK(left == at::kHalf || left == at::kBFloat16 || left == at::kChar, name, failed, "x1 is ", left,
              ", not float16, bfloat16 or int8");
  TORCH_CHECK(right == left || right == at::kChar, name, failed, "x2 is ", right, ", x1 is ", left);
  TORCH_CHECK(job.whole_int8() == is_given(job.dequant_scale), "when neither dtype of x1 or dtype of x2 is equal to int8, ",
              "antiquantScale, antiquantOffset and dequantScale should all be null: dequant_scale belongs to int8 x1 and x2");
  TORCH_CHECK((right == at::kChar && !job.whole_int8()) == is_given(job.antiquant_scale), name, failed,
              "antiquant_scale belongs to int8 x2 with x1 of float16 or bfloat16");
  TORCH_CHECK(!is_given(job.antiquant_offset) || is_given(job.antiquant_scale), name, failed,
              "antiquant_offset needs antiquant_scale");
  TORCH_CHECK(!is_given(job.pertoken_scale) || is_given(job.dequant_scale),
              "when has pertoken_scale, dequantScale shoulden't be null");
  const int64_t rows = job.x1.numel() / std::max<int64_t>(job.x1.size(-1), 1);
  TORCH_CHECK(!is_given(job.pertoken_scale) ||
                  (job.pertoken_scale->scalar_type() == at::kFloat && job.pertoken_scale->sizes() == at::IntArrayRef({rows})),
              "pertoken_scale must be float32 of shape [", rows, "]");
  TORCH_CHECK(!is_given(job.bias) || (job.bias->dim() == 1 && job.bias->size(0) == job.x2.size(1) &&
                                      job.bias->scalar_type() == (job.whole_int8() ? at::kInt : left)),
              name, failed, "bias must be ", job.whole_int8() ? at::kInt : left, " of shape [", job.x2.size(1), "]");
  auto sizes = job.x1.sizes().vec();
  sizes.back() = job.x2.size(1);
  TORCH_CHECK(!is_given(job.x3) || job.x3->sizes() == at::IntArrayRef(sizes), "x3 with shape ", job.x3->sizes(),
              " doesn't match the output shape ", at::IntArrayRef(sizes));
  TORCH_CHECK(!is_given(job.x3) || job.x3->scalar_type() == job.dtype(), "x3 with dtype ", job.x3->scalar_type(),
              " doesn't match the output dtype ", job.dtype());
}

Tensor product_sum(const Tensor& x1, const Tensor& x2, c10::string_view hcom, c10::string_view reduce_op,
                   const OptionalTensor& bias, const OptionalTensor& antiquant_scale, const OptionalTensor& antiquant_offset,
                   const OptionalTensor& x3, const OptionalTensor& dequant_scale, const OptionalTensor& pertoken_scale,
                   const OptionalTensor& quant1, const OptionalTensor& quant2, int64_t antiquant_group_size, int64_t comm_turn,
                   at::OptionalIntArrayRef group_sizes, OptionalInt y_dtype, OptionalInt x1_dtype, OptionalInt x2_dtype,
                   OptionalInt dequant_scale_dtype, OptionalInt pertoken_scale_dtype, int64_t comm_quant_mode,
                   OptionalText comm_mode) {
  const char* name = "npu_mm_all_reduce_base";
  refuse_given(name, {{"comm_quant_scale_1", &quant1}, {"comm_quant_scale_2", &quant2}});
  TORCH_CHECK_NOT_IMPLEMENTED(!group_sizes.has_value() || group_sizes->empty(), "anabatic sim: ", name,
                              " with group_sizes is not simulated");
  TORCH_CHECK_NOT_IMPLEMENTED(!y_dtype && !x1_dtype && !x2_dtype && !dequant_scale_dtype && !pertoken_scale_dtype,
                              "anabatic sim: ", name, " with y_dtype, x1_dtype, x2_dtype or a dtype of scales is not simulated");
  TORCH_CHECK_NOT_IMPLEMENTED(comm_quant_mode == 0, "anabatic sim: ", name, " with comm_quant_mode ", comm_quant_mode,
                              " is not simulated");
  check_mode(name, comm_mode, comm_turn);
  TORCH_CHECK(reduce_op == "sum", name, ": reduce_op only supports sum, got ", reduce_op);
  const Sum job{x1, x2, bias, antiquant_scale, antiquant_offset, x3, dequant_scale, pertoken_scale, antiquant_group_size};
  check_sum(name, job);
  const CommGroup group(name, "hcom", hcom);
  Tensor y = product(x1.reshape({-1, x1.size(-1)}), weight_values(x2, antiquant_scale, antiquant_offset, antiquant_group_size),
                     !is_given(bias) && !is_given(x3));
  if (is_given(bias)) y = y + bias->to(y.scalar_type());
  if (is_given(dequant_scale)) y = y * scale_values(*dequant_scale).reshape({1, -1});
  if (is_given(pertoken_scale)) y = y * pertoken_scale->view({-1, 1});
  auto sizes = x1.sizes().vec();
  sizes.back() = x2.size(1);
  y = y.view(sizes);
  if (is_given(x3)) y = y + x3->to(y.scalar_type());
  return group.all_reduce(y.to(job.dtype()));
}

}  // namespace

void register_comm_products(torch::Library& npu) {
  npu.impl("npu_all_gather_base_mm", TORCH_FN(gather_product));
  npu.impl("npu_mm_reduce_scatter_base", TORCH_FN(product_scatter));
  npu.impl("npu_mm_all_reduce_base", TORCH_FN(product_sum));
}

}  // namespace sim
