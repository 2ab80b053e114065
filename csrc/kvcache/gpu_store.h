// What a GPU thread stores of one row [H, D] into its slot, shared by store_kv, mla_store and the rope that stores what
// it has rotated.
#pragma once

#include "common/float8_scalar.h"
#include "common/gpu_rows.h"

namespace gristmill::gpu {

// x / scale, rounded to nearest even; 8-bit floats saturate.
template <typename To>
__device__ inline To stored(float x, float scale) {
  if constexpr (Float8<To>) {
    return to_float8<To>(x / scale);
  } else {
    return from_float<To>(x / scale);
  }
}

// Scale 1 copies the bits where the types agree.
template <typename To, typename From, int N>
__device__ inline Pack<To, N> converted(const Pack<From, N>& pack, float scale) {
  Pack<To, N> result;
  if constexpr (std::is_same_v<From, To>) {
    if (scale == 1.0f) return pack;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] = stored<To>(to_float(pack[i]), scale);
  return result;
}

// Rows [T, H, D] and the cache [S, H, D] they go to.
template <typename From, typename To>
struct SlotStore {
  static constexpr int N = kPackElements<From>;

  To* to;
  const From* from;
  int64_t heads, width, row_stride, head_stride, num_slots, slot_stride, cache_head_stride;
  float scale;
  bool reads_aligned, writes_aligned;

  SlotStore(const Tensor& cache, const Tensor& rows, double scale)
      : to(mutable_data<To>(cache)),
        from(data<From>(rows)),
        heads(rows.size(1)),
        width(rows.size(2)),
        row_stride(rows.stride(0)),
        head_stride(rows.stride(1)),
        num_slots(cache.size(0)),
        slot_stride(cache.stride(0)),
        cache_head_stride(cache.stride(1)),
        scale(static_cast<float>(scale)),
        reads_aligned(steps_by(rows, 16)),
        writes_aligned(steps_by(cache, N * sizeof(To))) {}

  // The same rows as of one wide head, where the heads of a row are one piece on both sides.
  SlotStore joined() const {
    SlotStore one = *this;
    if (head_stride == width && cache_head_stride == width) {
      one.width = width * heads;
      one.heads = 1;
    }
    return one;
  }

 private:
  SlotStore(const Tensor& cache, const Tensor& rows, double scale, int64_t row_width)
      : to(mutable_data<To>(cache)),
        from(data<From>(rows)),
        heads(1),
        width(row_width),
        row_stride(rows.stride(0)),
        head_stride(0),
        num_slots(cache.size(0)),
        slot_stride(cache.stride(0)),
        cache_head_stride(0),
        scale(static_cast<float>(scale)),
        reads_aligned(steps_by(rows, 16)),
        writes_aligned(steps_by(cache, N * sizeof(To))) {}

 public:
  // Rows [T, D] and a cache [S, C] with C >= D.
  static SlotStore of_one_head(const Tensor& cache, const Tensor& rows, double scale) {
    return SlotStore(cache, rows, scale, rows.size(1));
  }

  // Threads that a token takes.
  GRISTMILL_HOST_DEVICE int64_t packs_per_head() const { return (width + N - 1) / N; }
  GRISTMILL_HOST_DEVICE int64_t packs() const { return heads * packs_per_head(); }

  // Slots outside the pool are skipped, the -1 of padding among them.
  __device__ bool has(int64_t slot) const { return slot >= 0 && slot < num_slots; }

  // Elements [first, first + N) of a head, up to `limit`.
  __device__ void write(int64_t slot, int64_t head, int64_t first, int64_t limit, const Pack<From, N>& pack) const {
    To* row = to + slot * slot_stride + head * cache_head_stride;
    const bool aligned = writes_aligned && first * static_cast<int64_t>(sizeof(To)) % (N * sizeof(To)) == 0;
    store_elements<N>(row, first, limit, aligned, converted<To>(pack, scale));
  }

  // Whether rows and cache are one piece per token and aligned, and rows whole packs wide: then stored by store_plain.
  bool plain() const { return heads == 1 && reads_aligned && writes_aligned && width % N == 0; }
  __device__ void store_plain(int64_t token, int64_t slot, int64_t pack) const {
    const auto row = load_pack<N>(from + token * row_stride + pack * N);
    store_pack<N>(to + slot * slot_stride + pack * N, converted<To>(row, scale));
  }

  __device__ void store(int64_t token, int64_t slot, int64_t pack) const {
    const auto [head, within] = heads == 1 ? Divided{0, pack} : divide(pack, packs_per_head());
    const From* row = from + token * row_stride + head * head_stride;
    write(slot, head, within * N, width, load_elements<N>(row, within * N, width, reads_aligned));
  }
};

}  // namespace gristmill::gpu
