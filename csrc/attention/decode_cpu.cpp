// Split-KV attention on the CPU, and decode, which is its case of one query row per request. Work items are (chunk of
// 256 keys, KV head, some rows); the query heads that share a KV head read its keys and values once. Partial results of
// requests longer than a chunk are merged in order afterwards.
#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "attention/rows.h"
#include "attention/split_kv.h"
#include "common/parallel.h"

namespace gristmill {
namespace {

constexpr int32_t kPlanVersion = 2;
constexpr int64_t kPlanHeader = 8;

// Chunks of all requests: items of request b are [request_indptr[b], request_indptr[b + 1]), ascending.
struct Items {
  const int32_t* request_indptr;
  const int32_t* request;
  const int32_t* start;
  int64_t count;
  int64_t max_q_len;  // rows per item in the workspace
};

class SplitRows {
 public:
  SplitRows(const AttentionProblem& p, const int32_t* qo_indptr) : qo_indptr_(qo_indptr) {
    for (int64_t b = 0; b < p.requests; ++b) longest_ = std::max(longest_, count(b));
  }
  int64_t first(int64_t request) const { return qo_indptr_ != nullptr ? qo_indptr_[request] : request; }
  int64_t count(int64_t request) const {
    return qo_indptr_ != nullptr ? qo_indptr_[request + 1] - qo_indptr_[request] : 1;
  }
  int64_t longest() const { return longest_; }

 private:
  const int32_t* qo_indptr_;
  int64_t longest_ = 0;
};

// The first chunk of a request that any of its rows can see.
int64_t first_chunk(const AttentionProblem& p, int64_t request, int64_t q_len) {
  return std::min(p.window_start(p.kv_len(request) - q_len), p.kv_len(request)) / kChunk;
}

Items read_plan(const char* op, const Tensor& plan, const AttentionProblem& p, const SplitRows& rows) {
  check_vector(plan, ScalarType::Int, -1, op, "plan");
  const int32_t* words = data<int32_t>(plan);
  STD_TORCH_CHECK(plan.size(0) >= kPlanHeader && words[0] == kPlanVersion, op,
                  ": plan must come from plan_decode of this version (", kPlanVersion, ")");
  const int64_t requests = words[1], count = words[2], workers = words[3], max_q_len = words[5], room = words[6];
  STD_TORCH_CHECK(requests == p.requests && words[4] == kChunk, op, ": plan is for ", requests, " requests cut every ",
                  words[4], " tokens, the call has ", p.requests, " cut every ", kChunk);
  STD_TORCH_CHECK(count >= 0 && count <= room && workers >= 0 &&
                      plan.size(0) >= kPlanHeader + workers + 1 + requests + 1 + 2 * room,
                  op, ": plan has ", plan.size(0), " words, fewer than its header promises");
  STD_TORCH_CHECK(rows.longest() <= max_q_len, op, ": plan is for at most ", max_q_len,
                  " query rows per request, the call has ", rows.longest());
  // The division among workers is for devices without a shared counter; here the next free thread takes the next item.
  const int32_t* request_indptr = words + kPlanHeader + workers + 1;
  const int32_t* item_request = request_indptr + requests + 1;
  const Items items{request_indptr, item_request, item_request + room, count, max_q_len};
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t chunks = (p.kv_len(b) + kChunk - 1) / kChunk;
    const int64_t first = request_indptr[b], own = request_indptr[b + 1] - first;
    STD_TORCH_CHECK(first >= 0 && own >= 0 && own <= chunks && first + own <= count, op, ": plan cuts request ", b,
                    " into ", own, " chunks, its ", p.kv_len(b), " entries make ", chunks);
    // A plan for a window leaves out the chunks before it.
    STD_TORCH_CHECK(chunks - own <= first_chunk(p, b, rows.count(b)), op, ": plan gives request ", b, " its last ", own,
                    " chunks, but window_left = ", p.window_left, " lets its rows see more of its ", chunks);
    for (int64_t i = 0; i < own; ++i) {
      STD_TORCH_CHECK(item_request[first + i] == b && items.start[first + i] == (chunks - own + i) * kChunk, op,
                      ": plan item ", first + i, " is not chunk ", chunks - own + i, " of request ", b);
    }
  }
  return items;
}

// The same list without a plan; `words` keeps it alive.
Items make_items(const AttentionProblem& p, const SplitRows& rows, std::vector<int32_t>& words) {
  const auto first = [&](int64_t b) { return first_chunk(p, b, rows.count(b)) * kChunk; };
  int64_t count = 0;
  for (int64_t b = 0; b < p.requests; ++b) count += (p.kv_len(b) - first(b) + kChunk - 1) / kChunk;
  words.resize(static_cast<size_t>(p.requests + 1 + 2 * count));
  int32_t* request_indptr = words.data();
  int32_t* request = request_indptr + p.requests + 1;
  int32_t* start = request + count;
  int32_t item = 0;
  request_indptr[0] = 0;
  for (int64_t b = 0; b < p.requests; ++b) {
    for (int64_t at = first(b); at < p.kv_len(b); at += kChunk, ++item) {
      request[item] = static_cast<int32_t>(b);
      start[item] = static_cast<int32_t>(at);
    }
    request_indptr[b + 1] = item;
  }
  return {request_indptr, request, start, count, rows.longest()};
}

template <typename T>
class SplitKv {
 public:
  SplitKv(const char* op, const AttentionProblem& p, const SplitRows& rows, const Items& items, float* partial)
      : op_(op), p_(p), rows_(rows), items_(items), partial_(partial) {
    positions_per_block_ = std::max<int64_t>(1, QueryRows<T>::target_rows(p) / p.group());
    blocks_ = (rows.longest() + positions_per_block_ - 1) / positions_per_block_;
  }

