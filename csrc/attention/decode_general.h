// The decode kernel for everything that decode_mma.h does not take: any types, widths and groups, on plain
// multiply-adds. A warp computes a piece for one query head: lanes take a slot each for the scores, and columns for the
// sums.
#pragma once

#include "attention/decode_problem.h"
#include "common/float8_scalar.h"
#include "common/gpu_rows.h"

namespace gristmill::gpu {

inline constexpr int kGeneralWarps = 4;
inline constexpr int kMaxHeadDim = 576;

template <typename T, typename C>
struct GeneralDecode {
  static constexpr int kColumns = (kMaxHeadDim + kWarp - 1) / kWarp;  // of the sums, per lane
  static constexpr int N = kPackElements<C>;

  const DecodeProblem& p;
  const Piece& piece;
  int32_t head;
  float* q;  // of this warp, in shared memory
  bool aligned;
  float sums[kColumns];
  float largest = -INFINITY, total = 0;

  __device__ const C* key(int32_t slot) const {
    return static_cast<const C*>(p.k) + slot * p.k_slot + head / p.group() * p.k_head;
  }
  __device__ const C* value(int32_t slot) const {
    return static_cast<const C*>(p.v) + slot * p.v_slot + head / p.group() * p.v_head;
  }

  __device__ float product(int32_t slot) const {
    const C* const row = key(slot);
    float sum = 0;
    for (int32_t first = 0; first < p.head_dim; first += N) {
      const auto pack = load_elements<N>(row, first, p.head_dim, aligned);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (first + i < p.head_dim) sum = fmaf(q[first + i], to_float(pack[i]), sum);
      }
    }
    return sum;
  }

  __device__ void run() {
    const int lane = lane_index();
    const T* const row = static_cast<const T*>(p.q) + piece.request * p.q_row + head * p.q_head;
    for (int32_t i = lane; i < p.head_dim; i += kWarp) q[i] = to_float(row[i]);
    sync_warp();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums[i] = 0;
    const int32_t first =
        piece.first_seen > piece.begin ? (piece.first_seen - piece.begin) / kWarp * kWarp + piece.begin : piece.begin;
    for (int32_t block = first; block < piece.end; block += kWarp) {
      const int32_t position = block + lane;
      const int32_t slot = position < piece.end && position >= piece.first_seen ? piece.list[position] : -1;
      const float score = slot >= 0 ? p.scaled(product(slot)) : -INFINITY;
      const float most = fmaxf(largest, warp_max(score));
      const float base = most == -INFINITY ? 0.0f : most;
      const float weight = exp2_fast(score - base), rescale = exp2_fast(largest - base);
      total = total * rescale + warp_sum(weight);
      largest = most;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sums[i] *= rescale;
      for (int j = 0; j < kWarp; ++j) {
        const float one = shuffle(weight, j);
        const int32_t from = shuffle(slot, j);
        if (from < 0) continue;  // what is not seen may be NaN
        const C* const values = value(from);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const int32_t column = i * kWarp + lane;
          if (column < p.head_dim_v) sums[i] = fmaf(one, to_float(values[column]), sums[i]);
        }
      }
    }
    sync_warp();  // q is written again for the next piece
  }

  __device__ void write(int64_t number) const {
    float* const to = p.sums(number, head);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int32_t column = i * kWarp + lane_index();
      if (column < p.head_dim_v) to[column] = sums[i];
    }
    if (lane_index() == 0) {
      p.largest(number)[head] = largest;
      p.total(number)[head] = total;
    }
  }
};

template <typename T, typename C>
__global__ void __launch_bounds__(kGeneralWarps* kWarp) decode_general_kernel(const DecodeProblem p, bool aligned) {
  GRISTMILL_SHARED(float, q, kGeneralWarps* kMaxHeadDim);
  wait_for_previous_kernel();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGeneralWarps;
  for (int64_t work = static_cast<int64_t>(blockIdx.x) * kGeneralWarps + warp_index();; work += step) {
    const Piece piece = find_piece(p, work / p.num_qo_heads);
    if (piece.request < 0) return;
    GeneralDecode<T, C> decode{
        p, piece, static_cast<int32_t>(work % p.num_qo_heads), q + warp_index() * kMaxHeadDim, aligned, {}};
    decode.run();
    decode.write(piece.number);
  }
}

}  // namespace gristmill::gpu
