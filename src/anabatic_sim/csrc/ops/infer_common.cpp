#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "count.h"
#include "infer.h"

namespace sim::infer {

using at::Tensor;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Tensor index_tensor(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }

}  // namespace

bool is_given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined() && tensor->numel() > 0; }

void refuse_tensors(const char* name, std::initializer_list<std::pair<const char*, const OptionalTensor*>> arguments) {
  for (const auto& [argument, tensor] : arguments) refuse_value(name, argument, is_given(*tensor));
}

void refuse_value(const char* name, const std::string& argument, bool given) {
  TORCH_CHECK_NOT_IMPLEMENTED(!given, "anabatic sim: ", name, " with ", argument, " is not simulated");
}

Arguments::Arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack)
    : schema_(op.schema()), stack_(stack), base_(stack->size() - op.schema().arguments().size()) {
  name_ = schema_.name().substr(schema_.name().find("::") + 2);
  if (!schema_.overload_name().empty()) name_ += "." + schema_.overload_name();
}

bool Arguments::has(const char* argument) const { return schema_.argumentIndexWithName(argument).has_value(); }

const c10::IValue& Arguments::value(const char* argument) const {
  const auto index = schema_.argumentIndexWithName(argument);
  TORCH_INTERNAL_ASSERT(index.has_value(), name_, " has no argument ", argument);
  return (*stack_)[base_ + static_cast<size_t>(*index)];
}

bool Arguments::is_given(const char* argument) const {
  if (!has(argument) || value(argument).isNone()) return false;
  return !value(argument).isTensor() || infer::is_given(value(argument).toTensor());
}

Tensor Arguments::tensor(const char* argument) const { return value(argument).toTensor(); }

OptionalTensor Arguments::optional(const char* argument) const {
  if (!is_given(argument)) return std::nullopt;
  return value(argument).toTensor();
}

std::optional<std::vector<int64_t>> Arguments::lengths(const char* argument) const {
  if (!is_given(argument)) return std::nullopt;
  if (value(argument).isIntList()) return value(argument).toIntVector();
  std::vector<int64_t> found;
  for (const c10::IValue& item : value(argument).toListRef())
    found.push_back(item.isInt() ? item.toInt() : item.toSymInt().guard_int(__FILE__, __LINE__));
  return found;
}

int64_t Arguments::integer(const char* argument) const { return value(argument).toInt(); }
double Arguments::real(const char* argument) const { return value(argument).toDouble(); }
bool Arguments::flag(const char* argument) const { return value(argument).toBool(); }
std::vector<Tensor> Arguments::tensors(const char* argument) const { return value(argument).toTensorVector(); }

std::string Arguments::text(const char* argument, const char* when_none) const {
  return value(argument).isNone() ? when_none : std::string(value(argument).toStringView());
}

void Arguments::refuse(std::initializer_list<const char*> arguments) const {
  for (const char* argument : arguments) refuse_value(name(), argument, is_given(argument));
}

void Arguments::finish(std::vector<Tensor> results) {
  stack_->resize(base_);
  for (Tensor& result : results) stack_->emplace_back(std::move(result));
}

