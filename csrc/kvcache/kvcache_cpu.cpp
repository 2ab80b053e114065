// The slot pool on the CPU: rows of new tokens go to their slots, slots are copied within a pool and between two pools.
// A negative slot is skipped; all slots are checked before the first write.
#include <cstring>

#include "common/parallel.h"
#include "kvcache/kvcache.h"
#include "kvcache/store.h"

namespace gristmill {
namespace {

// A cache of any dtype as bytes: [S, H, D] with the strides of its slots and heads.
struct ByteCache {
  ByteCache(const Tensor& t, int64_t slot_dim)
      : heads(t.size(slot_dim + 1)),
        row_bytes(t.size(slot_dim + 2) * t.element_size()),
        slot_stride(t.stride(slot_dim) * t.element_size()),
        head_stride(t.stride(slot_dim + 1) * t.element_size()) {}
  int64_t heads, row_bytes, slot_stride, head_stride;
};

void check_entries(const Tensor& src_slots, const Tensor& dst_slots, int64_t src_pool, int64_t dst_pool,
                   const char* op) {
  check_slots(data<int32_t>(src_slots), src_slots.size(0), src_pool, op, "src_slots");
  check_slots(data<int32_t>(dst_slots), dst_slots.size(0), dst_pool, op, "dst_slots");
}

void copy_pool_slots(const Tensor& cache, const int32_t* source, const int32_t* target, int64_t pairs) {
  const ByteCache shape(cache, 1);
  char* base = mutable_data<char>(cache);
  const int64_t layer_stride = cache.stride(0) * cache.element_size();
  // One thread copies a head of a layer, pair after pair, so a destination may be a source of an earlier pair.
  parallel_units(cache.size(0) * shape.heads, pairs * shape.row_bytes, [&](int64_t unit) {
    char* pool = base + unit / shape.heads * layer_stride + unit % shape.heads * shape.head_stride;
    for (int64_t i = 0; i < pairs; ++i) {
      if (source[i] < 0 || target[i] < 0 || source[i] == target[i]) continue;
      std::memcpy(pool + target[i] * shape.slot_stride, pool + source[i] * shape.slot_stride,
                  static_cast<size_t>(shape.row_bytes));
    }
  });
}

void transfer_slots(const Tensor& dst, const Tensor& src, const int32_t* source, const int32_t* target, int64_t pairs) {
  ByteCache to(dst, 0), from(src, 0);
  char* to_base = mutable_data<char>(dst);
  const char* from_base = data<char>(src);
  int64_t heads = to.heads, row_bytes = to.row_bytes;
  if (to.head_stride == row_bytes && from.head_stride == row_bytes) {  // a slot is one piece on both sides
    row_bytes *= heads;
    heads = 1;
  }
  parallel_ranges(pairs, to.heads * to.row_bytes * 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (source[i] < 0 || target[i] < 0) continue;
      for (int64_t h = 0; h < heads; ++h) {
        std::memcpy(to_base + target[i] * to.slot_stride + h * to.head_stride,
                    from_base + source[i] * from.slot_stride + h * from.head_stride, static_cast<size_t>(row_bytes));
      }
    }
  });
}

}  // namespace

void store_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots,
              double k_scale, double v_scale) {
  constexpr const char* op = "store_kv";
  check_store(k_cache, v_cache, k, v, slots, k_scale, v_scale, op);
  const int32_t* slot = data<int32_t>(slots);
  check_slots(slot, k.size(0), k_cache.size(0), op, "slots");
  const int64_t row_bytes = (k.size(1) * k.size(2) + v.size(1) * v.size(2)) * 4;
  dispatch_store(k.scalar_type(), k_cache.scalar_type(), op, [&](auto from, auto to) {
    const SlotStore<decltype(from), decltype(to)> keys(k_cache, k, k_scale), values(v_cache, v, v_scale);
    parallel_ranges(k.size(0), row_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        if (slot[t] < 0) continue;
        keys.store(t, slot[t]);
        values.store(t, slot[t]);
      }
    });
  });
}

void copy_slots(const Tensor& k_cache, const OptionalTensor& v_cache, const Tensor& src_slots,
                const Tensor& dst_slots) {
  constexpr const char* op = "copy_slots";
  check_copy(k_cache, v_cache, src_slots, dst_slots, op);
  check_entries(src_slots, dst_slots, k_cache.size(1), k_cache.size(1), op);
  const int32_t* source = data<int32_t>(src_slots);
  const int32_t* target = data<int32_t>(dst_slots);
  copy_pool_slots(k_cache, source, target, src_slots.size(0));
  if (v_cache) copy_pool_slots(*v_cache, source, target, src_slots.size(0));
}

void transfer_kv(const Tensor& dst_k, const OptionalTensor& dst_v, const Tensor& src_k, const OptionalTensor& src_v,
                 const Tensor& src_slots, const Tensor& dst_slots) {
  constexpr const char* op = "transfer_kv";
  check_transfer(dst_k, dst_v, src_k, src_v, src_slots, dst_slots, op);
  check_entries(src_slots, dst_slots, src_k.size(0), dst_k.size(0), op);
  const int32_t* source = data<int32_t>(src_slots);
  const int32_t* target = data<int32_t>(dst_slots);
  transfer_slots(dst_k, src_k, source, target, src_slots.size(0));
  if (dst_v) transfer_slots(*dst_v, *src_v, source, target, src_slots.size(0));
}

}  // namespace gristmill
