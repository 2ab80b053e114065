// Rotary position embedding on GPUs, and the one that stores what it has rotated: a pack of 16 bytes per thread, or two
// packs that belong together. Differences of products are formed without cancellation error.
#include <torch/csrc/stable/library.h>

#include "common/gpu_launch.h"
#include "kvcache/checks.h"
#include "kvcache/gpu_store.h"
#include "rope/rope.h"
#include "rope/rotation.h"

namespace gristmill::gpu {
namespace {

constexpr int kMaxThreads = 512;

// a * b + c * d, to about one unit in the last place (Kahan's fma method; Jeannerod, Louvet and Muller 2013).
__device__ inline float sum_of_products(float a, float b, float c, float d) {
  const float product = c * d;
  const float error = fmaf(c, d, -product);
  return fmaf(a, b, product) + error;
}

// kPlain: rows and the table are aligned and the rotated part is whole packs wide.
template <typename T, bool kNeox, bool kPlain>
struct Rotation : RotationArguments {
  static constexpr int N = kPackElements<T>;

  T* q;
  T* k;
  bool aligned, table_aligned;

  Rotation(const Tensor& q_heads, const Tensor& k_heads, const Tensor& position_list, const Tensor& cos_sin_cache,
           const char* op)
      : RotationArguments(q_heads, k_heads, position_list, cos_sin_cache, op),
        q(mutable_data<T>(q_heads)),
        k(mutable_data<T>(k_heads)),
        aligned(steps_by(q_heads, 16) && steps_by(k_heads, 16) && (!kNeox || rotary_dim / 2 % N == 0)),
        table_aligned(steps_by(cos_sin_cache, 16) && rotary_dim / 2 % 4 == 0) {}

  // Threads that the rotation of a head takes: neox pairs lie half a rotation apart, the others side by side.
  GRISTMILL_HOST_DEVICE int64_t units_per_head() const { return ((kNeox ? rotary_dim / 2 : rotary_dim) + N - 1) / N; }

  template <int kCount>
  __device__ void load_table(const float* row, int64_t first, float (&to)[kCount]) const {
    constexpr int kStep = kCount < 4 ? kCount : 4;
#pragma unroll
    for (int i = 0; i < kCount; i += kStep) {
      const auto pack = load_row<kPlain, kStep>(row, first + i, rotary_dim / 2, table_aligned);
#pragma unroll
      for (int j = 0; j < kStep; ++j) to[i + j] = pack[j];
    }
  }

  // Rotates one unit of the head at `x`, and gives each pack with its first element to `also`.
  template <typename F>
  __device__ void rotate(T* x, int64_t position, int64_t unit, F&& also) const {
    const float* cos = cache + position * cache_stride;
    const float* sin = cos + rotary_dim / 2;
    if constexpr (kNeox) {
      rotate_neox(x, cos, sin, unit * N, also);
    } else {
      rotate_interleaved(x, cos, sin, unit * N, also);
    }
  }

 private:
  template <typename F>
  __device__ void rotate_neox(T* x, const float* cos, const float* sin, int64_t first, F&& also) const {
    const int64_t half = rotary_dim / 2;
    float c[N], s[N];
    load_table<N>(cos, first, c);
    load_table<N>(sin, first, s);
    auto low = load_row<kPlain, N>(x, first, half, aligned);
    auto high = load_row<kPlain, N>(x + half, first, half, aligned);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float a = to_float(low[i]), b = to_float(high[i]);
      low[i] = from_float<T>(sum_of_products(a, c[i], -b, s[i]));
      high[i] = from_float<T>(sum_of_products(b, c[i], a, s[i]));
    }
    store_row<kPlain, N>(x, first, half, aligned, low);
    store_row<kPlain, N>(x + half, first, half, aligned, high);
    also(int64_t{0}, first, half, low);
    also(half, first, half, high);
  }

  template <typename F>
  __device__ void rotate_interleaved(T* x, const float* cos, const float* sin, int64_t first, F&& also) const {
    float c[N / 2], s[N / 2];
    load_table<N / 2>(cos, first / 2, c);
    load_table<N / 2>(sin, first / 2, s);
    auto pairs = load_row<kPlain, N>(x, first, rotary_dim, aligned);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float a = to_float(pairs[2 * i]), b = to_float(pairs[2 * i + 1]);
      pairs[2 * i] = from_float<T>(sum_of_products(a, c[i], -b, s[i]));
      pairs[2 * i + 1] = from_float<T>(sum_of_products(b, c[i], a, s[i]));
    }
    store_row<kPlain, N>(x, first, rotary_dim, aligned, pairs);
    also(int64_t{0}, first, rotary_dim, pairs);
  }
};

