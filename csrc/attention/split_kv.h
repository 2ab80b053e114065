// Split-KV attention: few query rows per request over lists that are cut into chunks which different threads take.
#pragma once

#include "attention/problem.h"

namespace gristmill {

struct SplitKvArguments {
  const int32_t* qo_indptr;  // null: one row per request
  const OptionalTensor& plan;
  const OptionalTensor& workspace;
};

// `p.scale`, `p.v_scale`, the pool and the outputs decide what is computed. Rows of a request are its last positions
// and see no key behind their own.
void run_split_kv(const char* op, const AttentionProblem& p, const SplitKvArguments& args);

}  // namespace gristmill
