// Slots in pages on the CPU: which pages a request has, and which slots new tokens get. Everything is checked before
// the first write, so a refused call changes nothing.
#include <algorithm>
#include <limits>

#include "common/parallel.h"
#include "indices/indices.h"
#include "indices/request_table.h"

namespace gristmill {
namespace {

int64_t pages_of(int32_t length, int64_t page_size) { return length > 0 ? ceil_div(length, page_size) : 0; }

int32_t filled(int32_t length, int64_t page_size) {
  return length > 0 ? static_cast<int32_t>((length - 1) % page_size + 1) : 0;
}

// The page of every page_size-th slot; a hole gives page -1.
void write_pages(int32_t* to, const int32_t* slots, int64_t pages, int64_t page_size) {
  for (int64_t i = 0; i < pages; ++i) {
    const int32_t slot = slots[i * page_size];
    to[i] = slot < 0 ? -1 : static_cast<int32_t>(slot / page_size);
  }
}

// Requests take pages one after another from the front of the free list.
class FreePages {
 public:
  FreePages(const Tensor& free_pages, int64_t page_size, const char* op)
      : pages_(data<int32_t>(free_pages)), count_(free_pages.size(0)), page_size_(page_size), op_(op) {}

  // Refuses more pages than there are, and any whose slots int32 cannot name.
  void check(int64_t wanted) const {
    STD_TORCH_CHECK(wanted <= count_, op_, ": free_pages must hold ", wanted, " pages, got ", count_);
    for (int64_t i = 0; i < wanted; ++i) {
      STD_TORCH_CHECK(pages_[i] >= 0 && (int64_t{pages_[i]} + 1) * page_size_ <= int64_t{1} << 31, op_, ": free_pages[",
                      i, "] must be a page whose slots int32 can name, got ", pages_[i]);
    }
  }

  int32_t first_slot(int64_t page) const { return static_cast<int32_t>(pages_[page] * page_size_); }

 private:
  const int32_t* pages_;
  int64_t count_, page_size_;
  const char* op_;
};

}  // namespace

void page_table(const Tensor& out, const Tensor& req_to_token, const Tensor& req_slots, const Tensor& seq_lens,
                int64_t page_size) {
  constexpr const char* op = "page_table";
  page_size = checked_page_size(page_size, op);
  check_page_table(out, req_to_token, req_slots, seq_lens, op);
  const RequestTable table(req_to_token, req_slots, op);
  const int64_t requests = table.requests();
  const int32_t* len = data<int32_t>(seq_lens);
  const int64_t columns = out.size(1), stride = out.stride(0);
  int64_t total = 0;
  for (int64_t b = 0; b < requests; ++b) {
    table.check_length(len[b], b, op, "seq_lens");
    const int64_t pages = pages_of(len[b], page_size);
    STD_TORCH_CHECK(pages <= columns, op, ": out must have room for the ", pages, " pages of request ", b, ", got ",
                    columns, " columns");
    total += pages;
  }
  int32_t* to = mutable_data<int32_t>(out);
  parallel_ranges(requests, requests > 0 ? total / requests * 8 : 0, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      write_pages(to + b * stride, table.slots(b), pages_of(len[b], page_size), page_size);
    }
  });
}

void last_page_len(const Tensor& out, const Tensor& seq_lens, int64_t page_size) {
  constexpr const char* op = "last_page_len";
  page_size = checked_page_size(page_size, op);
  check_last_page_len(out, seq_lens, op);
  const int32_t* len = data<int32_t>(seq_lens);
  int32_t* to = mutable_data<int32_t>(out);
  for (int64_t b = 0; b < seq_lens.size(0); ++b) to[b] = filled(len[b], page_size);
}

