// The slot pool on GPUs: a pack of 16 bytes per thread. A slot outside the pool, such as the -1 of padding, is skipped.
#include <torch/csrc/stable/library.h>

#include "common/gpu_launch.h"
#include "kvcache/checks.h"
#include "kvcache/gpu_store.h"
#include "kvcache/kvcache.h"

namespace gristmill::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kStoreThreads = 256;
constexpr int kCopyThreads = 256;
constexpr int kCopyColumns = 8;
constexpr int kRound = 4;

template <typename From, typename To, bool kPlain>
__global__ void __launch_bounds__(kStoreThreads)
    store_kernel(const SlotStore<From, To> keys, const SlotStore<From, To> values, const int32_t* slots) {
  follow_previous_kernel();
  const int64_t token = blockIdx.x, slot = slots[token];
  if (!keys.has(slot)) return;
  const int64_t key_packs = keys.packs(), all = key_packs + values.packs();
  for (int64_t unit = threadIdx.x; unit < all; unit += blockDim.x) {
    const bool is_key = unit < key_packs;
    const SlotStore<From, To>& rows = is_key ? keys : values;
    if constexpr (kPlain) {
      rows.store_plain(token, slot, is_key ? unit : unit - key_packs);
    } else {
      rows.store(token, slot, is_key ? unit : unit - key_packs);
    }
  }
}

// One block per token, of as many threads as it has packs, if that is not too many.
template <typename From, typename To>
void store(const Launch& launch, const SlotStore<From, To>& keys, const SlotStore<From, To>& values,
           const Tensor& slots) {
  const int64_t units = keys.packs() + values.packs();
  const int64_t threads = units < kStoreThreads ? (units + kWarp - 1) / kWarp * kWarp : kStoreThreads;
  if (units == 0) return;
  const dim3 grid(static_cast<unsigned>(slots.size(0))), block(static_cast<unsigned>(threads));
  const int32_t* const at = data<int32_t>(slots);
  if (keys.plain() && values.plain()) return launch.early<store_kernel<From, To, true>>(grid, block, keys, values, at);
  launch.early<store_kernel<From, To, false>>(grid, block, keys, values, at);
}

// Rows of any type as bytes.
struct BytePool {
  unsigned char* base;
  int64_t heads, row_bytes, slot_stride, head_stride, num_slots;

  BytePool(const Tensor& t, int64_t slot_dim)
      : base(const_cast<unsigned char*>(static_cast<const unsigned char*>(t.const_data_ptr()))),
        heads(t.size(slot_dim + 1)),
        row_bytes(t.size(slot_dim + 2) * t.element_size()),
        slot_stride(t.stride(slot_dim) * t.element_size()),
        head_stride(t.stride(slot_dim + 1) * t.element_size()),
        num_slots(t.size(slot_dim)) {}

  GRISTMILL_HOST_DEVICE bool has(int64_t slot) const { return slot >= 0 && slot < num_slots; }
  __device__ unsigned char* row(int64_t slot, int64_t head) const {
    return base + slot * slot_stride + head * head_stride;
  }
  // Bytes that every row can be moved in: 16, or as many as its beginnings and its length allow.
  int unit(const Tensor& t) const {
    for (int bytes = 16; bytes > 1; bytes /= 2) {
      if (row_bytes % bytes == 0 && steps_by(t, bytes)) return bytes;
    }
    return 1;
  }
};

template <typename Unit>
__device__ inline Unit* units_of(unsigned char* row) {
  return reinterpret_cast<Unit*>(row);
}

// A block moves kCopyColumns neighbouring units of a layer for all pairs, a round of them at once. A slot may be
// overwritten once an earlier pair, or one of the same round, has read it; no later pair reads what this round writes.
template <typename Unit>
__global__ void __launch_bounds__(kCopyThreads)
    copy_kernel(const BytePool pool, int64_t layer_stride, const int32_t* sources, const int32_t* targets,
                int64_t pairs) {
  constexpr int kLanes = kCopyThreads / kCopyColumns;
  const int thread = static_cast<int>(threadIdx.x), lane = thread / kCopyColumns;
  const int64_t units = pool.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const auto [head, column] = divide(static_cast<int64_t>(blockIdx.x) * kCopyColumns + thread % kCopyColumns, units);
  unsigned char* const layer = pool.base + static_cast<int64_t>(blockIdx.y) * layer_stride + head * pool.head_stride;
  for (int64_t begin = 0; begin < pairs; begin += kLanes * kRound) {
    int32_t target[kRound];
    Unit kept[kRound];
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      const int64_t pair = begin + i * kLanes + lane;
      target[i] = -1;
      if (pair >= pairs || head >= pool.heads) continue;
      const int32_t source = sources[pair], to = targets[pair];
      if (!pool.has(source) || !pool.has(to)) continue;
      target[i] = to;
      kept[i] = units_of<Unit>(layer + source * pool.slot_stride)[column];
    }
    sync_block();
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      if (target[i] >= 0) units_of<Unit>(layer + target[i] * pool.slot_stride)[column] = kept[i];
    }
  }
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    transfer_kernel(const BytePool to, const BytePool from, const int32_t* sources, const int32_t* targets,
                    int64_t pairs) {
  const int64_t units = to.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const auto [pair, place] = divide(static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, to.heads * units);
  if (pair >= pairs) return;
  const int64_t source = sources[pair], target = targets[pair];
  if (!from.has(source) || !to.has(target)) return;
  const auto [head, column] = divide(place, units);
  units_of<Unit>(to.row(target, head))[column] = units_of<Unit>(from.row(source, head))[column];
}

