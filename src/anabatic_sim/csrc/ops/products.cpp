// Without instructions for bf16 and fp16 torch multiplies them one by one: 512 x 704 by 704 x 256 takes 29 to 157
// ms where fp32 takes 3 (torch 2.13 on AVX2). Copies in fp32 cost a few percent of the product. With such instructions
// oneDNN multiplies, whose scratch memory is not the device's either.
#include "products.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>

#include <array>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include "alias.h"

namespace sim {

namespace {

constexpr std::array<std::string_view, 27> kProducts = {
    "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::addbmm_",
    "aten::matmul", "aten::_addmm_activation", "aten::convolution", "aten::_convolution", "aten::convolution_backward",
    "aten::convolution_overrideable", "aten::convolution_backward_overrideable", "npu::npu_linear", "npu::npu_linear_backward",
    "npu::npu_conv2d", "npu::npu_conv2d_backward", "npu::npu_conv3d", "npu::npu_conv3d_backward", "npu::npu_convolution",
    "npu::npu_convolution_backward", "npu::npu_conv_transpose2d", "npu::npu_conv_transpose2d_backward",
    "npu::npu_convolution_transpose", "npu::npu_convolution_transpose_backward"};
// Of query, key, value, output and their gradient; the statistics of the rows are fp32 at all times.
constexpr std::string_view kAttentionBackward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
constexpr int64_t kFewRows = 2;  // torch's CPU kernels are fast for a vector and a matrix that lies transposed

// Whether this processor multiplies the format itself: flags of x86 and features of Arm in /proc/cpuinfo (Linux, hwcaps).
bool has_instructions(at::ScalarType format) {
  static const std::string flags = [] {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
      if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) return line + " ";
    return std::string();
  }();
  const auto listed = [](const char* flag) { return flags.find(flag) != std::string::npos; };
  static const bool bf16 = listed(" avx512_bf16 ") || listed(" bf16 "), fp16 = listed(" avx512_fp16 ") || listed(" asimdhp ");
  return format == at::kBFloat16 ? bf16 : fp16;
}

bool is_fp32(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat; }

// The 16-bit format of all floating-point tensors among the arguments; none where there is another one.
std::optional<at::ScalarType> common_format(c10::ArrayRef<c10::IValue> arguments, bool with_fp32) {
  std::optional<at::ScalarType> found;
  for (const c10::IValue& value : arguments) {
    if (value.isTensorList()) return std::nullopt;
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& tensor = value.toTensor();
    if (with_fp32 && is_fp32(tensor)) continue;
    if (!at::isReducedFloatingType(tensor.scalar_type()) || found.value_or(tensor.scalar_type()) != tensor.scalar_type())
      return std::nullopt;
    found = tensor.scalar_type();
  }
  return found == at::kHalf || found == at::kBFloat16 ? found : std::nullopt;
}

bool has_few_rows(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const std::string_view name = op.schema().name();
  if (name != "aten::mm" && name != "aten::addmm") return false;
  const size_t left = name == "aten::mm" ? 0 : 1;
  const at::Tensor &rows = arguments[left].toTensor(), &columns = arguments[left + 1].toTensor();
  return rows.dim() == 2 && columns.dim() == 2 && rows.size(0) <= kFewRows && columns.stride(0) == 1;
}

// Runs an operator with its scratch memory on the host, and copies its results to the device. One that writes an argument
// may have to make it larger, on the device.
void run_in_host_memory(const c10::OperatorHandle& op, c10::DispatchKey key, torch::jit::Stack* stack) {
  if (op.schema().is_mutable()) return op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  {
    const DeviceMemory host(false);
    op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) value = value.toTensor().clone();
  }
}

}  // namespace

bool is_product(std::string_view name) {
  for (auto known : kProducts)
    if (known == name) return true;
  return name == kAttentionBackward;
}

void run_product(const c10::OperatorHandle& op, c10::DispatchKey key, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const bool is_attention = schema.name() == kAttentionBackward;
  const size_t count = schema.arguments().size(), base = stack->size() - count;
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + base, count);
  const auto format = common_format(arguments, is_attention);
  if (!format.has_value() || has_few_rows(op, arguments)) return op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  if (has_instructions(*format)) return run_in_host_memory(op, key, stack);
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 1> written;  // what the caller's tensor becomes
  {
    const DeviceMemory host(false);  // a device needs no copies
    for (size_t i = 0; i < count; i++) {
      c10::IValue& value = (*stack)[base + i];
      if (!value.isTensor() || !value.toTensor().defined() || is_fp32(value.toTensor())) continue;
      const auto* alias = schema.arguments()[i].alias_info();
      at::Tensor wide = value.toTensor().to(at::kFloat);
      if (alias != nullptr && alias->isWrite()) written.emplace_back(value.toTensor(), wide);
      value = std::move(wide);
    }
    op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    at::Tensor target;
    for (auto& [original, wide] : written)
      if (wide.is_same(value.toTensor())) target = original;
    if (!target.defined()) {
      value = value.toTensor().to(*format);
      continue;
    }
    at::native::resize_output(target, value.toTensor().sizes());
    target.copy_(value.toTensor());
    value = std::move(target);
  }
}

}  // namespace sim
