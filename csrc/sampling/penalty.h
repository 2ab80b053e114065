// What the penalties of a row do to one logit. Computed in double and rounded once.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/target.h"

namespace gristmill {

struct Penalty {
  double presence;
  double frequency;
  double repetition;

  template <typename T>
  GRISTMILL_HOST_DEVICE T applied(T logit, bool in_prompt, int32_t count) const {
    const bool produced = count > 0;
    double x = to_float(logit);
    if (in_prompt || produced) x = x > 0 ? x / repetition : x * repetition;
    x -= frequency * count;
    if (produced) x -= presence;
    return from_float<T>(static_cast<float>(x));
  }
};

}  // namespace gristmill
