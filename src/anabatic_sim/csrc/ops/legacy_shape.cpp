// Operators of torch_npu that move, select and order values: op-plugin's pages of their names, and the references in torch_npu's
// own tests (test/custom_ops). The result is a new tensor, never a view.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "gradients.h"
#include "kernels.h"

namespace sim {

namespace {

using at::Tensor;

Tensor& store(const Tensor& result, Tensor& out) {
  if (out.sizes() != result.sizes())
    out.resize_(result.sizes());
  return out.copy_(result);
}

std::vector<int64_t> inverse(at::IntArrayRef perm) {
  std::vector<int64_t> back(perm.size());
  for (size_t i = 0; i < perm.size(); i++) back[perm[i] < 0 ? perm[i] + perm.size() : perm[i]] = static_cast<int64_t>(i);
  return back;
}

// A copy, also where the view already is contiguous.
Tensor fresh(const Tensor& view) { return view.clone(at::MemoryFormat::Contiguous); }

Tensor transpose(const Tensor& x, at::IntArrayRef perm, bool) { return fresh(x.permute(perm)); }
Tensor& transpose_out(const Tensor& x, at::IntArrayRef perm, bool, Tensor& out) { return store(x.permute(perm), out); }

Tensor confusion_transpose(const Tensor& x, at::IntArrayRef perm, at::IntArrayRef shape, bool transpose_first) {
  return fresh(transpose_first ? x.permute(perm).reshape(shape) : x.reshape(shape).permute(perm));
}

// `shape` is the input's; `transpose_first` says what the way back does first, the opposite of the way there (op-plugin,
// derivatives.yaml).
Tensor confusion_transpose_backward(const Tensor& grad, at::IntArrayRef perm, c10::SymIntArrayRef symbolic,
                                    bool transpose_first) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(symbolic);
  const auto back = inverse(perm);
  if (transpose_first)
    return fresh(grad.permute(back).reshape(shape));
  std::vector<int64_t> between;
  for (const int64_t dim : perm) between.push_back(shape[dim < 0 ? dim + shape.size() : dim]);
  return fresh(grad.reshape(between).permute(back));
}

Tensor npu_reshape(const Tensor& x, at::IntArrayRef shape, bool) { return fresh(x.reshape(shape)); }
Tensor& npu_reshape_out(const Tensor& x, at::IntArrayRef shape, bool, Tensor& out) { return store(x.reshape(shape), out); }
Tensor npu_broadcast(const Tensor& x, at::IntArrayRef size) { return fresh(x.expand(size)); }
Tensor& npu_broadcast_out(const Tensor& x, at::IntArrayRef size, Tensor& out) { return store(x.expand(size), out); }
Tensor& view_copy(Tensor& x, const Tensor& other, bool) { return x.copy_(other); }

Tensor stride_copy(const Tensor& x, at::IntArrayRef shape, at::IntArrayRef stride, const at::Scalar& offset) {
  return fresh(x.contiguous().as_strided(shape, stride, offset.toLong()));
}
Tensor& stride_copy_out(const Tensor& x, at::IntArrayRef shape, at::IntArrayRef stride, const at::Scalar& offset, Tensor& out) {
  return store(stride_copy(x, shape, stride, offset), out);
}

// Both inputs from their offset on, in 16 * c1_len channels that are zero where an input has none left.
Tensor stride_add(const Tensor& a, const Tensor& b, const at::Scalar& offset1, const at::Scalar& offset2,
                  const at::Scalar& c1_len) {
  TORCH_CHECK(a.dim() == 5 && b.dim() == 5, "npu_stride_add: both inputs must be 5-D, got ", a.sizes(), " and ", b.sizes());
  const int64_t channels = 16 * c1_len.toLong();
  const auto part = [channels](const Tensor& x, int64_t offset) {
    const Tensor rest = x.slice(1, offset, std::min(offset + channels, x.size(1)));
    return at::constant_pad_nd(rest, {0, 0, 0, 0, 0, 0, 0, channels - rest.size(1)});
  };
  return part(a, offset1.toLong()) + part(b, offset2.toLong());
}

Tensor slice_view(const Tensor& x, at::IntArrayRef offsets, at::IntArrayRef size) {
  TORCH_CHECK(static_cast<int64_t>(offsets.size()) == x.dim() && offsets.size() == size.size(),
              "npu_slice: offsets and size need one number for each dimension of ", x.sizes());
  Tensor view = x;
  for (int64_t i = 0; i < x.dim(); i++) {
    const int64_t length = size[i] == -1 ? x.size(i) - offsets[i] : size[i];
    view = view.narrow(i, offsets[i], length);
  }
  return view;
}

Tensor npu_slice(const Tensor& x, at::IntArrayRef offsets, at::IntArrayRef size) { return fresh(slice_view(x, offsets, size)); }
Tensor& npu_slice_out(const Tensor& x, at::IntArrayRef offsets, at::IntArrayRef size, Tensor& out) {
  return store(slice_view(x, offsets, size), out);
}

// Pairs of a number before and one after, from the first dimension on.
Tensor npu_pad(const Tensor& x, at::IntArrayRef paddings) {
  TORCH_CHECK(static_cast<int64_t>(paddings.size()) == 2 * x.dim(),
              "npu_pad: paddings needs two numbers for each dimension of ", x.sizes(), ", got ", paddings);
  std::vector<int64_t> reversed;
  for (int64_t i = x.dim() - 1; i >= 0; i--) {
    reversed.push_back(paddings[2 * i]);
    reversed.push_back(paddings[2 * i + 1]);
  }
  return at::constant_pad_nd(x, reversed);
}

Tensor npu_one_hot(const Tensor& x, int64_t axis, int64_t depth, const at::Scalar& on, const at::Scalar& off) {
  TORCH_CHECK_NOT_IMPLEMENTED(axis == -1, "anabatic sim: npu_one_hot with num_classes is not simulated");
  const Tensor hit = x.unsqueeze(-1).eq(at::arange(depth, x.scalar_type()));
  return at::full(hit.sizes(), off, at::kFloat).masked_fill(hit, on);
}

// The rows of one dimension that TensorFlow's StridedSlice takes (its page says how masks and negative numbers count).
struct Range {
  int64_t begin, end, stride;

