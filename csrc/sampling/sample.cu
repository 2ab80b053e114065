// Random choice of a token on GPUs: one block per row, one launch; several blocks per row, and a launch for each step,
// where there are few rows. The same token as the CPU draws, without a sort: see
// gpu_select.h, and select_roughly for top-p over a whole row. The k best are sought among a few: at least k logits are
// not below the k-th of the threads' best ones.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <bit>
#include <cmath>

#include "common/gpu_launch.h"
#include "common/gpu_rows.h"
#include "sampling/checks.h"
#include "sampling/gpu_row.h"
#include "sampling/gpu_select.h"
#include "sampling/gumbel.h"
#include "sampling/sampling.h"

namespace gristmill::gpu {
namespace {

// Twice a bound on the error of the float scores that matter (those within 30 of the largest).
constexpr float kSlack = 0.02f;
constexpr int kWarps = kSampleThreads / kWarp;
constexpr int kPacksAhead = 3;

struct Request {
  double temperature;
  int64_t top_k;
  double top_p;
  double min_p;
  uint64_t seed;
  uint32_t position;
};

template <typename T>
struct Problem {
  int32_t* out;
  const T* logits;
  int64_t stride, vocab;
  bool aligned;
  int id_bits;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int32_t* positions;

  __device__ Request request(int64_t row) const {
    return {temperature[row],
            top_k[row],
            top_p[row],
            min_p[row],
            static_cast<uint64_t>(seeds[row]),
            static_cast<uint32_t>(positions[row])};
  }
};

// How likely a logit is, in double: its score is (logit - largest) / temperature.
struct Scores {
  float largest;
  double temperature, inverse;
  int unit_bits;  // the weight of the largest is two to that power

  __device__ double score(float x) const { return (static_cast<double>(x) - largest) / temperature; }

  // Equal for equal scores: an infinite temperature makes all alike, and beside a large one small logits round.
  __device__ uint32_t key(float x) const {
    if (!(temperature < INFINITY)) return key_of(0.0f);
    if (fabsf(x) < fabsf(largest) * 0x1p-28f) x = static_cast<float>((static_cast<double>(x) - largest) + largest);
    return key_of(x);
  }

  __device__ uint64_t mass(float x) const {
    const double score = (static_cast<double>(x) - largest) * inverse;
    if (score < -50) return 1;
    const double weight = exp(score) * static_cast<double>(uint64_t{1} << unit_bits);
    return weight < 1 ? 1 : static_cast<uint64_t>(weight + 0.5);
  }
};

struct MinP {
  bool on;
  double least, border;

  __device__ explicit MinP(double min_p)
      : on(min_p > 0), least(min_p < 1 ? min_p : 1.0), border(on ? log(min_p < 1 ? min_p : 1.0) : 0.0) {}

  // Only near the border is the exponential itself compared.
  __device__ bool keeps(const Scores& scores, float x) const {
    if (!on) return true;
    const double score = scores.score(x), slack = 1e-9;
    return score >= border + slack || (score >= border - slack && exp(score) >= least);
  }
};

// The candidates of a row: those in the list, or all logits, from rank `least` on.
template <typename T>
struct Candidates {
  const LogitRow<T>& row;
  const Scores& scores;
  const SampleScratch& scratch;
  int listed = -1;
  uint64_t least = 0;

