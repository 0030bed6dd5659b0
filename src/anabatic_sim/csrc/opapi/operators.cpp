// The aclnn operators that torch_npu calls without the dispatcher: copies, fills, joins and the arithmetic around collectives.
// Every other aclnn name is absent, so torch_npu says "aclnnX ... not in libopapi.so" by itself.
#include <ATen/ops/add.h>
#include <ATen/ops/all.h>
#include <ATen/ops/any.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/div.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/max.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>

#include "meta.h"

// A pair of C functions: PARAMETERS in brackets, the tensors to count in brackets, then what to do. Handles may be gone by the
// time the second half runs, so BODY must capture values: CAPTURES names them.
#define ACLNN(NAME, PARAMETERS, COUNTED, CAPTURES, BODY)                                                                    \
  extern "C" aclError NAME##GetWorkspaceSize(EXPAND PARAMETERS, uint64_t* workspace, aclOpExecutor** executor) {            \
    return sim::plan(#NAME, {EXPAND COUNTED}, workspace, executor, [EXPAND CAPTURES]() mutable { BODY; });                  \
  }                                                                                                                         \
  extern "C" aclError NAME(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) { return sim::run(executor, stream); }
#define EXPAND(...) __VA_ARGS__

namespace {

std::vector<at::Tensor> values(const aclTensorList* list) {
  std::vector<at::Tensor> result;
  for (const aclTensor* tensor : list->value) result.push_back(tensor->value);
  return result;
}

}  // namespace

ACLNN(aclnnInplaceCopy, (aclTensor * self, const aclTensor* source), (self->value, source->value),
      (a = self->value, b = source->value), a.copy_(b))
ACLNN(aclnnInplaceZero, (aclTensor * self), (self->value), (a = self->value), a.zero_())
ACLNN(aclnnInplaceOne, (aclTensor * self), (self->value), (a = self->value), a.fill_(1))
ACLNN(aclnnInplaceFillScalar, (aclTensor * self, const aclScalar* value), (self->value), (a = self->value, v = value->value), a.fill_(v))
ACLNN(aclnnInplaceFillTensor, (aclTensor * self, const aclTensor* value), (self->value), (a = self->value, v = value->value), a.fill_(v))
ACLNN(aclnnCast, (const aclTensor* self, aclDataType, aclTensor* out), (self->value, out->value), (a = self->value, o = out->value),
      o.copy_(a))
ACLNN(aclnnCat, (const aclTensorList* list, int64_t dim, aclTensor* out), (out->value), (l = values(list), dim, o = out->value),
      o.copy_(at::cat(l, dim)))
ACLNN(aclnnStack, (const aclTensorList* list, int64_t dim, aclTensor* out), (out->value), (l = values(list), dim, o = out->value),
      o.copy_(at::stack(l, dim)))
ACLNN(aclnnConstantPadNd, (const aclTensor* self, const aclIntArray* pad, const aclScalar* value, aclTensor* out),
      (self->value, out->value), (a = self->value, p = pad->value, v = value->value, o = out->value),
      o.copy_(at::constant_pad_nd(a, p, v)))

ACLNN(aclnnAdd, (const aclTensor* self, const aclTensor* other, const aclScalar* alpha, aclTensor* out),
      (self->value, other->value, out->value), (a = self->value, b = other->value, s = alpha->value, o = out->value),
      o.copy_(at::add(a, b, s)))
ACLNN(aclnnAdds, (const aclTensor* self, const aclScalar* other, const aclScalar* alpha, aclTensor* out), (self->value, out->value),
      (a = self->value, b = other->value, s = alpha->value, o = out->value), o.copy_(at::add(a, b, s)))
ACLNN(aclnnInplaceAdd, (aclTensor * self, const aclTensor* other, const aclScalar* alpha), (self->value, other->value),
      (a = self->value, b = other->value, s = alpha->value), a.add_(b, s))
ACLNN(aclnnInplaceAdds, (aclTensor * self, const aclScalar* other, const aclScalar* alpha), (self->value),
      (a = self->value, b = other->value, s = alpha->value), a.add_(b, s))
ACLNN(aclnnSub, (const aclTensor* self, const aclTensor* other, const aclScalar* alpha, aclTensor* out),
      (self->value, other->value, out->value), (a = self->value, b = other->value, s = alpha->value, o = out->value),
      o.copy_(at::sub(a, b, s)))
