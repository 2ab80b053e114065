// Decode attention on GPUs: one kernel computes pieces of the KV lists, a second one merges the pieces of each query
// head in ascending order. The cuts depend on a request's own list alone, so a row is the same bits whatever its
// neighbours.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "attention/attention.h"
#include "attention/decode_general.h"
#include "attention/decode_mma.h"
#include "common/gpu_launch.h"

namespace gristmill::gpu {
namespace {

constexpr int kBlocksPerProcessor = 64;  // pieces beyond that many blocks are taken in turn

// One block per request and query head. Pieces fall into kGroups groups, piece i into group i % kGroups; groups are
// summed in the order of their pieces, then added in the order of the groups. So the result does not depend on how many
// warps share the groups. Everything that a thread reads is asked for before the first answer is needed.
constexpr int kGroups = 16;
constexpr int kColumns = 4;  // per lane and step
constexpr int kRound = 128;  // pieces weighed at once

struct MergeShape {
  int32_t low, high;  // pieces of the request that have something to merge
  int64_t first_piece;
  int32_t head;
};

// Weights of pieces [begin, end) relative to the largest score so far, into shared memory; returns the factor that
// brings earlier results to it, and updates the total. Sums are taken over the first kRound threads alone, warp by
// warp.
template <int kWarps>
__device__ float weigh(const DecodeProblem& p, const MergeShape& shape, int32_t begin, int32_t end, float* weights,
                       float* scratch, float& largest, float& total) {
  constexpr int kUsed = kRound / kWarp;
  const int32_t mine = begin + thread_index();
  const float one = mine < end ? p.largest(shape.first_piece + mine)[shape.head] : -INFINITY;
  const float part = mine < end ? p.total(shape.first_piece + mine)[shape.head] : 0.0f;
  const float most_of_warp = warp_max(one);
  if (lane_index() == 0 && warp_index() < kUsed) scratch[warp_index()] = most_of_warp;
  sync_block();
  float most = largest;
  for (int w = 0; w < kUsed; ++w) most = fmaxf(most, scratch[w]);
  const float base = most == -INFINITY ? 0.0f : most;
  const float rescale = exp2_fast(largest - base), weight = exp2_fast(one - base);
  if (thread_index() < kRound) weights[thread_index()] = weight;
  const float sum = warp_sum(part * weight);
  if (lane_index() == 0 && warp_index() < kUsed) scratch[kUsed + warp_index()] = sum;
  sync_block();
  total *= rescale;
  for (int w = 0; w < kUsed; ++w) total += scratch[kUsed + w];
  largest = most;
  return rescale;
}

template <typename T, int kWarps, int kSteps>
__global__ void __launch_bounds__(kWarps* kWarp) decode_merge_kernel(const DecodeProblem p) {
  constexpr int kThreads = kWarps * kWarp, kMine = kGroups / kWarps;  // groups of a warp
  constexpr int kStride = kSteps == 1 ? kColumns * kWarp : kMaxHeadDim;
  constexpr int kAhead = 8 / kMine;  // parts of a group that are asked for before their weights are known
  static_assert(kRound <= kThreads && kRound % kGroups == 0 && kGroups % kWarps == 0);
  GRISTMILL_SHARED(float, partial, kGroups* kStride);
  GRISTMILL_SHARED(float, weights, kRound);
  GRISTMILL_SHARED(float, scratch, 2 * kRound / kWarp);
  wait_for_previous_kernel();
  const int32_t request = static_cast<int32_t>(blockIdx.x), head = static_cast<int32_t>(blockIdx.y);
  const int32_t kv_len = p.kv_indptr[request + 1] - p.kv_indptr[request];
  const MergeShape shape = {p.first_seen(kv_len) / kSplit, (kv_len + kSplit - 1) / kSplit, p.first_piece(request),
                            head};
  float largest = p.sinks != nullptr ? p.sinks[head] * kLog2E : -INFINITY;
  float total = largest == -INFINITY ? 0.0f : 1.0f;
  float sums[kMine][kSteps][kColumns] = {};
  for (int32_t begin = shape.low; begin < shape.high; begin += kRound) {
    const int32_t end = begin + kRound < shape.high ? begin + kRound : shape.high;
    const auto part_of = [&](int group, int i, int step) {
      const int32_t piece = begin + i * kGroups + group * kWarps + warp_index();
      const int32_t first = (step * kWarp + lane_index()) * kColumns;
      return piece < end && first < p.head_dim_v ? load_pack<kColumns>(p.sums(shape.first_piece + piece, head) + first)
                                                 : Pack<float, kColumns>{};
    };
    Pack<float, kColumns> ahead[kMine][kAhead];
#pragma unroll
    for (int group = 0; group < kMine; ++group) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) ahead[group][i] = part_of(group, i, 0);
    }
    const float rescale = weigh<kWarps>(p, shape, begin, end, weights, scratch, largest, total);
#pragma unroll
    for (int group = 0; group < kMine; ++group) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[group][step][j] *= rescale;
#pragma unroll
        for (int i = 0; i < kRound / kGroups; ++i) {
          const int32_t piece = begin + i * kGroups + group * kWarps + warp_index();
          if (piece >= end) break;
          const auto part = step == 0 && i < kAhead ? ahead[group][i] : part_of(group, i, step);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            sums[group][step][j] = fmaf(part[j], weights[piece - begin], sums[group][step][j]);
          }
        }
      }
    }
    sync_block();  // the weights have been read
  }
