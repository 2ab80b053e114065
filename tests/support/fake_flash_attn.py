"""Doubles of flash-attn 2 (2.8) and 3 on the CPU: their documented signatures, what their documentation asks of the arguments as
assertions, and the right results by plain PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.support.plain_attention import attend


def _check_vector(name: str, tensor: torch.Tensor, length: int) -> None:
    assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous(), name
    assert len(tensor) == length, f"{name} has {len(tensor)} entries, not {length}"


def _attend_rows(q, k_cache, v_cache, table, starts, lengths, scale, causal, window) -> torch.Tensor:
    """Queries [starts[r], starts[r + 1]) over the first lengths[r] positions of the pages table[r]."""
    assert table.dtype == torch.int32 and table.dim() == 2 and len(table) == len(lengths) == len(starts) - 1
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1 and q.dtype == k_cache.dtype == v_cache.dtype
    pages, page_size, kv_heads, dim = k_cache.shape
    assert v_cache.shape == k_cache.shape and q.shape[-1] == dim and q.shape[-2] % kv_heads == 0 and dim % 8 == 0 and dim <= 256
    assert ((table >= 0) & (table < pages)).all(), "a page that is not there"
    assert window == (-1, -1) or (window[0] >= 0 and window[1] == 0)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    for row, length in enumerate(lengths):
        mine = slice(starts[row], starts[row + 1])
        assert 1 <= starts[row + 1] - starts[row] <= length <= table.shape[1] * page_size
        k, v = (cache[table[row].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[mine] = attend(q[mine], k, v, scale, causal=causal, window_left=window[0])
    return out


def _varlen_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    rows = len(block_table)
    assert k.shape[1] % 256 == 0, "page_block_size must be a multiple of 256"
    _check_vector("cu_seqlens_q", cu_seqlens_q, rows + 1)
    _check_vector("cu_seqlens_k", cu_seqlens_k, rows + 1)
    queries, keys = (cu[1:] - cu[:-1] for cu in (cu_seqlens_q, cu_seqlens_k))
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0 and cu_seqlens_q[-1] == len(q)
    assert max_seqlen_q == queries.max() and max_seqlen_k == keys.max()
    return _attend_rows(q, k, v, block_table, cu_seqlens_q.tolist(), keys.tolist(), softmax_scale, causal, window_size)


def _with_kvcache_2(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    assert k is None and v is None and k_cache.shape[1] % 256 == 0, "page_block_size must be a multiple of 256"
    return _decode(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal, window_size)


def _with_kvcache_3(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    assert k is None and v is None
    if cu_seqlens_q is None:
        return _decode(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, causal, window_size)
    _check_vector("cu_seqlens_q", cu_seqlens_q, len(page_table) + 1)
    _check_vector("cache_seqlens", cache_seqlens, len(page_table))
    assert max_seqlen_q == (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max() and cu_seqlens_q[-1] == len(q)
    starts, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    return _attend_rows(q, k_cache, v_cache, page_table, starts, lengths, softmax_scale, causal, window_size)


def _decode(q, k_cache, v_cache, lengths, table, scale, causal, window) -> torch.Tensor:
    batch, n_queries = q.shape[:2]
    assert q.dim() == 4 and n_queries == 1
    _check_vector("cache_seqlens", lengths, batch)
    starts = list(range(batch + 1))
    return _attend_rows(q.squeeze(1), k_cache, v_cache, table, starts, lengths.tolist(), scale, causal, window).unsqueeze(1)


VERSION_2 = SimpleNamespace(__version__="2.8.3", flash_attn_varlen_func=_varlen_2, flash_attn_with_kvcache=_with_kvcache_2)
VERSION_3 = SimpleNamespace(flash_attn_with_kvcache=_with_kvcache_3)
