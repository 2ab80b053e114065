// Decode attention on the CPU: one query row per request. Work items are (chunk of 256 keys, KV head); the query heads
// that share a KV head read its keys and values once. Partial results of requests longer than a chunk are merged in
// order afterwards.
#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "attention/rows.h"
#include "common/parallel.h"

namespace gristmill {
namespace {

constexpr const char* kOp = "decode_attention";
constexpr int32_t kPlanVersion = 1;
constexpr int64_t kPlanHeader = 5;

// Chunks of all requests: items of request b are [request_indptr[b], request_indptr[b + 1]), ascending.
struct Items {
  const int32_t* request_indptr;
  const int32_t* request;
  const int32_t* start;
  int64_t count;
};

Items read_plan(const Tensor& plan, const AttentionProblem& p) {
  check_vector(plan, ScalarType::Int, -1, kOp, "plan");
  const int32_t* words = data<int32_t>(plan);
  STD_TORCH_CHECK(plan.size(0) >= kPlanHeader && words[0] == kPlanVersion, kOp,
                  ": plan must come from plan_decode of this version (", kPlanVersion, ")");
  const int64_t requests = words[1], count = words[2], workers = words[3];
  STD_TORCH_CHECK(requests == p.requests && words[4] == kChunk, kOp, ": plan is for ", requests, " requests cut every ",
                  words[4], " tokens, the call has ", p.requests, " cut every ", kChunk);
  STD_TORCH_CHECK(count >= 0 && workers >= 0 && plan.size(0) >= kPlanHeader + workers + 1 + requests + 1 + 2 * count,
                  kOp, ": plan has ", plan.size(0), " words, fewer than its header promises");
  // The division among workers is for devices without a shared counter; here the next free thread takes the next item.
  const int32_t* request_indptr = words + kPlanHeader + workers + 1;
  const Items items{request_indptr, request_indptr + requests + 1, request_indptr + requests + 1 + count, count};
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t chunks = (p.kv_len(b) + kChunk - 1) / kChunk;
    const int64_t first = request_indptr[b];
    STD_TORCH_CHECK(first >= 0 && request_indptr[b + 1] - first == chunks && first + chunks <= count, kOp,
                    ": plan cuts request ", b, " into ", request_indptr[b + 1] - first, " chunks, its ", p.kv_len(b),
                    " entries need ", chunks);
    for (int64_t i = 0; i < chunks; ++i) {
      STD_TORCH_CHECK(items.request[first + i] == b && items.start[first + i] == i * kChunk, kOp, ": plan item ",
                      first + i, " is not chunk ", i, " of request ", b);
    }
  }
  return items;
}

// The same list without a plan; `words` keeps it alive.
Items make_items(const AttentionProblem& p, std::vector<int32_t>& words) {
  int64_t count = 0;
  for (int64_t b = 0; b < p.requests; ++b) count += (p.kv_len(b) + kChunk - 1) / kChunk;
  words.resize(static_cast<size_t>(p.requests + 1 + 2 * count));
  int32_t* request_indptr = words.data();
  int32_t* request = request_indptr + p.requests + 1;
  int32_t* start = request + count;
  int32_t item = 0;
  request_indptr[0] = 0;
  for (int64_t b = 0; b < p.requests; ++b) {
    for (int64_t first = 0; first < p.kv_len(b); first += kChunk, ++item) {
      request[item] = static_cast<int32_t>(b);
      start[item] = static_cast<int32_t>(first);
    }
    request_indptr[b + 1] = item;
  }
  return {request_indptr, request, start, count};
}

template <typename T>
class Decode {
 public:
  Decode(const AttentionProblem& p, const Items& items, float* partial) : p_(p), items_(items), partial_(partial) {}

  void run() {
    const int64_t head_bytes = (p_.head_dim + p_.head_dim_v) * static_cast<int64_t>(sizeof(T));
    parallel_units(items_.count * p_.num_kv_heads, kChunk * head_bytes,
                   [&](int64_t unit) { run_item(unit / p_.num_kv_heads, unit % p_.num_kv_heads); });
    parallel_units(p_.requests * p_.num_qo_heads, p_.head_dim_v * 4, [&](int64_t unit) {
      const int64_t b = unit / p_.num_qo_heads;
      if (num_items(b) != 1) merge(b, unit % p_.num_qo_heads);
    });
    bad_.check(kOp, p_.num_slots);
  }

