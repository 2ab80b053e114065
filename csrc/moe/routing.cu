// The choice of experts on GPUs: one warp per token, whose lanes hold the row in registers and give up its best expert
// top_k times. Lane k then weighs the k-th.
#include <torch/csrc/stable/library.h>

#include <bit>
#include <cmath>

#include "common/gpu_launch.h"
#include "common/gpu_rank.h"
#include "common/gpu_rows.h"
#include "moe/moe.h"
#include "moe/routing.h"

namespace gristmill::gpu {
namespace {

constexpr int kRoutingThreads = 128;
constexpr int kRoutingWarps = kRoutingThreads / kWarp;
static_assert(kMaxChosen <= kWarp && kMaxGroups <= kWarp && kMaxExperts == 1024);

template <typename T>
struct Problem {
  float* weights;
  int32_t* ids;
  const T* logits;
  int64_t weights_stride, ids_stride, stride, rows;
  Bias bias;
  Routing routing;
  int experts, top_k;
  bool aligned;
  int group_size;
  float groups_per_expert;
  int group_shift;  // two to this power lanes share the work on a group
};

// What a lane holds of a row: packs of neighbouring experts.
template <typename T, int kValues>
struct Held {
  static constexpr int kPack = kValues < kPackElements<T> ? kValues : kPackElements<T>;
  float values[kValues];

  __device__ static int first_of(int pack) { return (pack * kWarp + lane_index()) * kPack; }
  __device__ static int id_of_value(int i) { return first_of(i / kPack) + i % kPack; }

  // -INFINITY for what is no number or lies behind the row.
  __device__ Held(const T* row, int experts, bool aligned) {
#pragma unroll
    for (int pack = 0; pack < kValues / kPack; ++pack) {
      const int first = first_of(pack);
      const Pack<T, kPack> loaded = load_elements<kPack>(row, first, experts, aligned);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float x = to_float(loaded[i]);
        values[pack * kPack + i] = first + i < experts && x > -INFINITY ? x : -INFINITY;
      }
    }
  }
  __device__ float largest() const {
    float best = values[0];
#pragma unroll
    for (int i = 1; i < kValues; ++i) best = fmaxf(best, values[i]);
    return warp_max(best);
  }
  __device__ float softmax_total(float largest) const {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) total += values[i] > -INFINITY ? expf(difference(values[i], largest)) : 0.0f;
    return warp_sum(total);
  }
  // Scores plus bias in place of the logits.
  __device__ void add(const float (&biases)[kValues], bool sigmoid, float largest, float total) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float x = values[i], e = expf(sigmoid ? -fabsf(x) : difference(x, largest));
      const float score = sigmoid ? (x >= 0 ? 1.0f : e) / (1.0f + e) : e / total;
      const float biased = score + biases[i];
      values[i] = x > -INFINITY && biased > -INFINITY ? biased : -INFINITY;
    }
  }
  // f(expert, its group, its value).
  template <typename F>
  __device__ void each(const Problem<T>& p, F&& f) {
#pragma unroll
    for (int pack = 0; pack < kValues / kPack; ++pack) {
      const int first = first_of(pack);
      // The middle of an expert is far enough from the border of its group.
      int group = static_cast<int>((static_cast<float>(first) + 0.5f) * p.groups_per_expert);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if (first + i == (group + 1) * p.group_size) ++group;
        if (first + i < p.experts) f(first + i, group, values[pack * kPack + i]);
      }
    }
  }
  // The warp's best expert, which is then no longer among the values; -1 when there is none.
  __device__ int take_best(int taken_before) {
    float best = -INFINITY;
    int id = -1;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (id_of_value(i) == taken_before) values[i] = -INFINITY;
      if (values[i] > best) {
        best = values[i];
        id = id_of_value(i);
      }
    }
    const uint32_t key = id < 0 ? 0 : key_of(best), top = warp_largest(key);
    return top == 0 ? -1 : static_cast<int>(~warp_largest(key == top ? ~static_cast<uint32_t>(id) : 0));
  }
};

template <typename T, int kValues>
__device__ void load_biases(const Problem<T>& p, float (&biases)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int id = Held<T, kValues>::id_of_value(i);
    biases[i] = p.bias.given() && id < p.experts ? p.bias.of(id) : 0.0f;
  }
}

