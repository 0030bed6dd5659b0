#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <string_view>
#include <typeinfo>

#include "../sim.h"
#include "alias.h"
#include "capture.h"
#include "count.h"
#include "products.h"
#include "saturate.h"

namespace sim {

namespace {

// Operators whose index or length arguments may stay on the host.
constexpr std::array<std::string_view, 6> kMixing = {"aten::index",           "aten::index_put",       "aten::index_put_",
                                                     "aten::_index_put_impl_", "aten::_pack_padded_sequence",
                                                         "aten::_foreach_copy_"};
// Operators whose result's shape or value needs the host to wait for the device.
constexpr std::array<std::string_view, 10> kSynchronising = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_consecutive",
    "aten::unique_dim", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave", "aten::bincount"};

// The cube cores' products (aclnnMm, aclnnBatchMatMul, aclnnAddmm, aclnnBaddbmm, aclnnDot: hiascend.com, CANN 8.0 reference).
constexpr std::array<std::string_view, 5> kProducts = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::dot"};

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  for (auto known : names)
    if (known == name) return true;
  return false;
}

bool is_optional_tensor_list(const c10::TypePtr& type) {
  auto list = type->cast<c10::ListType>();
  if (!list) return false;
  auto optional = list->getElementType()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->isSubtypeOf(*c10::TensorType::get());
}

c10::TypePtr strip_optional(const c10::TypePtr& type) {
  auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

const char* acl_name(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return "DT_DOUBLE";
    case at::kLong: return "DT_INT64";
    case at::kInt: return "DT_INT32";
    case at::kShort: return "DT_INT16";
    case at::kChar: return "DT_INT8";
    case at::kByte: return "DT_UINT8";
    case at::kBool: return "DT_BOOL";
    default: return at::toString(type);
  }
}

// The CPU multiplies every dtype, an NPU three of them: torch_npu's text for the others.
void check_product(const c10::OperatorName& name, c10::ArrayRef<at::Tensor> inputs) {
  const auto type = inputs.empty() ? at::kFloat : inputs.front().scalar_type();
  if (type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || !contains(kProducts, name.name)) return;
  TORCH_CHECK(false, "call aclnn for ", name.name, " failed, error code is 161002\n[ERROR] ERR00100 PTA call acl api failed.\n"
              "AclNN_Parameter_Error(EZ1001): Tensor self not implemented for ", acl_name(type),
              ", should be in dtype support list [DT_FLOAT,DT_FLOAT16,DT_BFLOAT16,].");
}

// Operators whose formats only the 950 family has (op-plugin docs; CANN docs, npu_quant_max and
// npu_swiglu_group_quant), beside those with mx_quant in their names.
constexpr std::array<std::string_view, 10> kLaterFormats = {
    "npu::npu_transpose_quant_batchmatmul", "npu::npu_add_quant_matmul", "npu::npu_add_quant_matmul_", "npu::npu_add_quant_gmm",
    "npu::npu_add_quant_gmm_", "npu::npu_dual_level_quant_matmul", "npu::npu_grouped_dynamic_block_quant", "npu::npu_quant_max",
    "npu::npu_swiglu_group_quant", "npu::npu_swiglu_group_quant_backward"};

const char* why_refused(std::string_view name) {
  if (contains(kLaterFormats, name) || name.find("mx_quant") != std::string_view::npos)
    return "it computes in FP8, HiFloat8 or MX formats, which are not simulated";
  if (name == "npu::npu_matmul_compress_dequant") return "its weights are compressed in a format that is not public";
  if (name.rfind("npu::npu_hans_", 0) == 0) return "the layout of its compressed data is not public";
  return "a real NPU may have it";
}

// op-plugin's checks of arguments end with a line of torch_npu's (OPS_ERROR, torch_npu/csrc/core/npu/NPUException.cpp).
std::string argument_error(c10::DeviceIndex device) {
  char now[32];
  const time_t seconds = time(nullptr);
  tm parts;
  localtime_r(&seconds, &parts);
  strftime(now, sizeof now, "%Y-%m-%d-%H:%M:%S", &parts);
  const char* rank = getenv("RANK");
  return std::string("\n[ERROR] ") + now + " (PID:" + std::to_string(getpid()) + ", Device:" + std::to_string(device) +
         ", RankID:" + (rank == nullptr ? "-1" : rank) + ") ERR01001 OPS invalid parameter";
}

// Runs the CPU's kernel; what it says about wrong arguments is what an NPU's kernel says.
template <typename Run>
void run_checked(const Call& call, Run run) {
  try {
    run();
  } catch (const c10::Error& error) {
    if (typeid(error) != typeid(c10::Error)) throw;  // an IndexError has another type in Python
    throw c10::Error(error.msg() + argument_error(call.device().index()), error.backtrace());
  }
}

c10::DeviceIndex current_device() {
  static const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  return guard.getDevice().index();
}

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(c10::DeviceType::PrivateUse1, current_device());
}

}  // namespace