  template <typename F>
  __device__ void each(F&& f) const {
    const auto pass = [&](int32_t id, float x) {
      if (least == 0 || rank_of(scores.key(x), id) >= least) f(id, x);
    };
    if (listed < 0) {
      return row.template packs_ahead<kPacksAhead>(
          [&](int64_t first, const auto& pack) { row.each_of(first, pack, pass); });
    }
    for (int i = static_cast<int>(threadIdx.x); i < listed; i += kSampleThreads)
      pass(scratch.ids[i], scratch.values[i]);
  }
  __device__ Selection select(SampleScratch& s, int id_bits, const Limit& limit) const {
    constexpr int kKeyBits = sizeof(T) == 2 ? 22 : 32;
    return gpu::select<kKeyBits>(
        s, id_bits, limit, [&](auto&& f) { each([&](int32_t id, float x) { f(scores.key(x), id, x); }); },
        [&](float x) { return limit.of_mass ? scores.mass(x) : uint64_t{1}; });
  }
};

// Lists what `visit` gives to its argument; how much that is, which may be more than the list holds.
template <typename Visit>
__device__ int list(SampleScratch& s, Visit&& visit) {
  if (threadIdx.x == 0) *s.listed = 0;
  sync_block();
  visit([&](int32_t id, float x) {
    const int at = atomic_add(s.listed, 1);
    if (at >= kListed) return;
    s.ids[at] = id;
    s.values[at] = x;
  });
  sync_block();
  return *s.listed;
}

template <typename T>
__device__ void keep_top_k(SampleScratch& s, Candidates<T>& candidates, uint64_t mine, int64_t k, int id_bits) {
  const Limit limit{false, static_cast<double>(k)};
  if (k <= kSampleThreads) {
    candidates.listed = list(s, [&](auto&& f) {
      if (mine != 0) f(id_of(mine), value_of(static_cast<uint32_t>(mine >> 32)));
    });
    const Selection best = candidates.select(s, id_bits, limit);
    candidates.listed = -1;
    if (best.until >= static_cast<uint64_t>(k)) {
      candidates.least = best.last;
      const int count = list(s, [&](auto&& f) { candidates.each(f); });
      if (count <= kListed) candidates.listed = count;
    }
  }
  candidates.least = candidates.select(s, id_bits, limit).last;
}

// What a mass is to within kError of it and 1.5 units, without double precision: the exponent of two is a sum of a
// large part and its rounding errors. Larger logits have larger exponents.
struct RoughMass {
  static constexpr double kError = 0x1p-21;  // of exp2_fast, 2^-22, and what is not carried along
  static constexpr float kLeast = -100.0f;   // below it a mass is one unit
  float largest, scale, scale_rest;
  int unit_bits;

  __device__ explicit RoughMass(const Scores& scores)
      : largest(scores.largest),
        scale(static_cast<float>(scores.inverse * 1.4426950408889634)),
        scale_rest(static_cast<float>(scores.inverse * 1.4426950408889634 - scale)),
        unit_bits(scores.unit_bits) {}

  __device__ float exponent(float x) const { return (x - largest) * scale; }

  __device__ uint64_t mass(float x) const {
    const float difference = x - largest, large = difference * scale;
    if (!(large > kLeast)) return 1;
    const float back = difference - x, rest = (x - (difference - back)) + (-largest - back);
    const float small = fmaf(rest, scale, fmaf(difference, scale_rest, fmaf(difference, scale, -large)));
    const float whole = large + kRounds;
    const uint32_t bits = __float_as_uint(exp2_fast((large - (whole - kRounds)) + small));
    const uint64_t digits = (bits & 0x7fffffu) | 0x800000u;
    const int shift = static_cast<int>(bits >> 23) - 150 + unit_bits + rounded(whole);
    if (shift >= 0) return digits << shift;
    return shift > -23 ? digits >> -shift : 1;
  }

  // Between them lies what top_p may mean for shares of such masses: both sums are off by kError and 1.5 units a token.
  struct Limits {
    Limit surely, perhaps;
  };
  __device__ Limits limits(double top_p, int64_t vocab) const {
    const double slack =
        2.1 * kError * top_p + 4 * static_cast<double>(vocab) / static_cast<double>(uint64_t{1} << unit_bits);
    return {{true, top_p - slack}, {true, top_p + slack}};
  }

  // A whole number from what it became by the addition of kRounds.
  static constexpr float kRounds = 0x1.8p23f;
  __device__ static int rounded(float sum) { return __float_as_int(sum) - __float_as_int(kRounds); }

