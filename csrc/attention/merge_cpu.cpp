// merge_state on the CPU: two partial attention results over disjoint keys become one. An empty state (LSE -inf)
// changes nothing, whatever its output holds; the other one is then copied bit for bit.
#include <cmath>

#include "attention/attention.h"
#include "common/parallel.h"
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

void check_lse(const Tensor& lse, const Tensor& o, const char* op, const char* name) {
  check_dim(lse, 2, op, name);
  check_dtype(lse, ScalarType::Float, op, name);
  check_size(lse, 0, o.size(0), op, name);
  check_size(lse, 1, o.size(1), op, name);
}

}  // namespace

void merge_state(const Tensor& out, const Tensor& out_lse, const Tensor& o_a, const Tensor& lse_a, const Tensor& o_b,
                 const Tensor& lse_b) {
  constexpr const char* op = "merge_state";
  check_dim(o_a, 3, op, "o_a");
  check_same_shape(o_b, o_a, op, "o_b", "o_a");
  check_same_shape(out, o_a, op, "out", "o_a");
  check_dtype(o_b, o_a.scalar_type(), op, "o_b");
  check_dtype(out, o_a.scalar_type(), op, "out");
  check_inner(o_a, op, "o_a");
  check_inner(o_b, op, "o_b");
  check_inner(out, op, "out");
  check_lse(lse_a, o_a, op, "lse_a");
  check_lse(lse_b, o_a, op, "lse_b");
  check_lse(out_lse, o_a, op, "out_lse");
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

}  // namespace gristmill