  Range(int64_t size, int64_t from, int64_t to, int64_t step, bool open_begin, bool open_end) : stride(step) {
    TORCH_CHECK(step != 0, "npu_indexing: strides must not be 0");
    const int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
    const auto wrap = [&](int64_t i) { return std::clamp(i < 0 ? i + size : i, low, high); };
    begin = open_begin ? (step > 0 ? low : high) : wrap(from);
    end = open_end ? (step > 0 ? high : low) : wrap(to);
  }
  Tensor rows() const {
    const bool none = stride > 0 ? begin >= end : begin <= end;
    return none ? at::zeros({0}, at::kLong) : at::arange(begin, end, stride, at::kLong);
  }
};

Tensor indexing(const Tensor& x, at::IntArrayRef begin, at::IntArrayRef end, at::IntArrayRef strides, int64_t begin_mask,
                int64_t end_mask, int64_t ellipsis_mask, int64_t new_axis_mask, int64_t shrink_axis_mask) {
  TORCH_CHECK_NOT_IMPLEMENTED(ellipsis_mask == 0, "anabatic sim: npu_indexing with ellipsis_mask is not simulated");
  TORCH_CHECK_NOT_IMPLEMENTED(new_axis_mask == 0, "anabatic sim: npu_indexing with new_axis_mask is not simulated");
  TORCH_CHECK(begin.size() == end.size() && begin.size() == strides.size() && static_cast<int64_t>(begin.size()) <= x.dim(),
              "npu_indexing: begin, end and strides must have one length, at most that of ", x.sizes());
  Tensor result = x;
  for (int64_t i = static_cast<int64_t>(begin.size()) - 1; i >= 0; i--) {
    if ((shrink_axis_mask >> i & 1) != 0) {
      result = result.select(i, begin[i]);
    } else {
      const Range range(x.size(i), begin[i], end[i], strides[i], (begin_mask >> i & 1) != 0, (end_mask >> i & 1) != 0);
      result = result.index_select(i, range.rows());
    }
  }
  return fresh(result);
}

Tensor& indexing_out(const Tensor& x, at::IntArrayRef begin, at::IntArrayRef end, at::IntArrayRef strides, int64_t begin_mask,
                     int64_t end_mask, int64_t ellipsis_mask, int64_t new_axis_mask, int64_t shrink_axis_mask, Tensor& out) {
  return store(indexing(x, begin, end, strides, begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask), out);
}

Tensor sort_v2(const Tensor& x, int64_t dim, bool descending) { return std::get<0>(at::sort(x, dim, descending)); }
Tensor& sort_v2_out(const Tensor& x, int64_t dim, bool descending, Tensor& out) {
  return store(sort_v2(x, dim, descending), out);
}

std::tuple<Tensor, Tensor> npu_max(const Tensor& x, int64_t dim, bool keepdim) {
  const auto [values, indices] = at::max(x, dim, keepdim);
  return {values, indices.to(at::kInt)};
}
std::tuple<Tensor, Tensor> npu_min(const Tensor& x, int64_t dim, bool keepdim) {
  const auto [values, indices] = at::min(x, dim, keepdim);
  return {values, indices.to(at::kInt)};
}
Tensor extreme_backward(const Tensor& grad, int64_t dim, const Tensor& indices, c10::SymIntArrayRef symbolic, bool keepdim) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  Tensor result = at::zeros(sizes, grad.options());
  if (sizes.empty())
    return result.copy_(grad);
  const Tensor index = indices.to(at::kLong);
  return result.scatter_(dim, keepdim ? index : index.unsqueeze(dim), keepdim ? grad : grad.unsqueeze(dim));
}

