// Random choice of a token on the CPU: temperature, top-k, top-p, min-p, then the Gumbel-max draw. No full sort of the
// vocabulary: a partial selection finds the top k, and a histogram of probability mass narrows top-p down to one
// bucket.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/parallel.h"
#include "common/vec.h"
#include "sampling/checks.h"
#include "sampling/gumbel_scan.h"
#include "sampling/row_scan.h"
#include "sampling/sampling.h"

namespace gristmill {
namespace {

struct Candidate {
  double score;  // (logit - largest logit) / temperature, at most 0
  int32_t id;
};

// Equal scores rank by lowest id.
inline bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

struct Request {
  double temperature;
  int64_t top_k;
  double top_p;
  double min_p;
  uint64_t seed;
  uint32_t position;
};

// Working memory of one thread, kept between calls.
struct Workspace {
  std::vector<Candidate> candidates;
  std::vector<Candidate> boundary;
};

template <typename T>
void collect(const T* logits, int64_t vocab, float largest, double temperature, std::vector<Candidate>& candidates) {
  candidates.clear();
  for (int64_t v = 0; v < vocab; ++v) {
    const float x = to_float(logits[v]);
    if (x == -INFINITY) continue;  // an infinite temperature does not revive it
    const double score = (static_cast<double>(x) - largest) / temperature;
    if (score > -INFINITY) candidates.push_back({score, static_cast<int32_t>(v)});
  }
}

// Collects the k best only: candidates are gathered in a buffer that is cut back to k when it is full, and what does
// not reach the worst of the last k is never gathered.
template <typename T>
void collect_top_k(const T* logits, int64_t vocab, float largest, double temperature, int64_t k,
                   std::vector<Candidate>& candidates) {
  candidates.clear();
  const size_t full = static_cast<size_t>(std::max<int64_t>(2 * k, 1024));
  const auto cut = [&] {
    std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), ranks_before);
    candidates.resize(static_cast<size_t>(k));
  };
  float worst = -INFINITY;  // logits below it cannot be among the k best
  int64_t v = 0;
  const auto see = [&](float x, int64_t id) {
    if (x == -INFINITY || x < worst) return;
    const double score = (static_cast<double>(x) - largest) / temperature;
    if (!(score > -INFINITY)) return;
    candidates.push_back({score, static_cast<int32_t>(id)});
    if (candidates.size() < full) return;
    cut();
    worst = to_float(logits[candidates.back().id]);
    // nth_element leaves the worst of the k at the end of the first k.
  };
  for (; v + kLanes <= vocab; v += kLanes) {
    if (!vany(vload(logits + v) >= worst)) continue;
    for (int64_t i = v; i < v + kLanes; ++i) see(to_float(logits[i]), i);
  }
  for (; v < vocab; ++v) see(to_float(logits[v]), v);
  if (candidates.size() > static_cast<size_t>(k)) cut();
}

// Keeps the fewest best candidates whose mass reaches top_p of all: a candidate stays when the mass before it is below
// top_p.
void keep_top_p(double top_p, Workspace& work) {
  std::vector<Candidate>& all = work.candidates;
  constexpr int kBuckets = 512;
  constexpr double kBucketsPerUnit = 16;  // buckets are 1/16 wide in score; the last takes everything below -32
  const auto bucket_of = [](double score) {
    return static_cast<int>(std::min(-score * kBucketsPerUnit, static_cast<double>(kBuckets - 1)));
  };
  double mass[kBuckets] = {};
  for (const Candidate& c : all) mass[bucket_of(c.score)] += std::exp(c.score);
  double total = 0;
  for (double m : mass) total += m;
  double before = 0;
  int last = 0;
  while (last < kBuckets - 1 && (before + mass[last]) / total < top_p) before += mass[last++];
  work.boundary.clear();
  size_t kept = 0;
  for (const Candidate& c : all) {
    const int bucket = bucket_of(c.score);
    if (bucket < last) {
      all[kept++] = c;
    } else if (bucket == last) {
      work.boundary.push_back(c);
    }
  }
  all.resize(kept);
  std::sort(work.boundary.begin(), work.boundary.end(), ranks_before);
  for (const Candidate& c : work.boundary) {
    if (!(before / total < top_p) && !all.empty()) break;
    all.push_back(c);
    before += std::exp(c.score);
  }
}

void keep_min_p(double min_p, std::vector<Candidate>& candidates) {
  const double least = std::min(min_p, 1.0);
  const double border = std::log(least), slack = 1e-9;  // only near the border is the exponential itself compared
  std::erase_if(candidates, [=](const Candidate& c) {
    return c.score < border - slack || (c.score < border + slack && !(std::exp(c.score) >= least));
  });
}

template <typename T>
int64_t sample_row(const T* logits, int64_t vocab, const Request& request) {
  const RowScan scan = scan_row(logits, vocab);
  if (scan.best < 0 || request.temperature <= 0) return scan.best;
  if (std::isnan(request.temperature)) return -1;
  const bool top_k = request.top_k > 0 && request.top_k < vocab, top_p = request.top_p < 1, min_p = request.min_p > 0;
  if (!top_k && !top_p && !min_p) {
    return gumbel_scan(logits, vocab, scan.largest, request.temperature, request.seed, request.position);
  }
  static thread_local Workspace work;
  if (top_k) {
    collect_top_k(logits, vocab, scan.largest, request.temperature, request.top_k, work.candidates);
  } else {
    collect(logits, vocab, scan.largest, request.temperature, work.candidates);
  }
  if (top_p) keep_top_p(request.top_p, work);
  if (min_p) keep_min_p(request.min_p, work.candidates);
  int64_t best = -1;
  double best_value = -INFINITY;
  for (const Candidate& c : work.candidates) {
    const double value = c.score + gumbel(request.seed, request.position, static_cast<uint32_t>(c.id));
    if (value > best_value || (value == best_value && c.id < best)) {
      best_value = value;
      best = c.id;
    }
  }
  return best;
}

}  // namespace

void sample(const Tensor& out, const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
            const Tensor& top_p, const Tensor& min_p, const Tensor& seeds, const Tensor& positions) {
  constexpr const char* op = "sample";
  check_sample(out, logits, temperature, top_k, top_p, min_p, seeds, positions, op);
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  int32_t* ids = mutable_data<int32_t>(out);
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const T* x = data<T>(logits);
    parallel_units(rows, vocab * 16, [&](int64_t b) {
      const Request request{data<float>(temperature)[b],
                            data<int32_t>(top_k)[b],
                            data<float>(top_p)[b],
                            data<float>(min_p)[b],
                            static_cast<uint64_t>(data<int64_t>(seeds)[b]),
                            static_cast<uint32_t>(data<int32_t>(positions)[b])};
      ids[b] = static_cast<int32_t>(sample_row(x + b * stride, vocab, request));
    });
  });
}

}  // namespace gristmill
