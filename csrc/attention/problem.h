// The checked arguments of one attention call as plain pointers and strides, shared by all attention ops.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/check.h"
#include "common/float8.h"
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
  int64_t q_width;  // head_dim, less what lies in q_tail
  // The last head_dim - q_width elements of a query, where they are a tensor of their own, or null.
  const void* q_tail;
  int64_t q_tail_row, q_tail_head;
  void* out;
  int64_t out_row, out_head;
  float* lse;
  int64_t lse_row, lse_head;
  // Pools [slots, num_kv_heads, *] of `cache_dtype`; v may be k.
  ScalarType cache_dtype;
  const void* k;
  int64_t k_slot, k_head;
  const void* v;
  int64_t v_slot, v_head;
  int64_t num_slots;
  const int32_t* kv_indptr;
  const int32_t* kv_indices;  // null: entry i of the lists is slot i
  const float* sinks;         // [num_qo_heads] or null
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
    switch (dtype) {
      case ScalarType::Float:
        return read_q<float>(row, head, to, widen<float>);
      case ScalarType::BFloat16:
        return read_q<BFloat16>(row, head, to, widen<BFloat16>);
      default:
        return read_q<Half>(row, head, to, widen<Half>);
    }
  }

  void copy_q(BFloat16* to, int64_t row, int64_t head) const {
    read_q<BFloat16>(row, head, to,
                     [](BFloat16* part, const BFloat16* from, int64_t width) { std::copy_n(from, width, part); });
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
  template <typename T, typename To, typename F>
  void read_q(int64_t row, int64_t head, To* to, F&& read) const {
    read(to, static_cast<const T*>(q) + row * q_row + head * q_head, q_width);
    if (q_tail == nullptr) return;
    read(to + q_width, static_cast<const T*>(q_tail) + row * q_tail_row + head * q_tail_head, head_dim - q_width);
  }

  template <typename T>
  static void widen(float* to, const T* from, int64_t width) {
    for_lanes(
        width, [&](int64_t i) { vstore(to + i, vload(from + i)); },
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

// Calls f with a value of the type that the kernels read keys and values as: an 8-bit cache becomes bfloat16, exactly,
// a chunk at a time.
template <typename F>
inline void dispatch_cache(ScalarType type, const char* op, const char* name, F&& f) {
  dispatch_float(is_float8(type) ? ScalarType::BFloat16 : type, op, name, std::forward<F>(f));
}

// Names of the keys and values in messages: those of a pool, or of contiguous rows.
struct KvNames {
  const char* k;
  const char* v;
};
inline constexpr KvNames kPoolNames{"k_cache", "v_cache"};

// Without kv_indices keys and values are contiguous rows.
AttentionProblem make_problem(const char* op, const KvNames& names, const Tensor& out, const OptionalTensor& lse,
                              const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_indptr,
                              const Tensor* kv_indices, const OptionalTensor& sinks, double sm_scale, double logit_cap,
                              int64_t window_left, double k_scale, double v_scale);

// The parts of it that other ops share: out [rows, heads, width] with lse, and the lists.
void set_outputs(AttentionProblem& p, const char* op, const Tensor& out, const OptionalTensor& lse);
void set_lists(AttentionProblem& p, const char* op, const Tensor& kv_indptr, const Tensor* kv_indices);

// The bounds of every request's query rows; checks them against p.
const int32_t* query_bounds(const AttentionProblem& p, const char* op, const Tensor& qo_indptr);

}  // namespace gristmill
