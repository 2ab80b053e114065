// The decode kernel for tensor cores: 16-bit data, heads of 64, 128 or 256 elements, at most 16 query heads per KV
// head.
//
// A block computes pieces of one KV head; each of its warps takes every kWarps-th tile of kTile slots and streams it
// through a ring of its own in shared memory, so that warps never wait for one another before the end of a piece. Query
// heads are the rows of the products: S = q k^T, then O += P v, both by mma.sync.m16n8k16. 16-byte chunks of a row lie
// in shared memory xor'ed with the row's number, which keeps ldmatrix free of bank conflicts.
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "Flash-Decoding"
// (2023).
#pragma once

#include "attention/decode_problem.h"
#include "common/gpu_rows.h"

#if defined(GRISTMILL_HAS_MMA)
namespace gristmill::gpu {

// kStages: tiles in the ring of a warp, one of them being computed. kTwoHalves: rows 8 to 15 hold query heads too.
template <typename T, int kDim, int kWarps, int kStages, bool kTwoHalves>
struct MmaDecode {
  static constexpr int kTile = 16;
  static constexpr int kChunks = kDim / 8;  // of 16 bytes, per row
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = 2 * kTile * kRowBytes;  // keys, then values
  static constexpr int kTilesPerWarp = kSplit / (kTile * kWarps);
  static constexpr int kSlotsPerWarp = kTilesPerWarp * kTile;
  static constexpr int kRingBytes = kWarps * kStages * kTileBytes;
  static constexpr int kSharedBytes = kRingBytes + kSplit * 4;
  static constexpr int kRows = kTwoHalves ? 16 : 8;
  static_assert(kSplit % (kTile * kWarps) == 0 && kSlotsPerWarp % 32 == 0);
  static_assert(kWarps * kRows * (kDim + 2) * 4 <= kRingBytes, "the warps' results meet in the ring's memory");

  const DecodeProblem& p;
  const Piece& piece;
  int32_t kv_head;
  unsigned char* ring;
  int32_t* slots;  // of this warp's tiles, in shared memory; -1 where nothing is seen
  int warp, lane, g, t;
  uint32_t q[kDim / 16][4];
  float sums[kDim / 8][4];
  float largest[2], total[2];

  __device__ MmaDecode(const DecodeProblem& problem, const Piece& where, int32_t head, unsigned char* memory)
      : p(problem),
        piece(where),
        kv_head(head),
        ring(memory + warp_index() * kStages * kTileBytes),
        slots(reinterpret_cast<int32_t*>(memory + kRingBytes) + warp_index() * kSlotsPerWarp),
        warp(warp_index()),
        lane(lane_index()),
        g(lane / 4),
        t(lane % 4) {}

  // The first position of this warp's tile.
  __device__ int32_t position_of(int tile) const { return piece.begin + (tile * kWarps + warp) * kTile; }

  __device__ void load_slots() {
    int32_t mine[kSlotsPerWarp / 32];
#pragma unroll
    for (int i = 0; i < kSlotsPerWarp / 32; ++i) {
      const int32_t position = position_of(2 * i + lane / kTile) + lane % kTile;
      mine[i] = position < piece.end && position >= piece.first_seen ? piece.list[position] : -1;
    }
#pragma unroll
    for (int i = 0; i < kSlotsPerWarp / 32; ++i) slots[i * 32 + lane] = mine[i];
    sync_warp();
  }

