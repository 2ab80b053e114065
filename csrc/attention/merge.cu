// merge_state and merge_states on GPUs, one warp per row and head. An empty state (LSE -inf) changes nothing, whatever
// its output holds; the other one is then copied bit for bit. Weights of float32 rows are computed in
// double.
#include <torch/csrc/stable/library.h>

#include "attention/attention.h"
#include "attention/merge_checks.h"
#include "common/gpu_launch.h"
#include "common/gpu_rows.h"

namespace gristmill::gpu {
namespace {

constexpr int kThreads = 128;
constexpr float kEmpty = -INFINITY;

// States of one call: state n of row t and head h begins at n * state + t * row + h * head. merge_state has two, which
// are tensors of their own.
template <typename T>
struct States {
  const T* o[2];
  const float* lse[2];
  int64_t o_state, o_row[2], o_head[2], lse_state, lse_row[2], lse_head[2];
  int64_t count, rows, heads, width;
  bool separate;  // state n has tensors of its own
  bool aligned;

  // Which tensor holds state n, and where in it the state begins.
  __device__ float lse_of(int64_t n, int64_t row, int64_t head) const {
    const int which = separate ? static_cast<int>(n) : 0;
    return lse[which][(which == 0 ? n * lse_state : 0) + row * lse_row[which] + head * lse_head[which]];
  }
  __device__ const T* row_of(int64_t n, int64_t row, int64_t head) const {
    const int which = separate ? static_cast<int>(n) : 0;
    return o[which] + (which == 0 ? n * o_state : 0) + row * o_row[which] + head * o_head[which];
  }
};

template <typename T>
struct Merged {
  T* out;
  float* lse;
  int64_t out_row, out_head, lse_row, lse_head;
};

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, float>, double, float>;

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

template <typename A>
struct Total {
  A largest, inverse_sum;
  float lse;  // of all states together
};

template <typename T>
__device__ Total<Wide<T>> total_of(const States<T>& states, int64_t row, int64_t head) {
  using A = Wide<T>;
  A largest = kEmpty, sum = 0;
  int64_t present = 0;
  float last = kEmpty;
  for (int64_t n = 0; n < states.count; ++n) {
    const float one = states.lse_of(n, row, head);
    if (one == kEmpty) continue;
    ++present;
    last = one;
    const A wide = static_cast<A>(one);
    if (wide > largest) {
      sum = present == 1 ? 0 : sum * exponential(largest - wide);
      largest = wide;
      sum += 1;
    } else {
      sum += exponential(wide - largest);
    }
  }
  if (present <= 1) return {largest, A{1}, last};
  return {largest, A{1} / sum, static_cast<float>(largest + logarithm(sum))};
}

// Every pack of all states is read before `out`, which may be one of them, is written.
template <typename T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const Merged<T> merged, const States<T> states) {
  constexpr int N = kPackElements<T>;
  follow_previous_kernel();
  const auto [row, head] = divide(static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_index(), states.heads);
  if (row >= states.rows) return;
  const auto total = total_of(states, row, head);
  T* const out = merged.out + row * merged.out_row + head * merged.out_head;
  for (int64_t first = static_cast<int64_t>(lane_index()) * N; first < states.width; first += kWarp * N) {
    float sum[N] = {};
    bool begun = false;
    for (int64_t n = 0; n < states.count; ++n) {
      const float one = states.lse_of(n, row, head);
      if (one == kEmpty) continue;
      const auto weight =
          static_cast<float>(exponential(static_cast<Wide<T>>(one) - total.largest) * total.inverse_sum);
      if (weight == 0.0f) continue;  // what has no weight may be NaN
      const auto pack = load_elements<N>(states.row_of(n, row, head), first, states.width, states.aligned);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] = begun ? fmaf(to_float(pack[i]), weight, sum[i]) : to_float(pack[i]) * weight;
      begun = true;
    }
    Pack<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result[i] = from_float<T>(sum[i]);
    store_elements<N>(out, first, states.width, states.aligned, result);
  }
  sync_warp();  // out_lse may be one of the states'
  if (lane_index() == 0) merged.lse[row * merged.lse_row + head * merged.lse_head] = total.lse;
}

