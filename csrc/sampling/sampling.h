// Choosing tokens from logits, and the edits of logits that come before it.
#pragma once

#include "common/check.h"

namespace gristmill {

void greedy(const Tensor& out, const Tensor& logits);
void sample(const Tensor& out, const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
            const Tensor& top_p, const Tensor& min_p, const Tensor& seeds, const Tensor& positions);
void apply_logit_bias(const Tensor& logits, const Tensor& indptr, const Tensor& ids, const Tensor& values);
void apply_penalties(const Tensor& logits, const Tensor& prompt_mask, const Tensor& output_counts,
                     const Tensor& presence, const Tensor& frequency, const Tensor& repetition);
void apply_token_bitmask(const Tensor& logits, const Tensor& bitmask);

}  // namespace gristmill
