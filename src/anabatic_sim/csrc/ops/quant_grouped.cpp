// Grouped products of quantised weight: the quantised forms of npu_grouped_matmul, npu_grouped_matmul_swiglu_quant,
// npu_grouped_matmul_finalize_routing. Formulas from op-plugin's documentation (docs/zh/custom_APIs/torch_npu).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <limits>
#include <tuple>

#include "count.h"
#include "quant.h"

namespace sim::quant {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool filled(const OptionalList& list) { return list.has_value() && !list->empty(); }

// The tensor of one group: a list holds one per group, or one whose first dimension is the groups.
OptionalTensor of_group(const char* name, const char* argument, const OptionalList& list, int64_t group, int64_t groups) {
  if (!filled(list)) return std::nullopt;
  if (list->size() == 1) {
    const Tensor& all = (*list)[0];
    if (groups > 1 || (all.dim() > 1 && all.size(0) == 1)) {
      QUANT_CHECK(all.dim() >= 1 && all.size(0) == groups, name, argument, " ", all.sizes(), " does not fit ", groups,
                  " groups");
      return all[group];
    }
    return all;
  }
  QUANT_CHECK(static_cast<int64_t>(list->size()) == groups, name, argument, " has ", list->size(), " tensors for ", groups,
              " groups");
  return (*list)[static_cast<size_t>(group)];
}

// One group's operands.
struct Operands {
  const char* name;
  Tensor x, weight;  // the weight of int4 still packed
  OptionalTensor bias, scale, offset, token;
};

// Scales of k: (groups of k, n), (n) or (1); returns the number of groups of k and the scale of one of them.
Tensor table_of(const char* name, const char* argument, const Tensor& scale, int64_t inner, int64_t columns) {
  const Tensor table = wide(scale);
  if (table.numel() == 1) return table.reshape({1, 1});
  QUANT_CHECK(table.dim() <= 2 && table.size(-1) == columns, name, argument, " ", scale.sizes(), " does not fit ", columns,
              " columns");
  const Tensor rows = table.dim() == 2 ? table : table.unsqueeze(0);
  QUANT_CHECK(inner % rows.size(0) == 0, name, argument, " ", scale.sizes(), " does not divide k = ", inner);
  return rows;
}

// x @ (weight * scale), an exact sum for each group of k; scales are encoded for int4, where their 32 bits are all used.
Tensor scaled_product(const Operands& o, const Tensor& left, const Tensor& right) {
  const Tensor& scale = *o.scale;
  const Tensor table =
      table_of(o.name, "scale", scale.scalar_type() == at::kLong ? scale_of(scale) : scale, left.size(-1), right.size(-1));
  const int64_t groups = table.size(0), terms = left.size(-1) / groups;
  Tensor value;
  for (int64_t i = 0; i < groups; i++) {
    const Tensor part =
        wide(integer_product(o.name, left.narrow(-1, terms * i, terms), right.narrow(-2, terms * i, terms))) * table[i];
    value = value.defined() ? value + part : part;
  }
  return value;
}

Tensor per_token(const Operands& o) {
  QUANT_CHECK(o.token->scalar_type() == at::kFloat && o.token->numel() == o.x.size(0), o.name,
              "the scale per token must hold one float32 "
              "per row, got ",
              o.token->sizes(), " of ", o.token->dtype(), " for ", o.x.sizes());
  return o.token->reshape({-1, 1});
}

// int8 by int4: the kernel computes (x - 8) @ (weight * scale), to which bias adds 8 * sum(weight * scale), computed in
// advance; offset holds offsets of the weight times scales (op-plugin docs, npu_grouped_matmul_swiglu_quant_v2; CANN,
// aclnnGroupedMatmulFinalizeRoutingV3).
Tensor int8_by_int4(const Operands& o) {
  const Tensor right = unpack_matrix(o.name, o.weight, o.x.size(-1));
  QUANT_CHECK(o.scale->scalar_type() == at::kLong, o.name, "int8 by int4 needs an int64 scale, got ", o.scale->dtype());
  QUANT_CHECK(given(o.bias) && o.bias->scalar_type() == at::kFloat, o.name,
              "int8 by int4 needs the float32 correction of the weight");
  Tensor value = scaled_product(o, o.x.to(at::kShort) - 8, right) + *o.bias;
  if (given(o.offset)) {
    const Tensor table = table_of(o.name, "offset", *o.offset, o.x.size(-1), right.size(-1));
    value = value + wide(o.x).unflatten(-1, {table.size(0), -1}).sum(-1).matmul(table);
  }
  return value;
}

// What one group gives in float32, before the activation.
Tensor value_of(const Operands& o) {
  const bool int4_x = o.x.scalar_type() == at::kInt;
  QUANT_CHECK(given(o.scale), o.name, "a quantised product needs a scale");
  if (!int4_x && o.weight.scalar_type() == at::kInt) {
    const Tensor value = int8_by_int4(o);
    return given(o.token) ? value * per_token(o) : value;
  }
  if (int4_x) {
    const Tensor left = unpack_int4(o.x);
    const Tensor value = scaled_product(o, left, unpack_matrix(o.name, o.weight, left.size(-1)));
    return given(o.token) ? value * per_token(o) : value;
  }
  QUANT_CHECK(o.x.scalar_type() == at::kChar && o.weight.scalar_type() == at::kChar, o.name, "x is ", o.x.dtype(),
              " and weight ", o.weight.dtype());
  const bool early = given(o.bias) && o.bias->scalar_type() == at::kInt;
  const Tensor product = integer_product(o.name, o.x, o.weight), sum = early ? product + *o.bias : product;
  const bool encoded = o.scale->scalar_type() == at::kLong;
  const Tensor scale = table_of(o.name, "scale", encoded ? scale_of(*o.scale) : *o.scale, 1, o.weight.size(-1));
  Tensor value = wide(sum) * scale;
  if (given(o.token)) value = value * per_token(o);
  return given(o.bias) && !early ? value + wide(*o.bias) : value;
}

// Float x by an integer weight: ((weight + offset) * scale) in the dtype of x, as the cube cores read it.
Tensor antiquantised(const Operands& o) {
  const Tensor numbers = unpack_matrix(o.name, o.weight, o.x.size(-1));
  const int64_t rows = numbers.size(-2), columns = numbers.size(-1);
  const auto spread = [&](const char* argument, const Tensor& scale) {
    const Tensor table = table_of(o.name, argument, scale, rows, columns);
    return table.size(0) > 1 ? table.repeat_interleave(rows / table.size(0), 0) : table;
  };
  QUANT_CHECK(o.scale->scalar_type() == o.x.scalar_type(), o.name, "antiquant_scale must have the dtype of x, got ",
              o.scale->dtype());
  OptionalTensor shift;
  if (given(o.offset)) shift = spread("antiquant_offset", *o.offset);
  const Tensor right = antiquant(numbers, shift, spread("antiquant_scale", *o.scale), o.x.scalar_type());
  const Tensor y = at::matmul(wide(o.x), right);
  add_flops(2.0 * static_cast<double>(y.numel()) * static_cast<double>(rows));
  return given(o.bias) ? y + wide(*o.bias) : y;
}

Tensor activated(const char* name, const Tensor& value, int64_t kind) {
  switch (kind) {
    case 0: return value;
    case 1: return at::relu(value);
    case 2: return at::gelu(value, "tanh");
    case 4: return value * at::sigmoid(value * 1.702);
    case 5: return at::silu(value);
    default: QUANT_CHECK(false, name, "act_type ", kind, " is unknown");
  }
}

// Rows that no group holds are not written on hardware: not a number here, or 0 in an integer.
Tensor unwritten(at::IntArrayRef sizes, const Tensor& like, at::ScalarType dtype) {
  return at::full(sizes, at::isFloatingType(dtype) ? kNan : 0.0, like.options().dtype(dtype));
}

}  // namespace

