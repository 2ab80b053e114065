// Writes of keys and values into the slot pool, moves within it and copies between two pools.
#pragma once

#include "common/check.h"

namespace gristmill {

void store_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots,
              double k_scale, double v_scale);
void copy_slots(const Tensor& k_cache, const OptionalTensor& v_cache, const Tensor& src_slots, const Tensor& dst_slots);
void transfer_kv(const Tensor& dst_k, const OptionalTensor& dst_v, const Tensor& src_k, const OptionalTensor& src_v,
                 const Tensor& src_slots, const Tensor& dst_slots);

}  // namespace gristmill
