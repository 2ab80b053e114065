"""A double of FlashInfer on the CPU: the signatures of flashinfer-python 0.5.3, what its documentation asks of the arguments as assertions,
and the right results by plain PyTorch. As in the library, a wrapper for captured graphs computes from the buffers that it was given, and
`plan` fills them."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.plain_attention import attend

__version__ = "0.5.3"
plans: list[str] = []  # the calls of `plan`, for tests that count them


def _check_vector(name: str, tensor: torch.Tensor, length: int) -> None:
    assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous(), name
    assert len(tensor) == length, f"{name} has {len(tensor)} entries, not {length}"


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD" and workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20
        self._planned = False

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

    def _keep(self, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, last_page_len: torch.Tensor) -> None:
        batch = len(last_page_len)
        _check_vector("kv_indptr", kv_indptr, batch + 1)
        _check_vector("kv_indices", kv_indices, int(kv_indptr[-1]))
        _check_vector("last_page_len", last_page_len, batch)
        assert kv_indptr[0] == 0 and (kv_indptr[1:] > kv_indptr[:-1]).all(), "a row without keys"
        assert ((last_page_len >= 1) & (last_page_len <= self._page_size)).all()
        if getattr(self, "_fixed_batch_size", 0):
            assert batch == self._fixed_batch_size, "the batch size of a graph is fixed"
            assert len(kv_indices) <= len(self._indices)
            self._indptr.copy_(kv_indptr)
            self._last.copy_(last_page_len)
            self._indices[: len(kv_indices)].copy_(kv_indices)
        else:
            self._indptr, self._indices, self._last = kv_indptr.clone(), kv_indices.clone(), last_page_len.clone()
        self._planned = True

    def _specify(self, heads: int, kv_heads: int, dim: int, page_size: int, **options: Any) -> None:
        assert heads % kv_heads == 0 and isinstance(page_size, int)
        assert options["pos_encoding_mode"] == "NONE" and options["logits_soft_cap"] in (None, 0.0)
        self._heads, self._kv_heads, self._dim, self._page_size = heads, kv_heads, dim, page_size
        self._window_left, self._scale = options["window_left"], options["sm_scale"]
        self._q_dtype, self._kv_dtype = options["q_data_type"], options["kv_data_type"]
        assert isinstance(self._q_dtype, torch.dtype) and isinstance(self._scale, float)

    def _run(self, q: torch.Tensor, caches: Any, out: torch.Tensor, qo_indptr: list[int], causal: bool) -> torch.Tensor:
        assert self._planned, "run before plan"
        assert q.shape == (qo_indptr[-1], self._heads, self._dim) and q.stride(-1) == 1 and q.dtype == self._q_dtype
        assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
        k_pages, v_pages = caches
        for pages in caches:
            assert pages.shape[1:] == (self._page_size, self._kv_heads, self._dim) and pages.dtype == self._kv_dtype
        assert k_pages.stride() == v_pages.stride() and k_pages.stride(-1) == 1
        for row in range(len(qo_indptr) - 1):
            pages = self._indices[self._indptr[row] : self._indptr[row + 1]].long()
            assert ((pages >= 0) & (pages < len(k_pages))).all(), "a page that is not there"
            length = (len(pages) - 1) * self._page_size + int(self._last[row])
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in caches)
            mine = slice(qo_indptr[row], qo_indptr[row + 1])
            out[mine] = attend(q[mine], k, v, self._scale, causal=causal, window_left=self._window_left)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout)
        assert not use_cuda_graph and backend in ("auto", "fa2", "fa3")

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        self._specify(
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip
        self._keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        _check_vector("qo_indptr", qo_indptr, len(paged_kv_indptr))
        queries, keys = (indptr[1:] - indptr[:-1] for indptr in (qo_indptr, paged_kv_indptr))
        assert (queries >= 1).all() and (queries <= keys).all(), "more queries than keys"
        self._qo_indptr, self._causal = qo_indptr.tolist(), causal
        plans.append("prefill")

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
    ):
        return self._run(q, paged_kv_cache, out, self._qo_indptr, self._causal)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout)
        assert backend in ("auto", "fa2")
        self._tensor_cores, self._fixed_batch_size = use_tensor_cores, 0
        if use_cuda_graph:
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            _check_vector("paged_kv_indptr_buffer", paged_kv_indptr_buffer, self._fixed_batch_size + 1)
            assert paged_kv_indices_buffer.dtype == paged_kv_last_page_len_buffer.dtype == torch.int32
            self._indptr, self._indices, self._last = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        assert data_type is None, "data_type is deprecated"
        assert self._tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "no kernel without tensor cores"
        self._specify(
            num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip
        self._keep(indptr, indices, last_page_len)
        plans.append("decode")

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=1,
    ):
        return self._run(q, paged_kv_cache, out, list(range(len(self._last) + 1)), causal=False)
