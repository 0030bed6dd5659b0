#include "meta.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <string>

#include "../ops/count.h"
#include "../sim.h"

namespace sim {

at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_BOOL: return at::kBool;
    case ACL_UINT16: return at::kUInt16;
    case ACL_UINT32: return at::kUInt32;
    case ACL_UINT64: return at::kUInt64;
    case ACL_COMPLEX64: return at::kComplexFloat;
    case ACL_COMPLEX128: return at::kComplexDouble;
    default: return at::ScalarType::Undefined;
  }
}

aclError plan(const char* name, std::vector<at::Tensor> tensors, uint64_t* workspace, aclOpExecutor** executor, std::function<void()> body) {
  *workspace = 0;
  *executor = new aclOpExecutor{name, sim_current_device(), std::move(tensors), std::move(body)};
  return ACL_SUCCESS;
}

aclError run(aclOpExecutor* executor, void* stream) {
  sim_settle(stream);
  const uint64_t started = sim_clock_ns();
  aclError code = ACL_SUCCESS;
  const std::string name = executor->name;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    executor->body();
    sim_count_op({c10::OperatorName(name, ""), executor->tensors, {}, executor->device, sim_clock_ns() - started});
  } catch (const std::exception& error) {
    sim_set_error("EZ9999: %s: %.800s", name.c_str(), error.what());
    code = ACL_ERROR_FAILURE;
  }
  delete executor;
  return code;
}

}  // namespace sim

extern "C" {

aclTensor* aclCreateTensor(const int64_t* dims, uint64_t count, aclDataType type, const int64_t* strides, int64_t offset, aclFormat,
                           const int64_t*, uint64_t, void* data) {
  const auto dtype = sim::scalar_type(type);
  if (dtype == at::ScalarType::Undefined) {
    sim_set_error("EZ1001: aclDataType %d is not simulated", static_cast<int>(type));
    return nullptr;
  }
  const at::IntArrayRef sizes(dims, count);
  auto* start = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(dtype));
  return new aclTensor{at::from_blob(start, sizes, at::IntArrayRef(strides, count), at::TensorOptions(dtype))};
}

aclScalar* aclCreateScalar(void* value, aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return new aclScalar{*static_cast<float*>(value)};
    case ACL_DOUBLE: return new aclScalar{*static_cast<double*>(value)};
    case ACL_FLOAT16: return new aclScalar{static_cast<float>(*static_cast<c10::Half*>(value))};
    case ACL_BF16: return new aclScalar{static_cast<float>(*static_cast<c10::BFloat16*>(value))};
    case ACL_INT64: return new aclScalar{*static_cast<int64_t*>(value)};
    case ACL_INT32: return new aclScalar{*static_cast<int32_t*>(value)};
    case ACL_BOOL: return new aclScalar{*static_cast<bool*>(value)};
    case ACL_COMPLEX64: return new aclScalar{*static_cast<c10::complex<float>*>(value)};
    case ACL_COMPLEX128: return new aclScalar{*static_cast<c10::complex<double>*>(value)};
    default: sim_set_error("EZ1001: a scalar of aclDataType %d is not simulated", static_cast<int>(type)); return nullptr;
  }
}

aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size) { return new aclIntArray{{value, value + size}}; }
aclFloatArray* aclCreateFloatArray(const float* value, uint64_t size) { return new aclFloatArray{{value, value + size}}; }
aclBoolArray* aclCreateBoolArray(const bool* value, uint64_t size) { return new aclBoolArray{{value, value + size}}; }
aclTensorList* aclCreateTensorList(const aclTensor* const* value, uint64_t size) { return new aclTensorList{{value, value + size}}; }
aclScalarList* aclCreateScalarList(const aclScalar* const* value, uint64_t size) { return new aclScalarList{{value, value + size}}; }

aclError aclDestroyTensor(const aclTensor* handle) { return delete handle, ACL_SUCCESS; }
aclError aclDestroyScalar(const aclScalar* handle) { return delete handle, ACL_SUCCESS; }
aclError aclDestroyIntArray(const aclIntArray* handle) { return delete handle, ACL_SUCCESS; }
aclError aclDestroyFloatArray(const aclFloatArray* handle) { return delete handle, ACL_SUCCESS; }
aclError aclDestroyBoolArray(const aclBoolArray* handle) { return delete handle, ACL_SUCCESS; }
aclError aclDestroyTensorList(const aclTensorList* handle) {
  for (const aclTensor* tensor : handle->value) delete tensor;  // the list owns what it lists
  return delete handle, ACL_SUCCESS;
}
aclError aclDestroyScalarList(const aclScalarList* handle) {
  for (const aclScalar* scalar : handle->value) delete scalar;
  return delete handle, ACL_SUCCESS;
}
aclError aclDestroyAclOpExecutor(aclOpExecutor* executor) { return delete executor, ACL_SUCCESS; }

}  // extern "C"
