"""Attention through gristmill_kernels' CPU ops; the default on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from gristmill.attention.base import AttentionBackend, AttentionLayer
from gristmill.attention.registry import register
from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import KVPool
from gristmill_kernels import attention as _kernels  # noqa: F401 (registers the implementations)
from gristmill_kernels import dispatch

# The kernels sum keys in chunks from the start of a row's list. Lists that start at a multiple of the chunk keep the chunks at the same
# positions, so a row comes out the same bit for bit wherever its list starts: in a decode step, in a chunk, with a window pool or without.
_LIST_ALIGN = 512


class _Metadata(NamedTuple):
    """CSR lists of the step: query offsets (extend only), KV offsets and KV slots per row, and the slots of the step's own tokens.

    There is no decode plan: on the CPU threads take work items one by one, and the kernel lists the items itself faster than Python could.
    """

    qo_indptr: torch.Tensor | None
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    out_slots: torch.Tensor


@register("cpu")
class CpuBackend(AttentionBackend):
    @classmethod
    def supports(cls, config: ModelConfig, device: str, dtype: torch.dtype) -> str | None:
        if device != "cpu":
            return f"it runs on the CPU, not on {device}"
        if config.head_dim % 8 or config.head_dim > 576:
            return f"head_dim {config.head_dim} is not a multiple of 8 up to 576"
        return None

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        super().__init__(config, pool)
        dtype, dim = pool.dtype, config.head_dim
        attention = ("cpu", dtype, dtype, dim, dim, config.num_heads, config.num_kv_heads)
        keys = {
            "store_kv": ("cpu", dtype, dtype),
            "decode_attention": attention,
            "extend_attention": attention,
            "kv_indices": ("cpu",),
            "qo_indptr": ("cpu",),
        }
        self._families = {name: dispatch.chosen_family(name, key) for name, key in keys.items()}
        self._store, self._decode, self._extend, self._kv_indices, self._qo_indptr = (
            dispatch.select(name, key) for name, key in keys.items()
        )

    def prepare(self, batch: ForwardBatch, *, in_graph: bool = False) -> None:
        qo_indptr = None
        if not batch.is_decode:
            qo_indptr = torch.empty(len(batch.host_q_lens) + 1, dtype=torch.int32)
            self._qo_indptr(qo_indptr, batch.q_lens)
        full = self._lists(batch, qo_indptr, batch.req_to_token, batch.out_slots, None)
        window = full
        if batch.window_req_to_token is not None and batch.window_out_slots is not None:
            assert self.config.sliding_window is not None
            starts = batch.host_kv_lens - batch.host_q_lens - (self.config.sliding_window - 1)
            starts = np.maximum(starts, 0) // _LIST_ALIGN * _LIST_ALIGN
            window = self._lists(batch, qo_indptr, batch.window_req_to_token, batch.window_out_slots, starts)
        batch.attention = (full, window)

    def _lists(
        self, batch: ForwardBatch, qo_indptr: torch.Tensor | None, table: torch.Tensor, out_slots: torch.Tensor, starts: np.ndarray | None
    ) -> _Metadata:
        """The slots of `table` from position `starts` of each row on (None: from 0)."""
        counts = batch.host_kv_lens if starts is None else batch.host_kv_lens - starts
        kv_indptr = torch.empty(len(counts) + 1, dtype=torch.int32)
        kv_indices = torch.empty(int(counts.sum()), dtype=torch.int32)
        first = None if starts is None else torch.from_numpy(starts)
        self._kv_indices(kv_indptr, kv_indices, table, batch.req_slots, batch.kv_lens, first)
        return _Metadata(qo_indptr, kv_indptr, kv_indices, out_slots)

    def _store_own(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> _Metadata:
        """Write the step's own keys and values to the layer's pool; returns the lists of that pool."""
        meta: _Metadata = batch.attention[layer.window_left >= 0]
        k_cache, v_cache = self.pool.layer(layer.layer_id)
        self._store(k_cache, v_cache, k, v, meta.out_slots)
        return meta

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        meta = self._store_own(k, v, layer, batch)
        self._extend(
            out, None, q, *self.pool.layer(layer.layer_id), meta.qo_indptr, meta.kv_indptr, meta.kv_indices,
            None, None, None, True, layer.sm_scale, 0.0, layer.window_left, 1.0, 1.0,
        )  # fmt: skip

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        meta = self._store_own(k, v, layer, batch)
        self._decode(
            out, None, q, *self.pool.layer(layer.layer_id), meta.kv_indptr, meta.kv_indices,
            None, None, None, layer.sm_scale, 0.0, layer.window_left, 1.0, 1.0,
        )  # fmt: skip

    def families(self) -> dict[str, str]:
        return self._families