  // Larger logits never have smaller bins; a bin is 1/64 wide.
  __device__ int bin(float x) const {
    const float large = exponent(x);
    if (!(large > kLeast)) return 0;
    const int bin = kBins - 1 + rounded(fmaf(large, 64.0f, kRounds));
    return bin < 0 ? 0 : bin;
  }
};

constexpr int kFew = 1024;

// The few candidates of one bin, whose ranks and weights are listed, each compared with all: the last rank that stays,
// or 0 if with one of the limits less stays than with the other.
__device__ inline uint64_t last_of_few(const SampleScratch& s, const uint64_t* ranks, const uint64_t* weights,
                                       int count, uint64_t base, uint64_t total, const Limit& surely,
                                       const Limit& perhaps) {
  uint64_t least = kBroken;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSampleThreads) {
    const uint64_t rank = ranks[i];
    uint64_t before = base;
    for (int j = 0; j < count; ++j) before += ranks[j] > rank ? weights[j] : 0;
    const bool stays = before == 0 || surely.keeps(before, total);
    if (stays != (before == 0 || perhaps.keeps(before, total))) {
      least = 0;
    } else if (stays && rank < least) {
      least = rank;
    }
  }
  return ~block_max(~least, s.per_warp);
}

// Two sums over the block, by way of 2 * kWarps numbers of shared memory that nobody uses.
__device__ inline void add_up(uint64_t* sums, uint64_t& a, uint64_t& b) {
  a = warp_sum(a), b = warp_sum(b);
  if (lane_index() == 0) {
    sums[warp_index()] = a;
    sums[kWarps + warp_index()] = b;
  }
  sync_block();
  a = b = 0;
  for (int w = 0; w < kWarps; ++w) {
    a += sums[w];
    b += sums[kWarps + w];
  }
}

// Like select, but a rough histogram finds the bin where the limit lies, and rough masses will nearly always do to tell
// who of it stays; else exact ones are added up. 0 if the bin is not sure or holds too many.
template <typename T>
__device__ uint64_t select_roughly(SampleScratch& s, const Candidates<T>& candidates, double top_p) {
  const RoughMass masses(candidates.scores);
  const auto [surely, perhaps] = masses.limits(top_p, candidates.row.vocab);
  s.histogram.clear();
  sync_block();
  candidates.each([&](int32_t, float x) { s.histogram.add(masses.bin(x), masses.mass(x)); });
  sync_block();
  const Border border = border_of(s, surely, 0, 0);
  if (border_of(s, perhaps, 0, 0).bin != border.bin) return 0;
  uint64_t* const ranks = reinterpret_cast<uint64_t*>(s.histogram.low);  // it has been read
  uint64_t* const weights = ranks + kFew;
  if (threadIdx.x == 0) *s.listed = 0;
  sync_block();
  candidates.each([&](int32_t id, float x) {
    if (masses.bin(x) != border.bin) return;
    const int at = atomic_add(s.listed, 1);
    if (at >= kFew) return;
    ranks[at] = rank_of(candidates.scores.key(x), id);
    weights[at] = masses.mass(x);
  });
  sync_block();
  const int count = *s.listed;
  if (count > kFew) return 0;
  const uint64_t last = last_of_few(s, ranks, weights, count, border.before, border.total, surely, perhaps);
  if (last != 0) return last;
  uint64_t above = 0, others = 0;
  candidates.each(
      [&](int32_t, float x) { (masses.bin(x) > border.bin ? above : others) += candidates.scores.mass(x); });
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSampleThreads)
    weights[i] = candidates.scores.mass(value_of(static_cast<uint32_t>(ranks[i] >> 32)));
  add_up(weights + kFew, above, others);
  const Limit exactly{true, top_p};
  return last_of_few(s, ranks, weights, count, above, above + others, exactly, exactly);
}

template <typename T>
__device__ void keep_top_p(SampleScratch& s, Candidates<T>& candidates, bool roughly, double top_p, int id_bits) {
  const uint64_t least = roughly && candidates.listed < 0 ? select_roughly(s, candidates, top_p) : 0;
  candidates.least = least != 0 ? least : candidates.select(s, id_bits, {true, top_p}).last;
}

// The noise of a random word to about 1e-5. Where u is near 1 the inner logarithm is a series in 1 - u.
__device__ inline float unit_interval(uint32_t word) {
  return fmaf(static_cast<float>(word >> 16), 65536.0f, static_cast<float>(word & 0xffffu) + 0.5f) * 0x1p-32f;
}
__device__ inline float rough_noise(uint32_t word) {
  const float rest = unit_interval(~word);
  const float series = rest * fmaf(rest, fmaf(rest, 1.0f / 3, 0.5f), 1.0f);
  return -logf(rest < 0.03125f ? series : -logf(unit_interval(word)));
}

