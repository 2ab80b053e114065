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

// Pieces beyond so many warps are taken in turn. Several times as many as run at once, so that it is free warps that
// take the next piece; not more, because a captured graph launches all that its capacity may need.
constexpr int kWarpsPerProcessor = 32;

// The pieces of one request and query head. Piece i from the first one that is seen on falls into group i % kGroups;
// groups are summed in the order of their pieces, then added in the order of the groups, by whichever kernel.
//
// These kernels begin with nothing of their code in any cache, so it is short: loops that are not needed for having
// many loads under way are not unrolled.
constexpr int kGroups = 16;
constexpr int kColumns = 4;  // per lane and step
constexpr int kStep = kColumns * kWarp;
using Part = Pack<float, kColumns>;

struct MergeRow {
  const DecodeProblem& p;
  int32_t request, head, pieces;
  const float *sums, *scores, *totals;  // of the first piece
  uint32_t step;                        // of sums, from piece to piece

  __device__ static MergeRow of(const DecodeProblem& p, int32_t request, int32_t head) {
    const Cuts cuts = p.cuts(request);
    const int64_t first = p.numbers.first(cuts.at, request) + cuts.low;
    const float *const sums = p.sums(first, head), *const scores = p.largest(first) + head;
    return {p,
            request,
            head,
            cuts.high - cuts.low,
            sums,
            scores,
            scores + p.max_pieces * p.num_qo_heads,
            static_cast<uint32_t>(p.num_qo_heads) * static_cast<uint32_t>(p.head_dim_v)};
  }

  __device__ float largest_of(int32_t piece) const {
    return scores[static_cast<uint64_t>(static_cast<uint32_t>(piece)) * static_cast<uint32_t>(p.num_qo_heads)];
  }
  __device__ float total_of(int32_t piece) const {
    return totals[static_cast<uint64_t>(static_cast<uint32_t>(piece)) * static_cast<uint32_t>(p.num_qo_heads)];
  }
  // Zeros where there is no such piece.
  __device__ Part part(int32_t piece, int32_t column) const {
    const uint64_t at = static_cast<uint64_t>(static_cast<uint32_t>(piece)) * step;
    return piece < pieces && column < p.head_dim_v ? load_pack<kColumns>(sums + at + column) : Part{};
  }

  struct Weighed {
    float largest, base, total;  // total: of exponentials relative to base
    float mine;                  // weight of the piece with this lane's number
  };
  // By all lanes of a warp. The first kChunks * kWarp pieces are asked for at once.
  template <int kChunks>
  __device__ Weighed weigh() const {
    constexpr int kFirst = kChunks * kWarp;
    float scores[kChunks], totals[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int32_t piece = c * kWarp + lane_index();
      scores[c] = piece < pieces ? largest_of(piece) : -INFINITY;
      totals[c] = piece < pieces ? total_of(piece) : 0.0f;
    }
    const float sink = p.sinks != nullptr ? p.sinks[head] * kLog2E : -INFINITY;
    float most = sink;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) most = fmaxf(most, scores[c]);
#pragma unroll 1
    for (int32_t piece = kFirst + lane_index(); piece < pieces; piece += kWarp) most = fmaxf(most, largest_of(piece));
    most = warp_max(most);
    const float base = most == -INFINITY ? 0.0f : most;
    float total = exp2_fast(sink - base);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c * kWarp < pieces) total += warp_sum(totals[c] * exp2_fast(scores[c] - base));
    }
#pragma unroll 1
    for (int32_t begin = kFirst; begin < pieces; begin += kWarp) {
      const int32_t piece = begin + lane_index();
      total += warp_sum(piece < pieces ? total_of(piece) * exp2_fast(largest_of(piece) - base) : 0.0f);
    }
    return {most, base, total, exp2_fast(scores[0] - base)};
  }

  __device__ float weight_of(int32_t piece, const Weighed& weighed) const {
    return piece < pieces ? exp2_fast(largest_of(piece) - weighed.base) : 0.0f;
  }
  __device__ float factor(const Weighed& weighed) const {
    return p.v_scale / (weighed.total == 0 ? 1.0f : weighed.total);
  }
  template <typename T>
  __device__ T* out() const {
    return static_cast<T*>(p.out) + request * p.out_row + head * p.out_head;
  }
  // By one thread.
  __device__ void write_lse(const Weighed& weighed) const {
    if (p.lse == nullptr) return;
    p.lse[request * p.lse_row + head * p.lse_head] =
        weighed.total == 0 ? -INFINITY : (weighed.largest + log2f(weighed.total)) * kLn2;
  }
};

// A block per request and query head, a warp per group.
template <typename T>
__global__ void __launch_bounds__(kGroups* kWarp) decode_merge_kernel(const DecodeProblem p) {
  constexpr int kAtOnce = 4;
  GRISTMILL_SHARED(float, partial, kGroups* kMaxHeadDim);
  const auto row = MergeRow::of(p, static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(blockIdx.y));
  const int group = warp_index();
  wait_for_previous_kernel();  // which writes nothing of the above
  MergeRow::Weighed weighed = {};
#pragma unroll 1
  for (int32_t column = lane_index() * kColumns; column - lane_index() * kColumns < p.head_dim_v; column += kStep) {
    float sums[kColumns] = {};
#pragma unroll 1
    for (int32_t begin = group; begin < row.pieces || begin == group; begin += kAtOnce * kGroups) {
      Part parts[kAtOnce];
      float weights[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t piece = begin + i * kGroups;
        parts[i] = row.part(piece, column);
        weights[i] = piece < row.pieces ? row.largest_of(piece) : -INFINITY;
      }
      if (begin == group && column < kStep) weighed = row.weigh<4>();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = exp2_fast(weights[i] - weighed.base);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[j] = fmaf(parts[i][j], weight, sums[j]);
      }
    }
    if (column < p.head_dim_v) {
      store_pack<kColumns>(partial + group * p.head_dim_v + column, Part{sums[0], sums[1], sums[2], sums[3]});
    }
  }
  sync_block();
  const float factor = row.factor(weighed);
