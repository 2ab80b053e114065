// Divisor::quotient is the rounded quotient for all significands a and b for which a / b is hard to round:
// a / b lies within delta / (2 b) units in the last place of the middle M of two floats, |delta| <= kNear, b >= 2^23.
// quotients STEP FIRST: every STEP-th b from the FIRST-th on.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "quant/quotient.h"

namespace {

constexpr int64_t kNear = 32;

// The inverse of an odd number modulo 2^32.
uint32_t inverse_of(uint32_t odd) {
  uint32_t x = odd;
  for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
  return x;
}

struct Tally {
  long pairs = 0, corrected = 0, wrong = 0;

  void add(uint64_t a, uint64_t b) {
    const float x = static_cast<float>(a), scale = static_cast<float>(b);
    const gristmill::Divisor by(scale);
    ++pairs;
    corrected += x * (1.0f / scale) != x / scale;
    if (by.quotient(x) == x / scale) return;
    ++wrong;
    std::printf("%llu / %llu is rounded wrongly\n", static_cast<unsigned long long>(a),
                static_cast<unsigned long long>(b));
  }
};

// All a with a * 2^shift = b * M + delta: M is odd and has 25 bits, so that M / 2^shift is the middle of two floats
// with 24 bits, those of quotients from 1/2 to 1 for shift 25 and from 1 to 2 for shift 24.
void try_all(uint64_t b, int shift, Tally& tally) {
  const int zeros = __builtin_ctzll(b);
  const int64_t period = int64_t{1} << (shift - zeros);
  const uint32_t inverse = inverse_of(static_cast<uint32_t>(b >> zeros));
  for (int64_t d = -(kNear >> zeros); d <= kNear >> zeros; ++d) {
    const int64_t first = static_cast<int64_t>(static_cast<uint32_t>(-d) * inverse) & (period - 1);
    for (int64_t middle = first; middle < int64_t{1} << 25; middle += period) {
      if (middle < int64_t{1} << 24 || middle % 2 == 0) continue;
      const uint64_t a =
          (b * static_cast<uint64_t>(middle) + static_cast<uint64_t>(d * (int64_t{1} << zeros))) >> shift;
      const bool is_significand = a >= uint64_t{1} << 23 && a < uint64_t{1} << 24;
      if (is_significand && (a < b) == (shift == 25)) tally.add(a, b);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const uint64_t step = std::strtoull(argv[1], nullptr, 10), first = std::strtoull(argv[2], nullptr, 10);
  Tally tally;
  for (uint64_t b = (uint64_t{1} << 23) + first; b < uint64_t{1} << 24; b += step) {
    try_all(b, 24, tally);
    try_all(b, 25, tally);
  }
  std::printf("%ld pairs, %ld of them corrected, %ld wrong\n", tally.pairs, tally.corrected, tally.wrong);
  return tally.pairs > 0 && tally.corrected > 0 && tally.wrong == 0 ? 0 : 1;
}
