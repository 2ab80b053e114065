// A linear layer for a few rows over a weight as it is stored, [N, K], on the CPU: one dot product per output, with the
// vectors of a weight row shared by up to kTile rows of x. An output is summed in one order, whatever the tile.
#include <algorithm>

#include "common/parallel.h"
#include "common/vec.h"
#include "gemm/gemm.h"
#include "gemm/skinny.h"

namespace gristmill {
namespace {

constexpr int kTile = 4;
constexpr int kChains = 2;  // sums per output that do not wait for each other

template <typename T>
struct SkinnyLinear {
  T* out;
  int64_t out_stride;
  const T* x;
  int64_t x_stride;
  const T* weight;
  int64_t weight_stride;
  const T* bias;  // or null
  int64_t m;
  int64_t k;

  // Output `column` of rows [row, row + kRows).
  template <int kRows>
  void dot(int64_t row, int64_t column) const {
    const T* w = weight + column * weight_stride;
    const T* rows = x + row * x_stride;
    vf sums[kRows][kChains] = {};
    int64_t i = 0;
    for (; i + kChains * kLanes <= k; i += kChains * kLanes) {
      for (int chain = 0; chain < kChains; ++chain) {
        const vf factor = vload(w + i + chain * kLanes);
        for (int r = 0; r < kRows; ++r) {
          sums[r][chain] = vfma(vload(rows + r * x_stride + i + chain * kLanes), factor, sums[r][chain]);
        }
      }
    }
    for (; i < k; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, k - i);
      const vf factor = vload_n(w + i, count);
      for (int r = 0; r < kRows; ++r) {
        sums[r][0] = vfma(vload_n(rows + r * x_stride + i, count), factor, sums[r][0]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float sum = vsum(sums[r][0] + sums[r][1]);
      if (bias != nullptr) sum += to_float(bias[column]);
      out[(row + r) * out_stride + column] = from_float<T>(sum);
    }
  }

  void columns(int64_t begin, int64_t end) const {
    for (int64_t column = begin; column < end; ++column) {
      int64_t row = 0;
      for (; row + kTile <= m; row += kTile) dot<kTile>(row, column);
      switch (m - row) {
        case 3:
          dot<3>(row, column);
          break;
        case 2:
          dot<2>(row, column);
          break;
        case 1:
          dot<1>(row, column);
          break;
        default:
          break;
      }
    }
  }
};

}  // namespace

void skinny_linear(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check_skinny_linear(out, x, weight, bias);
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  if (m == 0) return;
  dispatch_float(x.scalar_type(), "skinny_linear", "x", [&](auto tag) {
    using T = decltype(tag);
    const SkinnyLinear<T> call{mutable_data<T>(out),
                               out.stride(0),
                               data<T>(x),
                               x.stride(0),
                               data<T>(weight),
                               weight.stride(0),
                               bias ? data<T>(*bias) : nullptr,
                               m,
                               k};
    parallel_ranges(n, k * (m + 1), [&](int64_t begin, int64_t end) { call.columns(begin, end); });
  });
}

}  // namespace gristmill
