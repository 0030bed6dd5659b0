// The rotary embedding as the C functions that extensions call by name: MindSpeed compiles one for --use-fused-rotary-pos-emb.
//
// Signatures, formulas and modes: aclnnRotaryPositionEmbedding and aclnnRotaryPositionEmbeddingGrad of CANN's ops-transformer
// (posembedding/*/docs). The sums are in fp32 and rounded once.
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "../sim.h"
#include "meta.h"

namespace {

enum Mode : int64_t { kHalf, kInterleave, kQuarter, kInterleaveHalf };

aclError refuse(const char* name, const char* reason) {
  sim_set_error("EZ1001: %s: %s", name, reason);
  return 161002;  // ACLNN_ERR_PARAM_INVALID (aclnn/acl_meta.h of CANN)
}

const char* what_is_wrong(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t mode) {
  if (mode < kHalf || mode > kInterleaveHalf) return "mode must be 0, 1, 2 or 3";
  if (x.dim() != 4 || cos.dim() != 4) return "x, cos and sin must have four dimensions";
  if (cos.sizes() != sin.sizes()) return "cos and sin must have the same shape";
  if (x.scalar_type() != cos.scalar_type() || x.scalar_type() != sin.scalar_type())
    return "x, cos and sin must have the same type";
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kHalf && x.scalar_type() != at::kBFloat16)
    return "the type must be float32, float16 or bfloat16";
  if (x.size(-1) != cos.size(-1)) return "x, cos and sin must have the same last dimension";
  if (x.size(-1) % (mode == kQuarter ? 4 : 2) != 0) return "the last dimension must be even, in mode 2 a multiple of 4";
  for (int64_t axis = 0; axis < 3; ++axis)
    if (cos.size(axis) != x.size(axis) && cos.size(axis) != 1) return "cos and sin cannot be broadcast to x";
  return nullptr;
}

at::Tensor even(const at::Tensor& x) { return x.slice(-1, 0, std::nullopt, 2); }
at::Tensor odd(const at::Tensor& x) { return x.slice(-1, 1, std::nullopt, 2); }

at::Tensor turn_halves(const at::Tensor& x) {
  const auto parts = x.chunk(2, -1);
  return at::cat({-parts[1], parts[0]}, -1);
}

// The second of the two tensors that cos and sin multiply. Its transpose is its negative.
at::Tensor turn(const at::Tensor& x, int64_t mode) {
  if (mode == kInterleave) return at::stack({-odd(x), even(x)}, -1).flatten(-2);
  if (mode != kQuarter) return turn_halves(x);
  const auto halves = x.chunk(2, -1);
  return at::cat({turn_halves(halves[0]), turn_halves(halves[1])}, -1);
}

// The first of the two: mode 3 puts the elements at even places before those at odd places.
at::Tensor arrange(const at::Tensor& x, int64_t mode) { return mode == kInterleaveHalf ? at::cat({even(x), odd(x)}, -1) : x; }

at::Tensor restore(const at::Tensor& x, int64_t mode) {
  if (mode != kInterleaveHalf) return x;
  const auto halves = x.chunk(2, -1);
  return at::stack({halves[0], halves[1]}, -1).flatten(-2);
}

at::Tensor wide(const at::Tensor& x) { return x.to(at::kFloat); }

}  // namespace

extern "C" aclError aclnnRotaryPositionEmbeddingGetWorkspaceSize(const aclTensor* x, const aclTensor* cos, const aclTensor* sin,
                                                                 int64_t mode, aclTensor* out, uint64_t* workspace,
                                                                 aclOpExecutor** executor) {
  const char* name = "aclnnRotaryPositionEmbedding";
  if (const char* wrong = what_is_wrong(x->value, cos->value, sin->value, mode)) return refuse(name, wrong);
  return sim::plan(name, {x->value, cos->value, sin->value, out->value}, workspace, executor,
                   [x = x->value, cos = cos->value, sin = sin->value, mode, out = out->value]() mutable {
                     const at::Tensor value = arrange(wide(x), mode);
                     out.copy_(value * wide(cos) + turn(value, mode) * wide(sin));
                   });
}
extern "C" aclError aclnnRotaryPositionEmbedding(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return sim::run(executor, stream);
}

// Without x only its own gradient is written.
extern "C" aclError aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(const aclTensor* dy, const aclTensor* cos,
                                                                     const aclTensor* sin, const aclTensor* x, int64_t mode,
                                                                     const aclTensor* dx, const aclTensor* dcos,
                                                                     const aclTensor* dsin, uint64_t* workspace,
                                                                     aclOpExecutor** executor) {
  const char* name = "aclnnRotaryPositionEmbeddingGrad";
  if (const char* wrong = what_is_wrong(dy->value, cos->value, sin->value, mode)) return refuse(name, wrong);
  const at::Tensor input = x ? x->value : at::Tensor();
  if (input.defined() && input.sizes() != dy->value.sizes()) return refuse(name, "dy and x must have the same shape");
  if (input.defined() && (!dcos || !dsin)) return refuse(name, "with x, dcos and dsin are needed");
  const at::Tensor cos_grad = dcos ? dcos->value : at::Tensor(), sin_grad = dsin ? dsin->value : at::Tensor();
  return sim::plan(name, {dy->value, cos->value, sin->value, dx->value}, workspace, executor,
                   [dy = dy->value, cos = cos->value, sin = sin->value, input, mode, dx = dx->value, cos_grad,
                    sin_grad]() mutable {
                     const at::Tensor above = wide(dy);
                     dx.copy_(restore(above * wide(cos) - turn(above * wide(sin), mode), mode));
                     if (!input.defined()) return;
                     const at::Tensor value = arrange(wide(input), mode);
                     cos_grad.copy_((above * value).sum_to_size(cos.sizes()));
                     sin_grad.copy_((above * turn(value, mode)).sum_to_size(sin.sizes()));
                   });
}
extern "C" aclError aclnnRotaryPositionEmbeddingGrad(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return sim::run(executor, stream);
}