std::vector<int64_t> integers_of(const Tensor& tensor) {
  const Tensor flat = tensor.reshape({-1}).to(at::kLong).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

Attended attend(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options) {
  const int64_t heads = q.size(0), rows = q.size(1), groups = k.size(0), keys = k.size(1);
  if (rows == 0 || keys == 0)
    return {at::zeros({heads, rows, v.size(-1)}), at::full({heads, rows, 1}, kInfinity), at::zeros({heads, rows, 1}),
            at::zeros({heads, rows, 1})};
  add_flops(2.0 * heads * rows * keys * (q.size(2) + v.size(2)));
  Tensor scores = at::bmm(q.reshape({groups, -1, q.size(2)}), k.transpose(1, 2)).view({heads, rows, keys});
  scores.mul_(options.scale);
  if (options.added.defined()) scores = scores + options.added;
  if (options.hidden.defined()) scores.masked_fill_(options.hidden, -kInfinity);
  Attended result;
  result.max = scores.amax(-1, true);
  const Tensor blind = result.max.eq(-kInfinity);  // rows that see no key
  Tensor sink;
  if (options.sink.defined()) {
    sink = options.sink.to(at::kFloat).view({heads, 1, 1});
    result.max = at::maximum(result.max, sink);
  }
  result.max.masked_fill_(result.max.isinf(), 0);
  Tensor weights = (scores - result.max).exp_();
  result.sum = weights.sum(-1, true);
  if (sink.defined()) result.sum = result.sum + (sink - result.max).exp();
  weights.div_(result.sum.clamp_min(std::numeric_limits<float>::min()));
  result.out = at::bmm(weights.view({groups, -1, keys}), v).view({heads, rows, -1});
  result.lse = result.max + result.sum.log();
  if (!sink.defined()) result.lse.masked_fill_(blind, kInfinity);
  return result;
}

Tensor band(int64_t rows, int64_t columns, int64_t shift, int64_t before, int64_t after) {
  const Tensor distance = at::arange(columns).unsqueeze(0) - (at::arange(rows).unsqueeze(1) + shift);
  return distance.gt(after).logical_or_(distance.lt(-before));
}

namespace {

int64_t page_size(const Tensor& cache, PageLayout layout) {
  if (layout == PageLayout::TokensFirst) return cache.size(1);
  return cache.size(layout == PageLayout::HeadsFirst || cache.dim() == 4 ? 2 : 3);
}

// Pages as [n, block, heads, D]. A view, unless the format is fractal.
Tensor tokens_first(const char* name, const Tensor& pages, PageLayout layout, int64_t heads) {
  if (layout == PageLayout::TokensFirst) {
    TORCH_CHECK(pages.dim() == 3 || (pages.dim() == 4 && pages.size(2) == heads), name, ": a cache of shape ", pages.sizes(),
                " does not hold pages of [block, ", heads, " heads, D]");
    return pages.dim() == 4 ? pages : pages.unflatten(-1, {heads, pages.size(-1) / heads});
  }
  if (layout == PageLayout::HeadsFirst) {
    TORCH_CHECK(pages.dim() == 4 && pages.size(1) == heads, name, ": a cache of shape ", pages.sizes(),
                " does not hold pages of [", heads, " heads, block, D]");
    return pages.transpose(1, 2);
  }
  const Tensor split = pages.dim() == 5 ? pages : pages.unflatten(1, {heads, pages.size(1) / heads});
  TORCH_CHECK(split.dim() == 5 && split.size(1) == heads, name, ": a cache of shape ", pages.sizes(),
              " does not hold pages of [", heads, " heads, D / 16, block, 16]");
  return split.permute({0, 3, 1, 2, 4}).flatten(-2);
}

}  // namespace

Tensor page_rows(const char* name, const Tensor& cache, PageLayout layout, int64_t heads, const std::vector<int64_t>& pages,
                 int64_t from, int64_t rows) {
  const int64_t block = page_size(cache, layout);
  const int64_t first = from / block, last = rows == 0 ? first : (from + rows + block - 1) / block;
  TORCH_CHECK(last <= static_cast<int64_t>(pages.size()), name, ": a sequence of ", from + rows, " tokens needs ", last,
              " pages of ", block, ", block_table has ", pages.size());
  std::vector<int64_t> used(pages.begin() + first, pages.begin() + last);
  for (const int64_t page : used)
    TORCH_CHECK(page >= 0 && page < cache.size(0), name, ": block_table names page ", page, ", the cache has ", cache.size(0));
  const Tensor tokens = tokens_first(name, cache.index_select(0, index_tensor(used)), layout, heads);
  return tokens.flatten(0, 1).narrow(0, from - first * block, rows).transpose(0, 1).to(at::kFloat);
}

std::vector<std::vector<int64_t>> page_tables(const char* name, const Tensor& block_table) {
  TORCH_CHECK(block_table.dim() == 2, name, ": block_table must have 2 dimensions, got ", block_table.sizes());
  std::vector<std::vector<int64_t>> tables;
  for (int64_t i = 0; i < block_table.size(0); i++) tables.push_back(integers_of(block_table[i]));
  return tables;
}

void write_slots(const char* name, const Tensor& x, const Tensor& cache, PageLayout layout, const std::vector<int64_t>& slots) {
  TORCH_CHECK(static_cast<int64_t>(slots.size()) <= x.size(0), name, ": ", slots.size(), " slots for ", x.size(0), " tokens");
  TORCH_CHECK(x.scalar_type() == cache.scalar_type(), name, ": the cache holds ", cache.dtype(), ", got ", x.dtype());
  const int64_t block = page_size(cache, layout), capacity = cache.size(0) * block;
  std::vector<int64_t> pages, offsets, tokens;
  for (size_t i = 0; i < slots.size(); i++) {
    if (slots[i] < 0) continue;
    TORCH_CHECK(slots[i] < capacity, name, ": slot ", slots[i], " lies beyond the ", capacity, " of the cache");
    pages.push_back(slots[i] / block);
    offsets.push_back(slots[i] % block);
    tokens.push_back(static_cast<int64_t>(i));
  }
  if (tokens.empty()) return;
  const Tensor source = x.index_select(0, index_tensor(tokens));
  c10::List<std::optional<Tensor>> where;
  where.push_back(index_tensor(pages));
  where.push_back(index_tensor(offsets));
  Tensor target = cache;
  if (layout == PageLayout::HeadsFirst) target = cache.transpose(1, 2);
  if (layout == PageLayout::Fractal) target = cache.dim() == 5 ? cache.permute({0, 3, 1, 2, 4}) : cache.permute({0, 2, 1, 3});
  std::vector<int64_t> shape{source.size(0)};
  for (int64_t d = 2; d < target.dim(); d++) shape.push_back(target.size(d));
  TORCH_CHECK(source[0].numel() == target[0][0].numel(), name, ": a token has ", source[0].numel(),
              " numbers, a slot of the cache ", target[0][0].numel());
  target.index_put_(where, source.reshape(shape));
}

Tensor to_heads(const Tensor& x, std::string_view layout, int64_t heads) {
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  if (layout == "TND") return x.transpose(0, 1).unsqueeze(0);
  if (layout == "NTD" || layout == "NSD") return x.unsqueeze(0);
  return x.unflatten(-1, {heads, x.size(-1) / heads}).transpose(1, 2);  // BSH
}

Tensor from_heads(const Tensor& x, std::string_view layout) {
  if (layout == "BNSD") return x.contiguous();
  if (layout == "BSND") return x.transpose(1, 2).contiguous();
  if (layout == "NBSD") return x.transpose(0, 1).contiguous();
  if (layout == "TND") return x.squeeze(0).transpose(0, 1).contiguous();
  if (layout == "NTD" || layout == "NSD") return x.squeeze(0).contiguous();
  return x.transpose(1, 2).flatten(-2).contiguous();  // BSH
}

Tensor split_pairs(const Tensor& x) {
  return at::cat({x.slice(-1, 0, std::nullopt, 2), x.slice(-1, 1, std::nullopt, 2)}, -1);
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool halves) {
  const Tensor wide = x.to(at::kFloat);
  Tensor turned;
  if (halves) {
    const int64_t half = x.size(-1) / 2;
    turned = at::cat({-wide.narrow(-1, half, half), wide.narrow(-1, 0, half)}, -1);
  } else {
    turned = at::stack({-wide.slice(-1, 1, std::nullopt, 2), wide.slice(-1, 0, std::nullopt, 2)}, -1).flatten(-2);
  }
  return wide * cos.to(at::kFloat) + turned * sin.to(at::kFloat);
}

Tensor rms_norm(const Tensor& x, const Tensor& gamma, double epsilon) {
  const Tensor wide = x.to(at::kFloat);
  return wide * (wide.square().mean(-1, true) + epsilon).rsqrt() * gamma.to(at::kFloat);
}

}  // namespace sim::infer