  __device__ void load_q() {
    const T* const base = static_cast<const T*>(p.q) + piece.request * p.q_row + kv_head * p.group() * p.q_head;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = g + i % 2 * 8, column = 16 * k + i / 2 * 8 + 2 * t;
        const bool there = (kTwoHalves || i % 2 == 0) && row < p.group();
        q[k][i] = there ? *reinterpret_cast<const uint32_t*>(base + row * p.q_head + column) : 0u;
      }
    }
  }

  __device__ static int chunk_offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) * 16); }

  // Starts the copies of a tile into a stage of the ring; slots that are not seen become zeros.
  __device__ void fetch(int tile, int stage) const {
    constexpr int kRowsAtOnce = 32 / kChunks;
    static_assert(kRowsAtOnce >= 1);
    unsigned char* const keys = ring + stage * kTileBytes;
    unsigned char* const values = keys + kTile * kRowBytes;
    const int chunk = lane % kChunks;
    const T* const key = static_cast<const T*>(p.k) + kv_head * p.k_head + chunk * 8;
    const T* const value = static_cast<const T*>(p.v) + kv_head * p.v_head + chunk * 8;
#pragma unroll
    for (int i = 0; i < kTile / kRowsAtOnce; ++i) {
      const int row = i * kRowsAtOnce + lane / kChunks;
      const int32_t slot = slots[tile * kTile + row];
      const int64_t from = slot < 0 ? 0 : slot;
      copy_async_16(keys + chunk_offset(row, chunk), key + from * p.k_slot, slot >= 0);
      copy_async_16(values + chunk_offset(row, chunk), value + from * p.v_slot, slot >= 0);
    }
  }

  // Scores of a tile: s[n] are the columns of slots 8n to 8n + 7.
  __device__ void multiply_keys(const unsigned char* keys, float (&s)[2][4]) const {
    const int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t b[4];
      load_matrix_4(b, keys + chunk_offset(row, 2 * k + half));
      multiply_16x8x16<T>(s[0], q[k], b[0], b[1]);
      multiply_16x8x16<T>(s[1], q[k], b[2], b[3]);
    }
  }

  __device__ void multiply_values(const unsigned char* values, const uint32_t (&weights)[4]) {
    const int row = lane / 8 % 2 * 8 + lane % 8, half = lane / 16;
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];
      load_matrix_4_transposed(b, values + chunk_offset(row, 2 * n + half));
      multiply_16x8x16<T>(sums[2 * n], weights, b[0], b[1]);
      multiply_16x8x16<T>(sums[2 * n + 1], weights, b[2], b[3]);
    }
  }

  // Turns scores into weights, and brings what was summed before to the new largest score.
  __device__ void soften(float (&s)[2][4], uint32_t mask) {
#pragma unroll
    for (int half = 0; half < (kTwoHalves ? 2 : 1); ++half) {
      float most = largest[half];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s[i / 2][2 * half + i % 2];
        const int column = i / 2 * 8 + 2 * t + i % 2;
        score = (mask >> column & 1) != 0 ? p.scaled(score) : -INFINITY;
        most = score > most ? score : most;
      }
      most = fmaxf(most, shuffle_xor(most, 1));
      most = fmaxf(most, shuffle_xor(most, 2));
      const float base = most == -INFINITY ? 0.0f : most;
      const float rescale = exp2_fast(largest[half] - base);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s[i / 2][2 * half + i % 2];
        score = exp2_fast(score - base);
        sum += score;
      }
      total[half] = total[half] * rescale + sum;
      largest[half] = most;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        sums[n][2 * half] *= rescale;
        sums[n][2 * half + 1] *= rescale;
      }
    }
  }

  __device__ void compute(int tile, int stage) {
    const uint32_t mask = static_cast<uint32_t>(ballot(slots[tile * kTile + lane % kTile] >= 0)) & 0xffffu;
    if (mask == 0) return;
    const unsigned char* const keys = ring + stage * kTileBytes;
    float s[2][4] = {};
    multiply_keys(keys, s);
    soften(s, mask);
    // Of the weights of rows 8 to 15 nothing is used where they hold no query heads.
    const uint32_t weights[4] = {pack_two<T>(s[0][0], s[0][1]), kTwoHalves ? pack_two<T>(s[0][2], s[0][3]) : 0u,
                                 pack_two<T>(s[1][0], s[1][1]), kTwoHalves ? pack_two<T>(s[1][2], s[1][3]) : 0u};
    multiply_values(keys + kTile * kRowBytes, weights);
  }

  __device__ void run() {
    load_slots();
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) {
      fetch(tile, tile);
      copy_async_commit();
    }
    load_q();
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
    largest[0] = largest[1] = -INFINITY;
    total[0] = total[1] = 0;
    int stage = 0, next_stage = kStages - 1;
    // Not unrolled: the code of several tiles does not fit into the instruction cache.
