// The kernels that are written out by hand, by topic; register.cpp lists them.
#pragma once

#include <torch/library.h>

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

}  // namespace sim