ACLNN(aclnnMul, (const aclTensor* self, const aclTensor* other, aclTensor* out), (self->value, other->value, out->value),
      (a = self->value, b = other->value, o = out->value), o.copy_(at::mul(a, b)))
ACLNN(aclnnMuls, (const aclTensor* self, const aclScalar* other, aclTensor* out), (self->value, out->value),
      (a = self->value, b = other->value, o = out->value), o.copy_(at::mul(a, b)))
ACLNN(aclnnInplaceMul, (aclTensor * self, const aclTensor* other), (self->value, other->value), (a = self->value, b = other->value), a.mul_(b))
ACLNN(aclnnInplaceMuls, (aclTensor * self, const aclScalar* other), (self->value), (a = self->value, b = other->value), a.mul_(b))
ACLNN(aclnnDiv, (const aclTensor* self, const aclTensor* other, aclTensor* out), (self->value, other->value, out->value),
      (a = self->value, b = other->value, o = out->value), o.copy_(at::div(a, b)))
ACLNN(aclnnDivs, (const aclTensor* self, const aclScalar* other, aclTensor* out), (self->value, out->value),
      (a = self->value, b = other->value, o = out->value), o.copy_(at::div(a, b)))
ACLNN(aclnnInplaceDiv, (aclTensor * self, const aclTensor* other), (self->value, other->value), (a = self->value, b = other->value), a.div_(b))
ACLNN(aclnnInplaceDivs, (aclTensor * self, const aclScalar* other), (self->value), (a = self->value, b = other->value), a.div_(b))
ACLNN(aclnnNeg, (const aclTensor* self, aclTensor* out), (self->value, out->value), (a = self->value, o = out->value), o.copy_(at::neg(a)))

ACLNN(aclnnEqTensor, (const aclTensor* self, const aclTensor* other, aclTensor* out), (self->value, other->value, out->value),
      (a = self->value, b = other->value, o = out->value), o.copy_(at::eq(a, b)))
ACLNN(aclnnEqScalar, (const aclTensor* self, const aclScalar* other, aclTensor* out), (self->value, out->value),
      (a = self->value, b = other->value, o = out->value), o.copy_(at::eq(a, b)))
ACLNN(aclnnNeTensor, (const aclTensor* self, const aclTensor* other, aclTensor* out), (self->value, other->value, out->value),
      (a = self->value, b = other->value, o = out->value), o.copy_(at::ne(a, b)))
ACLNN(aclnnNeScalar, (const aclTensor* self, const aclScalar* other, aclTensor* out), (self->value, out->value),
      (a = self->value, b = other->value, o = out->value), o.copy_(at::ne(a, b)))
ACLNN(aclnnEqual, (const aclTensor* self, const aclTensor* other, aclTensor* out), (self->value, other->value, out->value),
      (a = self->value, b = other->value, o = out->value), o.fill_(a.equal(b)))
ACLNN(aclnnIsFinite, (const aclTensor* self, aclTensor* out), (self->value, out->value), (a = self->value, o = out->value),
      o.copy_(at::isfinite(a)))
ACLNN(aclnnMax, (const aclTensor* self, aclTensor* out), (self->value, out->value), (a = self->value, o = out->value), o.copy_(at::max(a)))
ACLNN(aclnnReduceSum, (const aclTensor* self, const aclIntArray* dims, bool keep, aclDataType, aclTensor* out), (self->value, out->value),
      (a = self->value, d = dims->value, keep, o = out->value), o.copy_(at::sum(a, d, keep, o.scalar_type())))
ACLNN(aclnnAll, (const aclTensor* self, const aclIntArray* dims, bool keep, aclTensor* out), (self->value, out->value),
      (a = self->value, d = dims->value, keep, o = out->value), o.copy_(d.empty() ? at::all(a) : at::all(a, at::IntArrayRef(d), keep)))
ACLNN(aclnnAny, (const aclTensor* self, const aclIntArray* dims, bool keep, aclTensor* out), (self->value, out->value),
      (a = self->value, d = dims->value, keep, o = out->value), o.copy_(d.empty() ? at::any(a) : at::any(a, at::IntArrayRef(d), keep)))
