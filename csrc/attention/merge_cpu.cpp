// merge_state and merge_states on the CPU: partial attention results over disjoint keys become one. An empty state (LSE
// -inf) changes nothing, whatever its output holds; the other one is then copied bit for bit.
#include <cmath>

#include "attention/attention.h"
#include "attention/merge_checks.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "common/vec.h"

namespace gristmill {
namespace {

struct Weights {
  float a;
  float b;
  float lse;
};

Weights weights_of(float lse_a, float lse_b) {
  if (lse_b == -INFINITY) return {lse_a == -INFINITY ? 0.0f : 1.0f, 0, lse_a};
  if (lse_a == -INFINITY) return {0, 1, lse_b};
  const double a = lse_a, b = lse_b;
  const double largest = std::fmax(a, b);
  const double total = std::exp(a - largest) + std::exp(b - largest);
  return {static_cast<float>(std::exp(a - largest) / total), static_cast<float>(std::exp(b - largest) / total),
          static_cast<float>(largest + std::log(total))};
}

// A part of weight 0 may hold anything, NaN included.
template <typename T>
void merge_row(T* out, const T* a, const T* b, int64_t width, const Weights& w) {
  const auto combine = [&w](vf x, vf y) {
    const vf part_b = w.b == 0 ? vzero() : w.b == 1 ? y : y * w.b;
    return w.a == 0 ? part_b : w.a == 1 && w.b == 0 ? x : vfma(x, vset1(w.a), part_b);
  };
  for_lanes(
      width, [&](int64_t i) { vstore(out + i, combine(vload(a + i), vload(b + i))); },
      [&](int64_t i, int64_t n) { vstore_n(out + i, combine(vload_n(a + i, n), vload_n(b + i, n)), n); });
}

// Weights of the states of one row and head, and the merged LSE. A lone state that is not empty has weight 1 exactly.
float weigh_states(float* weights, const float* lse, int64_t states, int64_t stride) {
  double largest = -INFINITY, total = 0;
  for (int64_t n = 0; n < states; ++n) largest = std::fmax(largest, static_cast<double>(lse[n * stride]));
  int64_t count = 0;
  float last = -INFINITY;
  for (int64_t n = 0; n < states; ++n) {
    if (lse[n * stride] == -INFINITY) continue;
    ++count;
    last = lse[n * stride];
    total += std::exp(static_cast<double>(last) - largest);
  }
  for (int64_t n = 0; n < states; ++n) {
    const float one = lse[n * stride];
    weights[n] = one == -INFINITY ? 0 : static_cast<float>(std::exp(static_cast<double>(one) - largest) / total);
  }
  return count <= 1 ? last : static_cast<float>(largest + std::log(total));
}

// States in ascending order; each vector of all of them is read before `out` is written, which may be one of them.
template <typename T>
void merge_rows(T* out, const T* states, int64_t stride, const float* weights, int64_t count, int64_t width) {
  const auto combine = [&](const auto& load) {
    vf sum = vzero();
    bool first = true;
    for (int64_t n = 0; n < count; ++n) {
      if (weights[n] == 0) continue;
      const vf x = load(states + n * stride);
      sum = first ? x * weights[n] : vfma(x, vset1(weights[n]), sum);
      first = false;
    }
    return sum;
  };
  for_lanes(
      width, [&](int64_t i) { vstore(out + i, combine([i](const T* row) { return vload(row + i); })); },
      [&](int64_t i, int64_t n) {
        vstore_n(out + i, combine([i, n](const T* row) { return vload_n(row + i, n); }), n);
      });
}

}  // namespace

void merge_state(const Tensor& out, const Tensor& out_lse, const Tensor& o_a, const Tensor& lse_a, const Tensor& o_b,
                 const Tensor& lse_b) {
  constexpr const char* op = "merge_state";
  check_merge_state(out, out_lse, o_a, lse_a, o_b, lse_b, op);
  const int64_t rows = o_a.size(0), heads = o_a.size(1), width = o_a.size(2);
  const auto at = [](const Tensor& t, int64_t row, int64_t head) { return row * t.stride(0) + head * t.stride(1); };
  dispatch_float(o_a.scalar_type(), op, "o_a", [&](auto tag) {
    using T = decltype(tag);
    parallel_ranges(rows * heads, width * 4, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit / heads, head = unit % heads;
        const Weights w =
            weights_of(data<float>(lse_a)[at(lse_a, row, head)], data<float>(lse_b)[at(lse_b, row, head)]);
        merge_row(mutable_data<T>(out) + at(out, row, head), data<T>(o_a) + at(o_a, row, head),
                  data<T>(o_b) + at(o_b, row, head), width, w);
        mutable_data<float>(out_lse)[at(out_lse, row, head)] = w.lse;
      }
    });
  });
}

void merge_states(const Tensor& out, const Tensor& out_lse, const Tensor& o, const Tensor& lse) {
  constexpr const char* op = "merge_states";
  check_merge_states(out, out_lse, o, lse, op);
  const int64_t states = o.size(0), rows = o.size(1), heads = o.size(2), width = o.size(3);
  dispatch_float(o.scalar_type(), op, "o", [&](auto tag) {
    using T = decltype(tag);
    parallel_ranges(rows * heads, (states + 1) * width * 4, [&](int64_t begin, int64_t end) {
      static thread_local Scratch scratch;
      float* weights = scratch.get<float>(states);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit / heads, head = unit % heads;
        const float merged =
            weigh_states(weights, data<float>(lse) + row * lse.stride(1) + head * lse.stride(2), states, lse.stride(0));
        merge_rows(mutable_data<T>(out) + row * out.stride(0) + head * out.stride(1),
                   data<T>(o) + row * o.stride(1) + head * o.stride(2), o.stride(0), weights, states, width);
        mutable_data<float>(out_lse)[row * out_lse.stride(0) + head * out_lse.stride(1)] = merged;
      }
    });
  });
}

}  // namespace gristmill
