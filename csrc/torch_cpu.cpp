// The table of CPU kernels: the schemas are declared by gristmill_kernels/schema.py, this library only adds
// implementations.
#include <torch/csrc/stable/library.h>

#include "activation/activation.h"
#include "attention/attention.h"
#include "gemm/gemm.h"
#include "indices/indices.h"
#include "kvcache/kvcache.h"
#include "mla/mla.h"
#include "norm/norm.h"
#include "rope/rope.h"
#include "sampling/sampling.h"

STABLE_TORCH_LIBRARY_IMPL(gristmill_native, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&gristmill::rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&gristmill::fused_add_rms_norm));
  m.impl("gemma_rms_norm", TORCH_BOX(&gristmill::gemma_rms_norm));
  m.impl("gemma_fused_add_rms_norm", TORCH_BOX(&gristmill::gemma_fused_add_rms_norm));
  m.impl("layer_norm", TORCH_BOX(&gristmill::layer_norm));
  m.impl("apply_rope", TORCH_BOX(&gristmill::apply_rope));
  m.impl("apply_rope_store_kv", TORCH_BOX(&gristmill::apply_rope_store_kv));
  m.impl("silu_and_mul", TORCH_BOX(&gristmill::silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gristmill::gelu_and_mul));
  m.impl("gelu_tanh_and_mul", TORCH_BOX(&gristmill::gelu_tanh_and_mul));
  m.impl("swiglu_oai", TORCH_BOX(&gristmill::swiglu_oai));
  m.impl("store_kv", TORCH_BOX(&gristmill::store_kv));
  m.impl("copy_slots", TORCH_BOX(&gristmill::copy_slots));
  m.impl("transfer_kv", TORCH_BOX(&gristmill::transfer_kv));
  m.impl("kv_indices", TORCH_BOX(&gristmill::kv_indices));
  m.impl("qo_indptr", TORCH_BOX(&gristmill::qo_indptr));
  m.impl("write_req_to_token", TORCH_BOX(&gristmill::write_req_to_token));
  m.impl("window_kv_indices", TORCH_BOX(&gristmill::window_kv_indices));
  m.impl("page_table", TORCH_BOX(&gristmill::page_table));
  m.impl("last_page_len", TORCH_BOX(&gristmill::last_page_len));
  m.impl("mla_indices", TORCH_BOX(&gristmill::mla_indices));
  m.impl("draft_kv_indices", TORCH_BOX(&gristmill::draft_kv_indices));
  m.impl("alloc_extend", TORCH_BOX(&gristmill::alloc_extend));
  m.impl("alloc_decode", TORCH_BOX(&gristmill::alloc_decode));
  m.impl("decode_attention", TORCH_BOX(&gristmill::decode_attention));
  m.impl("extend_attention", TORCH_BOX(&gristmill::extend_attention));
  m.impl("ragged_attention", TORCH_BOX(&gristmill::ragged_attention));
  m.impl("merge_state", TORCH_BOX(&gristmill::merge_state));
  m.impl("merge_states", TORCH_BOX(&gristmill::merge_states));
  m.impl("mla_decode", TORCH_BOX(&gristmill::mla_decode));
  m.impl("mla_store", TORCH_BOX(&gristmill::mla_store));
  m.impl("greedy", TORCH_BOX(&gristmill::greedy));
  m.impl("sample", TORCH_BOX(&gristmill::sample));
  m.impl("apply_logit_bias", TORCH_BOX(&gristmill::apply_logit_bias));
  m.impl("apply_token_bitmask", TORCH_BOX(&gristmill::apply_token_bitmask));
  m.impl("apply_penalties", TORCH_BOX(&gristmill::apply_penalties));
  m.impl("pack_weight", TORCH_BOX(&gristmill::pack_weight));
  m.impl("packed_linear", TORCH_BOX(&gristmill::packed_linear));
  m.impl("skinny_linear", TORCH_BOX(&gristmill::skinny_linear));
}