// The best candidate of a thread, and then of the block. Equals: the lowest id.
struct Best {
  uint64_t value = 0;  // in the order of the doubles
  int32_t id = INT32_MAX;

  __device__ void see(double x, int32_t token) {
    const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x + 0.0));
    const uint64_t ordered = bits ^ (bits >> 63 != 0 ? ~uint64_t{0} : uint64_t{1} << 63);
    if (ordered < value || (ordered == value && token > id)) return;
    value = ordered;
    id = token;
  }
  __device__ Best of_block(const SampleScratch& s) const {
    const uint64_t largest = block_max(value, s.per_warp);
    return {largest, -block_max(value == largest ? -id : -INT32_MAX, s.place_per_warp)};
  }
};

template <typename T>
__device__ void draw_from_list(const Candidates<T>& candidates, const Request& request, const MinP& min_p, Best& best) {
  candidates.each([&](int32_t id, float x) {
    if (!min_p.keeps(candidates.scores, x)) return;
    best.see(candidates.scores.score(x) + gumbel(request.seed, request.position, static_cast<uint32_t>(id)), id);
  });
}

// f(id, logit, rough value) of every candidate of this thread.
template <typename T, typename F>
__device__ void roughly(const Candidates<T>& candidates, const Request& request, const MinP& min_p, F&& f) {
  const Scores& scores = candidates.scores;
  const float divisor = static_cast<float>(request.temperature);
  const int64_t base = candidates.row.base;
  candidates.row.template packs_ahead<kPacksAhead>([&](int64_t first, const auto& pack) {
#pragma unroll
    for (int group = 0; group < LogitRow<T>::N; group += 4) {
      bool kept[4], any = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = to_float(pack[group + i]);
        const int64_t place = first + group + i, id = base + place;
        kept[i] = place < candidates.row.vocab && x != -INFINITY &&
                  (candidates.least == 0 || rank_of(scores.key(x), static_cast<int32_t>(id)) >= candidates.least) &&
                  min_p.keeps(scores, x);
        any = any || kept[i];
      }
      if (!any) continue;
      const PhiloxWords words =
          philox(request.seed, request.position, static_cast<uint32_t>((base + first + group) / 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = to_float(pack[group + i]);
        if (kept[i]) {
          f(static_cast<int32_t>(base + first + group + i), x,
            (x - scores.largest) / divisor + rough_noise(words.words[i]));
        }
      }
    }
  });
}

// Only what comes close to the best of the row by its rough value is computed in double.
template <typename T>
__device__ void draw_from_row(const Candidates<T>& candidates, const Request& request, const MinP& min_p,
                              float* scratch, Best& best) {
  float first = -INFINITY, second = -INFINITY, logit = 0;
  int32_t first_id = 0;
  roughly(candidates, request, min_p, [&](int32_t id, float x, float value) {
    if (value > first) {
      second = first;
      first = value;
      first_id = id;
      logit = x;
    } else if (value > second) {
      second = value;
    }
  });
  const float close = block_max(first, scratch) - kSlack;
  const auto see = [&](int32_t id, float x, float value) {
    if (!(value >= close && value > -INFINITY)) return;
    best.see(candidates.scores.score(x) + gumbel(request.seed, request.position, static_cast<uint32_t>(id)), id);
  };
  if (second >= close) return roughly(candidates, request, min_p, see);
  see(first_id, logit, first);
}

// A block's, in its dynamic shared memory and some more.
__device__ inline SampleScratch sample_scratch() {
  GRISTMILL_SHARED(uint64_t, per_warp, kWarps);
  GRISTMILL_SHARED(int, place_per_warp, kWarps);
  GRISTMILL_SHARED(uint64_t, found, 2);
  GRISTMILL_SHARED(int, listed, 1);
  uint32_t* const words = dynamic_shared<uint32_t>();
  int32_t* const ids = reinterpret_cast<int32_t*>(words + 2 * kBins * kCopies);
  return {{words, words + kBins * kCopies},
          ids,
          reinterpret_cast<float*>(ids + kListed),
          listed,
          per_warp,
          place_per_warp,
          found};
}

