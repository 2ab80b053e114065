// Rotary position embedding on GPUs, and the one that stores what it has rotated: a pack of 16 bytes per thread, or two
// packs that belong together. Differences of products are formed without cancellation error.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "common/gpu_launch.h"
#include "kvcache/checks.h"
#include "kvcache/gpu_store.h"
#include "rope/rope.h"
#include "rope/rotation.h"

namespace gristmill::gpu {
namespace {

constexpr int kMaxThreads = 512;
constexpr int32_t kHeadsAtOnce = 2;     // per thread of plain_kernel
constexpr int64_t kMaxHeads = 1 << 20;  // and packs, that plain_kernel counts in 32 bits

// a * b + c * d, to about one unit in the last place (Kahan's fma method; Jeannerod, Louvet and Muller 2013).
__device__ inline float sum_of_products(float a, float b, float c, float d) {
  const float product = c * d;
  const float error = fmaf(c, d, -product);
  return fmaf(a, b, product) + error;
}

// What one thread turns at a time: a pack of neighbouring pairs, or in neox style two packs whose elements are pairs.
template <typename T, bool kNeox>
struct Unit {
  static constexpr int N = kPackElements<T>, kPacks = kNeox ? 2 : 1, kPairs = kNeox ? N : N / 2;
  Pack<T, N> packs[kPacks];

  __device__ void turn(const float (&cosines)[kPairs], const float (&sines)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      T& first = packs[0][kNeox ? i : 2 * i];
      T& second = packs[kPacks - 1][kNeox ? i : 2 * i + 1];
      const float a = to_float(first), b = to_float(second);
      first = from_float<T>(sum_of_products(a, cosines[i], -b, sines[i]));
      second = from_float<T>(sum_of_products(b, cosines[i], a, sines[i]));
    }
  }
};

// Any rows and tables.
template <typename T, bool kNeox>
struct Rotation : RotationArguments {
  using Part = Unit<T, kNeox>;
  static constexpr int N = Part::N;

  T* q;
  T* k;
  bool aligned, table_aligned;

  Rotation(const Tensor& q_heads, const Tensor& k_heads, const Tensor& position_list, const Tensor& cos_sin_cache,
           const char* op)
      : RotationArguments(q_heads, k_heads, position_list, cos_sin_cache, op),
        q(mutable_data<T>(q_heads)),
        k(mutable_data<T>(k_heads)),
        aligned(steps_by(q_heads, 16) && steps_by(k_heads, 16) && span() % N == 0),
        table_aligned(steps_by(cos_sin_cache, 16) && rotary_dim / 2 % 4 == 0) {}

  // Elements of a head that its threads share, each a pack of them: in neox style those of either half.
  GRISTMILL_HOST_DEVICE int64_t span() const { return kNeox ? rotary_dim / 2 : rotary_dim; }
  // Whether plain_kernel can do it.
  bool plain() const {
    return aligned && table_aligned && span() >= N && units_per_head() <= kMaxThreads && rotary_dim % (2 * N) == 0 &&
           q_heads + k_heads <= kMaxHeads;
  }
  // Threads that the rotation of a head takes.
  GRISTMILL_HOST_DEVICE int64_t units_per_head() const { return (span() + N - 1) / N; }

  __device__ void load_table(const float* row, int64_t first, float (&to)[Part::kPairs]) const {
    constexpr int kStep = Part::kPairs < 4 ? Part::kPairs : 4;
#pragma unroll
    for (int i = 0; i < Part::kPairs; i += kStep) {
      const auto pack = load_elements<kStep>(row, first + i, rotary_dim / 2, table_aligned);
#pragma unroll
      for (int j = 0; j < kStep; ++j) to[i + j] = pack[j];
    }
  }

