// Index lists on the CPU: prefix sums and row copies. Everything is checked before the first write, so a refused call
// changes nothing.
#include <algorithm>
#include <limits>

#include "common/parallel.h"
#include "indices/indices.h"
#include "indices/request_table.h"

namespace gristmill {
namespace {

// CSR lists of the positions [first(b), len[b]) of every request; copy(to, from, count) moves their slots.
template <typename First, typename Copy = decltype(&copy_int32)>
void write_lists(const Tensor& indptr, const Tensor& indices, const RequestTable& table, const int32_t* len,
                 const char* op, const First& first, const Copy& copy = &copy_int32) {
  const int64_t requests = table.requests();
  const auto length = [&](int64_t b) { return std::max<int64_t>(0, len[b] - first(b)); };
  int64_t total = 0;
  for (int64_t b = 0; b < requests; ++b) {
    table.check_length(len[b], b, op, "seq_lens");
    total += length(b);
  }
  check_countable(total, op);
  STD_TORCH_CHECK(indices.size(0) >= total, op, ": indices must hold ", total, " entries, got ", indices.size(0));
  int32_t* bounds = mutable_data<int32_t>(indptr);
  bounds[0] = 0;
  for (int64_t b = 0; b < requests; ++b) bounds[b + 1] = bounds[b] + static_cast<int32_t>(length(b));
  int32_t* list = mutable_data<int32_t>(indices);
  parallel_ranges(requests, requests > 0 ? total / requests * 8 : 0, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      copy(list + bounds[b], table.slots(b) + first(b), bounds[b + 1] - bounds[b]);
    }
  });
}

}  // namespace

void kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                const Tensor& seq_lens, const OptionalTensor& kv_start) {
  constexpr const char* op = "kv_indices";
  check_kv_indices(indptr, indices, req_to_token, req_slots, seq_lens, kv_start, op);
  const RequestTable table(req_to_token, req_slots, op);
  const int64_t requests = table.requests();
  const int32_t* len = data<int32_t>(seq_lens);
  const int32_t* start = kv_start ? data<int32_t>(*kv_start) : nullptr;
  for (int64_t b = 0; start && b < requests; ++b) {
    STD_TORCH_CHECK(start[b] >= 0, op, ": kv_start[", b, "] must be at least 0, got ", start[b]);
  }
  write_lists(indptr, indices, table, len, op, [&](int64_t b) { return start ? int64_t{start[b]} : int64_t{0}; });
}

void window_kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                       const Tensor& seq_lens, const OptionalTensor& q_lens, const OptionalTensor& slot_map,
                       int64_t window_left) {
  constexpr const char* op = "window_kv_indices";
  check_window_kv_indices(indptr, indices, req_to_token, req_slots, seq_lens, q_lens, slot_map, op);
  const RequestTable table(req_to_token, req_slots, op);
  const int64_t requests = table.requests();
  const int32_t* len = data<int32_t>(seq_lens);
  const int32_t* q_len = q_lens ? data<int32_t>(*q_lens) : nullptr;
  // The first query row sits at len - q_len. A window longer than any list would overflow the subtraction.
  const int64_t window = std::min<int64_t>(window_left, std::numeric_limits<int32_t>::max());
  const auto first = [&](int64_t b) {
    return window < 0 ? int64_t{0} : std::max<int64_t>(0, int64_t{len[b]} - (q_len ? q_len[b] : 1) - window);
  };
  if (!slot_map) {
    write_lists(indptr, indices, table, len, op, first);
    return;
  }
  const int64_t mapped = slot_map->size(0);
  for (int64_t b = 0; b < requests; ++b) {
    table.check_length(len[b], b, op, "seq_lens");
    const int32_t* slots = table.slots(b);
    for (int64_t p = first(b); p < len[b]; ++p) {
      STD_TORCH_CHECK(slots[p] < mapped, op, ": slot ", slots[p], " of request ", b, " lies beyond the ", mapped,
                      " entries of slot_map");
    }
  }
  const int32_t* map = data<int32_t>(*slot_map);
  write_lists(indptr, indices, table, len, op, first, [map](int32_t* to, const int32_t* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i] < 0 ? from[i] : map[from[i]];
  });
}

