// RMS normalisation of rows, with and without the residual addition before it (Zhang and Sennrich 2019,
// arXiv:1910.07467); Gemma's variant, whose factor is 1 + weight; layer normalisation (Ba et al. 2016,
// arXiv:1607.06450).
#pragma once

#include "common/check.h"

namespace gristmill {

void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps);
void fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps);
void gemma_rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps);
void gemma_fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps);
void layer_norm(const Tensor& out, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                double eps);

}  // namespace gristmill
