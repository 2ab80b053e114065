// Rotary position embedding of query and key heads, in place (Su et al. 2021, arXiv:2104.09864), alone and together
// with the store of the rotated keys and the values.
#pragma once

#include "common/check.h"

namespace gristmill {

void apply_rope(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache, bool is_neox);
void apply_rope_store_kv(const Tensor& q, const Tensor& k, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& v, const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& slots,
                         bool is_neox, double k_scale, double v_scale);

}  // namespace gristmill
