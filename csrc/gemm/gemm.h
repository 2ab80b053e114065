// Linear layers over weights packed once, and skinny_linear over plain ones. Every output element is summed over K in
// one fixed order, whatever M, the tiles or the threads.
#pragma once

#include "common/check.h"

namespace gristmill {

void pack_weight(const Tensor& out, const Tensor& weight);
void packed_linear(const Tensor& out, const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t n,
                   int64_t k);
void skinny_linear(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

}  // namespace gristmill
