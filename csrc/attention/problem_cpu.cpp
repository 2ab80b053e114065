// Checks of the arguments that the attention ops share.
#include "attention/problem.h"

namespace gristmill {
namespace {

void check_heads(const Tensor& t, const char* op, const char* name) {
  check_dim(t, 3, op, name);
  check_inner(t, op, name);
}

void check_indptr(const Tensor& indptr, int64_t total, const char* op, const char* name, const char* total_name) {
  check_vector(indptr, ScalarType::Int, -1, op, name);
  STD_TORCH_CHECK(indptr.size(0) >= 1, op, ": ", name, " must have one entry more than there are requests, got none");
  const int32_t* bound = data<int32_t>(indptr);
  const int64_t requests = indptr.size(0) - 1;
  STD_TORCH_CHECK(bound[0] >= 0, op, ": ", name, "[0] must be at least 0, got ", bound[0]);
  for (int64_t b = 0; b < requests; ++b) {
    STD_TORCH_CHECK(bound[b] <= bound[b + 1], op, ": ", name, " must not descend, got ", bound[b], " before ",
                    bound[b + 1]);
  }
  STD_TORCH_CHECK(bound[requests] <= total, op, ": ", name, " ends at ", bound[requests], ", beyond the ", total, " ",
                  total_name);
}

}  // namespace

void set_outputs(AttentionProblem& p, const char* op, const Tensor& out, const OptionalTensor& lse) {
  check_heads(out, op, "out");
  check_size(out, 0, p.rows, op, "out");
  check_size(out, 1, p.num_qo_heads, op, "out");
  check_size(out, 2, p.head_dim_v, op, "out");
  check_dtype(out, p.dtype, op, "out");
  p.out = out.mutable_data_ptr();
  p.out_row = out.stride(0);
  p.out_head = out.stride(1);
  if (!lse) return;
  check_dim(*lse, 2, op, "lse");
  check_dtype(*lse, ScalarType::Float, op, "lse");
  check_size(*lse, 0, p.rows, op, "lse");
  check_size(*lse, 1, p.num_qo_heads, op, "lse");
  p.lse = mutable_data<float>(*lse);
  p.lse_row = lse->stride(0);
  p.lse_head = lse->stride(1);
}

void set_lists(AttentionProblem& p, const char* op, const Tensor& kv_indptr, const Tensor* kv_indices) {
  if (kv_indices != nullptr) {
    check_vector(*kv_indices, ScalarType::Int, -1, op, "kv_indices");
    check_indptr(kv_indptr, kv_indices->size(0), op, "kv_indptr", "entries of kv_indices");
    p.kv_indices = data<int32_t>(*kv_indices);
  } else {
    check_indptr(kv_indptr, p.num_slots, op, "kv_indptr", "rows of k");
  }
  p.requests = kv_indptr.size(0) - 1;
  p.kv_indptr = data<int32_t>(kv_indptr);
}

const int32_t* query_bounds(const AttentionProblem& p, const char* op, const Tensor& qo_indptr) {
  check_vector(qo_indptr, ScalarType::Int, p.requests + 1, op, "qo_indptr");
  check_indptr(qo_indptr, p.rows, op, "qo_indptr", "query rows");
  return data<int32_t>(qo_indptr);
}

AttentionProblem make_problem(const char* op, const KvNames& names, const Tensor& out, const OptionalTensor& lse,
                              const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_indptr,
                              const Tensor* kv_indices, const OptionalTensor& sinks, double sm_scale, double logit_cap,
                              int64_t window_left, double k_scale, double v_scale) {
  check_heads(q, op, "q");
  check_heads(k, op, names.k);
  check_heads(v, op, names.v);
  AttentionProblem p{};
  p.dtype = q.scalar_type();
  p.rows = q.size(0);
  p.num_qo_heads = q.size(1);
  p.head_dim = p.q_width = q.size(2);
  p.num_slots = k.size(0);
  p.num_kv_heads = k.size(1);
  p.head_dim_v = v.size(2);
  p.cache_dtype = k.scalar_type();
  check_size(k, 2, p.head_dim, op, names.k);
  check_size(v, 0, p.num_slots, op, names.v);
  check_size(v, 1, p.num_kv_heads, op, names.v);
  check_dtype(v, p.cache_dtype, op, names.v);
  STD_TORCH_CHECK(p.num_kv_heads > 0 && p.num_qo_heads % p.num_kv_heads == 0, op, ": q must have a multiple of the ",
                  p.num_kv_heads, " heads of ", names.k, ", got ", p.num_qo_heads);
  dispatch_float(p.dtype, op, "q", [](auto) {});
  p.q = q.const_data_ptr();
  p.q_row = q.stride(0);
  p.q_head = q.stride(1);
  set_outputs(p, op, out, lse);
  p.k = k.const_data_ptr();
  p.k_slot = k.stride(0);
  p.k_head = k.stride(1);
  p.v = v.const_data_ptr();
  p.v_slot = v.stride(0);
  p.v_head = v.stride(1);
  set_lists(p, op, kv_indptr, kv_indices);
  if (sinks) {
    check_vector(*sinks, ScalarType::Float, p.num_qo_heads, op, "sinks");
    p.sinks = data<float>(*sinks);
  }
  p.scale = static_cast<float>(sm_scale * k_scale);
  p.logit_cap = static_cast<float>(logit_cap);
  p.v_scale = static_cast<float>(v_scale);
  p.window_left = window_left;
  return p;
}

}  // namespace gristmill
