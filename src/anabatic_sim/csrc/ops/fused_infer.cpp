// The attention operators of inference: npu_prompt_flash_attention, npu_incre_flash_attention, npu_fused_infer_attention_score
// (and _v2, with their variants for graphs). They have no derivative: used in training they cut the graph, here as on hardware.
// What they compute is in infer_attention.cpp.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "infer.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using infer::Arguments;
using infer::FusedInfer;

constexpr int64_t kFar = std::numeric_limits<int32_t>::max();

// What int8 and int4 inputs or outputs need; the formula knows float16 and bfloat16.
void refuse_quantised(const Arguments& arguments) {
  arguments.refuse({"deq_scale1", "quant_scale1", "deq_scale2", "quant_scale2", "quant_offset2", "dequant_scale1",
                    "dequant_scale2", "antiquant_scale", "antiquant_offset", "key_antiquant_scale", "key_antiquant_offset",
                    "value_antiquant_scale", "value_antiquant_offset", "key_rope_antiquant_scale", "dequant_scale_query",
                    "dequant_scale_key", "dequant_offset_key", "dequant_scale_value", "dequant_offset_value",
                    "dequant_scale_key_rope", "quant_scale_out", "quant_offset_out", "quant_scale_p", "query_dtype", "key_dtype",
                    "value_dtype", "query_rope_dtype", "key_rope_dtype", "out_dtype"});
}

FusedInfer fused_arguments(const Arguments& a) {
  refuse_quantised(a);
  const bool v2 = a.has("num_query_heads");
  FusedInfer call;
  call.name = a.name();
  call.query = a.tensor("query");
  call.key = a.tensor("key");
  call.value = a.tensor("value");
  call.pse = a.optional("pse_shift");
  call.mask = a.optional("atten_mask");
  call.block_table = a.optional("block_table");
  call.query_rope = a.optional("query_rope");
  call.key_rope = a.optional("key_rope");
  call.query_lengths = a.lengths(v2 ? "actual_seq_qlen" : "actual_seq_lengths");
  call.kv_lengths = a.lengths(v2 ? "actual_seq_kvlen" : "actual_seq_lengths_kv");
  call.heads = a.integer(v2 ? "num_query_heads" : "num_heads");
  call.kv_heads = a.integer("num_key_value_heads");
  call.scale = a.real(v2 ? "softmax_scale" : "scale");
  call.before = a.integer("pre_tokens");
  call.after = a.integer("next_tokens");
  call.mode = a.integer("sparse_mode");
  call.block_size = a.integer("block_size");
  call.layout = a.text("input_layout");
  call.with_lse = a.flag(v2 ? "return_softmax_lse" : "softmax_lse_flag");
  if (v2) {
    call.sink = a.optional("learnable_sink");
    return call;
  }
  call.query_padding = a.optional("query_padding_size");
  call.kv_padding = a.optional("kv_padding_size");
  call.key_prefix = a.optional("key_shared_prefix");
  call.value_prefix = a.optional("value_shared_prefix");
  call.prefix_length = a.lengths("actual_shared_prefix_len");
  return call;
}

void fused(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments arguments(op, stack);
  const auto [out, lse] = infer::fused_infer(fused_arguments(arguments));
  arguments.finish({out, lse});
}

// The caller made the results (npu_fused_infer_attention_score.out, .._v2.out).
void fused_out(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments arguments(op, stack);
  const std::vector<Tensor> made = arguments.tensors("out");
  TORCH_CHECK(made.size() == 2, arguments.name(), ": out must hold attention_out and softmax_lse, got ", made.size(), " tensors");
  const FusedInfer call = fused_arguments(arguments);
  const auto [out, lse] = infer::fused_infer(call);
  TORCH_CHECK(made[0].sizes() == out.sizes() && made[0].scalar_type() == out.scalar_type(), arguments.name(),
              ": attention_out must be ", out.dtype(), " ", out.sizes(), ", got ", made[0].dtype(), " ", made[0].sizes());
  made[0].copy_(out);
  if (call.with_lse) {
    TORCH_CHECK(made[1].sizes() == lse.sizes(), arguments.name(), ": softmax_lse must be ", lse.sizes(), ", got ",
                made[1].sizes());
    made[1].copy_(lse);
  }
  arguments.finish({made[0], made[1]});
}