bool is_quantised(const GroupedArguments& a) {
  if (filled(a.scale) || filled(a.antiquant_scale) || filled(a.antiquant_offset) || filled(a.per_token_scale) ||
      filled(a.offset))
    return true;
  return !a.x.empty() && !a.weight.empty() &&
         (!at::isFloatingType(a.x[0].scalar_type()) || !at::isFloatingType(a.weight[0].scalar_type()));
}

std::vector<Tensor> quantised_grouped_matmul(const GroupedArguments& a) {
  const char* name = "npu_grouped_matmul";
  TORCH_CHECK(!a.x.empty() && !a.weight.empty(), "Invalid inputs: neither x nor weight could be empty.");
  TORCH_CHECK(a.split >= 0 && a.split <= 3, "Invalid value of split_item [", a.split,
              "], which should only be one of 0/1/2/3.");
  QUANT_CHECK(a.kind == -1 || a.kind == 0, name, "a quantised product takes group_type -1 or 0, got ", a.kind);
  const bool stacked = a.weight.size() == 1 && a.weight[0].dim() == 3;
  const int64_t groups = stacked ? a.weight[0].size(0) : static_cast<int64_t>(a.weight.size());
  const auto kind = a.x[0].scalar_type();
  const bool floats = at::isFloatingType(kind);
  TORCH_CHECK_NOT_IMPLEMENTED(kind == at::kHalf || kind == at::kBFloat16 || kind == at::kChar || kind == at::kInt,
                              "anabatic sim: ", name, " of ", kind, " is not simulated");
  absent(name, {{"offset", filled(a.offset)}});
  QUANT_CHECK(floats == filled(a.antiquant_scale) && (floats || !filled(a.antiquant_offset)), name,
              "antiquant_scale belongs to a float x and an integer weight, x is ", kind);
  QUANT_CHECK(floats ? !filled(a.scale) && !filled(a.per_token_scale) : true, name,
              "scale and per_token_scale belong to an integer x");
  QUANT_CHECK(a.activation == 0 || filled(a.per_token_scale), name, "act_type needs per_token_scale");
  const bool whole = a.dtype == at::kInt && !floats;
  const auto wanted = a.dtype.value_or(floats ? kind : at::kChar);
  QUANT_CHECK(floats ? wanted == kind : whole || wanted == at::kChar || wanted == at::kHalf || wanted == at::kBFloat16, name,
              "output_dtype ", wanted, " does not go with x of ", kind);

  const auto compute = [&](const Tensor& x, const Tensor& token, int64_t group) -> Tensor {
    const auto& scales = floats ? a.antiquant_scale : a.scale;
    Operands o{name,
               x,
               stacked ? a.weight[0][group] : a.weight[static_cast<size_t>(group)],
               of_group(name, "bias", a.bias, group, groups),
               of_group(name, floats ? "antiquant_scale" : "scale", scales, group, groups),
               of_group(name, "antiquant_offset", a.antiquant_offset, group, groups),
               std::nullopt};
    if (token.defined()) o.token = token;
    if (floats) return antiquantised(o).to(wanted);
    if (whole) {
      const Tensor sum = integer_product(name, x, o.weight);
      return given(o.bias) ? sum + *o.bias : sum;
    }
    const Tensor value = activated(name, value_of(o), a.activation);
    return wanted == at::kChar ? quantised(value, Format::Int8) : value.to(wanted);
  };
  std::vector<Tensor> parts;
  if (a.x.size() == 1 && a.groups.has_value() && a.kind != -1) {
    const Tensor& x = a.x[0];
    const Tensor token = filled(a.per_token_scale) ? (*a.per_token_scale)[0].reshape({-1}) : Tensor();
    QUANT_CHECK(!token.defined() || token.size(0) == x.size(0), name, "per_token_scale ", token.sizes(), " does not fit x ",
                x.sizes());
    QUANT_CHECK(static_cast<int64_t>(a.groups->size()) == groups, name, groups, " weights and ", a.groups->size(), " groups");
    int64_t end = 0;
    for (const Group& group : *a.groups) {
      QUANT_CHECK(group.index >= 0 && group.index < groups, name, "group_list names group ", group.index, " of ", groups);
      parts.push_back(compute(x.narrow(0, group.from, group.size),
                              token.defined() ? token.narrow(0, group.from, group.size) : token, group.index));
      end = group.from + group.size;
    }
    if (a.split >= 2 && end < x.size(0)) parts.push_back(unwritten({x.size(0) - end, parts[0].size(-1)}, x, wanted));
  } else {
    TORCH_CHECK(static_cast<int64_t>(a.x.size()) == groups,
                "the num of x tensors must equal the num of weight tensors. Actual lengths: x [", a.x.size(), "], weight [",
                groups, "].");
    for (int64_t i = 0; i < groups; i++) {
      const auto at_i = static_cast<size_t>(i);
      QUANT_CHECK(!filled(a.per_token_scale) || a.per_token_scale->size() == a.x.size(), name,
                  "per_token_scale must have one tensor per x");
      parts.push_back(compute(a.x[at_i], filled(a.per_token_scale) ? (*a.per_token_scale)[at_i].reshape({-1}) : Tensor(), i));
    }
  }
  if (a.split < 2) return parts;
  return {at::cat(parts)};
}

