// Rotary position embedding on the CPU. Differences of products are formed without cancellation error, so float32
// results stay within rounding of the exact ones.
#include "common/parallel.h"
#include "common/vec.h"
#include "kvcache/store.h"
#include "rope/rope.h"
#include "rope/rotation.h"

namespace gristmill {
namespace {

// a * b + c * d, to about one unit in the last place (Kahan's fma method; Jeannerod, Louvet and Muller 2013).
inline vf sum_of_products(vf a, vf b, vf c, vf d) {
  const vf product = c * d;
  const vf error = vfma(c, d, -product);
  return vfma(a, b, product) + error;
}

inline float sum_of_products(float a, float b, float c, float d) {
  const float product = c * d;
  const float error = fma1(c, d, -product);
  return fma1(a, b, product) + error;
}

// Pairs (x[i], x[i + half]).
template <typename T>
void rotate_neox(T* x, const float* cos, const float* sin, int64_t half) {
  T* low = x;
  T* high = x + half;
  for_lanes(
      half,
      [&](int64_t i) {
        const vf a = vload(low + i), b = vload(high + i), c = vload(cos + i), s = vload(sin + i);
        vstore(low + i, sum_of_products(a, c, -b, s));
        vstore(high + i, sum_of_products(b, c, a, s));
      },
      [&](int64_t i, int64_t n) {
        const vf a = vload_n(low + i, n), b = vload_n(high + i, n), c = vload_n(cos + i, n), s = vload_n(sin + i, n);
        vstore_n(low + i, sum_of_products(a, c, -b, s), n);
        vstore_n(high + i, sum_of_products(b, c, a, s), n);
      });
}

// Pairs (x[2i], x[2i + 1]).
template <typename T>
void rotate_interleaved(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    x[2 * i] = from_float<T>(sum_of_products(a, cos[i], -b, sin[i]));
    x[2 * i + 1] = from_float<T>(sum_of_products(b, cos[i], a, sin[i]));
  }
}

template <typename T>
void rotate_heads(T* x, int64_t heads, int64_t head_stride, const float* cos, int64_t half, bool is_neox) {
  const float* sin = cos + half;
  for (int64_t h = 0; h < heads; ++h) {
    if (is_neox) {
      rotate_neox(x + h * head_stride, cos, sin, half);
    } else {
      rotate_interleaved(x + h * head_stride, cos, sin, half);
    }
  }
}

class Rotation : RotationArguments {
 public:
  Rotation(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache, bool is_neox,
           const char* op)
      : RotationArguments(q, k, positions, cos_sin_cache, op), is_neox_(is_neox) {}

  int64_t tokens() const { return num_tokens; }
  int64_t work_per_token() const { return (q_heads + k_heads) * rotary_dim * 4; }

  template <typename T>
  void rotate(T* q, T* k, int64_t t) const {
    // A position outside the table marks padding: its row stays as it is.
    if (positions[t] < 0 || positions[t] >= num_positions) return;
    const float* cos = cache + positions[t] * cache_stride;
    rotate_heads(q + t * q_token, q_heads, q_head, cos, rotary_dim / 2, is_neox_);
    rotate_heads(k + t * k_token, k_heads, k_head, cos, rotary_dim / 2, is_neox_);
  }

 private:
  bool is_neox_;
};

}  // namespace

void apply_rope(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache, bool is_neox) {
  constexpr const char* op = "apply_rope";
  const Rotation rotation(q, k, positions, cos_sin_cache, is_neox, op);
  dispatch_float(q.scalar_type(), op, "q", [&](auto tag) {
    using T = decltype(tag);
    T* q_data = mutable_data<T>(q);
    T* k_data = mutable_data<T>(k);
    parallel_ranges(rotation.tokens(), rotation.work_per_token(), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) rotation.rotate(q_data, k_data, t);
    });
  });
}

void apply_rope_store_kv(const Tensor& q, const Tensor& k, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& v, const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& slots,
                         bool is_neox, double k_scale, double v_scale) {
  constexpr const char* op = "apply_rope_store_kv";
  const Rotation rotation(q, k, positions, cos_sin_cache, is_neox, op);
  check_store(k_cache, v_cache, k, v, slots, k_scale, v_scale, op);
  const int32_t* slot = data<int32_t>(slots);
  check_slots(slot, k.size(0), k_cache.size(0), op, "slots");
  const int64_t work = rotation.work_per_token() + (k.size(1) * k.size(2) + v.size(1) * v.size(2)) * 4;
  dispatch_store(k.scalar_type(), k_cache.scalar_type(), op, [&](auto from, auto to) {
    using T = decltype(from);
    T* q_data = mutable_data<T>(q);
    T* k_data = mutable_data<T>(k);
    const SlotStore<T, decltype(to)> keys(k_cache, k, k_scale), values(v_cache, v, v_scale);
    parallel_ranges(rotation.tokens(), work, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        rotation.rotate(q_data, k_data, t);
        if (slot[t] < 0) continue;
        keys.store(t, slot[t]);
        values.store(t, slot[t]);
      }
    });
  });
}

}  // namespace gristmill
