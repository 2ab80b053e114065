// The kernels behind skinny_linear on GPUs: x[M, K] times weight[N, K] transposed for M <= 16, where the weight is read
// once and reading it is all that takes time.
//
// A block owns 8 * kTiles rows of the weight. Its warps take steps of kStepWidth elements along K in turn, and their
// sums are added in the order of the warps. So an output is summed in an order that depends on K alone: not on M, the
// rows beside it, kTiles, or how the operands are aligned.
#pragma once

#include "common/gpu.h"

namespace gristmill::gpu {

inline constexpr int kSkinnyWarps = 8;      // of skinny_mma_kernel
inline constexpr int kSkinnyThreads = 256;  // of skinny_fma_kernel

template <typename T>
struct SkinnyArguments {
  T* out;
  const T* x;
  const T* weight;
  const T* bias;  // or null
  int64_t out_stride;
  int64_t x_stride;
  int64_t weight_stride;
  int64_t n;
  int m;
  int k;
};

// Adds what each warp has summed, [warps][m][columns], and stores the columns that exist.
template <typename T>
__device__ inline void store_skinny(const SkinnyArguments<T>& args, const float* sums, int warps, int sum_rows,
                                    int columns, int64_t first) {
  for (int i = thread_index(); i < args.m * columns; i += static_cast<int>(blockDim.x)) {
    const int row = i / columns, column = i % columns;
    if (first + column >= args.n) continue;
    float sum = 0;
    for (int warp = 0; warp < warps; ++warp) sum += sums[(warp * sum_rows + row) * columns + column];
    if (args.bias) sum += to_float(args.bias[first + column]);
    args.out[row * args.out_stride + first + column] = from_float<T>(sum);
  }
}

#if defined(GRISTMILL_HAS_MMA)

// Eight elements along K, as the four registers of a fragment.
struct alignas(16) Eight {
  uint32_t r[4];
};

// Elements [k, k + 8) of a row of `width`; what lies behind it, or all without `present`, is zero. kWide: rows begin at
// multiples of 16 bytes and width is a multiple of 8.
template <bool kWide, typename T>
__device__ inline Eight load_eight(const T* row, int k, int width, bool present) {
  Eight eight = {};
  if (!present || k >= width) return eight;
  if constexpr (kWide) {
    const Pack<T, 8> pack = load_pack<8>(row + k);
    std::memcpy(&eight, &pack, sizeof(eight));
  } else {
    Pack<T, 8> pack = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (k + i < width) pack[i] = row[k + i];
    }
    std::memcpy(&eight, &pack, sizeof(eight));
  }
  return eight;
}