namespace {

// A view of five dimensions shows the layout of the cube cores, which simulated memory does not have: npu_format_cast keeps (e,
// k, n).
void check_layout(const char* name, const Tensor& weight) {
  absent(name, {{"a weight of five dimensions (FRACTAL_NZ)", weight.dim() == 5}});
  QUANT_CHECK(weight.dim() == 3, name, "weight must have three dimensions, got ", weight.sizes());
}

struct SwigluArguments {
  const char* name;
  Tensor x, weight, weight_scale, x_scale;
  OptionalTensor smooth, correction;
};

// The product of each group, swish of its first half times the second, and a symmetric scale per row.
Dynamic grouped_swiglu(const SwigluArguments& a, const std::vector<Group>& groups) {
  const int64_t rows = a.x.size(0), columns = a.weight_scale.size(-1);
  QUANT_CHECK(a.x.dim() == 2 && columns % 2 == 0, a.name, "x must be a matrix and n even, got ", a.x.sizes(), " and ", columns);
  const Tensor& weight = a.weight;
  check_layout(a.name, weight);
  QUANT_CHECK(weight.size(0) == static_cast<int64_t>(groups.size()) && a.weight_scale.size(0) == weight.size(0), a.name,
              weight.size(0), " weights, ", a.weight_scale.size(0), " scales and ", groups.size(), " groups");
  QUANT_CHECK(a.x_scale.dim() == 1 && a.x_scale.size(0) == rows, a.name, "x_scale ", a.x_scale.sizes(), " does not fit x ",
              a.x.sizes());
  Tensor y = at::zeros({rows, columns / 2}, a.x.options().dtype(at::kChar));
  Tensor scale = unwritten({rows}, a.x, at::kFloat);
  for (const Group& group : groups) {
    if (group.size == 0) continue;
    Operands o{a.name,
               a.x.narrow(0, group.from, group.size),
               weight[group.index],
               std::nullopt,
               a.weight_scale[group.index],
               std::nullopt,
               a.x_scale.narrow(0, group.from, group.size)};
    if (given(a.correction)) o.bias = (*a.correction)[group.index];
    const auto halves = value_of(o).chunk(2, -1);
    Tensor value = at::silu(halves[0]) * halves[1];
    if (given(a.smooth)) value = value * wide((*a.smooth)[group.index]);
    const Dynamic result = dynamic_rows(value, Format::Int8);
    y.narrow(0, group.from, group.size).copy_(result.y);
    scale.narrow(0, group.from, group.size).copy_(result.scale);
  }
  return {y, scale};
}

std::tuple<Tensor, Tensor, Tensor> swiglu_quant(const Tensor& x, const Tensor& weight, const Tensor& list,
                                                const Tensor& weight_scale, const Tensor& x_scale, const OptionalTensor& bias,
                                                const OptionalTensor& offset) {
  const char* name = "npu_grouped_matmul_swiglu_quant";
  absent(name, {{"offset", given(offset)}});
  QUANT_CHECK(x.scalar_type() == at::kChar, name, "x must be int8, got ", x.dtype());
  if (weight.scalar_type() == at::kChar) absent(name, {{"bias of an int8 weight", given(bias)}});
  const Dynamic result =
      grouped_swiglu({name, x, weight, weight_scale, x_scale, std::nullopt, bias}, groups_of(name, list, 0, x.size(0)));
  return {result.y, result.scale, at::zeros({}, x.options().dtype(at::kFloat))};
}

std::tuple<Tensor, Tensor> swiglu_quant_v2(const Tensor& x, at::TensorList weight, at::TensorList weight_scale,
                                           const Tensor& x_scale, const Tensor& list, const OptionalTensor& smooth,
                                           OptionalList correction, const OptionalTensor& bias,
                                           std::optional<int64_t> dequant_mode, std::optional<int64_t> dequant_dtype,
                                           std::optional<int64_t> quant_mode, std::optional<int64_t> quant_dtype,
                                           std::optional<int64_t> list_type, at::OptionalIntArrayRef,
                                           std::optional<int64_t> x_dtype, std::optional<int64_t> weight_dtype,
                                           std::optional<int64_t> weight_scale_dtype, std::optional<int64_t> x_scale_dtype) {
  const char* name = "npu_grouped_matmul_swiglu_quant_v2";
  absent(name, {{"bias", given(bias)}});
  absent(name, {{"x_dtype", x_dtype.has_value()},
                {"weight_dtype", weight_dtype.has_value()},
                {"weight_scale_dtype", weight_scale_dtype.has_value()},
                {"x_scale_dtype", x_scale_dtype.has_value()}});
  TORCH_CHECK(weight.size() == 1, "The size of weight should be 1, current size is ", weight.size());
  TORCH_CHECK(weight_scale.size() == 1, "The size of weight_scale should be 1, current size is ", weight_scale.size());
  const auto kind = x.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(kind == at::kChar || kind == at::kInt, "anabatic sim: ", name, " of ", kind, " is not simulated");
  const bool int4 = weight[0].scalar_type() == at::kInt, pair = kind == at::kInt;
  QUANT_CHECK(int4 || !pair, name, "an int4 x needs an int4 weight");
  QUANT_CHECK(quant_mode.value_or(0) == 0 && (dequant_mode.value_or(0) == 0 || (dequant_mode == 1 && int4 && !pair)), name,
              "quant_mode must be 0, and dequant_mode 0, or 1 for int8 by int4");
  const int64_t dequant = dequant_dtype.value_or(0);
  QUANT_CHECK(dequant == 0 || dequant == static_cast<int64_t>(at::kFloat), name, "dequant_dtype must be float32, got ",
              dequant);
  // 0 and 1 (torch.int8) both stand for int8.
  QUANT_CHECK(quant_dtype.value_or(0) == 0 || format_of(name, "quant_dtype", quant_dtype) == Format::Int8, name,
              "quant_dtype must be int8");
  QUANT_CHECK(!given(smooth) || pair, name, "smooth_scale belongs to int4 by int4");
  QUANT_CHECK((int4 && !pair) == (filled(correction)), name,
              "weight_assist_matrix belongs to int8 by int4, and is needed there");
  OptionalTensor assist;
  if (filled(correction)) assist = (*correction)[0];
  const Dynamic result = grouped_swiglu({name, x, weight[0], weight_scale[0], x_scale, smooth, assist},
                                        groups_of(name, list, list_type.value_or(0), x.size(0)));
  return {result.y, result.scale};
}

// Products of the groups, times logit, added at row_index; the shared expert's output is added from row shared_input_offset on.
Tensor finalize_routing(const Tensor& x, const Tensor& weight, const Tensor& list, const OptionalTensor& scale,
                        const OptionalTensor& bias, const OptionalTensor& offset, const OptionalTensor& token,
                        const OptionalTensor& shared, const OptionalTensor& logit, const OptionalTensor& row_index,
                        std::optional<at::ScalarType> dtype, std::optional<double> shared_weight,
                        std::optional<int64_t> shared_offset, std::optional<int64_t> output_rows,
                        std::optional<int64_t> list_type, at::OptionalIntArrayRef, std::optional<int64_t> x_dtype,
                        std::optional<int64_t> weight_dtype, std::optional<int64_t> scale_dtype,
                        std::optional<int64_t> token_dtype) {
  const char* name = "npu_grouped_matmul_finalize_routing";
  absent(name, {{"x_dtype", x_dtype.has_value()},
                {"w_dtype", weight_dtype.has_value()},
                {"scale_dtype", scale_dtype.has_value()},
                {"pertoken_scale_dtype", token_dtype.has_value()}});
  TORCH_CHECK(dtype.value_or(at::kFloat) == at::kFloat, "The dtype should be float");
  TORCH_CHECK(list_type.value_or(1) == 1 || list_type == 0, "only support group_list_type's value 0 or 1.");
  check_layout(name, weight);
  QUANT_CHECK(x.dim() == 2 && x.scalar_type() == at::kChar, name, "x must be an int8 matrix, got ", x.sizes(), " of ",
              x.dtype());
  QUANT_CHECK(given(scale) && given(token) && given(logit) && given(row_index), name,
              "scale, pertoken_scale, logit and row_index are needed");
  const bool int4 = weight.scalar_type() == at::kInt;
  if (!int4) absent(name, {{"bias of an int8 weight", given(bias)}, {"offset of an int8 weight", given(offset)}});
  const auto groups = groups_of(name, list, list_type.value_or(1), x.size(0));
  QUANT_CHECK(weight.size(0) == static_cast<int64_t>(groups.size()) && scale->size(0) == weight.size(0), name, weight.size(0),
              " weights, ", scale->size(0), " scales and ", groups.size(), " groups");
  QUANT_CHECK(logit->numel() == x.size(0) && row_index->numel() == x.size(0) && token->numel() == x.size(0), name,
              "pertoken_scale, logit and row_index must hold one number per row of x ", x.sizes());
  const int64_t columns = scale->size(-1), wanted = output_rows.value_or(0), rows = wanted == 0 ? x.size(0) : wanted;
  Tensor y = at::zeros({rows, columns}, x.options().dtype(at::kFloat));
  for (const Group& group : groups) {
    if (group.size == 0) continue;
    Operands o{name,
               x.narrow(0, group.from, group.size),
               weight[group.index],
               std::nullopt,
               (*scale)[group.index],
               std::nullopt,
               token->reshape({-1}).narrow(0, group.from, group.size)};
    if (given(bias)) o.bias = (*bias)[group.index];
    if (given(offset)) o.offset = (*offset)[group.index];
    const Tensor value = value_of(o) * wide(logit->reshape({-1, 1}).narrow(0, group.from, group.size));
    y.index_add_(0, row_index->reshape({-1}).narrow(0, group.from, group.size).to(at::kLong), value);
  }
  if (!given(shared)) return y;
  const int64_t from = shared_offset.value_or(0);
  QUANT_CHECK(shared->dim() == 2 && shared->size(1) == columns && from >= 0 && from + shared->size(0) <= rows, name,
              "shared_input ", shared->sizes(), " from row ", from, " does not fit ", y.sizes());
  y.narrow(0, from, shared->size(0)).add_(wide(*shared), shared_weight.value_or(1.0));
  return y;
}

}  // namespace

void register_groups(torch::Library& npu) {
  npu.impl("npu_grouped_matmul_swiglu_quant", TORCH_FN(swiglu_quant));
  npu.impl("npu_grouped_matmul_swiglu_quant_v2", TORCH_FN(swiglu_quant_v2));
  npu.impl("npu_grouped_matmul_finalize_routing", TORCH_FN(finalize_routing));
}

}  // namespace sim::quant
