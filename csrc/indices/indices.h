// CSR index lists from the request table, and updates of that table. All tensors are int32.
#pragma once

#include "common/check.h"

namespace gristmill {

void kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                const Tensor& seq_lens, const OptionalTensor& kv_start);
void qo_indptr(const Tensor& out, const Tensor& q_lens);
void write_req_to_token(const Tensor& req_to_token, const Tensor& req_slots, const Tensor& starts, const Tensor& lens,
                        const Tensor& slots);

}  // namespace gristmill