  void run() {
    const int64_t head_bytes = (p_.head_dim + p_.head_dim_v) * static_cast<int64_t>(sizeof(T));
    parallel_units(items_.count * p_.num_kv_heads * blocks_, kChunk * head_bytes, [&](int64_t unit) {
      const int64_t kv_head = unit / blocks_ % p_.num_kv_heads;
      run_item(unit / blocks_ / p_.num_kv_heads, kv_head, unit % blocks_ * positions_per_block_);
    });
    // The number of rows is that of the requests, which need not cover the batch.
    parallel_units(p_.requests * rows_.longest() * p_.num_qo_heads, p_.head_dim_v * 4, [&](int64_t unit) {
      const int64_t head = unit % p_.num_qo_heads, i = unit / p_.num_qo_heads % rows_.longest();
      const int64_t request = unit / p_.num_qo_heads / rows_.longest();
      if (i < rows_.count(request) && num_items(request) != 1) merge(request, i, head);
    });
    bad_.check(op_, p_.num_slots);
  }

 private:
  int64_t num_items(int64_t request) const {
    return items_.request_indptr[request + 1] - items_.request_indptr[request];
  }
  float* partial(int64_t item, int64_t i, int64_t head) const {
    return partial_ + ((item * items_.max_q_len + i) * p_.num_qo_heads + head) * (p_.head_dim_v + 2);
  }

