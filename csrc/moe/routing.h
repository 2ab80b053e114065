// What the choice of experts accepts and the arithmetic of its scores, for the CPU and for GPUs.
//
// Experts are compared by their logits, or with a bias by float32(score + bias). -INFINITY stands for an expert that
// cannot be chosen: its logit or biased score is NaN or -inf, or its group was not.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/check.h"

namespace gristmill {

inline constexpr int64_t kMaxExperts = 1024;
inline constexpr int64_t kMaxChosen = 32;
inline constexpr int64_t kMaxGroups = 32;

struct Routing {
  bool sigmoid;
  bool renormalize;
  int num_groups = 1;
  int topk_groups = 1;
  float scaling = 1.0f;
};

// float32 or bfloat16, or none.
struct Bias {
  const float* wide = nullptr;
  const BFloat16* narrow = nullptr;

  Bias() = default;
  explicit Bias(const OptionalTensor& bias) {
    if (!bias) return;
    if (bias->scalar_type() == ScalarType::Float) {
      wide = data<float>(*bias);
    } else {
      narrow = data<BFloat16>(*bias);
    }
  }
  GRISTMILL_HOST_DEVICE bool given() const { return wide != nullptr || narrow != nullptr; }
  GRISTMILL_HOST_DEVICE float of(int expert) const { return wide ? wide[expert] : to_float(narrow[expert]); }
};

inline Routing checked_routing(bool sigmoid, bool renormalize, int64_t num_groups, int64_t topk_groups, double scaling,
                               int64_t experts, const char* op) {
  STD_TORCH_CHECK(1 <= num_groups && num_groups <= kMaxGroups && experts % num_groups == 0, op,
                  ": num_groups must be from 1 to ", kMaxGroups, " and divide the ", experts, " experts, got ",
                  num_groups);
  STD_TORCH_CHECK(1 <= topk_groups && topk_groups <= num_groups, op,
                  ": topk_groups must be from 1 to num_groups = ", num_groups, ", got ", topk_groups);
  return {sigmoid, renormalize, static_cast<int>(num_groups), static_cast<int>(topk_groups),
          static_cast<float>(scaling)};
}

inline void check_chosen(const Tensor& t, ScalarType type, const Tensor& logits, int64_t chosen, const char* op,
                         const char* name) {
  check_dim(t, 2, op, name);
  check_dtype(t, type, op, name);
  check_inner(t, op, name);
  check_size(t, 0, logits.size(0), op, name);
  check_size(t, 1, chosen, op, name);
}

inline void check_topk(const Tensor& weights, const Tensor& ids, const Tensor& logits, const OptionalTensor& bias,
                       const char* op) {
  check_dim(logits, 2, op, "logits");
  check_inner(logits, op, "logits");
  const int64_t experts = logits.size(1);
  STD_TORCH_CHECK(1 <= experts && experts <= kMaxExperts, op, ": logits must have from 1 to ", kMaxExperts,
                  " experts, got ", experts);
  check_dim(weights, 2, op, "weights");
  const int64_t chosen = weights.size(1);
  STD_TORCH_CHECK(1 <= chosen && chosen <= kMaxChosen && chosen <= experts, op, ": weights must have from 1 to ",
                  kMaxChosen < experts ? kMaxChosen : experts, " columns, got ", chosen);
  check_chosen(weights, ScalarType::Float, logits, chosen, op, "weights");
  check_chosen(ids, ScalarType::Int, logits, chosen, op, "ids");
  if (!bias) return;
  const ScalarType type = bias->scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, op,
                  ": bias must be float32 or bfloat16, got ", dtype_name(type));
  check_vector(*bias, type, experts, op, "bias");
}

// a - b, and 0 for equal infinities: the limit when both grow alike.
template <typename F>
GRISTMILL_HOST_DEVICE inline F difference(F a, F b) {
  return a == b ? F{0} : a - b;
}

}  // namespace gristmill
