// Index lists of tokens on GPUs, and updates of the request table. Every block adds up by itself what the requests
// before its own have, so that one launch is enough.
#include <torch/csrc/stable/library.h>

#include "common/gpu_launch.h"
#include "common/gpu_scan.h"
#include "indices/checks.h"
#include "indices/gpu_lists.h"
#include "indices/indices.h"

namespace gristmill::gpu {
namespace {

constexpr int kSumThreads = 256;

// One entry per position, and nothing else per request.
struct TokenLists {
  static __device__ constexpr int64_t step() { return 1; }
  __device__ void also_write(int64_t) const {}
};

// Positions [starts[b], seq_lens[b]). A start before 0 is an error, and gives nothing.
struct SlotLists : TokenLists, Unchanged {
  const int32_t* seq_lens;
  const int32_t* starts;

  SlotLists(const Tensor& seq_lens, const OptionalTensor& kv_start)
      : seq_lens(data<int32_t>(seq_lens)), starts(kv_start ? data<int32_t>(*kv_start) : nullptr) {}

  __device__ Span span(int64_t request) const {
    const int32_t end = seq_lens[request], first = starts == nullptr ? 0 : starts[request];
    return {first, first < 0 || end < first ? 0 : end - first};
  }
};

// What the newest rows of each request see, as slots of the pool that the window layers have.
struct WindowLists : TokenLists {
  const int32_t* seq_lens;
  const int32_t* q_lens;
  const int32_t* slot_map;
  int64_t num_mapped, window;

  WindowLists(const Tensor& seq_lens, const OptionalTensor& q_lens, const OptionalTensor& slot_map, int64_t window_left)
      : seq_lens(data<int32_t>(seq_lens)),
        q_lens(q_lens ? data<int32_t>(*q_lens) : nullptr),
        slot_map(slot_map ? data<int32_t>(*slot_map) : nullptr),
        num_mapped(slot_map ? slot_map->size(0) : 0),
        window(std::min<int64_t>(window_left, INT32_MAX)) {}

  __device__ Span span(int64_t request) const {
    const int32_t length = seq_lens[request], end = length < 0 ? 0 : length;
    if (window < 0) return {0, end};
    const int64_t first_row = int64_t{length} - (q_lens == nullptr ? 1 : q_lens[request]), first = first_row - window;
    const int32_t inside = static_cast<int32_t>(first < 0 ? 0 : first > end ? end : first);
    return {inside, end - inside};
  }
  __device__ int32_t operator()(int32_t slot) const {
    if (slot_map == nullptr || slot < 0) return slot;
    return slot < num_mapped ? slot_map[slot] : -1;
  }
};

__global__ void __launch_bounds__(kSumThreads) running_sum_kernel(int32_t* out, const int32_t* lens, int64_t count) {
  using Before = SumsBefore<1, kSumThreads>;
  GRISTMILL_SHARED(int64_t, before_scratch, Before::kScratch);
  GRISTMILL_SHARED(int64_t, scratch, kSumThreads / kWarp);
  wait_for_previous_kernel();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSumThreads, place = first + threadIdx.x;
  const int64_t own = place < count ? lens[place] : 0;
  Before before;
  before.advance(first, before_scratch, [&](int64_t i, int64_t (&sums)[1]) { sums[0] += lens[i]; });
  const Running<int64_t> in_block = block_running_sum<kSumThreads>(own, scratch);
  if (place == 0) out[0] = 0;
  if (place < count) out[place + 1] = static_cast<int32_t>(before[0] + in_block.before + own);
}

// Runs follow one another in `slots`; one with a negative length has none.
__global__ void __launch_bounds__(kListThreads)
    write_kernel(const RequestRows rows, const int32_t* starts, const int32_t* lens, const int32_t* slots,
                 int64_t num_slots) {
  GRISTMILL_SHARED(int64_t, scratch, (SumsBefore<1, kListThreads>::kScratch));
  wait_for_previous_kernel();
  SumsBefore<1, kListThreads> before;
  for (int64_t run = blockIdx.x; run < rows.requests; run += gridDim.x) {
    const int32_t start = starts[run], length = lens[run];
    int32_t* const row = rows.row(run);
    before.advance(run, scratch, [&](int64_t other, int64_t (&sums)[1]) { sums[0] += max(lens[other], 0); });
    if (row == nullptr || start < 0) continue;
    const int64_t offset = before[0];
    each_entry(
        entries_within(length, rows.columns - start, num_slots - offset),
        [&](int64_t entry) { return slots[offset + entry]; }, Unchanged{},
        [&](int64_t entry, int32_t slot) { row[start + entry] = slot; });
  }
}

// The lists of a multi-step draft: row s of both outputs is one CSR list of requests * topk branches.
struct DraftLists {
  int32_t* indptr;
  int32_t* indices;
  const int32_t* draft_slots;  // [requests, topk, steps]; null: in the table behind the prefix
  int64_t indptr_stride, indices_stride, room, steps, topk;

