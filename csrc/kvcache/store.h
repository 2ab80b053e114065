// One token's rows into their slot, shared by store_kv and the rope that stores what it has rotated.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/check.h"
#include "common/float8.h"
#include "common/vec.h"

namespace gristmill {

// to = from / scale, rounded to nearest even; 8-bit floats saturate. Scale 1 copies the bits where the types agree.
template <typename From, typename To>
inline void store_row(To* to, const From* from, int64_t width, float scale) {
  if constexpr (std::is_same_v<From, To>) {
    if (scale == 1.0f) {
      std::memcpy(to, from, static_cast<size_t>(width) * sizeof(To));
      return;
    }
  }
  const vf divisor = vset1(scale);
  for_lanes(
      width, [&](int64_t i) { vstore(to + i, vload(from + i) / divisor); },
      [&](int64_t i, int64_t n) { vstore_n(to + i, vload_n(from + i, n) / divisor, n); });
}

// Rows [T, H, D] and the cache [S, H, D] they go to.
template <typename From, typename To>
class SlotStore {
 public:
  SlotStore(const Tensor& cache, const Tensor& rows, double scale)
      : to_(mutable_data<To>(cache)),
        from_(data<From>(rows)),
        heads_(rows.size(1)),
        width_(rows.size(2)),
        row_stride_(rows.stride(0)),
        head_stride_(rows.stride(1)),
        slot_stride_(cache.stride(0)),
        cache_head_stride_(cache.stride(1)),
        scale_(static_cast<float>(scale)) {}

  void store(int64_t token, int64_t slot) const {
    for (int64_t h = 0; h < heads_; ++h) {
      store_row(to_ + slot * slot_stride_ + h * cache_head_stride_, from_ + token * row_stride_ + h * head_stride_,
                width_, scale_);
    }
  }

 private:
  To* to_;
  const From* from_;
  int64_t heads_, width_, row_stride_, head_stride_, slot_stride_, cache_head_stride_;
  float scale_;
};

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

// Entries of a slot list: -1 or any other negative number marks padding, none lies beyond the pool.
inline void check_slots(const int32_t* slots, int64_t count, int64_t num_slots, const char* op, const char* name) {
  for (int64_t t = 0; t < count; ++t) {
    STD_TORCH_CHECK(slots[t] < num_slots, op, ": ", name, "[", t, "] must be -1 or in [0, ", num_slots, "), got ",
                    slots[t]);
  }
}

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
  check_slots(data<int32_t>(slots), tokens, k_cache.size(0), op, "slots");
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

}  // namespace gristmill
