// Rows as 8-bit numbers and the scales they are worth.
#pragma once

#include "common/check.h"

namespace gristmill {

void quant_fp8(const Tensor& out, const Tensor& x, const Tensor& scale);
void per_token_quant_fp8(const Tensor& out, const Tensor& scales, const Tensor& x);
void per_token_quant_int8(const Tensor& out, const Tensor& scales, const Tensor& x);
void per_group_quant_fp8(const Tensor& out, const Tensor& scales, const Tensor& x, int64_t group_size);

}  // namespace gristmill
