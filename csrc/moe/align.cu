// The tokens of every expert in blocks, on GPUs: a counting sort that keeps the order of equals, so results do not
// depend on which thread is first. A decode step's ids are one block's work. More are cut into chunks: one launch
// counts each, and in the next one every block adds up what comes before its chunk. All sums are of integers.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <bit>

#include "common/gpu_launch.h"
#include "common/gpu_scan.h"
#include "moe/align.h"
#include "moe/moe.h"

namespace gristmill::gpu {
namespace {

constexpr int kAlignThreads = 512;
constexpr int kAlignWarps = kAlignThreads / kWarp;
constexpr int32_t kAloneIds = 2 * kAlignThreads;  // what one block takes by itself
constexpr int32_t kMaxChunks = 128;

struct Problem {
  int32_t* sorted;
  int32_t* owners;
  int32_t* padded;
  int64_t sorted_size, owners_size;
  ExpertIds entries;
  int32_t block_size;
  int32_t id_bits;  // of the numbers 0 to experts
  int32_t chunk, chunks;
  int32_t* counts;  // [chunks, experts]; null when one block does all

  __device__ int32_t first() const { return static_cast<int32_t>(blockIdx.x) * chunk; }
  __device__ int32_t last() const { return min(first() + chunk, entries.count); }
};

// What the threads of a block share.
struct Shared {
  int32_t* totals;     // [experts] entries of each
  int32_t* starts;     // [experts + 1] blocks before each
  int32_t* next;       // [experts] where the next entry of this chunk goes
  int32_t* positions;  // [warps, experts] where the next entry of a warp goes

