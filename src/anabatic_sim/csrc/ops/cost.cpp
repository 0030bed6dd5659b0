// Operations are counted for what the cube cores run: products, attention, convolutions. Everything else is bound by memory.
// Sizes come from the tensors alone, so attention counts every pair of positions, as MFU figures do, masked or not.
#include "cost.h"

#include <string_view>
#include <unordered_map>

namespace sim {

namespace {

using Count = double (*)(const OpCall&);

int64_t last(const at::Tensor& tensor) { return tensor.dim() > 0 ? tensor.size(-1) : 1; }

// The two factors stand last, after a bias; one tensor alone is its own partner.
double product(const OpCall& call) {
  const size_t n = call.inputs.size();
  if (n == 0) return 0;
  const at::Tensor& left = call.inputs[n < 2 ? 0 : n - 2];
  const at::Tensor& right = call.inputs[n - 1];
  return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.dim() > 1 ? last(right) : 1);
}

double linear(const OpCall& call) {
  if (call.inputs.size() < 2) return 0;
  return 2.0 * static_cast<double>(call.inputs[0].numel()) * static_cast<double>(call.inputs[1].size(0));
}

// Each output element is a dot product over a filter.
double convolution(const OpCall& call) {
  if (call.inputs.size() < 2 || call.outputs.empty()) return 0;
  const at::Tensor& filter = call.inputs[1];
  return 2.0 * static_cast<double>(call.outputs[0].numel()) * static_cast<double>(filter.numel() / std::max<int64_t>(filter.size(0), 1));
}

double convolution_backward(const OpCall& call) {
  if (call.inputs.size() < 3) return 0;
  const at::Tensor& filter = call.inputs[2];
  return 4.0 * static_cast<double>(call.inputs[0].numel()) * static_cast<double>(filter.numel() / std::max<int64_t>(filter.size(0), 1));
}

// (B, N, S, D): two products over all pairs of positions.
double pairs(const at::Tensor& query, const at::Tensor& key) {
  const int64_t length = key.dim() == 4 ? key.size(2) : key.dim() == 3 ? std::max(key.size(0), key.size(1)) : 0;
  return 4.0 * static_cast<double>(query.numel()) * static_cast<double>(length);
}

double attention(const OpCall& call) { return call.inputs.size() < 2 ? 0 : pairs(call.inputs[0], call.inputs[1]); }

// Five products instead of two; the gradient stands before query and key.
double attention_backward(const OpCall& call) { return call.inputs.size() < 3 ? 0 : 2.5 * pairs(call.inputs[1], call.inputs[2]); }

double attention_grad(const OpCall& call) { return 2.5 * attention(call); }

const std::unordered_map<std::string_view, Count> kCounts = {
    {"aten::mm", product}, {"aten::addmm", product}, {"aten::addmm_", product}, {"aten::bmm", product}, {"aten::baddbmm", product},
    {"aten::baddbmm_", product}, {"aten::addbmm", product}, {"aten::mv", product}, {"aten::addmv", product},
    {"aten::matmul", product}, {"aten::linear", linear}, {"npu::npu_linear", linear}, {"npu::npu_bmmV2", product},
    {"aten::convolution", convolution}, {"aten::_convolution", convolution}, {"aten::convolution_overrideable", convolution},
    {"aten::convolution_backward", convolution_backward}, {"aten::convolution_backward_overrideable", convolution_backward},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", attention},
    {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward},
    {"npu::npu_fusion_attention", attention}, {"npu::npu_fusion_attention_v2", attention}, {"npu::npu_fusion_attention_v3", attention},
    {"npu::npu_fusion_attention_grad", attention_grad}, {"npu::npu_fusion_attention_grad_v2", attention_grad},
    {"npu::npu_fusion_attention_grad_v3", attention_grad}};

// Lists of equal length that a foreach operator takes: it writes into the first.
size_t lists(std::string_view name, std::string_view overload) {
  if (name.find("addc") != std::string_view::npos) return 3;
  if (name.find("lerp") != std::string_view::npos) return overload == "List" ? 3 : 2;
  return overload == "List" ? 2 : 1;
}

// An operator that ends in _ reads and writes what it works on.
uint64_t written(const OpCall& call) {
  const std::string_view name = call.name.name;
  if (call.inputs.empty() || name.back() != '_') return 0;
  if (name.rfind("aten::_foreach_", 0) != 0) return bytes_of(call.inputs.slice(0, 1));
  return bytes_of(call.inputs.slice(0, call.inputs.size() / lists(name, call.name.overload_name)));
}

SimUnit unit_for(const OpCall& call) {
  const auto dtype = call.inputs[0].scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kChar ? SIM_CUBE_HALF : SIM_CUBE_SINGLE;
}

}  // namespace

namespace {

thread_local double noted = 0;

// The dispatcher's names live as long as the process: their addresses are faster keys than their text.
Count count_of(const c10::OperatorName& name) {
  thread_local std::unordered_map<const c10::OperatorName*, Count> counts;
  const auto [found, is_new] = counts.try_emplace(&name, nullptr);
  if (is_new) {
    const auto known = kCounts.find(name.name);
    if (known != kCounts.end()) found->second = known->second;
  }
  return found->second;
}

}  // namespace

void add_flops(double flops) { noted += flops; }

double take_flops() {
  const double flops = noted;
  noted = 0;
  return flops;
}

Work work_of(const OpCall& call) {
  const uint64_t bytes = bytes_of(call.inputs) + bytes_of(call.outputs) + written(call);
  const double told = take_flops();
  const Count count = count_of(call.name);
  const double flops = told > 0 ? told : count != nullptr ? count(call) : 0;
  if (flops > 0 && !call.inputs.empty()) return {unit_for(call), flops, bytes};
  for (const auto& tensor : call.inputs)
    if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0) return {SIM_HOST_LINK, 0, bytes_of(call.inputs.slice(0, 1))};
  return {SIM_VECTOR, 0, bytes};
}

}  // namespace sim
