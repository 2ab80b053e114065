// One call of decode attention on a GPU as plain numbers, and how it is cut into pieces.
#pragma once

#include "common/check.h"
#include "common/gpu.h"

namespace gristmill::gpu {

// Entries of a KV list that one piece covers, counted from the start of the request's list: fewer where the list is
// short, so that a few requests alone still keep many warps busy. Depends on the list's length alone, whatever the
// batch, the plan or the grid. All are multiples of every kernel's tile.
inline constexpr int kShift = 9, kLeastShift = 7;
inline constexpr int kSplit = 1 << kShift, kLeastSplit = 1 << kLeastShift;
GRISTMILL_HOST_DEVICE inline int32_t split_of(int32_t kv_len) {
  return kv_len <= 1024 ? kLeastSplit : kv_len <= 2048 ? 256 : kSplit;
}

// How pieces are numbered: those of request r from (kv_indptr[r] >> shift) + r * spare on; some numbers stay unused. A
// request has at most kv_len / kSplit + kSpare - 1 pieces.
struct PieceNumbers {
  int32_t shift, spare;
  static constexpr int32_t kSpare = 8;

  GRISTMILL_HOST_DEVICE int64_t first(int32_t at, int32_t request) const {
    return (at >> shift) + static_cast<int64_t>(request) * spare;
  }
  // Of the two ways that never give a number twice, the one that takes fewer for so many entries.
  static PieceNumbers of(int64_t entries, int64_t requests) {
    const PieceNumbers fine = {kLeastShift, 1}, coarse = {kShift, kSpare};
    return fine.most(entries, requests) <= coarse.most(entries, requests) ? fine : coarse;
  }
  int64_t most(int64_t all_entries, int64_t requests) const { return (all_entries >> shift) + requests * spare; }
};

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// The list of a request and its pieces: [low, high) of them have something that is seen.
struct Cuts {
  int32_t at, kv_len, split, first_seen, low, high;
};

struct DecodeProblem {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;  // may be null
  const int32_t* kv_indptr;
  const int32_t* kv_indices;
  const float* sinks;  // may be null
  // Per piece and query head: weighted sums [head_dim_v], then of all pieces the largest scores (as powers of 2), then
  // the sums of exponentials.
  float* partial;
  int64_t q_row, q_head, k_slot, k_head, v_slot, v_head, out_row, out_head, lse_row, lse_head;
  int64_t entries, max_pieces;  // of kv_indices, and numbers that they need at most
  PieceNumbers numbers;
  int32_t requests, num_slots, num_qo_heads, num_kv_heads, head_dim, head_dim_v;
  float scale, logit_cap, v_scale;
  int32_t window_left;

  GRISTMILL_HOST_DEVICE int32_t group() const { return num_qo_heads / num_kv_heads; }
  GRISTMILL_HOST_DEVICE float* sums(int64_t piece, int64_t head) const {
    return partial + (piece * num_qo_heads + head) * head_dim_v;
  }
  GRISTMILL_HOST_DEVICE float* largest(int64_t piece) const {
    return partial + max_pieces * num_qo_heads * head_dim_v + piece * num_qo_heads;
  }
  GRISTMILL_HOST_DEVICE float* total(int64_t piece) const { return largest(piece) + max_pieces * num_qo_heads; }

  // The first position that the query, which is the last of kv_len, sees.
  GRISTMILL_HOST_DEVICE int32_t first_seen(int32_t kv_len) const {
    return window_left >= 0 && kv_len - 1 > window_left ? kv_len - 1 - window_left : 0;
  }

  // Of a request; nothing from the number of requests on.
  GRISTMILL_HOST_DEVICE Cuts cuts(int32_t request) const {
    if (request >= requests) return {};
    const int32_t at = kv_indptr[request], kv_len = kv_indptr[request + 1] - at, split = split_of(kv_len);
    const int32_t seen = first_seen(kv_len);
    return {at, kv_len, split, seen, seen / split, (kv_len + split - 1) / split};
  }

  // A score as a power of 2.
  __device__ float scaled(float product) const {
    const float score = product * scale;
    return (logit_cap > 0 ? logit_cap * tanhf(score / logit_cap) : score) * kLog2E;
  }
};

// What one piece covers: positions [begin, end) of its request's list.
struct Piece {
  int32_t request, begin, end, first_seen;  // no request: there are not so many pieces
  int64_t number;
  const int32_t* list;
};

// The sum over this lane and those below.
__device__ inline int32_t sum_up_to_lane(int32_t value) {
#pragma unroll
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const int32_t below = shuffle_up(value, delta);
    if (lane_index() >= delta) value += below;
  }
  return value;
}

// The index-th piece that has something to see. All lanes of a warp look at the requests together.
__device__ inline Piece find_piece(const DecodeProblem& p, int64_t index) {
  for (int32_t first = 0; first < p.requests; first += kWarp) {
    const Cuts mine = p.cuts(first + lane_index());
    const int32_t end = sum_up_to_lane(mine.high - mine.low);
    const uint64_t beyond = ballot(end > index);
    if (beyond != 0) {
      const int lane = __ffsll(static_cast<long long>(beyond)) - 1, request = first + lane;
      const int32_t at = shuffle(mine.at, lane), kv_len = shuffle(mine.kv_len, lane), split = shuffle(mine.split, lane);
      const int32_t piece = static_cast<int32_t>(index) - shuffle(end, lane) + shuffle(mine.high, lane);
      const int32_t begin = piece * split, rest = kv_len - begin;
      return {request,
              begin,
              begin + (split < rest ? split : rest),
              shuffle(mine.first_seen, lane),
              p.numbers.first(at, request) + piece,
              p.kv_indices + at};
    }
    index -= shuffle(end, kWarp - 1);
  }
  return {-1, 0, 0, 0, 0, nullptr};
}

}  // namespace gristmill::gpu