// Values of a row go where `indices` says along `dim`; one index for each place of the other dimensions, or the full number.
Tensor npu_scatter(const Tensor& x, const Tensor& indices, const Tensor& updates, int64_t dim) {
  if (indices.numel() == 0)
    return x.clone();
  const bool whole = indices.dim() == x.dim();
  const Tensor index = (whole ? indices : indices.unsqueeze(dim)).to(at::kLong);
  return x.scatter(dim, index, (whole ? updates : updates.unsqueeze(dim)).to(x.scalar_type()));
}

Tensor wide_product(const Tensor& a, const Tensor& b) { return at::matmul(widened(a), widened(b)); }

// `sizes` is what a backward pass wants: the batch dimensions that were broadcast are summed.
Tensor bmm_v2(const Tensor& a, const Tensor& b, at::IntArrayRef sizes) {
  Tensor result = wide_product(a.dim() == 1 ? a.unsqueeze(0) : a, b.dim() == 1 ? b.unsqueeze(1) : b);
  if (!sizes.empty() && result.sizes() != sizes)
    result = result.sum_to_size(sizes);
  return result.to(a.scalar_type());
}
Tensor bmm_v2_mat1_backward(const Tensor& grad, const Tensor&, const Tensor& b, c10::SymIntArrayRef sizes) {
  return bmm_v2(grad, b.transpose(-1, -2), C10_AS_INTARRAYREF_SLOW(sizes));
}
Tensor bmm_v2_mat2_backward(const Tensor& grad, const Tensor& a, const Tensor&, c10::SymIntArrayRef sizes) {
  return bmm_v2(a.transpose(-1, -2), grad, C10_AS_INTARRAYREF_SLOW(sizes));
}

// Rows of the first dimension in the shape of `index`, and back.
Tensor gather_sparse_index(const Tensor& x, const Tensor& index) {
  std::vector<int64_t> shape(index.sizes().begin(), index.sizes().end());
  shape.insert(shape.end(), x.sizes().begin() + 1, x.sizes().end());
  return x.index_select(0, index.reshape({-1}).to(at::kLong)).reshape(shape);
}
Tensor gather_sparse_index_backward(const Tensor& grad, c10::SymIntArrayRef symbolic, const Tensor& index) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  std::vector<int64_t> rows(sizes.begin(), sizes.end());
  rows[0] = -1;
  Tensor result = at::zeros(sizes, widened(grad).options());
  result.index_add_(0, index.reshape({-1}).to(at::kLong), widened(grad).reshape(rows));
  return result.to(grad.scalar_type());
}

