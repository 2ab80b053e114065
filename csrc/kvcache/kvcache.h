// Writes of keys and values into the slot pool.
#pragma once

#include "common/check.h"

namespace gristmill {

void store_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots);

}  // namespace gristmill
