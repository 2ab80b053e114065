// Multi-head latent attention in its absorbed form: a cache row is a latent vector and a rope key; the latent vector is
// key and value at once, for all heads.
#pragma once

#include "common/check.h"

namespace gristmill {

void mla_decode(const Tensor& out, const OptionalTensor& lse, const Tensor& q_nope, const Tensor& q_rope,
                const Tensor& kv_cache, const OptionalTensor& qo_indptr, const Tensor& kv_indptr,
                const Tensor& kv_indices, const OptionalTensor& plan, const OptionalTensor& workspace, double sm_scale,
                double kv_scale);

void mla_store(const Tensor& kv_cache, const Tensor& kv_c, const Tensor& k_rope, const Tensor& slots, double kv_scale);

}  // namespace gristmill