// The score of the group that this lane works on: its best expert's, with a bias the sum of the two best.
template <typename T>
__device__ float group_score(const Problem<T>& p, const float* row) {
  const int lanes = 1 << p.group_shift, group = lane_index() >> p.group_shift, part = lane_index() & (lanes - 1);
  float best = -INFINITY, second = -INFINITY;
  if (group < p.routing.num_groups) {
    const float* const own = row + group * (p.group_size + lanes);
#pragma unroll 4
    for (int i = part; i < p.group_size; i += lanes) {
      const float value = own[i];
      second = fmaxf(second, fminf(best, value));
      best = fmaxf(best, value);
    }
  }
  for (int mask = 1; mask < lanes; mask *= 2) {
    const float other = shuffle_xor(best, mask), other_second = shuffle_xor(second, mask);
    second = fmaxf(fminf(best, other), fmaxf(second, other_second));
    best = fmaxf(best, other);
  }
  return p.bias.given() && second > -INFINITY ? best + second : best;
}

// Groups lie in shared memory, so that a few lanes can read each whatever its size; the gaps between them keep the
// lanes of different groups in different banks.
template <typename T, int kValues>
__device__ void keep_best_groups(const Problem<T>& p, Held<T, kValues>& held, float* row) {
  held.each(p, [&](int expert, int group, float value) { row[expert + (group << p.group_shift)] = value; });
  sync_warp();
  const float score = group_score(p, row);
  const int group = lane_index() >> p.group_shift;
  int better = 0;
#pragma unroll 8
  for (int other = 0; other < p.routing.num_groups; ++other) {
    const float its = shuffle(score, other << p.group_shift);
    better += its > score || (its == score && other < group) ? 1 : 0;
  }
  const uint64_t kept = ballot(better < p.routing.topk_groups);
  held.each(p, [&](int, int of, float& value) {
    if ((kept >> (of << p.group_shift) & 1) == 0) value = -INFINITY;
  });
}

// The best experts of a row, one after the other; take() gives -1 when there is none left.
template <typename T, int kValues>
struct BestFirst {
  Held<T, kValues>& held;
  int taken = -1;

  __device__ int take() { return taken = held.take_best(taken); }
};

// The same for logits of 16 bits. As floats they differ in their first 22 bits, which leaves ten for the expert. What
// has been taken is not below the last one taken: less that, as unsigned numbers, it is below all the others.
template <typename T, int kValues>
struct BestWordFirst {
  static constexpr uint32_t kExperts = kMaxExperts - 1;
  uint32_t words[kValues], taken = ~uint32_t{0};

  __device__ explicit BestWordFirst(const Held<T, kValues>& held) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const uint32_t word = (key_of(held.values[i]) & ~kExperts) | (kExperts - Held<T, kValues>::id_of_value(i));
      words[i] = held.values[i] > -INFINITY ? word : 0;
    }
  }
  __device__ int take() {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) best = max(best, words[i] - taken);
    best += taken;
    taken = warp_largest(best < taken ? best : 0);
    return taken == 0 ? -1 : static_cast<int>(kExperts - (taken & kExperts));
  }
};

// The expert for this lane's place, or -1.
template <typename Best>
__device__ int choose(Best&& best, int top_k) {
  int mine = -1;
  for (int k = 0; k < top_k; ++k) {
    const int expert = best.take();
    if (expert < 0) break;
    if (lane_index() == k) mine = expert;
  }
  return mine;
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kRoutingThreads) route_kernel(const Problem<T> p) {
  constexpr int kGroupFloats = (kValues + 1) * kWarp;  // of each warp: a row and a gap for each lane
  constexpr int kAllFloats = kRoutingWarps * kGroupFloats;
  GRISTMILL_SHARED(float, groups, kAllFloats);
  follow_previous_kernel();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRoutingWarps + warp_index();
  if (row >= p.rows) return;
  const Routing& routing = p.routing;
  const T* const logits = p.logits + row * p.stride;
  float biases[kValues];
  load_biases(p, biases);
  Held<T, kValues> held(logits, p.experts, p.aligned);
  float largest = 0, total = 1;
  if (!routing.sigmoid && (p.bias.given() || !routing.renormalize)) {
    largest = held.largest();
    total = held.softmax_total(largest);
  }
  if (p.bias.given()) held.add(biases, routing.sigmoid, largest, total);
  if (routing.num_groups > 1) keep_best_groups(p, held, groups + warp_index() * kGroupFloats);

  const int lane = lane_index();
  const bool words = sizeof(T) == 2 && !p.bias.given();
  const int mine =
      words ? choose(BestWordFirst<T, kValues>(held), p.top_k) : choose(BestFirst<T, kValues>{held}, p.top_k);
  // Relative to the largest chosen logit where weights are renormalised: the least term of the sum is then not tiny.
  const float x = mine < 0 ? -INFINITY : to_float(logits[mine]);
  const float lowered = routing.sigmoid ? fminf(x, 0.0f) : x;
  const float shift = routing.renormalize ? warp_max(lowered) : routing.sigmoid ? 0.0f : largest;
  float term = mine < 0 ? 0.0f : expf(difference(lowered, shift));
  if (routing.sigmoid) term /= 1.0f + expf(-fabsf(x));
  if (routing.renormalize) total = warp_sum(term);
  if (lane >= p.top_k) return;
  p.ids[row * p.ids_stride + lane] = mine;
  p.weights[row * p.weights_stride + lane] = mine < 0 ? 0.0f : routing.scaling * (term / total);
}

