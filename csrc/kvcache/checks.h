// What the ops of the slot pool ask of their arguments, on the CPU and on GPUs.
#pragma once

#include "common/check.h"

namespace gristmill {

inline void check_store_pair(const Tensor& cache, const Tensor& rows, int64_t tokens, const char* op,
                             const char* cache_name, const char* name) {
  check_dim(cache, 3, op, cache_name);
  check_dim(rows, 3, op, name);
  check_inner(cache, op, cache_name);
  check_inner(rows, op, name);
  check_size(rows, 0, tokens, op, name);
  check_size(rows, 1, cache.size(1), op, name);
  check_size(rows, 2, cache.size(2), op, name);
}

// All of a store but what the slots are.
inline void check_store(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
                        const Tensor& slots, double k_scale, double v_scale, const char* op) {
  check_dim(k, 3, op, "k");
  const int64_t tokens = k.size(0);
  check_store_pair(k_cache, k, tokens, op, "k_cache", "k");
  check_store_pair(v_cache, v, tokens, op, "v_cache", "v");
  check_dtype(v, k.scalar_type(), op, "v");
  if (!is_float8(k_cache.scalar_type())) check_dtype(k_cache, k.scalar_type(), op, "k_cache");
  check_dtype(v_cache, k_cache.scalar_type(), op, "v_cache");
  check_size(v_cache, 0, k_cache.size(0), op, "v_cache");
  check_vector(slots, ScalarType::Int, tokens, op, "slots");
  STD_TORCH_CHECK(k_scale > 0 && v_scale > 0, op, ": k_scale and v_scale must be positive, got ", k_scale, " and ",
                  v_scale);
}

// f(row tag, cache tag) for the pairs of types that a store takes.
template <typename F>
inline void dispatch_store(ScalarType rows, ScalarType cache, const char* op, F&& f) {
  dispatch_float(rows, op, "k", [&](auto from) {
    if (is_float8(cache)) {
      dispatch_float8(cache, [&](auto to) { f(from, to); });
    } else {
      f(from, from);
    }
  });
}

inline void check_transfer_pair(const Tensor& dst, const Tensor& src, const char* op, const char* dst_name,
                                const char* src_name) {
  check_dim(dst, 3, op, dst_name);
  check_dim(src, 3, op, src_name);
  check_inner(dst, op, dst_name);
  check_inner(src, op, src_name);
  check_size(dst, 1, src.size(1), op, dst_name);
  check_size(dst, 2, src.size(2), op, dst_name);
  STD_TORCH_CHECK(dst.scalar_type() == src.scalar_type(), op, ": ", dst_name, " must have the dtype of ", src_name);
}

inline void check_slot_lists(const Tensor& src_slots, const Tensor& dst_slots, const char* op) {
  check_vector(src_slots, ScalarType::Int, -1, op, "src_slots");
  check_vector(dst_slots, ScalarType::Int, src_slots.size(0), op, "dst_slots");
}

inline void check_copy(const Tensor& k_cache, const OptionalTensor& v_cache, const Tensor& src_slots,
                       const Tensor& dst_slots, const char* op) {
  check_dim(k_cache, 4, op, "k_cache");
  check_inner(k_cache, op, "k_cache");
  if (v_cache) {
    check_dim(*v_cache, 4, op, "v_cache");
    check_inner(*v_cache, op, "v_cache");
    check_size(*v_cache, 1, k_cache.size(1), op, "v_cache");
  }
  check_slot_lists(src_slots, dst_slots, op);
}

inline void check_transfer(const Tensor& dst_k, const OptionalTensor& dst_v, const Tensor& src_k,
                           const OptionalTensor& src_v, const Tensor& src_slots, const Tensor& dst_slots,
                           const char* op) {
  check_transfer_pair(dst_k, src_k, op, "dst_k", "src_k");
  STD_TORCH_CHECK(dst_v.has_value() == src_v.has_value(), op, ": dst_v and src_v must be given together");
  if (dst_v) {
    check_transfer_pair(*dst_v, *src_v, op, "dst_v", "src_v");
    check_size(*dst_v, 0, dst_k.size(0), op, "dst_v");
    check_size(*src_v, 0, src_k.size(0), op, "src_v");
  }
  check_slot_lists(src_slots, dst_slots, op);
}

inline void check_mla_store(const Tensor& kv_cache, const Tensor& kv_c, const Tensor& k_rope, const Tensor& slots,
                            double kv_scale, const char* op) {
  check_dim(kv_cache, 2, op, "kv_cache");
  check_dim(kv_c, 2, op, "kv_c");
  check_dim(k_rope, 2, op, "k_rope");
  check_inner(kv_cache, op, "kv_cache");
  check_inner(kv_c, op, "kv_c");
  check_inner(k_rope, op, "k_rope");
  check_size(k_rope, 0, kv_c.size(0), op, "k_rope");
  check_dtype(k_rope, kv_c.scalar_type(), op, "k_rope");
  check_size(kv_cache, 1, kv_c.size(1) + k_rope.size(1), op, "kv_cache");
  if (!is_float8(kv_cache.scalar_type())) check_dtype(kv_cache, kv_c.scalar_type(), op, "kv_cache");
  check_vector(slots, ScalarType::Int, kv_c.size(0), op, "slots");
  STD_TORCH_CHECK(kv_scale > 0, op, ": kv_scale must be positive, got ", kv_scale);
}

}  // namespace gristmill