// What the blocks of a row leave each other in global memory.
struct Pieces {
  uint64_t* memory;  // null: a block has its row to itself
  int count;
  int64_t size;  // of a piece, in logits

  enum Status : uint64_t { kOpen, kUnsure, kDrawn };

  static constexpr int kPerPiece = 5, kPerRow = kBins + kFew + 2;
  __device__ uint64_t* bests() const {
    return memory + static_cast<int64_t>(blockIdx.x) * (kPerPiece * count + kPerRow);
  }
  __device__ uint64_t* above() const { return bests() + count; }  // exact masses
  __device__ uint64_t* others() const { return above() + count; }
  __device__ uint64_t* values() const { return others() + count; }
  __device__ uint64_t* ids() const { return values() + count; }
  __device__ uint64_t* histogram() const { return ids() + count; }
  __device__ uint64_t* ranks() const { return histogram() + kBins; }
  __device__ int* listed() const { return reinterpret_cast<int*>(ranks() + kFew); }
  __device__ uint64_t* status() const { return ranks() + kFew + 1; }

  __device__ uint64_t best() const {
    uint64_t best = 0;
    for (int i = 0; i < count; ++i) best = max(best, bests()[i]);
    return best;
  }
  __device__ Best drawn() const {
    Best best;
    for (int i = 0; i < count; ++i) {
      const Best one{values()[i], static_cast<int32_t>(ids()[i])};
      if (one.value > best.value || (one.value == best.value && one.id < best.id)) best = one;
    }
    return best;
  }
};

// A row, or a piece of one, and how it is drawn from.
template <typename T>
struct Draw {
  Request request;
  LogitRow<T> row;
  uint64_t top;

  __device__ Draw(const Problem<T>& p, const Pieces& pieces)
      : request(p.request(blockIdx.x)), row(row_of(p, pieces)), top(0) {}

  __device__ static LogitRow<T> row_of(const Problem<T>& p, const Pieces& pieces) {
    const T* const x = p.logits + blockIdx.x * p.stride;
    const int64_t begin = pieces.memory == nullptr ? 0 : blockIdx.y * pieces.size;
    return {x + begin, gridDim.y == 1 ? p.vocab : min(pieces.size, p.vocab - begin), p.aligned, begin};
  }

  __device__ bool valid() const { return top != 0 && top != kBroken && request.temperature == request.temperature; }
  __device__ bool takes_best() const { return request.temperature <= 0; }
  __device__ bool takes_k(const Problem<T>& p) const { return request.top_k > 0 && request.top_k < p.vocab; }
  __device__ Scores scores(const Problem<T>& p) const {
    return {value_of(static_cast<uint32_t>(top >> 32)), request.temperature, 1 / request.temperature,
            p.id_bits > 10 ? 62 - p.id_bits : 52};
  }
  // What the steps below are for: with top-k a block has its row to itself.
  __device__ bool in_pieces(const Problem<T>& p) const { return valid() && !takes_best() && !takes_k(p); }
  __device__ bool has_rough_masses() const {
    return request.top_p < 1 && request.temperature > 0x1p-20 && request.temperature < 0x1p20;
  }
};

