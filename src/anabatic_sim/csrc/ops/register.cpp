// Puts our kernels over torch_npu's. Runs when the library is loaded (aclInit does that), once per process.
//
// The list of operators is torch_npu's own: what it registered for PrivateUse1 is what we take over. Three kinds stay its own:
// allocation, views and storage. Whatever has no CPU kernel and no kernel of ours is refused by name.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>

#include "alias.h"
#include "count.h"
#include "fallback.h"
#include "kernels.h"

namespace sim {

namespace {

// Allocation, views, storage, streams: torch_npu's own code, on the simulated runtime.
const std::unordered_set<std::string_view> kKept = {
    "aten::as_strided", "aten::as_strided_", "aten::_reshape_alias", "aten::squeeze", "aten::squeeze.dim", "aten::unsqueeze",
    "aten::unfold", "aten::view", "aten::view_as_complex", "aten::view_as_real", "aten::empty.memory_format",
    "aten::empty_strided", "aten::empty_like", "aten::new_empty_strided", "aten::resize_", "aten::resize_as_", "aten::set_",
    "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::is_set_to",
    "aten::is_pinned", "aten::_pin_memory", "aten::record_stream", "aten::_to_copy",
    "npu::get_npu_format", "npu::get_storage_size", "npu::npu_format_cast", "npu::npu_format_cast.Tensor",
    "npu::npu_format_cast_", "npu::npu_format_cast_.acl_format", "npu::_npu_format_cast", "npu::_npu_format_cast.aclnn",
    "npu::_npu_format_cast.input_dtype", "npu::empty_with_format", "npu::empty_with_format.names",
    "npu::unsafe_empty_with_format", "npu::set_op_timeout_ms", "npu::npu_change_data_ptr",
    // They only call another operator, which has their gradient.
    "npu::npu_ciou", "npu::npu_fused_attention_score", "npu::dropout_with_byte_mask", "npu::npu_dtype_cast_backward",
    "npu::_npu_dtype_cast_backward"};

// Made of other operators: the CPU's own composition runs on the simulated tensors.
const std::unordered_set<std::string_view> kComposed = {
    "aten::contiguous", "aten::_lazy_clone",
    "aten::randperm", "aten::randperm.out"};  // with randperm.generator_out, which draws from the generator of the device

// Operators that torch_npu leaves to the CPU, which has none of its own either.
constexpr std::array<const char*, 1> kAdded = {"_thnn_fused_gru_cell_backward"};

std::string text(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// What became of each of torch_npu's operators, for scripts/sim_coverage.py: "name kind" lines.
std::string& kinds() {
  static auto* lines = new std::string;
  return *lines;
}

void note(const std::string& name, const char* kind) { kinds().append(name).append(" ").append(kind).append("\n"); }

// The kernel that the dispatcher's table has for an operator, inherited ones included. torch 2.7 gives it to nobody but itself:
// there an explicit instantiation names the private member, to which access is not checked (C++20, [temp.spec.general]).
struct OperatorTable {};
auto table_of(OperatorTable, const c10::OperatorHandle& op);
template <typename Tag, auto Member>
struct Reveal {
  friend auto table_of(Tag, const c10::OperatorHandle& op) { return op.*Member; }
};
template struct Reveal<OperatorTable, &c10::OperatorHandle::operatorDef_>;

template <typename Handle>
auto computed_kernel(const Handle& op, c10::DispatchKey key) {
  if constexpr (requires { op.getComputedKernelForDispatchKey(key); })
    return op.getComputedKernelForDispatchKey(key);
  else
    return table_of(OperatorTable{}, op)->op.lookup(c10::DispatchKeySet(key));
}

// Runs the kernel that the CPU would run at `key` on the arguments as they are.
class Composed final : public c10::OperatorKernel {
 public:
  Composed(const c10::OperatorHandle& op, c10::DispatchKey key) : kernel_(computed_kernel(op, key)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    kernel_.callBoxed(op, keys, stack);
  }

 private:
  decltype(computed_kernel(std::declval<const c10::OperatorHandle&>(), c10::DispatchKey::CPU)) kernel_;
};

// Kernels that Python has registered (torch.library, torch_npu/npu/graphs.py) are made of other operators.
bool is_python_kernel(const c10::OperatorHandle& op) {
  const std::string state = op.dumpState();
  const size_t line = state.find("\nPrivateUse1: registered at ");
  return line != std::string::npos && state.substr(line + 1, state.find('\n', line + 1) - line).find(".py:") != std::string::npos;
}

void take_over(torch::Library& aten, torch::Library& npu, torch::Library& atb, const std::unordered_set<std::string>& ours) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::PrivateUse1)) {
    const std::string full = text(name);
    const bool is_aten = full.rfind("aten::", 0) == 0;
    const bool is_atb = full.rfind("atb::", 0) == 0;  // of libop_plugin_atb.so
    if ((!is_aten && !is_atb && full.rfind("npu::", 0) != 0) || kKept.count(full) != 0 || ours.count(full) != 0) {
      note(full, ours.count(full) != 0 ? "own" : "kept");
      continue;
    }
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value()) continue;  // a kernel without an operator
    if (!is_aten && is_python_kernel(*op)) {
      note(full, "kept");
      continue;
    }
    const std::string local = full.substr(full.find("::") + 2);
    torch::Library& library = is_aten ? aten : is_atb ? atb : npu;
    if (kComposed.count(full) != 0) {
      note(full, "composed");
      library.impl(local.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Composed>(*op,
                                                                                                      c10::DispatchKey::CPU)));
    } else if (op->hasKernelForDispatchKey(kFormula)) {
      note(full, "formula");
      library.impl(local.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CpuKernel>(*op, kFormula)));
    } else if (takes_int_target(full)) {
      note(full, "cpu");
      library.impl(local.c_str(), kernel_with_int_target(*op));
    } else if (full == "aten::div_.Tensor") {
      note(full, "cpu");
      library.impl(local.c_str(), kernel_of_integer_quotient(*op));
    } else if (is_aten && op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      note(full, "cpu");
      library.impl(local.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CpuKernel>(*op)));
    } else {
      note(full, "refused");
      library.impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
    }
  }
  for (const char* name : kAdded) {
    const auto op = dispatcher.findSchemaOrThrow((std::string("aten::") + name).c_str(), "");
    aten.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CpuKernel>(op, kFormula)));
  }
}

