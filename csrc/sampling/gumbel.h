// Gumbel noise per token from the counter-based generator: adding it to log-probabilities and taking the largest draws
// a token.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/target.h"
#include "sampling/philox.h"

namespace gristmill {

// -log(-log(u)) of a random word, u = (word + 0.5) * 2^-32.
GRISTMILL_HOST_DEVICE inline double gumbel_of(uint32_t word) {
  return -std::log(-std::log((static_cast<double>(word) + 0.5) * 0x1p-32));
}

// Token v takes lane v % 4 of block v / 4.
GRISTMILL_HOST_DEVICE inline double gumbel(uint64_t seed, uint32_t position, uint32_t token) {
  return gumbel_of(philox(seed, position, token / 4)[token % 4]);
}

}  // namespace gristmill