// One block per token.
template <typename T, bool kNeox, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads) rope_kernel(const Rotation<T, kNeox, kPlain> rotation) {
  const int64_t token = blockIdx.x, position = rotation.positions[token];
  // A position outside the table marks padding: its row stays as it is.
  if (position < 0 || position >= rotation.num_positions) return;
  const int64_t per_head = rotation.units_per_head(), units = (rotation.q_heads + rotation.k_heads) * per_head;
  for (int64_t place = threadIdx.x; place < units; place += blockDim.x) {
    const auto [head, unit] = divide(place, per_head);
    T* const x = head < rotation.q_heads
                     ? rotation.q + token * rotation.q_token + head * rotation.q_head
                     : rotation.k + token * rotation.k_token + (head - rotation.q_heads) * rotation.k_head;
    rotation.rotate(x, position, unit, [](int64_t, int64_t, int64_t, const auto&) {});
  }
}

// As many threads as a token has units, if that is not too many.
dim3 threads_for(int64_t units) {
  return dim3(static_cast<unsigned>(units < kMaxThreads ? (units + kWarp - 1) / kWarp * kWarp : kMaxThreads));
}

// Calls f with the two facts that kernels are compiled for.
template <typename T, typename F>
void with_facts(const Tensor& q, const Tensor& k, const Tensor& cos_sin_cache, bool is_neox, F&& f) {
  const int64_t rotary_dim = cos_sin_cache.size(1);
  const bool plain =
      steps_by(q, 16) && steps_by(k, 16) && steps_by(cos_sin_cache, 16) && rotary_dim % (2 * kPackElements<T>) == 0;
  if (is_neox) {
    plain ? f(std::true_type{}, std::true_type{}) : f(std::true_type{}, std::false_type{});
  } else {
    plain ? f(std::false_type{}, std::true_type{}) : f(std::false_type{}, std::false_type{});
  }
}

// Units of a token: those of q's rotation, of k's, what of k is not rotated, and v.
template <typename T, typename To, bool kNeox, bool kPlain>
struct RopeStore {
  static constexpr int N = kPackElements<T>;
  Rotation<T, kNeox, kPlain> rotation;
  SlotStore<T, To> keys, values;
  const int32_t* slots;

  GRISTMILL_HOST_DEVICE int64_t q_units() const { return rotation.q_heads * rotation.units_per_head(); }
  GRISTMILL_HOST_DEVICE int64_t k_units() const { return rotation.k_heads * rotation.units_per_head(); }
  GRISTMILL_HOST_DEVICE int64_t rest_per_head() const { return (keys.width - rotation.rotary_dim + N - 1) / N; }
  GRISTMILL_HOST_DEVICE int64_t units() const {
    return q_units() + k_units() + rotation.k_heads * rest_per_head() + values.packs();
  }

  // Elements of a key from `begin` + first on, into the cache.
  __device__ void store_part(int64_t slot, int64_t head, int64_t begin, int64_t first, int64_t limit,
                             const Pack<T, N>& pack) const {
    To* const row = keys.to + slot * keys.slot_stride + head * keys.cache_head_stride + begin;
    const bool aligned = keys.writes_aligned && begin % N == 0;
    store_elements<N>(row, first, limit, aligned, keys.converted(pack));
  }

  __device__ void rotate_q(int64_t token, int64_t unit, int64_t position) const {
    const auto [head, within] = divide(unit, rotation.units_per_head());
    rotation.rotate(rotation.q + token * rotation.q_token + head * rotation.q_head, position, within,
                    [](int64_t, int64_t, int64_t, const auto&) {});
  }

  __device__ void rotate_and_store_k(int64_t token, int64_t unit, int64_t position, int64_t slot) const {
    const auto [head, within] = divide(unit, rotation.units_per_head());
    rotation.rotate(rotation.k + token * rotation.k_token + head * rotation.k_head, position, within,
                    [&, head = head](int64_t begin, int64_t first, int64_t limit, const auto& pack) {
                      if (keys.has(slot)) store_part(slot, head, begin, first, limit, pack);
                    });
  }

  __device__ void store_rest(int64_t token, int64_t unit, int64_t slot) const {
    const auto [head, within] = divide(unit, rest_per_head());
    const T* const row = rotation.k + token * rotation.k_token + head * rotation.k_head + rotation.rotary_dim;
    const int64_t limit = keys.width - rotation.rotary_dim;
    const bool aligned = keys.reads_aligned && rotation.rotary_dim % N == 0;
    store_part(slot, head, rotation.rotary_dim, within * N, limit, load_elements<N>(row, within * N, limit, aligned));
  }

