// One token's rows into their slot, shared by store_kv and the rope that stores what it has rotated.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/float8.h"
#include "common/vec.h"
#include "kvcache/checks.h"

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

// Entries of a slot list: -1 or any other negative number marks padding, none lies beyond the pool.
inline void check_slots(const int32_t* slots, int64_t count, int64_t num_slots, const char* op, const char* name) {
  for (int64_t t = 0; t < count; ++t) {
    STD_TORCH_CHECK(slots[t] < num_slots, op, ": ", name, "[", t, "] must be -1 or in [0, ", num_slots, "), got ",
                    slots[t]);
  }
}

}  // namespace gristmill
