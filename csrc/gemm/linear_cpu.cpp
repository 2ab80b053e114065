// The packed linear layer on the CPU with vector registers: rows of x are repacked per call, K is walked in blocks that
// fit the cache, and units of (rows, panels) go to the next free thread. AMX takes over for bfloat16 where the library
// is built for it.
#include <algorithm>
#include <array>
#include <utility>

#include "common/parallel.h"
#include "common/scratch.h"
#include "gemm/amx.h"
#include "gemm/gemm.h"
#include "gemm/store.h"
#include "gemm/tile.h"

namespace gristmill {
namespace {

// K elements of a panel that stay in the L1 cache (32 x 256 float32) while the row tiles pass by; whole chains.
constexpr int64_t kBlock = 128;
static_assert(kBlock % kChain == 0);
// Elements of x repacked at once, so that scratch stays small for long prompts.
constexpr int64_t kMaxPacked = int64_t{4} << 20;

template <typename T>
using TileFunction = void (*)(float*, const typename TileTraits<T>::Left*, const T*, int64_t, bool);

// tile_block for 1..kTileRows rows.
template <typename T, int... kRows>
constexpr std::array<TileFunction<T>, sizeof...(kRows)> tile_table(std::integer_sequence<int, kRows...>) {
  return {&tile_block<T, kRows + 1>...};
}

// Rows [row, row + rows) of x, cut into equal tiles; the last may be padded.
struct RowTiles {
  int64_t count;
  int64_t rows;  // per tile

  explicit RowTiles(int64_t m) : count((m + kTileRows - 1) / kTileRows), rows((m + count - 1) / count) {}
};

template <typename T>
class VectorLinear {
 public:
  using Left = typename TileTraits<T>::Left;

  explicit VectorLinear(const LinearArguments<T>& arguments)
      : args_(arguments), steps_(padded_k<T>(args_.k) / kGroup) {}

  void run() {
    static thread_local Scratch scratch;
    const int64_t most =
        std::max<int64_t>(kTileRows, kMaxPacked / std::max<int64_t>(1, args_.k) / kTileRows * kTileRows);
    for (int64_t row = 0; row < args_.m; row += most) {
      const RowTiles tiles(std::min(most, args_.m - row));
      Left* left = scratch.get<Left>(tiles.count * tiles.rows * steps_);
      parallel_ranges(tiles.count, tiles.rows * args_.k * 4, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const int64_t first = row + t * tiles.rows;
          const int64_t rows = std::min(tiles.rows, args_.m - first);
          pack_rows<T>(left + t * tiles.rows * steps_, args_.x + first * args_.x_stride, args_.x_stride, rows,
                       tiles.rows, args_.k);
        }
      });
      multiply(row, tiles, left);
    }
  }

 private:
  static constexpr int64_t kGroup = TileTraits<T>::kGroup;
  // 16-bit weights that are multiplied as float are converted once for several tiles; the products and their order stay
  // the same.
  static constexpr bool kWidens = !std::is_same_v<T, float> && std::is_same_v<Left, float>;

  void multiply(int64_t row, const RowTiles& tiles, const Left* left) {
    const int64_t panels = num_panels(args_.n);
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t panels_per_unit = std::clamp<int64_t>(panels / (threads * 8), 1, tiles.count == 1 ? 1 : 8);
    const int64_t column_units = (panels + panels_per_unit - 1) / panels_per_unit;
    // Few columns and many rows: cut the rows too.
    const int64_t row_units =
        column_units >= 4 * threads ? 1 : std::min(tiles.count, (4 * threads + column_units - 1) / column_units);
    const int64_t tiles_per_unit = (tiles.count + row_units - 1) / row_units;
    const int64_t work = panels_per_unit * kPanelColumns * args_.k * tiles_per_unit * tiles.rows / 4;
    parallel_units(column_units * row_units, work, [&](int64_t unit) {
      const int64_t panel = unit / row_units * panels_per_unit;
      const int64_t tile = unit % row_units * tiles_per_unit;
      const int64_t tile_end = std::min(tile + tiles_per_unit, tiles.count);
      if (tile < tile_end) run_unit(row, tiles, left, tile, tile_end, panel, std::min(panel + panels_per_unit, panels));
    });
  }

