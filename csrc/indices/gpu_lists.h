// What the index kernels share: the request table as they see it, how lists are divided among blocks, and the kernel
// that writes one CSR list per request. Nothing outside the outputs is written and nothing outside the inputs is read,
// whatever the tensors hold: an index that leads outside gives nothing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/gpu_launch.h"
#include "common/gpu_scan.h"
#include "indices/checks.h"

namespace gristmill::gpu {

inline constexpr int kListThreads = 256;
inline constexpr int kListRound = 4;  // entries of a thread that are loaded before any of them is stored
inline constexpr int64_t kListChunk = kListThreads * kListRound;
inline constexpr int64_t kBlocksPerProcessor = 6;  // as many as fit with 40 registers a thread

// Tokens in a page, at most kLargestPage. A division by it is a multiplication, which is exact for numbers n below
// 2^31: with 2^(s-1) < tokens <= 2^s the multiplier is at most 1 above 2^(31+s) / tokens, so that n * multiplier /
// 2^(31+s) lies above n / tokens by less than 1 / tokens.
struct PageSize {
  uint32_t tokens, multiplier;
  int shift;

  explicit PageSize(int64_t checked) : tokens(static_cast<uint32_t>(checked)), shift(31) {
    while (int64_t{1} << (shift - 31) < checked) ++shift;
    multiplier = static_cast<uint32_t>((uint64_t{1} << shift) / tokens + 1);
  }

  // All for lengths and slots of at least 0.
  __device__ int32_t page_of(int32_t slot) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(slot)) * multiplier >> shift);
  }
  __device__ int32_t within(int32_t slot) const {
    return static_cast<int32_t>(static_cast<uint32_t>(slot) - static_cast<uint32_t>(page_of(slot)) * tokens);
  }
  __device__ int32_t pages(int32_t length) const { return page_of(length) + (within(length) > 0); }
  // Tokens in the last page; 0 for an empty request.
  __device__ int32_t filled(int32_t length) const { return length > 0 ? within(length - 1) + 1 : 0; }
};

// The rows of the request table that the requests name.
struct RequestRows {
  int32_t* table;
  const int32_t* req_slots;
  int64_t stride, rows, columns, requests;

  RequestRows(const Tensor& req_to_token, const Tensor& req_slots)
      : table(const_cast<int32_t*>(data<int32_t>(req_to_token))),
        req_slots(data<int32_t>(req_slots)),
        stride(req_to_token.stride(0)),
        rows(req_to_token.size(0)),
        columns(req_to_token.size(1)),
        requests(req_slots.size(0)) {}

  // Null for a row that is not there.
  __device__ int32_t* row(int64_t request) const {
    const int32_t row = req_slots[request];
    return row >= 0 && row < rows ? table + row * stride : nullptr;
  }
};

// Blocks (x, y): requests x, x + gridDim.x, .. and of each list the chunks y, y + gridDim.y, ..: enough for the longest
// list there can be, but not more in all than run at once.
inline dim3 list_grid(const Launch& launch, int64_t requests, int64_t longest) {
  const int64_t blocks = kBlocksPerProcessor * launch.processors();
  const int64_t x = std::clamp<int64_t>(requests, 1, blocks);
  const int64_t y = std::clamp<int64_t>(ceil_div(longest, kListChunk), 1, blocks / x);
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

// A round of a block's entries of a list, kListRound of them in each thread.
struct ListRound {
  int64_t first = static_cast<int64_t>(blockIdx.y) * kListChunk + threadIdx.x;
  int32_t kept[kListRound];

  template <typename Load>
  __device__ void load(int64_t count, const Load& load_one) {
#pragma unroll
    for (int i = 0; i < kListRound; ++i) {
      if (first + i * kListThreads < count) kept[i] = load_one(first + i * kListThreads);
    }
  }
  template <typename Change, typename Store>
  __device__ void store(int64_t count, const Change& change, const Store& store_one) {
#pragma unroll
    for (int i = 0; i < kListRound; ++i) {
      if (first + i * kListThreads < count) kept[i] = change(kept[i]);
    }
#pragma unroll
    for (int i = 0; i < kListRound; ++i) {
      if (first + i * kListThreads < count) store_one(first + i * kListThreads, kept[i]);
    }
  }
  __device__ void next() { first += static_cast<int64_t>(gridDim.y) * kListChunk; }
};
// store(entry, change(load(entry))) for this block's of the `count` entries.
template <typename Load, typename Change, typename Store>
__device__ inline void each_entry(int64_t count, const Load& load, const Change& change, const Store& store) {
  for (ListRound round; round.first < count; round.next()) {
    round.load(count, load);
    round.store(count, change, store);
  }
}
struct Unchanged {
  __device__ int32_t operator()(int32_t slot) const { return slot; }
};

// Of `count` entries, as many as a row of the table has and the list has room for.
__device__ inline int64_t entries_within(int64_t count, int64_t of_row, int64_t room) {
  const int64_t least = min(count, min(of_row, room));
  return least < 0 ? 0 : least;
}

// Entries [first, first + count) of a request's row, of which the table has one every step() positions.
struct Span {
  int32_t first, count;
};

// One CSR list per request. `lists` knows what is in them:
//   span(request)         which entries of the request's row
//   step()                how many positions apart they are
//   operator()(slot)      what a list holds for a slot
//   also_write(request)   something more per request
template <typename Lists>
__global__ void __launch_bounds__(kListThreads)
    lists_kernel(int32_t* indptr, int32_t* indices, int64_t room, const RequestRows rows, int64_t row_entries,
                 const Lists lists) {
  GRISTMILL_SHARED(int64_t, scratch, (SumsBefore<1, kListThreads>::kScratch));
  wait_for_previous_kernel();
  const bool writes_bounds = blockIdx.y == 0 && threadIdx.x == 0;
  if (writes_bounds && blockIdx.x == 0) indptr[0] = 0;
  SumsBefore<1, kListThreads> before;
  for (int64_t request = blockIdx.x; request < rows.requests; request += gridDim.x) {
    const Span span = lists.span(request);
    const int32_t* const slots = rows.row(request);
    const int64_t there = slots == nullptr ? 0 : entries_within(span.count, row_entries - span.first, INT64_MAX);
    const auto load = [&](int64_t entry) { return slots[(span.first + entry) * lists.step()]; };
    // The first entries are on their way while the sums are taken.
    ListRound round;
    round.load(there, load);
    before.advance(request, scratch, [&](int64_t other, int64_t (&sums)[1]) { sums[0] += lists.span(other).count; });
    const int64_t offset = before[0];
    if (writes_bounds) {
      indptr[request + 1] = static_cast<int32_t>(offset + span.count);
      lists.also_write(request);
    }
    const int64_t count = entries_within(there, there, room - offset);
    while (round.first < count) {
      round.store(count, lists, [&](int64_t entry, int32_t value) { indices[offset + entry] = value; });
      round.next();
      round.load(count, load);
    }
  }
}

template <typename Lists>
void write_lists(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                 int64_t page_size, const Lists& lists) {
  const Launch launch(indptr);
  const RequestRows rows(req_to_token, req_slots);
  const int64_t row_entries = ceil_div(rows.columns, page_size);
  launch.early<lists_kernel<Lists>>(list_grid(launch, rows.requests, row_entries), dim3(kListThreads),
                                    mutable_data<int32_t>(indptr), mutable_data<int32_t>(indices), indices.size(0),
                                    rows, row_entries, lists);
}

}  // namespace gristmill::gpu
