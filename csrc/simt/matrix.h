// The tensor cores' collectives of a warp of 32: fragments as the PTX ISA lays them out for ldmatrix.m8n8 and
// mma.m16n8k16 (with g = lane / 4 and t = lane % 4).
#pragma once

#include <cstdint>

#include "simt/simt.h"

namespace simt {

void load_matrix_4(uint32_t (&r)[4], const void* row, const Site& site);
void load_matrix_4_transposed(uint32_t (&r)[4], const void* row, const Site& site);
void multiply_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half, const Site& site);

}  // namespace simt
