// The kernels that are written out by hand, by topic; register.cpp lists them.
#pragma once

#include <torch/library.h>

#include <string_view>

namespace sim {

void register_copies(torch::Library& aten);
void register_attention_route(torch::Library& aten, torch::Library& autograd);
// Formulas of npu::* operators on CPU tensors, registered under kFormula.
void register_fused_norm(torch::Library& npu);
void register_fused_attention(torch::Library& npu);
void register_fused_infer(torch::Library& npu);
void register_infer(torch::Library& npu, torch::Library& atb);
void register_fused_experts(torch::Library& npu);
void register_moe_gating(torch::Library& npu);
void register_moe_routing(torch::Library& npu);
void register_moe_maps(torch::Library& npu);
void register_comm_products(torch::Library& npu);
void register_comm_experts(torch::Library& npu);
void register_comm_grouped(torch::Library& npu);
void register_casts(torch::Library& npu);
void register_quant(torch::Library& npu);
// Formulas of aten operators too: those whose NPU kernels differ from the CPU's.
void register_fused_loss(torch::Library& npu, torch::Library& aten);
// Operators beside language models.
void register_aten_gaps(torch::Library& npu, torch::Library& aten);
void register_batch_norm(torch::Library& npu, torch::Library& aten);
void register_recurrent(torch::Library& npu, torch::Library& aten);
void register_packing(torch::Library& aten);
void register_legacy_shape(torch::Library& npu);
void register_legacy_activation(torch::Library& npu);
void register_legacy_dropout(torch::Library& npu);
void register_legacy_norm(torch::Library& npu);
void register_legacy_conv(torch::Library& npu);
void register_legacy_attention(torch::Library& npu);
void register_legacy_optimizer(torch::Library& npu);
void register_legacy_misc(torch::Library& npu);
void register_vision_overlap(torch::Library& npu);
void register_vision_boxes(torch::Library& npu);
void register_vision_select(torch::Library& npu);
void register_vision_pooling(torch::Library& npu);
void register_sparse(torch::Library& aten);
// Losses whose labels may be int32: the CPU's kernels behind a cast.
bool takes_int_target(std::string_view name);
torch::CppFunction kernel_with_int_target(const c10::OperatorHandle& op);
// aten::div_.Tensor of integers: the CPU's kernel refuses it.
torch::CppFunction kernel_of_integer_quotient(const c10::OperatorHandle& op);

}  // namespace sim
