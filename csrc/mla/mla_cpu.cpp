// mla_decode and mla_store on the CPU. Decode is split-KV attention with one KV head whose values are the front of its
// keys, so a row has the bits that decode_attention gives for the same cache.
#include "attention/split_kv.h"
#include "common/parallel.h"
#include "kvcache/store.h"
#include "mla/mla.h"

namespace gristmill {

void mla_decode(const Tensor& out, const OptionalTensor& lse, const Tensor& q_nope, const Tensor& q_rope,
                const Tensor& kv_cache, const OptionalTensor& qo_indptr, const Tensor& kv_indptr,
                const Tensor& kv_indices, const OptionalTensor& plan, const OptionalTensor& workspace, double sm_scale,
                double kv_scale) {
  constexpr const char* op = "mla_decode";
  check_dim(q_nope, 3, op, "q_nope");
  check_dim(q_rope, 3, op, "q_rope");
  check_dim(kv_cache, 2, op, "kv_cache");
  check_inner(q_nope, op, "q_nope");
  check_inner(q_rope, op, "q_rope");
  check_inner(kv_cache, op, "kv_cache");
  AttentionProblem p{};
  p.dtype = q_nope.scalar_type();
  p.rows = q_nope.size(0);
  p.num_qo_heads = q_nope.size(1);
  p.q_width = p.head_dim_v = q_nope.size(2);
  p.head_dim = p.q_width + q_rope.size(2);
  p.num_kv_heads = 1;
  p.num_slots = kv_cache.size(0);
  p.cache_dtype = kv_cache.scalar_type();
  check_size(q_rope, 0, p.rows, op, "q_rope");
  check_size(q_rope, 1, p.num_qo_heads, op, "q_rope");
  check_dtype(q_rope, p.dtype, op, "q_rope");
  check_size(kv_cache, 1, p.head_dim, op, "kv_cache");
  dispatch_float(p.dtype, op, "q_nope", [](auto) {});
  p.q = q_nope.const_data_ptr();
  p.q_row = q_nope.stride(0);
  p.q_head = q_nope.stride(1);
  p.q_tail = q_rope.const_data_ptr();
  p.q_tail_row = q_rope.stride(0);
  p.q_tail_head = q_rope.stride(1);
  p.k = p.v = kv_cache.const_data_ptr();
  p.k_slot = p.v_slot = kv_cache.stride(0);
  set_outputs(p, op, out, lse);
  set_lists(p, op, kv_indptr, &kv_indices);
  p.scale = static_cast<float>(sm_scale * kv_scale);
  p.v_scale = static_cast<float>(kv_scale);
  p.window_left = -1;
  const int32_t* bounds = nullptr;
  if (qo_indptr) {
    bounds = query_bounds(p, op, *qo_indptr);
  } else {
    check_size(kv_indptr, 0, p.rows + 1, op, "kv_indptr");
  }
  if (p.num_qo_heads > 0) run_split_kv(op, p, {bounds, plan, workspace});
}

void mla_store(const Tensor& kv_cache, const Tensor& kv_c, const Tensor& k_rope, const Tensor& slots, double kv_scale) {
  constexpr const char* op = "mla_store";
  check_mla_store(kv_cache, kv_c, k_rope, slots, kv_scale, op);
  const int64_t tokens = kv_c.size(0), latent_dim = kv_c.size(1), rope_dim = k_rope.size(1);
  const int32_t* slot = data<int32_t>(slots);
  check_slots(slot, tokens, kv_cache.size(0), op, "slots");
  const float scale = static_cast<float>(kv_scale);
  dispatch_float(kv_c.scalar_type(), op, "kv_c", [&](auto from_tag) {
    using From = decltype(from_tag);
    const auto store = [&](auto to_tag) {
      using To = decltype(to_tag);
      To* cache = mutable_data<To>(kv_cache);
      const From* latent = data<From>(kv_c);
      const From* rope = data<From>(k_rope);
      parallel_ranges(tokens, (latent_dim + rope_dim) * 4, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          if (slot[t] < 0) continue;
          To* to = cache + slot[t] * kv_cache.stride(0);
          store_row(to, latent + t * kv_c.stride(0), latent_dim, scale);
          store_row(to + latent_dim, rope + t * k_rope.stride(0), rope_dim, scale);
        }
      });
    };
    if (is_float8(kv_cache.scalar_type())) {
      dispatch_float8(kv_cache.scalar_type(), store);
    } else {
      store(From{});
    }
  });
}

}  // namespace gristmill
