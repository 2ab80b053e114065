// Greedy choice, logit bias and penalties on GPUs. Edits are computed in double and rounded once.
#include <torch/csrc/stable/library.h>

#include "common/gpu_launch.h"
#include "common/gpu_rows.h"
#include "sampling/checks.h"
#include "sampling/gpu_row.h"
#include "sampling/penalty.h"
#include "sampling/sampling.h"

namespace gristmill::gpu {
namespace {

constexpr int kGreedyThreads = 1024;
constexpr int kBiasThreads = 128;
constexpr int kBitmaskThreads = 256;
constexpr int kPenaltyThreads = 256;
constexpr int kPenaltyElements = 4;

template <typename T>
__global__ void __launch_bounds__(kGreedyThreads)
    greedy_kernel(int32_t* out, const T* logits, int64_t stride, int64_t vocab, bool aligned) {
  GRISTMILL_SHARED(uint64_t, scratch, kGreedyThreads / kWarp);
  const LogitRow<T> row{logits + static_cast<int64_t>(blockIdx.x) * stride, vocab, aligned};
  const uint64_t best = block_max(best_of_thread(row), scratch);
  if (threadIdx.x == 0) out[blockIdx.x] = best == 0 || best == kBroken ? -1 : id_of(best);
}

// The first entry that names a token applies all that do, in their order.
template <typename T>
__global__ void __launch_bounds__(kBiasThreads)
    bias_kernel(T* logits, int64_t stride, int64_t vocab, const int32_t* indptr, const int32_t* ids,
                const float* values, int64_t entries) {
  const int64_t row = blockIdx.x;
  const int64_t begin = max(indptr[row], 0), end = min(static_cast<int64_t>(indptr[row + 1]), entries);
  for (int64_t mine = begin + threadIdx.x; mine < end; mine += kBiasThreads) {
    const int32_t id = ids[mine];
    if (id < 0 || id >= vocab) continue;  // padding
    bool first = true;
    for (int64_t i = begin; first && i < mine; ++i) first = ids[i] != id;
    if (!first) continue;
    T& target = logits[row * stride + id];
    T value = target;
    for (int64_t i = mine; i < end; ++i) {
      if (ids[i] == id) value = from_float<T>(static_cast<float>(static_cast<double>(to_float(value)) + values[i]));
    }
    target = value;
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
    launch(greedy_kernel<T>, dim3(static_cast<unsigned>(logits.size(0))), dim3(kGreedyThreads), 0,
           mutable_data<int32_t>(out), data<T>(logits), logits.stride(0), logits.size(1), steps_by(logits, 16));
  });
}

void apply_logit_bias(const Tensor& logits, const Tensor& indptr, const Tensor& ids, const Tensor& values) {
  constexpr const char* op = "apply_logit_bias";
  check_logit_bias(logits, indptr, ids, values, op);
  if (ids.size(0) == 0) return;
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const Launch launch(logits);
    launch(bias_kernel<T>, dim3(static_cast<unsigned>(logits.size(0))), dim3(kBiasThreads), 0, mutable_data<T>(logits),
           logits.stride(0), logits.size(1), data<int32_t>(indptr), data<int32_t>(ids), data<float>(values),
           ids.size(0));
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
    launch(penalty_kernel<T>, blocks_for(rows * ((vocab + kPenaltyElements - 1) / kPenaltyElements), kPenaltyThreads),
           dim3(kPenaltyThreads), 0, problem);
  });
}

void apply_token_bitmask(const Tensor& logits, const Tensor& bitmask) {
  constexpr const char* op = "apply_token_bitmask";
  check_token_bitmask(logits, bitmask, op);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const Launch launch(logits);
    launch(bitmask_kernel<T>, blocks_for(rows * ((vocab + kPackElements<T> - 1) / kPackElements<T>), kBitmaskThreads),
           dim3(kBitmaskThreads), 0, mutable_data<T>(logits), logits.stride(0), rows, vocab, steps_by(logits, 16),
           data<int32_t>(bitmask), bitmask.stride(0));
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("greedy", TORCH_BOX(&gristmill::gpu::greedy));
  m.impl("apply_logit_bias", TORCH_BOX(&gristmill::gpu::apply_logit_bias));
  m.impl("apply_penalties", TORCH_BOX(&gristmill::gpu::apply_penalties));
  m.impl("apply_token_bitmask", TORCH_BOX(&gristmill::gpu::apply_token_bitmask));
}