template <typename T, int kValues>
void launch_route(const Launch& launch, Problem<T> p, const Tensor& logits) {
  p.aligned = steps_by(logits, Held<T, kValues>::kPack * static_cast<int64_t>(sizeof(T)));
  p.group_size = p.experts / p.routing.num_groups;
  p.groups_per_expert = 1.0f / static_cast<float>(p.group_size);
  p.group_shift = std::bit_width(static_cast<unsigned>(kWarp)) -
                  std::bit_width(std::bit_ceil(static_cast<unsigned>(p.routing.num_groups)));
  launch.early<route_kernel<T, kValues>>(blocks_for(p.rows, kRoutingWarps), dim3(kRoutingThreads), p);
}

void route(const Tensor& weights, const Tensor& ids, const Tensor& logits, const OptionalTensor& bias,
           const Routing& routing, const char* op) {
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const Problem<T> p{mutable_data<float>(weights),
                       mutable_data<int32_t>(ids),
                       data<T>(logits),
                       weights.stride(0),
                       ids.stride(0),
                       logits.stride(0),
                       logits.size(0),
                       Bias(bias),
                       routing,
                       static_cast<int>(logits.size(1)),
                       static_cast<int>(weights.size(1)),
                       false,
                       1,
                       1.0f,
                       0};
    const Launch launch(logits);
    if (p.experts <= 2 * kWarp) return launch_route<T, 2>(launch, p, logits);
    if (p.experts <= 4 * kWarp) return launch_route<T, 4>(launch, p, logits);
    if (p.experts <= 8 * kWarp) return launch_route<T, 8>(launch, p, logits);
    if (p.experts <= 16 * kWarp) return launch_route<T, 16>(launch, p, logits);
    launch_route<T, 32>(launch, p, logits);
  });
}

}  // namespace

void topk_softmax(const Tensor& weights, const Tensor& ids, const Tensor& logits, bool renormalize) {
  check_topk(weights, ids, logits, std::nullopt, "topk_softmax");
  route(weights, ids, logits, std::nullopt, {false, renormalize}, "topk_softmax");
}

void topk_sigmoid(const Tensor& weights, const Tensor& ids, const Tensor& logits, const OptionalTensor& bias,
                  bool renormalize) {
  check_topk(weights, ids, logits, bias, "topk_sigmoid");
  route(weights, ids, logits, bias, {true, renormalize}, "topk_sigmoid");
}

void grouped_topk(const Tensor& weights, const Tensor& ids, const Tensor& logits, const OptionalTensor& bias,
                  int64_t num_groups, int64_t topk_groups, double scaling, bool sigmoid, bool renormalize) {
  constexpr const char* op = "grouped_topk";
  check_topk(weights, ids, logits, bias, op);
  route(weights, ids, logits, bias,
        checked_routing(sigmoid, renormalize, num_groups, topk_groups, scaling, logits.size(1), op), op);
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("topk_softmax", TORCH_BOX(&gristmill::gpu::topk_softmax));
  m.impl("topk_sigmoid", TORCH_BOX(&gristmill::gpu::topk_sigmoid));
  m.impl("grouped_topk", TORCH_BOX(&gristmill::gpu::grouped_topk));
}
