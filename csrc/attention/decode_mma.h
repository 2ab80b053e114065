// The decode kernel for tensor cores: 16-bit data, heads of 64, 128 or 256 elements, at most 16 query heads per KV
// head.
//
// A block is one warp. It computes a piece of one KV head and streams its slots, kTile at a time, through a ring in
// shared memory; while it begins or ends a piece, others of its multiprocessor keep the memory busy.
// Query heads are the rows of the products: S = q k^T, then O += P v, both by mma.sync.m16n8k16. 16-byte chunks of a
// row lie in shared memory xor'ed with the row's number, which keeps ldmatrix free of bank conflicts.
//
// What a tile takes from its arrival to the next one's bounds the last pieces of a call, and all of a small one: so
// fragments are loaded ahead of the instructions that wait for others, and sums of products are two short chains.
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
  static constexpr int kRingBytes = kStages * kTileBytes;
  static constexpr int kSharedBytes = kRingBytes + kSplit * 4;
  static constexpr int kSteps = kDim / 16;                // of a product with keys, and pairs of columns of values
  static constexpr int kAhead = kDim > 128 ? 1 : kSteps;  // fragments in registers at once
  static constexpr uint32_t kAllSeen = (1u << kTile) - 1;
  static_assert(kSplit % 32 == 0 && kSteps % kAhead == 0);

  const DecodeProblem& p;
  const Piece& piece;
  int32_t kv_head;
  unsigned char* ring;
  int32_t* slots;  // of the piece, in shared memory; -1 where nothing is seen
  int lane, g, t;
  uint32_t q[kSteps][4];
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
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = g + i % 2 * 8, column = 16 * k + i / 2 * 8 + 2 * t;
        const bool there = (kTwoHalves || i % 2 == 0) && row < p.group();
        q[k][i] = there ? *reinterpret_cast<const uint32_t*>(base + row * p.q_head + column) : 0u;
      }
    }
  }

  __device__ static int chunk_offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) * 16); }

  // Starts the copies of a tile into a stage of the ring. For a slot that is not seen slot 0 is read.
  __device__ void fetch(int tile, int stage) const {
    constexpr int kRows = kTile * kChunks / 32;  // of this lane, one chunk each
    unsigned char* const keys = ring + stage * kTileBytes;
    unsigned char* const values = keys + kTile * kRowBytes;
    const int chunk = lane % kChunks, first_row = lane / kChunks * kRows;
    const unsigned char* const key =
        reinterpret_cast<const unsigned char*>(static_cast<const T*>(p.k) + kv_head * p.k_head) + chunk * 16;
    const unsigned char* const value =
        reinterpret_cast<const unsigned char*>(static_cast<const T*>(p.v) + kv_head * p.v_head) + chunk * 16;
    const uint32_t key_step = static_cast<uint32_t>(p.k_slot) * 2, value_step = static_cast<uint32_t>(p.v_slot) * 2;
    Pack<int32_t, 4> from[kRows / 4];
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) from[i] = load_pack<4>(slots + tile * kTile + first_row + i * 4);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t slot = from[i / 4][i % 4];
      const uint64_t at = static_cast<uint32_t>(slot < 0 ? 0 : slot);
      const int offset = chunk_offset(first_row + i, chunk);
      copy_async_16(keys + offset, key + at * key_step);
      copy_async_16(values + offset, value + at * value_step);
    }
  }

  // Fragments first to first + kAhead - 1 of the keys or of the values of a tile.
  __device__ void load_keys(const unsigned char* keys, int first, uint32_t (&b)[kAhead][4]) const {
    const int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) load_matrix_4(b[k], keys + chunk_offset(row, 2 * (first + k) + half));
  }
  __device__ void load_values(const unsigned char* values, int first, uint32_t (&b)[kAhead][4]) const {
    const int row = lane / 8 % 2 * 8 + lane % 8, half = lane / 16;
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load_matrix_4_transposed(b[n], values + chunk_offset(row, 2 * (first + n) + half));
  }

  // Scores of a tile: s[n] are the columns of slots 8n to 8n + 7.
  __device__ void multiply_keys(const unsigned char* keys, float (&s)[2][4]) const {
    float odd[2][4] = {};
#pragma unroll
    for (int first = 0; first < kSteps; first += kAhead) {
      uint32_t b[kAhead][4];
      load_keys(keys, first, b);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        float (&to)[2][4] = k % 2 == 0 ? s : odd;
        multiply_16x8x16<T>(to[0], q[first + k], b[k][0], b[k][1]);
        multiply_16x8x16<T>(to[1], q[first + k], b[k][2], b[k][3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i / 4][i % 4] += odd[i / 4][i % 4];
  }

  // `b` holds the first fragments.
  __device__ void multiply_values(const unsigned char* values, const uint32_t (&weights)[4], uint32_t (&b)[kAhead][4]) {
#pragma unroll
    for (int first = 0; first < kSteps; first += kAhead) {
      if (first > 0) load_values(values, first, b);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        multiply_16x8x16<T>(sums[2 * (first + n)], weights, b[n][0], b[n][1]);
        multiply_16x8x16<T>(sums[2 * (first + n) + 1], weights, b[n][2], b[n][3]);
      }
    }
  }

  // Zeros over the values that are not seen, which may be NaN.
  __device__ void clear_values(unsigned char* values, uint32_t mask) const {
#pragma unroll 1
    for (int i = lane; i < kTile * kChunks; i += 32) {
      if ((mask >> i / kChunks & 1) == 0)
        store_pack<4>(reinterpret_cast<uint32_t*>(values) + i * 4, Pack<uint32_t, 4>{});
    }
    sync_warp();
  }

  // Turns products into scores as powers of 2.
  __device__ void scale(float (&s)[2][4]) const {
    if (p.logit_cap > 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = p.scaled(s[i / 4][i % 4]);
    } else {
      const float factor = p.scale * kLog2E;
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i / 4][i % 4] *= factor;
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
        score = (mask >> column & 1) != 0 ? score : -INFINITY;
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
    const uint32_t mask = static_cast<uint32_t>(ballot(slots[tile * kTile + lane % kTile] >= 0)) & kAllSeen;
    unsigned char* const keys = ring + stage * kTileBytes;
    unsigned char* const values = keys + kTile * kRowBytes;
    float s[2][4] = {};
    multiply_keys(keys, s);
    if (mask != kAllSeen) clear_values(values, mask);
    uint32_t b[kAhead][4];
    load_values(values, 0, b);
    scale(s);
    soften(s, mask);
    // Of the weights of rows 8 to 15 nothing is used where they hold no query heads.
    const uint32_t weights[4] = {pack_two<T>(s[0][0], s[0][1]), kTwoHalves ? pack_two<T>(s[0][2], s[0][3]) : 0u,
                                 pack_two<T>(s[1][0], s[1][1]), kTwoHalves ? pack_two<T>(s[1][2], s[1][3]) : 0u};
    multiply_values(values, weights, b);
  }

  __device__ void run() {
    load_slots();
    const int skipped = piece.first_seen > piece.begin ? (piece.first_seen - piece.begin) / kTile : 0;
    const int tiles = (piece.end - piece.begin + kTile - 1) / kTile;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (skipped + i < tiles) fetch(skipped + i, i);
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
    for (int tile = skipped; tile < tiles; ++tile) {
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

  __device__ void write() const {
#pragma unroll
    for (int half = 0; half < (kTwoHalves ? 2 : 1); ++half) {
      float sum = total[half] + shuffle_xor(total[half], 1);
      sum += shuffle_xor(sum, 2);
      const int row = half * 8 + g;
      if (row >= p.group()) continue;
      const int64_t head = static_cast<int64_t>(kv_head) * p.group() + row;
      if (t == 0) {
        p.largest(piece.number)[head] = largest[half];
        p.total(piece.number)[head] = sum;
      }
      float* const to = p.sums(piece.number, head) + 2 * t;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        store_pack<2>(to + 8 * n, Pack<float, 2>{sums[n][2 * half], sums[n][2 * half + 1]});
      }
    }
  }
};

template <typename T, int kDim, int kStages, bool kTwoHalves>
__global__ void __launch_bounds__(32) decode_mma_kernel(const DecodeProblem p) {
  using Decode = MmaDecode<T, kDim, kStages, kTwoHalves>;
  wait_for_previous_kernel();
  // Neighbouring blocks read the same slots for neighbouring heads.
  for (int64_t work = blockIdx.x;; work += gridDim.x) {
    const Piece piece = find_piece(p, work / p.num_kv_heads);
    if (piece.request < 0) return;
    sync_warp();  // the slots of the piece before have been read
    Decode decode(p, piece, static_cast<int32_t>(work % p.num_kv_heads), dynamic_shared<unsigned char>());
    decode.run();
    decode.write();
  }
}

}  // namespace gristmill::gpu
#endif