template <typename F>
void with_unit(int bytes, F&& f) {
  switch (bytes) {
    case 16:
      return f(Pack<uint32_t, 4>{});
    case 8:
      return f(uint64_t{});
    case 4:
      return f(uint32_t{});
    case 2:
      return f(uint16_t{});
    default:
      return f(uint8_t{});
  }
}

void copy_pool(const Launch& launch, const Tensor& cache, const Tensor& src_slots, const Tensor& dst_slots) {
  const BytePool pool(cache, 1);
  const int64_t layers = cache.size(0), layer_stride = cache.stride(0) * cache.element_size();
  with_unit(pool.unit(cache), [&](auto tag) {
    using Unit = decltype(tag);
    dim3 grid = blocks_for(pool.heads * (pool.row_bytes / static_cast<int64_t>(sizeof(Unit))), kCopyColumns);
    grid.y = static_cast<unsigned>(layers);
    launch(copy_kernel<Unit>, grid, dim3(kCopyThreads), 0, pool, layer_stride, data<int32_t>(src_slots),
           data<int32_t>(dst_slots), src_slots.size(0));
  });
}

// A GPU reaches host memory only where it is pinned.
void check_reachable(const Tensor& pool, const char* name) {
#if !defined(GRISTMILL_SIMT)
  cudaPointerAttributes attributes{};
  STD_CUDA_CHECK(cudaPointerGetAttributes(&attributes, pool.const_data_ptr()));
  STD_TORCH_CHECK(attributes.type != cudaMemoryTypeUnregistered, "transfer_kv: the ", name,
                  " pool lies in pageable host memory, but a GPU reaches pinned memory only");
#else
  (void)pool, (void)name;
#endif
}

void transfer(const Launch& launch, const Tensor& dst, const Tensor& src, const Tensor& src_slots,
              const Tensor& dst_slots) {
  check_reachable(dst, "dst");
  check_reachable(src, "src");
  const BytePool to(dst, 0), from(src, 0);
  with_unit(to.unit(dst) < from.unit(src) ? to.unit(dst) : from.unit(src), [&](auto tag) {
    using Unit = decltype(tag);
    const int64_t pairs = src_slots.size(0),
                  units = pairs * to.heads * (to.row_bytes / static_cast<int64_t>(sizeof(Unit)));
    launch(transfer_kernel<Unit>, blocks_for(units, kThreads), dim3(kThreads), 0, to, from, data<int32_t>(src_slots),
           data<int32_t>(dst_slots), pairs);
  });
}

}  // namespace

void store_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots,
              double k_scale, double v_scale) {
  constexpr const char* op = "store_kv";
  check_store(k_cache, v_cache, k, v, slots, k_scale, v_scale, op);
  dispatch_store(k.scalar_type(), k_cache.scalar_type(), op, [&](auto from, auto to) {
    const SlotStore<decltype(from), decltype(to)> keys(k_cache, k, k_scale), values(v_cache, v, v_scale);
    store(Launch(k_cache), keys.joined(), values.joined(), slots);
  });
}

void mla_store(const Tensor& kv_cache, const Tensor& kv_c, const Tensor& k_rope, const Tensor& slots, double kv_scale) {
  constexpr const char* op = "mla_store";
  check_mla_store(kv_cache, kv_c, k_rope, slots, kv_scale, op);
  dispatch_store(kv_c.scalar_type(), kv_cache.scalar_type(), op, [&](auto from, auto to) {
    using To = decltype(to);
    using Store = SlotStore<decltype(from), To>;
    const int64_t latent_dim = kv_c.size(1);
    Store latent = Store::of_one_head(kv_cache, kv_c, kv_scale), rope = Store::of_one_head(kv_cache, k_rope, kv_scale);
    rope.to += latent_dim;
    rope.writes_aligned = rope.writes_aligned && latent_dim % Store::N == 0;
    store(Launch(kv_cache), latent, rope, slots);
  });
}

void copy_slots(const Tensor& k_cache, const OptionalTensor& v_cache, const Tensor& src_slots,
                const Tensor& dst_slots) {
  check_copy(k_cache, v_cache, src_slots, dst_slots, "copy_slots");
  const Launch launch(k_cache);
  copy_pool(launch, k_cache, src_slots, dst_slots);
  if (v_cache) copy_pool(launch, *v_cache, src_slots, dst_slots);
}

void transfer_kv(const Tensor& dst_k, const OptionalTensor& dst_v, const Tensor& src_k, const OptionalTensor& src_v,
                 const Tensor& src_slots, const Tensor& dst_slots) {
  check_transfer(dst_k, dst_v, src_k, src_v, src_slots, dst_slots, "transfer_kv");
  const Launch launch(src_slots);
  transfer(launch, dst_k, src_k, src_slots, dst_slots);
  if (dst_v) transfer(launch, *dst_v, *src_v, src_slots, dst_slots);
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("store_kv", TORCH_BOX(&gristmill::gpu::store_kv));
  m.impl("mla_store", TORCH_BOX(&gristmill::gpu::mla_store));
  m.impl("copy_slots", TORCH_BOX(&gristmill::gpu::copy_slots));
  m.impl("transfer_kv", TORCH_BOX(&gristmill::gpu::transfer_kv));
}