  __device__ explicit Shared(int32_t experts) {
    totals = dynamic_shared<int32_t>();
    starts = totals + experts;
    next = starts + experts + 1;
    positions = next + experts;
  }
  static size_t bytes(int32_t experts) {
    return sizeof(int32_t) * static_cast<size_t>((3 + kAlignWarps) * experts + 1);
  }
};

__device__ void clear(int32_t* numbers, int32_t count) {
  for (int i = thread_index(); i < count; i += kAlignThreads) numbers[i] = 0;
}

__device__ void count_chunk(const Problem& p, int32_t* counts) {
  for (int32_t i = p.first() + thread_index(); i < p.last(); i += kAlignThreads) {
    const int32_t expert = p.entries.expert_of(i);
    if (expert >= 0) atomic_add(counts + expert, 1);
  }
}

__global__ void __launch_bounds__(kAlignThreads) count_kernel(const Problem p) {
  const int32_t experts = p.entries.experts;
  int32_t* const counts = dynamic_shared<int32_t>();
  clear(counts, experts);
  follow_previous_kernel();
  sync_block();
  count_chunk(p, counts);
  sync_block();
  int32_t* const out = p.counts + static_cast<int64_t>(blockIdx.x) * experts;
  for (int e = thread_index(); e < experts; e += kAlignThreads) out[e] = counts[e];
}

// Entries of every expert: in all chunks, and in those before this block's. Threads share the chunks of an expert.
__device__ void add_chunks(const Problem& p, const Shared& shared) {
  const int32_t experts = p.entries.experts, slices = max(1, kAlignThreads / experts);
  for (int unit = thread_index(); unit < slices * experts; unit += kAlignThreads) {
    const int expert = unit % experts;
    int32_t total = 0, before = 0;
#pragma unroll 8
    for (int chunk = unit / experts; chunk < p.chunks; chunk += slices) {
      const int32_t count = p.counts[static_cast<int64_t>(chunk) * experts + expert];
      total += count;
      before += chunk < static_cast<int>(blockIdx.x) ? count : 0;
    }
    atomic_add(shared.totals + expert, total);
    atomic_add(shared.next + expert, before);
  }
}

constexpr int kScanScratch = static_cast<int>(kMaxExperts) / kAlignThreads * kAlignWarps;

// Blocks before every expert, and so where its entries of this chunk begin. Every scan has a scratch of its own.
__device__ void place_experts(const Problem& p, const Shared& shared, int32_t* scratch) {
  const int32_t experts = p.entries.experts;
  int32_t blocks = 0;
  for (int first = 0; first < experts; first += kAlignThreads) {
    const int expert = first + thread_index();
    const int32_t own = expert < experts ? (shared.totals[expert] + p.block_size - 1) / p.block_size : 0;
    const Running<int32_t> sums = block_running_sum<kAlignThreads>(own, scratch);
    if (expert < experts) {
      shared.starts[expert] = blocks + sums.before;
      shared.next[expert] += (blocks + sums.before) * p.block_size;
    }
    blocks += sums.all;
    scratch += kAlignWarps;
  }
  if (thread_index() == 0) shared.starts[experts] = blocks;
}

// The other lanes of the warp, and this one, that hold the same number.
__device__ uint64_t peers_of(int32_t number, int32_t bits) {
  uint64_t peers = kAllLanes;
  for (int bit = 0; bit < bits; ++bit) {
    const bool set = (number >> bit & 1) != 0;
    const uint64_t lanes = ballot(set);
    peers &= set ? lanes : ~lanes;
  }
  return peers;
}

// Stores the entries of this chunk, each behind those of its expert that come before it: in earlier rounds, in earlier
// warps, in lower lanes.
__device__ void store_entries(const Problem& p, const Shared& shared) {
  const int32_t experts = p.entries.experts;
  int32_t* const mine = shared.positions + warp_index() * experts;
  for (int32_t round = p.first(); round < p.last(); round += kAlignThreads) {
    const int32_t i = round + thread_index();
    const int32_t expert = i < p.last() ? p.entries.expert_of(i) : -1;
    for (int e = lane_index(); e < experts; e += kWarp) mine[e] = 0;
    sync_warp();
    const uint64_t peers = peers_of(expert < 0 ? experts : expert, p.id_bits);
    const int rank = __popcll(peers & ((uint64_t{1} << lane_index()) - 1));
    if (expert >= 0 && rank == 0) mine[expert] = __popcll(peers);
    sync_block();
    for (int e = thread_index(); e < experts; e += kAlignThreads) {
      int32_t counts[kAlignWarps], at = shared.next[e];
#pragma unroll
      for (int warp = 0; warp < kAlignWarps; ++warp) counts[warp] = shared.positions[warp * experts + e];
#pragma unroll
      for (int warp = 0; warp < kAlignWarps; ++warp) {
        shared.positions[warp * experts + e] = at;
        at += counts[warp];
      }
      shared.next[e] = at;
    }
    sync_block();
    if (expert >= 0) p.sorted[mine[expert] + rank] = i;
    sync_warp();
  }
}

// What entries do not fill, and the experts of blocks; the blocks of the grid share the work, kLanes threads an expert.
template <int kLanes>
__device__ void store_the_rest(const Problem& p, const Shared& shared) {
  const int32_t experts = p.entries.experts, none = p.entries.count;
  constexpr int kGroups = kAlignThreads / kLanes;
  const int lane = thread_index() % kLanes, groups = static_cast<int>(gridDim.x) * kGroups;
  for (int e = static_cast<int>(blockIdx.x) * kGroups + thread_index() / kLanes; e < experts; e += groups) {
    const int32_t begin = shared.starts[e], end = shared.starts[e + 1];
#pragma unroll 1
    for (int32_t b = begin + lane; b < end; b += kLanes) p.owners[b] = e;
#pragma unroll 1
    for (int32_t i = begin * p.block_size + shared.totals[e] + lane; i < end * p.block_size; i += kLanes) {
      p.sorted[i] = none;
    }
  }
  const int32_t blocks = shared.starts[experts];
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kAlignThreads + thread_index();
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kAlignThreads;
  for (int64_t i = int64_t{blocks} * p.block_size + thread; i < p.sorted_size; i += threads) p.sorted[i] = none;
  for (int64_t b = blocks + thread; b < p.owners_size; b += threads) p.owners[b] = -1;
  if (thread == 0) *p.padded = blocks * p.block_size;
}

template <bool kAlone>
__global__ void __launch_bounds__(kAlignThreads) align_kernel(const Problem p) {
  GRISTMILL_SHARED(int32_t, scratch, kScanScratch);
  const Shared shared(p.entries.experts);
  clear(shared.totals, p.entries.experts);
  clear(shared.next, p.entries.experts);
  follow_previous_kernel();
  sync_block();
  if constexpr (kAlone) {
    count_chunk(p, shared.totals);
  } else {
    add_chunks(p, shared);
  }
  sync_block();
  place_experts(p, shared, scratch);
  sync_block();
  store_the_rest<kAlone ? 8 : kWarp>(p, shared);
  store_entries(p, shared);
}

}  // namespace

void align_block_size(const Tensor& sorted_token_ids, const Tensor& expert_ids, const Tensor& num_tokens_post_padded,
                      const Tensor& topk_ids, const OptionalTensor& expert_map, int64_t num_experts,
                      int64_t block_size) {
  const ExpertIds entries = checked_align(sorted_token_ids, expert_ids, num_tokens_post_padded, topk_ids, expert_map,
                                          num_experts, block_size);
  Problem p{mutable_data<int32_t>(sorted_token_ids),
            mutable_data<int32_t>(expert_ids),
            mutable_data<int32_t>(num_tokens_post_padded),
            sorted_token_ids.size(0),
            expert_ids.size(0),
            entries,
            static_cast<int32_t>(block_size),
            static_cast<int32_t>(std::bit_width(static_cast<uint64_t>(num_experts))),
            entries.count,
            1,
            nullptr};
  const Launch launch(topk_ids);
  const size_t bytes = Shared::bytes(entries.experts);
  if (entries.count <= kAloneIds) {
    return launch.early_shared<align_kernel<true>>(dim3(1), dim3(kAlignThreads), bytes, p);
  }
  const int32_t whole_rounds = (entries.count + kMaxChunks * kAlignThreads - 1) / (kMaxChunks * kAlignThreads);
  p.chunk = std::max<int32_t>(kAloneIds, whole_rounds * kAlignThreads);
  p.chunks = (entries.count + p.chunk - 1) / p.chunk;
  const Tensor counts = torch::stable::new_empty(topk_ids, {int64_t{p.chunks} * num_experts}, ScalarType::Int);
  p.counts = mutable_data<int32_t>(counts);
  const dim3 grid(static_cast<unsigned>(p.chunks));
  const size_t count_bytes = sizeof(int32_t) * static_cast<size_t>(num_experts);
  launch.early_shared<count_kernel>(grid, dim3(kAlignThreads), count_bytes, p);
  launch.early_shared<align_kernel<false>>(grid, dim3(kAlignThreads), bytes, p);
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("align_block_size", TORCH_BOX(&gristmill::gpu::align_block_size));
}
