// scaled_dot_product_attention and dropout.
//
// On hardware the former goes to npu_fusion_attention when the rules below hold and to the decomposed formula otherwise
// (op-plugin, ScaledDotProductAttentionKernelNpuOpApi.cpp). Here it takes the CPU's own route, so that results are the CPU's to
// the last bit, and the rules decide what is counted as unfused.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <string_view>

#include "../sim.h"
#include "alias.h"
#include "count.h"
#include "fallback.h"
#include "kernels.h"

namespace sim {

namespace {

constexpr int64_t kMath = 0, kFlash = 1;  // at::SDPBackend

// Why the real device would not use its fused kernel; null when it would.
const char* unfused_reason(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask) {
  const std::string_view soc = sim_segment()->soc;
  const bool modern = sim_segment()->bf16 != 0 && soc.rfind("Ascend310", 0) != 0;
  const auto dtype = q.scalar_type();
  if (!modern) return "the chip has no fused attention";
  if (dtype != at::kHalf && dtype != at::kBFloat16 && dtype != at::kFloat) return "dtype is none of fp16, bf16, fp32";
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return "query, key and value are not 4-D";
  if (mask.has_value() && mask->defined() && mask->scalar_type() != at::kBool) return "the mask is not bool";
  if (q.size(1) > 2048 || k.size(1) > 2048) return "more than 2048 heads";
  if (k.size(1) == 0 || q.size(1) % k.size(1) != 0) return "query heads are no multiple of key heads";
  if (q.size(-1) > 512) return "head dimension above 512";
  if (dtype == at::kFloat && (q.size(-1) % 4 != 0 || v.size(-1) % 4 != 0)) return "fp32 with a head dimension not divisible by 4";
  return nullptr;
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                     double dropout, bool causal, std::optional<double> scale, bool gqa) {
  TORCH_CHECK(q.dim() >= 2 && k.dim() >= 2 && v.dim() >= 2, "Expected query, key, and value to all be at least 2 dimensional");
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
              "Expected query, key, and value to have the same dtype, but got query.dtype: ", q.dtype(), " key.dtype: ",
                  k.dtype(),
              " and value.dtype: ", v.dtype(), " instead.");
  const bool masked = mask.has_value() && mask->defined();
  TORCH_CHECK(!(masked && causal), "Explicit attn_mask should not be set when is_causal=True");
  if (const char* reason = unfused_reason(q, k, v, mask)) sim_count_unfused("scaled_dot_product_attention", reason);
  int64_t choice = kMath;
  // torch.nn.attention.sdpa_kernel may leave the CPU none of its two routes; op-plugin does not look at it.
  if (at::globalContext().userEnabledFlashSDP() || at::globalContext().userEnabledMathSDP()) {
    Call call;
    auto host = [&](const at::Tensor& tensor) {
      at::Tensor alias = call.in(tensor, false);
      return tensor.requires_grad() ? alias.detach().requires_grad_() : alias;
    };
    const std::optional<at::Tensor> host_mask = masked ? std::make_optional(host(*mask)) : std::nullopt;
    choice = at::_fused_sdp_choice(host(q), host(k), host(v), host_mask, dropout, causal, scale, gqa);
  }
  std::optional<at::Tensor> added = mask;
  if (masked && mask->scalar_type() == at::kBool)
    added = at::zeros_like(*mask, q.scalar_type()).masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  if (choice == kFlash) return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, added,
                                                                                           scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, added, dropout, causal, std::nullopt, scale, gqa));
}

// The CPU's formula on simulated tensors, so that the mask comes from the device's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0) return {input, at::empty_like(input, input.options())};
  if (train.has_value() && !*train) return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  const double keep = 1.0 - p;
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(keep);
  at::Tensor output = at::mul(input, mask).mul_(keep == 0 ? 0.0 : 1.0 / keep);
  return {output, mask};
}

void cpu_kernel(torch::Library& library, const char* name, const char* overload = "") {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + name).c_str(), overload);
  library.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CpuKernel>(op)));
}

}  // namespace

void register_attention_route(torch::Library& library, torch::Library& autograd) {
  library.impl("scaled_dot_product_attention", TORCH_FN(attention));
  autograd.impl("scaled_dot_product_attention", TORCH_FN(attention));
  library.impl("native_dropout", TORCH_FN(native_dropout));
  cpu_kernel(library, "_scaled_dot_product_flash_attention_for_cpu");
  cpu_kernel(library, "_scaled_dot_product_flash_attention_for_cpu_backward");
}

}  // namespace sim
