// The handles of the aclnn interface (aclnn/acl_meta.h of CANN, retyped: opaque there, CPU tensors over device memory here).
#pragma once

#include <ATen/core/Tensor.h>
#include <acl/acl.h>

#include <functional>
#include <vector>

struct aclTensor {
  at::Tensor value;
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> value;
};
struct aclFloatArray {
  std::vector<float> value;
};
struct aclBoolArray {
  std::vector<uint8_t> value;
};
struct aclTensorList {
  std::vector<const aclTensor*> value;
};
struct aclScalarList {
  std::vector<const aclScalar*> value;
};
struct aclOpExecutor {
  const char* name;
  int device;
  std::vector<at::Tensor> tensors;
  std::function<void()> body;
};

namespace sim {

at::ScalarType scalar_type(aclDataType type);
// The first half of every aclnn call: keeps what the second half will do. `tensors` are counted.
aclError plan(const char* name, std::vector<at::Tensor> tensors, uint64_t* workspace, aclOpExecutor** executor, std::function<void()> body);
// The second half, after what the stream still has to do: torch_npu works on its collectives' streams this way.
aclError run(aclOpExecutor* executor, void* stream);

}  // namespace sim