// From start to end (not included) of each row, one range after the other with its value.
Tensor masked_fill_range(const Tensor& x, const Tensor& start, const Tensor& end, const Tensor& value, int64_t axis) {
  TORCH_CHECK(axis == -1 || axis == x.dim() - 1, "npu_masked_fill_range: axis must be the last dimension, got ", axis);
  TORCH_CHECK(start.dim() == 2 && start.sizes() == end.sizes() && value.numel() == start.size(0),
              "npu_masked_fill_range: start and end must be [ranges, rows] and value [ranges], got ", start.sizes(), ", ",
              end.sizes(), " and ", value.sizes());
  TORCH_CHECK(x.dim() == 1 ? start.size(1) == 1 : start.size(1) == x.size(0), "npu_masked_fill_range: start has ",
              start.size(1), " rows, x is ", x.sizes());
  Tensor result = x.clone();
  const Tensor place = at::arange(x.size(-1), at::kLong);
  for (int64_t i = 0; i < start.size(0); i++) {
    std::vector<int64_t> shape(x.dim(), 1);
    if (x.dim() > 1)
      shape[0] = x.size(0);
    const Tensor from = start[i].reshape(shape), to = end[i].reshape(shape);
    result = result.masked_fill(place.ge(from) & place.lt(to), value.reshape({-1})[i].to(x.scalar_type()));
  }
  return result;
}

}  // namespace

void register_legacy_shape(torch::Library& npu) {
  npu.impl("npu_transpose", TORCH_FN(transpose));
  npu.impl("npu_transpose.out", TORCH_FN(transpose_out));
  npu.impl("npu_confusion_transpose", TORCH_FN(confusion_transpose));
  npu.impl("npu_confusion_transpose_backward", TORCH_FN(confusion_transpose_backward));
  npu.impl("npu_reshape", TORCH_FN(npu_reshape));
  npu.impl("npu_reshape.out", TORCH_FN(npu_reshape_out));
  npu.impl("npu_broadcast", TORCH_FN(npu_broadcast));
  npu.impl("npu_broadcast.out", TORCH_FN(npu_broadcast_out));
  npu.impl("npu_view_copy", TORCH_FN(view_copy));
  npu.impl("npu_stride_copy", TORCH_FN(stride_copy));
  npu.impl("npu_stride_copy.out", TORCH_FN(stride_copy_out));
  npu.impl("npu_stride_add", TORCH_FN(stride_add));
  npu.impl("npu_slice", TORCH_FN(npu_slice));
  npu.impl("npu_slice.out", TORCH_FN(npu_slice_out));
  npu.impl("npu_pad", TORCH_FN(npu_pad));
  npu.impl("npu_one_hot", TORCH_FN(npu_one_hot));
  npu.impl("npu_indexing", TORCH_FN(indexing));
  npu.impl("npu_indexing.out", TORCH_FN(indexing_out));
  npu.impl("npu_sort_v2", TORCH_FN(sort_v2));
  npu.impl("npu_sort_v2.out", TORCH_FN(sort_v2_out));
  npu.impl("npu_max.dim", TORCH_FN(npu_max));
  npu.impl("npu_min.dim", TORCH_FN(npu_min));
  npu.impl("npu_max_backward", TORCH_FN(extreme_backward));
  npu.impl("npu_min_backward", TORCH_FN(extreme_backward));
  npu.impl("npu_scatter", TORCH_FN(npu_scatter));
  npu.impl("npu_bmmV2", TORCH_FN(bmm_v2));
  npu.impl("npu_bmm_v2_mat1_backward", TORCH_FN(bmm_v2_mat1_backward));
  npu.impl("npu_bmm_v2_mat2_backward", TORCH_FN(bmm_v2_mat2_backward));
  npu.impl("npu_gather_sparse_index", TORCH_FN(gather_sparse_index));
  npu.impl("npu_gather_sparse_index_backward", TORCH_FN(gather_sparse_index_backward));
  npu.impl("npu_masked_fill_range", TORCH_FN(masked_fill_range));
}

}  // namespace sim
