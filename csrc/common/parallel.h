// Threads of the kernels: libtorch's own pool, with units handed out one by one so that a slow core does not hold up
// the rest.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace gristmill {

// Bytes (or operations) below which waking another thread costs more than it saves.
inline constexpr int64_t kSerialWork = 32 * 1024;

// f(begin, end) over [0, n) in contiguous ranges; `work_per_unit` is in bytes touched or operations done.
template <typename F>
inline void parallel_ranges(int64_t n, int64_t work_per_unit, const F& f) {
  if (n <= 0) return;
  const int64_t grain = std::max<int64_t>(1, kSerialWork / std::max<int64_t>(1, work_per_unit));
  if (n <= grain) {
    f(int64_t{0}, n);
    return;
  }
  torch::stable::parallel_for(0, n, grain, f);
}

// f(unit) for every unit of [0, n), each taken by the next free thread. Which thread runs a unit must not change its
// result.
template <typename F>
inline void parallel_units(int64_t n, int64_t work_per_unit, const F& f) {
  if (n <= 0) return;
  const int64_t threads = std::min<int64_t>(n, torch::stable::get_num_threads());
  if (threads <= 1 || n * work_per_unit <= kSerialWork) {
    for (int64_t unit = 0; unit < n; ++unit) f(unit);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t unit = next.fetch_add(1, std::memory_order_relaxed); unit < n;
         unit = next.fetch_add(1, std::memory_order_relaxed)) {
      f(unit);
    }
  });
}

}  // namespace gristmill
