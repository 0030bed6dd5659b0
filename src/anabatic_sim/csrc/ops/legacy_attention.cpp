// The attention operators of torch_npu from before flash attention: npu_fused_attention_score and npu_multi_head_attention
// (op-plugin's pages of their names, FusedAttentionScoreKernelNpu.cpp for the shapes, and torch_npu's test of the second one).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/softmax.h>

#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "count.h"
#include "dropout_mask.h"
#include "fallback.h"
#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor softmax_backward(const Tensor& grad, const Tensor& soft) { return (grad - (grad * soft).sum(-1, true)) * soft; }

void check_scores(const Tensor& q, const Tensor& k, const Tensor& v, double keep_prob, std::initializer_list<bool> transposes) {
  TORCH_CHECK(q.dim() == 4, "query_layer must be at least 4-dimensional");
  TORCH_CHECK(q.sizes() == k.sizes() && q.sizes() == v.sizes(), "npu_fused_attention_score: query ", q.sizes(), ", key ",
              k.sizes(), " and value ", v.sizes(), " must have one shape");
  TORCH_CHECK(q.scalar_type() == at::kHalf, "npu_fused_attention_score: query must be float16, got ", q.dtype());
  TORCH_CHECK(keep_prob > 0 && keep_prob <= 1, "npu_fused_attention_score: keep_prob must be in (0, 1], got ", keep_prob);
  for (const bool transposed : transposes)
    TORCH_CHECK_NOT_IMPLEMENTED(!transposed, "anabatic sim: npu_fused_attention_score with transposed inputs is not simulated");
}

// [B, N, S, D] as [B S, N D] and back.
Tensor rows_of(const Tensor& x) { return x.transpose(1, 2).reshape({x.size(0) * x.size(2), x.size(1) * x.size(3)}); }
Tensor heads_of(const Tensor& rows, const Tensor& like) {
  return rows.reshape({like.size(0), like.size(2), like.size(1), like.size(3)}).transpose(1, 2);
}

// The context [B S, N D], the softmax, and a byte for each of its values that dropout kept.
Three fused_score(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, const at::Scalar& scale,
                  double keep_prob, bool t1, bool t2, bool t3, bool t4, bool t5, bool t6) {
  check_scores(q, k, v, keep_prob, {t1, t2, t3, t4, t5, t6});
  const Tensor scores = at::matmul(widened(q), widened(k).transpose(-1, -2)) * scale + widened(mask);
  const Tensor soft = at::softmax(scores, -1);
  Tensor kept = at::ones_like(soft);
  if (keep_prob < 1)
    kept =
        at::rand(soft.sizes(), at::detail::createCPUGenerator(take_seed_here()), at::TensorOptions(at::kFloat)).lt(keep_prob);
  const Tensor context = at::matmul(soft * kept / keep_prob, widened(v));
  add_flops(4.0 * soft.numel() * q.size(3));
  return {rows_of(context).to(q.scalar_type()), soft.to(q.scalar_type()), kept.to(at::kByte).reshape({-1})};
}

Three fused_score_backward(const Tensor& grad, const Tensor& soft, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& mask, const at::Scalar& scale, double keep_prob, bool t1, bool t2, bool t3, bool t4) {
  check_scores(q, k, v, keep_prob, {t1, t2, t3, t4});
  const Tensor above = heads_of(widened(grad), q), value = widened(soft), kept = mask.to(at::kFloat).view(soft.sizes());
  const Tensor dropped = value * kept / keep_prob;
  const Tensor dsoft = at::matmul(above, widened(v).transpose(-1, -2)) * kept / keep_prob;
  const Tensor dscores = softmax_backward(dsoft, value) * scale;
  add_flops(8.0 * soft.numel() * q.size(3));
  const auto dtype = q.scalar_type();
  return {at::matmul(dscores, widened(k)).to(dtype), at::matmul(dscores.transpose(-1, -2), widened(q)).to(dtype),
          at::matmul(dropped.transpose(-1, -2), above).to(dtype)};
}

// The same in the shape of the incoming gradient.
Three fused_score_gradients(const Tensor& grad, const Tensor& soft, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& mask, const at::Scalar& scale, double keep_prob, bool t1, bool t2, bool t3, bool t4) {
  const auto [dq, dk, dv] = fused_score_backward(grad, soft, q, k, v, mask, scale, keep_prob, t1, t2, t3, t4);
  return {rows_of(dq), rows_of(dk), rows_of(dv)};
}

struct Heads {
  int64_t count, dim, source, target;

  void check(const Tensor& query, const Tensor& key, double dropout) const {
    TORCH_CHECK(query.dim() == 2 && query.size(0) % target == 0 && key.size(0) % source == 0 &&
                    query.size(0) / target == key.size(0) / source,
                "npu_multi_head_attention: query must be [batch tgt_len, E] and key [batch src_len, E], got ", query.sizes(),
                " and ", key.sizes(), " with lengths ", target, " and ", source);
    for (const int64_t number : {count, dim, source, target})
      TORCH_CHECK(number > 0 && number % 16 == 0,
                  "npu_multi_head_attention: heads, their dimension and both lengths must be multiples of 16, got ", number);
    TORCH_CHECK(dropout >= 0 && dropout < 1, "npu_multi_head_attention: dropout_prob must be in [0, 1), got ", dropout);
  }
  Tensor split(const Tensor& rows, int64_t length) const { return rows.reshape({-1, length, count, dim}).transpose(1, 2); }
  Tensor join(const Tensor& heads) const { return heads.transpose(1, 2).reshape({-1, count * dim}); }
  double scale() const { return 1 / std::sqrt(static_cast<double>(dim)); }
};

