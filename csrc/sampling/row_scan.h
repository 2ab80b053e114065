// One pass over a row of logits: is anything to choose from, and which token is the largest.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/vec.h"

namespace gristmill {

struct RowScan {
  int64_t best;  // lowest index of the largest logit; -1 for a row with a NaN, a +inf, or nothing but -inf
  float largest;
};

template <typename T>
inline RowScan scan_row(const T* x, int64_t vocab) {
  vf largest = vset1(-INFINITY);
  vi broken = {};
  const auto see = [&](vf v) {
    largest = vmax(v, largest);
    broken |= ~(v < INFINITY);  // NaN or +inf
  };
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) see(vload(x + i));
  float best = vhmax(largest);
  bool bad = vany(broken);
  for (; i < vocab; ++i) {
    const float v = to_float(x[i]);
    best = v > best ? v : best;
    bad |= !(v < INFINITY);
  }
  if (bad || best == -INFINITY) return {-1, best};
  for (i = 0; i + kLanes <= vocab; i += kLanes) {
    if (vany(vload(x + i) == best)) break;
  }
  while (to_float(x[i]) != best) ++i;
  return {i, best};
}

}  // namespace gristmill
