// What the operators of inference share: refusals by name, attention of one sequence, rows of paged caches, rotations.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sim::infer {

using OptionalTensor = std::optional<at::Tensor>;

// True for an argument that is neither None nor empty.
bool is_given(const OptionalTensor& tensor);

// Raises for each of these arguments that is given: its effect is not simulated.
void refuse_tensors(const char* name, std::initializer_list<std::pair<const char*, const OptionalTensor*>> arguments);
// Raises when `given`: the argument has a value that is not simulated.
void refuse_value(const char* name, const std::string& argument, bool given);

// The arguments of a boxed call by the names of its schema. For operators with dozens of them.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack);

  const char* name() const { return name_.c_str(); }
  bool has(const char* argument) const;  // in the schema
  bool is_given(const char* argument) const;
  at::Tensor tensor(const char* argument) const;
  OptionalTensor optional(const char* argument) const;
  std::optional<std::vector<int64_t>> lengths(const char* argument) const;  // of int[]? and SymInt[]?
  int64_t integer(const char* argument) const;
  double real(const char* argument) const;
  bool flag(const char* argument) const;
  std::string text(const char* argument, const char* when_none = "") const;
  std::vector<at::Tensor> tensors(const char* argument) const;
  // Raises for each of these arguments that is given; names that the schema does not have are skipped.
  void refuse(std::initializer_list<const char*> arguments) const;
  // Replaces the arguments on the stack by the results.
  void finish(std::vector<at::Tensor> results);

 private:
  const c10::IValue& value(const char* argument) const;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  size_t base_;
  std::string name_;
};

// A tensor of integers on the host.
std::vector<int64_t> integers_of(const at::Tensor& tensor);

// What hides or changes the scores of one sequence. All of it is optional.
struct ScoreOptions {
  double scale = 1.0;
  at::Tensor hidden;  // bool, broadcasts to [N, S, K]: true hides a key
  at::Tensor added;   // float, broadcasts to [N, S, K]: added after scaling
  at::Tensor sink;    // [N]: one more score of each row, without a value
};

struct Attended {
  at::Tensor out, lse, max, sum;  // [N, S, V], and three times [N, S, 1]
};

// softmax(scale * q k^T + added) v in float32, with q [N, S, D], k [M, K, D], v [M, K, V] and N a multiple of M. Rows without
// a visible key are 0 with lse = +inf.
Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ScoreOptions& options);

// True where key minus query lies outside of [-before, after]; queries start at position `shift`.
at::Tensor band(int64_t rows, int64_t columns, int64_t shift, int64_t before, int64_t after);

// How a cache of pages is laid out: tokens first ([n, block, H] or [n, block, N, D]), heads first ([n, N, block, D]), or in the
// fractal format ([n, N, D / 16, block, 16] or [n, N * D / 16, block, 16]; 32 instead of 16 for int8).
enum class PageLayout { TokensFirst, HeadsFirst, Fractal };

// Rows from..from + rows of one sequence, [heads, rows, D] in float32; `pages` are the numbers of its pages.
at::Tensor page_rows(const char* name, const at::Tensor& cache, PageLayout layout, int64_t heads,
                     const std::vector<int64_t>& pages, int64_t from, int64_t rows);

// The page numbers of each sequence.
std::vector<std::vector<int64_t>> page_tables(const char* name, const at::Tensor& block_table);

// Writes the rows of x [T, N, D] to their slots of a cache; negative slots are skipped.
void write_slots(const char* name, const at::Tensor& x, const at::Tensor& cache, PageLayout layout,
                 const std::vector<int64_t>& slots);

// [B, N, S, D] whatever the layout (BSH, BSND, BNSD, TND, NTD, NSD), and back (also NBSD).
at::Tensor to_heads(const at::Tensor& x, std::string_view layout, int64_t heads);
at::Tensor from_heads(const at::Tensor& x, std::string_view layout);

// x * cos + rotate(x) * sin in float32. `halves`: the second half with its sign changed comes first; else pairs are rotated.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool halves);
// The even elements followed by the odd ones.
at::Tensor split_pairs(const at::Tensor& x);

// x / sqrt(mean(x^2) + epsilon) * gamma in float32.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& gamma, double epsilon);

// The arguments of npu_fused_infer_attention_score and its relatives that are simulated.
struct FusedInfer {
  const char* name;
  at::Tensor query, key, value;
  OptionalTensor pse, mask, block_table, query_rope, key_rope, query_padding, kv_padding, key_prefix, value_prefix, sink;
  std::optional<std::vector<int64_t>> query_lengths, kv_lengths, prefix_length;
  int64_t heads = 1, kv_heads = 0, before = 0, after = 0, mode = 0, block_size = 0;
  double scale = 1.0;
  std::string layout;
  bool with_lse = false;
};

// The output in its layout, and the log-sum-exp ([B, N, S, 1] or [T, N, 1]; empty unless asked for).
std::pair<at::Tensor, at::Tensor> fused_infer(const FusedInfer& call);
// Empty tensors of the same shapes.
std::pair<at::Tensor, at::Tensor> fused_infer_outputs(const char* name, const at::Tensor& query, const at::Tensor& value,
                                                      const std::string& layout, bool paged, int64_t heads, int64_t kv_heads,
                                                      bool with_lse);

}  // namespace sim::infer