  // Rows [first, first + positions_per_block_) of the item's request, all heads of one KV head.
  void run_item(int64_t item, int64_t kv_head, int64_t first) {
    static thread_local QueryRows<T> rows;
    const int64_t request = items_.request[item], start = items_.start[item];
    const int64_t q_len = rows_.count(request), kv_len = p_.kv_len(request);
    const int64_t positions = std::min(positions_per_block_, q_len - first);
    if (positions <= 0) return;
    const int64_t group = p_.group(), first_head = kv_head * group;
    ChunkKeys<T> chunk;
    chunk.locate(p_, request, kv_head, start, bad_);
    uint8_t mask[kChunk];
    if (chunk.holes) {
      for (int64_t j = 0; j < chunk.count; ++j) mask[j] = chunk.k[j] != nullptr;
    }
    rows.resize(p_, positions * group);
    for (int64_t r = 0; r < positions * group; ++r) {
      const int64_t i = first + r / group, position = kv_len - q_len + i;
      rows.load(p_, r, rows_.first(request) + i, first_head + r % group);
      rows.range(r) = RowRange{std::clamp<int64_t>(p_.window_start(position) - start, 0, chunk.count),
                               std::clamp<int64_t>(position + 1 - start, 0, chunk.count), chunk.holes ? mask : nullptr};
    }
    rows.ready(p_);
    rows.attend(p_, chunk);
    const bool alone = num_items(request) == 1;
    for (int64_t r = 0; r < positions * group; ++r) {
      const int64_t i = first + r / group, head = first_head + r % group;
      if (alone) {
        finish_row(p_, rows_.first(request) + i, head, rows.sum(r), rows.state(r));
      } else {
        float* to = partial(item, i, head);
        std::copy_n(rows.sum(r), p_.head_dim_v, to);
        to[p_.head_dim_v] = rows.state(r).largest;
        to[p_.head_dim_v + 1] = rows.state(r).total;
      }
    }
  }

  // The chunks of a request in ascending order; also the answer of a request without keys.
  void merge(int64_t request, int64_t i, int64_t head) {
    static thread_local Scratch scratch;
    float* sum = scratch.get<float>(p_.head_dim_v);
    std::fill_n(sum, p_.head_dim_v, 0.0f);
    RowState state{-INFINITY, 0};
    for (int64_t item = items_.request_indptr[request]; item < items_.request_indptr[request + 1]; ++item) {
      const float* part = partial(item, i, head);
      merge_chunk(sum, state, part, RowState{part[p_.head_dim_v], part[p_.head_dim_v + 1]}, p_.head_dim_v);
    }
    finish_row(p_, rows_.first(request) + i, head, sum, state);
  }

  const char* op_;
  const AttentionProblem& p_;
  const SplitRows& rows_;
  const Items& items_;
  float* partial_;
  int64_t positions_per_block_, blocks_;
  BadSlot bad_;
};

}  // namespace

void run_split_kv(const char* op, const AttentionProblem& p, const SplitKvArguments& args) {
  static thread_local std::vector<int32_t> words;
  static thread_local Scratch scratch;
  const SplitRows rows(p, args.qo_indptr);
  const Items items = args.plan ? read_plan(op, *args.plan, p, rows) : make_items(p, rows, words);
  const int64_t needed = items.count * items.max_q_len * p.num_qo_heads * (p.head_dim_v + 2);
  float* partial = nullptr;
  if (args.plan) {
    STD_TORCH_CHECK(args.workspace.has_value(), op, ": workspace must be given with a plan");
    const Tensor& workspace = *args.workspace;
    check_dtype(workspace, ScalarType::Float, op, "workspace");
    STD_TORCH_CHECK(workspace.is_contiguous() && workspace.numel() >= needed, op,
                    ": workspace must be contiguous with at least ", needed, " elements, got ", workspace.numel());
    partial = mutable_data<float>(workspace);
  } else {
    partial = scratch.get<float>(needed);
  }
  dispatch_cache(p.cache_dtype, op, "the cache",
                 [&](auto tag) { SplitKv<decltype(tag)>(op, p, rows, items, partial).run(); });
}

void decode_attention(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& kv_indptr, const Tensor& kv_indices,
                      const OptionalTensor& sinks, const OptionalTensor& plan, const OptionalTensor& workspace,
                      double sm_scale, double logit_cap, int64_t window_left, double k_scale, double v_scale) {
  constexpr const char* op = "decode_attention";
  const AttentionProblem p = make_problem(op, kPoolNames, out, lse, q, k_cache, v_cache, kv_indptr, &kv_indices, sinks,
                                          sm_scale, logit_cap, window_left, k_scale, v_scale);
  check_size(kv_indptr, 0, p.rows + 1, op, "kv_indptr");
  run_split_kv(op, p, {nullptr, plan, workspace});
}

}  // namespace gristmill