// The steps for rows in pieces: the best; rough masses; who is where the limit of top-p lies; a draw of every piece.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads) best_kernel(const Problem<T> p, const Pieces pieces) {
  GRISTMILL_SHARED(uint64_t, per_warp, kWarps);
  follow_previous_kernel();
  const int at = static_cast<int>(blockIdx.y) * kSampleThreads + static_cast<int>(threadIdx.x);
  for (int i = at; i < kBins; i += pieces.count * kSampleThreads) pieces.histogram()[i] = 0;
  if (at == 0) {
    *pieces.listed() = 0;
    *pieces.status() = Pieces::kOpen;
  }
  const uint64_t best = block_max(best_of_thread(Draw<T>::row_of(p, pieces)), per_warp);
  if (threadIdx.x == 0) pieces.bests()[blockIdx.y] = best;
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads) mass_kernel(const Problem<T> p, const Pieces pieces) {
  follow_previous_kernel();
  Draw<T> draw(p, pieces);
  draw.top = pieces.best();
  if (!draw.in_pieces(p) || !draw.has_rough_masses()) return;
  SampleScratch s = sample_scratch();
  const Scores scores = draw.scores(p);
  const RoughMass masses(scores);
  s.histogram.clear();
  sync_block();
  Candidates<T>{draw.row, scores, s}.each([&](int32_t, float x) { s.histogram.add(masses.bin(x), masses.mass(x)); });
  sync_block();
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kSampleThreads) {
    const uint64_t mass = s.histogram.of(bin);
    if (mass != 0) atomic_add(pieces.histogram() + bin, mass);
  }
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads) border_kernel(const Problem<T> p, const Pieces pieces) {
  follow_previous_kernel();
  Draw<T> draw(p, pieces);
  draw.top = pieces.best();
  if (!draw.in_pieces(p) || !draw.has_rough_masses()) return;
  SampleScratch s = sample_scratch();
  const Scores scores = draw.scores(p);
  const RoughMass masses(scores);
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kSampleThreads)
    s.histogram.set(bin, pieces.histogram()[bin]);
  sync_block();
  const auto [surely, perhaps] = masses.limits(draw.request.top_p, p.vocab);
  const int border = border_of(s, surely, 0, 0).bin;
  if (border_of(s, perhaps, 0, 0).bin != border) {
    if (threadIdx.x == 0) *pieces.status() = Pieces::kUnsure;
    return;
  }
  uint64_t above = 0, others = 0;
  Candidates<T>{draw.row, scores, s}.each([&](int32_t id, float x) {
    const int bin = masses.bin(x);
    (bin > border ? above : others) += scores.mass(x);
    if (bin != border) return;
    const int at = atomic_add(pieces.listed(), 1);
    if (at < kFew) pieces.ranks()[at] = rank_of(scores.key(x), id);
  });
  add_up(reinterpret_cast<uint64_t*>(s.histogram.low), above, others);
  if (threadIdx.x != 0) return;
  pieces.above()[blockIdx.y] = above;
  pieces.others()[blockIdx.y] = others;
}

// From which rank on candidates stay, by top-p; kBroken if the whole row must be looked at again.
template <typename T>
__device__ uint64_t least_of_pieces(const SampleScratch& s, const Draw<T>& draw, const Scores& scores,
                                    const Pieces& pieces) {
  if (!(draw.request.top_p < 1)) return 0;
  if (!draw.has_rough_masses() || *pieces.status() == Pieces::kUnsure || *pieces.listed() > kFew) return kBroken;
  const int count = *pieces.listed();
  uint64_t* const ranks = reinterpret_cast<uint64_t*>(s.histogram.low);
  uint64_t* const weights = ranks + kFew;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSampleThreads) {
    ranks[i] = pieces.ranks()[i];
    weights[i] = scores.mass(value_of(static_cast<uint32_t>(ranks[i] >> 32)));
  }
  uint64_t above = 0, others = 0;
  for (int i = 0; i < pieces.count; ++i) {
    above += pieces.above()[i];
    others += pieces.others()[i];
  }
  sync_block();
  const Limit exactly{true, draw.request.top_p};
  return last_of_few(s, ranks, weights, count, above, above + others, exactly, exactly);
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads) draw_kernel(const Problem<T> p, const Pieces pieces) {
  GRISTMILL_SHARED(float, rough_per_warp, kWarps);
  follow_previous_kernel();
  Draw<T> draw(p, pieces);
  draw.top = pieces.best();
  if (!draw.in_pieces(p)) return;
  SampleScratch s = sample_scratch();
  const Scores scores = draw.scores(p);
  const uint64_t least = least_of_pieces(s, draw, scores, pieces);
  if (least == kBroken) return;
  Best best;
  draw_from_row(Candidates<T>{draw.row, scores, s, -1, least}, draw.request, MinP(draw.request.min_p), rough_per_warp,
                best);
  best = best.of_block(s);
  if (threadIdx.x != 0) return;
  pieces.values()[blockIdx.y] = best.value;
  pieces.ids()[blockIdx.y] = static_cast<uint64_t>(best.id);
  *pieces.status() = Pieces::kDrawn;
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads) sample_kernel(const Problem<T> p, const Pieces pieces) {
  GRISTMILL_SHARED(float, rough_per_warp, kWarps);
  SampleScratch s = sample_scratch();
  follow_previous_kernel();
  const bool cut = pieces.memory != nullptr;
  const int64_t b = blockIdx.x;
  Draw<T> draw(p, pieces);
  uint64_t mine = cut ? 0 : best_of_thread(draw.row);
  draw.top = cut ? pieces.best() : block_max(mine, s.per_warp);
  if (!draw.valid() || draw.takes_best()) {
    if (threadIdx.x == 0) p.out[b] = draw.valid() ? id_of(draw.top) : -1;
    return;
  }
  if (cut && *pieces.status() == Pieces::kDrawn) {
    if (threadIdx.x == 0) p.out[b] = pieces.drawn().id;
    return;
  }
  const Request& request = draw.request;
  const Scores scores = draw.scores(p);
  Candidates<T> candidates{draw.row, scores, s};
  if (draw.takes_k(p)) {
    if (cut) mine = best_of_thread(draw.row);
    keep_top_k(s, candidates, mine, request.top_k, p.id_bits);
  }
  if (request.top_p < 1) keep_top_p(s, candidates, draw.has_rough_masses() && !cut, request.top_p, p.id_bits);
  const MinP min_p(request.min_p);
  Best best;
  if (candidates.listed >= 0) {
    draw_from_list(candidates, request, min_p, best);
  } else {
    draw_from_row(candidates, request, min_p, rough_per_warp, best);
  }
  const int32_t id = best.of_block(s).id;
  if (threadIdx.x == 0) p.out[b] = id;
}

