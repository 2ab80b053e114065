// Slots in pages on GPUs: which pages a request has, and which slots new tokens get. Every block adds up by itself what
// the requests before its own take, so that one launch is enough.
#include <torch/csrc/stable/library.h>

#include "common/gpu_launch.h"
#include "common/gpu_scan.h"
#include "indices/checks.h"
#include "indices/gpu_lists.h"
#include "indices/indices.h"

namespace gristmill::gpu {
namespace {

constexpr int kThreads = 256;

// The page of a request's first slot in it; a hole gives page -1.
struct PageOf {
  PageSize page_size;
  __device__ int32_t operator()(int32_t slot) const { return slot < 0 ? -1 : page_size.page_of(slot); }
};

// All pages of each request, and the length of its last one.
struct PageLists : PageOf {
  const int32_t* seq_lens;
  int32_t* last_page_lens;

  __device__ int64_t step() const { return page_size.tokens; }
  __device__ Span span(int64_t request) const { return {0, page_size.pages(max(seq_lens[request], 0))}; }
  __device__ void also_write(int64_t request) const { last_page_lens[request] = page_size.filled(seq_lens[request]); }
};

__global__ void __launch_bounds__(kListThreads)
    page_table_kernel(int32_t* out, int64_t out_stride, int64_t out_columns, const RequestRows rows,
                      int64_t row_entries, const PageLists lists) {
  wait_for_previous_kernel();
  for (int64_t request = blockIdx.x; request < rows.requests; request += gridDim.x) {
    const Span span = lists.span(request);
    const int32_t* const slots = rows.row(request);
    if (slots == nullptr) continue;
    each_entry(
        entries_within(span.count, row_entries, out_columns),
        [&](int64_t entry) { return slots[entry * lists.step()]; }, lists,
        [&](int64_t entry, int32_t page) { out[request * out_stride + entry] = page; });
  }
}

__global__ void __launch_bounds__(kThreads)
    last_page_len_kernel(int32_t* out, const int32_t* seq_lens, int64_t count, const PageSize page_size) {
  wait_for_previous_kernel();
  const int64_t request = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (request < count) out[request] = page_size.filled(seq_lens[request]);
}

// Requests take pages one after another from the front of the free list.
struct FreePages {
  const int32_t* pages;
  int64_t count;
  PageSize page_size;

  FreePages(const Tensor& free_pages, PageSize page_size)
      : pages(data<int32_t>(free_pages)), count(free_pages.size(0)), page_size(page_size) {}

  // A slot of the page number `index`; -1 where there is none, or none that int32 can name.
  __device__ int32_t slot(int64_t index, uint32_t within) const {
    const int64_t page = index < count ? pages[index] : -1;
    const bool can_be_named = page >= 0 && (page + 1) * page_size.tokens <= int64_t{1} << 31;
    return can_be_named ? static_cast<int32_t>(page * page_size.tokens + within) : -1;
  }
};

// A number that may not fit wraps, as it does in the tensors' own arithmetic.
__device__ inline int32_t slot_after(int32_t last, int64_t steps) { return static_cast<int32_t>(last + steps); }

// New tokens of each request and what they need; nothing where the length does not grow.
struct Extensions {
  const int32_t* prefix_lens;
  const int32_t* new_lens;
  PageSize page_size;

  struct Need {
    int32_t prefix, tokens, pages;
    int64_t in_old_page;  // how many of the tokens the page of the last slot would hold
  };
  __device__ Need of(int64_t request) const {
    const int32_t prefix = prefix_lens[request], length = new_lens[request];
    if (prefix < 0 || length <= prefix) return {prefix, 0, 0, 0};
    const int32_t old_pages = page_size.pages(prefix);
    return {prefix, length - prefix, page_size.pages(length) - old_pages,
            static_cast<int64_t>(old_pages) * page_size.tokens - prefix};
  }
};

__global__ void __launch_bounds__(kListThreads)
    alloc_extend_kernel(int32_t* out, int64_t room, int32_t* num_pages, const Extensions extensions,
                        const int32_t* last_slots, const FreePages free, int64_t requests) {
  GRISTMILL_SHARED(int64_t, scratch, (SumsBefore<2, kListThreads>::kScratch));
  wait_for_previous_kernel();
  const bool counts = blockIdx.y == 0 && threadIdx.x == 0;
  if (counts && blockIdx.x == 0 && requests == 0) *num_pages = 0;
  SumsBefore<2, kListThreads> before;
  for (int64_t request = blockIdx.x; request < requests; request += gridDim.x) {
    const Extensions::Need need = extensions.of(request);
    const int32_t last = last_slots[request];
    before.advance(request, scratch, [&](int64_t other, int64_t (&sums)[2]) {
      const Extensions::Need earlier = extensions.of(other);
      sums[0] += earlier.tokens;
      sums[1] += earlier.pages;
    });
    const int64_t offset = before[0], first_page = before[1];
    if (counts && request == requests - 1) *num_pages = static_cast<int32_t>(first_page + need.pages);
    each_entry(
        entries_within(need.tokens, need.tokens, room - offset),
        [&](int64_t entry) {
          if (entry < need.in_old_page) return slot_after(last, entry + 1);
          const int32_t fresh = static_cast<int32_t>(entry - need.in_old_page);
          return free.slot(first_page + free.page_size.page_of(fresh), free.page_size.within(fresh));
        },
        Unchanged{}, [&](int64_t entry, int32_t slot) { out[offset + entry] = slot; });
  }
}

__global__ void __launch_bounds__(kThreads)
    alloc_decode_kernel(int32_t* out, int32_t* num_pages, const int32_t* new_lens, const int32_t* last_slots,
                        const FreePages free, int64_t requests) {
  using Before = SumsBefore<1, kThreads>;
  GRISTMILL_SHARED(int64_t, before_scratch, Before::kScratch);
  GRISTMILL_SHARED(int32_t, scratch, kThreads / kWarp);
  wait_for_previous_kernel();
  const auto begins_page = [&](int32_t length) { return length > 0 && free.page_size.within(length - 1) == 0; };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads, request = first + threadIdx.x;
  const int32_t length = request < requests ? new_lens[request] : 0;
  const int32_t last = request < requests ? last_slots[request] : 0;
  Before before;
  before.advance(first, before_scratch, [&](int64_t i, int64_t (&sums)[1]) { sums[0] += begins_page(new_lens[i]); });
  const Running<int32_t> in_block = block_running_sum<kThreads>(static_cast<int32_t>(begins_page(length)), scratch);
  if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) *num_pages = static_cast<int32_t>(before[0] + in_block.all);
  if (request >= requests) return;
  int32_t slot = -1;
  if (begins_page(length)) {
    slot = free.slot(before[0] + in_block.before, 0);
  } else if (length > 0) {
    slot = slot_after(last, 1);
  }
  out[request] = slot;
}

}  // namespace