#pragma unroll
  for (int group = 0; group < kMine; ++group) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int32_t first = (step * kWarp + lane_index()) * kColumns;
      if (first >= p.head_dim_v) break;
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        partial[(group * kWarps + warp_index()) * kStride + first + j] = sums[group][step][j];
    }
  }
  sync_block();
  const float factor = p.v_scale / (total == 0 ? 1.0f : total);
  T* const out = static_cast<T*>(p.out) + request * p.out_row + head * p.out_head;
  for (int32_t column = thread_index(); column < p.head_dim_v; column += kThreads) {
    float sum = partial[column];
#pragma unroll
    for (int group = 1; group < kGroups; ++group) sum += partial[group * kStride + column];
    out[column] = from_float<T>(sum * factor);
  }
  if (p.lse != nullptr && thread_index() == 0) {
    p.lse[request * p.lse_row + head * p.lse_head] = total == 0 ? -INFINITY : (largest + log2f(total)) * kLn2;
  }
}

// The same for heads that one warp holds at once, with a warp per request and query head and no barrier: faster where
// there are few pieces. Every sum is taken in the same order as there.
constexpr int kNarrowWarps = 4;

template <typename T>
struct NarrowMerge {
  static constexpr int kChunks = kRound / kWarp;  // of a round, a piece per lane

  const DecodeProblem& p;
  MergeShape shape;
  float largest, total;
  float sums[kGroups][kColumns];

  __device__ int32_t column() const { return lane_index() * kColumns; }

