// HCCL's data types: sizes, names, and the four reductions.
#pragma once

#include <hccl/hccl.h>

#include <cstddef>

namespace hccl_sim {

// Bytes of one element, 0: no such type.
size_t size_of(HcclDataType type);
const char* name_of(HcclDataType type);
const char* name_of(HcclReduceOp op);
// True when a reduction knows the type.
bool reducible(HcclDataType type);
// into[i] = into[i] op from[i]. Half types are rounded after every step, like the reduction in a device's data path.
void reduce(HcclDataType type, HcclReduceOp op, void* into, const void* from, size_t count);

}  // namespace hccl_sim
