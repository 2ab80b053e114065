"""Which calls the native GPU kernels (csrc/**/*.cu) take: one predicate per op, giving None or the reason it cannot. The kernels register
themselves when loader_gpu.py opens their library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill_kernels.checks import FLOAT8_DTYPES, FLOAT_DTYPES, name_of
from gristmill_kernels.schema import AttentionKey, QuantKey, RopeStoreKey, StoreKey


def _any_key(key: Any) -> str | None:
    return None


def _float_key(key: Any) -> str | None:
    return None if key.dtype in FLOAT_DTYPES else f"dtype {name_of(key.dtype)} is not float32, float16 or bfloat16"


def _store(key: StoreKey | RopeStoreKey) -> str | None:
    return _cache(key.dtype, key.cache_dtype)


def _cache(dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    if dtype not in FLOAT_DTYPES:
        return f"dtype {name_of(dtype)} is not float32, float16 or bfloat16"
    if cache_dtype is not dtype and cache_dtype not in FLOAT8_DTYPES:
        return f"the cache is {name_of(cache_dtype)}, neither {name_of(dtype)} like the rows nor an 8-bit float"
    return None


def _quant(key: QuantKey) -> str | None:
    if key.dtype not in FLOAT_DTYPES:
        return f"dtype {name_of(key.dtype)} is not float32, float16 or bfloat16"
    if key.out_dtype is not torch.int8 and key.out_dtype not in FLOAT8_DTYPES:
        return f"the codes are {name_of(key.out_dtype)}, neither int8 nor an 8-bit float"
    return None


_MMA_WIDTHS = (64, 128, 256)
_MMA_GROUP = 16


def _decode(key: AttentionKey) -> str | None:
    """On a GPU only what the tensor-core kernel takes; the general one is slower than Triton's, and correct."""
    refusal = _cache(key.dtype, key.cache_dtype)
    if refusal is None and (key.head_dim > 576 or key.head_dim_v > 576 or key.head_dim_v % 4):
        refusal = f"head_dim {key.head_dim} and {key.head_dim_v} are not at most 576, the latter a multiple of 4"
    if refusal is not None or key.device == "cpu":  # the emulation
        return refusal
    if key.dtype is torch.float32 or key.cache_dtype is not key.dtype:
        return f"Triton is faster for {name_of(key.dtype)} over a cache of {name_of(key.cache_dtype)}"
    if key.head_dim != key.head_dim_v or key.head_dim not in _MMA_WIDTHS:
        return f"Triton is faster for head_dim {key.head_dim} and {key.head_dim_v}"
    if key.num_qo_heads > _MMA_GROUP * key.num_kv_heads:
        return f"Triton is faster for more than {_MMA_GROUP} query heads per KV head"
    return None


# rows: norm, rope, activation, kvcache
ROWS: dict[str, Callable[[Any], str | None]] = {
    "rms_norm": _float_key,
    "fused_add_rms_norm": _float_key,
    "gemma_rms_norm": _float_key,
    "gemma_fused_add_rms_norm": _float_key,
    "layer_norm": _float_key,
    "apply_rope": _float_key,
    "apply_rope_store_kv": _store,
    "silu_and_mul": _float_key,
    "gelu_and_mul": _float_key,
    "gelu_tanh_and_mul": _float_key,
    "swiglu_oai": _float_key,
    "store_kv": _store,
    "mla_store": _store,
    "copy_slots": _any_key,
    "transfer_kv": _any_key,
    "merge_state": _float_key,
    "merge_states": _float_key,
}

# indices and routing
INDICES: dict[str, Callable[[Any], str | None]] = {
    "kv_indices": _any_key,
    "window_kv_indices": _any_key,
    "draft_kv_indices": _any_key,
    "qo_indptr": _any_key,
    "write_req_to_token": _any_key,
    "page_table": _any_key,
    "mla_indices": _any_key,
    "last_page_len": _any_key,
    "alloc_extend": _any_key,
    "alloc_decode": _any_key,
}

# sampling
LOGITS: dict[str, Callable[[Any], str | None]] = {
    "greedy": _float_key,
    "sample": _float_key,
    "apply_penalties": _float_key,
    "apply_logit_bias": _float_key,
    "apply_token_bitmask": _float_key,
}

# attention
ATTENTION: dict[str, Callable[[Any], str | None]] = {"decode_attention": _decode}

# activations as 8-bit numbers
QUANT: dict[str, Callable[[Any], str | None]] = {
    "quant_fp8": _quant,
    "per_token_quant_fp8": _quant,
    "per_token_quant_int8": _quant,
    "per_group_quant_fp8": _quant,
}

# skinny linear layers
LINEAR: dict[str, Callable[[Any], str | None]] = {"skinny_linear": _float_key}

# mixture of experts
MOE: dict[str, Callable[[Any], str | None]] = {
    "topk_softmax": _float_key,
    "topk_sigmoid": _float_key,
    "grouped_topk": _float_key,
    "align_block_size": _any_key,
}

PREDICATES = {**ROWS, **INDICES, **LOGITS, **ATTENTION, **LINEAR, **MOE, **QUANT}
