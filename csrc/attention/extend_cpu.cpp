// Extend and ragged attention on the CPU: tiles of query rows (positions times the query heads of one KV head) walk the
// chunks of their request in order with a running softmax, so the keys and values of a chunk are unpacked once per
// tile.
#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "attention/rows.h"
#include "common/parallel.h"

namespace gristmill {
namespace {

struct Tile {
  int32_t request;
  int32_t first;  // position in the request's query rows
};

template <typename T>
struct ExtendScratch {
  QueryRows<T> rows;
  Scratch totals;
  std::vector<RowState> states;
  std::vector<uint8_t> masks;
};

struct ExtendArguments {
  const char* op;
  const int32_t* qo_indptr;
  const uint8_t* mask;  // custom mask or null
  const int32_t* mask_indptr;
  bool causal;
};

template <typename T>
class Extend {
 public:
  Extend(const AttentionProblem& p, const ExtendArguments& args) : p_(p), args_(args) {
    positions_per_tile_ = std::max<int64_t>(1, QueryRows<T>::target_rows(p) / p.group());
  }

  void run() {
    static thread_local std::vector<Tile> tiles;
    tiles.clear();
    int64_t keys = 0;
    for (int64_t b = 0; b < p_.requests; ++b) {
      // Later positions see more keys: they go first, so that no thread starts a long tile last.
      const int64_t count = (q_len(b) + positions_per_tile_ - 1) / positions_per_tile_;
      for (int64_t t = count - 1; t >= 0; --t)
        tiles.push_back({static_cast<int32_t>(b), static_cast<int32_t>(t * positions_per_tile_)});
      keys += count * p_.kv_len(b);
    }
    if (tiles.empty()) return;
    const int64_t work = keys / static_cast<int64_t>(tiles.size()) * (p_.head_dim + p_.head_dim_v) * p_.group();
    const std::vector<Tile>& list = tiles;
    parallel_units(static_cast<int64_t>(tiles.size()) * p_.num_kv_heads, work, [&](int64_t unit) {
      run_tile(list[static_cast<size_t>(unit / p_.num_kv_heads)], unit % p_.num_kv_heads);
    });
    bad_.check(args_.op, p_.num_slots);
  }

 private:
  int64_t q_len(int64_t request) const { return args_.qo_indptr[request + 1] - args_.qo_indptr[request]; }

  // Keys [begin, end) of the request that query row i may see, before the custom mask.
  void visible(int64_t request, int64_t i, int64_t& begin, int64_t& end) const {
    const int64_t kv_len = p_.kv_len(request);
    const int64_t position = kv_len - q_len(request) + i;
    begin = p_.window_start(position);
    end = args_.causal && args_.mask == nullptr ? std::clamp<int64_t>(position + 1, 0, kv_len) : kv_len;
  }

  void run_tile(const Tile& tile, int64_t kv_head) {
    static thread_local ExtendScratch<T> scratch;
    const int64_t request = tile.request, group = p_.group(), first_head = kv_head * group;
    const int64_t positions = std::min(positions_per_tile_, q_len(request) - tile.first);
    const int64_t num_rows = positions * group;
    const int64_t first_row = args_.qo_indptr[request] + tile.first;
    QueryRows<T>& rows = scratch.rows;
    rows.resize(p_, num_rows);
    for (int64_t r = 0; r < num_rows; ++r) rows.load(p_, r, first_row + r / group, first_head + r % group);
    rows.ready(p_);

    int64_t tile_begin = p_.kv_len(request), tile_end = 0;
    for (int64_t i = 0; i < positions; ++i) {
      int64_t begin, end;
      visible(request, tile.first + i, begin, end);
      tile_begin = std::min(tile_begin, begin);
      tile_end = std::max(tile_end, end);
    }
    tile_begin = tile_begin / kChunk * kChunk;
    const auto attend = [&](int64_t start) {
      ChunkKeys<T> chunk;
      chunk.locate(p_, request, kv_head, start, bad_);
      set_ranges(request, tile.first, positions, start, chunk, scratch);
      rows.attend(p_, chunk);
    };
    const auto finish = [&](int64_t r, const float* sum, const RowState& state) {
      finish_row(p_, first_row + r / group, first_head + r % group, sum, state);
    };
    if (tile_begin < tile_end && tile_end - tile_begin <= kChunk) {
      attend(tile_begin);
      for (int64_t r = 0; r < num_rows; ++r) finish(r, rows.sum(r), rows.state(r));
      return;
    }
    const int64_t pitch = rows.sum_pitch();
    float* totals = scratch.totals.template get<float>(num_rows * pitch);
    std::fill_n(totals, num_rows * pitch, 0.0f);
    scratch.states.assign(static_cast<size_t>(num_rows), RowState{-INFINITY, 0});
    RowState* states = scratch.states.data();
    for (int64_t start = tile_begin; start < tile_end; start += kChunk) {
      attend(start);
      for (int64_t r = 0; r < num_rows; ++r)
        merge_chunk(totals + r * pitch, states[r], rows.sum(r), rows.state(r), p_.head_dim_v);
    }
    for (int64_t r = 0; r < num_rows; ++r) finish(r, totals + r * pitch, states[r]);
  }