// For 16-bit types. The rows of x are the rows of a tensor-core product, rows of the weight its columns. Within a step
// a lane multiplies 16 bytes of a row at once, and the product's order of K is permuted to fit, in both operands alike.
// A warp copies whole lines of 128 bytes into a ring of its own, so no barrier of the block is needed. kTall: m may
// exceed 8.
template <typename T, int kTiles, int kStages, bool kTall, bool kWide>
__global__ void __launch_bounds__(kSkinnyWarps * 32) skinny_mma_kernel(SkinnyArguments<T> args) {
  static_assert(kWarp == 32 && kStages >= 2);
  constexpr int kStepWidth = 64;  // elements of a row: a line
  constexpr int kHalves = 2;      // of a step, 32 elements each
  constexpr int kLanePieces = 8;  // lanes that copy a line together, 16 bytes each
  constexpr int kStagePieces = kTiles * 8 * kLanePieces;
  constexpr int kCopies = kStagePieces / 32;
  constexpr int kColumns = kTiles * 8;
  constexpr int kSumRows = kTall ? 16 : 8;
  GRISTMILL_SHARED(float, sums, kSkinnyWarps * kSumRows * kColumns);
  follow_previous_kernel();
  const int lane = lane_index(), warp = warp_index();
  const int group = lane / 4, quarter = lane % 4;
  Eight* const ring = dynamic_shared<Eight>() + warp * kStages * kStagePieces;  // [kStages][rows of the weight][8]
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns;
  const int steps = (args.k + kStepWidth - 1) / kStepWidth;
  const auto position = [&](int i, int half) {
    return (warp + i * kSkinnyWarps) * kStepWidth + half * 32 + quarter * 8;
  };
  // Where piece `piece` of line `line` lies: every other line is turned, so that reading meets no bank twice.
  const auto place = [](int line, int piece) { return line * kLanePieces + (piece ^ (line % 2 * 4)); };

  const auto fetch = [&](int i) {
    if constexpr (kWide) {
      Eight* const stage = ring + i % kStages * kStagePieces;
      const int k = (warp + i * kSkinnyWarps) * kStepWidth + lane % kLanePieces * 8;
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) {
        const int line = copy * 4 + lane / kLanePieces;
        const bool there = first + line < args.n && k < args.k;
        const T* const from = args.weight + (there ? (first + line) * args.weight_stride + k : 0);
        copy_async_16(stage + place(line, lane % kLanePieces), from, there);
      }
      copy_async_commit();
    }
  };
  const auto weights = [&](int i, int tile, int half) {
    const int line = tile * 8 + group;
    if constexpr (kWide) return ring[i % kStages * kStagePieces + place(line, half * 4 + quarter)];
    const bool there = first + line < args.n;
    return load_eight<false>(args.weight + (there ? first + line : 0) * args.weight_stride, position(i, half), args.k,
                             there);
  };

  float acc[kTiles][4] = {};
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(i);
  const T* const x_low = args.x + group * args.x_stride;
  const T* const x_high = x_low + 8 * args.x_stride;
  for (int i = 0; warp + i * kSkinnyWarps < steps; ++i) {
    Eight low[kHalves], high[kHalves] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      low[half] = load_eight<kWide>(x_low, position(i, half), args.k, group < args.m);
      if constexpr (kTall) high[half] = load_eight<kWide>(x_high, position(i, half), args.k, group + 8 < args.m);
    }
    if constexpr (kWide) {
      copy_async_wait<kStages - 2>();
      sync_warp();  // the others' copies are there too, and nobody reads the stage that is filled next
    }
    fetch(i + kStages - 1);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const Eight w = weights(i, tile, half);
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
          multiply_16x8x16<T>(acc[tile], {low[half].r[r], high[half].r[r], low[half].r[r + 1], high[half].r[r + 1]},
                              w.r[r], w.r[r + 1]);
        }
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < (kTall ? 4 : 2); ++i) {
      sums[(warp * kSumRows + group + i / 2 * 8) * kColumns + tile * 8 + quarter * 2 + i % 2] = acc[tile][i];
    }
  }
  sync_block();
  store_skinny(args, sums, kSkinnyWarps, kSumRows, kColumns, first);
}

#endif  // GRISTMILL_HAS_MMA

// For float32, and for what has no tensor cores of the kind above: fused multiply-adds, kRows rows of x at most.
template <typename T, int kRows, int kColumns, bool kWide>
__global__ void __launch_bounds__(kSkinnyThreads) skinny_fma_kernel(SkinnyArguments<T> args) {
  constexpr int kLane = 16 / static_cast<int>(sizeof(T));
  GRISTMILL_SHARED(float, sums, kSkinnyThreads / kWarp * kRows * kColumns);
  follow_previous_kernel();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns;
  const auto load = [&](const T* row, int k) {
    if constexpr (kWide) return load_pack<kLane>(row + k);
    Pack<T, kLane> pack = {};
    for (int i = 0; i < kLane && k + i < args.k; ++i) pack[i] = row[k + i];
    return pack;
  };
  float acc[kRows][kColumns] = {};
  for (int k = thread_index() * kLane; k < args.k; k += kSkinnyThreads * kLane) {
    Pack<T, kLane> w[kColumns];
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int64_t row = first + column < args.n ? first + column : args.n - 1;
      w[column] = load(args.weight + row * args.weight_stride, k);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= args.m) break;
      const Pack<T, kLane> x = load(args.x + row * args.x_stride, k);
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int i = 0; i < kLane; ++i)
          acc[row][column] = fmaf(to_float(x[i]), to_float(w[column][i]), acc[row][column]);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      float sum = acc[row][column];
      for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
      if (lane_index() == 0) sums[(warp_index() * kRows + row) * kColumns + column] = sum;
    }
  }
  sync_block();
  store_skinny(args, sums, kSkinnyThreads / kWarp, kRows, kColumns, first);
}

}  // namespace gristmill::gpu
