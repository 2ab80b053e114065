// The bfloat16 linear layer on AMX tiles. A tile instruction adds, per output element, one pair along K after the
// other, so a row's sum is the same chain whatever the tile around it holds.
#include "gemm/amx.h"

#if defined(GRISTMILL_AMX)

#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "common/scratch.h"

namespace gristmill {
namespace {

constexpr int64_t kStep = kPairBlock;             // K elements of one tile instruction
constexpr int64_t kMaxPacked = int64_t{8} << 20;  // elements of x repacked at once

// x[rows][k] -> tiles [K / 32][16][32], rows and K padded with zeros.
void pack_tile(BFloat16* to, const BFloat16* x, int64_t row_stride, int64_t rows, int64_t k) {
  for (int64_t step = 0; step < k; step += kStep) {
    const size_t bytes = static_cast<size_t>(std::min(kStep, k - step)) * sizeof(BFloat16);
    BFloat16* tile = to + step * kTile;
    if (rows < kTile || bytes < kStep * sizeof(BFloat16)) std::memset(tile, 0, kTileElements * sizeof(BFloat16));
    for (int64_t r = 0; r < rows; ++r) std::memcpy(tile + r * kStep, x + r * row_stride + step, bytes);
  }
}

constexpr int kWeightStride = 2 * kPanelColumns * sizeof(BFloat16);  // bytes between pairs along K in a panel
constexpr int kSumStride = kPanelColumns * sizeof(float);

// sums[rows][32] (+)= x tiles [steps] times one panel; one row tile.
void multiply_one(float* sums, const BFloat16* x, const BFloat16* panel, int64_t steps, bool first) {
  tile_fence();
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, sums, kSumStride);
    _tile_loadd(1, sums + kTile, kSumStride);
  }
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, x + s * kTileElements, 64);
    _tile_loadd(6, panel + s * kStep * kPanelColumns, kWeightStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + s * kStep * kPanelColumns + kStep, kWeightStride);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kTile, kSumStride);
}

// The same for two row tiles; their sums are [32][32].
void multiply_two(float* sums, const BFloat16* x, int64_t x_pitch, const BFloat16* panel, int64_t steps, bool first) {
  tile_fence();
  float* low = sums + kTile * kPanelColumns;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kSumStride);
    _tile_loadd(1, sums + kTile, kSumStride);
    _tile_loadd(2, low, kSumStride);
    _tile_loadd(3, low + kTile, kSumStride);
  }
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, x + s * kTileElements, 64);
    _tile_loadd(6, panel + s * kStep * kPanelColumns, kWeightStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, x + x_pitch + s * kTileElements, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, panel + s * kStep * kPanelColumns + kStep, kWeightStride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kTile, kSumStride);
  _tile_stored(2, low, kSumStride);
  _tile_stored(3, low + kTile, kSumStride);
}

class AmxLinear {
 public:
  explicit AmxLinear(const LinearArguments<BFloat16>& args) : args_(args), padded_k_(padded_k<BFloat16>(args.k)) {}

  void run() {
    static thread_local Scratch scratch;
    const int64_t most = std::max<int64_t>(2 * kTile, kMaxPacked / padded_k_ / (2 * kTile) * (2 * kTile));
    for (int64_t row = 0; row < args_.m; row += most) {
      const int64_t rows = std::min(most, args_.m - row);
      const int64_t tiles = (rows + kTile - 1) / kTile;
      BFloat16* x = scratch.get<BFloat16>(tiles * kTile * padded_k_);
      parallel_ranges(tiles, kTile * args_.k * 2, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          pack_tile(x + t * kTile * padded_k_, args_.x + (row + t * kTile) * args_.x_stride, args_.x_stride,
                    std::min(kTile, rows - t * kTile), args_.k);
        }
      });
      multiply(row, rows, x);
    }
  }

 private:
  void multiply(int64_t row, int64_t rows, const BFloat16* x) {
    const int64_t panels = num_panels(args_.n);
    const int64_t tiles = (rows + kTile - 1) / kTile;
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t per_unit = std::clamp<int64_t>(panels / (threads * 8), 1, tiles <= 2 ? 1 : 8);
    const int64_t units = (panels + per_unit - 1) / per_unit;
    parallel_units(units, per_unit * kPanelColumns * args_.k * 2, [&](int64_t unit) {
      run_unit(row, rows, x, unit * per_unit, std::min((unit + 1) * per_unit, panels));
    });
  }

  void run_unit(int64_t row, int64_t rows, const BFloat16* x, int64_t panel, int64_t panel_end) {
    static thread_local Scratch scratch;
    const int64_t tiles = (rows + kTile - 1) / kTile;
    const int64_t tile_floats = kTile * kPanelColumns, panel_floats = tiles * tile_floats;
    float* sums = scratch.get<float>((panel_end - panel) * panel_floats);
    const TileSession session(std::min(rows, kTile));
    // A block of a panel (32 columns) stays in the L1 cache while the row tiles pass by.
    const int64_t block = tiles <= 2 ? padded_k_ : 512;
    for (int64_t k = 0; k < padded_k_; k += block) {
      const int64_t steps = std::min(block, padded_k_ - k) / kStep;
      for (int64_t p = panel; p < panel_end; ++p) {
        const BFloat16* weights = args_.packed + p * panel_size<BFloat16>(args_.k) + k * kPanelColumns;
        float* target = sums + (p - panel) * panel_floats;
        int64_t t = 0;
        for (; t + 2 <= tiles; t += 2) {
          multiply_two(target + t * tile_floats, x + t * kTile * padded_k_ + k * kTile, kTile * padded_k_, weights,
                       steps, k == 0);
        }
        if (t < tiles)
          multiply_one(target + t * tile_floats, x + t * kTile * padded_k_ + k * kTile, weights, steps, k == 0);
      }
    }
    for (int64_t p = panel; p < panel_end; ++p) store_panel(args_, sums + (p - panel) * panel_floats, row, rows, p);
  }

  const LinearArguments<BFloat16>& args_;
  int64_t padded_k_;
};

}  // namespace

void amx_linear(const LinearArguments<BFloat16>& args) { AmxLinear(args).run(); }

}  // namespace gristmill

#endif
