// Attention over a slot pool addressed by CSR lists or over contiguous keys, and the merge of partial results. LSE is
// the natural logarithm, float32.
#pragma once

#include "common/check.h"

namespace gristmill {

void decode_attention(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& kv_indptr, const Tensor& kv_indices,
                      const OptionalTensor& sinks, const OptionalTensor& plan, const OptionalTensor& workspace,
                      double sm_scale, double logit_cap, int64_t window_left, double k_scale, double v_scale);

void extend_attention(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& qo_indptr, const Tensor& kv_indptr, const Tensor& kv_indices,
                      const OptionalTensor& custom_mask, const OptionalTensor& mask_indptr, const OptionalTensor& sinks,
                      bool causal, double sm_scale, double logit_cap, int64_t window_left, double k_scale,
                      double v_scale);

// The keys and values of request b are rows [kv_indptr[b], kv_indptr[b + 1]) of k and v.
void ragged_attention(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& qo_indptr, const Tensor& kv_indptr, const OptionalTensor& custom_mask,
                      const OptionalTensor& mask_indptr, const OptionalTensor& sinks, bool causal, double sm_scale,
                      double logit_cap, int64_t window_left);

void merge_state(const Tensor& out, const Tensor& out_lse, const Tensor& o_a, const Tensor& lse_a, const Tensor& o_b,
                 const Tensor& lse_b);

void merge_states(const Tensor& out, const Tensor& out_lse, const Tensor& o, const Tensor& lse);

}  // namespace gristmill
