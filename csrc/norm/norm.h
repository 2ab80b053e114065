// RMS normalisation of rows, with and without the residual addition before it (Zhang and Sennrich 2019,
// arXiv:1910.07467).
#pragma once

#include "common/check.h"

namespace gristmill {

void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps);
void fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps);

}  // namespace gristmill
