// What the index ops ask of the types and shapes of their arguments, on the CPU and on GPUs. What the tensors hold is
// checked on the CPU only, where looking costs nothing.
#pragma once

#include <algorithm>

#include "common/check.h"

namespace gristmill {

inline int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

// Larger pages act like pages of this size: the first would hold every int32 slot, and others that int32 cannot name.
inline constexpr int64_t kLargestPage = (int64_t{1} << 31) + 1;

inline int64_t checked_page_size(int64_t page_size, const char* op) {
  STD_TORCH_CHECK(page_size >= 1, op, ": page_size must be at least 1, got ", page_size);
  return std::min(page_size, kLargestPage);
}

// int32 [rows, any] with dense rows.
inline void check_matrix(const Tensor& t, int64_t rows, const char* op, const char* name) {
  check_dim(t, 2, op, name);
  check_dtype(t, ScalarType::Int, op, name);
  check_size(t, 0, rows, op, name);
  check_inner(t, op, name);
}

// The table, and the row and the length of every request.
inline void check_requests(const Tensor& req_to_token, const Tensor& req_slots, const Tensor& lens, const char* op,
                           const char* lens_name) {
  check_dim(req_to_token, 2, op, "req_to_token");
  check_matrix(req_to_token, req_to_token.size(0), op, "req_to_token");
  check_vector(req_slots, ScalarType::Int, -1, op, "req_slots");
  check_vector(lens, ScalarType::Int, req_slots.size(0), op, lens_name);
}

// The CSR lists of some requests.
inline void check_lists(const Tensor& indptr, const Tensor& indices, int64_t requests, const char* op) {
  check_vector(indptr, ScalarType::Int, requests + 1, op, "indptr");
  check_vector(indices, ScalarType::Int, -1, op, "indices");
}

inline void check_kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token,
                             const Tensor& req_slots, const Tensor& seq_lens, const OptionalTensor& kv_start,
                             const char* op) {
  check_requests(req_to_token, req_slots, seq_lens, op, "seq_lens");
  if (kv_start) check_vector(*kv_start, ScalarType::Int, req_slots.size(0), op, "kv_start");
  check_lists(indptr, indices, req_slots.size(0), op);
}

inline void check_window_kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token,
                                    const Tensor& req_slots, const Tensor& seq_lens, const OptionalTensor& q_lens,
                                    const OptionalTensor& slot_map, const char* op) {
  check_requests(req_to_token, req_slots, seq_lens, op, "seq_lens");
  if (q_lens) check_vector(*q_lens, ScalarType::Int, req_slots.size(0), op, "q_lens");
  if (slot_map) check_vector(*slot_map, ScalarType::Int, -1, op, "slot_map");
  check_lists(indptr, indices, req_slots.size(0), op);
}

inline void check_mla_indices(const Tensor& indptr, const Tensor& indices, const Tensor& last_page_lens,
                              const Tensor& req_to_token, const Tensor& req_slots, const Tensor& seq_lens,
                              const char* op) {
  check_requests(req_to_token, req_slots, seq_lens, op, "seq_lens");
  check_lists(indptr, indices, req_slots.size(0), op);
  check_vector(last_page_lens, ScalarType::Int, req_slots.size(0), op, "last_page_len");
}

inline void check_page_table(const Tensor& out, const Tensor& req_to_token, const Tensor& req_slots,
                             const Tensor& seq_lens, const char* op) {
  check_requests(req_to_token, req_slots, seq_lens, op, "seq_lens");
  check_matrix(out, req_slots.size(0), op, "out");
}

inline void check_write_req_to_token(const Tensor& req_to_token, const Tensor& req_slots, const Tensor& starts,
                                     const Tensor& lens, const Tensor& slots, const char* op) {
  check_requests(req_to_token, req_slots, lens, op, "lens");
  check_vector(starts, ScalarType::Int, req_slots.size(0), op, "starts");
  check_vector(slots, ScalarType::Int, -1, op, "slots");
}

inline void check_draft_kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token,
                                   const Tensor& req_slots, const Tensor& prefix_lens,
                                   const OptionalTensor& draft_slots, int64_t steps, int64_t topk, const char* op) {
  STD_TORCH_CHECK(steps >= 1 && topk >= 1, op, ": steps and topk must be at least 1, got ", steps, " and ", topk);
  check_requests(req_to_token, req_slots, prefix_lens, op, "prefix_lens");
  const int64_t requests = req_slots.size(0);
  check_matrix(indptr, steps, op, "indptr");
  check_size(indptr, 1, requests * topk + 1, op, "indptr");
  check_matrix(indices, steps, op, "indices");
  if (!draft_slots) return;
  check_dim(*draft_slots, 3, op, "draft_slots");
  check_dtype(*draft_slots, ScalarType::Int, op, "draft_slots");
  check_size(*draft_slots, 0, requests, op, "draft_slots");
  check_size(*draft_slots, 1, topk, op, "draft_slots");
  check_size(*draft_slots, 2, steps, op, "draft_slots");
  const bool dense =
      requests == 0 || ((steps == 1 || draft_slots->stride(2) == 1) && (topk == 1 || draft_slots->stride(1) == steps) &&
                        (requests == 1 || draft_slots->stride(0) == topk * steps));
  STD_TORCH_CHECK(dense, op, ": draft_slots must be contiguous");
}

// What both allocations have: lengths, the slot of the last token of each request, and free pages.
inline void check_allocation(const Tensor& new_lens, const Tensor& last_slots, const Tensor& free_pages,
                             const Tensor& num_pages, const char* op) {
  check_vector(new_lens, ScalarType::Int, -1, op, "new_lens");
  check_vector(last_slots, ScalarType::Int, new_lens.size(0), op, "last_slots");
  check_vector(free_pages, ScalarType::Int, -1, op, "free_pages");
  check_vector(num_pages, ScalarType::Int, 1, op, "num_pages");
}

inline void check_alloc_extend(const Tensor& out, const Tensor& num_pages, const Tensor& prefix_lens,
                               const Tensor& new_lens, const Tensor& last_slots, const Tensor& free_pages,
                               const char* op) {
  check_allocation(new_lens, last_slots, free_pages, num_pages, op);
  check_vector(prefix_lens, ScalarType::Int, new_lens.size(0), op, "prefix_lens");
  check_vector(out, ScalarType::Int, -1, op, "out");
}

inline void check_alloc_decode(const Tensor& out, const Tensor& num_pages, const Tensor& new_lens,
                               const Tensor& last_slots, const Tensor& free_pages, const char* op) {
  check_allocation(new_lens, last_slots, free_pages, num_pages, op);
  check_vector(out, ScalarType::Int, new_lens.size(0), op, "out");
}

inline void check_qo_indptr(const Tensor& out, const Tensor& q_lens, const char* op) {
  check_vector(q_lens, ScalarType::Int, -1, op, "q_lens");
  check_vector(out, ScalarType::Int, q_lens.size(0) + 1, op, "out");
}

inline void check_last_page_len(const Tensor& out, const Tensor& seq_lens, const char* op) {
  check_vector(seq_lens, ScalarType::Int, -1, op, "seq_lens");
  check_vector(out, ScalarType::Int, seq_lens.size(0), op, "out");
}

}  // namespace gristmill