using Eight = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The steps round as the hardware's do, to half precision; the softmax is float32 where softmax_use_float says so.
Eight multi_head(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_weight,
                 const Tensor& key_weight, const Tensor& value_weight, const Tensor& mask, const Tensor& out_weight,
                 const OptionalTensor& query_bias, const OptionalTensor& key_bias, const OptionalTensor& value_bias,
                 const OptionalTensor& out_bias, const OptionalTensor& dropout_mask, int64_t count, int64_t dim, int64_t source,
                 int64_t target, double dropout, bool softmax_use_float) {
  const Heads heads{count, dim, source, target};
  heads.check(query, key, dropout);
  const auto dtype = query.scalar_type();
  const auto rounded = [dtype](const Tensor& x) { return x.to(dtype).to(at::kFloat); };
  const auto project = [&](const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    return rounded(at::linear(widened(x), widened(weight), widened(value_of(bias))));
  };
  const Tensor q = heads.split(rounded(project(query, query_weight, query_bias) * heads.scale()), target);
  const Tensor k = heads.split(project(key, key_weight, key_bias), source);
  const Tensor v = heads.split(project(value, value_weight, value_bias), source);
  const Tensor scores = rounded(rounded(at::matmul(q, k.transpose(-1, -2))) + widened(mask));
  const Tensor soft = at::softmax(scores, -1);
  Tensor kept = value_of(dropout_mask), left = rounded(soft);
  const int64_t bytes = soft.numel() / 8;
  if (dropout > 0) {
    if (!kept.defined() || kept.numel() == 0)
      kept = pack_mask(draw_kept(soft.numel(), dropout, take_seed_here()));
    left = rounded(left * unpack_mask(kept, soft.sizes()).to(at::kFloat) / (1 - dropout));
    kept = kept.reshape({-1}).slice(0, 0, bytes).clone();
  } else {
    kept = at::full({bytes}, 255, at::kByte);
  }
  const Tensor context = rounded(heads.join(at::matmul(left, v)));
  const Tensor y = project(context, out_weight, out_bias);
  const double width = static_cast<double>(query.size(1));
  add_flops(2 * width * width * (2 * query.size(0) + key.size(0) + value.size(0)) + 4.0 * soft.numel() * dim);
  return {y.to(dtype),
          kept,
          q.to(dtype).contiguous(),
          k.to(dtype).contiguous(),
          v.to(dtype).contiguous(),
          soft.to(softmax_use_float ? at::kFloat : dtype),
          left.to(dtype),
          context.to(dtype)};
}

// What a linear layer's weight, input and bias get.
struct LinearGradients {
  Tensor weight, input, bias;

  LinearGradients(const Tensor& above, const Tensor& x, const Tensor& w)
      : weight(at::matmul(above.t(), widened(x))), input(at::matmul(above, widened(w))), bias(above.sum(0)) {}
};

using Eleven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The gradients for four weights, three inputs and four biases.
Eleven multi_head_backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_weight,
                           const Tensor& key_weight, const Tensor& value_weight, const Tensor& out_weight,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                           const Tensor& query_res, const Tensor& key_res, const Tensor& value_res, const Tensor& scores,
                           const Tensor& soft, const Tensor& context, const Tensor& grad, const Tensor& mask, int64_t count,
                           int64_t dim, int64_t source, int64_t target, double dropout, bool) {
  const Heads heads{count, dim, source, target};
  heads.check(query, key, dropout);
  const LinearGradients out(widened(grad), context, out_weight);
  const Tensor dcontext = heads.split(out.input, target);
  Tensor dsoft = at::matmul(dcontext, widened(value_res).transpose(-1, -2));
  if (dropout > 0)
    dsoft = dsoft * unpack_mask(mask, dsoft.sizes()).to(at::kFloat) / (1 - dropout);
  const Tensor dscores = softmax_backward(dsoft, widened(scores));
  const LinearGradients q(heads.join(at::matmul(dscores, widened(key_res))) * heads.scale(), query, query_weight);
  const LinearGradients k(heads.join(at::matmul(dscores.transpose(-1, -2), widened(query_res))), key, key_weight);
  const LinearGradients v(heads.join(at::matmul(widened(soft).transpose(-1, -2), dcontext)), value, value_weight);
  const auto d = query.scalar_type();
  return {q.weight.to(d), k.weight.to(d), v.weight.to(d), out.weight.to(d), q.input.to(d), k.input.to(d),
          v.input.to(d),  q.bias.to(d),   k.bias.to(d),   v.bias.to(d),     out.bias.to(d)};
}

}  // namespace

void register_legacy_attention(torch::Library& npu) {
  npu.impl("npu_fused_attention_score_fwd", TORCH_FN(fused_score));
  npu.impl("npu_fused_attention_score_backward", TORCH_FN(fused_score_backward));
  npu.impl("npu_fused_attention_score_grad", TORCH_FN(fused_score_gradients));
  npu.impl("npu_multi_head_attention", TORCH_FN(multi_head));
  npu.impl("npu_multi_head_attention_backward", TORCH_FN(multi_head_backward));
}

}  // namespace sim
