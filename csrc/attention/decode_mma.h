// The decode kernel for tensor cores: 16-bit data, heads of 64, 128 or 256 elements, at most 16 query heads per KV
// head.
//
// A warp computes a piece of one KV head and streams its slots, kTile at a time, through a ring of its own in shared
// memory; warps never wait for one another, so that while one begins or ends a piece the others keep the memory busy.
// Query heads are the rows of the products: S = q k^T, then O += P v, both by mma.sync.m16n8k16. 16-byte chunks of a
// row lie in shared memory xor'ed with the row's number, which keeps ldmatrix free of bank conflicts.
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "Flash-Decoding"
// (2023).
#pragma once

#include "attention/decode_problem.h"
#include "common/gpu_rows.h"

#if defined(GRISTMILL_HAS_MMA)
namespace gristmill::gpu {

// kStages: tiles in the ring of a warp, one of them being computed. kTwoHalves: rows 8 to 15 hold query heads too.
template <typename T, int kDim, int kStages, bool kTwoHalves>
struct MmaDecode {
  static constexpr int kTile = 16;
  static constexpr int kChunks = kDim / 8;  // of 16 bytes, per row
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = 2 * kTile * kRowBytes;  // keys, then values
  static constexpr int kTiles = kSplit / kTile;
  static constexpr int kRingBytes = kStages * kTileBytes;
  static constexpr int kSharedBytes = kRingBytes + kSplit * 4;  // per warp
  static_assert(kSplit % 32 == 0);

  const DecodeProblem& p;
  const Piece& piece;
  int32_t kv_head;
  unsigned char* ring;
  int32_t* slots;  // of the piece, in shared memory; -1 where nothing is seen
  int lane, g, t;
  uint32_t q[kDim / 16][4];
  float sums[kDim / 8][4];
  float largest[2], total[2];

  __device__ MmaDecode(const DecodeProblem& problem, const Piece& where, int32_t head, unsigned char* memory)
      : p(problem),
        piece(where),
        kv_head(head),
        ring(memory),
        slots(reinterpret_cast<int32_t*>(memory + kRingBytes)),
        lane(lane_index()),
        g(lane / 4),
        t(lane % 4) {}

  __device__ void load_slots() {
    int32_t mine[kSplit / 32];
#pragma unroll
    for (int i = 0; i < kSplit / 32; ++i) {
      const int32_t position = piece.begin + i * 32 + lane;
      mine[i] = position < piece.end && position >= piece.first_seen ? piece.list[position] : -1;
    }
#pragma unroll
    for (int i = 0; i < kSplit / 32; ++i) slots[i * 32 + lane] = mine[i];
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
    const int tiles = (piece.end - piece.begin + kTile - 1) / kTile;
    int stage = 0, next_stage = kStages - 1;
    // Not unrolled: the code of several tiles does not fit into the instruction cache.
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      copy_async_wait<kStages - 2>();
      sync_warp();  // every lane's copies of the tile are there, and every lane is done with the one before
      if (tile + kStages - 1 < tiles) fetch(tile + kStages - 1, next_stage);
      copy_async_commit();
      compute(tile, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;
    }
    copy_async_wait<0>();
  }

  __device__ void write(int64_t number) const {
#pragma unroll
    for (int half = 0; half < (kTwoHalves ? 2 : 1); ++half) {
      float sum = total[half] + shuffle_xor(total[half], 1);
      sum += shuffle_xor(sum, 2);
      const int row = half * 8 + g;
      if (row >= p.group()) continue;
      const int64_t head = static_cast<int64_t>(kv_head) * p.group() + row;
      if (t == 0) {
        p.largest(number)[head] = largest[half];
        p.total(number)[head] = sum;
      }
      float* const to = p.sums(number, head) + 2 * t;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        store_pack<2>(to + 8 * n, Pack<float, 2>{sums[n][2 * half], sums[n][2 * half + 1]});
      }
    }
  }
};

template <typename T, int kDim, int kWarps, int kStages, bool kTwoHalves>
__global__ void __launch_bounds__(kWarps * 32) decode_mma_kernel(const DecodeProblem p) {
  using Decode = MmaDecode<T, kDim, kStages, kTwoHalves>;
  unsigned char* const memory = dynamic_shared<unsigned char>() + warp_index() * Decode::kSharedBytes;
  const int64_t pieces = p.kv_indptr[p.requests] / kSplit + p.requests;
  // Neighbouring warps read the same slots for neighbouring heads.
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t work = static_cast<int64_t>(blockIdx.x) * kWarps + warp_index(); work < pieces * p.num_kv_heads;
       work += step) {
    const int64_t number = work / p.num_kv_heads;
    const Piece piece = find_piece(p, static_cast<int32_t>(number));
    if (piece.begin >= piece.end || piece.first_seen >= piece.end) continue;
    sync_warp();  // the slots of the piece before have been read
    Decode decode(p, piece, static_cast<int32_t>(work % p.num_kv_heads), memory);
    decode.run();
    decode.write(number);
  }
}

}  // namespace gristmill::gpu
#endif