void mla_indices(const Tensor& indptr, const Tensor& indices, const Tensor& last_page_lens, const Tensor& req_to_token,
                 const Tensor& req_slots, const Tensor& seq_lens, int64_t page_size) {
  constexpr const char* op = "mla_indices";
  page_size = checked_page_size(page_size, op);
  check_mla_indices(indptr, indices, last_page_lens, req_to_token, req_slots, seq_lens, op);
  const RequestTable table(req_to_token, req_slots, op);
  const int64_t requests = table.requests();
  const int32_t* len = data<int32_t>(seq_lens);
  int64_t total = 0;
  for (int64_t b = 0; b < requests; ++b) {
    table.check_length(len[b], b, op, "seq_lens");
    total += pages_of(len[b], page_size);
  }
  check_countable(total, op);
  STD_TORCH_CHECK(indices.size(0) >= total, op, ": indices must hold ", total, " pages, got ", indices.size(0));
  int32_t* bounds = mutable_data<int32_t>(indptr);
  int32_t* list = mutable_data<int32_t>(indices);
  int32_t* last = mutable_data<int32_t>(last_page_lens);
  bounds[0] = 0;
  for (int64_t b = 0; b < requests; ++b) {
    bounds[b + 1] = bounds[b] + static_cast<int32_t>(pages_of(len[b], page_size));
    last[b] = filled(len[b], page_size);
  }
  parallel_ranges(requests, requests > 0 ? total / requests * 8 : 0, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      write_pages(list + bounds[b], table.slots(b), bounds[b + 1] - bounds[b], page_size);
    }
  });
}

void alloc_extend(const Tensor& out, const Tensor& num_pages, const Tensor& prefix_lens, const Tensor& new_lens,
                  const Tensor& last_slots, const Tensor& free_pages, int64_t page_size) {
  constexpr const char* op = "alloc_extend";
  page_size = checked_page_size(page_size, op);
  check_alloc_extend(out, num_pages, prefix_lens, new_lens, last_slots, free_pages, op);
  const int64_t requests = prefix_lens.size(0);
  const FreePages free(free_pages, page_size, op);
  const int32_t* prefix = data<int32_t>(prefix_lens);
  const int32_t* length = data<int32_t>(new_lens);
  const int32_t* last = data<int32_t>(last_slots);
  int64_t tokens = 0, wanted = 0;
  for (int64_t b = 0; b < requests; ++b) {
    STD_TORCH_CHECK(prefix[b] >= 0, op, ": prefix_lens[", b, "] must be at least 0, got ", prefix[b]);
    if (length[b] <= prefix[b]) continue;
    tokens += length[b] - prefix[b];
    wanted += ceil_div(length[b], page_size) - ceil_div(prefix[b], page_size);
  }
  STD_TORCH_CHECK(out.size(0) >= tokens, op, ": out must hold ", tokens, " slots, got ", out.size(0));
  free.check(wanted);
  int32_t* to = mutable_data<int32_t>(out);
  int64_t page = 0;
  for (int64_t b = 0; b < requests; ++b) {
    int64_t position = prefix[b];
    // [position, page_end) lies in the page of the last slot; whole pages and the beginning of one follow.
    int64_t page_end = std::min<int64_t>(length[b], ceil_div(position, page_size) * page_size);
    for (int32_t slot = last[b]; position < page_end; ++position) *to++ = ++slot;
    while (position < length[b]) {
      page_end = std::min<int64_t>(length[b], position + page_size);
      for (int32_t slot = free.first_slot(page++); position < page_end; ++position) *to++ = slot++;
    }
  }
  *mutable_data<int32_t>(num_pages) = static_cast<int32_t>(wanted);
}

void alloc_decode(const Tensor& out, const Tensor& num_pages, const Tensor& new_lens, const Tensor& last_slots,
                  const Tensor& free_pages, int64_t page_size) {
  constexpr const char* op = "alloc_decode";
  page_size = checked_page_size(page_size, op);
  check_alloc_decode(out, num_pages, new_lens, last_slots, free_pages, op);
  const int64_t requests = new_lens.size(0);
  const FreePages free(free_pages, page_size, op);
  const int32_t* length = data<int32_t>(new_lens);
  const int32_t* last = data<int32_t>(last_slots);
  int64_t wanted = 0;
  for (int64_t b = 0; b < requests; ++b) wanted += length[b] > 0 && (length[b] - 1) % page_size == 0;
  free.check(wanted);
  int32_t* to = mutable_data<int32_t>(out);
  int64_t page = 0;
  for (int64_t b = 0; b < requests; ++b) {
    if (length[b] <= 0) {
      to[b] = -1;
    } else {
      to[b] = (length[b] - 1) % page_size ? last[b] + 1 : free.first_slot(page++);
    }
  }
  *mutable_data<int32_t>(num_pages) = static_cast<int32_t>(wanted);
}

}  // namespace gristmill
