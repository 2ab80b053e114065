// The Gumbel-max draw over a whole row. Scores are first computed in float vectors, to within kSlack; only the few
// tokens that come close to the best are then compared in double, so the choice is the one that double precision makes.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include "common/vec_math.h"
#include "sampling/gumbel.h"

namespace gristmill {

// Twice a bound on the error of the float scores that matter (those within 30 of the largest).
inline constexpr float kSlack = 0.02f;

struct WideProduct {
  vu high, low;
};

inline WideProduct wide_multiply(vu a, uint32_t factor) {
  typedef uint64_t vq __attribute__((vector_size(4 * kLanes)));
  const vq x = reinterpret_cast<vq>(a);
#if defined(GRISTMILL_AVX512)
  const __m512i m = _mm512_set1_epi32(static_cast<int>(factor));
  const vq even = reinterpret_cast<vq>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(x), m));
  const vq uneven = reinterpret_cast<vq>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(x >> 32), m));
#elif defined(GRISTMILL_AVX2)
  const __m256i m = _mm256_set1_epi32(static_cast<int>(factor));
  const vq even = reinterpret_cast<vq>(_mm256_mul_epu32(reinterpret_cast<__m256i>(x), m));
  const vq uneven = reinterpret_cast<vq>(_mm256_mul_epu32(reinterpret_cast<__m256i>(x >> 32), m));
#else
  const vq even = (x & 0xffffffffu) * factor, uneven = (x >> 32) * factor;
#endif
  return {reinterpret_cast<vu>((even >> 32) | (uneven & ~uint64_t{0xffffffffu})),
          reinterpret_cast<vu>((even & 0xffffffffu) | (uneven << 32))};
}

template <int... kLane>
inline void interleave(vu a, vu b, vu& low, vu& high, std::integer_sequence<int, kLane...>) {
  low = __builtin_shufflevector(a, b, (kLane / 2 + kLane % 2 * kLanes)...);
  high = __builtin_shufflevector(a, b, (kLane / 2 + kLane % 2 * kLanes + kLanes / 2)...);
}

// The words of blocks [block, block + kLanes), in the order of the tokens: 4 * kLanes of them.
inline void philox_words(uint64_t seed, uint32_t position, uint32_t block, vu (&words)[4]) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  vu c0 = vu{} + position, c1, c2 = {}, c3 = {};
  for (int i = 0; i < kLanes; ++i) c1[i] = block + static_cast<uint32_t>(i);
  for (int round = 0; round < 10; ++round) {
    const WideProduct p0 = wide_multiply(c0, 0xD2511F53u), p1 = wide_multiply(c2, 0xCD9E8D57u);
    c0 = p1.high ^ c1 ^ k0;
    c1 = p1.low;
    c2 = p0.high ^ c3 ^ k1;
    c3 = p0.low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  vu even_low, even_high, uneven_low, uneven_high;
  interleave(c0, c2, even_low, even_high, lanes);
  interleave(c1, c3, uneven_low, uneven_high, lanes);
  interleave(even_low, uneven_low, words[0], words[1], lanes);
  interleave(even_high, uneven_high, words[2], words[3], lanes);
}

// (x + 0.5) * 2^-32 of unsigned words, to float precision.
inline vf unit_interval(vu x) {
  const vf high = __builtin_convertvector(reinterpret_cast<vi>(x >> 16), vf);
  const vf low = __builtin_convertvector(reinterpret_cast<vi>(x & 0xffffu), vf) + 0.5f;
  return vfma(high, vset1(65536.0f), low) * 0x1p-32f;
}

// -log(-log(u)) to about 1e-5. Where u is near 1 the inner logarithm is a series in 1 - u, which is known exactly.
inline vf gumbel_float(vu word) {
  const vf rest = unit_interval(~word);
  const vf series = rest * vfma(rest, vfma(rest, vset1(1.0f / 3), vset1(0.5f)), vset1(1.0f));
  const vf exponential = rest < 0.03125f ? series : -vlog(unit_interval(word));
  return -vlog(exponential);
}

// Token of the largest (logit - largest) / temperature + noise.
template <typename T>
inline int64_t gumbel_scan(const T* logits, int64_t vocab, float largest, double temperature, uint64_t seed,
                           uint32_t position) {
  int64_t best = -1;
  double best_exact = -INFINITY;
  float threshold = -INFINITY;
  const auto consider = [&](int64_t token, float approximate) {
    if (!(approximate >= threshold) || approximate == -INFINITY) return;
    threshold = std::fmax(threshold, approximate - kSlack);
    const double score = (static_cast<double>(to_float(logits[token])) - largest) / temperature;
    const double exact = score + gumbel(seed, position, static_cast<uint32_t>(token));
    if (exact > best_exact || best < 0) {
      best_exact = exact;
      best = token;
    }
  };
  const float divisor = static_cast<float>(temperature);
  for (int64_t first = 0; first < vocab; first += 4 * kLanes) {
    vu words[4];
    philox_words(seed, position, static_cast<uint32_t>(first / 4), words);
    for (int w = 0; w < 4; ++w) {
      const int64_t token = first + w * kLanes;
      if (token >= vocab) break;
      const int64_t count = vocab - token < kLanes ? vocab - token : kLanes;
      const vf x = count == kLanes ? vload(logits + token) : vload_n(logits + token, count);
      const vf score = x == -INFINITY ? x : (x - largest) / divisor + gumbel_float(words[w]);
      if (!vany(score >= threshold)) continue;
      for (int i = 0; i < count; ++i) consider(token + i, score[i]);
    }
  }
  return best;
}

}  // namespace gristmill
