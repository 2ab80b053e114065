// Gated activations of a fused gate-up projection (Shazeer 2020, arXiv:2002.05202).
#pragma once

#include "common/check.h"

namespace gristmill {

void silu_and_mul(const Tensor& out, const Tensor& x);

}  // namespace gristmill
