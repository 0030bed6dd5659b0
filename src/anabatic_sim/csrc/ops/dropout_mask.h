// Masks of dropout (legacy_dropout.cpp): one bit for each value that is kept, the lowest bit of a byte first.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

// True for each of `count` values that is kept, with probability 1 - p.
at::Tensor draw_kept(int64_t count, double p, uint64_t seed);
// The bits of `kept` as uint8, filled with zeros up to whole blocks of 128 bits.
at::Tensor pack_mask(const at::Tensor& kept);
// 1 and 0 for the first values of a mask, in the given shape.
at::Tensor unpack_mask(const at::Tensor& mask, at::IntArrayRef sizes);

}  // namespace sim
