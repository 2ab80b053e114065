"""Attention through gristmill_kernels' CPU ops; the default on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gristmill.attention.base import AttentionBackend, AttentionLayer
from gristmill.attention.registry import register
from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import KVPool
from gristmill_kernels import attention as _kernels  # noqa: F401 (registers the implementations)
from gristmill_kernels import dispatch


class _Metadata(NamedTuple):
    """CSR lists of the step: query offsets (extend only), KV offsets and KV slots per row.

    There is no decode plan: on the CPU threads take work items one by one, and the kernel lists the items itself faster than Python could.
    """

    qo_indptr: torch.Tensor | None
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor


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
        rows = len(batch.host_kv_lens)
        kv_indptr = torch.empty(rows + 1, dtype=torch.int32)
        kv_indices = torch.empty(int(batch.host_kv_lens.sum()), dtype=torch.int32)
        self._kv_indices(kv_indptr, kv_indices, batch.req_to_token, batch.req_slots, batch.kv_lens, None)
        qo_indptr = None
        if not batch.is_decode:
            qo_indptr = torch.empty(rows + 1, dtype=torch.int32)
            self._qo_indptr(qo_indptr, batch.q_lens)
        batch.attention = _Metadata(qo_indptr, kv_indptr, kv_indices)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        k_cache, v_cache = self.pool.layer(layer.layer_id)
        meta: _Metadata = batch.attention
        self._store(k_cache, v_cache, k, v, batch.out_slots)
        self._extend(
            out, None, q, k_cache, v_cache, meta.qo_indptr, meta.kv_indptr, meta.kv_indices,
            None, None, None, True, layer.sm_scale, 0.0, layer.window_left, 1.0, 1.0,
        )  # fmt: skip

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        k_cache, v_cache = self.pool.layer(layer.layer_id)
        meta: _Metadata = batch.attention
        self._store(k_cache, v_cache, k, v, batch.out_slots)
        self._decode(
            out, None, q, k_cache, v_cache, meta.kv_indptr, meta.kv_indices,
            None, None, None, layer.sm_scale, 0.0, layer.window_left, 1.0, 1.0,
        )  # fmt: skip

    def families(self) -> dict[str, str]:
        return self._families