  // Rotates one unit of the head at `x`, and gives each pack with the place of its span and its own there to `also`.
  template <typename F>
  __device__ void rotate(T* x, int64_t position, int64_t unit, F&& also) const {
    const float* const row = cache + position * cache_stride;
    float cosines[Part::kPairs], sines[Part::kPairs];
    load_table(row, unit * Part::kPairs, cosines);
    load_table(row + rotary_dim / 2, unit * Part::kPairs, sines);
    Part part;
#pragma unroll
    for (int i = 0; i < Part::kPacks; ++i) part.packs[i] = load_elements<N>(x + i * span(), unit * N, span(), aligned);
    part.turn(cosines, sines);
#pragma unroll
    for (int i = 0; i < Part::kPacks; ++i) {
      store_elements<N>(x + i * span(), unit * N, span(), aligned, part.packs[i]);
      also(i * span(), unit * N, span(), part.packs[i]);
    }
  }
};

// One block per token.
template <typename T, bool kNeox>
__global__ void __launch_bounds__(kMaxThreads) rope_kernel(const Rotation<T, kNeox> rotation) {
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

// Units of a token: those of q's rotation, of k's, what of k is not rotated, and v.
template <typename T, typename To, bool kNeox>
struct RopeStore {
  static constexpr int N = kPackElements<T>;
  Rotation<T, kNeox> rotation;
  SlotStore<T, To> keys, values;
  const int32_t* slots;

  GRISTMILL_HOST_DEVICE int64_t q_units() const { return rotation.q_heads * rotation.units_per_head(); }
  GRISTMILL_HOST_DEVICE int64_t k_units() const { return rotation.k_heads * rotation.units_per_head(); }
  GRISTMILL_HOST_DEVICE int64_t rest_per_head() const { return (keys.width - rotation.rotary_dim + N - 1) / N; }
  GRISTMILL_HOST_DEVICE int64_t units() const {
    return q_units() + k_units() + rotation.k_heads * rest_per_head() + values.packs();
  }

  // Whether plain_kernel can do it.
  bool plain() const {
    return rotation.plain() && keys.writes_aligned && keys.width % N == 0 && values.plain() &&
           values.packs() <= kMaxHeads;
  }

  // Elements of a key from `begin` + first on, into the cache.
  __device__ void store_part(int64_t slot, int64_t head, int64_t begin, int64_t first, int64_t limit,
                             const Pack<T, N>& pack) const {
    To* const row = keys.to + slot * keys.slot_stride + head * keys.cache_head_stride + begin;
    const bool aligned = keys.writes_aligned && begin % N == 0;
    store_elements<N>(row, first, limit, aligned, converted<To>(pack, keys.scale));
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
    const int64_t limit = rotation.span();
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

// The same for rows, tables and pools that are aligned and whole packs wide. A thread has the same unit of every
// `lanes`-th head, so that it reads its part of the table once, and it asks for the first heads before it knows the
// position: what is read does not depend on it.
template <typename T>
struct PlainRotation {
  T* q;
  T* k;
  const float* table;
  const int32_t* positions;
  int64_t q_token, q_head, k_token, k_head, table_row, num_positions;
  int32_t q_heads, heads, half, units, lanes;

  template <bool kNeox>
  explicit PlainRotation(const Rotation<T, kNeox>& r)
      : q(r.q),
        k(r.k),
        table(r.cache),
        positions(r.positions),
        q_token(r.q_token),
        q_head(r.q_head),
        k_token(r.k_token),
        k_head(r.k_head),
        table_row(r.cache_stride),
        num_positions(r.num_positions),
        q_heads(static_cast<int32_t>(r.q_heads)),
        heads(static_cast<int32_t>(r.q_heads + r.k_heads)),
        half(static_cast<int32_t>(r.rotary_dim / 2)),
        units(static_cast<int32_t>(r.units_per_head())),
        lanes(units == 0 ? 1 : std::min((heads + kHeadsAtOnce - 1) / kHeadsAtOnce, kMaxThreads / units)) {}

  int32_t threads() const { return (lanes * units + kWarp - 1) / kWarp * kWarp; }

  __device__ T* head_of(int64_t token, int32_t head) const {
    return head < q_heads ? q + token * q_token + head * q_head : k + token * k_token + (head - q_heads) * k_head;
  }
  template <int kPairs>
  __device__ void load_table(int64_t position, int32_t unit, float (&cosines)[kPairs], float (&sines)[kPairs]) const {
    constexpr int kStep = kPairs < 4 ? kPairs : 4;
    const float* const row = table + position * table_row + unit * kPairs;
#pragma unroll
    for (int i = 0; i < kPairs; i += kStep) {
      const auto cosine = load_pack<kStep>(row + i), sine = load_pack<kStep>(row + half + i);
#pragma unroll
      for (int j = 0; j < kStep; ++j) cosines[i + j] = cosine[j], sines[i + j] = sine[j];
    }
  }
};

struct NoStore {
  static constexpr bool kStores = false;
};

// Keys go to the pool as they are rotated; what of them is not, and the values, are copied.
template <typename T, typename To>
struct PlainStore {
  static constexpr bool kStores = true;
  static constexpr int N = kPackElements<T>;

  To* k_to;
  To* v_to;
  const T* v;
  const int32_t* slots;
  int64_t k_slot, k_slot_head, v_slot, v_token, num_slots;
  int32_t v_packs, rest_per_head, rest_packs;
  float k_scale, v_scale;

  PlainStore(const SlotStore<T, To>& keys, const SlotStore<T, To>& values, const int32_t* slots, int64_t rotary_dim)
      : k_to(keys.to),
        v_to(values.to),
        v(values.from),
        slots(slots),
        k_slot(keys.slot_stride),
        k_slot_head(keys.cache_head_stride),
        v_slot(values.slot_stride),
        v_token(values.row_stride),
        num_slots(keys.num_slots),
        v_packs(static_cast<int32_t>(values.packs())),
        rest_per_head(static_cast<int32_t>((keys.width - rotary_dim) / N)),
        rest_packs(rest_per_head * static_cast<int32_t>(keys.heads)),
        k_scale(keys.scale),
        v_scale(values.scale) {}

  __device__ Pack<T, N> value(int64_t token, int32_t pack) const {
    return load_pack<N>(v + token * v_token + pack * N);
  }
  __device__ void store_value(int64_t slot, int32_t pack, const Pack<T, N>& value) const {
    store_pack<N>(v_to + slot * v_slot + pack * N, converted<To>(value, v_scale));
  }
  __device__ void store_key(int64_t slot, int32_t head, int64_t first, const Pack<T, N>& key) const {
    store_pack<N>(k_to + slot * k_slot + head * k_slot_head + first, converted<To>(key, k_scale));
  }
};

template <typename T, bool kNeox, typename Store>
__global__ void __launch_bounds__(kMaxThreads, 1) plain_kernel(const PlainRotation<T> rotation, const Store store) {
  using Part = Unit<T, kNeox>;
  constexpr int N = Part::N;
  follow_previous_kernel();
  const int64_t token = blockIdx.x, position = rotation.positions[token];
  int64_t slot = -1;
  if constexpr (Store::kStores) slot = store.slots[token];
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread / rotation.units,
                unit = thread % rotation.units, step = kHeadsAtOnce * rotation.lanes;

  Part parts[kHeadsAtOnce];
  const auto each_head = [&](int32_t first, auto&& f) {
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; ++i) {
      const int32_t head = first + i * rotation.lanes;
      if (head < rotation.heads) f(head, rotation.head_of(token, head) + unit * N, parts[i]);
    }
  };
  const auto load = [&](int32_t first) {
    each_head(first, [&](int32_t, const T* x, Part& part) {
#pragma unroll
      for (int i = 0; i < Part::kPacks; ++i) part.packs[i] = load_pack<N>(x + i * rotation.half);
    });
  };
  int32_t first = lane < rotation.lanes ? lane : rotation.heads;
  load(first);
  Pack<T, N> value;
  if constexpr (Store::kStores) {
    if (thread < store.v_packs) value = store.value(token, thread);
  }

  // A position outside the table marks padding: its row stays as it is, and is stored so.
  const bool rotates = position >= 0 && position < rotation.num_positions;
  float cosines[Part::kPairs] = {}, sines[Part::kPairs] = {};
  if (rotates) rotation.load_table(position, unit, cosines, sines);
  bool stores = false;
  if constexpr (Store::kStores) {
    stores = slot >= 0 && slot < store.num_slots;
    if (stores) {
      if (thread < store.v_packs) store.store_value(slot, thread, value);
      const int32_t threads = static_cast<int32_t>(blockDim.x);
      for (int32_t i = thread + threads; i < store.v_packs; i += threads)
        store.store_value(slot, i, store.value(token, i));
      for (int32_t i = thread; i < store.rest_packs; i += threads) {
        const int32_t head = i / store.rest_per_head, at = 2 * rotation.half + i % store.rest_per_head * N;
        store.store_key(slot, head, at, load_pack<N>(rotation.head_of(token, rotation.q_heads + head) + at));
      }
    }
  }
  while (first < rotation.heads) {
    each_head(first, [&](int32_t head, T* x, Part& part) {
      if (rotates) part.turn(cosines, sines);
#pragma unroll
      for (int i = 0; i < Part::kPacks; ++i) {
        if (rotates) store_pack<N>(x + i * rotation.half, part.packs[i]);
        if constexpr (Store::kStores) {
          if (stores && head >= rotation.q_heads)
            store.store_key(slot, head - rotation.q_heads, unit * N + i * rotation.half, part.packs[i]);
        }
      }
    });
    first += step;
    load(first);
  }
}

// Calls f with whether pairs are half a rotation apart.
template <typename F>
void with_style(bool is_neox, F&& f) {
  is_neox ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace

void apply_rope(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache, bool is_neox) {
  constexpr const char* op = "apply_rope";
  const RotationArguments arguments(q, k, positions, cos_sin_cache, op);
  dispatch_float(q.scalar_type(), op, "q", [&](auto tag) {
    using T = decltype(tag);
    with_style(is_neox, [&](auto neox) {
      constexpr bool kNeox = decltype(neox)::value;
      const Rotation<T, kNeox> rotation(q, k, positions, cos_sin_cache, op);
      const int64_t units = (rotation.q_heads + rotation.k_heads) * rotation.units_per_head();
      if (units == 0) return;
      const Launch launch(q);
      const dim3 grid(static_cast<unsigned>(rotation.num_tokens));
      if (!rotation.plain()) return launch(rope_kernel<T, kNeox>, grid, threads_for(units), 0, rotation);
      const PlainRotation<T> plain(rotation);
      launch.early<plain_kernel<T, kNeox, NoStore>>(grid, dim3(static_cast<unsigned>(plain.threads())), plain,
                                                    NoStore{});
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
    with_style(is_neox, [&](auto neox) {
      constexpr bool kNeox = decltype(neox)::value;
      using Work = RopeStore<T, To, kNeox>;
      const Work work = {{q, k, positions, cos_sin_cache, op},
                         SlotStore<T, To>(k_cache, k, k_scale),
                         SlotStore<T, To>(v_cache, v, v_scale).joined(),
                         data<int32_t>(slots)};
      if (work.units() == 0) return;
      const Launch launch(q);
      const dim3 grid(static_cast<unsigned>(arguments.num_tokens));
      if (!work.plain()) return launch(rope_store_kernel<Work>, grid, threads_for(work.units()), 0, work);
      const PlainRotation<T> rotation(work.rotation);
      const PlainStore<T, To> store(work.keys, work.values, work.slots, rotation.half * 2);
      launch.early<plain_kernel<T, kNeox, PlainStore<T, To>>>(grid, dim3(static_cast<unsigned>(rotation.threads())),
                                                              rotation, store);
    });
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("apply_rope", TORCH_BOX(&gristmill::gpu::apply_rope));
  m.impl("apply_rope_store_kv", TORCH_BOX(&gristmill::gpu::apply_rope_store_kv));
}
