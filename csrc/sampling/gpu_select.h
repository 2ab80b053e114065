// Which candidates of a row stay, without sorting them: the digits of the last rank that stays are found one after the
// other, from the weights of the candidates that share the digits so far. Weights are whole numbers, whose sum is the
// same in any order.
#pragma once

#include <cmath>
#include <cstdint>

#include "sampling/gpu_row.h"

namespace gristmill::gpu {

inline constexpr int kSampleThreads = 512;
inline constexpr int kDigitBits = 11;
inline constexpr int kBins = 1 << kDigitBits;
inline constexpr int kBinsPerThread = kBins / kSampleThreads;
inline constexpr int kCopies = 4;  // of the histogram, so that the lanes of a warp meet less often
inline constexpr int kListed = 2048;

// Sums of 64 bits in halves: a GPU has no addition of 64 bits to shared memory.
struct Histogram {
  uint32_t* low;
  uint32_t* high;

  __device__ void clear() {
    for (int i = static_cast<int>(threadIdx.x); i < kBins * kCopies; i += kSampleThreads) low[i] = high[i] = 0;
  }
  __device__ void add(int bin, uint64_t weight) {
    const int at = bin * kCopies + static_cast<int>(threadIdx.x) % kCopies;
    const uint32_t small = static_cast<uint32_t>(weight), before = atomic_add(low + at, small);
    const uint32_t large = static_cast<uint32_t>(weight >> 32) + (before + small < before ? 1 : 0);
    if (large != 0) atomic_add(high + at, large);
  }
  __device__ void set(int bin, uint64_t sum) {
    for (int i = bin * kCopies; i < (bin + 1) * kCopies; ++i) low[i] = high[i] = 0;
    low[bin * kCopies] = static_cast<uint32_t>(sum);
    high[bin * kCopies] = static_cast<uint32_t>(sum >> 32);
  }
  __device__ uint64_t of(int bin) const {
    uint64_t sum = 0;
    for (int i = bin * kCopies; i < (bin + 1) * kCopies; ++i) sum += low[i] + (static_cast<uint64_t>(high[i]) << 32);
    return sum;
  }
};

// What the threads of a block share.
struct SampleScratch {
  Histogram histogram;
  int32_t* ids;
  float* values;
  int* listed;
  uint64_t* per_warp;
  int* place_per_warp;
  uint64_t* found;  // the mass before a bin and in it

  static constexpr size_t kBytes = sizeof(uint32_t) * 2 * kBins * kCopies + (sizeof(int32_t) + sizeof(float)) * kListed;
};

// A candidate stays while the weight before it is below the limit.
struct Limit {
  bool of_mass;   // else of candidates, by number
  double amount;  // a part of the whole mass, or a number
  __device__ bool keeps(uint64_t before, uint64_t total) const {
    return of_mass ? static_cast<double>(before) / static_cast<double>(total) < amount
                   : static_cast<double>(before) < amount;
  }
};

struct Selection {
  uint64_t last;   // the rank from which on candidates stay
  uint64_t until;  // a bound of the weight of all that stay
};

// The lowest bin that still has something to keep, its weight and what comes before it. At least the highest that is
// not empty.
struct Border {
  int bin;
  uint64_t before, weight, total;
};

__device__ inline Border border_of(const SampleScratch& s, const Limit& limit, uint64_t base, uint64_t total) {
  const int lane = lane_index(), first = static_cast<int>(threadIdx.x) * kBinsPerThread;
  uint64_t weights[kBinsPerThread], mine = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) mine += weights[i] = s.histogram.of(kBins - 1 - (first + i));
  uint64_t before = mine;
#pragma unroll
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const uint64_t other = shuffle_up(before, delta);
    if (lane >= delta) before += other;
  }
  if (lane == kWarp - 1) s.per_warp[warp_index()] = before;
  sync_block();
  before -= mine;
  uint64_t all = 0;
  for (int w = 0; w < kSampleThreads / kWarp; ++w) {
    if (w < warp_index()) before += s.per_warp[w];
    all += s.per_warp[w];
  }
  if (total == 0) total = all;
  int place = -1;
  uint64_t before_place = 0, weight = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    if (weights[i] > 0 && (before == 0 || limit.keeps(base + before, total))) {
      place = first + i;
      before_place = before;
      weight = weights[i];
    }
    before += weights[i];
  }
  const int last = block_max(place, s.place_per_warp);
  if (place == last && place >= 0) {
    s.found[0] = before_place;
    s.found[1] = weight;
  }
  sync_block();
  return {kBins - 1 - last, base + s.found[0], s.found[1], total};
}

// The whole key from its upper bits: keys of negative logits are inverted, so that their tail is of ones.
template <int kKeyBits>
__device__ inline uint32_t key_with_tail(uint32_t upper) {
  constexpr int kTail = 32 - kKeyBits;
  const bool negative = upper >> (kKeyBits - 1) == 0;
  return kTail == 0 ? upper : upper << kTail | (negative ? (1u << kTail) - 1 : 0u);
}

// visit(f) calls f(key, id, logit) for the candidates of this thread; weigh(logit) is at least 1 and the same for equal
// keys. kKeyBits of a key can differ, ids are below 2^id_bits.
template <int kKeyBits, typename Visit, typename Weigh>
__device__ Selection select(SampleScratch& s, int id_bits, const Limit& limit, Visit&& visit, Weigh&& weigh) {
  uint64_t prefix = 0, base = 0, total = 0, until = 0;
  int top = 64;  // bits not known yet
  while (top > 0) {
    const int left = top > 32 ? top - (64 - kKeyBits) : top, bits = left < kDigitBits ? left : kDigitBits;
    const int shift = top - bits;
    s.histogram.clear();
    sync_block();
    visit([&](uint32_t key, int32_t id, float x) {
      const uint64_t rank = rank_of(key, id);
      if (top < 64 && rank >> top != prefix) return;
      s.histogram.add(static_cast<int>(rank >> shift & ((uint64_t{1} << bits) - 1)), weigh(x));
    });
    sync_block();
    const Border border = border_of(s, limit, base, total);
    base = border.before;
    total = border.total;
    until = base + border.weight;
    prefix = prefix << bits | static_cast<uint64_t>(border.bin);
    top = shift;
    if (limit.keeps(until - 1, total)) break;  // all of the bin stay
    if (top == 64 - kKeyBits) {                // equal logits: the ids decide
      prefix = key_with_tail<kKeyBits>(static_cast<uint32_t>(prefix));
      top = 32;
      if (border.weight == weigh(value_of(static_cast<uint32_t>(prefix)))) break;  // it is one
      prefix = ((prefix + 1) << (32 - id_bits)) - 1;  // the bits above an id's, inverted, are set
      top = id_bits;
    }
  }
  return {prefix << top, until};
}

}  // namespace gristmill::gpu
