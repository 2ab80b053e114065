// The choice of experts on the CPU: one pass over a row that keeps the best in order. Weights are computed in double
// from the chosen logits alone, scaled by the largest of them, so that tiny scores neither vanish nor divide 0 by 0.
#include <algorithm>
#include <cmath>

#include "common/parallel.h"
#include "common/vec.h"
#include "common/vec_math.h"
#include "moe/moe.h"
#include "moe/routing.h"

namespace gristmill {
namespace {

inline vf vdifference(vf a, float b) { return a == vset1(b) ? vzero() : a - b; }

struct Chosen {
  float value;
  int32_t id;
};

template <typename T>
struct Router {
  const Tensor& weights;
  const Tensor& ids;
  const Tensor& logits;
  Bias bias;
  Routing routing;
  int experts = static_cast<int>(logits.size(1));
  int top_k = static_cast<int>(weights.size(1));

  // Logits, -inf where there is no number and in the whole vector behind the last. Returns the largest.
  float load(const T* x, float* values) const {
    const vf none = vset1(-INFINITY);
    vf largest = none;
    int64_t i = 0;
    for (; i + kLanes <= experts; i += kLanes) {
      const vf v = vload(x + i);
      const vf kept = v > none ? v : none;
      vstore(values + i, kept);
      largest = vmax(kept, largest);
    }
    vstore(values + i, none);
    for (; i < experts; ++i) values[i] = to_float(x[i]) > -INFINITY ? to_float(x[i]) : -INFINITY;
    for (int64_t tail = experts / kLanes * kLanes; tail < experts; tail += kLanes) {
      largest = vmax(vload(values + tail), largest);
    }
    return vhmax(largest);
  }

  double softmax_total(const float* values, float largest) const {
    vd total = {};
    for (int64_t i = 0; i < experts; i += kLanes) {
      const vf e = vexp_negative(vdifference(vload(values + i), largest));
      total += vlow_double(e) + vhigh_double(e);
    }
    return vsum(total);
  }

  // Scores plus bias in place of the logits.
  void add_bias(float* values, float largest, double total) const {
    const float inverse = static_cast<float>(1 / total);
    for (int64_t i = 0; i < experts; i += kLanes) {
      const vf x = vload(values + i);
      vf scores;
      if (routing.sigmoid) {
        const vf e = vexp_negative(-vabs(x));
        scores = (x >= 0 ? vset1(1.0f) : e) / (e + 1.0f);
      } else {
        scores = vexp_negative(vdifference(x, largest)) * inverse;
      }
      float biased[kLanes];
      vstore(biased, scores);
      for (int64_t e = i; e < std::min<int64_t>(experts, i + kLanes); ++e) {
        const float value = biased[e - i] + bias.of(static_cast<int>(e));
        values[e] = values[e] > -INFINITY && value > -INFINITY ? value : -INFINITY;
      }
    }
  }

  // The best of a group, or with a bias the sum of its two best.
  float group_score(const float* values, int size) const {
    float best = -INFINITY, second = -INFINITY;
    for (int i = 0; i < size; ++i) {
      second = std::max(second, std::min(best, values[i]));
      best = std::max(best, values[i]);
    }
    return bias.given() && second > -INFINITY ? best + second : best;
  }

  void keep_best_groups(float* values) const {
    const int size = experts / routing.num_groups;
    float scores[kMaxGroups];
    for (int g = 0; g < routing.num_groups; ++g) scores[g] = group_score(values + g * size, size);
    for (int g = 0; g < routing.num_groups; ++g) {
      int better = 0;
      for (int h = 0; h < routing.num_groups; ++h) {
        better += scores[h] > scores[g] || (scores[h] == scores[g] && h < g);
      }
      if (better >= routing.topk_groups) std::fill(values + g * size, values + (g + 1) * size, -INFINITY);
    }
  }

  // How many there are to choose, at most top_k. Equals: the lowest id first.
  int choose(const float* values, Chosen* best) const {
    int count = 0;
    float least = -INFINITY;  // what must be exceeded
    for (int first = 0; first < experts; first += kLanes) {
      if (!vany(vload(values + first) > vset1(least))) continue;
      for (int e = first; e < first + kLanes; ++e) {
        const float value = values[e];
        if (!(value > least)) continue;
        int at = count < top_k ? count++ : count - 1;
        for (; at > 0 && value > best[at - 1].value; --at) best[at] = best[at - 1];
        best[at] = {value, e};
        if (count == top_k) least = best[count - 1].value;
      }
    }
    return count;
  }

  void store_weights(const T* x, const Chosen* best, int count, float largest, double total, float* out) const {
    double shift = routing.sigmoid ? 0.0 : largest, sum = routing.sigmoid ? 1.0 : total, terms[kMaxChosen];
    const auto lowered = [&](int k) {
      const double logit = to_float(x[best[k].id]);
      return routing.sigmoid ? std::min(logit, 0.0) : logit;
    };
    if (routing.renormalize) {
      shift = -INFINITY, sum = 0;
      for (int k = 0; k < count; ++k) shift = std::max(shift, lowered(k));
    }
    for (int k = 0; k < count; ++k) {
      terms[k] = std::exp(difference(lowered(k), shift));
      if (routing.sigmoid) terms[k] /= 1 + std::exp(-std::abs(static_cast<double>(to_float(x[best[k].id]))));
      if (routing.renormalize) sum += terms[k];
    }
    for (int k = 0; k < top_k; ++k) out[k] = k < count ? static_cast<float>(routing.scaling * (terms[k] / sum)) : 0.0f;
  }

  void row(int64_t t) const {
    float values[kMaxExperts + kLanes];
    Chosen best[kMaxChosen];
    const T* x = data<T>(logits) + t * logits.stride(0);
    const float largest = load(x, values);
    const bool weighs_all = !routing.sigmoid && (bias.given() || !routing.renormalize);
    const double total = weighs_all ? softmax_total(values, largest) : 1.0;
    if (bias.given()) add_bias(values, largest, total);
    if (routing.num_groups > 1) keep_best_groups(values);
    const int count = choose(values, best);
    int32_t* const row_ids = mutable_data<int32_t>(ids) + t * ids.stride(0);
    for (int k = 0; k < top_k; ++k) row_ids[k] = k < count ? best[k].id : -1;
    store_weights(x, best, count, largest, total, mutable_data<float>(weights) + t * weights.stride(0));
  }
};

void route(const Tensor& weights, const Tensor& ids, const Tensor& logits, const OptionalTensor& bias,
           const Routing& routing, const char* op) {
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    const Router<decltype(tag)> router{weights, ids, logits, Bias(bias), routing};
    parallel_units(logits.size(0), logits.size(1) * 8, [&](int64_t t) { router.row(t); });
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

}  // namespace gristmill
