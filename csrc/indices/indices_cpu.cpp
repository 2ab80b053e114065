// Index lists on the CPU: prefix sums and row copies. Everything is checked before the first write, so a refused call
// changes nothing.
#include <cstring>
#include <limits>

#include "common/parallel.h"
#include "indices/indices.h"

namespace gristmill {
namespace {

void copy_int32(int32_t* to, const int32_t* from, int64_t count) {
  if (count > 0) std::memcpy(to, from, static_cast<size_t>(count) * sizeof(int32_t));
}

// Positions [first, length); none when the start lies beyond the end.
int64_t list_length(int64_t first, int64_t length) { return length > first ? length - first : 0; }

void check_table(const Tensor& req_to_token, const char* op) {
  check_dim(req_to_token, 2, op, "req_to_token");
  check_dtype(req_to_token, ScalarType::Int, op, "req_to_token");
  check_inner(req_to_token, op, "req_to_token");
}

void check_row(int32_t row, int64_t rows, int64_t b, const char* op) {
  STD_TORCH_CHECK(row >= 0 && row < rows, op, ": req_slots[", b, "] must be in [0, ", rows, "), got ", row);
}

}  // namespace

void kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                const Tensor& seq_lens, const OptionalTensor& kv_start) {
  constexpr const char* op = "kv_indices";
  check_table(req_to_token, op);
  check_vector(req_slots, ScalarType::Int, -1, op, "req_slots");
  const int64_t requests = req_slots.size(0);
  check_vector(seq_lens, ScalarType::Int, requests, op, "seq_lens");
  if (kv_start) check_vector(*kv_start, ScalarType::Int, requests, op, "kv_start");
  check_vector(indptr, ScalarType::Int, requests + 1, op, "indptr");
  check_vector(indices, ScalarType::Int, -1, op, "indices");
  const int64_t rows = req_to_token.size(0), columns = req_to_token.size(1), row_stride = req_to_token.stride(0);
  const int32_t* row = data<int32_t>(req_slots);
  const int32_t* len = data<int32_t>(seq_lens);
  const int32_t* start = kv_start ? data<int32_t>(*kv_start) : nullptr;
  int64_t total = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t first = start ? start[b] : 0;
    check_row(row[b], rows, b, op);
    STD_TORCH_CHECK(len[b] <= columns, op, ": seq_lens[", b, "] must be at most the ", columns,
                    " columns of req_to_token, got ", len[b]);
    STD_TORCH_CHECK(first >= 0, op, ": kv_start[", b, "] must be at least 0, got ", first);
    total += list_length(first, len[b]);
  }
  STD_TORCH_CHECK(total <= std::numeric_limits<int32_t>::max(), op, ": the lists hold ", total,
                  " entries, more than int32 can count");
  STD_TORCH_CHECK(indices.size(0) >= total, op, ": indices must hold ", total, " entries, got ", indices.size(0));
  int32_t* bounds = mutable_data<int32_t>(indptr);
  bounds[0] = 0;
  for (int64_t b = 0; b < requests; ++b)
    bounds[b + 1] = bounds[b] + static_cast<int32_t>(list_length(start ? start[b] : 0, len[b]));
  const int32_t* table = data<int32_t>(req_to_token);
  int32_t* list = mutable_data<int32_t>(indices);
  parallel_ranges(requests, requests > 0 ? total / requests * 8 : 0, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      copy_int32(list + bounds[b], table + row[b] * row_stride + (start ? start[b] : 0), bounds[b + 1] - bounds[b]);
    }
  });
}

void qo_indptr(const Tensor& out, const Tensor& q_lens) {
  constexpr const char* op = "qo_indptr";
  check_vector(q_lens, ScalarType::Int, -1, op, "q_lens");
  const int64_t requests = q_lens.size(0);
  check_vector(out, ScalarType::Int, requests + 1, op, "out");
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
  check_table(req_to_token, op);
  check_vector(req_slots, ScalarType::Int, -1, op, "req_slots");
  const int64_t writes = req_slots.size(0);
  check_vector(starts, ScalarType::Int, writes, op, "starts");
  check_vector(lens, ScalarType::Int, writes, op, "lens");
  check_vector(slots, ScalarType::Int, -1, op, "slots");
  const int64_t rows = req_to_token.size(0), columns = req_to_token.size(1), row_stride = req_to_token.stride(0);
  const int32_t* row = data<int32_t>(req_slots);
  const int32_t* start = data<int32_t>(starts);
  const int32_t* len = data<int32_t>(lens);
  int64_t total = 0;
  for (int64_t i = 0; i < writes; ++i) {
    check_row(row[i], rows, i, op);
    STD_TORCH_CHECK(len[i] >= 0 && start[i] >= 0 && int64_t{start[i]} + len[i] <= columns, op, ": starts[", i,
                    "] = ", start[i], " and lens[", i, "] = ", len[i], " must name columns in [0, ", columns, "]");
    total += len[i];
  }
  STD_TORCH_CHECK(slots.size(0) >= total, op, ": slots must hold ", total, " entries, got ", slots.size(0));
  int32_t* table = mutable_data<int32_t>(req_to_token);
  const int32_t* source = data<int32_t>(slots);
  for (int64_t i = 0; i < writes; ++i) {
    copy_int32(table + row[i] * row_stride + start[i], source, len[i]);
    source += len[i];
  }
}

}  // namespace gristmill
