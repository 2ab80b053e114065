// What a linear layer works on, and the last step of every tile: bias, rounding, and the store of the columns that
// exist.
#pragma once

#include "common/vec.h"
#include "gemm/layout.h"

namespace gristmill {

template <typename T>
struct LinearArguments {
  T* out;
  int64_t out_stride;
  const T* x;
  int64_t x_stride;
  const T* packed;
  const T* bias;  // or null
  int64_t m;
  int64_t n;
  int64_t k;
};

// sums[rows][32] of panel `panel` -> out[row..row + rows].
template <typename T>
inline void store_panel(const LinearArguments<T>& args, const float* sums, int64_t row, int64_t rows, int64_t panel) {
  const int64_t column = panel * kPanelColumns;
  const int64_t columns = args.n - column < kPanelColumns ? args.n - column : kPanelColumns;
  for (int64_t r = 0; r < rows; ++r) {
    T* out = args.out + (row + r) * args.out_stride + column;
    const float* sum = sums + r * kPanelColumns;
    for_lanes(
        columns,
        [&](int64_t i) {
          const vf v = vload(sum + i);
          vstore(out + i, args.bias ? v + vload(args.bias + column + i) : v);
        },
        [&](int64_t i, int64_t n) {
          const vf v = vload(sum + i);
          vstore_n(out + i, args.bias ? v + vload_n(args.bias + column + i, n) : v, n);
        });
  }
}

}  // namespace gristmill