  void run_unit(int64_t row, const RowTiles& tiles, const Left* left, int64_t tile, int64_t tile_end, int64_t panel,
                int64_t panel_end) {
    static constexpr auto table = tile_table<T>(std::make_integer_sequence<int, kTileRows>());
    static thread_local Scratch scratch;
    static constexpr auto float_table = tile_table<float>(std::make_integer_sequence<int, kTileRows>());
    const int64_t tile_floats = tiles.rows * kPanelColumns;
    const int64_t panel_floats = (tile_end - tile) * tile_floats;
    float* sums = scratch.get<float>((panel_end - panel) * panel_floats);
    const int64_t block_steps = kBlock / kGroup;
    for (int64_t s = 0; s < steps_; s += block_steps) {
      const int64_t count = std::min(block_steps, steps_ - s);
      for (int64_t p = panel; p < panel_end; ++p) {
        const T* weights = args_.packed + p * panel_size<T>(args_.k) + s * kGroup * kPanelColumns;
        const auto run_tiles = [&](auto block, const auto* block_weights) {
          for (int64_t t = tile; t < tile_end; ++t) {
            float* target = sums + (p - panel) * panel_floats + (t - tile) * tile_floats;
            block(target, left + (t * steps_ + s) * tiles.rows, block_weights, count, s == 0);
          }
        };
        if constexpr (kWidens) {
          if (tile_end - tile > 1) {
            alignas(64) float wide[kBlock * kPanelColumns];
            widen_panel(wide, weights, count);
            run_tiles(float_table[static_cast<size_t>(tiles.rows - 1)], wide);
            continue;
          }
        }
        run_tiles(table[static_cast<size_t>(tiles.rows - 1)], weights);
      }
    }
    for (int64_t p = panel; p < panel_end; ++p) {
      const int64_t first = row + tile * tiles.rows;
      const int64_t rows = std::min((tile_end - tile) * tiles.rows, args_.m - first);
      store_panel(args_, sums + (p - panel) * panel_floats, first, rows, p);
    }
  }

  const LinearArguments<T>& args_;
  int64_t steps_;
};

template <typename T>
void clear_output(const LinearArguments<T>& args) {
  const std::array<float, kPanelColumns> zeros = {};
  for (int64_t row = 0; row < args.m; ++row) {
    for (int64_t p = 0; p < num_panels(args.n); ++p) store_panel(args, zeros.data(), row, 1, p);
  }
}

template <typename T>
void run_linear(const LinearArguments<T>& args) {
  if (args.k == 0) return clear_output(args);
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (amx_available()) return amx_linear(args);
  }
  VectorLinear<T>(args).run();
}

}  // namespace

void packed_linear(const Tensor& out, const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t n,
                   int64_t k) {
  constexpr const char* op = "packed_linear";
  check_dim(x, 2, op, "x");
  check_inner(x, op, "x");
  check_size(x, 1, k, op, "x");
  const int64_t m = x.size(0);
  check_dim(out, 2, op, "out");
  check_inner(out, op, "out");
  check_size(out, 0, m, op, "out");
  check_size(out, 1, n, op, "out");
  check_dtype(out, x.scalar_type(), op, "out");
  check_dtype(packed, x.scalar_type(), op, "packed");
  check_dim(packed, 1, op, "packed");
  check_inner(packed, op, "packed");
  if (bias) check_vector(*bias, x.scalar_type(), n, op, "bias");
  dispatch_float(x.scalar_type(), op, "x", [&](auto tag) {
    using T = decltype(tag);
    check_size(packed, 0, packed_size<T>(n, k), op, "packed");
    if (m == 0 || n == 0) return;
    run_linear(LinearArguments<T>{mutable_data<T>(out), out.stride(0), data<T>(x), x.stride(0), data<T>(packed),
                                  bias ? data<T>(*bias) : nullptr, m, n, k});
  });
}

}  // namespace gristmill
