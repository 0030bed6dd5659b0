// Descriptions of tensors and buffers for operators of the graph engine (compiler/compiler.cpp runs the few that are simulated).
#include <acl/acl_op.h>

#include <string>
#include <vector>

#include "state.h"

struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> dims;
  std::string name;
};
struct aclDataBuffer {
  void* data;
  size_t bytes;
};
struct aclopAttr {};

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  return new aclTensorDesc{type, format, std::vector<int64_t>(dims, dims + (dims == nullptr ? 0 : count)), ""};
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
void aclSetTensorDescName(aclTensorDesc* desc, const char* name) { desc->name = name; }
const char* aclGetTensorDescName(aclTensorDesc* desc) { return desc->name.c_str(); }
// What the memory holds is described by the buffer: format and shape of the storage change nothing here.
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  if (index >= desc->dims.size()) return sim::fail(ACL_ERROR_INVALID_PARAM, "aclGetTensorDescDimV2", "there is no such dimension");
  *size = desc->dims[index];
  return ACL_SUCCESS;
}

aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}
void* aclGetDataBufferAddr(const aclDataBuffer* buffer) { return buffer->data; }
size_t aclGetDataBufferSizeV2(const aclDataBuffer* buffer) { return buffer->bytes; }

// No operator that is simulated has attributes.
aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) { return ACL_SUCCESS; }

}  // extern "C"
