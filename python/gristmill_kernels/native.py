"""Which calls the native C++ kernels take on the CPU: one predicate per op, giving None or the reason it cannot; native_cuda.py has those
for GPUs. The kernels register themselves when loader.py or loader_gpu.py opens their library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill_kernels import dispatch, loader, loader_gpu, native_cuda
from gristmill_kernels.checks import FLOAT8_DTYPES, FLOAT_DTYPES, name_of
from gristmill_kernels.schema import AttentionKey, LinearKey, MlaKey, QuantKey, RopeKey, RopeStoreKey, StoreKey

MAX_HEAD_DIM = 576
Predicate = Callable[[Any], "str | None"]


def packed_weight_numel(n: int, k: int, dtype: torch.dtype) -> int:
    """Elements of the packed form of a weight [n, k]: panels of 32 columns, bfloat16 padded along K as csrc/gemm/layout.h says."""
    panels = (n + 31) // 32
    return panels * 32 * ((k + 31) // 32 * 32 if dtype == torch.bfloat16 else k)


def _any_key(key: Any) -> str | None:
    return None


def _float_key(key: Any) -> str | None:
    return None if key.dtype in FLOAT_DTYPES else f"dtype {name_of(key.dtype)} is not float32, float16 or bfloat16"


def _rope(key: RopeKey) -> str | None:
    return _float_key(key)


def _store(key: StoreKey | RopeStoreKey) -> str | None:
    return _cache(key.dtype, key.cache_dtype)


def _attention(key: AttentionKey) -> str | None:
    return _cache(key.dtype, key.cache_dtype) or _widths(head_dim=key.head_dim, head_dim_v=key.head_dim_v)


def _mla(key: MlaKey) -> str | None:
    return _cache(key.dtype, key.cache_dtype) or _widths(latent_dim=key.latent_dim, row=key.latent_dim + key.rope_dim)


def _cache(dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    if dtype not in FLOAT_DTYPES:
        return f"dtype {name_of(dtype)} is not float32, float16 or bfloat16"
    if cache_dtype is not dtype and cache_dtype not in FLOAT8_DTYPES:
        return f"the cache is {name_of(cache_dtype)}, neither {name_of(dtype)} like the rows nor an 8-bit float"
    return None


def _widths(**widths: int) -> str | None:
    for name, width in widths.items():
        if width % 8 or not 8 <= width <= MAX_HEAD_DIM:
            return f"{name} {width} is not a multiple of 8 from 8 to {MAX_HEAD_DIM}"
    return None


def _linear(key: LinearKey) -> str | None:
    return _float_key(key)


def _quant(key: QuantKey) -> str | None:
    if key.dtype not in FLOAT_DTYPES:
        return f"dtype {name_of(key.dtype)} is not float32, float16 or bfloat16"
    if key.out_dtype is not torch.int8 and key.out_dtype not in FLOAT8_DTYPES:
        return f"the codes are {name_of(key.out_dtype)}, neither int8 nor an 8-bit float"
    return None


PREDICATES: dict[str, Predicate] = {
    "rms_norm": _float_key,
    "fused_add_rms_norm": _float_key,
    "gemma_rms_norm": _float_key,
    "gemma_fused_add_rms_norm": _float_key,
    "layer_norm": _float_key,
    "apply_rope": _rope,
    "apply_rope_store_kv": _store,
    "silu_and_mul": _float_key,
    "gelu_and_mul": _float_key,
    "gelu_tanh_and_mul": _float_key,
    "swiglu_oai": _float_key,
    "store_kv": _store,
    "copy_slots": _any_key,
    "transfer_kv": _any_key,
    "kv_indices": _any_key,
    "qo_indptr": _any_key,
    "write_req_to_token": _any_key,
    "window_kv_indices": _any_key,
    "page_table": _any_key,
    "last_page_len": _any_key,
    "mla_indices": _any_key,
    "draft_kv_indices": _any_key,
    "alloc_extend": _any_key,
    "alloc_decode": _any_key,
    "decode_attention": _attention,
    "extend_attention": _attention,
    "ragged_attention": _attention,
    "merge_state": _float_key,
    "merge_states": _float_key,
    "mla_decode": _mla,
    "mla_store": _store,
    "greedy": _float_key,
    "sample": _float_key,
    "apply_logit_bias": _float_key,
    "apply_token_bitmask": _float_key,
    "apply_penalties": _float_key,
    "pack_weight": _linear,
    "packed_linear": _linear,
    "skinny_linear": _linear,
    "topk_softmax": _float_key,
    "topk_sigmoid": _float_key,
    "grouped_topk": _float_key,
    "align_block_size": _any_key,
    "quant_fp8": _quant,
    "per_token_quant_fp8": _quant,
    "per_token_quant_int8": _quant,
    "per_group_quant_fp8": _quant,
}


def _on_cpu(name: str, predicate: Predicate, key: Any) -> str | None:
    return loader.native_library().reason or _missing(name, "CPU") or predicate(key)


def _on_gpu(name: str, predicate: Predicate, key: Any) -> str | None:
    return loader_gpu.gpu_library().reason or _missing(name, "CUDA") or predicate(key)


def _missing(name: str, dispatch_key: str) -> str | None:
    """A library built before an op was added opens all the same."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"{dispatch.NAMESPACE}_native::{name}", dispatch_key):
        return None
    return f"the native {'GPU ' if dispatch_key == 'CUDA' else ''}library was built without {name}; build it again"


def _supports(name: str) -> Predicate:
    """Asks the predicate of the key's device type, once the library for it is open."""
    by_device = {"cpu": (_on_cpu, PREDICATES.get(name)), "cuda": (_on_gpu, native_cuda.PREDICATES.get(name))}

    def supports(key: Any) -> str | None:
        ask, predicate = by_device[key.device]
        assert predicate is not None, f"{name} is not offered for {key.device}"
        return ask(name, predicate, key)

    return supports


def register() -> None:
    """Offer every native op on the devices it was written for; a library is opened when the first of its ops is asked for."""
    for name in {**PREDICATES, **native_cuda.PREDICATES}:
        devices = tuple(device for device, table in (("cpu", PREDICATES), ("cuda", native_cuda.PREDICATES)) if name in table)
        dispatch.implement(name, "native", _supports(name), devices=devices)