void page_table(const Tensor& out, const Tensor& req_to_token, const Tensor& req_slots, const Tensor& seq_lens,
                int64_t page_size) {
  page_size = checked_page_size(page_size, "page_table");
  check_page_table(out, req_to_token, req_slots, seq_lens, "page_table");
  const Launch launch(out);
  const RequestRows rows(req_to_token, req_slots);
  if (rows.requests == 0) return;
  const int64_t row_entries = ceil_div(rows.columns, page_size), columns = out.size(1);
  launch.early<page_table_kernel>(list_grid(launch, rows.requests, std::min(row_entries, columns)), dim3(kListThreads),
                                  mutable_data<int32_t>(out), out.stride(0), columns, rows, row_entries,
                                  PageLists{{PageSize(page_size)}, data<int32_t>(seq_lens), nullptr});
}

void last_page_len(const Tensor& out, const Tensor& seq_lens, int64_t page_size) {
  page_size = checked_page_size(page_size, "last_page_len");
  check_last_page_len(out, seq_lens, "last_page_len");
  const int64_t count = seq_lens.size(0);
  Launch(out).early<last_page_len_kernel>(blocks_for(count, kThreads), dim3(kThreads), mutable_data<int32_t>(out),
                                          data<int32_t>(seq_lens), count, PageSize(page_size));
}

void mla_indices(const Tensor& indptr, const Tensor& indices, const Tensor& last_page_lens, const Tensor& req_to_token,
                 const Tensor& req_slots, const Tensor& seq_lens, int64_t page_size) {
  page_size = checked_page_size(page_size, "mla_indices");
  check_mla_indices(indptr, indices, last_page_lens, req_to_token, req_slots, seq_lens, "mla_indices");
  const PageLists lists{{PageSize(page_size)}, data<int32_t>(seq_lens), mutable_data<int32_t>(last_page_lens)};
  write_lists(indptr, indices, req_to_token, req_slots, page_size, lists);
}

void alloc_extend(const Tensor& out, const Tensor& num_pages, const Tensor& prefix_lens, const Tensor& new_lens,
                  const Tensor& last_slots, const Tensor& free_pages, int64_t page_size) {
  const PageSize pages(checked_page_size(page_size, "alloc_extend"));
  check_alloc_extend(out, num_pages, prefix_lens, new_lens, last_slots, free_pages, "alloc_extend");
  const Launch launch(out);
  const int64_t requests = prefix_lens.size(0), room = out.size(0);
  launch.early<alloc_extend_kernel>(list_grid(launch, requests, room), dim3(kListThreads), mutable_data<int32_t>(out),
                                    room, mutable_data<int32_t>(num_pages),
                                    Extensions{data<int32_t>(prefix_lens), data<int32_t>(new_lens), pages},
                                    data<int32_t>(last_slots), FreePages(free_pages, pages), requests);
}

void alloc_decode(const Tensor& out, const Tensor& num_pages, const Tensor& new_lens, const Tensor& last_slots,
                  const Tensor& free_pages, int64_t page_size) {
  const PageSize pages(checked_page_size(page_size, "alloc_decode"));
  check_alloc_decode(out, num_pages, new_lens, last_slots, free_pages, "alloc_decode");
  const int64_t requests = new_lens.size(0);
  Launch(out).early<alloc_decode_kernel>(blocks_for(std::max<int64_t>(1, requests), kThreads), dim3(kThreads),
                                         mutable_data<int32_t>(out), mutable_data<int32_t>(num_pages),
                                         data<int32_t>(new_lens), data<int32_t>(last_slots),
                                         FreePages(free_pages, pages), requests);
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("page_table", TORCH_BOX(&gristmill::gpu::page_table));
  m.impl("last_page_len", TORCH_BOX(&gristmill::gpu::last_page_len));
  m.impl("mla_indices", TORCH_BOX(&gristmill::gpu::mla_indices));
  m.impl("alloc_extend", TORCH_BOX(&gristmill::gpu::alloc_extend));
  m.impl("alloc_decode", TORCH_BOX(&gristmill::gpu::alloc_decode));
}
