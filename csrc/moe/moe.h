// Mixture of experts: which experts a token goes to, with what weights, and the tokens of every expert in blocks.
#pragma once

#include "common/check.h"

namespace gristmill {

void topk_softmax(const Tensor& weights, const Tensor& ids, const Tensor& logits, bool renormalize);
void topk_sigmoid(const Tensor& weights, const Tensor& ids, const Tensor& logits, const OptionalTensor& bias,
                  bool renormalize);
void grouped_topk(const Tensor& weights, const Tensor& ids, const Tensor& logits, const OptionalTensor& bias,
                  int64_t num_groups, int64_t topk_groups, double scaling, bool sigmoid, bool renormalize);
void align_block_size(const Tensor& sorted_token_ids, const Tensor& expert_ids, const Tensor& num_tokens_post_padded,
                      const Tensor& topk_ids, const OptionalTensor& expert_map, int64_t num_experts,
                      int64_t block_size);

}  // namespace gristmill
