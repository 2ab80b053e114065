// The checked arguments of a rotation as plain numbers, on the CPU and on GPUs.
#pragma once

#include "common/check.h"

namespace gristmill {

// q [T, Hq, D], k [T, Hkv, D] and the table [P, rotary_dim]: half of a row are cosines, half sines.
struct RotationArguments {
  RotationArguments(const Tensor& q, const Tensor& k, const Tensor& position_list, const Tensor& cos_sin_cache,
                    const char* op) {
    check_dim(q, 3, op, "q");
    check_dim(k, 3, op, "k");
    check_inner(q, op, "q");
    check_inner(k, op, "k");
    num_tokens = q.size(0);
    check_size(k, 0, num_tokens, op, "k");
    check_size(k, 2, q.size(2), op, "k");
    check_dtype(k, q.scalar_type(), op, "k");
    check_vector(position_list, ScalarType::Int, num_tokens, op, "positions");
    check_dim(cos_sin_cache, 2, op, "cos_sin_cache");
    check_dtype(cos_sin_cache, ScalarType::Float, op, "cos_sin_cache");
    check_inner(cos_sin_cache, op, "cos_sin_cache");
    rotary_dim = cos_sin_cache.size(1);
    STD_TORCH_CHECK(rotary_dim % 2 == 0 && rotary_dim <= q.size(2), op,
                    ": cos_sin_cache must have an even width of at most head_dim ", q.size(2), ", got ", rotary_dim);
    positions = data<int32_t>(position_list);
    num_positions = cos_sin_cache.size(0);
    q_token = q.stride(0), q_head = q.stride(1), q_heads = q.size(1);
    k_token = k.stride(0), k_head = k.stride(1), k_heads = k.size(1);
    cache_stride = cos_sin_cache.stride(0);
    cache = data<float>(cos_sin_cache);
  }

  int64_t num_tokens, rotary_dim, num_positions, cache_stride;
  int64_t q_token, q_head, q_heads, k_token, k_head, k_heads;
  const int32_t* positions;
  const float* cache;
};

}  // namespace gristmill
