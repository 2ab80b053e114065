// Greedy choice, logit bias and penalties on GPUs. Edits are computed in double and rounded once.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/gpu_launch.h"
#include "common/gpu_rows.h"
#include "sampling/checks.h"
#include "sampling/gpu_row.h"
#include "sampling/penalty.h"
#include "sampling/sampling.h"

namespace gristmill::gpu {
namespace {

constexpr int kGreedyThreads = 1024;
constexpr int kPieceThreads = 256;  // for a piece of a row
constexpr int kBiasThreads = 256;
constexpr int kBitmaskThreads = 256;
constexpr int kPenaltyThreads = 256;
constexpr int kPenaltyElements = 4;

__device__ inline int32_t token_of(uint64_t best) { return best == 0 || best == kBroken ? -1 : id_of(best); }

// A row per block, or a piece of one: then its best is left in `bests`.
template <typename T>
__global__ void __launch_bounds__(kGreedyThreads)
    greedy_kernel(int32_t* out, uint64_t* bests, const T* logits, int64_t stride, int64_t vocab, int64_t piece,
                  bool aligned) {
  GRISTMILL_SHARED(uint64_t, scratch, kGreedyThreads / kWarp);
  follow_previous_kernel();
  const int64_t row = blockIdx.x, begin = blockIdx.y * piece;
  const LogitRow<T> mine{logits + row * stride + begin, min(piece, vocab - begin), aligned, begin};
  const uint64_t best = block_max(best_of_thread(mine), scratch);
  if (threadIdx.x != 0) return;
  if (bests == nullptr) {
    out[row] = token_of(best);
  } else {
    bests[row * gridDim.y + blockIdx.y] = best;
  }
}

__global__ void __launch_bounds__(kWarp) best_of_pieces_kernel(int32_t* out, const uint64_t* bests, int pieces) {
  follow_previous_kernel();
  const uint64_t best = warp_max(lane_index() < pieces ? bests[blockIdx.x * pieces + lane_index()] : uint64_t{0});
  if (lane_index() == 0) out[blockIdx.x] = token_of(best);
}

// As many entries at a time as there are threads. The first of them that names a token applies all that do, in their
// order.
template <typename T>
__global__ void __launch_bounds__(kBiasThreads)
    bias_kernel(T* logits, int64_t stride, int64_t vocab, const int32_t* indptr, const int32_t* ids,
                const float* values, int64_t entries) {
  GRISTMILL_SHARED(int32_t, named, kBiasThreads);
  GRISTMILL_SHARED(float, added, kBiasThreads);
  follow_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  const int64_t begin = max(indptr[row], 0), end = min(static_cast<int64_t>(indptr[row + 1]), entries);
  for (int64_t first = begin; first < end; first += kBiasThreads) {
    const int count = static_cast<int>(min(end - first, static_cast<int64_t>(kBiasThreads)));
    const int32_t id = thread < count ? ids[first + thread] : -1;
    named[thread] = id;
    if (thread < count) added[thread] = values[first + thread];
    sync_block();
    bool mine = id >= 0 && id < vocab;  // others are padding
    for (int i = 0; mine && i < thread; ++i) mine = named[i] != id;
    if (mine) {
      T& target = logits[row * stride + id];
      T value = target;
      for (int i = thread; i < count; ++i) {
        if (named[i] == id) value = from_float<T>(static_cast<float>(static_cast<double>(to_float(value)) + added[i]));
      }
      target = value;
    }
    sync_block();  // the next entries may name the same tokens
  }
}

template <typename T>
struct Penalties {
  T* logits;
  const bool* prompt;
  const int32_t* counts;
  int64_t stride, prompt_stride, count_stride;
  bool aligned;
  const float* presence;
  const float* frequency;
  const float* repetition;
  int64_t rows, vocab;
};

template <typename T>
__global__ void __launch_bounds__(kPenaltyThreads) penalty_kernel(const Penalties<T> p) {
  constexpr int N = kPenaltyElements;
  follow_previous_kernel();
  const auto [row, pack] =
      divide(static_cast<int64_t>(blockIdx.x) * kPenaltyThreads + threadIdx.x, (p.vocab + N - 1) / N);
  if (row >= p.rows) return;
  const int64_t first = pack * N;
  const auto prompt = load_elements<N>(p.prompt + row * p.prompt_stride, first, p.vocab, p.aligned);
  const auto count = load_elements<N>(p.counts + row * p.count_stride, first, p.vocab, p.aligned);
  bool any = false;
#pragma unroll
  for (int i = 0; i < N; ++i) any = any || prompt[i] || count[i] != 0;
  if (!any) return;
  const Penalty penalty{p.presence[row], p.frequency[row], p.repetition[row]};
  T* const x = p.logits + row * p.stride;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (prompt[i] || count[i] != 0) x[first + i] = penalty.applied(x[first + i], prompt[i], count[i]);
  }
}

// A pack of tokens per thread, whose bits lie in one word.
template <typename T>
__global__ void __launch_bounds__(kBitmaskThreads)
    bitmask_kernel(T* logits, int64_t stride, int64_t rows, int64_t vocab, bool aligned, const int32_t* bitmask,
                   int64_t word_stride) {
  constexpr int N = kPackElements<T>;
  follow_previous_kernel();
  const auto [row, pack] =
      divide(static_cast<int64_t>(blockIdx.x) * kBitmaskThreads + threadIdx.x, (vocab + N - 1) / N);
  if (row >= rows) return;
  const int64_t first = pack * N;
  const uint32_t bits = static_cast<uint32_t>(bitmask[row * word_stride + first / 32]) >> (first % 32);
  constexpr uint32_t kAll = (1u << N) - 1;
  if ((bits & kAll) == kAll) return;
  T* const x = logits + row * stride;
  Pack<T, N> values;
  if ((bits & kAll) != 0) values = load_elements<N>(x, first, vocab, aligned);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if ((bits >> i & 1) == 0) values[i] = from_float<T>(-INFINITY);
  }
  store_elements<N>(x, first, vocab, aligned, values);
}

}  // namespace

