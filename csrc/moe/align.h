// What align_block_size accepts and which expert an entry goes to, for the CPU and for GPUs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "moe/routing.h"

namespace gristmill {

// Entry i of topk_ids, row after row.
struct ExpertIds {
  const int32_t* ids;
  int64_t stride;
  int32_t per_token;
  int32_t count;
  const int32_t* map;  // null for an empty one too
  int32_t mapped;      // ids that it maps; -1: there is no map
  int32_t experts;

  // -1 for an entry that goes nowhere.
  GRISTMILL_HOST_DEVICE int32_t expert_of(int32_t i) const {
    int32_t id = stride == per_token ? ids[i] : ids[i / per_token * stride + i % per_token];
    if (mapped >= 0) id = 0 <= id && id < mapped ? map[id] : -1;
    return 0 <= id && id < experts ? id : -1;
  }
};

// How many blocks any `count` ids may need: an expert that has some fills at most block_size - 1 places in vain.
inline int64_t max_blocks(int64_t count, int64_t experts, int64_t block_size) {
  return (count + std::min(count, experts) * (block_size - 1)) / block_size;
}

inline ExpertIds checked_align(const Tensor& sorted_token_ids, const Tensor& expert_ids,
                               const Tensor& num_tokens_post_padded, const Tensor& topk_ids,
                               const OptionalTensor& expert_map, int64_t num_experts, int64_t block_size) {
  constexpr const char* op = "align_block_size";
  constexpr int64_t kMost = int64_t{1} << 30;
  STD_TORCH_CHECK(1 <= num_experts && num_experts <= kMaxExperts, op, ": num_experts must be from 1 to ", kMaxExperts,
                  ", got ", num_experts);
  STD_TORCH_CHECK(1 <= block_size && block_size <= kMost, op, ": block_size must be at least 1, got ", block_size);
  check_dim(topk_ids, 2, op, "topk_ids");
  check_dtype(topk_ids, ScalarType::Int, op, "topk_ids");
  check_inner(topk_ids, op, "topk_ids");
  const int64_t count = topk_ids.numel(), blocks = max_blocks(count, num_experts, block_size);
  check_vector(sorted_token_ids, ScalarType::Int, -1, op, "sorted_token_ids");
  check_vector(expert_ids, ScalarType::Int, -1, op, "expert_ids");
  check_vector(num_tokens_post_padded, ScalarType::Int, 1, op, "num_tokens_post_padded");
  STD_TORCH_CHECK(count <= kMost && blocks * block_size <= kMost && sorted_token_ids.size(0) <= kMost, op,
                  ": topk_ids has ", count, " entries, which is too many");
  STD_TORCH_CHECK(sorted_token_ids.size(0) >= blocks * block_size, op, ": sorted_token_ids must have at least ",
                  blocks * block_size, " entries, got ", sorted_token_ids.size(0));
  STD_TORCH_CHECK(expert_ids.size(0) >= blocks, op, ": expert_ids must have at least ", blocks, " entries, got ",
                  expert_ids.size(0));
  if (expert_map) check_vector(*expert_map, ScalarType::Int, -1, op, "expert_map");
  const bool one_row = topk_ids.size(0) <= 1;
  return {data<int32_t>(topk_ids),
          one_row ? topk_ids.size(1) : topk_ids.stride(0),
          static_cast<int32_t>(topk_ids.size(1)),
          static_cast<int32_t>(count),
          expert_map ? data<int32_t>(*expert_map) : nullptr,
          expert_map ? static_cast<int32_t>(std::min<int64_t>(expert_map->size(0), INT32_MAX)) : -1,
          static_cast<int32_t>(num_experts)};
}

}  // namespace gristmill
