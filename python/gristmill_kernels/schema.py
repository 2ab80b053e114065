"""The one place where every op of the package is declared: its schema and the static facts by which an implementation is chosen.
Plain data, free of torch: dispatch.py registers it, C++ implements against it. Meanings of the arguments: the public functions' docstrings.

Conventions. Ops return nothing; what they write comes first and is marked `Tensor(a!)`. Index tensors are int32, LSE and per-row
parameters float32, seeds int64. The innermost stride of every data tensor is 1, all other strides are free and must be honoured, with
int64 offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

NAMESPACE = "gristmill"
FAMILIES = ("native", "triton", "metal", "reference")

# KV lists are cut every SPLIT_TOKENS entries, counted from the start of the request's list, whatever the batch, the chunk or the number
# of threads: that is what makes a row's result independent of its neighbours.
SPLIT_TOKENS = 256

# Layout of a decode plan, one int32 tensor (B requests, W workers, I items, C >= I the items that there is room for):
#   [0] PLAN_VERSION  [1] B  [2] I  [3] W  [4] SPLIT_TOKENS  [5] max_q_len  [6] C  [7] window_left
#   worker_indptr[W+1]   items of worker w are [worker_indptr[w], worker_indptr[w+1])
#   request_indptr[B+1]  items of request b, in ascending order of their start
#   item_request[C]      -1 from I on
#   item_start[C]        offset in the request's KV list; the item covers [start, min(start + SPLIT_TOKENS, kv_len)); -1 from I on
# Where each part begins depends on B, W and C alone, so a captured graph stays valid while a plan is refreshed in place.
# Items that lie wholly outside the window of every row (window_left >= 0) are left out.
# Its workspace is float32[C, max_q_len, Hq, Dv + 2]: the item's output before normalisation, its largest score (natural units, scaled and
# capped), its sum of exponentials. What it holds between calls is of no meaning.
PLAN_VERSION = 2
PLAN_HEADER = 8

# The most rows that skinny_linear takes.
SKINNY_ROWS = 16

# The most experts, experts per token and groups of experts of the routing ops.
MAX_EXPERTS = 1024
MAX_CHOSEN_EXPERTS = 32
MAX_EXPERT_GROUPS = 32

# The group sizes of per_group_quant_fp8.
QUANT_GROUPS = (32, 64, 128, 256)


class NormKey(NamedTuple):
    device: str
    dtype: Any


class RopeKey(NamedTuple):
    device: str
    dtype: Any
    head_dim: int
    rotary_dim: int


class RopeStoreKey(NamedTuple):
    device: str
    dtype: Any
    cache_dtype: Any
    head_dim: int
    rotary_dim: int


class ActivationKey(NamedTuple):
    device: str
    dtype: Any


class StoreKey(NamedTuple):
    device: str
    dtype: Any
    cache_dtype: Any


class CopyKey(NamedTuple):
    device: str
    dtype: Any


class TransferKey(NamedTuple):
    """`device` is the accelerator's when one side is on the host, and the pools' own when both are of one kind."""

    device: str
    dtype: Any
    src_device: str
    dst_device: str


class IndexKey(NamedTuple):
    device: str


class AttentionKey(NamedTuple):
    device: str
    dtype: Any
    cache_dtype: Any
    head_dim: int
    head_dim_v: int
    num_qo_heads: int
    num_kv_heads: int


class MlaKey(NamedTuple):
    device: str
    dtype: Any
    cache_dtype: Any
    latent_dim: int
    rope_dim: int
    num_qo_heads: int


class MergeKey(NamedTuple):
    device: str
    dtype: Any


class LogitsKey(NamedTuple):
    device: str
    dtype: Any


class LinearKey(NamedTuple):
    device: str
    dtype: Any


class RoutingKey(NamedTuple):
    device: str
    dtype: Any


class QuantKey(NamedTuple):
    device: str
    dtype: Any
    out_dtype: Any


def device_of(x: Any) -> str:
    """Device type of a tensor; `x.device.type` takes several times as long as asking for the usual one."""
    return "cpu" if x.is_cpu else x.device.type


def norm_key(x: Any) -> tuple:
    return (device_of(x), x.dtype)


def rope_key(q: Any, cos_sin_cache: Any) -> tuple:
    return (device_of(q), q.dtype, q.shape[-1], cos_sin_cache.shape[-1])


def rope_store_key(q: Any, k_cache: Any, cos_sin_cache: Any) -> tuple:
    return (device_of(q), q.dtype, k_cache.dtype, q.shape[-1], cos_sin_cache.shape[-1])


def store_key(k: Any, k_cache: Any) -> tuple:
    return (device_of(k), k.dtype, k_cache.dtype)


def quant_key(x: Any, out: Any) -> tuple:
    return (device_of(x), x.dtype, out.dtype)


def transfer_key(dst_k: Any, src_k: Any) -> tuple:
    dst_device, src_device = device_of(dst_k), device_of(src_k)
    return (dst_device if src_device == "cpu" else src_device, dst_k.dtype, src_device, dst_device)


def attention_key(q: Any, k_cache: Any, v_cache: Any) -> tuple:
    _, num_qo_heads, head_dim = q.shape
    _, num_kv_heads, head_dim_v = v_cache.shape
    return (device_of(q), q.dtype, k_cache.dtype, head_dim, head_dim_v, num_qo_heads, num_kv_heads)


def mla_key(q_nope: Any, q_rope: Any, kv_cache: Any) -> tuple:
    _, num_qo_heads, latent_dim = q_nope.shape
    return (device_of(q_nope), q_nope.dtype, kv_cache.dtype, latent_dim, q_rope.shape[-1], num_qo_heads)


class OpSpec(NamedTuple):
    """One op: its schema, the key type its `supports` predicates receive, and how a key is read off the op's own arguments."""

    schema: str
    key_type: Callable[..., Any]
    key_of: Callable[..., tuple]

    @property
    def name(self) -> str:
        return self.schema.split("(", 1)[0]