void greedy(const Tensor& out, const Tensor& logits) {
  constexpr const char* op = "greedy";
  check_greedy(out, logits, op);
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const Launch launch(logits);
    const int64_t rows = logits.size(0), vocab = logits.size(1), pieces = pieces_of(launch, rows, vocab, 2048);
    const auto run = [&](unsigned count, int64_t piece, int threads, uint64_t* bests) {
      launch.early<greedy_kernel<T>>(dim3(static_cast<unsigned>(rows), count), dim3(static_cast<unsigned>(threads)),
                                     mutable_data<int32_t>(out), bests, data<T>(logits), logits.stride(0), vocab, piece,
                                     steps_by(logits, 16));
    };
    if (pieces <= 1) return run(1, vocab, kGreedyThreads, nullptr);
    const int64_t piece = piece_of<T>(vocab, pieces), count = (vocab + piece - 1) / piece;
    const Tensor bests = torch::stable::new_empty(logits, {rows * count}, ScalarType::Long);
    uint64_t* const at = reinterpret_cast<uint64_t*>(mutable_data<int64_t>(bests));
    run(static_cast<unsigned>(count), piece, kPieceThreads, at);
    launch.early<best_of_pieces_kernel>(dim3(static_cast<unsigned>(rows)), dim3(kWarp), mutable_data<int32_t>(out), at,
                                        static_cast<int>(count));
  });
}

void apply_logit_bias(const Tensor& logits, const Tensor& indptr, const Tensor& ids, const Tensor& values) {
  constexpr const char* op = "apply_logit_bias";
  check_logit_bias(logits, indptr, ids, values, op);
  if (ids.size(0) == 0) return;
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const Launch launch(logits);
    launch.early<bias_kernel<T>>(dim3(static_cast<unsigned>(logits.size(0))), dim3(kBiasThreads),
                                 mutable_data<T>(logits), logits.stride(0), logits.size(1), data<int32_t>(indptr),
                                 data<int32_t>(ids), data<float>(values), ids.size(0));
  });
}

void apply_penalties(const Tensor& logits, const Tensor& prompt_mask, const Tensor& output_counts,
                     const Tensor& presence, const Tensor& frequency, const Tensor& repetition) {
  constexpr const char* op = "apply_penalties";
  check_penalties(logits, prompt_mask, output_counts, presence, frequency, repetition, op);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const bool aligned =
        steps_by(prompt_mask, kPenaltyElements) && steps_by(output_counts, kPenaltyElements * sizeof(int32_t));
    const Penalties<T> problem{mutable_data<T>(logits),
                               data<bool>(prompt_mask),
                               data<int32_t>(output_counts),
                               logits.stride(0),
                               prompt_mask.stride(0),
                               output_counts.stride(0),
                               aligned,
                               data<float>(presence),
                               data<float>(frequency),
                               data<float>(repetition),
                               rows,
                               vocab};
    const Launch launch(logits);
    launch.early<penalty_kernel<T>>(
        blocks_for(rows * ((vocab + kPenaltyElements - 1) / kPenaltyElements), kPenaltyThreads), dim3(kPenaltyThreads),
        problem);
  });
}

void apply_token_bitmask(const Tensor& logits, const Tensor& bitmask) {
  constexpr const char* op = "apply_token_bitmask";
  check_token_bitmask(logits, bitmask, op);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const Launch launch(logits);
    launch.early<bitmask_kernel<T>>(
        blocks_for(rows * ((vocab + kPackElements<T> - 1) / kPackElements<T>), kBitmaskThreads), dim3(kBitmaskThreads),
        mutable_data<T>(logits), logits.stride(0), rows, vocab, steps_by(logits, 16), data<int32_t>(bitmask),
        bitmask.stride(0));
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("greedy", TORCH_BOX(&gristmill::gpu::greedy));
  m.impl("apply_logit_bias", TORCH_BOX(&gristmill::gpu::apply_logit_bias));
  m.impl("apply_penalties", TORCH_BOX(&gristmill::gpu::apply_penalties));
  m.impl("apply_token_bitmask", TORCH_BOX(&gristmill::gpu::apply_token_bitmask));
}
