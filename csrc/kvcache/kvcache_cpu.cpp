// store_kv on the CPU: row t of k and v goes to pool slot slots[t]; slot -1 is skipped. Differing dtypes are converted.
#include <cstring>
#include <type_traits>

#include "common/parallel.h"
#include "common/vec.h"
#include "kvcache/kvcache.h"

namespace gristmill {
namespace {

template <typename From, typename To>
void copy_row(To* to, const From* from, int64_t width) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<size_t>(width) * sizeof(To));
  } else {
    for_lanes(
        width, [&](int64_t i) { vstore(to + i, vload(from + i)); },
        [&](int64_t i, int64_t n) { vstore_n(to + i, vload_n(from + i, n), n); });
  }
}

template <typename From, typename To>
void store_rows(const Tensor& cache, const Tensor& rows, const int32_t* slots, int64_t begin, int64_t end) {
  To* to = mutable_data<To>(cache);
  const From* from = data<From>(rows);
  const int64_t heads = rows.size(1), width = rows.size(2);
  const int64_t row_stride = rows.stride(0), head_stride = rows.stride(1);
  const int64_t slot_stride = cache.stride(0), cache_head_stride = cache.stride(1);
  for (int64_t t = begin; t < end; ++t) {
    if (slots[t] < 0) continue;
    for (int64_t h = 0; h < heads; ++h) {
      copy_row(to + slots[t] * slot_stride + h * cache_head_stride, from + t * row_stride + h * head_stride, width);
    }
  }
}

void check_pair(const Tensor& cache, const Tensor& rows, int64_t tokens, const char* op, const char* cache_name,
                const char* name) {
  check_dim(cache, 3, op, cache_name);
  check_dim(rows, 3, op, name);
  check_inner(cache, op, cache_name);
  check_inner(rows, op, name);
  check_size(rows, 0, tokens, op, name);
  check_size(rows, 1, cache.size(1), op, name);
  check_size(rows, 2, cache.size(2), op, name);
}

}  // namespace

void store_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots) {
  constexpr const char* op = "store_kv";
  check_dim(k, 3, op, "k");
  const int64_t tokens = k.size(0);
  check_pair(k_cache, k, tokens, op, "k_cache", "k");
  check_pair(v_cache, v, tokens, op, "v_cache", "v");
  check_dtype(v, k.scalar_type(), op, "v");
  check_dtype(v_cache, k_cache.scalar_type(), op, "v_cache");
  check_size(v_cache, 0, k_cache.size(0), op, "v_cache");
  check_vector(slots, ScalarType::Int, tokens, op, "slots");
  const int32_t* slot = data<int32_t>(slots);
  const int64_t num_slots = k_cache.size(0);
  for (int64_t t = 0; t < tokens; ++t) {
    STD_TORCH_CHECK(slot[t] < num_slots, op, ": slots[", t, "] must be -1 or in [0, ", num_slots, "), got ", slot[t]);
  }
  const int64_t row_bytes = (k.size(1) * k.size(2) + v.size(1) * v.size(2)) * 4;
  dispatch_float(k.scalar_type(), op, "k", [&](auto from_tag) {
    dispatch_float(k_cache.scalar_type(), op, "k_cache", [&](auto to_tag) {
      using From = decltype(from_tag);
      using To = decltype(to_tag);
      parallel_ranges(tokens, row_bytes, [&](int64_t begin, int64_t end) {
        store_rows<From, To>(k_cache, k, slot, begin, end);
        store_rows<From, To>(v_cache, v, slot, begin, end);
      });
    });
  });
}

}  // namespace gristmill