// Of more rows, those with top-k pay more for the launches than the others gain by several blocks a row.
constexpr int64_t kFewRows = 8;

template <typename T>
void run(const Launch& launch, const Problem<T>& problem, const Tensor& logits) {
  const int64_t rows = logits.size(0), wanted = pieces_of(launch, rows, problem.vocab, 2048);
  const dim3 block(kSampleThreads);
  Pieces pieces{};
  Tensor memory;
  if (wanted > 1 && rows <= kFewRows) {
    pieces.size = piece_of<T>(problem.vocab, wanted);
    pieces.count = static_cast<int>((problem.vocab + pieces.size - 1) / pieces.size);
    memory = torch::stable::new_empty(logits, {rows * (Pieces::kPerPiece * pieces.count + Pieces::kPerRow)},
                                      ScalarType::Long);
    pieces.memory = reinterpret_cast<uint64_t*>(mutable_data<int64_t>(memory));
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(pieces.count));
    launch.early<best_kernel<T>>(grid, block, problem, pieces);
    launch.early_shared<mass_kernel<T>>(grid, block, SampleScratch::kBytes, problem, pieces);
    launch.early_shared<border_kernel<T>>(grid, block, SampleScratch::kBytes, problem, pieces);
    launch.early_shared<draw_kernel<T>>(grid, block, SampleScratch::kBytes, problem, pieces);
  }
  launch.early_shared<sample_kernel<T>>(dim3(static_cast<unsigned>(rows)), block, SampleScratch::kBytes, problem,
                                        pieces);
}

}  // namespace

void sample(const Tensor& out, const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
            const Tensor& top_p, const Tensor& min_p, const Tensor& seeds, const Tensor& positions) {
  constexpr const char* op = "sample";
  check_sample(out, logits, temperature, top_k, top_p, min_p, seeds, positions, op);
  const int64_t vocab = logits.size(1);
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const Problem<T> problem{
        mutable_data<int32_t>(out), data<T>(logits),
        logits.stride(0),           vocab,
        steps_by(logits, 16),       static_cast<int>(std::bit_width(static_cast<uint64_t>(vocab - 1))),
        data<float>(temperature),   data<int32_t>(top_k),
        data<float>(top_p),         data<float>(min_p),
        data<int64_t>(seeds),       data<int32_t>(positions)};
    run(Launch(logits), problem, logits);
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("sample", TORCH_BOX(&gristmill::gpu::sample));
}
