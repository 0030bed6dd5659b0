// The operators of inference by topic; infer_register.cpp lists them.
#pragma once

#include <torch/library.h>

namespace sim::infer {

// Operators of ATB (namespace atb), which torch_npu's libop_plugin_atb.so defines.
void register_atb_attention(torch::Library& atb);
void register_atb_latent(torch::Library& atb);
void register_atb_others(torch::Library& atb);
// Operators of torch_npu (namespace npu).
void register_caches(torch::Library& npu);
void register_rotations(torch::Library& npu);
void register_sampling(torch::Library& npu);
void register_delta_rule(torch::Library& npu);
void register_mla_prolog(torch::Library& npu);
void register_sparse_attention(torch::Library& npu);

}  // namespace sim::infer
