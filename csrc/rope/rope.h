// Rotary position embedding of query and key heads, in place (Su et al. 2021, arXiv:2104.09864).
#pragma once

#include "common/check.h"

namespace gristmill {

void apply_rope(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache, bool is_neox);

}  // namespace gristmill
