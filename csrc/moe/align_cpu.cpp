// The tokens of every expert in blocks, on the CPU: a counting sort.
#include "moe/align.h"
#include "moe/moe.h"

namespace gristmill {

void align_block_size(const Tensor& sorted_token_ids, const Tensor& expert_ids, const Tensor& num_tokens_post_padded,
                      const Tensor& topk_ids, const OptionalTensor& expert_map, int64_t num_experts,
                      int64_t block_size) {
  const ExpertIds entries = checked_align(sorted_token_ids, expert_ids, num_tokens_post_padded, topk_ids, expert_map,
                                          num_experts, block_size);
  int64_t counts[kMaxExperts] = {}, next[kMaxExperts];
  for (int32_t i = 0; i < entries.count; ++i) {
    if (const int32_t expert = entries.expert_of(i); expert >= 0) ++counts[expert];
  }
  int32_t* const sorted = mutable_data<int32_t>(sorted_token_ids);
  int32_t* const owners = mutable_data<int32_t>(expert_ids);
  std::fill(sorted, sorted + sorted_token_ids.size(0), entries.count);
  int64_t block = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    next[e] = block * block_size;
    for (int64_t placed = 0; placed < counts[e]; placed += block_size) owners[block++] = static_cast<int32_t>(e);
  }
  std::fill(owners + block, owners + expert_ids.size(0), -1);
  *mutable_data<int32_t>(num_tokens_post_padded) = static_cast<int32_t>(block * block_size);
  for (int32_t i = 0; i < entries.count; ++i) {
    if (const int32_t expert = entries.expert_of(i); expert >= 0) sorted[next[expert]++] = i;
  }
}

}  // namespace gristmill