void draft_kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                      const Tensor& prefix_lens, const OptionalTensor& draft_slots, int64_t steps, int64_t topk) {
  constexpr const char* op = "draft_kv_indices";
  check_draft_kv_indices(indptr, indices, req_to_token, req_slots, prefix_lens, draft_slots, steps, topk, op);
  const RequestTable table(req_to_token, req_slots, op);
  const int64_t requests = table.requests();
  const int32_t* len = data<int32_t>(prefix_lens);
  int64_t prefixes = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t prefix = std::max<int64_t>(0, len[b]);
    STD_TORCH_CHECK(prefix + (draft_slots ? 0 : topk * steps) <= table.columns(), op, ": prefix_lens[", b,
                    "] leaves no room for the draft in the ", table.columns(), " columns of req_to_token, got ",
                    len[b]);
    prefixes += prefix;
  }
  const int64_t branches = requests * topk, longest = prefixes * topk + branches * steps;
  check_countable(longest, op);
  STD_TORCH_CHECK(indices.size(1) >= longest, op, ": indices must hold ", longest, " entries a step, got ",
                  indices.size(1));
  const int32_t* listed = draft_slots ? data<int32_t>(*draft_slots) : nullptr;
  const int64_t bounds_stride = indptr.stride(0), list_stride = indices.stride(0);
  int32_t* bounds = mutable_data<int32_t>(indptr);
  int32_t* list = mutable_data<int32_t>(indices);
  parallel_ranges(steps, longest * 8, [&](int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      int32_t* bound = bounds + step * bounds_stride;
      int32_t* to = list + step * list_stride;
      int64_t written = 0;
      bound[0] = 0;
      for (int64_t b = 0; b < requests; ++b) {
        const int64_t prefix = std::max<int64_t>(0, len[b]);
        const int32_t* slots = table.slots(b);
        for (int64_t branch = b * topk; branch < (b + 1) * topk; ++branch) {
          const int32_t* own = listed ? listed + branch * steps : slots + prefix + (branch - b * topk) * steps;
          copy_int32(to + written, slots, prefix);
          copy_int32(to + written + prefix, own, step + 1);
          written += prefix + step + 1;
          bound[branch + 1] = static_cast<int32_t>(written);
        }
      }
    }
  });
}

void qo_indptr(const Tensor& out, const Tensor& q_lens) {
  constexpr const char* op = "qo_indptr";
  check_qo_indptr(out, q_lens, op);
  const int64_t requests = q_lens.size(0);
  const int32_t* len = data<int32_t>(q_lens);
  int64_t total = 0;
  for (int64_t b = 0; b < requests; ++b) {
    STD_TORCH_CHECK(len[b] >= 0, op, ": q_lens[", b, "] must be at least 0, got ", len[b]);
    total += len[b];
  }
  STD_TORCH_CHECK(total <= std::numeric_limits<int32_t>::max(), op, ": the rows number ", total,
                  ", more than int32 can count");
  int32_t* bounds = mutable_data<int32_t>(out);
  bounds[0] = 0;
  for (int64_t b = 0; b < requests; ++b) bounds[b + 1] = bounds[b] + len[b];
}

void write_req_to_token(const Tensor& req_to_token, const Tensor& req_slots, const Tensor& starts, const Tensor& lens,
                        const Tensor& slots) {
  constexpr const char* op = "write_req_to_token";
  check_write_req_to_token(req_to_token, req_slots, starts, lens, slots, op);
  const RequestTable rows(req_to_token, req_slots, op);
  const int64_t writes = rows.requests(), columns = rows.columns();
  const int32_t* start = data<int32_t>(starts);
  const int32_t* len = data<int32_t>(lens);
  int64_t total = 0;
  for (int64_t i = 0; i < writes; ++i) {
    STD_TORCH_CHECK(len[i] >= 0 && start[i] >= 0 && int64_t{start[i]} + len[i] <= columns, op, ": starts[", i,
                    "] = ", start[i], " and lens[", i, "] = ", len[i], " must name columns in [0, ", columns, "]");
    total += len[i];
  }
  STD_TORCH_CHECK(slots.size(0) >= total, op, ": slots must hold ", total, " entries, got ", slots.size(0));
  int32_t* table = mutable_data<int32_t>(req_to_token);
  const int32_t* source = data<int32_t>(slots);
  for (int64_t i = 0; i < writes; ++i) {
    copy_int32(table + rows.offset(i) + start[i], source, len[i]);
    source += len[i];
  }
}

}  // namespace gristmill
