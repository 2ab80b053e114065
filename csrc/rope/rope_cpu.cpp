// Rotary position embedding on the CPU. Differences of products are formed without cancellation error, so float32
// results stay within rounding of the exact ones.
#include "common/parallel.h"
#include "common/vec.h"
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

}  // namespace

void apply_rope(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache, bool is_neox) {
  constexpr const char* op = "apply_rope";
  check_dim(q, 3, op, "q");
  check_dim(k, 3, op, "k");
  check_inner(q, op, "q");
  check_inner(k, op, "k");
  const int64_t tokens = q.size(0);
  check_size(k, 0, tokens, op, "k");
  check_size(k, 2, q.size(2), op, "k");
  check_dtype(k, q.scalar_type(), op, "k");
  check_vector(positions, ScalarType::Int, tokens, op, "positions");
  check_dim(cos_sin_cache, 2, op, "cos_sin_cache");
  check_dtype(cos_sin_cache, ScalarType::Float, op, "cos_sin_cache");
  check_inner(cos_sin_cache, op, "cos_sin_cache");
  const int64_t rotary_dim = cos_sin_cache.size(1);
  STD_TORCH_CHECK(rotary_dim % 2 == 0 && rotary_dim <= q.size(2), op,
                  ": cos_sin_cache must have an even width of at most head_dim ", q.size(2), ", got ", rotary_dim);
  const int32_t* position = data<int32_t>(positions);
  const int64_t num_positions = cos_sin_cache.size(0);
  const int64_t q_token = q.stride(0), q_head = q.stride(1), q_heads = q.size(1);
  const int64_t k_token = k.stride(0), k_head = k.stride(1), k_heads = k.size(1);
  const int64_t cache_stride = cos_sin_cache.stride(0);
  const float* cache = data<float>(cos_sin_cache);
  dispatch_float(q.scalar_type(), op, "q", [&](auto tag) {
    using T = decltype(tag);
    T* q_data = mutable_data<T>(q);
    T* k_data = mutable_data<T>(k);
    parallel_ranges(tokens, (q_heads + k_heads) * rotary_dim * 4, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        // A position outside the table marks padding: its row stays as it is.
        if (position[t] < 0 || position[t] >= num_positions) continue;
        const float* cos = cache + position[t] * cache_stride;
        rotate_heads(q_data + t * q_token, q_heads, q_head, cos, rotary_dim / 2, is_neox);
        rotate_heads(k_data + t * k_token, k_heads, k_head, cos, rotary_dim / 2, is_neox);
      }
    });
  });
}

}  // namespace gristmill
