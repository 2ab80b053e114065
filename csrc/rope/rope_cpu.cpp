// Rotary position embedding on the CPU. Differences of products are formed without cancellation error, so float32
// results stay within rounding of the exact ones.
#include "common/parallel.h"
#include "common/vec.h"
#include "kvcache/store.h"
#include "rope/rope.h"

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

// The rotation of one call: q [T, Hq, D], k [T, Hkv, D] and the table.
class Rotation {
 public:
  Rotation(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache, bool is_neox,
           const char* op)
      : is_neox_(is_neox) {
    check_dim(q, 3, op, "q");
    check_dim(k, 3, op, "k");
    check_inner(q, op, "q");
    check_inner(k, op, "k");
    tokens_ = q.size(0);
    check_size(k, 0, tokens_, op, "k");
    check_size(k, 2, q.size(2), op, "k");
    check_dtype(k, q.scalar_type(), op, "k");
    check_vector(positions, ScalarType::Int, tokens_, op, "positions");
    check_dim(cos_sin_cache, 2, op, "cos_sin_cache");
    check_dtype(cos_sin_cache, ScalarType::Float, op, "cos_sin_cache");
    check_inner(cos_sin_cache, op, "cos_sin_cache");
    rotary_dim_ = cos_sin_cache.size(1);
    STD_TORCH_CHECK(rotary_dim_ % 2 == 0 && rotary_dim_ <= q.size(2), op,
                    ": cos_sin_cache must have an even width of at most head_dim ", q.size(2), ", got ", rotary_dim_);
    position_ = data<int32_t>(positions);
    num_positions_ = cos_sin_cache.size(0);
    q_token_ = q.stride(0), q_head_ = q.stride(1), q_heads_ = q.size(1);
    k_token_ = k.stride(0), k_head_ = k.stride(1), k_heads_ = k.size(1);
    cache_stride_ = cos_sin_cache.stride(0);
    cache_ = data<float>(cos_sin_cache);
  }

  int64_t tokens() const { return tokens_; }
  int64_t work_per_token() const { return (q_heads_ + k_heads_) * rotary_dim_ * 4; }

  template <typename T>
  void rotate(T* q, T* k, int64_t t) const {
    // A position outside the table marks padding: its row stays as it is.
    if (position_[t] < 0 || position_[t] >= num_positions_) return;
    const float* cos = cache_ + position_[t] * cache_stride_;
    rotate_heads(q + t * q_token_, q_heads_, q_head_, cos, rotary_dim_ / 2, is_neox_);
    rotate_heads(k + t * k_token_, k_heads_, k_head_, cos, rotary_dim_ / 2, is_neox_);
  }

 private:
  bool is_neox_;
  int64_t tokens_, rotary_dim_, num_positions_, cache_stride_;
  int64_t q_token_, q_head_, q_heads_, k_token_, k_head_, k_heads_;
  const int32_t* position_;
  const float* cache_;
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
