// The request table of one call on the CPU: which rows it may name, and what they hold.
#pragma once

#include <cstring>
#include <limits>

#include "indices/checks.h"

namespace gristmill {

inline void copy_int32(int32_t* to, const int32_t* from, int64_t count) {
  if (count > 0) std::memcpy(to, from, static_cast<size_t>(count) * sizeof(int32_t));
}

// What an indptr counts must fit its int32.
inline void check_countable(int64_t total, const char* op) {
  STD_TORCH_CHECK(total <= std::numeric_limits<int32_t>::max(), op, ": the lists hold ", total,
                  " entries, more than int32 can count");
}

// Slots of the requests req_slots[0], req_slots[1], ... of a table that check_requests has passed; every row is checked
// on construction.
class RequestTable {
 public:
  RequestTable(const Tensor& req_to_token, const Tensor& req_slots, const char* op) {
    requests_ = req_slots.size(0);
    columns_ = req_to_token.size(1);
    stride_ = req_to_token.stride(0);
    table_ = data<int32_t>(req_to_token);
    row_ = data<int32_t>(req_slots);
    const int64_t rows = req_to_token.size(0);
    for (int64_t b = 0; b < requests_; ++b) {
      STD_TORCH_CHECK(row_[b] >= 0 && row_[b] < rows, op, ": req_slots[", b, "] must be in [0, ", rows, "), got ",
                      row_[b]);
    }
  }

  int64_t requests() const { return requests_; }
  int64_t columns() const { return columns_; }
  int64_t offset(int64_t request) const { return row_[request] * stride_; }
  const int32_t* slots(int64_t request) const { return table_ + offset(request); }

  // Refuses a length that the table's rows do not have.
  void check_length(int64_t length, int64_t b, const char* op, const char* name) const {
    STD_TORCH_CHECK(length <= columns_, op, ": ", name, "[", b, "] must be at most the ", columns_,
                    " columns of req_to_token, got ", length);
  }

 private:
  int64_t requests_, columns_, stride_;
  const int32_t* table_;
  const int32_t* row_;
};

}  // namespace gristmill