_SPECS = (
    # norm
    OpSpec("rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()", NormKey, lambda out, x, weight, eps: norm_key(x)),
    OpSpec(
        "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()",
        NormKey,
        lambda x, residual, weight, eps: norm_key(x),
    ),
    # the gemma ops multiply by 1 + weight
    OpSpec("gemma_rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()", NormKey, lambda out, x, weight, eps: norm_key(x)),
    OpSpec(
        "gemma_fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()",
        NormKey,
        lambda x, residual, weight, eps: norm_key(x),
    ),
    OpSpec(
        "layer_norm(Tensor(a!) out, Tensor x, Tensor? weight, Tensor? bias, float eps) -> ()",
        NormKey,
        lambda out, x, weight, bias, eps: norm_key(x),
    ),
    # rope: rotates the first cos_sin_cache.shape[-1] elements of every head, in place
    OpSpec(
        "apply_rope(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor cos_sin_cache, bool is_neox) -> ()",
        RopeKey,
        lambda q, k, positions, cos_sin_cache, is_neox: rope_key(q, cos_sin_cache),
    ),
    # bit for bit apply_rope and then store_kv
    OpSpec(
        "apply_rope_store_kv(Tensor(a!) q, Tensor(b!) k, Tensor(c!) k_cache, Tensor(d!) v_cache, Tensor v, Tensor positions, "
        "Tensor cos_sin_cache, Tensor slots, bool is_neox, float k_scale=1.0, float v_scale=1.0) -> ()",
        RopeStoreKey,
        lambda q, k, k_cache, v_cache, v, positions, cos_sin_cache, *rest, **options: rope_store_key(q, k_cache, cos_sin_cache),
    ),
    # activation: swiglu_oai takes gate and factor interleaved, the others one after the other
    OpSpec("silu_and_mul(Tensor(a!) out, Tensor x) -> ()", ActivationKey, lambda out, x: norm_key(x)),
    OpSpec("gelu_and_mul(Tensor(a!) out, Tensor x) -> ()", ActivationKey, lambda out, x: norm_key(x)),
    OpSpec("gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()", ActivationKey, lambda out, x: norm_key(x)),
    OpSpec("swiglu_oai(Tensor(a!) out, Tensor x, float alpha, float limit) -> ()", ActivationKey, lambda out, x, alpha, limit: norm_key(x)),
    # kvcache: slot -1 is skipped. Stored is row / scale, see kvcache.py for how it is rounded.
    OpSpec(
        "store_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots, float k_scale=1.0, float v_scale=1.0) -> ()",
        StoreKey,
        lambda k_cache, v_cache, k, *rest, **options: store_key(k, k_cache),
    ),
    # caches [L, S, H, D], values optional
    OpSpec(
        "copy_slots(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor src_slots, Tensor dst_slots) -> ()",
        CopyKey,
        lambda k_cache, v_cache, src_slots, dst_slots: norm_key(k_cache),
    ),
    # caches [S, H, D], values optional; either side may lie in host memory, the slot lists on the device of the key
    OpSpec(
        "transfer_kv(Tensor(a!) dst_k, Tensor(b!)? dst_v, Tensor src_k, Tensor? src_v, Tensor src_slots, Tensor dst_slots) -> ()",
        TransferKey,
        lambda dst_k, dst_v, src_k, src_v, src_slots, dst_slots: transfer_key(dst_k, src_k),
    ),
    # indices: kv_indices writes indptr[B+1] and the positions [kv_start[b], seq_lens[b]) of row req_slots[b], request after request
    OpSpec(
        "kv_indices(Tensor(a!) indptr, Tensor(b!) indices, Tensor req_to_token, Tensor req_slots, Tensor seq_lens, Tensor? kv_start) -> ()",
        IndexKey,
        lambda indptr, indices, req_to_token, req_slots, seq_lens, kv_start: (device_of(indptr),),
    ),
    OpSpec("qo_indptr(Tensor(a!) out, Tensor q_lens) -> ()", IndexKey, lambda out, q_lens: (device_of(out),)),
    OpSpec(
        "write_req_to_token(Tensor(a!) req_to_token, Tensor req_slots, Tensor starts, Tensor lens, Tensor slots) -> ()",
        IndexKey,
        lambda req_to_token, req_slots, starts, lens, slots: (device_of(req_to_token),),
    ),
    # kv_indices from max(0, seq_lens[b] - q_lens[b] - window_left) on; each slot s becomes slot_map[s], a negative one stays
    OpSpec(
        "window_kv_indices(Tensor(a!) indptr, Tensor(b!) indices, Tensor req_to_token, Tensor req_slots, Tensor seq_lens, Tensor? q_lens, "
        "Tensor? slot_map, SymInt window_left) -> ()",
        IndexKey,
        lambda indptr, *rest, **options: (device_of(indptr),),
    ),
    # what pages a request has: dense (entries behind its last page are left alone), or as CSR lists with the last page's length
    OpSpec(
        "page_table(Tensor(a!) out, Tensor req_to_token, Tensor req_slots, Tensor seq_lens, SymInt page_size) -> ()",
        IndexKey,
        lambda out, req_to_token, req_slots, seq_lens, page_size: (device_of(out),),
    ),
    OpSpec(
        "last_page_len(Tensor(a!) out, Tensor seq_lens, SymInt page_size) -> ()",
        IndexKey,
        lambda out, seq_lens, page_size: (device_of(out),),
    ),
    OpSpec(
        "mla_indices(Tensor(a!) indptr, Tensor(b!) indices, Tensor(c!) last_page_len, Tensor req_to_token, Tensor req_slots, "
        "Tensor seq_lens, SymInt page_size) -> ()",
        IndexKey,
        lambda indptr, *rest, **options: (device_of(indptr),),
    ),
    # indptr[steps, B * topk + 1], indices[steps, L], draft_slots[B, topk, steps]
    OpSpec(
        "draft_kv_indices(Tensor(a!) indptr, Tensor(b!) indices, Tensor req_to_token, Tensor req_slots, Tensor prefix_lens, "
        "Tensor? draft_slots, SymInt steps, SymInt topk) -> ()",
        IndexKey,
        lambda indptr, *rest, **options: (device_of(indptr),),
    ),
    # slots of new tokens in pages; num_pages[1] is how many entries of free_pages were taken, from the front
    OpSpec(
        "alloc_extend(Tensor(a!) out, Tensor(b!) num_pages, Tensor prefix_lens, Tensor new_lens, Tensor last_slots, Tensor free_pages, "
        "SymInt page_size) -> ()",
        IndexKey,
        lambda out, *rest, **options: (device_of(out),),
    ),
    OpSpec(
        "alloc_decode(Tensor(a!) out, Tensor(b!) num_pages, Tensor new_lens, Tensor last_slots, Tensor free_pages, SymInt page_size) -> ()",
        IndexKey,
        lambda out, *rest, **options: (device_of(out),),
    ),
    # attention: see schema notes on plan and workspace above; custom_mask is bool, flat, row-major [q_len, kv_len] from mask_indptr[b] on
    OpSpec(
        "decode_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_indptr, Tensor kv_indices, "
        "Tensor? sinks, Tensor? plan, Tensor(c!)? workspace, float sm_scale, float logit_cap, SymInt window_left, "
        "float k_scale, float v_scale) -> ()",
        AttentionKey,
        lambda out, lse, q, k_cache, v_cache, *rest, **options: attention_key(q, k_cache, v_cache),
    ),
    OpSpec(
        "extend_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr, "
        "Tensor kv_indices, Tensor? custom_mask, Tensor? mask_indptr, Tensor? sinks, bool causal, float sm_scale, float logit_cap, "
        "SymInt window_left, float k_scale, float v_scale) -> ()",
        AttentionKey,
        lambda out, lse, q, k_cache, v_cache, *rest, **options: attention_key(q, k_cache, v_cache),
    ),
    # the keys and values of request b are rows [kv_indptr[b], kv_indptr[b + 1]) of k and v
    OpSpec(
        "ragged_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k, Tensor v, Tensor qo_indptr, Tensor kv_indptr, "
        "Tensor? custom_mask, Tensor? mask_indptr, Tensor? sinks, bool causal, float sm_scale, float logit_cap, SymInt window_left) -> ()",
        AttentionKey,
        lambda out, lse, q, k, v, *rest, **options: attention_key(q, k, v),
    ),
    # out may be o_a or o_b, out_lse may be lse_a or lse_b
    OpSpec(
        "merge_state(Tensor(a!) out, Tensor(b!) out_lse, Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) -> ()",
        MergeKey,
        lambda out, out_lse, o_a, lse_a, o_b, lse_b: norm_key(o_a),
    ),
    # o is [N, T, H, D], lse [N, T, H]; out may be o[i] and out_lse lse[i] for one i
    OpSpec(
        "merge_states(Tensor(a!) out, Tensor(b!) out_lse, Tensor o, Tensor lse) -> ()", MergeKey, lambda out, out_lse, o, lse: norm_key(o)
    ),
    # mla: a cache row is latent then rope key; its latent part is also its value. Without qo_indptr every request has one row
    OpSpec(
        "mla_decode(Tensor(a!) out, Tensor(b!)? lse, Tensor q_nope, Tensor q_rope, Tensor kv_cache, Tensor? qo_indptr, Tensor kv_indptr, "
        "Tensor kv_indices, Tensor? plan, Tensor(c!)? workspace, float sm_scale, float kv_scale) -> ()",
        MlaKey,
        lambda out, lse, q_nope, q_rope, kv_cache, *rest, **options: mla_key(q_nope, q_rope, kv_cache),
    ),
    OpSpec(
        "mla_store(Tensor(a!) kv_cache, Tensor kv_c, Tensor k_rope, Tensor slots, float kv_scale) -> ()",
        StoreKey,
        lambda kv_cache, kv_c, k_rope, slots, kv_scale: store_key(kv_c, kv_cache),
    ),
    # sampling: -1 marks a row that has no answer
    OpSpec("greedy(Tensor(a!) out, Tensor logits) -> ()", LogitsKey, lambda out, logits: norm_key(logits)),
    OpSpec(
        "sample(Tensor(a!) out, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
        "Tensor positions) -> ()",
        LogitsKey,
        lambda out, logits, *rest, **options: norm_key(logits),
    ),
    OpSpec(
        "apply_logit_bias(Tensor(a!) logits, Tensor indptr, Tensor ids, Tensor values) -> ()",
        LogitsKey,
        lambda logits, indptr, ids, values: norm_key(logits),
    ),
    OpSpec(
        "apply_penalties(Tensor(a!) logits, Tensor prompt_mask, Tensor output_counts, Tensor presence, Tensor frequency, "
        "Tensor repetition) -> ()",
        LogitsKey,
        lambda logits, *rest, **options: norm_key(logits),
    ),
    OpSpec(
        "apply_token_bitmask(Tensor(a!) logits, Tensor bitmask) -> ()",
        LogitsKey,
        lambda logits, bitmask: norm_key(logits),
    ),
    # gemm: `packed` is 1-D, of the weight's dtype; its layout belongs to the family that packed it
    OpSpec("pack_weight(Tensor(a!) out, Tensor weight) -> ()", LinearKey, lambda out, weight: norm_key(weight)),
    OpSpec(
        "packed_linear(Tensor(a!) out, Tensor x, Tensor packed, Tensor? bias, SymInt n, SymInt k) -> ()",
        LinearKey,
        lambda out, x, packed, bias, n, k: norm_key(x),
    ),
    # the weight as it is stored, [N, K]; x has at most SKINNY_ROWS rows
    OpSpec(
        "skinny_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()", LinearKey, lambda out, x, weight, bias: norm_key(x)
    ),
    # moe: experts per token are the columns of weights and ids; bias is float32 or bfloat16; id -1 marks a place that no expert could take
    OpSpec(
        "topk_softmax(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, bool renormalize) -> ()",
        RoutingKey,
        lambda weights, ids, logits, renormalize: norm_key(logits),
    ),
    OpSpec(
        "topk_sigmoid(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, Tensor? bias, bool renormalize) -> ()",
        RoutingKey,
        lambda weights, ids, logits, bias, renormalize: norm_key(logits),
    ),
    # scores are sigmoids, else softmax
    OpSpec(
        "grouped_topk(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, Tensor? bias, SymInt num_groups, SymInt topk_groups, "
        "float scaling, bool sigmoid, bool renormalize) -> ()",
        RoutingKey,
        lambda weights, ids, logits, *rest, **options: norm_key(logits),
    ),
    # entries of topk_ids by expert, in blocks; sorted_token_ids and expert_ids may be longer than max_expert_blocks asks for
    OpSpec(
        "align_block_size(Tensor(a!) sorted_token_ids, Tensor(b!) expert_ids, Tensor(c!) num_tokens_post_padded, Tensor topk_ids, "
        "Tensor? expert_map, SymInt num_experts, SymInt block_size) -> ()",
        IndexKey,
        lambda sorted_token_ids, *rest, **options: (device_of(sorted_token_ids),),
    ),
    # quant: rows as 8-bit numbers; scales [T, H / width of a group], of any strides. quant.py says how large a scale is
    OpSpec("quant_fp8(Tensor(a!) out, Tensor x, Tensor scale) -> ()", QuantKey, lambda out, x, scale: quant_key(x, out)),
    OpSpec("per_token_quant_fp8(Tensor(a!) out, Tensor(b!) scales, Tensor x) -> ()", QuantKey, lambda out, scales, x: quant_key(x, out)),
    OpSpec("per_token_quant_int8(Tensor(a!) out, Tensor(b!) scales, Tensor x) -> ()", QuantKey, lambda out, scales, x: quant_key(x, out)),
    OpSpec(
        "per_group_quant_fp8(Tensor(a!) out, Tensor(b!) scales, Tensor x, SymInt group_size) -> ()",
        QuantKey,
        lambda out, scales, x, group_size: quant_key(x, out),
    ),
)

OPS: dict[str, OpSpec] = {spec.name: spec for spec in _SPECS}
