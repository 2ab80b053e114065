// The table of CPU kernels: the schemas are declared by gristmill_kernels/schema.py, this library only adds
// implementations.
#include <torch/csrc/stable/library.h>

#include "activation/activation.h"
#include "attention/attention.h"
#include "gemm/gemm.h"
#include "indices/indices.h"
#include "kvcache/kvcache.h"
#include "norm/norm.h"
#include "rope/rope.h"
#include "sampling/sampling.h"

STABLE_TORCH_LIBRARY_IMPL(gristmill_native, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&gristmill::rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&gristmill::fused_add_rms_norm));
  m.impl("apply_rope", TORCH_BOX(&gristmill::apply_rope));
  m.impl("silu_and_mul", TORCH_BOX(&gristmill::silu_and_mul));
  m.impl("store_kv", TORCH_BOX(&gristmill::store_kv));
  m.impl("kv_indices", TORCH_BOX(&gristmill::kv_indices));
  m.impl("qo_indptr", TORCH_BOX(&gristmill::qo_indptr));
  m.impl("write_req_to_token", TORCH_BOX(&gristmill::write_req_to_token));
  m.impl("decode_attention", TORCH_BOX(&gristmill::decode_attention));
  m.impl("extend_attention", TORCH_BOX(&gristmill::extend_attention));
  m.impl("merge_state", TORCH_BOX(&gristmill::merge_state));
  m.impl("greedy", TORCH_BOX(&gristmill::greedy));
  m.impl("sample", TORCH_BOX(&gristmill::sample));
  m.impl("apply_logit_bias", TORCH_BOX(&gristmill::apply_logit_bias));
  m.impl("apply_penalties", TORCH_BOX(&gristmill::apply_penalties));
  m.impl("pack_weight", TORCH_BOX(&gristmill::pack_weight));
  m.impl("packed_linear", TORCH_BOX(&gristmill::packed_linear));
}
