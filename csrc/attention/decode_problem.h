// One call of decode attention on a GPU as plain numbers, and how it is cut into pieces.
#pragma once

#include "common/check.h"
#include "common/gpu.h"

namespace gristmill::gpu {

// Entries of a KV list that one piece covers, counted from the start of the request's list whatever the batch, the plan
// or the grid. Must be a multiple of every kernel's tile.
inline constexpr int kSplit = 512;
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

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
  int64_t max_pieces;
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

  // Request r's pieces are numbered from here on; some numbers stay unused.
  GRISTMILL_HOST_DEVICE int32_t first_piece(int32_t request) const { return kv_indptr[request] / kSplit + request; }
  // The first position that the query, which is the last of kv_len, sees.
  GRISTMILL_HOST_DEVICE int32_t first_seen(int32_t kv_len) const {
    return window_left >= 0 && kv_len - 1 > window_left ? kv_len - 1 - window_left : 0;
  }

  // A score as a power of 2.
  __device__ float scaled(float product) const {
    const float score = product * scale;
    return (logit_cap > 0 ? logit_cap * tanhf(score / logit_cap) : score) * kLog2E;
  }
};

// What one piece covers: positions [begin, end) of its request's list.
struct Piece {
  int32_t request, begin, end, first_seen;
  const int32_t* list;
};

// All lanes of a warp look at the requests together.
__device__ inline Piece find_piece(const DecodeProblem& p, int32_t number) {
  int32_t request = 0;
  for (int32_t first = 0; first < p.requests; first += kWarp) {
    const int32_t r = first + lane_index();
    const bool before =
        r < p.requests && p.first_piece(r) + (p.kv_indptr[r + 1] / kSplit - p.kv_indptr[r] / kSplit) + 1 <= number;
    const uint64_t lanes = ballot(before);
    request += __popcll(lanes);
    if (lanes != (kWarp == 64 ? ~uint64_t{0} : (uint64_t{1} << (kWarp % 64)) - 1)) break;
  }
  if (request >= p.requests) return {0, 0, 0, 0, nullptr};
  const int32_t at = p.kv_indptr[request], kv_len = p.kv_indptr[request + 1] - at;
  const int32_t begin = (number - p.first_piece(request)) * kSplit;
  const int32_t end = begin + kSplit < kv_len ? begin + kSplit : kv_len;
  return {request, begin, end, p.first_seen(kv_len), p.kv_indices + at};
}

}  // namespace gristmill::gpu