CpuKernel::CpuKernel(const c10::OperatorHandle& op, c10::DispatchKey key) : key_(key) {
  const auto& schema = op.schema();
  for (const auto& argument : schema.arguments()) {
    const auto type = strip_optional(argument.type());
    bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    Kind kind = Kind::Other;
    if (type->isSubtypeOf(*c10::TensorType::get())) kind = Kind::Tensor;
    else if (type->isSubtypeOf(*c10::ListType::ofTensors())) kind = Kind::TensorList;
    else if (is_optional_tensor_list(type)) kind = Kind::OptionalTensorList;
    else if (type->kind() == c10::TypeKind::GeneratorType) kind = Kind::Generator;
    else if (type->kind() == c10::TypeKind::DeviceObjType) kind = Kind::Device;
    else if (argument.name() == "pin_memory") kind = Kind::PinMemory;
    written |= kind == Kind::TensorList && argument.name() == "out";  // npu_fused_infer_attention_score.out does not say so
    random_ |= kind == Kind::Generator;
    arguments_.push_back({kind, written});
  }
  for (const auto& result : schema.returns()) {
    int source = -1;
    if (result.alias_info() != nullptr && result.alias_info()->isWrite()) {
      for (size_t i = 0; i < schema.arguments().size(); i++) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite() && *alias == *result.alias_info()) source = static_cast<int>(i);
      }
    }
    returned_.push_back(source);
  }
  mixes_ = contains(kMixing, schema.name()) || schema.name().rfind("atb::", 0) == 0;  // ATB reads lengths on the host
  synchronises_ = contains(kSynchronising, schema.name());
  multiplies_ = is_product(schema.name()) && schema.overload_name().rfind("dtype", 0) != 0;  // those sum in fp32 as it is
}

void CpuKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const uint64_t started = sim_clock_ns();
  const size_t count = arguments_.size();
  const size_t base = stack->size() - count;
  Call call;
  bool to_host = false;
  at::Tensor host;  // a CPU tensor with dimensions among the arguments
  bool host_number = false;  // or one without
  c10::SmallVector<std::pair<size_t, c10::IValue>, 2> kept;  // arguments that are handed back
  std::optional<CapturedCall> captured;
  if (capture_on_any()) captured.emplace(op, key_, c10::ArrayRef<c10::IValue>(stack->data() + base, count));

  auto take = [&](const at::Tensor& tensor, bool written) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    if (on_npu(tensor)) return call.in(tensor, written);
    if (tensor.dim() > 0 && !mixes_) host = tensor;
    host_number |= tensor.dim() == 0;
    return tensor;
  };

  for (size_t i = 0; i < count; i++) {
    c10::IValue& value = (*stack)[base + i];
    const Argument argument = arguments_[i];
    if (argument.kind == Kind::Other || value.isNone()) continue;
    switch (argument.kind) {
      case Kind::Tensor: {
        const at::Tensor& tensor = value.toTensor();
        if (!tensor.defined()) break;
        at::Tensor alias = take(tensor, argument.written);
        if (argument.written) kept.emplace_back(i, value);
        value = std::move(alias);
        break;
      }
      case Kind::TensorList: {
        if (argument.written) kept.emplace_back(i, value);
        std::vector<at::Tensor> aliases;
        const auto list = value.toTensorList();
        aliases.reserve(list.size());
        for (at::Tensor tensor : list) aliases.push_back(take(tensor, argument.written));
        value = std::move(aliases);
        break;
      }
      case Kind::OptionalTensorList: {
        c10::List<std::optional<at::Tensor>> aliases;
        for (const c10::IValue& item : value.toListRef()) {
          if (item.isNone()) aliases.push_back(std::nullopt);
          else aliases.push_back(take(item.toTensor(), false));
        }
        value = std::move(aliases);
        break;
      }
      case Kind::Device: {
        const c10::Device device = value.toDevice();
        if (device.type() == c10::DeviceType::PrivateUse1) call.set_device(with_index(device));
        else to_host = true;
        value = c10::Device(c10::DeviceType::CPU);
        break;
      }
      case Kind::PinMemory:
        value = false;
        break;
      default:
        break;
    }
  }
  TORCH_CHECK(!host.defined() || !call.has_device(),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              call.device(), " and cpu!");
  TORCH_CHECK(call.has_device(), op.schema().name(), " was called for the NPU without a tensor or a device of it");
  check_dtype(op.operator_name(), call.inputs());
  check_product(op.operator_name(), call.inputs());
  if (captured.has_value() && !captured->begin(call)) captured.reset();
  if (random_) {
    for (size_t i = 0; i < count; i++) {
      if (arguments_[i].kind != Kind::Generator) continue;
      c10::IValue& value = (*stack)[base + i];
      value = take_generator(value.isNone() ? std::nullopt : std::make_optional(value.toGenerator()), call.device());
    }
  }

  {
    c10::OptionalDeviceGuard guard;
    if (current_device() != call.device().index()) guard.reset_device(call.device());
    const at::AutoDispatchBelowADInplaceOrView below;
    // A formula's temporaries would not exist on the device: only its results are taken from there, by Call::out.
    const DeviceMemory memory(!to_host && key_ == c10::DispatchKey::CPU);
    run_checked(call, [&] {
      if (multiplies_) run_product(op, key_, stack);
      else op.redispatchBoxed(c10::DispatchKeySet(key_), stack);
    });
    if (!kept.empty()) call.settle();
    const size_t first = stack->size() - returned_.size();
    if (saturates()) {
      for (const at::Tensor& tensor : call.written()) saturate(op.schema().name(), tensor, call);
      for (size_t i = first; i < stack->size(); i++) {
        const c10::IValue& value = (*stack)[i];
        if (value.isTensor()) saturate(op.schema().name(), value.toTensor(), call);
        else if (value.isTensorList())
          for (const at::Tensor& tensor : value.toTensorVector()) saturate(op.schema().name(), tensor, call);
      }
    }
    for (size_t i = 0; i < returned_.size(); i++) {
      c10::IValue& value = (*stack)[first + i];
      if (returned_[i] >= 0) {
        for (auto& [index, original] : kept)
          if (index == static_cast<size_t>(returned_[i])) value = original;
      } else if (to_host) {
        continue;
      } else if (value.isTensor()) {
        value = call.out(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> results;
        for (at::Tensor tensor : value.toTensorList()) results.push_back(call.out(tensor));
        value = std::move(results);
      }
    }
  }
  if (synchronises_) synchronise(op.schema().name().c_str());
  if (captured.has_value()) {
    std::vector<Kind> kinds;
    for (const Argument& argument : arguments_) kinds.push_back(argument.kind);
    captured->end(kinds, c10::ArrayRef<c10::IValue>(stack->data() + stack->size() - returned_.size(), returned_.size()), call);
  }
  check_dtype(op.operator_name(), call.outputs());
  sim_count_op({op.operator_name(), call.inputs(), call.outputs(), call.device().index(), sim_clock_ns() - started, host_number});
}

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "anabatic sim: operator ", op.operator_name(), " is not simulated (",
                              why_refused(op.schema().name()), "): see docs/en/concepts/sim-fidelity.md");
}

void check_dtype(const c10::OperatorName& name, c10::ArrayRef<at::Tensor> tensors) {
  static const bool bf16 = sim_segment()->bf16 != 0;
  if (bf16) return;
  for (const auto& tensor : tensors)
    TORCH_CHECK(tensor.scalar_type() != at::kBFloat16, "call aclnn for ", name.name,
                " failed, detail:EZ1001: Tensor dtype DT_BFLOAT16 is not supported on ", sim_segment()->soc,
                ".\n[ERROR] ERR00100 PTA call acl api failed");
}

}  // namespace sim