// The memory that the kernel needs for itself: none here. Its dtype is that of query
// (FusedInferAttentionScoreKernelNpuOpApi.cpp).
void fused_workspace(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments arguments(op, stack);
  fused_arguments(arguments);
  arguments.finish({at::empty({0}, arguments.tensor("query").options())});
}

void fused_outputs(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  refuse_quantised(a);
  const bool v2 = a.has("num_query_heads");
  const auto [out, lse] = infer::fused_infer_outputs(
      a.name(), a.tensor("query"), a.tensor("value"), a.text("input_layout"), a.is_given("block_table"),
      a.integer(v2 ? "num_query_heads" : "num_heads"), a.integer("num_key_value_heads"),
      a.flag(v2 ? "return_softmax_lse" : "softmax_lse_flag"));
  a.finish({out, lse});
}

void prompt(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  refuse_quantised(a);
  FusedInfer call;
  call.name = a.name();
  call.query = a.tensor("query");
  call.key = a.tensor("key");
  call.value = a.tensor("value");
  call.pse = a.optional("pse_shift");
  call.mask = a.optional("atten_mask");
  call.query_lengths = a.lengths("actual_seq_lengths");
  call.kv_lengths = a.lengths("actual_seq_lengths_kv");
  call.heads = a.integer("num_heads");
  call.kv_heads = a.integer("num_key_value_heads");
  call.scale = a.real("scale_value");
  call.before = a.integer("pre_tokens");
  call.after = a.integer("next_tokens");
  call.mode = a.integer("sparse_mode");
  call.layout = a.text("input_layout");
  infer::refuse_value(a.name(), "sparse_mode 9", call.mode == 9);
  a.finish({infer::fused_infer(call).first});
}

void incremental(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments a(op, stack);
  refuse_quantised(a);
  FusedInfer call;
  call.name = a.name();
  call.query = a.tensor("query");
  call.key = a.tensor("key");
  call.value = a.tensor("value");
  call.pse = a.optional("pse_shift");
  call.mask = a.optional("atten_mask");
  call.block_table = a.optional("block_table");
  call.kv_padding = a.optional("kv_padding_size");
  call.kv_lengths = a.lengths("actual_seq_lengths");
  call.heads = a.integer("num_heads");
  call.kv_heads = a.integer("num_key_value_heads");
  call.scale = a.real("scale_value");
  call.before = call.after = kFar;
  call.block_size = a.integer("block_size");
  call.layout = a.text("input_layout");
  TORCH_CHECK(call.layout == "BSH" || call.layout == "BSND" || call.layout == "BNSD", a.name(), ": input_layout ", call.layout,
              " is not one of BSH, BSND, BNSD");
  const int64_t rows = infer::to_heads(call.query, call.layout, call.heads).size(2);
  TORCH_CHECK(rows == 1, a.name(), ": call aclnn failed, detail:EZ1001: query must hold one token per sequence, got ", rows);
  a.finish({infer::fused_infer(call).first});
}

}  // namespace

void register_fused_infer(torch::Library& npu) {
  npu.impl("npu_prompt_flash_attention", torch::CppFunction::makeFromBoxedFunction<&prompt>());
  npu.impl("npu_incre_flash_attention", torch::CppFunction::makeFromBoxedFunction<&incremental>());
  for (const char* name : {"npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"})
    npu.impl(name, torch::CppFunction::makeFromBoxedFunction<&fused>());
  for (const char* name : {"npu_fused_infer_attention_score.out", "npu_fused_infer_attention_score_v2.out"})
    npu.impl(name, torch::CppFunction::makeFromBoxedFunction<&fused_out>());
  for (const char* name : {"_npu_fused_infer_attention_score_get_max_workspace",
                           "_npu_fused_infer_attention_score_v2_get_max_workspace"})
    npu.impl(name, torch::CppFunction::makeFromBoxedFunction<&fused_workspace>());
  for (const char* name : {"_npu_fused_infer_attention_score_infer_output",
                           "_npu_fused_infer_attention_score_v2_infer_output"})
    npu.impl(name, torch::CppFunction::makeFromBoxedFunction<&fused_outputs>());
}

}  // namespace sim