  // Where a branch's list of a step begins, after those of `before` tokens in prefixes and of earlier branches.
  __device__ int64_t offset(int64_t before, int64_t request, int64_t branch, int32_t prefix, int64_t step) const {
    return before * topk + branch * prefix + (request * topk + branch) * (step + 1);
  }
  __device__ void store(int64_t step, int64_t place, int32_t slot) const {
    if (place < room) indices[step * indices_stride + place] = slot;
  }
};

// A branch's own tokens 0 to `step` end its list of that step, and the list's bound follows.
__device__ void write_own_tokens(const DraftLists& lists, const int32_t* slots, int64_t columns, int64_t before,
                                 int64_t request, int32_t prefix) {
  const int64_t units = (lists.steps * lists.topk - blockIdx.z + gridDim.z - 1) / gridDim.z * lists.steps;
  for (int64_t unit = threadIdx.x; unit < units; unit += kListThreads) {
    const auto [of_block, token] = divide(unit, lists.steps);
    const auto [step, branch] = divide(blockIdx.z + of_block * gridDim.z, lists.topk);
    const int64_t of_all = request * lists.topk + branch;
    const int64_t begin = lists.offset(before, request, branch, prefix, step) + prefix;
    if (token == 0) lists.indptr[step * lists.indptr_stride + of_all + 1] = static_cast<int32_t>(begin + step + 1);
    if (token > step || slots == nullptr) continue;
    if (lists.draft_slots != nullptr) {
      lists.store(step, begin + token, lists.draft_slots[of_all * lists.steps + token]);
    } else if (const int64_t position = prefix + branch * lists.steps + token; position < columns) {
      lists.store(step, begin + token, slots[position]);
    }
  }
}

// Blocks z, z + gridDim.z, .. of the grid have the pairs of step and branch with these numbers: an entry of the prefix
// is loaded once for all of a block's.
__global__ void __launch_bounds__(kListThreads)
    draft_kernel(const DraftLists lists, const RequestRows rows, const int32_t* prefix_lens) {
  GRISTMILL_SHARED(int64_t, scratch, (SumsBefore<1, kListThreads>::kScratch));
  wait_for_previous_kernel();
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
    for (int64_t step = threadIdx.x; step < lists.steps; step += kListThreads)
      lists.indptr[step * lists.indptr_stride] = 0;
  }
  SumsBefore<1, kListThreads> before;
  for (int64_t request = blockIdx.x; request < rows.requests; request += gridDim.x) {
    const int32_t prefix = max(prefix_lens[request], 0);
    const int32_t* const slots = rows.row(request);
    const int64_t count = slots == nullptr ? 0 : min(int64_t{prefix}, rows.columns);
    const auto load = [&](int64_t entry) { return slots[entry]; };
    ListRound round;
    round.load(count, load);
    before.advance(request, scratch, [&](int64_t other, int64_t (&sums)[1]) { sums[0] += max(prefix_lens[other], 0); });
    if (blockIdx.y == 0) write_own_tokens(lists, slots, rows.columns, before[0], request, prefix);
    while (round.first < count) {
      for (int64_t pair = blockIdx.z; pair < lists.steps * lists.topk; pair += gridDim.z) {
        const auto [step, branch] = divide(pair, lists.topk);
        const int64_t begin = lists.offset(before[0], request, branch, prefix, step);
        round.store(count, Unchanged{}, [&](int64_t entry, int32_t slot) { lists.store(step, begin + entry, slot); });
      }
      round.next();
      round.load(count, load);
    }
  }
}

}  // namespace

void kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                const Tensor& seq_lens, const OptionalTensor& kv_start) {
  check_kv_indices(indptr, indices, req_to_token, req_slots, seq_lens, kv_start, "kv_indices");
  write_lists(indptr, indices, req_to_token, req_slots, 1, SlotLists(seq_lens, kv_start));
}

void window_kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                       const Tensor& seq_lens, const OptionalTensor& q_lens, const OptionalTensor& slot_map,
                       int64_t window_left) {
  check_window_kv_indices(indptr, indices, req_to_token, req_slots, seq_lens, q_lens, slot_map, "window_kv_indices");
  write_lists(indptr, indices, req_to_token, req_slots, 1, WindowLists(seq_lens, q_lens, slot_map, window_left));
}

void qo_indptr(const Tensor& out, const Tensor& q_lens) {
  check_qo_indptr(out, q_lens, "qo_indptr");
  const int64_t count = q_lens.size(0);
  Launch(out).early<running_sum_kernel>(blocks_for(std::max<int64_t>(1, count), kSumThreads), dim3(kSumThreads),
                                        mutable_data<int32_t>(out), data<int32_t>(q_lens), count);
}

void write_req_to_token(const Tensor& req_to_token, const Tensor& req_slots, const Tensor& starts, const Tensor& lens,
                        const Tensor& slots) {
  check_write_req_to_token(req_to_token, req_slots, starts, lens, slots, "write_req_to_token");
  const Launch launch(req_to_token);
  const RequestRows rows(req_to_token, req_slots);
  if (rows.requests == 0) return;
  launch.early<write_kernel>(list_grid(launch, rows.requests, std::min(rows.columns, slots.size(0))),
                             dim3(kListThreads), rows, data<int32_t>(starts), data<int32_t>(lens), data<int32_t>(slots),
                             slots.size(0));
}

void draft_kv_indices(const Tensor& indptr, const Tensor& indices, const Tensor& req_to_token, const Tensor& req_slots,
                      const Tensor& prefix_lens, const OptionalTensor& draft_slots, int64_t steps, int64_t topk) {
  check_draft_kv_indices(indptr, indices, req_to_token, req_slots, prefix_lens, draft_slots, steps, topk,
                         "draft_kv_indices");
  const Launch launch(indptr);
  const RequestRows rows(req_to_token, req_slots);
  const DraftLists lists{mutable_data<int32_t>(indptr),
                         mutable_data<int32_t>(indices),
                         draft_slots ? data<int32_t>(*draft_slots) : nullptr,
                         indptr.stride(0),
                         indices.stride(0),
                         indices.size(1),
                         steps,
                         topk};
  dim3 grid = list_grid(launch, rows.requests, rows.columns);
  const int64_t blocks = kBlocksPerProcessor * launch.processors() / (int64_t{grid.x} * grid.y);
  grid.z = static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, std::min<int64_t>(steps * topk, 65535)));
  launch.early<draft_kernel>(grid, dim3(kListThreads), lists, rows, data<int32_t>(prefix_lens));
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("kv_indices", TORCH_BOX(&gristmill::gpu::kv_indices));
  m.impl("window_kv_indices", TORCH_BOX(&gristmill::gpu::window_kv_indices));
  m.impl("qo_indptr", TORCH_BOX(&gristmill::gpu::qo_indptr));
  m.impl("write_req_to_token", TORCH_BOX(&gristmill::gpu::write_req_to_token));
  m.impl("draft_kv_indices", TORCH_BOX(&gristmill::gpu::draft_kv_indices));
}