// merge_state where a block holds all packs of one head or of several: everything is read at once.
constexpr int kPairThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kPairThreads)
    pair_kernel(const Merged<T> merged, const States<T> states, int32_t packs, int32_t heads_per_block) {
  constexpr int N = kPackElements<T>;
  using A = Wide<T>;
  follow_previous_kernel();
  const int64_t row = blockIdx.x;
  const int32_t within = thread_index() / packs, pack = thread_index() % packs;
  const int64_t head = static_cast<int64_t>(blockIdx.y) * heads_per_block + within,
                first = static_cast<int64_t>(pack) * N;
  const bool there = within < heads_per_block && head < states.heads;
  float merged_lse = kEmpty;
  if (there) {
    const float lse_a = states.lse[0][row * states.lse_row[0] + head * states.lse_head[0]];
    const float lse_b = states.lse[1][row * states.lse_row[1] + head * states.lse_head[1]];
    const T* const at_a = states.o[0] + row * states.o_row[0] + head * states.o_head[0];
    const T* const at_b = states.o[1] + row * states.o_row[1] + head * states.o_head[1];
    const auto a = load_elements<N>(at_a, first, states.width, states.aligned);
    const auto b = load_elements<N>(at_b, first, states.width, states.aligned);
    const A largest = static_cast<A>(lse_a > lse_b ? lse_a : lse_b);
    A weight_a = 0, weight_b = 0;
    if (lse_a == kEmpty || lse_b == kEmpty) {  // the other one is copied, bit for bit
      weight_a = lse_a == kEmpty ? 0 : 1;
      weight_b = lse_b == kEmpty ? 0 : 1;
      merged_lse = lse_a == kEmpty ? lse_b : lse_a;
    } else {
      weight_a = exponential(static_cast<A>(lse_a) - largest);
      weight_b = exponential(static_cast<A>(lse_b) - largest);
      const A sum = weight_a + weight_b;
      merged_lse = static_cast<float>(largest + logarithm(sum));
      const A part = A{1} / sum;
      weight_a *= part;
      weight_b *= part;
    }
    const float scale_a = static_cast<float>(weight_a), scale_b = static_cast<float>(weight_b);
    Pack<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) {  // what has no weight may be NaN
      const float part_b = scale_b == 0 ? 0.0f : to_float(b[i]) * scale_b;
      result[i] = from_float<T>(scale_a == 0   ? part_b
                                : scale_b == 0 ? to_float(a[i]) * scale_a
                                               : fmaf(to_float(a[i]), scale_a, part_b));
    }
    store_elements<N>(merged.out + row * merged.out_row + head * merged.out_head, first, states.width, states.aligned,
                      result);
  }
  // out_lse may be one of the states'
  if (kWarp % packs == 0) {  // a head lies in one warp
    sync_warp();
  } else {
    sync_block();
  }
  if (there && pack == 0) merged.lse[row * merged.lse_row + head * merged.lse_head] = merged_lse;
}

template <typename T>
bool try_pair(const Tensor& out, const Merged<T>& merged, const States<T>& states) {
  const int64_t packs = (states.width + kPackElements<T> - 1) / kPackElements<T>;
  if (packs == 0 || packs > kPairThreads || states.heads == 0) return false;
  const int64_t fit = kPairThreads / packs, heads = fit < states.heads ? fit : states.heads;
  const int64_t threads = (heads * packs + kWarp - 1) / kWarp * kWarp;
  const Launch launch(out);
  launch.early<pair_kernel<T>>(
      dim3(static_cast<unsigned>(states.rows), static_cast<unsigned>((states.heads + heads - 1) / heads)),
      dim3(static_cast<unsigned>(threads)), merged, states, static_cast<int32_t>(packs), static_cast<int32_t>(heads));
  return true;
}

template <typename T>
void run(const Tensor& out, const Tensor& out_lse, const States<T>& states) {
  const Merged<T> merged = {mutable_data<T>(out), mutable_data<float>(out_lse),
                            out.stride(0),        out.stride(1),
                            out_lse.stride(0),    out_lse.stride(1)};
  if (states.separate && try_pair(out, merged, states)) return;
  const Launch launch(out);
  launch.early<merge_kernel<T>>(blocks_for(states.rows * states.heads * kWarp, kThreads), dim3(kThreads), merged,
                                states);
}

}  // namespace

void merge_state(const Tensor& out, const Tensor& out_lse, const Tensor& o_a, const Tensor& lse_a, const Tensor& o_b,
                 const Tensor& lse_b) {
  check_merge_state(out, out_lse, o_a, lse_a, o_b, lse_b, "merge_state");
  dispatch_float(o_a.scalar_type(), "merge_state", "o_a", [&](auto tag) {
    using T = decltype(tag);
    States<T> states = {};
    states.separate = true;
    states.o[0] = data<T>(o_a), states.o[1] = data<T>(o_b);
    states.lse[0] = data<float>(lse_a), states.lse[1] = data<float>(lse_b);
    states.o_row[0] = o_a.stride(0), states.o_row[1] = o_b.stride(0);
    states.o_head[0] = o_a.stride(1), states.o_head[1] = o_b.stride(1);
    states.lse_row[0] = lse_a.stride(0), states.lse_row[1] = lse_b.stride(0);
    states.lse_head[0] = lse_a.stride(1), states.lse_head[1] = lse_b.stride(1);
    states.count = 2, states.rows = o_a.size(0), states.heads = o_a.size(1), states.width = o_a.size(2);
    states.aligned = steps_by(o_a, 16) && steps_by(o_b, 16) && steps_by(out, 16);
    run(out, out_lse, states);
  });
}

void merge_states(const Tensor& out, const Tensor& out_lse, const Tensor& o, const Tensor& lse) {
  check_merge_states(out, out_lse, o, lse, "merge_states");
  dispatch_float(o.scalar_type(), "merge_states", "o", [&](auto tag) {
    using T = decltype(tag);
    States<T> states = {};
    states.o[0] = data<T>(o), states.lse[0] = data<float>(lse);
    states.o_state = o.stride(0);
    states.o_row[0] = o.stride(1), states.o_head[0] = o.stride(2);
    states.lse_state = lse.stride(0), states.lse_row[0] = lse.stride(1), states.lse_head[0] = lse.stride(2);
    states.count = o.size(0), states.rows = o.size(1), states.heads = o.size(2), states.width = o.size(3);
    states.aligned = steps_by(o, 16) && steps_by(out, 16);
    run(out, out_lse, states);
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("merge_state", TORCH_BOX(&gristmill::gpu::merge_state));
  m.impl("merge_states", TORCH_BOX(&gristmill::gpu::merge_states));
}
