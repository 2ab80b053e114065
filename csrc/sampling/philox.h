// Philox4x32-10, the counter-based generator of Salmon et al. 2011 (doi:10.1145/2063384.2063405).
#pragma once

#include <cstdint>

#include "common/target.h"

namespace gristmill {

struct PhiloxWords {
  uint32_t words[4];
  GRISTMILL_HOST_DEVICE uint32_t operator[](uint32_t i) const { return words[i]; }
};

// The four words of the block with key `seed` and counter (position, block, 0, 0).
GRISTMILL_HOST_DEVICE inline PhiloxWords philox(uint64_t seed, uint32_t position, uint32_t block) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = position, c1 = block, c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace gristmill
