// Casts between ND and the private format FRACTAL_NZ, for torch_npu's own npu_format_cast: the storage is as large as on hardware and
// get_npu_format is true, but the elements stay in the order of ND, since the CPU's kernels read them where they lie.
//
// Shapes: aclnnNpuFormatCast of CANN's reference (hiascend.com, operator acceleration library); the last dimension is one block of 32
// bytes of the type that multiplies, 16 elements of fp16 and bf16 or 32 of int8.
#include <algorithm>

#include "../sim.h"
#include "meta.h"

namespace {

constexpr int64_t kRows = 16;  // of a block

// Elements of a block's row for a type, 0: not simulated.
int64_t row_of(int type) {
  switch (type) {
    case ACL_FLOAT16:
    case ACL_BF16: return 16;
    case ACL_INT8:
    case ACL_UINT8: return 32;
    default: return 0;
  }
}

int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

aclError refuse(const char* reason) {
  sim_set_error("EZ1001: aclnnNpuFormatCastCalculateSizeAndFormat: %s", reason);
  return 161002;  // ACLNN_ERR_PARAM_INVALID (aclnn/acl_meta.h of CANN)
}

}  // namespace

extern "C" aclError aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor* source, int format, int additional, int64_t** shape,
                                                             uint64_t* count, int* actual) {
  std::vector<int64_t> sizes = source->value.sizes().vec();
  if (format == ACL_FORMAT_FRACTAL_NZ) {
    const int64_t row = row_of(additional);
    if (row == 0) return refuse("this data type is not simulated");
    if (sizes.size() < 2) return refuse("FRACTAL_NZ needs two dimensions");
    const int64_t columns = sizes.back(), lines = sizes[sizes.size() - 2];
    sizes.resize(sizes.size() - 2);
    sizes.insert(sizes.end(), {blocks(columns, row), blocks(lines, kRows), kRows, row});
  } else if (format != ACL_FORMAT_ND) {
    return refuse("only ND and FRACTAL_NZ can be cast");
  }
  *shape = new int64_t[sizes.size()];  // torch_npu frees it with delete[]
  std::copy(sizes.begin(), sizes.end(), *shape);
  *count = sizes.size();
  *actual = format;
  return ACL_SUCCESS;
}

extern "C" aclError aclnnNpuFormatCastGetWorkspaceSize(const aclTensor* source, aclTensor* out, uint64_t* workspace,
                                                       aclOpExecutor** executor) {
  return sim::plan("aclnnNpuFormatCast", {source->value, out->value}, workspace, executor,
                   [from = source->value, to = out->value]() mutable { to.copy_(from); });
}
extern "C" aclError aclnnNpuFormatCast(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return sim::run(executor, stream);
}
