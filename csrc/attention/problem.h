// The checked arguments of one attention call as plain pointers and strides, shared by decode and extend.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/check.h"
#include "common/vec.h"

namespace gristmill {

// KV lists are cut every kChunk entries, counted from the start of a request's list, whatever the batch, the rows or
// the threads.
inline constexpr int64_t kChunk = 256;

struct AttentionProblem {
  // q, out: [rows, num_qo_heads, *] of `dtype`; lse: [rows, num_qo_heads] or null.
  ScalarType dtype;
  const void* q;
  int64_t q_row, q_head;
  void* out;
  int64_t out_row, out_head;
  float* lse;
  int64_t lse_row, lse_head;
  // Pools [slots, num_kv_heads, *].
  const void* k;
  int64_t k_slot, k_head;
  const void* v;
  int64_t v_slot, v_head;
  int64_t num_slots;
  const int32_t* kv_indptr;
  const int32_t* kv_indices;
  const float* sinks;  // [num_qo_heads] or null
  int64_t rows, requests, num_qo_heads, num_kv_heads, head_dim, head_dim_v;
  float scale;  // sm_scale * k_scale
  float logit_cap;
  float v_scale;
  int64_t window_left;

  int64_t group() const { return num_qo_heads / num_kv_heads; }
  int64_t kv_len(int64_t request) const { return kv_indptr[request + 1] - kv_indptr[request]; }

  // The first position that a row at `position` sees.
  int64_t window_start(int64_t position) const {
    return window_left >= 0 && position > window_left ? position - window_left : 0;
  }

  void load_q(float* to, int64_t row, int64_t head) const {
    const int64_t offset = row * q_row + head * q_head;
    switch (dtype) {
      case ScalarType::Float:
        return widen(to, static_cast<const float*>(q) + offset);
      case ScalarType::BFloat16:
        return widen(to, static_cast<const BFloat16*>(q) + offset);
      default:
        return widen(to, static_cast<const Half*>(q) + offset);
    }
  }

  const BFloat16* q_bfloat16(int64_t row, int64_t head) const {
    return static_cast<const BFloat16*>(q) + row * q_row + head * q_head;
  }

  // out = o * factor
  void store_out(int64_t row, int64_t head, const float* o, float factor) const {
    const int64_t offset = row * out_row + head * out_head;
    switch (dtype) {
      case ScalarType::Float:
        return narrow(static_cast<float*>(out) + offset, o, factor);
      case ScalarType::BFloat16:
        return narrow(static_cast<BFloat16*>(out) + offset, o, factor);
      default:
        return narrow(static_cast<Half*>(out) + offset, o, factor);
    }
  }

  void store_lse(int64_t row, int64_t head, float value) const {
    if (lse != nullptr) lse[row * lse_row + head * lse_head] = value;
  }

 private:
  template <typename T>
  void widen(float* to, const T* from) const {
    for_lanes(
        head_dim, [&](int64_t i) { vstore(to + i, vload(from + i)); },
        [&](int64_t i, int64_t n) { vstore_n(to + i, vload_n(from + i, n), n); });
  }

  template <typename T>
  void narrow(T* to, const float* from, float factor) const {
    for_lanes(
        head_dim_v, [&](int64_t i) { vstore(to + i, vload(from + i) * factor); },
        [&](int64_t i, int64_t n) { vstore_n(to + i, vload_n(from + i, n) * factor, n); });
  }
};

// Remembers a slot beyond the pool: threads may not throw, so the slot counts as a hole and the call is refused at the
// end.
class BadSlot {
 public:
  void set(int64_t slot) { slot_.store(slot, std::memory_order_relaxed); }
  void check(const char* op, int64_t num_slots) const {
    const int64_t slot = slot_.load();
    STD_TORCH_CHECK(slot < 0, op, ": kv_indices must be below the ", num_slots, " slots of the pool, got ", slot);
  }

 private:
  std::atomic<int64_t> slot_{-1};
};

AttentionProblem make_problem(const char* op, const Tensor& out, const OptionalTensor& lse, const Tensor& q,
                              const Tensor& k_cache, const Tensor& v_cache, const Tensor& kv_indptr,
                              const Tensor& kv_indices, const OptionalTensor& sinks, double sm_scale, double logit_cap,
                              int64_t window_left, double k_scale, double v_scale);

}  // namespace gristmill
