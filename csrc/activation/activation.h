// Gated activations of a fused gate-up projection (Shazeer 2020, arXiv:2002.05202; Hendrycks and Gimpel 2016,
// arXiv:1606.08415), and the clamped one of gpt-oss.
#pragma once

#include "common/check.h"

namespace gristmill {

// Rows of x, twice as wide as those of out.
struct GatedRows {
  Rows x, out;

  GatedRows(const Tensor& out_tensor, const Tensor& x_tensor, const char* op)
      : x(x_tensor, op, "x"), out(out_tensor, op, "out") {
    STD_TORCH_CHECK(x.width() == 2 * out.width(), op, ": x must be twice as wide as out (", 2 * out.width(), "), got ",
                    x.width());
    STD_TORCH_CHECK(x.count() == out.count(), op, ": out must have as many rows as x (", x.count(), "), got ",
                    out.count());
    check_dtype(out_tensor, x_tensor.scalar_type(), op, "out");
  }
};

void silu_and_mul(const Tensor& out, const Tensor& x);
void gelu_and_mul(const Tensor& out, const Tensor& x);
void gelu_tanh_and_mul(const Tensor& out, const Tensor& x);
void swiglu_oai(const Tensor& out, const Tensor& x, double alpha, double limit);

}  // namespace gristmill