  void set_ranges(int64_t request, int64_t first, int64_t positions, int64_t start, const ChunkKeys<T>& chunk,
                  ExtendScratch<T>& scratch) const {
    const bool masked = chunk.holes || args_.mask != nullptr;
    if (masked) scratch.masks.resize(static_cast<size_t>(positions * kChunk));
    const int64_t group = p_.group();
    for (int64_t i = 0; i < positions; ++i) {
      int64_t begin, end;
      visible(request, first + i, begin, end);
      RowRange range{std::clamp<int64_t>(begin - start, 0, chunk.count),
                     std::clamp<int64_t>(end - start, 0, chunk.count), nullptr};
      if (masked) {
        uint8_t* mask = scratch.masks.data() + i * kChunk;
        const uint8_t* custom = args_.mask != nullptr
                                    ? args_.mask + args_.mask_indptr[request] + (first + i) * p_.kv_len(request) + start
                                    : nullptr;
        for (int64_t j = 0; j < chunk.count; ++j)
          mask[j] = chunk.k[j] != nullptr && (custom == nullptr || custom[j] != 0);
        range.mask = mask;
      }
      for (int64_t g = 0; g < group; ++g) scratch.rows.range(i * group + g) = range;
    }
  }

  const AttentionProblem& p_;
  const ExtendArguments& args_;
  int64_t positions_per_tile_;
  BadSlot bad_;
};

void check_mask(const char* op, const Tensor& mask, const Tensor& mask_indptr, const AttentionProblem& p,
                const int32_t* qo_indptr) {
  check_vector(mask, ScalarType::Bool, -1, op, "custom_mask");
  check_vector(mask_indptr, ScalarType::Int, -1, op, "mask_indptr");
  STD_TORCH_CHECK(mask_indptr.size(0) >= p.requests, op, ": mask_indptr must have an entry per request (", p.requests,
                  "), got ", mask_indptr.size(0));
  const int32_t* first = data<int32_t>(mask_indptr);
  for (int64_t b = 0; b < p.requests; ++b) {
    const int64_t size = (qo_indptr[b + 1] - qo_indptr[b]) * p.kv_len(b);
    STD_TORCH_CHECK(first[b] >= 0 && first[b] + size <= mask.size(0), op, ": custom_mask must have ", size,
                    " entries from mask_indptr[", b, "] = ", first[b], " on, it has ", mask.size(0), " in all");
  }
}

void run_extend(const char* op, const AttentionProblem& p, const Tensor& qo_indptr, const OptionalTensor& custom_mask,
                const OptionalTensor& mask_indptr, bool causal) {
  const int32_t* q_bound = query_bounds(p, op, qo_indptr);
  STD_TORCH_CHECK(custom_mask.has_value() == mask_indptr.has_value(), op,
                  ": custom_mask and mask_indptr must be given together");
  if (custom_mask) check_mask(op, *custom_mask, *mask_indptr, p, q_bound);
  const ExtendArguments args{op, q_bound, custom_mask ? data<uint8_t>(*custom_mask) : nullptr,
                             mask_indptr ? data<int32_t>(*mask_indptr) : nullptr, causal};
  dispatch_cache(p.cache_dtype, op, "the keys", [&](auto tag) { Extend<decltype(tag)>(p, args).run(); });
}

}  // namespace

void extend_attention(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& qo_indptr, const Tensor& kv_indptr, const Tensor& kv_indices,
                      const OptionalTensor& custom_mask, const OptionalTensor& mask_indptr, const OptionalTensor& sinks,
                      bool causal, double sm_scale, double logit_cap, int64_t window_left, double k_scale,
                      double v_scale) {
  constexpr const char* op = "extend_attention";
  const AttentionProblem p = make_problem(op, kPoolNames, out, lse, q, k_cache, v_cache, kv_indptr, &kv_indices, sinks,
                                          sm_scale, logit_cap, window_left, k_scale, v_scale);
  run_extend(op, p, qo_indptr, custom_mask, mask_indptr, causal);
}

void ragged_attention(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& qo_indptr, const Tensor& kv_indptr, const OptionalTensor& custom_mask,
                      const OptionalTensor& mask_indptr, const OptionalTensor& sinks, bool causal, double sm_scale,
                      double logit_cap, int64_t window_left) {
  constexpr const char* op = "ragged_attention";
  const AttentionProblem p = make_problem(op, KvNames{"k", "v"}, out, lse, q, k, v, kv_indptr, nullptr, sinks, sm_scale,
                                          logit_cap, window_left, 1, 1);
  run_extend(op, p, qo_indptr, custom_mask, mask_indptr, causal);
}

}  // namespace gristmill