// torch_npu has derivatives of its own for some aten operators, which end in fused kernels: the CPU's formulas replace them.
void take_over_autograd(torch::Library& autograd, const std::unordered_set<std::string>& ours) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::AutogradPrivateUse1)) {
    const std::string full = text(name);
    if (full.rfind("aten::", 0) != 0 || ours.count(full) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::AutogradCPU)) continue;
    autograd.impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                              std::make_unique<Composed>(*op, c10::DispatchKey::AutogradCPU)));
  }
}

// Each kernel replaces one of torch_npu's on purpose: the dispatcher's warning about that says nothing to the user.
class Quiet final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

void install() {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  install_allocator();
  // Never freed: kernels must outlive every tensor.
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto* npu = new torch::Library(torch::Library::IMPL, "npu", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto* atb = new torch::Library(torch::Library::IMPL, "atb", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto* autograd = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  auto* formulas = new torch::Library(torch::Library::IMPL, "npu", kFormula, __FILE__, __LINE__);
  auto* atb_formulas = new torch::Library(torch::Library::IMPL, "atb", kFormula, __FILE__, __LINE__);
  register_infer(*formulas, *atb_formulas);
  register_fused_norm(*formulas);
  register_fused_attention(*formulas);
  register_fused_infer(*formulas);
  register_fused_experts(*formulas);
  register_moe_gating(*formulas);
  register_moe_routing(*formulas);
  register_moe_maps(*formulas);
  register_comm_products(*formulas);
  register_comm_experts(*formulas);
  register_comm_grouped(*formulas);
  register_casts(*formulas);
  register_quant(*formulas);
  auto* other = new torch::Library(torch::Library::IMPL, "aten", kFormula, __FILE__, __LINE__);
  register_fused_loss(*formulas, *other);
  register_aten_gaps(*formulas, *other);
  register_batch_norm(*formulas, *other);
  register_recurrent(*formulas, *other);
  register_legacy_shape(*formulas);
  register_legacy_activation(*formulas);
  register_legacy_dropout(*formulas);
  register_legacy_norm(*formulas);
  register_legacy_conv(*formulas);
  register_legacy_attention(*formulas);
  register_legacy_optimizer(*formulas);
  register_vision_overlap(*formulas);
  register_vision_boxes(*formulas);
  register_vision_pooling(*formulas);
  register_vision_select(*formulas);
  register_legacy_misc(*formulas);
  const std::unordered_set<std::string> own = {"aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize",
                                               "aten::_local_scalar_dense", "aten::native_dropout",
                                               "aten::scaled_dot_product_attention", "aten::_pack_padded_sequence",
                                               "aten::_to_sparse", "aten::_to_sparse.sparse_dim"};
  take_over(*aten, *npu, *atb, own);
  take_over_autograd(*autograd, {"aten::scaled_dot_product_attention"});
  register_copies(*aten);
  register_packing(*aten);
  register_sparse(*aten);
  register_attention_route(*aten, *autograd);
  watch_steps();
}

// A variable and not a constructor function: those run before the tables above exist.
const bool installed = (install(), true);

}  // namespace
}  // namespace sim

extern "C" const char* sim_operator_kinds(void) { return sim::kinds().c_str(); }
