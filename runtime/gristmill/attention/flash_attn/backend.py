"""The attention backend `flash_attn`: flash-attn's kernels over our pools seen as pages; keys and values are stored by ours."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gristmill.attention.base import AttentionLayer
from gristmill.attention.flash_attn import library, updaters
from gristmill.attention.flash_attn.library import FlashAttention2, FlashAttention3, Rows
from gristmill.attention.libraries import LibraryBackend
from gristmill.attention.registry import register
from gristmill.errors import OptionError
from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import KVPool, LatentPool
from gristmill.worker.staging import to_device

_MOST_HEAD_DIM = 256


class _Metadata(NamedTuple):
    out_slots: torch.Tensor
    rows: Rows


@register("flash_attn")
class FlashAttnBackend(LibraryBackend):
    """The library splits rows by what its own block tables allow, so a decode step needs nothing from the host and can be captured."""

    @classmethod
    def library(cls) -> FlashAttention2 | FlashAttention3:
        return library.find()

    @classmethod
    def why_not_head_dim(cls, head_dim: int) -> str | None:
        if head_dim % 8 == 0 and head_dim <= _MOST_HEAD_DIM:
            return None
        return f"head_dim {head_dim} is not a multiple of 8 up to {_MOST_HEAD_DIM}"

    @classmethod
    def supports_page_size(cls, page_size: int) -> str | None:
        return cls.library().why_not_pages(page_size)

    def __init__(self, config: ModelConfig, pool: KVPool | LatentPool, dtype: torch.dtype | None = None) -> None:
        super().__init__(config, pool, dtype)
        if isinstance(pool, LatentPool):
            return
        self._library = self.library()
        if (reason := self._library.why_not_pages(pool.page_size)) is not None:
            raise OptionError(f"attention backend flash_attn cannot read the KV pool: {reason}")
        self._page_size = pool.page_size
        self._families |= {"decode_attention": self._library.name, "extend_attention": self._library.name}

    def prepare(self, batch: ForwardBatch, *, in_graph: bool = False) -> None:
        batch.attention = {kind: self._metadata(batch, kind, in_graph) for kind in self.kinds}

    def _metadata(self, batch: ForwardBatch, kind: bool, in_graph: bool) -> _Metadata:
        table, before = self.table_of(batch, kind), self.before(kind)
        size = self._page_size
        lengths = updaters.visible(batch.q_lens, batch.kv_lens, size, before)
        if in_graph:
            pages = updaters.pages_of_any_decode(table.shape[1], size, before)
        else:
            pages = updaters.most_pages(batch.host_q_lens, batch.host_kv_lens, size, before)
        rows = Rows(updaters.block_table(table, batch.req_slots, size, pages, lengths.first_page), lengths.kv_lens)
        return _Metadata(self.out_slots_of(batch, kind), rows if batch.is_decode else self._cumulated(rows, batch, before))

    def _cumulated(self, rows: Rows, batch: ForwardBatch, before: int | None) -> Rows:
        queries, keys = updaters.cumulated(batch.host_q_lens, batch.host_kv_lens, self._page_size, before)
        cu_q, cu_k = to_device([queries, keys], self.device)
        return rows._replace(cu_q=cu_q, cu_k=cu_k, max_q=int(batch.host_q_lens.max()), max_k=int((keys[1:] - keys[:-1]).max()))

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        meta, caches = self._store_own(k, v, layer, batch)
        attend = self._library.decode if batch.is_decode else self._library.extend
        k_pages, v_pages = (cache.unflatten(0, (-1, self._page_size)) for cache in caches)
        out.copy_(attend(q, k_pages, v_pages, meta.rows, layer.sm_scale, layer.window_left))

    forward_decode = forward_extend
