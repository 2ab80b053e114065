"""Attention in plain PyTorch: gathers each request's keys and values and calls scaled_dot_product_attention. Slow, simple, independent of
gristmill_kernels; the oracle for other backends and the fallback where no kernels can be loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from gristmill.attention.base import AttentionBackend, AttentionLayer
from gristmill.attention.registry import register
from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import KVPool


class _Row(NamedTuple):
    """Queries [start, end) of the batch, the KV slots of the request's positions from `low` on, and the position of its first query."""

    start: int
    end: int
    slots: torch.Tensor
    low: int
    first: int


@register("torch_native")
class TorchNativeBackend(AttentionBackend):
    layer_ops = "torch"

    @classmethod
    def supports(cls, config: ModelConfig, device: str, dtype: torch.dtype) -> str | None:
        return None

    def prepare(self, batch: ForwardBatch, *, in_graph: bool = False) -> None:
        full = (self._rows(batch, batch.req_to_token, None), batch.out_slots.long())
        window = full
        if batch.window_req_to_token is not None and batch.window_out_slots is not None:
            window = (self._rows(batch, batch.window_req_to_token, self.config.sliding_window), batch.window_out_slots.long())
        batch.attention = (full, window)

    @staticmethod
    def _rows(batch: ForwardBatch, table: torch.Tensor, window: int | None) -> list[_Row]:
        rows, start = [], 0
        for slot, q_len, kv_len in zip(batch.host_req_slots.tolist(), batch.host_q_lens.tolist(), batch.host_kv_lens.tolist(), strict=True):
            first = kv_len - q_len
            low = 0 if window is None else max(0, first - window + 1)
            rows.append(_Row(start, start + q_len, table[slot, low:kv_len].long(), low, first))
            start += q_len
        return rows

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        assert isinstance(self.pool, KVPool) and k is not None and v is not None
        rows, out_slots = batch.attention[layer.window_left >= 0]
        k_cache, v_cache = self.pool.layer(layer.layer_id)
        k_cache[out_slots], v_cache[out_slots] = k, v
        for row in rows:
            keys, values = k_cache[row.slots].transpose(0, 1), v_cache[row.slots].transpose(0, 1)
            out[row.start : row.end] = scaled_dot_product_attention(
                q[row.start : row.end].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=self._mask(row, layer.window_left, q.device),
                scale=layer.sm_scale,
                enable_gqa=True,
            )[0].transpose(0, 1)

    forward_decode = forward_extend

    @staticmethod
    def _mask(row: _Row, window_left: int, device: torch.device) -> torch.Tensor | None:
        n_queries, n_keys = row.end - row.start, len(row.slots)
        if n_queries == 1 and (window_left < 0 or n_keys <= window_left + 1):
            return None
        query = torch.arange(row.first, row.first + n_queries, device=device)[:, None]
        key = torch.arange(row.low, row.low + n_keys, device=device)[None]
        mask = key <= query
        return mask if window_left < 0 else mask & (key >= query - window_left)
