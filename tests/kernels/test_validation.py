"""Public functions refuse bad arguments before any kernel runs, in one sentence naming the argument, its value and what would be right."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gristmill_kernels as gk

ROWS, HEADS, KV_HEADS, DIM, SLOTS, VOCAB = 3, 4, 2, 8, 10, 11


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool(heads: int = KV_HEADS, dim: int = DIM, dtype: torch.dtype = torch.float32, slots: int = SLOTS) -> torch.Tensor:
    return torch.zeros(slots, heads, dim, dtype=dtype)


def decode(**changes: Any) -> None:
    arguments = {
        "q": torch.zeros(ROWS, HEADS, DIM),
        "k_cache": pool(),
        "v_cache": pool(),
        "kv_indptr": i32(0, 1, 2, 3),
        "kv_indices": i32(1, 2, 3),
    }
    gk.decode_attention(**(arguments | changes))


def extend(**changes: Any) -> None:
    arguments = {"q": torch.zeros(ROWS, HEADS, DIM), "k_cache": pool(), "v_cache": pool(), "kv_indices": i32(1, 2, 3)}
    gk.extend_attention(**(arguments | {"qo_indptr": i32(0, 3), "kv_indptr": i32(0, 3)} | changes))


def norm(**changes: Any) -> None:
    gk.rms_norm(**({"x": torch.zeros(ROWS, DIM), "weight": torch.zeros(DIM)} | changes))


def rope(**changes: Any) -> None:
    arguments = {"q": torch.zeros(ROWS, HEADS, DIM), "k": torch.zeros(ROWS, KV_HEADS, DIM), "positions": i32(0, 1, 2)}
    gk.apply_rope(**(arguments | {"cos_sin_cache": torch.zeros(5, DIM)} | changes))


def store(**changes: Any) -> None:
    arguments = {"k": torch.zeros(ROWS, KV_HEADS, DIM), "v": torch.zeros(ROWS, KV_HEADS, DIM), "slots": i32(0, 1, 2)}
    gk.store_kv(**(arguments | {"k_cache": pool(), "v_cache": pool()} | changes))


def mask(**changes: Any) -> None:
    gk.apply_token_bitmask(**({"logits": torch.zeros(ROWS, VOCAB), "bitmask": torch.zeros(ROWS, 1, dtype=torch.int32)} | changes))


def draw(**changes: Any) -> None:
    one = torch.ones(ROWS)
    arguments = {"temperature": one, "top_k": i32(0, 0, 0), "top_p": one, "min_p": one, "seeds": torch.zeros(ROWS, dtype=torch.int64)}
    gk.sample(**(arguments | {"logits": torch.zeros(ROWS, VOCAB), "positions": i32(0, 0, 0)} | changes))


def table(**changes: Any) -> None:
    arguments = {"req_to_token": torch.zeros(4, 9, dtype=torch.int32), "req_slots": i32(0, 1), "seq_lens": i32(2, 3)}
    gk.kv_indices(**(arguments | changes))


def layer(**changes: Any) -> None:
    gk.layer_norm(**({"x": torch.zeros(ROWS, DIM), "weight": torch.zeros(DIM), "bias": torch.zeros(DIM)} | changes))


def swiglu(**changes: Any) -> None:
    gk.swiglu_oai(**({"x": torch.zeros(ROWS, DIM)} | changes))


def rope_store(**changes: Any) -> None:
    k = torch.zeros(ROWS, KV_HEADS, DIM)
    arguments = {"q": torch.zeros(ROWS, HEADS, DIM), "k": k, "v": k.clone(), "k_cache": pool(), "v_cache": pool()}
    gk.apply_rope_store_kv(
        **(arguments | {"positions": i32(0, 1, 2), "slots": i32(0, 1, 2), "cos_sin_cache": torch.zeros(5, DIM)} | changes)
    )


def move(**changes: Any) -> None:
    gk.copy_slots(**({"k_cache": pool(), "v_cache": pool(), "src_slots": i32(0, 1), "dst_slots": i32(2, 3)} | changes))


def transfer(**changes: Any) -> None:
    arguments = {"src_k": pool(), "src_v": pool(), "dst_k": pool(slots=5), "dst_v": pool(slots=5), "src_slots": i32(0), "dst_slots": i32(1)}
    gk.transfer_kv(**(arguments | changes))


def pages(**changes: Any) -> None:
    arguments = {"req_to_token": torch.zeros(4, 9, dtype=torch.int32), "req_slots": i32(0, 1), "seq_lens": i32(2, 3), "page_size": 2}
    gk.page_table(**(arguments | changes))


def drafts(**changes: Any) -> None:
    arguments = {"req_to_token": torch.zeros(4, 9, dtype=torch.int32), "req_slots": i32(0, 1), "prefix_lens": i32(2, 3)}
    gk.draft_kv_indices(**(arguments | {"steps": 2, "topk": 3} | changes))


def window(**changes: Any) -> None:
    arguments = {"req_to_token": torch.zeros(4, 9, dtype=torch.int32), "req_slots": i32(0, 1), "seq_lens": i32(2, 3), "window_left": 2}
    gk.window_kv_indices(**(arguments | changes))


def extend_slots(**changes: Any) -> None:
    arguments = {"prefix_lens": i32(0, 3), "new_lens": i32(2, 4), "last_slots": i32(-1, 6), "free_pages": i32(5, 6), "page_size": 4}
    gk.alloc_extend(**(arguments | changes))


def decode_slots(**changes: Any) -> None:
    gk.alloc_decode(**({"new_lens": i32(1, 4), "last_slots": i32(-1, 6), "free_pages": i32(5, 6), "page_size": 4} | changes))


def merge(**changes: Any) -> None:
    o, lse = torch.zeros(ROWS, HEADS, DIM), torch.zeros(ROWS, HEADS)
    gk.merge_state(**({"o_a": o, "lse_a": lse, "o_b": o, "lse_b": lse} | changes))


def merge_all(**changes: Any) -> None:
    gk.merge_states(**({"o": torch.zeros(5, ROWS, HEADS, DIM), "lse": torch.zeros(5, ROWS, HEADS)} | changes))


def ragged(**changes: Any) -> None:
    arguments = {"q": torch.zeros(ROWS, HEADS, DIM), "k": torch.zeros(7, KV_HEADS, DIM), "v": torch.zeros(7, KV_HEADS, 16)}
    gk.ragged_attention(**(arguments | {"qo_indptr": i32(0, 3), "kv_indptr": i32(0, 7)} | changes))


def latent(**changes: Any) -> None:
    arguments = {"q_nope": torch.zeros(ROWS, HEADS, 16), "q_rope": torch.zeros(ROWS, HEADS, DIM), "kv_cache": torch.zeros(SLOTS, 24)}
    gk.mla_decode(**(arguments | {"kv_indptr": i32(0, 1, 2, 3), "kv_indices": i32(1, 2, 3), "sm_scale": 0.1} | changes))


def store_latent(**changes: Any) -> None:
    arguments = {
        "kv_c": torch.zeros(ROWS, 16),
        "k_rope": torch.zeros(ROWS, DIM),
        "kv_cache": torch.zeros(SLOTS, 24),
        "slots": i32(0, -1, 2),
    }
    gk.mla_store(**(arguments | changes))


def linear(**changes: Any) -> None:
    gk.linear(**({"x": torch.zeros(ROWS, DIM), "packed": gk.pack_linear(torch.zeros(5, DIM))} | changes))


def skinny(**changes: Any) -> None:
    gk.skinny_linear(**({"x": torch.zeros(ROWS, DIM), "weight": torch.zeros(5, DIM)} | changes))


def experts(**changes: Any) -> None:
    gk.topk_softmax(**({"logits": torch.zeros(ROWS, 6), "top_k": 2, "renormalize": True} | changes))


def scored(**changes: Any) -> None:
    gk.topk_sigmoid(**({"logits": torch.zeros(ROWS, 6), "top_k": 2, "renormalize": True, "bias": torch.zeros(6)} | changes))


def grouped(**changes: Any) -> None:
    arguments = {"logits": torch.zeros(ROWS, 6), "top_k": 2, "num_groups": 3, "topk_groups": 2, "scoring": "sigmoid", "renormalize": True}
    gk.grouped_topk(**(arguments | changes))


def blocks(**changes: Any) -> None:
    gk.align_block_size(**({"topk_ids": torch.zeros(ROWS, 2, dtype=torch.int32), "num_experts": 4, "block_size": 8} | changes))


def static(**changes: Any) -> None:
    gk.quant_fp8(**({"x": torch.zeros(ROWS, DIM), "scale": torch.ones(1)} | changes))


def tokens(**changes: Any) -> None:
    gk.per_token_quant_fp8(**({"x": torch.zeros(ROWS, DIM)} | changes))


def integers(**changes: Any) -> None:
    gk.per_token_quant_int8(**({"x": torch.zeros(ROWS, DIM)} | changes))


def groups(**changes: Any) -> None:
    gk.per_group_quant_fp8(**({"x": torch.zeros(ROWS, 64), "group_size": 32} | changes))


def plan(**changes: Any) -> None:
    gk.plan_decode(**({"kv_indptr_host": i32(0, 3), "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_v": 8, "num_workers": 2} | changes))


FUNCTIONS = [
    decode,
    extend,
    norm,
    rope,
    store,
    draw,
    table,
    merge,
    linear,
    skinny,
    experts,
    scored,
    grouped,
    blocks,
    static,
    tokens,
    integers,
    groups,
    plan,
    layer,
    swiglu,
    rope_store,
    move,
    transfer,
    pages,
    drafts,
    window,
    extend_slots,
    decode_slots,
    ragged,
    merge_all,
    latent,
    store_latent,
]

BAD: list[tuple[Callable[..., None], dict[str, Any], type[Exception], str]] = [
    (norm, {"x": torch.zeros(ROWS, DIM, dtype=torch.float64)}, TypeError, "x has dtype float64, but should be float32, float16"),
    (norm, {"x": [1.0]}, TypeError, "rms_norm: x is a list, but should be a torch.Tensor"),
    (norm, {"x": torch.zeros(())}, ValueError, "rms_norm: x has shape (), but should be at least one-dimensional"),
    (norm, {"x": torch.zeros(DIM, ROWS).T}, ValueError, "rms_norm: x has strides (1, 3), but its innermost stride should be 1"),
    (norm, {"weight": torch.zeros(9)}, ValueError, "rms_norm: weight has shape (9,), but should be [H] = (8,)"),
    (norm, {"weight": torch.zeros(DIM, dtype=torch.float16)}, TypeError, "rms_norm: weight has dtype float16, but should be float32"),
    (norm, {"out": torch.zeros(2, DIM)}, ValueError, "rms_norm: out has shape (2, 8), but should be the shape of x = (3, 8)"),
    (norm, {"weight": torch.zeros(DIM, device="meta")}, ValueError, "weight is on meta, but should be on cpu like the other tensors"),
    (rope, {"positions": torch.arange(3)}, TypeError, "apply_rope: positions has dtype int64, but should be int32"),
    (rope, {"cos_sin_cache": torch.zeros(5, 10)}, ValueError, "cos_sin_cache has shape (5, 10), but should be [P, rotary_dim]"),
    (rope, {"cos_sin_cache": torch.zeros(0, 8)}, ValueError, "should be at least one position long"),
    (rope, {"k": torch.zeros(ROWS, KV_HEADS, 16)}, ValueError, "apply_rope: k has shape (3, 2, 16), but should be [3, Hkv, 8] like q"),
    (store, {"slots": i32(0, 1)}, ValueError, "store_kv: slots has shape (2,), but should be [T] = (3,)"),
    (store, {"k_cache": pool(dtype=torch.float16)}, TypeError, "store_kv: k_cache has dtype float16, but should be the dtype of k"),
    (store, {"v_cache": pool(slots=9)}, ValueError, "store_kv: v_cache has shape (9, 2, 8), but should be [10, 2, 8] like k_cache and v"),
    (table, {"req_to_token": torch.zeros(4, 9)}, TypeError, "kv_indices: req_to_token has dtype float32, but should be int32"),
    (table, {"kv_start": i32(1)}, ValueError, "kv_indices: kv_start has shape (1,), but should be [B] = (2,)"),
    (table, {"seq_lens": i32(1)}, ValueError, "kv_indices: seq_lens has shape (1,), but should be [B] = (2,)"),
    (decode, {"q": torch.zeros(ROWS, HEADS * DIM)}, ValueError, "decode_attention: q has shape (3, 32), but should be [rows, Hq, D]"),
    (decode, {"k_cache": pool(dim=16)}, ValueError, "k_cache has shape (10, 2, 16), but should be [S, Hkv, 8] like q"),
    (decode, {"v_cache": pool(heads=1)}, ValueError, "v_cache has shape (10, 1, 8), but should be [10, 2, Dv] like k_cache"),
    (decode, {"q": torch.zeros(ROWS, 3, DIM)}, ValueError, "the number of query heads is 3, but should be a multiple of the 2 KV heads"),
    (decode, {"kv_indptr": i32(0, 1)}, ValueError, "decode_attention: kv_indptr has shape (2,), but should be [B + 1] = (4,)"),
    (decode, {"sinks": torch.zeros(2)}, ValueError, "decode_attention: sinks has shape (2,), but should be [Hq] = (4,)"),
    (decode, {"lse": torch.zeros(ROWS, HEADS, dtype=torch.float16)}, TypeError, "lse has dtype float16, but should be float32"),
    (decode, {"plan": gk.plan_decode(i32(0, 1), 4, 2, 8, num_workers=1)}, ValueError, "plan.num_requests is 1, but should be the batch"),
    (extend, {"custom_mask": torch.ones(9, dtype=torch.bool)}, ValueError, "mask_indptr is None, but should be given"),
    (extend, {"kv_indptr": i32(0, 1, 3)}, ValueError, "kv_indptr has shape (3,), but should be [B + 1] like qo_indptr = (2,)"),
    (decode, {"k_cache": pool(dtype=torch.float16)}, TypeError, "k_cache has dtype float16, but should be the dtype of q or"),
    (decode, {"k_cache": pool(dtype=torch.float8_e5m2)}, TypeError, "v_cache has dtype float32, but should be the dtype of k_cache"),
    (ragged, {"k": torch.zeros(7, KV_HEADS, 9)}, ValueError, "ragged_attention: k has shape (7, 2, 9), but should be [N, Hkv, 8] like q"),
    (ragged, {"v": torch.zeros(6, KV_HEADS, 8)}, ValueError, "ragged_attention: v has shape (6, 2, 8), but should be [7, 2, Dv] like k"),
    (ragged, {"k": torch.zeros(7, KV_HEADS, DIM).half()}, TypeError, "ragged_attention: k has dtype float16, but should be the dtype of q"),
    (ragged, {"kv_indptr": i32(0, 1, 3)}, ValueError, "kv_indptr has shape (3,), but should be [B + 1] like qo_indptr = (2,)"),
    (ragged, {"mask_indptr": i32(0, 9)}, ValueError, "ragged_attention: custom_mask is None, but should be given"),
    (merge_all, {"o": torch.zeros(5, ROWS, DIM)}, ValueError, "merge_states: o has shape (5, 3, 8), but should be [N, T, H, D]"),
    (merge_all, {"lse": torch.zeros(4, ROWS, HEADS)}, ValueError, "merge_states: lse has shape (4, 3, 4), but should be (5, 3, 4)"),
    (latent, {"kv_cache": torch.zeros(SLOTS, 25)}, ValueError, "mla_decode: kv_cache has shape (10, 25), but should be [S, 24], as"),
    (latent, {"q_rope": torch.zeros(2, HEADS, DIM)}, ValueError, "q_rope has shape (2, 4, 8), but should be [3, 4, R] like q_nope"),
    (latent, {"kv_indptr": i32(0, 3)}, ValueError, "mla_decode: kv_indptr has shape (2,), but should be [B + 1] = (4,)"),
    (latent, {"qo_indptr": i32(0, 3)}, ValueError, "mla_decode: kv_indptr has shape (4,), but should be [B + 1] like qo_indptr = (2,)"),
    (latent, {"kv_cache": torch.zeros(SLOTS, 24).half()}, TypeError, "kv_cache has dtype float16, but should be the dtype of q_nope or"),
    (store_latent, {"kv_scale": 0.0}, ValueError, "mla_store: kv_scale is 0.0, but should be positive"),
    (store_latent, {"k_rope": torch.zeros(2, DIM)}, ValueError, "mla_store: k_rope has shape (2, 8), but should be [3, R] like kv_c"),
    (store_latent, {"kv_cache": torch.zeros(SLOTS, 16)}, ValueError, "mla_store: kv_cache has shape (10, 16), but should be [S, 24]"),
    (merge, {"lse_b": torch.zeros(HEADS, ROWS)}, ValueError, "merge_state: lse_b has shape (4, 3), but should be [T, H] = (3, 4)"),
    (draw, {"logits": torch.zeros(ROWS, 0)}, ValueError, "sample: logits has shape (3, 0), but should be [B, V] with V >= 1"),
    (draw, {"seeds": i32(0, 0, 0)}, TypeError, "sample: seeds has dtype int32, but should be int64"),
    (draw, {"temperature": torch.ones(2)}, ValueError, "sample: temperature has shape (2,), but should be [B] = (3,)"),
    (
        mask,
        {"bitmask": torch.zeros(ROWS, 1, dtype=torch.int64)},
        TypeError,
        "apply_token_bitmask: bitmask has dtype int64, but should be int32",
    ),
    (
        mask,
        {"bitmask": torch.zeros(ROWS, 2, dtype=torch.int32)},
        ValueError,
        "apply_token_bitmask: bitmask has shape (3, 2), but should be [B, ceil(V / 32)] = (3, 1), with contiguous rows",
    ),
    (linear, {"x": torch.zeros(ROWS, 9)}, ValueError, "linear: x has shape (3, 9), but should be [M, 8]"),
    (skinny, {"x": torch.zeros(17, DIM)}, ValueError, "skinny_linear: x has shape (17, 8), but should be [M, K] with M <= 16"),
    (skinny, {"x": torch.zeros(DIM)}, ValueError, "skinny_linear: x has shape (8,), but should be [M, K] with M <= 16"),
    (skinny, {"weight": torch.zeros(5, 9)}, ValueError, "skinny_linear: weight has shape (5, 9), but should be [N, K] = (5, 8)"),
    (skinny, {"weight": torch.zeros(5)}, ValueError, "skinny_linear: weight has shape (5,), but should be [N, 8]"),
    (skinny, {"weight": torch.zeros(5, DIM).half()}, TypeError, "skinny_linear: weight has dtype float16, but should be float32"),
    (skinny, {"weight": torch.zeros(DIM, 5).T}, ValueError, "skinny_linear: weight has strides (1, 5), but its innermost stride"),
    (skinny, {"bias": torch.zeros(4)}, ValueError, "skinny_linear: bias has shape (4,), but should be [N] = (5,)"),
    (skinny, {"out": torch.zeros(ROWS, 4)}, ValueError, "skinny_linear: out has shape (3, 4), but should be [M, N] = (3, 5)"),
    (experts, {"logits": torch.zeros(6)}, ValueError, "topk_softmax: logits has shape (6,), but should be [T, E] with E from 1 to 1024"),
    (experts, {"logits": torch.zeros(2, 1025)}, ValueError, "topk_softmax: logits has shape (2, 1025), but should be [T, E] with E from 1"),
    (experts, {"logits": i32(1, 2)}, TypeError, "topk_softmax: logits has dtype int32, but should be float32, float16 or bfloat16"),
    (experts, {"top_k": 7}, ValueError, "topk_softmax: top_k is 7, but should be from 1 to 6"),
    (experts, {"top_k": 0}, ValueError, "topk_softmax: top_k is 0, but should be from 1 to 6"),
    (experts, {"logits": torch.zeros(2, 64), "top_k": 33}, ValueError, "topk_softmax: top_k is 33, but should be from 1 to 32"),
    (experts, {"ids": torch.zeros(ROWS, 2)}, TypeError, "topk_softmax: ids has dtype float32, but should be int32"),
    (experts, {"weights": torch.zeros(ROWS, 3)}, ValueError, "weights has shape (3, 3), but should be [T, K] = (3, 2), with contiguous"),
    (scored, {"bias": torch.zeros(5)}, ValueError, "topk_sigmoid: bias has shape (5,), but should be [E] = (6,)"),
    (scored, {"bias": torch.zeros(6).half()}, TypeError, "topk_sigmoid: bias has dtype float16, but should be float32 or bfloat16"),
    (grouped, {"num_groups": 4}, ValueError, "grouped_topk: num_groups is 4, but should be from 1 to 32 and a divisor of E = 6"),
    (grouped, {"num_groups": 0}, ValueError, "grouped_topk: num_groups is 0, but should be from 1 to 32 and a divisor of E = 6"),
    (grouped, {"topk_groups": 4}, ValueError, "grouped_topk: topk_groups is 4, but should be from 1 to num_groups = 3"),
    (grouped, {"scoring": "tanh"}, ValueError, "grouped_topk: scoring is 'tanh', but should be 'softmax' or 'sigmoid'"),
    (grouped, {"scaling": float("inf")}, ValueError, "grouped_topk: scaling is inf, but should be finite"),
    (blocks, {"topk_ids": torch.zeros(3, 2)}, TypeError, "align_block_size: topk_ids has dtype float32, but should be int32"),
    (blocks, {"topk_ids": i32(1, 2)}, ValueError, "align_block_size: topk_ids has shape (2,), but should be [T, K] with contiguous rows"),
    (blocks, {"num_experts": 1025}, ValueError, "align_block_size: num_experts is 1025, but should be from 1 to 1024"),
    (blocks, {"block_size": 0}, ValueError, "align_block_size: block_size is 0, but should be at least 1"),
    (blocks, {"expert_map": torch.zeros(4)}, TypeError, "align_block_size: expert_map has dtype float32, but should be int32"),
    (blocks, {"expert_ids": i32(0, 0, 0)}, ValueError, "align_block_size: expert_ids has shape (3,), but should be of at least 4 entries"),
    (blocks, {"sorted_token_ids": i32(0)}, ValueError, "sorted_token_ids has shape (1,), but should be of at least 32 entries"),
    (blocks, {"num_tokens_post_padded": i32(0, 0)}, ValueError, "num_tokens_post_padded has shape (2,), but should be [1] = (1,)"),
    (static, {"scale": torch.ones(2)}, ValueError, "quant_fp8: scale has shape (2,), but should be of one element"),
    (static, {"scale": torch.ones(1).half()}, TypeError, "quant_fp8: scale has dtype float16, but should be float32"),
    (static, {"dtype": torch.int8}, ValueError, "quant_fp8: dtype is 'int8', but should be float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz"),
    (tokens, {"x": torch.zeros(DIM)}, ValueError, "per_token_quant_fp8: x has shape (8,), but should be [T, H]"),
    (tokens, {"x": torch.zeros(DIM, ROWS).T}, ValueError, "per_token_quant_fp8: x has strides (1, 3), but its innermost stride"),
    (
        tokens,
        {"out": torch.zeros(ROWS, DIM).to(torch.float8_e5m2), "dtype": torch.float8_e4m3fn},
        TypeError,
        "per_token_quant_fp8: out has dtype float8_e5m2, but should be the given float8_e4m3fn",
    ),
    (tokens, {"out": torch.zeros(ROWS, DIM)}, TypeError, "per_token_quant_fp8: out has dtype float32, but should be float8_e4m3fn, float8"),
    (tokens, {"scales": torch.zeros(ROWS)}, ValueError, "per_token_quant_fp8: scales has shape (3,), but should be [T, 1] = (3, 1)"),
    (integers, {"out": torch.zeros(ROWS, DIM)}, TypeError, "per_token_quant_int8: out has dtype float32, but should be int8"),
    (
        integers,
        {"out": torch.zeros(ROWS, 9, dtype=torch.int8)},
        ValueError,
        "per_token_quant_int8: out has shape (3, 9), but should be the shape of x = (3, 8)",
    ),
    (groups, {"group_size": 48}, ValueError, "per_group_quant_fp8: group_size is 48, but should be 32, 64, 128 or 256"),
    (groups, {"group_size": 128}, ValueError, "x has shape (3, 64), but should be [T, H] with H a multiple of group_size = 128"),
    (groups, {"scales": torch.zeros(2, ROWS)}, ValueError, "scales has shape (2, 3), but should be [T, H / group_size] = (3, 2)"),
    (groups, {"scales": torch.zeros(ROWS, 2).double()}, TypeError, "scales has dtype float64, but should be float32"),
    (linear, {"x": torch.zeros(ROWS, DIM, dtype=torch.bfloat16)}, TypeError, "linear: x has dtype bfloat16, but should be float32"),
    (linear, {"bias": torch.zeros(4)}, ValueError, "linear: bias has shape (4,), but should be [N] = (5,)"),
    (plan, {"num_workers": 0}, ValueError, "plan_decode: num_workers is 0, but should be at least 1"),
    (plan, {"kv_indptr_host": i32(3, 0)}, ValueError, "plan_decode: kv_indptr_host is [3, 0], but should be non-decreasing"),
    (plan, {"num_qo_heads": 3}, ValueError, "plan_decode: num_qo_heads is 3, but should be a multiple of num_kv_heads = 2"),
    (layer, {"bias": torch.zeros(9)}, ValueError, "layer_norm: bias has shape (9,), but should be [H] = (8,)"),
    (swiglu, {"x": torch.zeros(ROWS, 7)}, ValueError, "swiglu_oai: x has shape (3, 7), but should be of even width [..., 2N]"),
    (swiglu, {"limit": -1.0}, ValueError, "swiglu_oai: limit is -1.0, but should be at least 0"),
    (store, {"k_scale": 0.0}, ValueError, "store_kv: k_scale is 0.0, but should be positive and finite"),
    (store, {"k_cache": pool(dtype=torch.float8_e5m2)}, TypeError, "v_cache has dtype float32, but should be the dtype of k_cache"),
    (rope_store, {"slots": i32(0)}, ValueError, "apply_rope_store_kv: slots has shape (1,), but should be [T] = (3,)"),
    (rope_store, {"v_scale": float("nan")}, ValueError, "apply_rope_store_kv: v_scale is nan, but should be positive and finite"),
    (rope_store, {"cos_sin_cache": torch.zeros(5, 10)}, ValueError, "apply_rope_store_kv: cos_sin_cache has shape (5, 10), but should be"),
    (move, {"v_cache": pool(slots=9)}, ValueError, "v_cache has shape (9, 2, 8), but should be [10, 2, Dv] like k_cache"),
    (move, {"dst_slots": i32(1)}, ValueError, "copy_slots: dst_slots has shape (1,), but should be [N] = (2,)"),
    (move, {"k_cache": torch.zeros(9, 4)}, ValueError, "k_cache has shape (9, 4), but should be [S, Hkv, D] or [L, S, Hkv, D]"),
    (transfer, {"dst_k": pool(dim=16)}, ValueError, "transfer_kv: dst_k has shape (10, 2, 16), but should be [S2, 2, 8] like src_k"),
    (transfer, {"dst_v": None}, ValueError, "transfer_kv: dst_v is None, but should be given, since the other side has values"),
    (transfer, {"src_k": pool(dtype=torch.float16)}, TypeError, "transfer_kv: dst_k has dtype float32, but should be the dtype of src_k"),
    (pages, {"page_size": 0}, ValueError, "page_table: page_size is 0, but should be at least 1"),
    (pages, {"out": torch.zeros(1, 3, dtype=torch.int32)}, ValueError, "page_table: out has shape (1, 3), but should be [B, M] = (2, M)"),
    (drafts, {"steps": 0}, ValueError, "draft_kv_indices: steps is 0, but should be at least 1"),
    (drafts, {"draft_slots": i32(1)}, ValueError, "draft_slots has shape (1,), but should be contiguous [B, topk, steps] = (2, 3, 2)"),
    (drafts, {"indptr": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, "(2, 3), but should be [steps, B * topk + 1] = (2, 7)"),
    (window, {"q_lens": i32(1)}, ValueError, "window_kv_indices: q_lens has shape (1,), but should be [B] = (2,)"),
    (extend_slots, {"page_size": -4}, ValueError, "alloc_extend: page_size is -4, but should be at least 1"),
    (extend_slots, {"last_slots": i32(1)}, ValueError, "alloc_extend: last_slots has shape (1,), but should be [B] = (2,)"),
    (decode_slots, {"free_pages": torch.arange(3)}, TypeError, "alloc_decode: free_pages has dtype int64, but should be int32"),
    (decode_slots, {"num_pages": i32(1, 2)}, ValueError, "alloc_decode: num_pages has shape (2,), but should be [1] = (1,)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "changes", "error", "sentence"), BAD, ids=[f"{case[0].__name__}-{'-'.join(case[1])}-{n}" for n, case in enumerate(BAD)]
)
def test_a_bad_argument_is_refused_in_one_sentence(
    function: Callable[..., None], changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=re.escape(sentence)) as refused:
        function(**changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_unchanged_arguments_are_accepted(function: Callable[..., None]) -> None:
    function()


def test_a_plan_lists_every_item_once_and_in_order(seed: int) -> None:
    lens = torch.randint(0, 2000, (17,), generator=torch.Generator().manual_seed(seed))
    lens[3] = 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).int()
    made = gk.plan_decode(indptr, 4, 2, 8, num_workers=5)
    schedule = made.schedule.tolist()
    version, batch, items, workers, split, max_q_len, room, window_left = schedule[:8]
    assert (version, batch, workers, split, max_q_len, room, window_left) == (2, 17, 5, 256, 1, items, -1)
    worker_indptr, rest = schedule[8 : 8 + workers + 1], schedule[8 + workers + 1 :]
    request_indptr, rest = rest[: batch + 1], rest[batch + 1 :]
    item_request, item_start = rest[:items], rest[items:]
    expected = [(request, start) for request, length in enumerate(lens.tolist()) for start in range(0, length, split)]
    assert list(zip(item_request, item_start)) == expected
    assert worker_indptr[0] == 0 and worker_indptr[-1] == items == made.num_items and worker_indptr == sorted(worker_indptr)
    assert [item_request[request_indptr[b] : request_indptr[b + 1]] for b in range(batch)] == [
        [b] * -(-n // split) for b, n in enumerate(lens.tolist())
    ]
    loads = [sum(min(split, int(lens[r]) - s) for r, s in expected[a:b]) for a, b in itertools.pairwise(worker_indptr)]
    assert max(loads) <= sum(loads) / workers + split, "work is spread evenly, up to one item"
    assert made.workspace.numel() == items * 4 * 10 <= gk.decode_workspace_size(17, int(lens.sum()), 4, 8)