#pragma unroll 1
  for (int32_t column = thread_index(); column < p.head_dim_v; column += kGroups * kWarp) {
    float sum = partial[column];
#pragma unroll
    for (int other = 1; other < kGroups; ++other) sum += partial[other * p.head_dim_v + column];
    row.out<T>()[column] = from_float<T>(sum * factor);
  }
  if (thread_index() == 0) row.write_lse(weighed);
}

// A warp per request and query head, for heads that it holds at once: faster where there are few pieces.
constexpr int kNarrowWarps = 4;

template <typename T>
__global__ void __launch_bounds__(kNarrowWarps* kWarp) decode_merge_narrow_kernel(const DecodeProblem p) {
  constexpr int kAtOnce = 8;  // groups
  const int32_t head = static_cast<int32_t>(blockIdx.y) * kNarrowWarps + warp_index();
  if (head >= p.num_qo_heads) return;
  const auto row = MergeRow::of(p, static_cast<int32_t>(blockIdx.x), head);
  const int32_t column = lane_index() * kColumns;
  wait_for_previous_kernel();  // which writes nothing of the above
  MergeRow::Weighed weighed = {};
  float sum[kColumns] = {};
#pragma unroll 1
  for (int first_group = 0; first_group == 0 || first_group < (row.pieces < kGroups ? row.pieces : kGroups);
       first_group += kAtOnce) {
    float sums[kAtOnce][kColumns] = {};
#pragma unroll 1
    for (int32_t begin = first_group; begin < row.pieces || begin == 0; begin += kGroups) {
      Part parts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) parts[i] = row.part(begin + i, column);
      if (begin == 0) weighed = row.weigh<1>();
      float weights[kAtOnce];
      if (begin < kWarp) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) weights[i] = shuffle(weighed.mine, begin + i);
      } else {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) weights[i] = row.weight_of(begin + i, weighed);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = weights[i];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[i][j] = fmaf(parts[i][j], weight, sums[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sum[j] += sums[i][j];
    }
  }
  const float factor = row.factor(weighed);
  if (column < p.head_dim_v) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) row.out<T>()[column + j] = from_float<T>(sum[j] * factor);
  }
  if (lane_index() == 0) row.write_lse(weighed);
}

template <typename T>
void merge(const Launch& launch, const DecodeProblem& p) {
  constexpr int64_t kFew = kGroups * kSplit;  // entries per request
  // A captured graph has room for long lists whatever is in them: rows that fill the device anyway get a warp each.
  const bool many = static_cast<int64_t>(p.requests) * p.num_qo_heads > 4 * static_cast<int64_t>(launch.processors());
  if (p.head_dim_v <= kStep && (many || p.entries <= kFew * p.requests)) {
    const dim3 grid(p.requests, (p.num_qo_heads + kNarrowWarps - 1) / kNarrowWarps);
    launch.early<decode_merge_narrow_kernel<T>>(grid, dim3(kNarrowWarps * kWarp), p);
  } else {
    launch.early<decode_merge_kernel<T>>(dim3(p.requests, p.num_qo_heads), dim3(kGroups * kWarp), p);
  }
}

// Blocks of `warps` for work that takes a warp each.
dim3 grid_for(const Launch& launch, int64_t work, int warps) {
  const int64_t most = static_cast<int64_t>(launch.processors()) * kWarpsPerProcessor;
  return dim3(static_cast<unsigned>(((work < most ? work : most) + warps - 1) / warps));
}

template <typename T, typename C>
void run_general(const Launch& launch, const DecodeProblem& p, bool aligned) {
  const dim3 grid = grid_for(launch, p.max_pieces * p.num_qo_heads, kGeneralWarps);
  launch.early<decode_general_kernel<T, C>>(grid, dim3(kGeneralWarps * kWarp), p, aligned);
}

#if defined(GRISTMILL_HAS_MMA)
template <typename T, int kDim, int kStages>
void run_mma(const Launch& launch, const DecodeProblem& p) {
  const auto start = [&](auto two_halves) {
    constexpr bool kTwoHalves = decltype(two_halves)::value;
    launch.early_shared<decode_mma_kernel<T, kDim, kStages, kTwoHalves>>(
        grid_for(launch, p.max_pieces * p.num_kv_heads, 1), dim3(32),
        MmaDecode<T, kDim, kStages, kTwoHalves>::kSharedBytes, p);
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
    const bool near = p.k_slot >= 0 && p.k_slot <= INT32_MAX && p.v_slot >= 0 && p.v_slot <= INT32_MAX;
    if (!aligned || !pairs || !near || p.num_slots == 0 || p.head_dim != p.head_dim_v || p.group() > 16) return false;
    switch (p.head_dim) {
      case 64:
        return run_mma<T, 64, 4>(launch, p), true;
      case 128:
        return run_mma<T, 128, 3>(launch, p), true;
      case 256:
        return run_mma<T, 256, 3>(launch, p), true;
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
  p.entries = kv_indices.size(0);
  p.numbers = PieceNumbers::of(p.entries, p.requests);
  p.max_pieces = p.numbers.most(p.entries, p.requests);
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
    merge<T>(launch, p);
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("decode_attention", TORCH_BOX(&gristmill::gpu::decode_attention));
}