  // Weights of the pieces of a round: this lane's of each chunk.
  __device__ void weigh(int32_t begin, int32_t end, float (&weights)[kChunks]) {
    float part[kChunks], most = largest;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int32_t mine = begin + c * kWarp + lane_index();
      weights[c] = mine < end ? p.largest(shape.first_piece + mine)[shape.head] : -INFINITY;
      part[c] = mine < end ? p.total(shape.first_piece + mine)[shape.head] : 0.0f;
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) most = fmaxf(most, begin + c * kWarp < end ? warp_max(weights[c]) : -INFINITY);
    const float base = most == -INFINITY ? 0.0f : most;
    const float rescale = exp2_fast(largest - base);
    total *= rescale;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      weights[c] = exp2_fast(weights[c] - base);
      if (begin + c * kWarp < end) total += warp_sum(part[c] * weights[c]);
    }
    largest = most;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[group][j] *= rescale;
    }
  }

  // Half of the groups at a time, so that their parts are all asked for before the first is needed.
  __device__ void add(int32_t begin, int32_t end, const float (&weights)[kChunks]) {
    constexpr int kHalf = kGroups / 2;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (begin + c * kWarp >= end) break;
#pragma unroll 1
      for (int block = 0; block < kWarp; block += kGroups) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t first = begin + c * kWarp + block + half * kHalf;
          Pack<float, kColumns> parts[kHalf];
#pragma unroll
          for (int i = 0; i < kHalf; ++i) {
            const bool there = first + i < end && column() < p.head_dim_v;
            parts[i] = there ? load_pack<kColumns>(p.sums(shape.first_piece + first + i, shape.head) + column())
                             : Pack<float, kColumns>{};
          }
#pragma unroll
          for (int i = 0; i < kHalf; ++i) {
            const float weight = shuffle(weights[c], block + half * kHalf + i);
            if (first + i >= end) break;
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
              float& sum = sums[half * kHalf + i][j];
              sum = fmaf(parts[i][j], weight, sum);
            }
          }
        }
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kNarrowWarps* kWarp) decode_merge_narrow_kernel(const DecodeProblem p) {
  wait_for_previous_kernel();
  const int32_t request = static_cast<int32_t>(blockIdx.x);
  const int32_t head = static_cast<int32_t>(blockIdx.y) * kNarrowWarps + warp_index();
  if (head >= p.num_qo_heads) return;
  const int32_t kv_len = p.kv_indptr[request + 1] - p.kv_indptr[request];
  const MergeShape shape = {p.first_seen(kv_len) / kSplit, (kv_len + kSplit - 1) / kSplit, p.first_piece(request),
                            head};
  NarrowMerge<T> merge = {p, shape, p.sinks != nullptr ? p.sinks[head] * kLog2E : -INFINITY, 0, {}};
  merge.total = merge.largest == -INFINITY ? 0.0f : 1.0f;
  for (int32_t begin = shape.low; begin < shape.high; begin += kRound) {
    const int32_t end = begin + kRound < shape.high ? begin + kRound : shape.high;
    float weights[NarrowMerge<T>::kChunks];
    merge.weigh(begin, end, weights);
    merge.add(begin, end, weights);
  }
  const float factor = p.v_scale / (merge.total == 0 ? 1.0f : merge.total);
  if (merge.column() < p.head_dim_v) {
    T* const out = static_cast<T*>(p.out) + request * p.out_row + head * p.out_head + merge.column();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float sum = merge.sums[0][j];
#pragma unroll
      for (int group = 1; group < kGroups; ++group) sum += merge.sums[group][j];
      out[j] = from_float<T>(sum * factor);
    }
  }
  if (p.lse != nullptr && lane_index() == 0) {
    p.lse[request * p.lse_row + head * p.lse_head] =
        merge.total == 0 ? -INFINITY : (merge.largest + log2f(merge.total)) * kLn2;
  }
}

template <typename T, int kSteps>
void merge(const Launch& launch, const DecodeProblem& p) {
  constexpr int kWarps = 512 / kWarp;
  if (kSteps == 1 && p.max_pieces <= 32 * static_cast<int64_t>(p.requests)) {
    const dim3 grid(p.requests, (p.num_qo_heads + kNarrowWarps - 1) / kNarrowWarps);
    launch.early<decode_merge_narrow_kernel<T>>(grid, dim3(kNarrowWarps * kWarp), p);
  } else {
    launch.early<decode_merge_kernel<T, kWarps, kSteps>>(dim3(p.requests, p.num_qo_heads), dim3(kWarps * kWarp), p);
  }
}