  __device__ void run(int64_t token, int64_t unit, int64_t position, bool rotates, int64_t slot) const {
    if (unit < q_units()) {
      if (rotates) rotate_q(token, unit, position);
      return;
    }
    unit -= q_units();
    if (unit < k_units()) {
      if (rotates) {
        rotate_and_store_k(token, unit, position, slot);
      } else if (keys.has(slot)) {
        store_unrotated(token, unit, slot);
      }
      return;
    }
    if (!keys.has(slot)) return;
    unit -= k_units();
    const int64_t rest = rotation.k_heads * rest_per_head();
    if (unit < rest) {
      store_rest(token, unit, slot);
    } else {
      values.store(token, slot, unit - rest);
    }
  }

  // A key whose position lies outside the table is stored as it is.
  __device__ void store_unrotated(int64_t token, int64_t unit, int64_t slot) const {
    const auto [head, within] = divide(unit, rotation.units_per_head());
    const T* const row = rotation.k + token * rotation.k_token + head * rotation.k_head;
    const int64_t limit = kNeox ? rotation.rotary_dim / 2 : rotation.rotary_dim;
    for (int64_t begin = 0; begin < rotation.rotary_dim; begin += limit) {
      store_part(slot, head, begin, within * N, limit,
                 load_elements<N>(row + begin, within * N, limit, rotation.aligned));
    }
  }
};

template <typename Work>
__global__ void __launch_bounds__(kMaxThreads) rope_store_kernel(const Work work) {
  const int64_t token = blockIdx.x, position = work.rotation.positions[token], slot = work.slots[token];
  const bool rotates = position >= 0 && position < work.rotation.num_positions;
  for (int64_t unit = threadIdx.x; unit < work.units(); unit += blockDim.x)
    work.run(token, unit, position, rotates, slot);
}

}  // namespace

void apply_rope(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache, bool is_neox) {
  constexpr const char* op = "apply_rope";
  const RotationArguments arguments(q, k, positions, cos_sin_cache, op);
  dispatch_float(q.scalar_type(), op, "q", [&](auto tag) {
    using T = decltype(tag);
    with_facts<T>(q, k, cos_sin_cache, is_neox, [&](auto neox, auto plain) {
      constexpr bool kNeox = decltype(neox)::value, kPlain = decltype(plain)::value;
      const Rotation<T, kNeox, kPlain> rotation(q, k, positions, cos_sin_cache, op);
      const int64_t units = (rotation.q_heads + rotation.k_heads) * rotation.units_per_head();
      if (units == 0) return;
      const Launch launch(q);
      launch(rope_kernel<T, kNeox, kPlain>, dim3(static_cast<unsigned>(rotation.num_tokens)), threads_for(units), 0,
             rotation);
    });
  });
}

void apply_rope_store_kv(const Tensor& q, const Tensor& k, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& v, const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& slots,
                         bool is_neox, double k_scale, double v_scale) {
  constexpr const char* op = "apply_rope_store_kv";
  dispatch_float(q.scalar_type(), op, "q", [](auto) {});
  const RotationArguments arguments(q, k, positions, cos_sin_cache, op);
  check_store(k_cache, v_cache, k, v, slots, k_scale, v_scale, op);
  dispatch_store(k.scalar_type(), k_cache.scalar_type(), op, [&](auto from, auto to) {
    using T = decltype(from);
    using To = decltype(to);
    with_facts<T>(q, k, cos_sin_cache, is_neox, [&](auto neox, auto plain) {
      using Work = RopeStore<T, To, decltype(neox)::value, decltype(plain)::value>;
      const Work work = {{q, k, positions, cos_sin_cache, op},
                         SlotStore<T, To>(k_cache, k, k_scale),
                         SlotStore<T, To>(v_cache, v, v_scale).joined(),
                         data<int32_t>(slots)};
      if (work.units() == 0) return;
      const Launch launch(q);
      launch(rope_store_kernel<Work>, dim3(static_cast<unsigned>(arguments.num_tokens)), threads_for(work.units()), 0,
             work);
    });
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("apply_rope", TORCH_BOX(&gristmill::gpu::apply_rope));
  m.impl("apply_rope_store_kv", TORCH_BOX(&gristmill::gpu::apply_rope_store_kv));
}
