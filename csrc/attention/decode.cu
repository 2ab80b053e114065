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

constexpr int kMergeWarps = 4;
constexpr int kBlocksPerProcessor = 64;  // pieces beyond that many blocks are taken in turn

// Sums of one query head over the pieces of its request. Warp w has pieces w, w + kMergeWarps, ...; pieces are weighed
// kRound at a time, and everything that a thread reads of a round is asked for before the first answer is needed.
template <typename T>
struct Merge {
  static constexpr int kThreads = kMergeWarps * kWarp;
  static constexpr int kRound = kThreads;
  static constexpr int kAhead = 8;
  static constexpr int kColumns = 4;  // per lane and step

  const DecodeProblem& p;
  int64_t first_piece;
  int32_t head;
  float* weights;  // of a round, in shared memory
  float* scratch;  // of kMergeWarps

  // The largest of a value in every thread.
  __device__ float largest_of(float value) const {
    value = warp_max(value);
    sync_block();  // what the scratch held has been read
    if (lane_index() == 0) scratch[warp_index()] = value;
    sync_block();
    for (int w = 0; w < kMergeWarps; ++w) value = fmaxf(value, scratch[w]);
    return value;
  }
  __device__ float sum_of(float value) const {
    value = warp_sum(value);
    sync_block();
    if (lane_index() == 0) scratch[warp_index()] = value;
    sync_block();
    value = scratch[0];
    for (int w = 1; w < kMergeWarps; ++w) value += scratch[w];
    return value;
  }

  // Adds pieces [begin, end), whose weights are known, to this warp's sums of columns [first, first + kColumns).
  __device__ void add(int32_t begin, int32_t end, int32_t first, const Pack<float, kColumns> (&ahead)[kAhead],
                      float (&sums)[kColumns]) const {
    for (int32_t base = begin + warp_index(); base < end; base += kMergeWarps * kAhead) {
      Pack<float, kColumns> parts[kAhead];
      read(base, end, first, parts, base == begin + warp_index() ? &ahead : nullptr);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t piece = base + i * kMergeWarps;
        const float weight = piece < end ? weights[piece - begin] : 0.0f;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[j] = weight != 0 ? fmaf(parts[i][j], weight, sums[j]) : sums[j];
      }
    }
  }
  __device__ void read(int32_t base, int32_t end, int32_t first, Pack<float, kColumns> (&parts)[kAhead],
                       const Pack<float, kColumns> (*known)[kAhead] = nullptr) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int32_t piece = base + i * kMergeWarps;
      if (known != nullptr) {
        parts[i] = (*known)[i];
      } else if (piece < end && first < p.head_dim_v) {
        parts[i] = load_pack<kColumns>(p.sums(first_piece + piece, head) + first);
      }
    }
  }
};

// One block per request and query head.
template <typename T>
__global__ void __launch_bounds__(Merge<T>::kThreads) decode_merge_kernel(const DecodeProblem p) {
  using M = Merge<T>;
  constexpr int kSteps = (kMaxHeadDim + M::kColumns * kWarp - 1) / (M::kColumns * kWarp);
  GRISTMILL_SHARED(float, partial, kMergeWarps* kMaxHeadDim);
  GRISTMILL_SHARED(float, weights, M::kRound);
  GRISTMILL_SHARED(float, scratch, kMergeWarps);
  const int32_t request = static_cast<int32_t>(blockIdx.x), head = static_cast<int32_t>(blockIdx.y);
  const int32_t kv_len = p.kv_indptr[request + 1] - p.kv_indptr[request];
  const int32_t low = p.first_seen(kv_len) / kSplit, high = (kv_len + kSplit - 1) / kSplit;
  const M merge = {p, p.first_piece(request), head, weights, scratch};
  float largest = p.sinks != nullptr ? p.sinks[head] * kLog2E : -INFINITY;
  float total = largest == -INFINITY ? 0.0f : 1.0f;
  float sums[kSteps][M::kColumns] = {};
  for (int32_t begin = low; begin < high; begin += M::kRound) {
    const int32_t end = begin + M::kRound < high ? begin + M::kRound : high, mine = begin + thread_index();
    const float one = mine < end ? p.largest(merge.first_piece + mine)[head] : -INFINITY;
    const float part = mine < end ? p.total(merge.first_piece + mine)[head] : 0.0f;
    Pack<float, M::kColumns> ahead[M::kAhead];
    merge.read(begin + warp_index(), end, lane_index() * M::kColumns, ahead);
    const float most = fmaxf(largest, merge.largest_of(one));
    const float base = most == -INFINITY ? 0.0f : most;
    const float weight = exp2_fast(one - base), rescale = exp2_fast(largest - base);
    weights[thread_index()] = weight;
    total = total * rescale + merge.sum_of(part * weight);  // its barriers publish the weights too
    largest = most;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int32_t first = (step * kWarp + lane_index()) * M::kColumns;
      if (first >= p.head_dim_v) break;
#pragma unroll
      for (int j = 0; j < M::kColumns; ++j) sums[step][j] *= rescale;
      if (step > 0) merge.read(begin + warp_index(), end, first, ahead);
      merge.add(begin, end, first, ahead, sums[step]);
    }
    sync_block();  // the weights have been read
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int32_t first = (step * kWarp + lane_index()) * M::kColumns;
    if (first >= p.head_dim_v) break;
#pragma unroll
    for (int j = 0; j < M::kColumns; ++j) partial[warp_index() * kMaxHeadDim + first + j] = sums[step][j];
  }
  sync_block();
  const float factor = p.v_scale / (total == 0 ? 1.0f : total);
  T* const out = static_cast<T*>(p.out) + request * p.out_row + head * p.out_head;
  for (int32_t column = thread_index(); column < p.head_dim_v; column += M::kThreads) {
    float sum = partial[column];
    for (int w = 1; w < kMergeWarps; ++w) sum += partial[w * kMaxHeadDim + column];
    out[column] = from_float<T>(sum * factor);
  }
  if (p.lse != nullptr && thread_index() == 0) {
    p.lse[request * p.lse_row + head * p.lse_head] = total == 0 ? -INFINITY : (largest + log2f(total)) * kLn2;
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
    launch(decode_mma_kernel<T, kDim, kWarps, kStages, kTwoHalves>, grid_for(launch, p.max_pieces * p.num_kv_heads),
           dim3(kWarps * 32), MmaDecode<T, kDim, kWarps, kStages, kTwoHalves>::kSharedBytes, p);
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
    launch(decode_merge_kernel<T>, dim3(p.requests, p.num_qo_heads), dim3(kMergeWarps * kWarp), 0, p);
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("decode_attention", TORCH_BOX(&gristmill::gpu::decode_attention));
}