// Blocks that have work at most, given how many pieces there can be.
dim3 grid_for(const Launch& launch, int64_t work) {
  const int64_t most = static_cast<int64_t>(launch.processors()) * kBlocksPerProcessor;
  return dim3(static_cast<unsigned>(work < most ? work : most));
}

template <typename T, typename C>
void run_general(const Launch& launch, const DecodeProblem& p, bool aligned) {
  const int64_t work = (p.max_pieces * p.num_qo_heads + kGeneralWarps - 1) / kGeneralWarps;
  launch(decode_general_kernel<T, C>, grid_for(launch, work), dim3(kGeneralWarps * kWarp), 0, p, aligned);
}

#if defined(GRISTMILL_HAS_MMA)
template <typename T, int kDim, int kWarps, int kStages>
void run_mma(const Launch& launch, const DecodeProblem& p) {
  const auto start = [&](auto two_halves) {
    constexpr bool kTwoHalves = decltype(two_halves)::value;
    launch(decode_mma_kernel<T, kDim, kWarps, kStages, kTwoHalves>,
           grid_for(launch, (p.max_pieces * p.num_kv_heads + kWarps - 1) / kWarps), dim3(kWarps * 32),
           kWarps * MmaDecode<T, kDim, kStages, kTwoHalves>::kSharedBytes, p);
  };
  if (p.group() > 8) {
    start(std::true_type{});
  } else {
    start(std::false_type{});
  }
}
#endif

// Whether the tensor-core kernel takes the call, and if so runs it.
template <typename T>
bool try_mma(const Launch& launch, const DecodeProblem& p, bool aligned) {
#if defined(GRISTMILL_HAS_MMA)
  if constexpr (!std::is_same_v<T, float>) {
    const bool pairs = p.q_row % 2 == 0 && p.q_head % 2 == 0 && reinterpret_cast<uintptr_t>(p.q) % 4 == 0;
    if (!aligned || !pairs || p.head_dim != p.head_dim_v || p.group() > 16) return false;
    switch (p.head_dim) {
      case 64:
        return run_mma<T, 64, 4, 4>(launch, p), true;
      case 128:
        return run_mma<T, 128, 4, 3>(launch, p), true;
      case 256:
        return run_mma<T, 256, 4, 3>(launch, p), true;
      default:
        return false;
    }
  }
#endif
  (void)launch, (void)p, (void)aligned;
  return false;
}

void check_heads(const Tensor& t, const char* name) {
  check_dim(t, 3, "decode_attention", name);
  check_inner(t, "decode_attention", name);
}

