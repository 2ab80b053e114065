// Index lists from the request table, updates of that table, and slots for new tokens out of free pages. All tensors
// are int32.
#pragma once

#include "common/check.h"

namespace gristmill {

void kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                const Tensor& seq_lens, const OptionalTensor& kv_start);
void qo_indptr(const Tensor& out, const Tensor& q_lens);
void write_req_to_token(const Tensor& req_to_token, const Tensor& req_slots, const Tensor& starts, const Tensor& lens,
                        const Tensor& slots);
void window_kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                       const Tensor& seq_lens, const OptionalTensor& q_lens, const OptionalTensor& slot_map,
                       int64_t window_left);
void page_table(const Tensor& out, const Tensor& req_to_token, const Tensor& req_slots, const Tensor& seq_lens,
                int64_t page_size);
void last_page_len(const Tensor& out, const Tensor& seq_lens, int64_t page_size);
void mla_indices(const Tensor& indptr, const Tensor& indices, const Tensor& last_page_lens, const Tensor& req_to_token,
                 const Tensor& req_slots, const Tensor& seq_lens, int64_t page_size);
void draft_kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                      const Tensor& prefix_lens, const OptionalTensor& draft_slots, int64_t steps, int64_t topk);
void alloc_extend(const Tensor& out, const Tensor& num_pages, const Tensor& prefix_lens, const Tensor& new_lens,
                  const Tensor& last_slots, const Tensor& free_pages, int64_t page_size);
void alloc_decode(const Tensor& out, const Tensor& num_pages, const Tensor& new_lens, const Tensor& last_slots,
                  const Tensor& free_pages, int64_t page_size);

}  // namespace gristmill
