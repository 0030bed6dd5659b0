#include "infer_register.h"

#include "kernels.h"

namespace sim {

void register_infer(torch::Library& npu, torch::Library& atb) {
  infer::register_atb_attention(atb);
  infer::register_atb_latent(atb);
  infer::register_atb_others(atb);
  infer::register_caches(npu);
  infer::register_rotations(npu);
  infer::register_sampling(npu);
  infer::register_delta_rule(npu);
  infer::register_mla_prolog(npu);
  infer::register_sparse_attention(npu);
}

}  // namespace sim