DecodeProblem problem_of(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k,
                         const Tensor& v, const Tensor& kv_indptr, const Tensor& kv_indices,
                         const OptionalTensor& sinks) {
  constexpr const char* op = "decode_attention";
  check_heads(q, "q");
  check_heads(k, "k_cache");
  check_heads(v, "v_cache");
  check_heads(out, "out");
  check_size(k, 2, q.size(2), op, "k_cache");
  check_size(v, 0, k.size(0), op, "v_cache");
  check_size(v, 1, k.size(1), op, "v_cache");
  check_dtype(v, k.scalar_type(), op, "v_cache");
  STD_TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, op, ": q must have a multiple of the ", k.size(1),
                  " heads of k_cache, got ", q.size(1));
  STD_TORCH_CHECK(q.size(2) <= kMaxHeadDim && v.size(2) <= kMaxHeadDim && v.size(2) % 4 == 0, op,
                  ": heads must have at most ", kMaxHeadDim, " elements, those of v_cache a multiple of 4");
  check_size(out, 0, q.size(0), op, "out");
  check_size(out, 1, q.size(1), op, "out");
  check_size(out, 2, v.size(2), op, "out");
  check_dtype(out, q.scalar_type(), op, "out");
  check_vector(kv_indptr, ScalarType::Int, q.size(0) + 1, op, "kv_indptr");
  check_vector(kv_indices, ScalarType::Int, -1, op, "kv_indices");
  DecodeProblem p = {};
  p.q = q.const_data_ptr(), p.k = k.const_data_ptr(), p.v = v.const_data_ptr(), p.out = out.mutable_data_ptr();
  p.kv_indptr = data<int32_t>(kv_indptr), p.kv_indices = data<int32_t>(kv_indices);
  p.q_row = q.stride(0), p.q_head = q.stride(1);
  p.k_slot = k.stride(0), p.k_head = k.stride(1);
  p.v_slot = v.stride(0), p.v_head = v.stride(1);
  p.out_row = out.stride(0), p.out_head = out.stride(1);
  p.requests = static_cast<int32_t>(q.size(0));
  p.num_slots = static_cast<int32_t>(k.size(0));
  p.num_qo_heads = static_cast<int32_t>(q.size(1)), p.num_kv_heads = static_cast<int32_t>(k.size(1));
  p.head_dim = static_cast<int32_t>(q.size(2)), p.head_dim_v = static_cast<int32_t>(v.size(2));
  if (lse) {
    check_dim(*lse, 2, op, "lse");
    check_dtype(*lse, ScalarType::Float, op, "lse");
    check_size(*lse, 0, q.size(0), op, "lse");
    check_size(*lse, 1, q.size(1), op, "lse");
    p.lse = mutable_data<float>(*lse), p.lse_row = lse->stride(0), p.lse_head = lse->stride(1);
  }
  if (sinks) {
    check_vector(*sinks, ScalarType::Float, q.size(1), op, "sinks");
    p.sinks = data<float>(*sinks);
  }
  return p;
}

}  // namespace

void decode_attention(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& kv_indptr, const Tensor& kv_indices,
                      const OptionalTensor& sinks, const OptionalTensor& /*plan*/, const OptionalTensor& workspace,
                      double sm_scale, double logit_cap, int64_t window_left, double k_scale, double v_scale) {
  constexpr const char* op = "decode_attention";
  DecodeProblem p = problem_of(out, lse, q, k_cache, v_cache, kv_indptr, kv_indices, sinks);
  p.scale = static_cast<float>(sm_scale * k_scale), p.logit_cap = static_cast<float>(logit_cap);
  p.v_scale = static_cast<float>(v_scale);
  p.window_left = static_cast<int32_t>(window_left < -1 ? -1 : window_left > INT32_MAX ? -1 : window_left);
  if (p.requests == 0 || p.num_qo_heads == 0) return;
  p.max_pieces = kv_indices.size(0) / kSplit + p.requests;
  const int64_t needed = p.max_pieces * p.num_qo_heads * (p.head_dim_v + 2);
  const bool given = workspace && workspace->numel() >= needed && steps_by(*workspace, 16);
  const Tensor scratch = given ? *workspace : torch::stable::new_empty(q, {needed}, ScalarType::Float);
  p.partial = mutable_data<float>(scratch);
  const bool aligned = steps_by(k_cache, 16) && steps_by(v_cache, 16);
  const Launch launch(q);
  dispatch_float(q.scalar_type(), op, "q", [&](auto tag) {
    using T = decltype(tag);
    if (is_float8(k_cache.scalar_type())) {
      dispatch_float8(k_cache.scalar_type(), [&](auto cache) { run_general<T, decltype(cache)>(launch, p, aligned); });
    } else {
      check_dtype(k_cache, q.scalar_type(), op, "k_cache");
      if (!try_mma<T>(launch, p, aligned)) run_general<T, T>(launch, p, aligned);
    }
    constexpr int kStep = kColumns * kWarp;
    if (p.head_dim_v <= kStep) {
      merge<T, 1>(launch, p);
    } else {
      merge<T, (kMaxHeadDim + kStep - 1) / kStep>(launch, p);
    }
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("decode_attention", TORCH_BOX(&gristmill::gpu::decode_attention));
}