#pragma unroll 1
    for (int tile = 0; tile < kTilesPerWarp; ++tile) {
      copy_async_wait<kStages - 2>();
      sync_warp();  // every lane's copies of the tile are there, and every lane is done with the one before
      if (tile + kStages - 1 < kTilesPerWarp) fetch(tile + kStages - 1, next_stage);
      copy_async_commit();
      compute(tile, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
    }
    copy_async_wait<0>();
  }

  // Leaves this warp's results for rows below `rows` in shared memory: sums [kWarps, kRows, kDim], then the largest
  // scores and the totals [kWarps, kRows].
  __device__ void leave(float* memory) {
    float* const most = memory + kWarps * kRows * kDim;
    float* const all = most + kWarps * kRows;
#pragma unroll
    for (int half = 0; half < (kTwoHalves ? 2 : 1); ++half) {
      float sum = total[half] + shuffle_xor(total[half], 1);
      sum += shuffle_xor(sum, 2);
      const int row = warp * kRows + half * 8 + g;
      if (t == 0) {
        most[row] = largest[half];
        all[row] = sum;
      }
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        memory[row * kDim + 8 * n + 2 * t] = sums[n][2 * half];
        memory[row * kDim + 8 * n + 2 * t + 1] = sums[n][2 * half + 1];
      }
    }
  }

  // All threads of the block combine what the warps left, in the order of the warps.
  __device__ void combine(const float* memory, int64_t number) const {
    const float* const most = memory + kWarps * kRows * kDim;
    const float* const all = most + kWarps * kRows;
    for (int i = thread_index(); i < p.group() * kDim; i += kWarps * 32) {
      const int row = i / kDim, column = i % kDim;
      float largest_of_all = most[row];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) largest_of_all = fmaxf(largest_of_all, most[w * kRows + row]);
      const float base = largest_of_all == -INFINITY ? 0.0f : largest_of_all;
      float sum = 0, total_of_all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = exp2_fast(most[w * kRows + row] - base);
        sum += memory[(w * kRows + row) * kDim + column] * weight;
        total_of_all += all[w * kRows + row] * weight;
      }
      const int64_t head = static_cast<int64_t>(kv_head) * p.group() + row;
      p.sums(number, head)[column] = sum;
      if (column == 0) {
        p.largest(number)[head] = largest_of_all;
        p.total(number)[head] = total_of_all;
      }
    }
  }
};

template <typename T, int kDim, int kWarps, int kStages, bool kTwoHalves>
__global__ void __launch_bounds__(kWarps * 32) decode_mma_kernel(const DecodeProblem p) {
  using Decode = MmaDecode<T, kDim, kWarps, kStages, kTwoHalves>;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const int64_t pieces = p.kv_indptr[p.requests] / kSplit + p.requests;
  for (int64_t work = blockIdx.x; work < pieces * p.num_kv_heads; work += gridDim.x) {
    const int64_t number = work / p.num_kv_heads;
    const Piece piece = find_piece(p, static_cast<int32_t>(number));
    if (piece.begin >= piece.end || piece.first_seen >= piece.end) continue;  // the same in every warp
    Decode decode(p, piece, static_cast<int32_t>(work % p.num_kv_heads), memory);
    decode.run();
    sync_block();  // the rings are empty
    decode.leave(reinterpret_cast<float*>(memory));
    sync_block();
    decode.combine(reinterpret_cast<const float*>(memory), number);
    sync_block();  // before the next piece fills them again
  }
}

}  // namespace gristmill::gpu
#endif
