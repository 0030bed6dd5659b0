// Names and tensors in the words of CANN's profiler: aclnn functions, shapes "2,3;3,4", types "FLOAT;DT_BF16", formats "ND;ND"
// (Ascend/msprof, docs/en/user_guide/profile_data_file_references.md).
#include <ATen/record_function.h>

#include <string>
#include <string_view>
#include <unordered_map>

#include "../sim.h"
#include "count.h"

namespace sim {

namespace {

// Names that do not follow from the operator's: those of op-plugin (op_plugin/config/op_plugin_functions.yaml, `exec`).
const std::unordered_map<std::string_view, std::string_view> kNames = {
    {"aten::clone", "aclnnInplaceCopy"}, {"aten::_to_copy", "aclnnCast"}, {"npu::_npu_dtype_cast", "aclnnCast"},
    {"npu::npu_dtype_cast", "aclnnCast"},
    {"npu::npu_fusion_attention", "aclnnFlashAttentionScore"}, {"npu::npu_fusion_attention_v3", "aclnnFlashAttentionScore"},
    {"npu::npu_fusion_attention_grad", "aclnnFlashAttentionScoreGrad"},
    {"npu::npu_fusion_attention_grad_v3", "aclnnFlashAttentionScoreGrad"}, {"aten::_fused_adamw_", "aclnnApplyAdamWV2"}};

// aten::add_ -> aclnnInplaceAdd, aten::mul with a scalar -> aclnnMuls, npu::npu_rms_norm -> aclnnRmsNorm: the pattern of
// op-plugin's names, not a list of them.
std::string make_name(const c10::OperatorName& name, bool by_scalar) {
  const auto known = kNames.find(name.name);
  if (known != kNames.end()) return std::string(known->second);
  std::string_view base = std::string_view(name.name).substr(name.name.find("::") + 2);
  const bool in_place = base.size() > 1 && base.back() == '_' && name.name.rfind("__") != name.name.size() - 2;
  while (base.size() > 1 && base.front() == '_') base.remove_prefix(1);
  while (base.size() > 1 && base.back() == '_') base.remove_suffix(1);
  const bool scalar = by_scalar && (base == "add" || base == "sub" || base == "mul" || base == "div");
  if (base.substr(0, 4) == "npu_") base.remove_prefix(4);
  std::string out = in_place ? "aclnnInplace" : "aclnn";
  bool first = true;  // letter of a word
  for (char letter : base) {
    if (letter != '_') out += first && letter >= 'a' && letter <= 'z' ? static_cast<char>(letter - 'a' + 'A') : letter;
    first = letter == '_';
  }
  return scalar ? out + "s" : out;
}

// A number on the host: aclnnAdds (op-plugin, op_plugin/ops/opapi/AddKernelNpuOpApi.cpp).
bool takes_scalar(const OpCall& call) { return call.host_number || call.name.overload_name == "Scalar"; }

// The dispatcher's names live as long as the process: their addresses are faster keys than their text.
const std::string& api_name(const OpCall& call) {
  thread_local std::unordered_map<const c10::OperatorName*, std::string> names[2];
  const bool scalar = takes_scalar(call);
  const auto [found, fresh] = names[scalar ? 1 : 0].try_emplace(&call.name);
  if (fresh) found->second = make_name(call.name, scalar);
  return found->second;
}

// Names of ge::DataType without or with their prefix, as op_summary has them.
const char* type_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return "FLOAT";
    case at::kHalf: return "FLOAT16";
    case at::kBFloat16: return "DT_BF16";
    case at::kDouble: return "DOUBLE";
    case at::kChar: return "INT8";
    case at::kByte: return "UINT8";
    case at::kShort: return "INT16";
    case at::kInt: return "INT32";
    case at::kLong: return "INT64";
    case at::kBool: return "BOOL";
    case at::kComplexFloat: return "COMPLEX64";
    case at::kComplexDouble: return "COMPLEX128";
    default: return "UNDEFINED";
  }
}

struct Words {
  std::string shapes, types, formats;

  explicit Words(c10::ArrayRef<at::Tensor> tensors) {
    bool first = true;
    for (const auto& tensor : tensors) {
      if (!tensor.defined()) continue;
      if (!first) (shapes += ';', types += ';', formats += ';');
      first = false;
      for (int64_t i = 0; i < tensor.dim(); i++) (shapes += i > 0 ? "," : "") += std::to_string(tensor.size(i));
      types += type_name(tensor.scalar_type());
      formats += "ND";
    }
  }
  SimTensors view() const { return {shapes.c_str(), types.c_str(), formats.c_str()}; }
};

}  // namespace

// torch_npu calls every aclnn function inside of a range with its name, which torch's profilers show and its tests look for
// (torch_npu/csrc/framework/OpCommand.cpp; test/trans_contiguous).
void record_api(const OpCall& call) { RECORD_FUNCTION(api_name(call), std::vector<c10::IValue>{}); }

void profile_call(const OpCall& call) {
  // What an operator writes in place, or through out=, stands among its inputs: the first of them is then the result.
  const bool in_place = call.outputs.empty() && !call.inputs.empty();
  const Words in(call.inputs), out(in_place ? call.inputs.slice(0, 1) : call.outputs);
  const SimTensors read = in.view(), written = out.view();
  sim_profile_operator(api_name(call).c_str(), &read, &written);
}

}  // namespace sim
