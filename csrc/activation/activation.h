// Gated activations of a fused gate-up projection (Shazeer 2020, arXiv:2002.05202; Hendrycks and Gimpel 2016,
// arXiv:1606.08415), and the clamped one of gpt-oss.
#pragma once

#include "common/check.h"

namespace gristmill {

void silu_and_mul(const Tensor& out, const Tensor& x);
void gelu_and_mul(const Tensor& out, const Tensor& x);
void gelu_tanh_and_mul(const Tensor& out, const Tensor& x);
void swiglu_oai(const Tensor& out, const Tensor& x, double alpha, double limit);

}  // namespace gristmill