 private:
  int64_t num_items(int64_t request) const {
    return items_.request_indptr[request + 1] - items_.request_indptr[request];
  }
  float* partial(int64_t item, int64_t head) const {
    return partial_ + (item * p_.num_qo_heads + head) * (p_.head_dim_v + 2);
  }

  void run_item(int64_t item, int64_t kv_head) {
    static thread_local QueryRows<T> rows;
    const int64_t request = items_.request[item], start = items_.start[item];
    const int64_t group = p_.group(), first_head = kv_head * group;
    ChunkKeys<T> chunk;
    chunk.locate(p_, request, kv_head, start, bad_);
    uint8_t mask[kChunk];
    if (chunk.holes) {
      for (int64_t j = 0; j < chunk.count; ++j) mask[j] = chunk.k[j] != nullptr;
    }
    const int64_t begin = std::max<int64_t>(0, p_.window_start(p_.kv_len(request) - 1) - start);
    rows.resize(p_, group);
    for (int64_t g = 0; g < group; ++g) {
      rows.load(p_, g, request, first_head + g);
      rows.range(g) = RowRange{begin, chunk.count, chunk.holes ? mask : nullptr};
    }
    rows.ready(p_);
    rows.attend(p_, chunk);
    const bool alone = num_items(request) == 1;
    for (int64_t g = 0; g < group; ++g) {
      if (alone) {
        finish_row(p_, request, first_head + g, rows.sum(g), rows.state(g));
      } else {
        float* to = partial(item, first_head + g);
        std::copy_n(rows.sum(g), p_.head_dim_v, to);
        to[p_.head_dim_v] = rows.state(g).largest;
        to[p_.head_dim_v + 1] = rows.state(g).total;
      }
    }
  }

  // The chunks of a request in ascending order; also the answer of a request without keys.
  void merge(int64_t request, int64_t head) {
    static thread_local Scratch scratch;
    float* sum = scratch.get<float>(p_.head_dim_v);
    std::fill_n(sum, p_.head_dim_v, 0.0f);
    RowState state{-INFINITY, 0};
    for (int64_t item = items_.request_indptr[request]; item < items_.request_indptr[request + 1]; ++item) {
      const float* part = partial(item, head);
      merge_chunk(sum, state, part, RowState{part[p_.head_dim_v], part[p_.head_dim_v + 1]}, p_.head_dim_v);
    }
    finish_row(p_, request, head, sum, state);
  }

  const AttentionProblem& p_;
  const Items& items_;
  float* partial_;
  BadSlot bad_;
};

}  // namespace

void decode_attention(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& kv_indptr, const Tensor& kv_indices,
                      const OptionalTensor& sinks, const OptionalTensor& plan, const OptionalTensor& workspace,
                      double sm_scale, double logit_cap, int64_t window_left, double k_scale, double v_scale) {
  static thread_local std::vector<int32_t> words;
  static thread_local Scratch scratch;
  const AttentionProblem p = make_problem(kOp, out, lse, q, k_cache, v_cache, kv_indptr, kv_indices, sinks, sm_scale,
                                          logit_cap, window_left, k_scale, v_scale);
  check_size(kv_indptr, 0, p.rows + 1, kOp, "kv_indptr");
  const Items items = plan ? read_plan(*plan, p) : make_items(p, words);
  const int64_t needed = items.count * p.num_qo_heads * (p.head_dim_v + 2);
  float* partial = nullptr;
  if (plan) {
    STD_TORCH_CHECK(workspace.has_value(), kOp, ": workspace must be given with a plan");
    check_dtype(*workspace, ScalarType::Float, kOp, "workspace");
    STD_TORCH_CHECK(workspace->is_contiguous() && workspace->numel() >= needed, kOp,
                    ": workspace must be contiguous with at least ", needed, " elements, got ", workspace->numel());
    partial = mutable_data<float>(*workspace);
  } else {
    partial = scratch.get<float>(needed);
  }
  dispatch_float(k_cache.scalar_type(), kOp, "k_cache",
                 [&](auto tag) { Decode<decltype(tag)>(p, items, partial).run(); });
}

}  // namespace gristmill
